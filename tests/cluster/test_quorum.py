"""Safekeepers around a real primary: a COMMIT returns when a quorum has its WAL, and only then."""

import random
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.quorum_bank import Bank
from tests.support.quorum_stack import Load, QuorumStack, load_server, waits
from tests.support.servers import DEFAULT, MAJORS_IN_TURN, MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.frames import FrameKind
from walsender_bridge.quorum.protocol.message_socket import WireEnd
from walsender_bridge.quorum.protocol.messages import (
    NodeId,
    ProposerGreeting,
    Purpose,
    ServerInfo,
    Vote,
)
from walsender_bridge.runtime.commit_page import CommitPageReader


@pytest.fixture
def primary(make_server: MakeServer, request: pytest.FixtureRequest) -> LocalServer:
    return load_server(make_server, getattr(request, "param", DEFAULT), wal_level="replica")


@pytest.fixture
def quorum(tmp_path: Path, primary: LocalServer) -> Iterator[QuorumStack]:
    with QuorumStack(tmp_path, primary) as stack:
        stack.start()
        stack.attach()
        yield stack


@pytest.mark.parametrize("primary", MAJORS_IN_TURN, indirect=True)
def test_7_segments_are_equal_to_each_other_and_to_the_primary_s(quorum):
    for number in range(3):
        quorum.insert(number)
        quorum.ask("SELECT pg_switch_wal()")
    lsn = quorum.flush_lsn()
    wait_for(lambda: quorum.committed_to(lsn), 20, "the quorum has it all")
    wal = quorum.server.data_dir / "pg_wal"
    wait_for(
        lambda: all(len(quorum.segments(n)) == len(quorum.segments(0)) >= 3 for n in range(3)),
        20,
        "all three have the segments",
    )
    for name, content in quorum.segments(0).items():
        assert quorum.segments(1)[name] == quorum.segments(2)[name] == content
        assert (wal / name).read_bytes() == content


def test_5_a_minority_that_hangs_stops_nothing_a_majority_everything(quorum):
    quorum.insert(1)
    quorum.pause("safekeeper-0")
    quorum.insert(2)
    quorum.pause("safekeeper-1")
    waiting = waits(quorum.server, 3)
    quorum.resume("safekeeper-1")
    waiting.join(20)
    assert not waiting.is_alive(), quorum.logs()
    quorum.resume("safekeeper-0")
    quorum.insert(4)


@pytest.mark.parametrize("primary", MAJORS_IN_TURN, indirect=True)
def test_1_each_process_is_restarted_and_nothing_acknowledged_is_lost(quorum):
    quorum.insert(0)
    load = Load(quorum.server)
    for name in (*quorum.names, "proposer", *quorum.names, "proposer"):
        before = len(load.acknowledged)
        quorum.kill(name)
        quorum.start(name)
        wait_for(lambda: len(load.acknowledged) > before + 5, 30, f"commits after {name}")  # noqa: B023
    acknowledged = load.stop()
    quorum.server.restart("immediate")
    wait_for(quorum.is_sync, 30, "the proposer is back after the primary's restart")
    found = {number for (number,) in quorum.ask("SELECT number FROM load")}
    assert set(acknowledged) <= found
    lsn = quorum.flush_lsn()
    wait_for(lambda: quorum.committed_to(lsn), 20, "the quorum has it all")
    assert quorum.kill("proposer", 15) == 0
    assert [quorum.kill(name, 15) for name in quorum.names] == [0, 0, 0]


def test_4_a_second_proposer_displaces_the_first_which_says_who(quorum):
    quorum.insert(1)
    first = quorum.processes.pop("proposer")
    quorum.start("proposer")
    assert first.wait(timeout=90) == 11, quorum.logs()
    assert "displaced" in quorum.log("proposer").read_text()
    wait_for(quorum.is_sync, 30, "the second is the standby")
    quorum.insert(2)


def test_33_a_vote_for_a_dead_proposer_displaces_nobody(quorum):
    """As the last vote of a process that was killed, which arrives when the next one already leads."""
    quorum.insert(1)
    term = quorum.status()["term"]
    vote_for_the_dead(quorum, 2, term + 7, quorum.status())
    wait_for(
        lambda: (quorum.status().get("term") or 0) > term + 7, 30, "it campaigns above that term"
    )
    quorum.kill("safekeeper-0")  # so the one that voted is needed
    quorum.insert(2)
    # Soon after the first of these the proposer has no session to speak of, and then campaigns above it.
    said = quorum.status()
    for number in (1, 2):
        vote_for_the_dead(quorum, number, said["term"] + 7 * number, said)
    quorum.insert(3)
    assert quorum.processes["proposer"].poll() is None


def vote_for_the_dead(quorum: QuorumStack, number: int, term: int, said: dict[str, Any]) -> None:
    """Have a safekeeper vote for a proposer in this term that is gone before anybody hears of it.

    `said`: the leader's status.
    """
    server = ServerInfo(**said["server"])
    members = frozenset(int(each, 16) for each in said["membership"]["members"])
    generation, quorum_id = said["membership"]["generation"], said["membership"]["quorum"]
    configuration = Configuration(generation, members, quorum=int(quorum_id, 16))
    vote = Vote(NodeId(term, 77), Purpose.ATTACH, said["timeline"], configuration)
    connected = socket.create_connection(("127.0.0.1", quorum.ports[number]), timeout=10)
    end = WireEnd(connected, quorum.address(number))
    try:
        end.send(ProposerGreeting(server, 77))
        end.send(vote)
        end.flush()
        kinds = []
        while FrameKind.VOTE_REPLY not in kinds:
            assert select.select([end], [], [], 10)[0], "it answers"
            end.receive()
            kinds += [header.kind for header, _ in end.frames()]
            assert FrameKind.REFUSED not in kinds
    finally:
        end.close()


@pytest.mark.parametrize("primary", MAJORS_IN_TURN, indirect=True)
def test_8_a_safekeeper_that_was_away_catches_up_from_the_primary(quorum):
    quorum.insert(0)
    quorum.kill("safekeeper-2")
    quorum.ask("CREATE TABLE more AS SELECT repeat('x', 1000) FROM generate_series(1, 80000)")
    # The proposer that has this WAL in memory goes: it must come from the primary's disk.
    quorum.kill("proposer")
    quorum.start("proposer")
    wait_for(quorum.is_sync, 30, "the proposer is back")
    quorum.start("safekeeper-2")
    quorum.kill("safekeeper-0")
    quorum.insert(1, timeout_ms=60_000)  # needs the one that was away
    lsn = quorum.flush_lsn()
    wait_for(lambda: quorum.committed_to(lsn), 20, "the quorum has it all")


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.long)])
def test_2_random_kills_under_load_lose_nothing_acknowledged(quorum, seed, kills):
    chance = random.Random(seed)
    bank = Bank(quorum.server, seed)
    for _ in range(kills):
        victim = chance.choice([*quorum.names, "proposer", "postgres"])
        print(seed, victim)
        if victim == "postgres":
            # With SIGKILL, or as `pg_ctl stop -m immediate` does it.
            if chance.random() < 0.5:
                quorum.server.kill()
            else:
                quorum.server.stop("immediate")
            quorum.server.start()
        else:
            quorum.kill(victim)
            quorum.start(victim)
        time.sleep(chance.uniform(0.1, 1.0))
    wait_for(quorum.is_sync, 60, "the quorum is there again")
    before = bank.acknowledged
    wait_for(lambda: bank.acknowledged > before + 20, 60, "commits return again")
    bank.stop()
    bank.check(quorum.server)
    quorum.ask("SELECT pg_switch_wal()")
    quorum.insert(-1)
    lsn = quorum.flush_lsn()
    wait_for(lambda: quorum.committed_to(lsn), 30, "the quorum has it all")
    wait_for(
        lambda: quorum.segments(0).keys() == quorum.segments(1).keys() == quorum.segments(2).keys(),
        30,
        "all three have the same segments",
    )
    assert quorum.segments(0) == quorum.segments(1) == quorum.segments(2)


def test_13_pg_receivewal_reads_from_a_safekeeper_and_never_past_the_commit(
    quorum, tmp_path, receive
):
    quorum.insert(1)
    with quorum.wal_server(0) as server:
        received = receive(
            quorum.server, server.dsn(), tmp_path / "received", "--synchronous", "--no-loop"
        )
        quorum.ask("SELECT pg_switch_wal()")
        quorum.insert(2)
        wait_for(lambda: quorum.segments(0), 20, "it has a whole segment")
        name = max(quorum.segments(0))
        wait_for((received.folder / name).exists, 30, f"it has {name}")
        wal = quorum.server.data_dir / "pg_wal"
        assert (received.folder / name).read_bytes() == (wal / name).read_bytes()
        quorum.pause("safekeeper-1")
        quorum.pause("safekeeper-2")
        waiting = waits(quorum.server, 3)
        committed = parse_lsn(quorum.status()["commit_lsn"])
        current = quorum.ask("SELECT pg_walfile_name(pg_current_wal_flush_lsn())")[0][0]
        at = committed % (16 << 20)
        theirs = (wal / current).read_bytes()
        wait_for(
            lambda: (received.held(current) or b"")[:at] == theirs[:at],
            20,
            "it has what has a quorum",
        )
        assert theirs[at : at + 64].strip(b"\0")
        mine = received.held(current)
        assert mine is not None
        assert not mine[at:].strip(b"\0")
        quorum.resume("safekeeper-1")
        quorum.resume("safekeeper-2")
        waiting.join(20)
        assert not waiting.is_alive()


def test_20_fast_shutdown_of_the_primary_ends_promptly(quorum):
    quorum.insert(1)
    began = time.monotonic()
    quorum.server.stop("fast")
    assert time.monotonic() - began < 10


def test_the_proposer_renews_the_gates_page_and_says_when_it_cannot(quorum):
    quorum.insert(1)
    server, timeline = quorum.status()["server"], quorum.status()["timeline"]
    lsn = parse_lsn(quorum.flush_lsn())
    reader = CommitPageReader(quorum.commit_page)

    def stated() -> int:
        return reader.committed(server["system_id"], timeline)[0] or 0

    wait_for(lambda: stated() >= lsn, 20, "the page is renewed, with what a quorum has")
    quorum.commit_page.unlink()
    quorum.commit_page.mkdir()
    wait_for(lambda: "cannot be written" in quorum.status()["commit_page_fault"], 20, "it is said")
    assert not stated()
    assert "could not write the commit page" in quorum.log("proposer").read_text()
    quorum.insert(2)  # commits do not depend on it
    quorum.commit_page.rmdir()
    wait_for(lambda: not quorum.status()["commit_page_fault"], 20, "it is written again")
    lsn = parse_lsn(quorum.flush_lsn())
    wait_for(lambda: stated() >= lsn, 20, "it goes on")
