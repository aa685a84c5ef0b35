"""A log server's process whose clients open, send and hold more than they need: it stays small, and serves the others."""

import contextlib
import resource
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import flight

from tests.cluster.test_strangers import PREFACE, SETTINGS, call_of, connected, in_tls
from tests.cluster.test_strangers import ended as closed_by_server
from tests.support.log_server_process import LogServer
from tests.support.waiting import wait_for
from walsender_bridge.change_log import actions, protocol
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.calls import MOST_ANSWERS_OF_HOLDER, MOST_APPENDS
from walsender_bridge.change_log.connection import connect
from walsender_bridge.change_log.connection_limits import MOST_CONNECTIONS
from walsender_bridge.errors import UnavailableError

MIB = 1 << 20
#: Files, threads and connections of its own.
OWN = 40


@pytest.fixture(scope="module")
def log_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LogServer]:
    with LogServer.running(tmp_path_factory.mktemp("limits")) as found:
        yield found


@pytest.fixture(autouse=True)
def goes_on(log_server: LogServer) -> Iterator[None]:
    """Afterwards, threads and files are as before, and appends go on."""
    yield
    wait_for(lambda: log_server.files() < OWN, 20, "connections end")
    wait_for(lambda: log_server.threads() < OWN, 20, "threads end")
    log_server.append(log_server.maker.whole())


def test_38_a_request_of_any_length_costs_little(log_server: LogServer) -> None:
    """Flight takes a message whole before it can be refused: this one used to cost three times its length."""
    reader = log_server.authority.issue("reader", streams=("other",))
    before = log_server.peak()
    body = bytes(800 * MIB)
    for action in ("stream_status", "junk"):
        with (
            connect(log_server.address, reader) as client,
            pytest.raises(UnavailableError),
            actions.at("here"),
        ):
            list(
                client.do_action(flight.Action(action, body), flight.FlightCallOptions(timeout=20))
            )
    # A busy machine looks at its connections late.
    assert log_server.peak() - before < 500 * MIB


def test_37_a_thousand_idle_connections_leave_files_for_the_log(log_server: LogServer) -> None:
    """As many as most systems let a process have open."""
    reader = log_server.authority.issue("reader")
    pid = log_server.process.pid
    limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1024, limit[1]))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(600):
                stack.enter_context(connected(log_server.address))
            for _ in range(400):
                stack.enter_context(in_tls(log_server.address, reader))
            began = time.monotonic()
            log_server.append(log_server.maker.whole())
            assert time.monotonic() - began < 10
            wait_for(lambda: log_server.files() < MOST_CONNECTIONS + OWN, 20, "the oldest end")
            log_server.append(log_server.maker.whole())
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)


def test_a_long_row_is_appended_and_read(log_server: LogServer) -> None:
    """Longer than a request may be, and sent at once."""
    reader = log_server.authority.issue("reader")
    first = log_server.status().end_offset
    long = log_server.maker.whole(size=40 * MIB)
    log_server.append(long)
    log_server.commit(1)
    with log_server.client(reader) as client:
        assert [bytes(each.data) for each in client.read("shop", first, first + 1)] == [long]


def open_append(log_server: LogServer, client: flight.FlightClient, term: int) -> Any:
    path = flight.FlightDescriptor.for_path("append", "shop", str(term))
    options = flight.FlightCallOptions(timeout=20)
    writer, reader = client.do_put(path, protocol.APPEND_SCHEMA, options)
    assert reader.read() is not None
    return writer, reader


def ended(writer: Any, reader: Any) -> None:
    """Wait for the end of an append, whose reason Flight gives at the last."""
    reader.read()
    writer.close()


def test_39_the_oldest_of_too_many_appends_ends(log_server: LogServer) -> None:
    term = log_server.status().term
    with contextlib.ExitStack() as stack:
        opened = [
            open_append(
                log_server,
                stack.enter_context(connect(log_server.address, log_server.writer)),
                term,
            )
            for _ in range(MOST_APPENDS + 4)
        ]
        wait_for(lambda: log_server.files() < MOST_APPENDS + OWN, 20, "the oldest end")
        for number, (writer, reader) in enumerate(opened[:4]):
            with pytest.raises(UnavailableError, match="does not answer"), actions.at(str(number)):
                ended(writer, reader)
        log_server.append(log_server.maker.whole())


def test_39_appends_over_one_connection_do_not_take_all_threads(log_server: LogServer) -> None:
    term = log_server.status().term
    with connect(log_server.address, log_server.writer) as client:
        opened: list[Any] = []
        with contextlib.suppress(flight.FlightError, AssertionError):
            opened.extend(open_append(log_server, client, term) for _ in range(150))
        assert log_server.threads() < OWN + 2 * MOST_APPENDS


def get_of(ticket: bytes) -> bytes:
    """A DoGet in HTTP/2's plainest form, from a client that never says that it has read."""
    size = bytes([len(ticket) & 0x7F | 0x80, len(ticket) >> 7])
    message = b"\x0a" + size + ticket
    data = b"\x00" + len(message).to_bytes(4, "big") + message
    end = len(data).to_bytes(3, "big") + b"\x00\x01" + (1).to_bytes(4, "big") + data
    return PREFACE + SETTINGS + call_of(b"DoGet") + end


def test_39_clients_that_do_not_read_leave_room_for_others(log_server: LogServer) -> None:
    """Each holds an answer in the log server's memory, and a thread."""
    reader = log_server.authority.issue("reader")
    first = log_server.status().end_offset
    log_server.append(log_server.maker.whole(size=2 * MIB))
    log_server.commit(1 << 10)
    ticket = actions.encode(m.ReadRequest("shop", first, first + 1)).ljust(128)
    before = log_server.peak()
    with contextlib.ExitStack() as stack:
        for _ in range(MOST_ANSWERS_OF_HOLDER + 150):
            stack.enter_context(in_tls(log_server.address, reader)).sendall(get_of(ticket))
        wait_for(lambda: log_server.threads() > MOST_ANSWERS_OF_HOLDER + 150, 20, "the calls")
        with log_server.client(log_server.authority.issue("lake")) as lake:
            assert len([*lake.read("shop", first, first + 1)]) == 1
        assert log_server.peak() - before < MOST_ANSWERS_OF_HOLDER * 5 * MIB


def begun_calls(number: int) -> bytes:
    """The headers of so many calls, which never send a request: the first in full, each of the others as six bytes that repeat it."""
    names = ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
    path = b"/arrow.flight.protocol.FlightService/DoAction"
    head = b"\x83\x87\x44" + bytes([len(path)]) + path + b"\x41\x09localhost"
    for name, value in names:
        head += b"\x40" + bytes([len(name)]) + name + bytes([len(value)]) + value
    heads = [head, *[b"\x83\x87\xc1\xc0\xbf\xbe"] * (number - 1)]
    frames = (
        len(each).to_bytes(3, "big") + b"\x01\x04" + (2 * at + 1).to_bytes(4, "big") + each
        for at, each in enumerate(heads)
    )
    return PREFACE + SETTINGS + b"".join(frames)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[LogServer]:
    """A log server that has no memory yet which it keeps, and whose threads are gone with it."""
    with LogServer.running(tmp_path) as found:
        yield found


def test_39_calls_that_are_only_begun_end_with_their_connection(fresh: LogServer) -> None:
    """150 KB of them took 130 MB of memory, and a thread each when they ended; ten times as many exhausted both."""
    reader = fresh.authority.issue("reader", streams=("other",))
    with in_tls(fresh.address, reader) as connection:
        connection.sendall(begun_calls(10_000))
        connection.settimeout(30)
        closed_by_server(connection)


def is_closed(connection: ssl.SSLSocket) -> bool:
    connection.settimeout(0.1)
    try:
        closed_by_server(connection)
    except TimeoutError:
        return False
    return True


def test_39_calls_that_a_crowd_only_begins_end_with_their_connections(fresh: LogServer) -> None:
    """Each with fewer bytes than a single one may wait with."""
    reader = fresh.authority.issue("reader", streams=("other",))
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(in_tls(fresh.address, reader)) for _ in range(6)]
        for connection in crowd:
            connection.sendall(begun_calls(1_600))
        wait_for(lambda: any(map(is_closed, crowd)), 30, "the first of them are closed")
