"""Safekeepers whose disk fills up, and how old WAL goes: with limits, and on a small disk of its own."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.quorum_stack import QuorumStack, load_server
from tests.support.servers import MakeServer
from tests.support.small_disk import fill, mounted
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.quorum.proposer.effects import Limits
from walsender_bridge.quorum.safekeeper.storage.segments import StorageLimits

MIB = 1 << 20


@pytest.fixture
def primary(make_server: MakeServer) -> LocalServer:
    return load_server(
        make_server, small=True, wal_level="replica", max_wal_size="64MB", checkpoint_timeout="1h"
    )


@pytest.fixture
def quorum(tmp_path: Path, primary: LocalServer) -> Iterator[QuorumStack]:
    with QuorumStack(tmp_path, primary) as stack:
        yield stack


def wal_files(quorum: QuorumStack, number: int) -> list[Path]:
    """Segments, whole or not, spares too. What goes meanwhile is not there."""
    found = []
    for path in (quorum.data(number) / "wal").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size >= MIB:
                found.append(path)
    return found


def test_31_at_its_limit_it_takes_no_wal_and_goes_on_when_old_wal_may_go(quorum):
    quorum.options["safekeeper-0"] = {
        "limits": StorageLimits(wal_bytes=12 * MIB),
        "status_file": quorum.folder / "safekeeper-0.json",
    }
    quorum.options["proposer"] = {"limits": Limits(full_ticks=100_000)}
    quorum.start()
    quorum.attach()
    quorum.insert(0)
    with quorum.wal_server(0):
        quorum.kill("safekeeper-2")  # nobody may remove what it lacks
        stuck = quorum.ask("SELECT pg_current_wal_insert_lsn()")[0][0]
        quorum.make_wal(30)
        wait_for(lambda: "its limit is" in quorum.fault(0), 20, "its state says that it is full")
        own = quorum.folder / "safekeeper-0.json"
        wait_for(lambda: "no space for more WAL" in own.read_text(), 20, "its own file says so")
        assert len(wal_files(quorum, 0)) <= 12
        assert quorum.held(0) < parse_lsn(quorum.flush_lsn())
        # It is not acknowledged: with one other there is no quorum for what is beyond.
        assert parse_lsn(quorum.status()["commit_lsn"]) < parse_lsn(stuck) + 13 * MIB
        # What it keeps for the one that was away may go when that one is back: there is room again.
        quorum.start("safekeeper-2")
        end = parse_lsn(quorum.flush_lsn())
        wait_for(lambda: quorum.held(0) >= end, 60, f"it goes on: {quorum.logs()}")
        wait_for(lambda: not quorum.fault(0), 20, "it says so")
        assert len(wal_files(quorum, 0)) <= 12
        quorum.insert(1)


@pytest.mark.long
def test_36_a_dead_safekeeper_does_not_fill_the_disks_of_the_others(quorum):
    """Their disks hold much less than `max_laggard_bytes`, and `keep_bytes` alone is more than they hold."""
    for name in quorum.names:
        quorum.options[name] = {
            "limits": StorageLimits(wal_bytes=12 * MIB),
            "keep_bytes": 1 << 30,
        }
    quorum.start()
    quorum.attach()
    quorum.insert(0)
    with quorum.wal_server(0), quorum.wal_server(1), quorum.wal_server(2):
        quorum.kill("safekeeper-2")
        quorum.make_wal(14)
        quorum.insert(1, timeout_ms=60_000)
        wait_for(lambda: quorum.status()["rebuild"], 10, "it is said")
        assert len(wal_files(quorum, 0)) <= 12
        # It comes back, and is one of the quorum again.
        quorum.start("safekeeper-2")
        end = parse_lsn(quorum.flush_lsn())
        wait_for(lambda: quorum.held(2) >= end, 60, f"it is rebuilt: {quorum.logs()}")
        quorum.kill("safekeeper-1")
        quorum.insert(2)


def test_9_a_full_disk_is_named_and_nothing_acknowledged_until_there_is_room(quorum):
    quorum.data(0).mkdir()
    with mounted(quorum.data(0), "-o", "size=24m"):
        quorum.options["safekeeper-0"] = {"limits": StorageLimits(free_bytes=0)}
        quorum.start()
        try:
            quorum.attach()
            quorum.insert(0)
            ballast = quorum.data(0) / "wal" / "ballast"
            fill(ballast)
            quorum.kill("safekeeper-1")  # now the full one is needed
            end = quorum.make_wal(8)
            wait_for(
                lambda: "full" in quorum.log("safekeeper-0").read_text(), 20, "it says that it is"
            )
            assert quorum.held(0) < end
            assert parse_lsn(quorum.status()["commit_lsn"]) < end
            ballast.unlink()
            wait_for(lambda: quorum.held(0) >= end, 30, f"it goes on: {quorum.logs()}")
            quorum.insert(1)
        finally:
            for name in list(quorum.processes):
                quorum.kill(name)


def test_10_old_wal_goes_at_the_horizon_and_not_before(quorum, tmp_path):
    archive = tmp_path / "archive"
    archive.mkdir()
    url = archive.as_uri()
    quorum.options["safekeeper-0"] = {"archive": url}
    quorum.options["archiver-0"] = {"archive": url}
    quorum.start()
    quorum.attach()
    quorum.insert(0)
    with quorum.wal_server(0), quorum.wal_server(1):
        end = quorum.make_wal(8)
        wait_for(lambda: min(map(quorum.held, range(3))) >= end, 20, "all have it")
        # The second one, which has no archive, removes it; the first keeps all that is not archived.
        wait_for(lambda: len(wal_files(quorum, 1)) <= 5, 20, "old WAL goes")
        assert len(wal_files(quorum, 0)) >= 8
        kept = quorum.segments(0)
        quorum.start("archiver-0")
        wait_for(lambda: len(wal_files(quorum, 0)) <= 5, 30, f"it goes, too: {quorum.logs()}")
        # The newest of them may be archived after the oldest are gone.
        wait_for(lambda: kept.keys() <= {path.name for path in archive.iterdir()}, 30, "archived")
        for name, content in kept.items():
            assert (archive / name).read_bytes() == content
    # A safekeeper that is away holds it everywhere.
    with quorum.wal_server(1):
        quorum.kill("safekeeper-2")
        oldest = min(quorum.segments(1), default="")
        end = quorum.make_wal(8)
        wait_for(lambda: quorum.held(1) >= end, 20, "it has it")
        quorum.insert(1)
        assert len(wal_files(quorum, 1)) >= 8
        assert min(quorum.segments(1)) >= oldest
        quorum.start("safekeeper-2")
        wait_for(lambda: quorum.held(2) >= end, 30, "it is back")
        wait_for(lambda: len(wal_files(quorum, 1)) <= 6, 20, "now it goes")


def test_17_the_wal_of_a_segment_that_the_server_has_let_go_is_not_needed_to_compare(quorum):
    quorum.start()
    quorum.attach()
    quorum.make_wal(3)
    quorum.ask("SELECT pg_switch_wal()")
    quorum.insert(0)
    quorum.kill("proposer")
    quorum.ask("SELECT pg_drop_replication_slot('tuskline_safekeepers')")
    before = quorum.ask("SELECT min(name) FROM pg_ls_waldir() WHERE length(name) = 24")
    quorum.ask("CHECKPOINT")
    assert quorum.ask("SELECT min(name) FROM pg_ls_waldir() WHERE length(name) = 24") > before
    quorum.start("proposer")
    wait_for(quorum.is_sync, 30, f"a proposer leads: {quorum.logs()}")
    quorum.insert(1)
