"""Safekeepers that stay behind: fed from the primary or from another one, with bounded memory and bounded pg_wal."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.quorum_stack import QuorumStack, load_server, peak_memory
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import Cause
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.quorum.proposer.effects import Limits

MIB = 1 << 20


@pytest.fixture
def primary(make_server: MakeServer) -> LocalServer:
    return load_server(
        make_server,
        small=True,
        wal_level="replica",
        min_wal_size="8MB",
        max_wal_size="16MB",
        checkpoint_timeout="1h",
    )


@pytest.fixture
def quorum(tmp_path: Path, primary: LocalServer) -> Iterator[QuorumStack]:
    with QuorumStack(tmp_path, primary) as stack:
        stack.options["proposer"] = {"limits": Limits(queue_bytes=8 * MIB)}
        yield stack


def files(quorum: QuorumStack, number: int) -> list[str]:
    """A safekeeper's segments, the incomplete one too, in the order of the WAL."""
    found = (quorum.data(number) / "wal").glob("0*")
    return sorted(path.name.removesuffix(".partial") for path in found)


def pg_wal_bytes(quorum: QuorumStack) -> int:
    """After a checkpoint, which removes what no slot keeps. What goes meanwhile is not there."""
    quorum.ask("CHECKPOINT")
    found = 0
    for path in (quorum.server.data_dir / "pg_wal").glob("0*"):
        with suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


def test_8_a_laggard_catches_up_from_the_primary_in_bounded_memory(quorum):
    quorum.start()
    quorum.attach()
    quorum.insert(0)
    quorum.kill("safekeeper-2")
    behind = quorum.make_wal(90)
    wait_for(lambda: quorum.held(0) >= behind, 30, "the others have it")
    # The slot keeps it for the one that is away.
    assert pg_wal_bytes(quorum) > 90 * MIB
    before = peak_memory(quorum.processes["proposer"])
    quorum.start("safekeeper-2")
    wait_for(lambda: quorum.held(2) >= behind, 60, "it catches up")
    grown = peak_memory(quorum.processes["proposer"]) - before
    print(
        "proposer grew by", grown, "laggard's peak", peak_memory(quorum.processes["safekeeper-2"])
    )
    assert grown < 40 * MIB
    fresh, rest = (
        peak_memory(quorum.processes["safekeeper-2"]),
        peak_memory(quorum.processes["safekeeper-0"]),
    )
    assert fresh < rest + 20 * MIB
    # And lets go of it afterwards.
    end = quorum.make_wal(3)
    wait_for(lambda: min(map(quorum.held, range(3))) >= end, 20, "all have it")
    wait_for(lambda: pg_wal_bytes(quorum) < 48 * MIB, 20, "pg_wal is small again")


def test_8_two_laggards_at_different_places_catch_up_at_once(quorum):
    quorum.start()
    quorum.attach()
    quorum.insert(0)
    quorum.kill("safekeeper-2")
    quorum.make_wal(20)
    quorum.kill("safekeeper-1")
    behind = quorum.make_wal(60)
    began = time.monotonic()
    quorum.start("safekeeper-1", "safekeeper-2")
    try:
        wait_for(lambda: min(map(quorum.held, range(3))) >= behind, 60, "both catch up")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{quorum.status()}\n{quorum.logs()}") from None
    print("both caught up in", round(time.monotonic() - began, 1), "s")
    quorum.insert(1)


def test_8_beyond_what_the_primary_keeps_it_catches_up_from_a_peer(quorum):
    limits = Limits(queue_bytes=8 * MIB, max_laggard_bytes=16 * MIB)
    quorum.options["proposer"] = {"limits": limits}
    quorum.start()  # without WAL servers beside them, safekeepers keep all their WAL
    quorum.attach()
    quorum.insert(0)
    wait_for(lambda: quorum.segments(2) is not None and quorum.held(2), 20, "it has something")
    quorum.kill("safekeeper-2")
    oldest = files(quorum, 2)[0]
    behind = quorum.make_wal(60)
    wait_for(lambda: quorum.status()["rebuild"], 20, "it is given up")
    wait_for(lambda: pg_wal_bytes(quorum) < 48 * MIB, 20, "pg_wal is bounded")
    assert not (quorum.server.data_dir / "pg_wal" / oldest).exists()
    before = peak_memory(quorum.processes["safekeeper-0"])
    quorum.start("safekeeper-2")
    wait_for(lambda: quorum.held(2) >= behind, 60, f"it catches up {quorum.logs()}")
    wait_for(lambda: not quorum.status()["rebuild"], 10, "it is no more to be rebuilt")
    # From where it was, not anew; and the one that it was read from needed little memory.
    assert files(quorum, 2)[0] == oldest
    assert quorum.segments(2) == quorum.segments(0)
    assert peak_memory(quorum.processes["safekeeper-0"]) - before < 20 * MIB


def test_27_who_stays_too_far_behind_lets_go_of_the_wal_and_is_rebuilt(quorum):
    limits = Limits(queue_bytes=8 * MIB, max_laggard_bytes=16 * MIB)
    quorum.options["proposer"] = {"limits": limits}
    quorum.start()
    quorum.attach()
    quorum.insert(0)
    with quorum.wal_server(0), quorum.wal_server(1):
        quorum.kill("safekeeper-2")
        oldest = files(quorum, 2)[0]
        behind = quorum.make_wal(60)
        wait_for(lambda: quorum.status()["rebuild"], 20, "it is marked")
        assert "needs a full resync" in quorum.log("proposer").read_text()
        wait_for(lambda: pg_wal_bytes(quorum) < 48 * MIB, 20, "pg_wal is bounded")
        wait_for(
            lambda: oldest not in files(quorum, 0) + files(quorum, 1),
            20,
            "the others have removed what it lacks",
        )
        quorum.start("safekeeper-2")
        wait_for(lambda: quorum.held(2) >= behind, 60, f"it is rebuilt {quorum.logs()}")
        wait_for(lambda: not quorum.status()["rebuild"], 10, "it is no more to be rebuilt")
        assert oldest not in files(quorum, 2)
        quorum.kill("safekeeper-1")
        quorum.insert(1)  # with the one that was rebuilt


def test_20_a_laggard_s_reading_does_not_hold_up_a_fast_shutdown(quorum):
    quorum.start()
    quorum.attach()
    quorum.insert(0)
    quorum.kill("safekeeper-2")
    behind = quorum.make_wal(40)
    quorum.start("safekeeper-2")
    wait_for(lambda: quorum.held(2) >= behind, 60, "it catches up")
    quorum.insert(1)
    began = time.monotonic()
    quorum.server.stop("fast")
    assert time.monotonic() - began < 10


def test_20_a_laggard_that_hangs_in_its_reading_does_not_hold_up_a_fast_shutdown(quorum):
    """Its connection to the primary is full, and a server waits for such a walsender before it ends the others."""
    quorum.start()
    quorum.attach()
    quorum.insert(0)
    for _ in range(10):  # it may have caught up before it is stopped
        quorum.kill("safekeeper-2")
        end = quorum.make_wal(120)
        quorum.start("safekeeper-2")
        wait_for(lambda: quorum.held(2) > 0, 30, "it reads")
        quorum.pause("safekeeper-2")
        if quorum.held(2) < end:
            break
    assert quorum.held(2) < end
    began = time.monotonic()
    quorum.server.stop("fast")
    assert time.monotonic() - began < 8


def remove_wal(quorum: QuorumStack, needed: str, *, followed: bool) -> None:
    """Have the server remove WAL that no slot keeps, that segment included; `followed`: by a quorum, which gets it first."""
    segment = quorum.server.data_dir / "pg_wal" / needed
    for _ in range(2):  # they are removed behind the checkpoint before the last
        quorum.ask("SELECT pg_switch_wal()")
        if followed:
            # Until something is written behind it, the rest of the segment is not flushed, and not sent.
            quorum.ask(
                "SET synchronous_commit = local; SELECT pg_logical_emit_message(true, 'x', 'y')"
            )
            wait_for(lambda: quorum.committed_to(quorum.flush_lsn()), 30, "a quorum has it")
        quorum.ask("CHECKPOINT")
    assert not segment.exists()


def test_27_a_lost_slot_is_replaced_when_a_quorum_has_all_wal(quorum):
    quorum.start()
    quorum.attach()
    quorum.insert(0)
    quorum.kill("safekeeper-2")
    oldest = files(quorum, 2)[0]
    quorum.ask("ALTER SYSTEM SET max_slot_wal_keep_size = '4MB'")
    # The stream has no slot, and must not lose WAL to a checkpoint of the server's own, too.
    quorum.ask("ALTER SYSTEM SET max_wal_size = '1GB'")
    quorum.ask("SELECT pg_reload_conf()")
    for _ in range(8):
        quorum.make_wal(2)
        wait_for(lambda: quorum.committed_to(quorum.flush_lsn()), 30, "a quorum has it")
    behind = parse_lsn(quorum.flush_lsn())
    remove_wal(quorum, oldest, followed=True)
    lost = "SELECT wal_status FROM pg_replication_slots"
    assert quorum.ask(lost) == [("lost",)]
    quorum.kill("proposer")
    quorum.start("proposer")
    quorum.insert(1)
    assert quorum.ask(lost) != [("lost",)]
    quorum.start("safekeeper-2")  # what it lacks comes from the others
    wait_for(lambda: quorum.held(2) >= behind, 60, f"it catches up {quorum.logs()}")


def test_27_wal_that_a_quorum_lacks_and_the_server_removed_is_named(quorum):
    quorum.start()
    quorum.attach()
    quorum.insert(0)
    quorum.kill("safekeeper-1")
    quorum.kill("safekeeper-2")
    behind = quorum.make_wal(12)
    wait_for(lambda: quorum.held(0) >= behind, 30, "one of three has it")
    needed = files(quorum, 1)[-1]
    quorum.kill("proposer")
    quorum.kill("safekeeper-0")
    quorum.ask("SELECT pg_drop_replication_slot('tuskline_safekeepers')")
    remove_wal(quorum, needed, followed=False)
    quorum.start("safekeeper-1", "safekeeper-2", "proposer")
    process = quorum.processes["proposer"]
    wait_for(lambda: process.poll() is not None, 30, f"it says so: {quorum.logs()}")
    assert process.returncode == Cause.DIVERGED
    error = quorum.status()["error"]
    assert "this server has removed WAL that the safekeepers lack" in error["what"]
    assert "tuskline quorum release" in error["repair"]
