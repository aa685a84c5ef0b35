"""PostgreSQL's own clients read WAL from a safekeeper's folder, as far as it is committed, and no further."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import MakeServer, majors
from tests.support.waiting import wait_for
from tests.support.wal_server import HeldWal, Receiver, WalServerProcess, keep_wal, run
from walsender_bridge.local_server import LocalServer, by_major

#: Majors that have client tools here; a bare server has none.
WITH_TOOLS = [m for m in majors() if (by_major()[m].bin_dir / "pg_receivewal").exists()]


@pytest.fixture(params=WITH_TOOLS, ids="pg{}".format)
def primary(make_server: MakeServer, request: pytest.FixtureRequest) -> LocalServer:
    """A primary of each major, with some WAL."""
    server = make_server(request.param, fsync="off", **keep_wal(request.param))
    server.start()
    run(server, "CREATE TABLE t (n int, filler text)")
    return server


@pytest.fixture
def held(primary: LocalServer, tmp_path: Path) -> Iterator[HeldWal]:
    wal = HeldWal(tmp_path, primary)
    yield wal
    wal.close()


@pytest.fixture
def wal_server(held: HeldWal, tmp_path: Path) -> Iterator[WalServerProcess]:
    held.publish()
    with WalServerProcess(tmp_path, held) as server:
        yield server


def fill(server: LocalServer, rows: int) -> None:
    run(
        server,
        f"INSERT INTO t SELECT n, repeat(md5(n::text), 20) FROM generate_series(1, {rows}) n",
    )


def test_13_pg_receivewal_gets_the_committed_wal_and_not_a_byte_more(
    primary: LocalServer, held: HeldWal, wal_server: WalServerProcess, tmp_path: Path
) -> None:
    fill(primary, 1000)
    held.take(primary)
    held.publish(commit=held.start + 12345)
    receiver = Receiver(primary, wal_server.dsn(), tmp_path / "received", "--synchronous")
    try:
        for step in range(12):
            fill(primary, 4000)
            before = held.end
            end = held.take(primary)
            # In mid-page and mid-record, flush ahead of commit and commit ahead of flush, in turn.
            position = before + (end - before) * 2 // 3 + step
            served = (
                held.publish(commit=position)
                if step % 2
                else held.publish(commit=end, flush=position)
            )
            wait_for(lambda at=served: receiver.has(held, at), 30, f"step {step} is received")
            receiver.check(held, served)
    finally:
        print(receiver.stop())
    receiver.check(held, held.position)
    assert held.end - held.start > 2 * held.segment_bytes
