"""The certificate of a log server or a repository: clients use no service whose certificate lacks its role."""

import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Iterator
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
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def impostor(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ReplicaServer]:
    """A log server whose certificate is a safekeeper's: it does not look at its own, as one of an earlier version."""
    files = authority.issue("safekeeper", hosts=HOSTS)
    with monkeypatch.context() as patch:
        patch.setattr(listener, "_load", lambda files, _: files.load(server=True))
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
            link._connection.client()
            own = [replace(REPORT, stream=each) for each in ("old", "shop")]
            assert [each.stream for each in link._own("a", own)] == ["shop"]
            assert "does not name stream 'old'" in link.refused["old"].what
            assert "--stream" in link.refused["old"].repair
            assert "shop" not in link.refused
            holder = link._connection._holder
            assert holder is not None
            link._connection._holder = replace(holder, streams=frozenset({"*"}))
            assert len(link._own("a", own)) == 2
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


def test_37_a_service_that_is_replaced_by_another_part_is_noticed(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC connects again by itself: the certificate is looked at again, too."""
    monkeypatch.setattr(connection, "_LOOK", 0.0)
    log = TlsLog(tmp_path / "log", authority)
    try:
        with log.replica() as client:
            client.stream_status("shop")
            monkeypatch.setattr(listener, "POLL", 0.05)
            monkeypatch.setattr(listener, "_load", lambda files, _: files.load(server=True))
            former = log.log_server._listener._service
            replace_files(log.files, authority.issue("safekeeper", "repository", hosts=HOSTS))

            def refused() -> bool:
                try:
                    client.stream_status("shop")
                except UntrustedServiceError:
                    return True
                return False

            wait_for(refused, 20, "the new certificate's roles are looked at")
            assert log.log_server._listener._service is not former
    finally:
        log.stop()


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
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_names: threading.Event,
) -> None:
    monkeypatch.setattr(connection, "_LOOK", 0.0)
    log = TlsLog(tmp_path / "log", authority)
    address = log.log_server.address.replace("127.0.0.1", "localhost")
    try:
        with ReplicaClient(address, tls=log.operator, timeout=5) as client:
            client.stream_status("shop")
            no_names.set()
            began = time.monotonic()
            for _ in range(10):
                client.stream_status("shop")
            assert time.monotonic() - began < 4
            looks = [each for each in threading.enumerate() if each.name == "look"]
            assert len(looks) <= 3, "one for each connection"
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
        self._tls.load_cert_chain(tls.certificate, tls.key)
        self.asked_for: list[str | None] = []

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


def test_37_a_connection_that_stands_outlasts_the_end_of_a_certificate(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first look refuses what gRPC would refuse, too; a later one only what gRPC could not know."""
    monkeypatch.setattr(connection, "_LOOK", 0.0)
    own = authority.issue("operator")
    for role, stands in ((Role.LOG_SERVER, True), (Role.SAFEKEEPER, False)):
        with (
            Shows(authority.expired(role, hosts=HOSTS)) as shows,
            closing(connection.Connection(shows.address, own, role=Role.LOG_SERVER)) as its,
        ):
            with pytest.raises(UntrustedServiceError, match="expired"):
                its.client()
            # As if it had been looked at before its end.
            its._holder, its._failure, its._looked_at = identity("it", [Role.LOG_SERVER]), None, 0
            with suppress(UntrustedServiceError):
                its.client()
            assert its._looking is not None
            its._looking.join(20)
            assert (its._holder is not None) is stands
            assert isinstance(its._failure, UntrustedServiceError) is not stands


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
            with pytest.raises(UntrustedServiceError, match="lacks the role log-server"):
                its.client()
        wait_for(lambda: len(shows.asked_for) == 1, 10, "it was looked at")
        monkeypatch.setattr(connection, "_REFUSED", 0.0)
        with pytest.raises(UntrustedServiceError):
            its.client()
        wait_for(lambda: len(shows.asked_for) == 2, 10, "it was looked at again")


def test_37_a_certificate_that_is_refused_says_more_than_who_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several repositories, the leader's certificate may be the reason."""
    untrusted, follows = UntrustedServiceError("lacks the role"), NotLeaderError("follows")
    for errors in ([untrusted, follows], [follows, untrusted]):
        with LogClient("grpc://127.0.0.1:1,127.0.0.1:2", timeout=5) as log:
            for one, error in zip(log._connections, errors, strict=True):
                monkeypatch.setattr(one, "client", partial(_raise, error))
            with pytest.raises(UntrustedServiceError):
                log.status()


def _raise(error: Exception, *_: object) -> None:
    raise error


def test_37_a_connection_that_is_closed_looks_no_more(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ReplicaServer(
        tmp_path / "one", "127.0.0.1:0", tls=authority.issue("log-server", hosts=HOSTS)
    )
    its = connection.Connection(
        server.address, authority.issue("operator"), role=Role.LOG_SERVER, within=5
    )
    try:
        its.client()
        its.close()
        monkeypatch.setattr(connection, "_LOOK", 0.0)
        with suppress(TusklineError):
            its.client()
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
