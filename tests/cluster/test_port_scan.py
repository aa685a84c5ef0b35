"""A running installation with TLS, whose every listener is attacked: nothing is read, changed, lost or told, and others are served.

It listens where other machines would reach it, if this machine has such an address.
"""

import contextlib
import json
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from tests.cluster.test_strangers import (
    JUNK,
    LONG_FRAME,
    PREFACE,
    REQUESTS,
    SETTINGS,
    claims_gibibyte,
    raw,
)
from tests.support.attached import Attached
from tests.support.capture_stack import server_with_tables, wal_end
from tests.support.listeners import ListeningSocket, listeners, of_process
from tests.support.quorum_up import follows
from tests.support.repeated import Repeated
from tests.support.role_table import ACTIONS, refused
from tests.support.servers import Database, MakeServer
from tests.support.tls import SERVER, Authority
from tests.support.tls_safekeeper import GREETING
from tests.support.waiting import wait_for
from walsender_bridge.change_log import actions, protocol
from walsender_bridge.change_log.client import LogClient, ReplicaClient
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import free_ports
from walsender_bridge.errors import (
    NotSupportedError,
    PrivilegeError,
    TusklineError,
    UnreachableError,
)
from walsender_bridge.quorum.protocol.frames import encode
from walsender_bridge.runtime.certificate_holder import Role
from walsender_bridge.runtime.tls_files import TlsFiles

MIB = 1 << 20
SECRET = "planted-secret-91ab"
#: Seconds that a reader may wait meanwhile, on a busy machine: less than it waits before it gives up.
LONGEST_DELAY = 10.0

#: PostgreSQL's request for TLS, a startup packet of an unknown user, and the head of a password of 1 GiB.
ENCRYPTION = struct.pack(">II", 8, 80_877_103)
_PARAMETERS = b"user\0mallory\0replication\0true\0\0"
STARTUP = struct.pack(">II", 8 + len(_PARAMETERS), 3 << 16) + _PARAMETERS
LONG_PASSWORD = struct.pack(">cI", b"p", 1 << 30)

#: What is no reader's.
REFUSED = sorted(refused(Role.READER) & ACTIONS)


def own_address() -> str:
    """An address of this machine that is not loopback, if it has one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class Installation:
    """`tuskline up` with `[tls]` and a safekeeper that commits wait for, and a reader of its stream."""

    def __init__(self, folder: Path, shop: Database) -> None:
        self.folder = folder
        self.shop = shop
        self.host = own_address()
        self.authority = Authority(folder)
        roles = (*SERVER, "writer", "lake", "operator", "proposer", "safekeeper")
        own = self.authority.issue(*roles, hosts=(self.host,))
        self.reader = self.authority.issue("reader", streams=("shop",))
        (folder / "other").mkdir()
        self.stranger = Authority(folder / "other").issue("operator")
        role = f"scanned_{shop.name}"
        shop.execute(f"CREATE ROLE {role} SUPERUSER LOGIN PASSWORD '{SECRET}'")
        dsn = shop.server.dsn(shop.name, user=role, password=SECRET)
        source = {"dsn": dsn, "tables": ["public.orders", "public.audit"]}
        self.safekeeper, self.wal_server = (f"{self.host}:{port}" for port in free_ports(2))
        safekeepers = {
            "local": 1,
            "addresses": [self.safekeeper],
            "listen": self.safekeeper,
            "wal_listen": self.wal_server,
            "keep_bytes": 64 * MIB,
            "tls_cert": str(own.certificate),
            "tls_key": str(own.key),
            "tls_client_ca": str(own.ca),
        }
        self.tuskline = Attached(folder, {"shop": source}, metrics=True, safekeepers=safekeepers)
        text = self.tuskline.config.read_text().replace(
            'listen = "127.0.0.1', f'listen = "{self.host}'
        )
        section = (
            f'\n[tls]\nca = "{own.ca}"\ncertificate = "{own.certificate}"\nkey = "{own.key}"\n'
        )
        self.tuskline.config.write_text(text + section)
        settings = load_config(self.tuskline.config)
        self.repository = f"grpc+tls://{settings.log.listen}"
        self.log_server = f"grpc+tls://{settings.log_server[0].listen}"
        self.own = own
        self.key = own.key.read_text().splitlines()[1]

    def write(self) -> None:
        """Insert a row, which the safekeeper has to have, and wait until it is in the log."""
        with self.shop.connect() as connection:
            connection.execute("INSERT INTO orders SELECT count(*) + 1, 'x' FROM orders")
            end = wal_end(connection)
            connection.execute("UPDATE tuskline.flush SET token = token + 1")
        wait_for(lambda: self._has(end), 60, "the log has it")

    def _has(self, lsn: int) -> bool:
        try:
            with LogClient(self.repository, tls=self.reader) as log:
                return log.status().streams["shop"].last_end_lsn > lsn
        except (TusklineError, KeyError):
            return False

    def check_rows(self) -> None:
        """The log has the rows of the table, each once, and no other."""
        done = self.tuskline.run("log", "tail", "shop", "--rows", "--json")
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        rows = [each["new"] for each in found if each.get("relation") == "public.orders"]
        with self.shop.connect() as connection:
            expected = connection.execute("SELECT id FROM orders ORDER BY id").fetchall()
        assert sorted((int(each["id"]),) for each in rows) == expected, done.stdout[-1500:]

    def entries(self, end: int | None = None) -> list[bytes]:
        """What a reader reads, up to an offset."""
        with (
            LogClient(self.repository, tls=self.reader, timeout=20) as log,
            ReplicaClient(self.log_server, tls=self.reader, timeout=20) as replica,
        ):
            cut = log.status().streams["shop"]
            found = replica.read("shop", cut.low_offset, end or cut.end_offset)
            return [bytes(each.data) for each in found]

    def state(self) -> dict[str, Any]:
        """What no attack may change."""
        found = self.tuskline.json("log", "status")
        streams = sorted(path.name for path in (self.folder / "log-server" / "streams").iterdir())
        with LogClient(self.repository, tls=self.reader) as log:
            forced = log.status().forced_version
        with ReplicaClient(self.log_server, tls=self.reader) as replica:
            status = replica.stream_status("shop")
        consumers = found["consumers"]
        return {
            "streams": streams,
            "consumers": consumers,
            "forced": forced,
            "replica": (status.low_offset, status.term, status.state, status.log_id),
        }


@contextlib.contextmanager
def running(folder: Path, make_server: MakeServer) -> Iterator[Installation]:
    """An installation on a server of its own, whose commits wait for the safekeeper."""
    found = Installation(folder, Database("postgres", server_with_tables(make_server, fsync="off")))
    with found.tuskline:
        found.tuskline.json("init")
        found.tuskline.up()
        wait_for(lambda: found._has(-1) and follows(found.tuskline), 60, "everything runs")
        found.tuskline.json("quorum", "require")
        yield found


@pytest.fixture
def installation(tmp_path: Path, make_server: MakeServer) -> Iterator[Installation]:
    with running(tmp_path, make_server) as found:
        yield found


def reading_from(installation: Installation) -> Repeated:
    """A reader that reads all the time."""
    return Repeated(installation.entries, TusklineError, pause=0.1)


def junk(listener: ListeningSocket) -> bytes:
    """Send what is no call, in plain text; what the listener answers."""
    said = b""
    for each in JUNK.values():
        with connection(listener) as plain, contextlib.suppress(OSError):
            plain.sendall(each)
            plain.shutdown(socket.SHUT_WR)
            while more := plain.recv(4096):
                said += more
    return said


def connection(listener: ListeningSocket) -> socket.socket:
    return socket.create_connection((listener.host, listener.port), timeout=5)


def in_tls(listener: ListeningSocket, tls: TlsFiles) -> ssl.SSLSocket | None:
    """A connection with this certificate; None where there is no TLS, or the certificate is refused.

    Where a request for TLS has to come first, as PostgreSQL's clients send it, that is sent.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(tls.certificate, tls.key)
    context.set_alpn_protocols(["h2"])
    for request in (b"", ENCRYPTION):
        plain = connection(listener)
        try:
            plain.sendall(request)
            if not request or plain.recv(1) == b"S":
                return context.wrap_socket(plain)
        except OSError:
            pass
        plain.close()
    return None


def stranger(installation: Installation, listener: ListeningSocket) -> bytes:
    """A certificate of another authority, and what the listener says to its holder."""
    found = in_tls(listener, installation.stranger)
    said = b""
    if found is not None:
        # With TLS 1.3, the refusal follows what the client takes for the end of the handshake.
        with found, contextlib.suppress(OSError):
            found.sendall(PREFACE + SETTINGS + LONG_FRAME)
            while more := found.recv(4096):
                said += more
    return said


@contextlib.contextmanager
def idle(installation: Installation, listener: ListeningSocket) -> Iterator[None]:
    """A thousand connections of which nothing comes, some of them in TLS where the listener has it."""
    with contextlib.ExitStack() as stack:
        secured = in_tls(listener, installation.reader)
        if secured:
            stack.enter_context(secured)
        for number in range(1000):
            with contextlib.suppress(OSError):
                found = connection(listener)
                stack.enter_context(found)
                if secured and number % 4 == 0:
                    found.close()
                    secured = in_tls(listener, installation.reader)
                    if secured:
                        stack.enter_context(secured)
        yield


def as_reader(installation: Installation, address: str) -> list[str]:
    """A reader asks for all that it may not have, and what it is told."""
    told = []
    ca = installation.reader.ca.read_bytes()
    asked = [(name, actions.encode(REQUESTS[name][1])) for name in REFUSED]
    asked += [(name, b'{"v":1}') for name in REQUESTS]
    asked += [("read", b"["), ("status", b"[" * (3 * MIB)), ("seal", bytes(24 * MIB))]
    with raw(address, installation.reader, tls_root_certs=ca) as client:
        for name, body in asked:
            options = flight.FlightCallOptions(timeout=10)
            with pytest.raises(TusklineError) as caught, actions.at(address):
                list(client.do_action(flight.Action(name, body), options))
            assert name not in REFUSED or len(body) > MIB or _is_refused(caught.value)
            told.append(str(caught.value))
        told += [_bomb(client, address, codec) for codec in (None, "zstd")]
    return told


def gibibytes(installation: Installation, listener: ListeningSocket) -> bytes:
    """A reader's messages that claim to be of 1 GiB, and what is said to them."""
    said = b""
    for call in ("DoAction", "DoGet", "DoPut"):
        found = in_tls(listener, installation.reader)
        assert found is not None
        with found, contextlib.suppress(OSError):
            found.sendall(claims_gibibyte(call))
            said += found.recv(4096)
    return said


def _bomb(client: flight.FlightClient, address: str, codec: str | None) -> str:
    """Append zeros with a reader's certificate.

    A call that is refused while the client still sends may end for it as one that was cut off; then it tries again.
    """
    path = flight.FlightDescriptor.for_path("append", "shop", str(1 << 20))
    options = flight.FlightCallOptions(
        timeout=10, write_options=pa.ipc.IpcWriteOptions(compression=codec)
    )
    zeros = protocol.binary_array([bytes(24 * MIB)])
    batch = pa.record_batch([pa.array([0], pa.uint8()), zeros], schema=protocol.APPEND_SCHEMA)
    for _ in range(5):
        with pytest.raises(TusklineError) as caught, actions.at(address):
            _append(client, path, batch, options)
        if not isinstance(caught.value, UnreachableError):
            break
    assert _is_refused(caught.value)
    return str(caught.value)


def _is_refused(error: TusklineError) -> bool:
    """By the holder's role; the repository takes no appends."""
    return isinstance(error, PrivilegeError | NotSupportedError)


def _append(client: flight.FlightClient, path: Any, batch: pa.RecordBatch, options: Any) -> None:
    writer, _ = client.do_put(path, batch.schema, options)
    try:
        writer.write_with_metadata(batch, b"{}")
    finally:
        writer.close()


def of_quorum_as_reader(installation: Installation, listener: ListeningSocket) -> bytes:
    """A reader asks a safekeeper, and the listener for its WAL, as their own clients do; what it is told."""
    greeting = encode(GREETING)
    said = b""
    for sent in (greeting, greeting[:4] + b"\x7f" * 60, STARTUP + LONG_PASSWORD):
        found = in_tls(listener, installation.reader)
        assert found is not None, "its certificate is of the same authority"
        with found, contextlib.suppress(OSError):
            found.sendall(sent)
            while more := found.recv(4096):
                said += more
    return said


@pytest.mark.timeout(240)
def test_every_listener_withstands_strangers_and_lesser_roles(installation: Installation) -> None:
    tuskline = installation.tuskline
    assert tuskline.process is not None
    installation.write()
    found = listeners(tuskline.process.pid)
    flights = {installation.repository, installation.log_server}
    # A listener that this test does not know would be scanned, too, but its bars would be missing here.
    of_quorum = {installation.safekeeper, installation.wal_server}
    assert len(found) == len(flights | of_quorum) + 1
    before, entries = installation.state(), installation.entries()
    threads = {each.pid: of_process(each.pid, "Threads") for each in found}
    memory = {each.pid: of_process(each.pid, "VmRSS") for each in found}
    peaks = {each.pid: of_process(each.pid, "VmHWM") for each in found}
    told: list[str] = []
    with reading_from(installation) as reading:
        for each in found:
            told.append(junk(each).decode(errors="replace"))
            told.append(stranger(installation, each).decode(errors="replace"))
            with idle(installation, each):
                installation.write()
            if (place := f"{each.host}:{each.port}") in of_quorum:
                said = of_quorum_as_reader(installation, each)
                of_role = place == installation.safekeeper
                expected = b"does not allow" if of_role else b"invalid length of message p"
                assert expected in said
                assert len(said) < 2000
                told.append(said.decode(errors="replace"))
            elif any(each_of.endswith(f"//{place}") for each_of in flights):
                told.append(gibibytes(installation, each).decode(errors="replace"))
        for address in sorted(flights):
            told += as_reader(installation, address)
        installation.write()
    assert reading.calls > 5
    assert reading.errors == []
    assert reading.longest < LONGEST_DELAY
    assert installation.state() == before
    assert installation.entries()[: len(entries)] == entries
    assert tuskline.json("log", "verify")["violations"] == []
    assert all(of_process(pid, "VmHWM") <= peak + (300 << 10) for pid, peak in peaks.items())
    installation.write()
    installation.check_rows()

    def is_as_before() -> bool:
        return all(
            of_process(pid, "Threads") <= threads[pid] + 8
            and of_process(pid, "VmRSS") <= memory[pid] + (100 << 10)
            for pid in threads
        )

    wait_for(is_as_before, 30, "threads and memory are as before")
    secrets = (SECRET, installation.key, "PRIVATE KEY")
    texts = "\n".join(told) + tuskline.output.read_text()
    assert [each for each in secrets if each in texts] == []
