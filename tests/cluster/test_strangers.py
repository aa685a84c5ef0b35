"""Attacks on the ports of a running change log with TLS: by strangers, and by holders of a lesser role.

After each, the log is the same as before: entries, offsets, terms, states, versions, leases; and others are served meanwhile.
"""

import contextlib
import json
import os
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from tests.support.log_entries import append_to
from tests.support.role_table import ACTIONS, refused
from tests.support.tls import HOSTS, Authority, TlsLog
from walsender_bridge.change_log import actions, protocol
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log import repository_messages as r
from walsender_bridge.change_log.actions import Action, Empty
from walsender_bridge.change_log.authorization import ALLOWED, APPEND, READ, SYNC
from walsender_bridge.change_log.client import LogClient, ReplicaClient
from walsender_bridge.change_log.connection import connect
from walsender_bridge.change_log.protocol import CommitContext, IssuedCommit
from walsender_bridge.change_log.replica.disk import Durable
from walsender_bridge.change_log.replica.synchronizer import OfferMessage
from walsender_bridge.change_log.storage.records import pack_state
from walsender_bridge.errors import (
    Cause,
    MalformedMessageError,
    NotSupportedError,
    PrivilegeError,
    TusklineError,
    UnavailableError,
    UnknownStreamError,
    UsageError,
)
from walsender_bridge.runtime.certificate_holder import Role
from walsender_bridge.runtime.tls_files import TlsFiles

#: A request for each action, which would change the log if it were performed, where the action changes it.
REQUESTS: dict[str, tuple[Action[Any, Any], Any]] = {
    each[0].name: each
    for each in (
        (m.REPORT, Empty()),
        (m.COMMIT, m.CommitRequest({"shop": (IssuedCommit(CommitContext(1 << 20, 2, 2, 0)),)}, 1)),
        (m.CREATE, m.CreateRequest("new", "some log")),
        (m.LEARN, m.CreateRequest("new", "some log")),
        (m.CUT_TAIL, m.CutTailRequest("shop", 1, 1)),
        (m.SEAL, m.SealRequest("shop", 2, 1 << 30, 2)),
        (m.JOINED, m.JoinedRequest("shop", "another")),
        (m.SYNCHRONIZE, m.SynchronizeRequest("shop", "grpc://127.0.0.1:1", throttled=False)),
        (m.TRIM_POINT, m.TrimPointRequest("shop", 1 << 40, 1 << 60, 1 << 60)),
        (m.TRIM, m.TrimRequest("shop", 1 << 40, 1)),
        (m.STREAM_STATUS, m.StreamRequest("shop")),
        (m.SCHEMA, m.SchemaRequest("shop", ())),
        (m.RELATIONS, m.StreamRequest("shop")),
        (m.PLAN, m.PlanRequest("shop", 1, 100, None, None)),
        (m.VERSION_AT, m.VersionAtRequest("shop", 0)),
        (m.CUT_BEFORE, m.CutBeforeRequest("shop", 100)),
        (m.TRANSACTIONS, m.TransactionsRequest("shop", 1, 0, 10)),
        (r.STATUS, Empty()),
        (r.CREATE_STREAM, r.CreateStreamRequest("new")),
        (r.WRITER_TERM, r.WriterTermRequest("shop")),
        (r.BARRIER, r.BarrierRequest({"shop": 1}, 5.0)),
        (r.REGISTER_CONSUMER, r.RegisterConsumerRequest("stranger", None, 600.0)),
        (r.DROP_CONSUMER, r.DropConsumerRequest("lake")),
        (r.RAISE_VERSION, r.RaiseVersionRequest(1 << 30)),
        (r.DESCRIBE, Empty()),
        (r.TRIM_STREAM, r.TrimStreamRequest("shop", None, None)),
        (m.REPLICAS, Empty()),
        (m.COMMITS, m.CommitsRequest("shop", 1, 10)),
    )
}

#: Those that change the log in the hands of who may use them, whatever their numbers.
CHANGING = {
    "barrier",
    "trim",
    "trim_stream",
    "writer_term",
    "create_stream",
    "create",
    "learn",
    "register_consumer",
    "drop_consumer",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsLog]:
    folder = tmp_path_factory.mktemp("tls")
    found = TlsLog(folder, Authority(folder))
    with found.log() as client:
        client.register_consumer("lake", 1, 3600.0)
    yield found
    found.stop()


def everything(log: TlsLog) -> tuple[Any, ...]:
    """What must not change: the replicas, their entries, and the repository's records."""
    state = log.repository._state
    terms = {name: stream.term for name, stream in state.streams.items()}
    entries = {stream: log.read(stream) for stream in log.makers}
    return (
        log.status(),
        entries,
        terms,
        state.forced_version,
        {name: consumer.version for name, consumer in state.consumers.items()},
        sorted(state.streams),
        sorted(log.log_server._replicas),
    )


@contextlib.contextmanager
def unharmed(log: TlsLog) -> Iterator[None]:
    """Nothing is read, changed or lost in the block; afterwards the log goes on."""
    before = everything(log)
    yield
    assert everything(log) == before


def raw(address: str, tls: TlsFiles | None, **options: Any) -> flight.FlightClient:
    """A client that checks none of its own files."""
    if tls is not None:
        options |= {"cert_chain": tls.certificate.read_bytes(), "private_key": tls.key.read_bytes()}
    return flight.FlightClient(address, generic_options=protocol.CHANNEL_OPTIONS, **options)


def addresses(log: TlsLog) -> list[str]:
    return [log.log_server.address, log.repository.address]


def test_every_action_is_tried() -> None:
    assert set(REQUESTS) == ACTIONS


# -- without a certificate of this log --------------------------------------------------------------


def strangers(log: TlsLog, folder: Path) -> dict[str, tuple[TlsFiles | None, bytes]]:
    """Certificates that are none of this log's, each with the authority that the stranger trusts: the log's."""
    (folder / "other").mkdir()
    other = Authority(folder / "other")
    own_ca = log.files.ca.read_bytes()
    return {
        "none": (None, own_ca),
        "of another authority": (other.issue("operator", hosts=HOSTS), own_ca),
        "expired": (log.authority.expired("operator", hosts=HOSTS), own_ca),
    }


def test_37_a_stranger_gets_nowhere(log: TlsLog, tmp_path: Path) -> None:
    with unharmed(log):
        for tls, ca in strangers(log, tmp_path).values():
            for address in addresses(log):
                with raw(address, tls, tls_root_certs=ca) as client:
                    for name, (action, request) in REQUESTS.items():
                        asked = flight.Action(name, actions.encode(request))
                        # The first call waits for a handshake that fails; the others need not try again.
                        options = flight.FlightCallOptions(timeout=3.0)
                        with pytest.raises(flight.FlightError):
                            list(client.do_action(asked, options))
                        if action is m.COMMIT:
                            break


def test_37_a_stranger_who_signs_with_an_issued_certificate_gets_nowhere(
    log: TlsLog, tmp_path: Path
) -> None:
    """Who holds a certificate cannot issue others from it."""
    from walsender_bridge.runtime import certificates

    reader = log.authority.issue("reader")
    authority = tmp_path / "authority"
    authority.mkdir(mode=0o700)
    shutil.copy(reader.certificate, authority / "ca.pem")
    shutil.copy(reader.key, authority / "ca.key")
    uri = "tuskline:operator?name=me&streams=*"
    certificates.issue(authority, tmp_path / "mine", name="me", uri=uri, days=1)
    chain = (tmp_path / "mine" / "cert.pem").read_bytes() + reader.certificate.read_bytes()
    (tmp_path / "mine" / "cert.pem").write_bytes(chain)
    mine = TlsFiles(reader.ca, tmp_path / "mine" / "cert.pem", tmp_path / "mine" / "key.pem")
    with (
        unharmed(log),
        raw(log.log_server.address, mine, tls_root_certs=reader.ca.read_bytes()) as client,
        pytest.raises(flight.FlightUnavailableError),
    ):
        list(client.do_action(flight.Action("report", b"{}"), flight.FlightCallOptions(timeout=3)))


def test_37_a_client_does_not_talk_to_a_server_that_is_none_of_the_logs(
    log: TlsLog, tmp_path: Path
) -> None:
    other = TlsLog(tmp_path, Authority(tmp_path))
    try:
        for tls in (log.operator, log.files):
            with (
                LogClient(other.repository.address, tls=tls, timeout=1) as client,
                ReplicaClient(other.log_server.address, tls=tls, timeout=1) as replica,
            ):
                with pytest.raises(UnavailableError) as caught:
                    client.status()
                assert "not accepted: self-signed certificate" in caught.value.what
                assert "of this log's authority" in caught.value.repair
                with pytest.raises(UnavailableError):
                    append_to(replica, "shop", 1 << 30)
        assert other.status()["shop"][2] < 1 << 30
    finally:
        other.stop()


def test_37_a_certificate_without_roles_is_no_ones(log: TlsLog) -> None:
    nobody = log.authority.issue_uri("spiffe://elsewhere/operator")
    with unharmed(log), log.log(nobody) as client:
        with pytest.raises(PrivilegeError, match="names no roles of Tuskline"):
            client.status()
        with log.replica(nobody) as replica, pytest.raises(PrivilegeError, match="names no roles"):
            list(replica.read("shop", 1, 2))


# -- lesser roles -----------------------------------------------------------------------------------


def perform(log: TlsLog, tls: TlsFiles, name: str) -> None:
    action, request = REQUESTS[name]
    of_repository = action in vars(r).values()
    client: Any = log.log(tls) if of_repository else log.replica(tls)
    with client:
        client._call(action, request)


def append(log: TlsLog, tls: TlsFiles, _: str) -> None:
    with log.replica(tls) as replica:
        append_to(replica, "shop", 1 << 30)


def read(log: TlsLog, tls: TlsFiles, _: str) -> None:
    with log.replica(tls) as replica:
        list(replica.read("shop", 1, 2))


def sync(log: TlsLog, tls: TlsFiles, _: str) -> None:
    """Begin a synchronization, as another log server does."""
    path = flight.FlightDescriptor.for_path("sync", "shop")
    with connect(log.log_server.address, tls) as client, actions.at("here"):
        put, answers = client.do_put(path, protocol.APPEND_SCHEMA)
        put.done_writing()
        assert answers.read() is None
        put.close()


#: The calls that are no actions.
CALLS = {APPEND: append, READ: read, SYNC: sync}


@pytest.mark.parametrize("role", Role)
def test_37_each_role_has_its_own_actions_and_no_others(log: TlsLog, role: Role) -> None:
    holder = log.authority.issue(role, hosts=HOSTS)
    with unharmed(log):
        for name in sorted(refused(role)):
            with pytest.raises(PrivilegeError, match=f"does not allow '{name}'"):
                CALLS.get(name, perform)(log, holder, name)


@pytest.mark.parametrize("name", sorted(set(REQUESTS) - ALLOWED[Role.READER]))
def test_37_every_action_is_refused_before_its_request_is_parsed(log: TlsLog, name: str) -> None:
    reader = log.authority.issue("reader")
    address = addresses(log)[REQUESTS[name][0] in vars(r).values()]
    with raw(address, reader, tls_root_certs=reader.ca.read_bytes()) as client, unharmed(log):
        for body in (b"", b"junk", b"{" * 100_000):
            with pytest.raises(PrivilegeError), actions.at("here"):
                list(client.do_action(flight.Action(name, body)))


def test_37_a_log_server_makes_no_replica_that_the_repository_did_not_order(log: TlsLog) -> None:
    """Else one certificate could fill the disks of all others with streams of its own."""
    holder = log.authority.issue("log-server", hosts=HOSTS)
    folders = log.log_server._directory.streams
    with unharmed(log):
        before = sorted(folders.iterdir())
        for number in range(3):
            with pytest.raises(UnknownStreamError, match=r"'new_\d' does not exist"):
                _offers(log, holder, f"new_{number}")
        assert sorted(folders.iterdir()) == before


def _offers(log: TlsLog, tls: TlsFiles, stream: str) -> None:
    """Offer a stream as another log server does."""
    durable = pack_state(Durable(stream, "a log")).hex()
    offer = OfferMessage("stranger", "a log", protocol.START, durable)
    rows = pa.record_batch(
        [pa.array([], pa.uint8()), pa.array([], pa.large_binary())], schema=protocol.APPEND_SCHEMA
    )
    with connect(log.log_server.address, tls) as client, actions.at("here"):
        put, answers = client.do_put(
            flight.FlightDescriptor.for_path("sync", stream), protocol.APPEND_SCHEMA
        )
        put.write_with_metadata(rows, actions.encode(offer))
        answers.read()
        put.close()


def test_37_a_reader_of_one_stream_has_no_other(log: TlsLog) -> None:
    reader = log.authority.issue("reader", streams=("bank",))
    assert log.read("bank", reader) == log.read("bank")
    with unharmed(log), log.replica(reader) as replica, log.log(reader) as client:
        with pytest.raises(PrivilegeError, match="does not allow 'read' on stream 'shop'"):
            list(replica.read("shop", 1, 2))
        for name in sorted(ALLOWED[Role.READER] & set(REQUESTS) - {"status", "register_consumer"}):
            why = f"'{name}'(, which concerns all streams| on stream 'shop')"
            with pytest.raises(PrivilegeError, match=why):
                perform(log, reader, name)
        with pytest.raises(PrivilegeError, match="on stream 'shop'"):
            client.barrier({"bank": 1, "shop": 1}, 1.0)
        assert client.status().version >= 1


def test_37_a_writer_of_one_stream_has_no_other(log: TlsLog) -> None:
    writer = log.authority.issue("writer", streams=("bank",))
    log.append("bank", writer)
    with unharmed(log), log.replica(writer) as replica, log.log(writer) as client:
        with pytest.raises(PrivilegeError, match="does not allow 'append' on stream 'shop'"):
            append_to(replica, "shop", 1 << 30)
        with pytest.raises(PrivilegeError, match="on stream 'shop'"):
            client.writer_term("shop")
        with pytest.raises(PrivilegeError, match="on stream 'new'"):
            client.create_stream("new")
        with pytest.raises(PrivilegeError, match="on stream 'shop'"):
            replica.cut_tail("shop", 1, 1)


@pytest.mark.parametrize("path", [(), ("append",), ("sync", "shop"), ("read", "shop", "1"), ("*",)])
def test_37_a_put_of_another_kind_is_refused(log: TlsLog, path: tuple[str, ...]) -> None:
    writer = log.authority.issue("writer")
    with (
        unharmed(log),
        raw(log.log_server.address, writer, tls_root_certs=log.files.ca.read_bytes()) as client,
    ):
        where = flight.FlightDescriptor.for_path(*path)
        put, answers = client.do_put(where, protocol.APPEND_SCHEMA)
        put.done_writing()
        assert answers.read() is None
        with (
            pytest.raises(TusklineError, match=r"does not allow|the path of an append"),
            actions.at("here"),
        ):
            put.close()


FLIGHT_CALLS: dict[str, Callable[[flight.FlightClient], Any]] = {
    "get": lambda client: client.do_get(flight.Ticket(b"")),
    "info": lambda client: client.get_flight_info(flight.FlightDescriptor.for_path("x")),
    "list": lambda client: [*client.list_flights()],
}


@pytest.mark.parametrize("kind", FLIGHT_CALLS)
def test_38_a_call_of_another_kind_has_a_named_error(log: TlsLog, kind: str) -> None:
    """Flight's own is the traceback, with the paths of the server's files."""
    reader = log.authority.issue("reader")
    for address in addresses(log):
        if kind == "get" and address == log.log_server.address:
            continue
        with (
            unharmed(log),
            raw(address, reader, tls_root_certs=reader.ca.read_bytes()) as client,
            pytest.raises(NotSupportedError) as caught,
            actions.at("here"),
        ):
            FLIGHT_CALLS[kind](client)
        assert "Traceback" not in str(caught.value)


def test_38_no_schema_is_told(log: TlsLog) -> None:
    """Nor a traceback, which Flight has for every error of this call."""
    reader = log.authority.issue("reader")
    for address in addresses(log):
        with raw(address, reader, tls_root_certs=reader.ca.read_bytes()) as client:
            found = client.get_schema(flight.FlightDescriptor.for_path("append", "shop"))
            assert len(found.schema) == 0


def test_37_a_reader_does_not_move_the_lease_of_another(log: TlsLog) -> None:
    """The log would be trimmed where the lake still needs it."""
    reader = log.authority.issue("reader")
    with log.log(reader) as client:
        with unharmed(log), pytest.raises(PrivilegeError, match="does not allow the lease 'lake'"):
            client.register_consumer("lake", client.status().version, 600.0)
        client.register_consumer("reader-2", 1, 600.0)
    assert "reader-2" in log.repository._state.consumers


def test_37_a_reader_does_not_fill_the_repository_with_leases(log: TlsLog) -> None:
    """They hold back trimming, and each is a record for good."""
    reader = log.authority.issue_uri("tuskline:reader?name=many&streams=*")
    with log.log(reader) as client:
        for number in range(100):
            client.register_consumer(f"many-{number}", 1, 0.001 if number == 50 else 600.0)
        # One has ended, and is forgotten.
        client.register_consumer("many-next", 1, 600.0)
        client.register_consumer("many-1", 1, 600.0)
        with unharmed(log), pytest.raises(UsageError, match="too many consumers: 100"):
            client.register_consumer("many-more", 1, 600.0)
    assert "many-50" not in log.repository._state.consumers
    assert "lake" in log.repository._state.consumers


@pytest.mark.parametrize("name", ["\ud800", "\udc41x"])
def test_38_a_consumer_has_a_name_that_can_be_shown(log: TlsLog, name: str) -> None:
    """One that is no text could not be encoded by any command that shows it."""
    body = json.dumps(
        {"v": actions.VERSION, "name": f"lake-{name}", "version": 1, "lease_seconds": 60.0}
    )
    lake = log.authority.issue("lake")
    with raw(log.repository.address, lake, tls_root_certs=lake.ca.read_bytes()) as client:
        action = flight.Action("register_consumer", body.encode())
        with unharmed(log), pytest.raises(MalformedMessageError), actions.at("here"):
            list(client.do_action(action))


@pytest.mark.parametrize("name", sorted(set(REQUESTS) - CHANGING))
def test_38_no_number_is_too_large_for_a_named_error(log: TlsLog, name: str) -> None:
    request = REQUESTS[name][1]
    greatest = {
        each.name: 2**64 - 1
        for each in fields(request)
        if type(getattr(request, each.name)) is int and each.name != "holds"
    }
    tls = log.files if name in ALLOWED[Role.REPOSITORY] else log.operator
    action = REQUESTS[name][0]
    client: Any = log.log(tls) if action in vars(r).values() else log.replica(tls)
    with unharmed(log), client:
        said = _refusal(lambda: client._call(action, replace(request, **greatest)))
    assert said is None or said.cause is not Cause.INTERNAL, said


def _refusal(call: Callable[[], Any]) -> TusklineError | None:
    try:
        call()
    except TusklineError as error:
        return error
    return None


def test_37_what_concerns_all_streams_needs_a_certificate_for_all(log: TlsLog) -> None:
    lake = log.authority.issue("lake", streams=("bank", "shop"))
    with unharmed(log), log.log(lake) as client:
        with pytest.raises(PrivilegeError, match="which concerns all streams"):
            client.raise_version(1 << 30)
        with pytest.raises(PrivilegeError, match="which concerns all streams"):
            client.drop_consumer("lake")


# -- bytes that are no call -------------------------------------------------------------------------


def connected(address: str) -> socket.socket:
    host, _, port = address.partition("://")[2].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def in_tls(address: str, tls: TlsFiles) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.load_cert_chain(tls.certificate, tls.key)
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(connected(address), server_hostname="127.0.0.1")


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes(3) + b"\x04\x00" + bytes(4)
#: A frame of 16 MiB, and what looks like a message of 1 GiB.
LONG_FRAME = b"\xff\xff\xff\x00\x00" + (1).to_bytes(4, "big")
GIBIBYTE = b"\x00" + (1 << 30).to_bytes(4, "big")

JUNK: dict[str, bytes] = {
    "zeros": bytes(4096),
    "random": os.urandom(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "plain http/2": PREFACE + SETTINGS,
    "a record of tls that is none": b"\x16\x03\x01\xff\xff" + os.urandom(4096),
    "an old version of tls": b"\x16\x03\x00\x00\x05\x01\x00\x00\x01\x03",
    "a startup packet": b"\x00\x00\x00\x08\x04\xd2\x16\x2f",
}


@pytest.mark.parametrize("kind", JUNK)
def test_37_junk_ends_its_own_connection_only(log: TlsLog, kind: str) -> None:
    with unharmed(log):
        for address in addresses(log):
            with connected(address) as junk:
                with contextlib.suppress(OSError):
                    junk.sendall(JUNK[kind])
                    junk.shutdown(socket.SHUT_WR)
                assert len(ended(junk)) < 1000


def ended(connection: socket.socket) -> bytes:
    """What a server says before it closes the connection; fails if it does not close it."""
    said = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while more := connection.recv(4096):
            said += more
    return said


@pytest.mark.parametrize("junk", [bytes(4096), os.urandom(4096), PREFACE + SETTINGS + LONG_FRAME])
def test_38_junk_inside_of_tls_ends_its_own_connection_only(log: TlsLog, junk: bytes) -> None:
    reader = log.authority.issue("reader")
    with unharmed(log):
        for address in addresses(log):
            with in_tls(address, reader) as connection:
                with contextlib.suppress(OSError):
                    connection.sendall(junk)
                ended(connection)


def call_of(path: bytes) -> bytes:
    """The frame that begins a gRPC call, in HTTP/2's plainest form."""
    headers = {
        b":method": b"POST",
        b":scheme": b"https",
        b":path": b"/arrow.flight.protocol.FlightService/" + path,
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    block = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in headers.items()
    )
    return len(block).to_bytes(3, "big") + b"\x01\x04" + (1).to_bytes(4, "big") + block


def claims_gibibyte(call: str) -> bytes:
    """A connection's first bytes: this call, whose message claims to be of 1 GiB."""
    data = GIBIBYTE + bytes(1000)
    frame = len(data).to_bytes(3, "big") + b"\x00\x00" + (1).to_bytes(4, "big") + data
    return PREFACE + SETTINGS + call_of(call.encode()) + frame


def resident() -> int:
    """Bytes of this process, which the servers run in."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("call", ["DoAction", "DoGet", "DoPut", "DoExchange", "ListActions"])
def test_38_a_message_that_claims_a_gibibyte_costs_nothing(log: TlsLog, call: str) -> None:
    reader = log.authority.issue("reader")
    before = resident()
    with contextlib.ExitStack() as stack:
        with unharmed(log):
            for _ in range(20):
                connection = stack.enter_context(in_tls(log.log_server.address, reader))
                connection.sendall(claims_gibibyte(call))
        log.append("bank")
        assert resident() - before < 100 << 20


def test_37_a_thousand_idle_connections_delay_nobody(log: TlsLog) -> None:
    reader = log.authority.issue("reader")
    before = resident()
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(connected(log.log_server.address))
        for _ in range(500):
            stack.enter_context(in_tls(log.log_server.address, reader))
        began = time.monotonic()
        log.append("shop")
        assert time.monotonic() - began < 5
        assert resident() - before < 200 << 20
    log.append("shop")
