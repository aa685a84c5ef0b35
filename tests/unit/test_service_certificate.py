"""The certificate of a log server or a repository: clients use no service whose certificate lacks its role."""

import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support.log_entries import append_to
from tests.support.tls import HOSTS, SERVER, Authority, TlsLog, replace_files
from tests.support.waiting import wait_for
from walsender_bridge.change_log import authorization, connection, listener, service_certificate
from walsender_bridge.change_log.client import LogClient, ReplicaClient
from walsender_bridge.change_log.connection import connect
from walsender_bridge.change_log.log_server_messages import CreateRequest
from walsender_bridge.change_log.protocol import START, ReplicaReport
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.repository.log_server_link import LogServerLink, LogServers
from walsender_bridge.cli.up import preflight
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.doctor import parts as doctor_parts
from walsender_bridge.doctor.finding import Severity
from walsender_bridge.errors import (
    ConfigError,
    NotLeaderError,
    SilentError,
    TusklineError,
    UnreachableError,
    UntrustedServiceError,
)
from walsender_bridge.observability import certificate_view
from walsender_bridge.runtime.certificate_holder import Role, identity
from walsender_bridge.runtime.tls_files import TlsFiles

REPORT = ReplicaReport("a", "shop", "log", 1, 0, 1, 0, START, 1)


@pytest.fixture
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC sends no call again: a test that expects many refusals would wait for that."""
    monkeypatch.setattr(connection, "_ATTEMPTS", "{}")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def impostor(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ReplicaServer]:
    """A log server whose certificate is a safekeeper's: it does not look at its own, as one of an earlier version."""
    files = authority.issue("safekeeper", hosts=HOSTS)
    with monkeypatch.context() as patch:
        patch.setattr(listener, "_load", lambda files, *_: files.load(server=True))
        server = ReplicaServer(tmp_path / "impostor", "127.0.0.1:0", tls=files)
    yield server
    server.stop()


def test_37_no_client_uses_a_log_server_whose_certificate_is_not_one(
    authority: Authority, impostor: ReplicaServer
) -> None:
    own = authority.issue(*SERVER, "operator", hosts=HOSTS)
    with (
        ReplicaClient(impostor.address, tls=own, timeout=5) as client,
        closing(LogServerLink(impostor.address, own)) as link,
    ):
        for use in (
            lambda: client.stream_status("shop"),
            lambda: client.read_batch("shop", 1, 2),
            lambda: append_to(client, "shop", 1),
            link.report,
            lambda: connect(impostor.address, own, streams=["shop"]),
        ):
            with pytest.raises(UntrustedServiceError, match="lacks the role log-server") as caught:
                use()
            assert "--host 127.0.0.1" in caught.value.repair


def test_37_a_log_server_is_no_repository(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue("log-server", hosts=HOSTS)
    server = ReplicaServer(tmp_path / "one", "127.0.0.1:0", tls=files)
    try:
        with (
            LogClient(server.address, tls=authority.issue("operator"), timeout=5) as log,
            pytest.raises(UntrustedServiceError, match="lacks the role repository"),
        ):
            log.status()
    finally:
        server.stop()


def test_37_a_log_server_serves_the_streams_of_its_certificate_alone(
    authority: Authority, tmp_path: Path
) -> None:
    files = authority.issue("log-server", streams=("shop",), hosts=HOSTS)
    server = ReplicaServer(tmp_path / "one", "127.0.0.1:0", tls=files)
    try:
        with ReplicaClient(server.address, tls=authority.issue("operator"), timeout=5) as client:
            with pytest.raises(UntrustedServiceError, match="does not name stream 'bank'"):
                client.stream_status("bank")
            with pytest.raises(UntrustedServiceError, match="does not name stream 'bank'"):
                client.read_batch("bank", 1, 2)
            with pytest.raises(UntrustedServiceError, match="does not name stream 'bank'"):
                append_to(client, "bank", 1)
    finally:
        server.stop()


def test_37_a_stream_that_a_certificate_does_not_name_stops_no_other(
    authority: Authority, tmp_path: Path
) -> None:
    files = authority.issue("log-server", streams=("shop",), hosts=HOSTS)
    server = ReplicaServer(tmp_path / "one", "127.0.0.1:0", tls=files)
    try:
        with closing(LogServerLink(server.address, authority.issue("repository"))) as link:
            with link._connection.use() as service:
                pass
            own = [replace(REPORT, stream=each) for each in ("old", "shop")]
            assert [each.stream for each in link._own(service, "a", own)] == ["shop"]
            assert "does not name stream 'old'" in link.refused["old"].what
            assert "--stream" in link.refused["old"].repair
            assert "shop" not in link.refused
            assert service.holder is not None
            every = replace(service.holder, streams=frozenset({"*"}))
            assert len(link._own(replace(service, holder=every), "a", own)) == 2
            assert not link.refused, "the new certificate names it"
    finally:
        server.stop()


def test_37_a_certificate_of_another_host_is_named_and_not_a_missing_service(
    authority: Authority, tmp_path: Path
) -> None:
    server = ReplicaServer(
        tmp_path / "one", "127.0.0.1:0", tls=authority.issue("log-server", hosts=("db-9",))
    )
    own = authority.issue(*SERVER, hosts=HOSTS)
    try:
        with closing(LogServerLink(server.address, own)) as link:
            with pytest.raises(
                UntrustedServiceError, match=r"not valid for '127\.0\.0\.1'"
            ) as caught:
                link.report()
            link.lost(caught.value)
            assert link.problem is caught.value
    finally:
        server.stop()


@pytest.mark.usefixtures("no_retries")
def test_37_a_service_that_is_replaced_by_another_part_is_noticed(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC connects again by itself, and refuses the other certificate; a look then says what is wrong with it."""
    log = TlsLog(tmp_path / "log", authority)
    try:
        with log.replica() as client:
            client.stream_status("shop")
            monkeypatch.setattr(listener, "POLL", 0.05)
            monkeypatch.setattr(listener, "_load", lambda files, *_: files.load(server=True))
            former = log.log_server._listener._service
            replace_files(log.files, authority.issue("safekeeper", "repository", hosts=HOSTS))

            def refused() -> bool:
                try:
                    client.stream_status("shop")
                except UnreachableError as error:
                    return "lacks the role log-server" in error.what
                return False

            wait_for(refused, 20, "the new certificate's roles are looked at")
            assert log.log_server._listener._service is not former
    finally:
        log.stop()


def test_37_a_certificate_of_other_roles_is_taken_once_it_was_looked_at(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "POLL", 0.05)
    log = TlsLog(tmp_path / "log", authority)
    try:
        with (
            log.replica() as client,
            ReplicaClient(client.address, tls=log.operator, timeout=1) as hasty,
            closing(LogServerLink(client.address, log.files)) as link,
        ):
            client.stream_status("shop")
            wait_for(lambda: _answered(hasty), 20, "an answer within its deadline")
            assert link.report()
            former = log.log_server._listener._service
            replace_files(log.files, authority.issue(*SERVER, "monitor", hosts=HOSTS))
            wait_for(lambda: log.log_server._listener._service is not former, 20, "it is replaced")

            def answered() -> bool:
                with suppress(UnreachableError):
                    return client.stream_status("shop").end_offset > 1 and bool(link.report())
                return False

            wait_for(answered, 30, "the new certificate was looked at")
            wait_for(
                lambda: _answered(hasty), 30, "also if gRPC tries for longer than a deadline lasts"
            )
    finally:
        log.stop()


def _answered(client: ReplicaClient) -> bool:
    with suppress(UnreachableError, SilentError):
        return client.stream_status("shop").end_offset > 1
    return False


def test_37_a_service_does_not_run_with_a_certificate_of_another_part(
    authority: Authority, tmp_path: Path
) -> None:
    for roles, said in (
        (("repository",), "lacks the role log-server"),
        (("reader",), "do not fit"),
    ):
        files = authority.issue(*roles, hosts=HOSTS if "repository" in roles else ())
        with pytest.raises(ConfigError, match=said):
            ReplicaServer(tmp_path / roles[0], "127.0.0.1:0", tls=files)


def test_37_one_that_hangs_or_is_not_there_is_waited_for_no_longer_than_asked(
    authority: Authority,
) -> None:
    own = authority.issue("operator")
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        address = f"grpc+tls://127.0.0.1:{hangs.getsockname()[1]}"
        began = time.monotonic()
        with ReplicaClient(address, tls=own, timeout=0.5) as client, pytest.raises(SilentError):
            client.stream_status("shop")
        assert time.monotonic() - began < 5
    address = f"grpc+tls://127.0.0.1:{free_port()}"
    with ReplicaClient(address, tls=own, timeout=5) as client, pytest.raises(UnreachableError):
        client.stream_status("shop")


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Once it is set, name servers do not answer Python; the test's end lets the threads go that wait for them."""
    out, over, known = threading.Event(), threading.Event(), socket.getaddrinfo

    def resolve(host: str, *args: Any, **options: Any) -> Any:
        if out.is_set() and host == "localhost" and not options.get("flags"):
            over.wait(8)
        return known(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    yield out
    over.set()


def test_37_no_call_of_an_established_connection_waits_for_a_name_server(
    authority: Authority, tmp_path: Path, no_names: threading.Event
) -> None:
    log = TlsLog(tmp_path / "log", authority)
    address = log.log_server.address.replace("127.0.0.1", "localhost")
    try:
        with ReplicaClient(address, tls=log.operator, timeout=5) as client:
            client.stream_status("shop")
            no_names.set()
            began = time.monotonic()
            # As if gRPC had not been able to connect for a moment.
            client._connection._lost = UnreachableError("it was away")
            for _ in range(10):
                client.stream_status("shop")
            assert time.monotonic() - began < 4
            looks = [each for each in threading.enumerate() if each.name == "look"]
            assert len(looks) == 1, "no more than one at a time"
        with (
            pytest.raises(SilentError),
            ReplicaClient(address, tls=log.operator, timeout=0.5) as one,
        ):
            one.stream_status("shop")
        assert time.monotonic() - began < 7, "the first look has one deadline"
    finally:
        log.stop()


def test_37_a_dead_address_of_a_host_does_not_take_the_time_of_the_next(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue that is full drops packets, as a route that leads nowhere."""
    server = ReplicaServer(
        tmp_path / "one", "127.0.0.1:0", tls=authority.issue("log-server", hosts=HOSTS)
    )
    port = int(server.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", 0), backlog=0) as dead, ExitStack() as stack:
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(dead.getsockname())
        places = [dead.getsockname(), ("127.0.0.1", port)]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        own, began = authority.issue("operator"), time.monotonic()
        try:
            its = service_certificate.holder(f"grpc+tls://localhost:{port}", own, within=3.0)
        finally:
            server.stop()
    assert Role.LOG_SERVER in its.roles
    assert time.monotonic() - began < 3


def test_37_the_time_of_a_look_is_no_silence_of_a_log_server(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = threading.Event()
    files = authority.issue(*SERVER, hosts=HOSTS)
    known = service_certificate.holder

    def slow(*args: Any, **options: Any) -> Any:
        assert looks.wait(20)
        return known(*args, **options)

    monkeypatch.setattr(service_certificate, "holder", slow)
    server = ReplicaServer(tmp_path / "one", "127.0.0.1:0", tls=files)
    servers = LogServers([server.address], files)
    try:
        servers.ask(within=0.1)
        [link] = servers
        assert link.asked is not None
        assert link.owes(time.monotonic() + 3) is None
        looks.set()
        wait_for(lambda: servers.ask(within=0.1) == [] and link.heard, 20, "it has answered")
    finally:
        looks.set()
        servers.close()
        server.stop()


class Shows(socketserver.ThreadingTCPServer):
    """Shows a certificate, whatever its days are, and does nothing else."""

    daemon_threads = True

    def __init__(self, tls: TlsFiles) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.address = f"grpc+tls://127.0.0.1:{self.server_address[1]}"
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.set_alpn_protocols(["h2"])
        self.show(tls)
        self.asked_for: list[str | None] = []

    def show(self, tls: TlsFiles) -> None:
        """Show this certificate from the next connection on."""
        self._tls.load_cert_chain(tls.certificate, tls.key)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands with a client."""
        with suppress(OSError), self._tls.wrap_socket(request, server_side=True) as one:
            self.asked_for.append(one.selected_alpn_protocol())

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Relay(socketserver.ThreadingTCPServer):
    """Passes looks on to one service, and gRPC's connections, which ask for a service's name, to another one.

    The kernel closes what is open when it is led elsewhere.
    """

    daemon_threads = True

    def __init__(self, looks: str, calls: str) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.address = f"grpc+tls://127.0.0.1:{self.server_address[1]}"
        self.looks, self.calls = looks, calls
        self.open: list[socket.socket] = []

    def lead(self, looks: str, calls: str) -> None:
        """Lead what follows to these services, and end what there is."""
        self.looks, self.calls = looks, calls
        while self.open:
            with suppress(OSError):
                self.open.pop().shutdown(socket.SHUT_RDWR)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Pass the bytes of a connection on, in both directions."""
        del client_address
        hello = b""
        while len(hello) < 5 or len(hello) < 5 + int.from_bytes(hello[3:5], "big"):
            hello = request.recv(1 << 14, socket.MSG_PEEK)
            if not hello:
                return
        place = self.calls if b".tuskline" in hello else self.looks
        with socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2]))) as other:
            self.open += [request, other]
            back = threading.Thread(target=_pass_on, args=(other, request), daemon=True)
            back.start()
            _pass_on(request, other)
            back.join()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.lead("", "")
        self.shutdown()
        self.server_close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while some := source.recv(1 << 16):
            target.sendall(some)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("roles", "streams", "hosts"),
    [
        (("monitor", "reader", "safekeeper"), ("*",), HOSTS),
        (("log-server",), ("bank",), HOSTS),
        (("log-server", "writer"), ("*",), HOSTS),
        (("log-server",), ("*",), ("localhost", "127-0-0-1")),
    ],
)
@pytest.mark.usefixtures("no_retries")
def test_37_a_relay_that_passes_looks_on_serves_no_call(
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    roles: tuple[str, ...],
    streams: tuple[str, ...],
    hosts: tuple[str, ...],
) -> None:
    """Whoever has the port and another certificate of the authority and the host: each of gRPC's connections is refused."""
    own = authority.issue("log-server", "repository", "writer", "operator")
    real = ReplicaServer(
        tmp_path / "real", "127.0.0.1:0", tls=authority.issue("log-server", hosts=HOSTS)
    )
    monkeypatch.setattr(listener, "_load", lambda files, *_: files.load(server=True))
    thief = ReplicaServer(
        tmp_path / "thief",
        "127.0.0.1:0",
        tls=authority.issue(*roles, streams=streams, hosts=hosts),
    )
    try:
        for each in (real, thief):
            each.create(CreateRequest("shop", "log"))
            each.create(CreateRequest("bank", "log"))
        with (
            Relay(real.address, real.address) as relay,
            ReplicaClient(relay.address, tls=own, timeout=5) as client,
            closing(LogServerLink(relay.address, own)) as link,
        ):
            uses: list[Callable[[], object]] = [
                lambda: client.stream_status("bank"),
                lambda: append_to(client, "bank", 1),
                link.report,
            ]

            def named() -> bool:
                try:
                    link.report()
                except UntrustedServiceError as error:
                    return "not the one" in error.what
                except UnreachableError:
                    return False
                raise AssertionError("the thief was asked")

            assert client.stream_status("bank").end_offset == 1
            link.report()
            assert link.log_server_id == real.log_server_id, "what it passes on whole is served"
            for _ in range(2):  # and again with a look in between
                relay.lead(looks=real.address, calls=thief.address)
                for use in uses:
                    with pytest.raises(TusklineError):
                        use()
                wait_for(named, 20, "what is wrong there is named")
            relay.lead(looks=real.address, calls=real.address)

            def served() -> bool:
                with suppress(UnreachableError):
                    return link.report() is not None
                return False

            wait_for(served, 20, "the genuine one is used again")
            assert link.log_server_id == real.log_server_id
    finally:
        thief.stop()
        real.stop()


@pytest.mark.usefixtures("no_retries")
def test_37_a_connection_that_stands_outlasts_the_end_of_a_certificate(
    authority: Authority, tmp_path: Path
) -> None:
    """Nobody looks at a certificate while gRPC is connected, and gRPC does not look at it again."""
    files = authority.expired("log-server", hosts=HOSTS)
    own = authority.issue("log-server", "operator", hosts=HOSTS)
    server = ReplicaServer(tmp_path / "one", "127.0.0.1:0", tls=own)
    try:
        with (
            Relay(server.address, server.address) as relay,
            Shows(files) as over,
            ReplicaClient(relay.address, tls=own, timeout=5) as client,
        ):
            server.create(CreateRequest("shop", "log"))
            client.stream_status("shop")
            # From now on who connects is shown a certificate that is over.
            relay.looks = relay.calls = over.address
            client.stream_status("shop")
            assert not over.asked_for
            relay.lead(over.address, over.address)

            def refused() -> bool:
                try:
                    client.stream_status("shop")
                except UnreachableError as error:
                    return "expired" in error.what
                return False

            wait_for(refused, 20, "it is named once the connection has ended")
    finally:
        server.stop()


def test_37_a_look_speaks_the_protocol_that_grpc_speaks(authority: Authority) -> None:
    files = authority.issue("log-server", hosts=HOSTS)
    with Shows(files) as shows:
        service_certificate.holder(shows.address, files, within=5)
        wait_for(lambda: shows.asked_for == ["h2"], 10, "the look has named it")


def test_37_a_certificate_that_was_refused_is_not_looked_at_for_a_second(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_REFUSED", 60.0)
    with (
        Shows(authority.issue("safekeeper", hosts=HOSTS)) as shows,
        closing(
            connection.Connection(
                shows.address, authority.issue("operator"), role=Role.LOG_SERVER, within=5
            )
        ) as its,
    ):
        for _ in range(5):
            with pytest.raises(UntrustedServiceError, match="lacks the role log-server"), its.use():
                pass
        wait_for(lambda: len(shows.asked_for) == 1, 10, "it was looked at")
        monkeypatch.setattr(connection, "_REFUSED", 0.0)
        with pytest.raises(UntrustedServiceError), its.use():
            pass
        wait_for(lambda: len(shows.asked_for) == 2, 10, "it was looked at again")


def test_37_a_call_about_a_stream_that_was_lacking_looks_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a call never gets to gRPC, whose failures are otherwise the reason for another look."""
    monkeypatch.setattr(connection, "_REFUSED", 60.0)
    with (
        Shows(authority.issue("log-server", streams=("bank",), hosts=HOSTS)) as shows,
        closing(
            connection.Connection(
                shows.address, authority.issue("operator"), role=Role.LOG_SERVER, within=5
            )
        ) as its,
    ):
        for _ in range(3):
            with its.use(["bank"]):
                pass
            with (
                pytest.raises(UntrustedServiceError, match="name stream 'shop'"),
                its.use(["shop"]),
            ):
                pass
        # The server may notice a little later than its client that they have shaken hands.
        wait_for(lambda: shows.asked_for, 10, "it was looked at")
        assert len(shows.asked_for) == 1, "not for each call"
        shows.show(authority.issue("log-server", streams=("bank", "shop"), hosts=HOSTS))
        monkeypatch.setattr(connection, "_REFUSED", 0.0)
        with its.use(["shop"]) as service:
            assert service.holder is not None
            assert service.holder.streams == {"bank", "shop"}


def test_37_a_certificate_that_is_refused_says_more_than_who_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several repositories, the leader's certificate may be the reason."""
    untrusted, follows = UntrustedServiceError("lacks the role"), NotLeaderError("follows")
    for errors in ([untrusted, follows], [follows, untrusted]):
        with LogClient("grpc://127.0.0.1:1,127.0.0.1:2", timeout=5) as log:
            for one, error in zip(log._connections, errors, strict=True):
                monkeypatch.setattr(one, "use", partial(_raise, error))
            with pytest.raises(UntrustedServiceError):
                log.status()


def _raise(error: Exception, *_: object) -> None:
    raise error


def test_37_a_connection_that_is_closed_looks_no_more(authority: Authority, tmp_path: Path) -> None:
    server = ReplicaServer(
        tmp_path / "one", "127.0.0.1:0", tls=authority.issue("log-server", hosts=HOSTS)
    )
    its = connection.Connection(
        server.address, authority.issue("operator"), role=Role.LOG_SERVER, within=5
    )
    try:
        with its.use():
            pass
        its.close()
        its._lost = UnreachableError("it was away")
        with suppress(TusklineError), its.use():
            pass
        wait_for(
            lambda: all(each.name != "look" for each in threading.enumerate()), 10, "no look runs"
        )
    finally:
        server.stop()


def test_37_up_and_doctor_name_the_role_that_a_part_of_the_machine_lacks(
    authority: Authority, tmp_path: Path
) -> None:
    def settings(tls: TlsFiles) -> Path:
        file = tmp_path / "tuskline.toml"
        file.write_text(
            '[machine]\ndata_dir = "state"\nparts = ["log-server"]\n'
            f'[[log_server]]\ndata_dir = "replicas"\nlisten = "127.0.0.1:{free_port()}"\n'
            f'[tls]\nca = "{tls.ca}"\ncertificate = "{tls.certificate}"\nkey = "{tls.key}"\n'
        )
        return file

    for tls, said in (
        (authority.issue("safekeeper", hosts=HOSTS), "lacks the role log-server"),
        (authority.issue("log-server"), "names no host"),
        (authority.issue("reader"), "lacks the role log-server"),
    ):
        its = load_config(settings(tls))
        with pytest.raises(ConfigError, match=said) as caught:
            preflight(its)
        assert "--role" in caught.value.repair
        (found,) = doctor_parts.of_certificate(its)
        assert found.severity is Severity.ERROR
        assert said in found.what
        seen = certificate_view.observe(its)
        assert seen is not None
        assert seen.is_over(time.time()), "status fails"
    its = load_config(settings(authority.issue("log-server", hosts=HOSTS)))
    preflight(its)
    (found,) = doctor_parts.of_certificate(its)
    assert found.severity is Severity.OK


def test_every_service_has_a_role_and_no_other_role_stands_for_it() -> None:
    for role in (Role.LOG_SERVER, Role.REPOSITORY):
        for other in Role:
            why = authorization.not_its_service(identity("it", [other]), role, ["shop", "*"])
            assert (why == "") == (other is role)
