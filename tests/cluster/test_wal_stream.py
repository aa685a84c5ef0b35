"""Physical WAL from real walsenders: over segments, over a promotion, read directly and through libpq."""

import select
import time
from pathlib import Path

import psycopg
import pytest

from tests.support.servers import MakeServer
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import ConnectionFailedError
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.quorum.proposer.primary import wal_stream
from walsender_bridge.quorum.proposer.primary.copy_both import LibpqCopy
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream
from walsender_bridge.quorum.proposer.primary.wal_stream import SocketCopy, WalStream

SEGMENT = 16 << 20


def run(server: LocalServer, statement: str) -> str:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return str(cursor.fetchone()[0]) if cursor.description else ""  # type: ignore[index]


def flushed(server: LocalServer) -> int:
    return parse_lsn(run(server, "SELECT pg_current_wal_flush_lsn()"))


@pytest.fixture
def promoted(make_server: MakeServer) -> tuple[LocalServer, int, int]:
    """A server that was promoted; where it had begun to write, and where it left timeline 1."""
    server = make_server(wal_keep_size="1GB")
    server.start()
    begin = flushed(server)
    run(server, "CREATE TABLE filler AS SELECT repeat('x', 1000) FROM generate_series(1, 20000)")
    server.stop()
    signal = Path(server.data_dir) / "standby.signal"
    signal.touch()
    signal.chmod(0o644)
    server.start()
    run(server, "SELECT pg_promote()")
    run(server, "CREATE TABLE after_the_switch (number int)")
    with PrimaryStream.connect(server.dsn()) as asked:
        ((timeline, left),) = asked.primary().lineage.switches
    assert timeline == 1
    return server, begin, left


def collect(stream: WalStream, end: int) -> bytes:
    """All up to `end`."""
    first, found = stream.lsn, bytearray()
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    deadline = time.monotonic() + 20
    while first + len(found) < end:
        assert time.monotonic() < deadline
        for piece in stream.pieces():
            found += piece
        stream.flush()
        poll.poll(100)
    return bytes(found[: end - first])


def on_disk(server: LocalServer, begin: int, end: int, left: int) -> bytes:
    """The same bytes, from the server's own segments."""
    found, at = bytearray(), begin
    while at < end:
        start = at - at % SEGMENT
        timeline = 1 if start + SEGMENT <= left else 2
        number = start // SEGMENT
        name = f"{timeline:08X}{number // 256:08X}{number % 256:08X}"
        data = (Path(server.data_dir) / "pg_wal" / name).read_bytes()
        stop = min(end, start + SEGMENT)
        found += data[at - start : stop - start]
        at = stop
    return bytes(found)


@pytest.mark.parametrize("through_libpq", [False, True])
def test_13_wal_goes_on_over_segments_and_over_a_promotion(promoted, monkeypatch, through_libpq):
    server, begin, left = promoted
    kind = LibpqCopy if through_libpq else SocketCopy
    monkeypatch.setattr(wal_stream, "SocketCopy", kind)
    end = flushed(server)
    assert begin // SEGMENT < left // SEGMENT
    assert left < end
    with WalStream(PrimaryStream.connect(server.dsn()), begin, 1, 2) as stream:
        assert collect(stream, end) == on_disk(server, begin, end, left)
        assert stream.timeline == 2
    # Exactly at the switch there is nothing left of timeline 1: no copy, only what follows.
    with WalStream(PrimaryStream.connect(server.dsn()), left, 1, 2) as stream:
        assert collect(stream, end) == on_disk(server, left, end, left)
        assert stream.timeline == 2
    # Nor does it leave the timeline that it was opened for: what follows is another term's.
    with WalStream(PrimaryStream.connect(server.dsn()), begin, 1, 1) as stream:
        with pytest.raises(ConnectionFailedError, match="it was promoted"):
            collect(stream, end)
        assert stream.lsn == left
