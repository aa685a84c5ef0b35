"""PostgreSQL's own clients read WAL from a safekeeper's folder, as far as it is committed, and no further."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.servers import MAJORS_IN_TURN, MakeServer
from tests.support.waiting import wait_for
from tests.support.wal_server import (
    HeldWal,
    Receiver,
    Receivers,
    WalServerProcess,
    backup,
    keep_wal,
    make_standby,
    replayed,
    run,
)
from walsender_bridge.demo.local_server import LocalServer, by_major
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.postgres.protocol.wal_page import segment_name
from walsender_bridge.quorum.wal_server.wal_folder import PARTIAL

#: Majors that have client tools here; a bare server has none.
WITH_TOOLS = [
    each
    for each in MAJORS_IN_TURN
    if isinstance(each.values[0], int)
    and (by_major()[each.values[0]].bin_dir / "pg_receivewal").exists()
]


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
def wal_server(primary: LocalServer, held: HeldWal, tmp_path: Path) -> Iterator[WalServerProcess]:
    held.take(primary)
    held.publish()
    with WalServerProcess(tmp_path, held) as server:
        yield server


def fill(server: LocalServer, rows: int) -> None:
    run(
        server,
        f"INSERT INTO t SELECT n, repeat(md5(n::text), 20) FROM generate_series(1, {rows}) n",
    )


def test_13_pg_receivewal_gets_the_committed_wal_and_not_a_byte_more(
    primary: LocalServer,
    held: HeldWal,
    wal_server: WalServerProcess,
    tmp_path: Path,
    receive: Receivers,
) -> None:
    fill(primary, 1000)
    held.take(primary)
    held.publish(commit=held.start + 12345)
    receiver = receive(primary, wal_server.dsn(), tmp_path / "received", "--synchronous")
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
            wait_for(partial(receiver.has, held, served), 30, f"step {step} is received")
            receiver.check(held, served)
    finally:
        print(receiver.stop())
    receiver.check(held, held.position)
    assert held.end - held.start > 2 * held.segment_bytes


def count(server: LocalServer) -> int:
    return int(run(server, "SELECT count(*) FROM t")[0][0])


def has_rows(server: LocalServer, rows: int) -> bool:
    return count(server) == rows


def received(server: LocalServer) -> int:
    found = run(server, "SELECT pg_last_wal_receive_lsn()")[0][0]
    return parse_lsn(found) if found else 0


def test_13_standbys_replay_the_committed_wal_and_follow_a_timeline_switch(
    primary: LocalServer,
    held: HeldWal,
    wal_server: WalServerProcess,
    tmp_path: Path,
    receive: Receivers,
) -> None:
    made: list[LocalServer] = []

    def standby(origin: LocalServer, upstream: str, **settings: str) -> LocalServer:
        place = primary.folder.with_name(f"standby-{len(made)}")
        made.append(make_standby(origin, place, upstream, fsync="off", **settings))
        # It is consistent, and can be asked, once it has the WAL of its backup.
        held.take(primary)
        held.publish()
        made[-1].start()
        return made[-1]

    try:
        fill(primary, 100)
        direct = standby(primary, wal_server.dsn(), hot_standby_feedback="on")
        candidate = standby(primary, wal_server.dsn(application_name="candidate"))
        wait_for(lambda: replayed(direct) >= held.position, 60, "the standby has replayed")
        cascading = standby(direct, direct.dsn(replication="true"))
        receiver = receive(primary, wal_server.dsn(), tmp_path / "received")
        wait_for(lambda: count(direct) == 100, 30, "the standby is queryable")

        # What is on disk and has no quorum is not for readers.
        fill(primary, 50)
        held.take(primary)
        withheld = held.publish(commit=held.position)
        fill(primary, 7)
        held.take(primary)
        held.publish(commit=withheld + 1000)
        wait_for(lambda: received(direct) == held.position, 30, "it has what is committed")
        assert received(candidate) <= held.position
        assert count(direct) == 100

        # Its oldest transaction reaches the hot loop.
        wait_for(lambda: held.readers().feedback.xmin >= 3, 30, "feedback is handed out")
        wait_for(lambda: held.readers().count == 3, 30, "and how many stream")

        held.publish()
        for server in (direct, candidate, cascading):
            wait_for(partial(has_rows, server, 157), 60, "all has been replayed")

        # The others get some WAL that the candidate never sees: part of a record that nobody completes.
        run(candidate, "SELECT pg_promote()")
        primary.stop("immediate")
        fork = held.switch_to(candidate)
        fill(candidate, 20)
        held.take(candidate)
        held.publish()
        assert fork <= held.position
        for server in (direct, cascading):
            wait_for(partial(has_rows, server, 177), 60, "the new timeline is replayed")
            assert run(server, "SELECT pg_is_in_recovery()")[0][0]
        wait_for(lambda: receiver.has(held, held.position), 60, "pg_receivewal has followed")
        print(receiver.stop())
        receiver.check(held, held.position)
        assert (receiver.folder / "00000002.history").exists()
    finally:
        for server in reversed(made):
            print(server.log_tail(30))
            server.destroy()


def test_14_a_base_backup_and_the_wal_from_here_rebuild_a_lost_primary(
    primary: LocalServer,
    held: HeldWal,
    wal_server: WalServerProcess,
    tmp_path: Path,
    receive: Receivers,
) -> None:
    # It archives from before the backup on.
    receiver = receive(primary, wal_server.dsn(), tmp_path / "received")
    wait_for(partial(receiver.has, held, held.position), 60, "it has begun")
    rebuilt = backup(primary, primary.folder.with_name("rebuilt"), fsync="off")
    try:
        fill(primary, 30_000)
        held.take(primary)
        held.publish()
        # Lost with its disk; what had no quorum is lost with it.
        fill(primary, 5)
        primary.destroy()
        wait_for(partial(receiver.has, held, held.position), 60, "all WAL is received")
        print(receiver.stop())
        receiver.check(held, held.position)
        for each in receiver.folder.iterdir():
            target = rebuilt.data_dir / "pg_wal" / each.name.removesuffix(PARTIAL)
            shutil.copyfile(each, target)
            shutil.chown(target, rebuilt._account.uid, rebuilt._account.gid)
        rebuilt.start()
        assert count(rebuilt) == 30_000
        fill(rebuilt, 1)
    finally:
        print(rebuilt.log_tail(30))
        rebuilt.destroy()


def test_10_a_slot_keeps_wal_and_says_so_to_the_hot_loop(
    primary: LocalServer,
    held: HeldWal,
    wal_server: WalServerProcess,
    tmp_path: Path,
    receive: Receivers,
) -> None:
    fill(primary, 30_000)
    held.take(primary)
    held.publish()
    wait_for(held.readers, 30, "the server has told what the readers need")
    assert held.readers().pin_lsn is None

    def run_in(folder: str, *options: str) -> Receiver:
        return receive(primary, wal_server.dsn(), tmp_path / folder, *options)

    made = run_in("none", "--slot=archive", "--create-slot")
    assert made.process.wait(30) == 0, made.stop()
    again = run_in("none", "--slot=archive", "--create-slot")
    assert again.process.wait(30) != 0
    assert 'replication slot "archive" already exists' in again.stop()
    assert held.readers().pin_lsn is None  # it has no reader yet

    first = run_in("first", "--slot=archive", "--synchronous")
    try:
        wait_for(lambda: first.has(held, held.position), 60, "all is received")
        # Written down when it has left a segment, and told only then.
        wait_for(lambda: held.readers().pin_lsn, 30, "it pins what it has confirmed")
        second = run_in("second", "--slot=archive", "--no-loop")
        assert second.process.wait(30) != 0
        assert 'replication slot "archive" is active' in second.stop()
        dropping = run_in("none", "--slot=archive", "--drop-slot")
        assert dropping.process.wait(30) != 0
    finally:
        print(first.stop())
    confirmed = held.position
    assert wal_server.stop() == 0
    pinned = held.readers().pin_lsn
    assert pinned is not None
    assert pinned <= confirmed
    wal_server.start()
    assert held.readers().pin_lsn == pinned

    # It goes on where it was, with a folder that is empty and WAL before the slot's that is gone.
    fill(primary, 30_000)
    held.take(primary)
    held.publish()
    for path in sorted(held.folder.iterdir()):
        if path.name < segment_name(1, pinned, held.segment_bytes):
            path.unlink()
    if primary.installation.major >= 15:
        rest = run_in("rest", "--slot=archive")
        try:
            wait_for(lambda: rest.has(held, held.position), 60, "the rest is received")
        finally:
            print(rest.stop())
        rest.check(held, held.position)
    lost = run_in("first", "--slot=no_such_slot", "--no-loop")
    assert lost.process.wait(30) != 0
    assert 'replication slot "no_such_slot" does not exist' in lost.stop()
    dropped = run_in("none", "--slot=archive", "--drop-slot")
    assert dropped.process.wait(30) == 0, dropped.stop()
    assert held.readers().pin_lsn is None
