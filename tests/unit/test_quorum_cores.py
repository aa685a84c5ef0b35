"""Proposer and safekeeper face to face, step by step: the pictures of the design, and each refusal."""

from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest

from tests.support.quorum.claims import BASE
from tests.support.quorum.explorer import INFO, Cluster, Scope, State
from tests.support.quorum.mutants import mutant
from tests.support.quorum.nodes import copied
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.quorum.proposer.core import Proposer
from walsender_bridge.quorum.proposer.effects import (
    ClosePeer,
    CompareWal,
    Lineage,
    LocatePrimary,
    MembersChanged,
    PassFeedback,
    PeerClosed,
    PeerConnected,
    PeerFault,
    PeerReceived,
    Primary,
    PrimaryAt,
    PrimaryKeeps,
    ReadWal,
    SendMessage,
    StartStreaming,
    Stop,
    StopReason,
    Tick,
    WalCompared,
)
from walsender_bridge.quorum.proposer.invariants import check_invariants, checked
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import MAX_ENTRIES, History, HistoryEntry
from walsender_bridge.quorum.safekeeper import effects as e
from walsender_bridge.quorum.safekeeper.core import Safekeeper

# -- 6: the pictures --------------------------------------------------------------------------------
# One byte a record: R1 is at BASE, and a log with R1 and R2 ends at BASE + 2.

OLD = ((1, BASE, 1),)
S1, S2, S3 = 0, 1, 2


class Picture(Cluster):
    """S1 has R1(a), S2 R1(a) R2(b), S3 all of R1(a) R2(b) R3(c) R4(d)."""

    def __init__(self, *starts: tuple[int, int, int]) -> None:
        logs = ((OLD, BASE + 1), (OLD, BASE + 2), (OLD, BASE + 4))
        super().__init__(Scope(starts, logs=logs))
        self.state: State = self.first()

    def reach(self, number: int, *there: int) -> None:
        """A proposer starts and reaches these safekeepers, up to its votes."""
        self.start(self.state, number)
        for peer in {S1, S2, S3} - set(there):
            self.hang_up(self.state, (number, peer))

    def proposer(self, number: int) -> Proposer:
        found = self.state.proposers[number]
        assert found is not None
        return found.core

    def settle(self, number: int, *peers: int, stop_at: type[object] | None = None) -> None:
        """Deliver whatever this proposer has sent to these, but for messages of one kind."""
        waiting = True
        while waiting:
            waiting = False
            for peer in peers:
                link = self.state.links[number * self.width + peer]
                if link is None or not link.items:
                    continue
                if not (stop_at and isinstance(link.items[0].message, stop_at)):
                    self.deliver(self.state, (number, peer))
                    waiting = True

    def write(self, number: int) -> None:
        """The server's whole WAL is streamed."""
        while self.state.streamed[number] < self.scope.starts[number][2]:
            self.stream(self.state, number)

    def log(self, peer: int) -> str:
        """A log as the picture shows it: timeline 1 wrote a, b, c, d; timeline 2 wrote e, f from R3 on."""
        part = self.state.safekeepers[peer]
        cells = part.wal[: part.core.flush_lsn - BASE]
        names = {(1, BASE + n): "abcd"[n] for n in range(4)} | {
            (2, BASE + 2 + n): "ef"[n] for n in range(2)
        }
        return "".join(names[cell] for cell in cells)


def test_6_an_uncommitted_tail_is_overwritten_after_an_election() -> None:
    picture = Picture((2, BASE + 2, BASE + 4))  # promoted behind R2(b), it writes R3(e) and R4(f)
    picture.reach(0, S1, S2)
    picture.settle(0, S1, S2)
    assert picture.proposer(0).vcl == BASE + 2
    picture.write(0)
    picture.settle(0, S1, S2)
    assert [picture.log(each) for each in (S1, S2, S3)] == ["abef", "abef", "abcd"]
    streaming = picture.proposer(0).streaming
    assert streaming is not None
    assert streaming.commit_lsn == BASE + 4

    # S3 is back: R4(d) is gone before R3(e) is written.
    picture.dial(picture.state, (0, S3))
    picture.settle(0, S3, stop_at=m.Append)
    assert picture.log(S3) == "ab"
    assert picture.state.safekeepers[S3].wal == picture.state.safekeepers[S1].wal[:2]
    picture.settle(0, S3)
    assert picture.log(S3) == "abef"


def test_6_a_crash_before_anybody_took_the_new_epoch_gives_vcl_4() -> None:
    picture = Picture((1, BASE, BASE + 2), (1, BASE, BASE + 4))
    picture.reach(0, S1, S2)
    picture.settle(0, S1, S2, stop_at=m.Elected)
    assert picture.proposer(0).vcl == BASE + 2
    picture.reach(1, S1, S3)
    picture.settle(1, S1, S3)
    assert picture.proposer(1).vcl == BASE + 4
    assert [picture.log(each) for each in (S1, S3)] == ["abcd", "abcd"]


def test_6_a_crash_after_two_took_the_new_epoch_gives_vcl_2() -> None:
    picture = Picture((1, BASE, BASE + 2), (2, BASE + 2, BASE + 4))
    picture.reach(0, S1, S2)
    picture.settle(0, S1, S2)
    assert [picture.log(each) for each in (S1, S2)] == ["ab", "ab"]
    picture.reach(1, S1, S3)
    picture.settle(1, S1, S3)
    assert picture.proposer(1).vcl == BASE + 2
    assert picture.log(S3) == "ab"  # R3(c) and R4(d) never had a quorum
    picture.write(1)
    picture.settle(1, S1, S3)
    assert [picture.log(each) for each in (S1, S3)] == ["abef", "abef"]


# -- one safekeeper ---------------------------------------------------------------------------------

MEMBERS = Configuration(1, frozenset({1, 2, 3}))
EPOCH_1 = History((HistoryEntry(1, 100, 1),))


def safekeeper(flush_lsn: int = 200) -> Safekeeper:
    """A safekeeper of term 1, which has its WAL up to `flush_lsn`."""
    state = e.ControlState(1, INFO, m.NodeId(1, 11), EPOCH_1, MEMBERS)

    return Safekeeper(state, flush_lsn)


def drive(
    core: Safekeeper, conn: int, *messages: m.ToSafekeeper, begin_lsn: int = 100
) -> list[e.Effect]:
    """Hand in messages on a connection, answer what is asked; all effects but the greeting's."""
    done: list[e.Effect] = []
    for message in messages:
        events: list[e.Event] = [e.MessageReceived(conn, message)]
        while events:
            for effect in core.step(events.pop(0)):
                done.append(effect)
                if isinstance(effect, e.SyncWal):
                    events.append(e.WalSynced(effect.lsn))
                elif isinstance(effect, e.AlignWal):
                    events.append(e.WalAligned(effect.flush_lsn, effect.commit_lsn, begin_lsn))
    return done


def greeting(proposer: int) -> m.ProposerGreeting:
    return m.ProposerGreeting(INFO, proposer)


def vote(
    term: int, proposer: int, timeline: int = 1, purpose: m.Purpose = m.Purpose.ATTACH
) -> m.Vote:
    return m.Vote(m.NodeId(term, proposer), purpose, timeline, MEMBERS)


def sent(effects: list[e.Effect], kind: type[m.Message]) -> list[m.Message]:
    return [
        x.message for x in effects if isinstance(x, e.SendMessage) and isinstance(x.message, kind)
    ]


def refusal(effects: list[e.Effect]) -> m.Refusal:
    (refused,) = sent(effects, m.Refused)
    assert isinstance(refused, m.Refused)
    return refused.reason


def led(core: Safekeeper, term: int = 2, proposer: int = 22, conn: int = 5) -> None:
    """A proposer of timeline 1 is elected and sends 10 bytes, of which 5 are committed."""
    history = EPOCH_1.succeeded(200, [HistoryEntry(term, 200, 1)])
    configuration = MEMBERS.stamped(term)
    drive(core, conn, greeting(proposer), vote(term, proposer))
    drive(core, conn, m.Elected(term, 200, 150, False, history, configuration))
    drive(core, conn, m.Append(term, 200, 150, 120, 10))
    core.step(e.WalSynced(210))
    drive(core, conn, m.Append(term, 210, 205, 120, 0))


def test_1_2_a_vote_is_persisted_before_what_is_held_is_told() -> None:
    done = drive(safekeeper(), 5, greeting(22), vote(2, 22))
    assert [type(x) for x in done[1:]] == [e.PersistControl, e.AlignWal, e.SendMessage]
    persisted, told = done[1], sent(done, m.VoteReply)[0]
    assert isinstance(persisted, e.PersistControl)
    assert isinstance(told, m.VoteReply)
    assert persisted.state.node_id == m.NodeId(2, 22)
    assert (told.flush_lsn, told.history) == (200, EPOCH_1)


@pytest.mark.parametrize("term", [0, 1])
def test_2_a_vote_needs_a_greater_term(term: int) -> None:
    done = drive(safekeeper(), 5, greeting(22), vote(term, 22))
    assert refusal(done) == m.Refusal.OLDER_TERM
    assert not [x for x in done if isinstance(x, e.PersistControl)]


def test_3_zeros_come_before_the_history_and_new_wal_behind_it() -> None:
    core = safekeeper()
    drive(core, 5, greeting(22), vote(2, 22, timeline=2))
    history = EPOCH_1.succeeded(150, [HistoryEntry(2, 150, 2)])
    done = drive(core, 5, m.Elected(2, 150, 150, False, history, MEMBERS.stamped(2)))
    kinds = [type(x) for x in done]
    assert kinds == [e.TruncateWal, e.PersistControl, e.SendMessage]
    assert sent(done, m.AppendAck) == [m.AppendAck(2, 150, 0)]
    assert refusal(drive(core, 5, m.Append(2, 200, 150, 120, 10))) == m.Refusal.DIVERGED  # a gap


def test_6_a_position_that_is_not_its_own_divergence_point_is_refused() -> None:
    core = safekeeper()
    drive(core, 5, greeting(22), vote(2, 22))
    history = EPOCH_1.succeeded(150, [HistoryEntry(2, 150, 1)])
    done = drive(core, 5, m.Elected(2, 200, 150, False, history, MEMBERS.stamped(2)))
    assert refusal(done) == m.Refusal.DIVERGED


def test_a_rewrite_below_what_is_committed_is_refused() -> None:
    core = safekeeper()
    led(core)
    drive(core, 6, greeting(33), vote(3, 33))
    history = EPOCH_1.succeeded(180, [HistoryEntry(3, 180, 1)])
    done = drive(core, 6, m.Elected(3, 180, 180, False, history, MEMBERS.stamped(3)))
    assert refusal(done) == m.Refusal.DIVERGED
    assert not [x for x in done if isinstance(x, e.TruncateWal)]


def test_26_a_greater_node_id_displaces_and_readers_stay() -> None:
    core = safekeeper()
    led(core)
    done = drive(core, 6, greeting(33), vote(3, 33))
    assert e.SendMessage(5, m.Refused(m.Refusal.OLDER_TERM, m.NodeId(3, 33), "displaced")) in done
    assert e.Close(5) in done
    assert not [x for x in done if isinstance(x, e.ServeReaders)]  # nothing changes for them
    assert core.served_lsn == 205
    assert refusal(drive(core, 5, m.Append(2, 210, 205, 120, 10))) == m.Refusal.OLDER_TERM


def test_26_a_short_disconnection_resumes_without_a_vote() -> None:
    core = safekeeper()
    led(core)
    drive(core, 5, m.Append(2, 210, 205, 120, 10))  # not synced when the connection breaks
    done = drive(core, 6, greeting(22), m.Resume(m.NodeId(2, 22)))
    assert e.Close(5) in done
    assert not [x for x in done if isinstance(x, e.PersistControl | e.TruncateWal)]
    (told,) = sent(done, m.VoteReply)
    assert isinstance(told, m.VoteReply)
    assert told.flush_lsn == 220
    assert sent(drive(core, 6, m.Append(2, 220, 205, 120, 0)), m.AppendAck)


def test_5_a_resumption_of_another_process_is_refused() -> None:
    core = safekeeper()
    led(core)
    assert refusal(drive(core, 6, greeting(23), m.Resume(m.NodeId(2, 23)))) == m.Refusal.OLDER_TERM


def test_29_a_fenced_timeline_is_refused_until_its_successor_attached() -> None:
    core = safekeeper()
    drive(core, 5, greeting(22), vote(2, 22, purpose=m.Purpose.FAILOVER))
    assert core.control.fence == e.Fence(2, 1)
    assert refusal(drive(core, 6, greeting(11), vote(3, 11))) == m.Refusal.FENCED_TIMELINE
    again = Safekeeper(core.control, 200)  # the fence is durable
    assert refusal(drive(again, 6, greeting(11), vote(3, 11))) == m.Refusal.FENCED_TIMELINE
    drive(again, 7, greeting(33), vote(3, 33, timeline=2))
    history = EPOCH_1.succeeded(200, [HistoryEntry(3, 200, 2)])
    assert sent(
        drive(again, 7, m.Elected(3, 200, 200, False, history, MEMBERS.stamped(3))), m.AppendAck
    )
    assert again.control.fence is None
    assert refusal(drive(again, 8, greeting(11), vote(4, 11))) == m.Refusal.OLDER_TIMELINE


def test_29_a_fence_stands_until_the_log_itself_is_the_successor_s() -> None:
    core = safekeeper()
    drive(core, 5, greeting(22), vote(2, 22, purpose=m.Purpose.FAILOVER))
    assert sent(drive(core, 9, greeting(44)), m.SafekeeperGreeting)[0].fenced_timeline == 1  # type: ignore[union-attr]
    drive(core, 7, greeting(33), vote(3, 33, timeline=2))
    # It was promoted further on, and its WAL up to there has not come.
    history = EPOCH_1.succeeded(200, [HistoryEntry(3, 200, 1), HistoryEntry(3, 230, 2)])
    drive(core, 7, m.Elected(3, 200, 200, False, history, MEMBERS.stamped(3)))
    assert refusal(drive(core, 8, greeting(11), vote(4, 11))) == m.Refusal.FENCED_TIMELINE


def test_29_an_abort_takes_the_fence_back() -> None:
    core = safekeeper()
    drive(core, 5, greeting(22), vote(2, 22, purpose=m.Purpose.FAILOVER))
    done = drive(core, 6, greeting(11), vote(3, 11, purpose=m.Purpose.ABORT))
    assert sent(done, m.VoteReply)
    assert core.control.fence is None


def test_27_a_new_identity_is_no_member_and_gives_no_vote() -> None:
    wiped = Safekeeper(e.ControlState(99), 0)
    assert refusal(drive(wiped, 5, greeting(22), vote(2, 22))) == m.Refusal.NOT_A_MEMBER


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (m.ServerInfo(8, 16, 8), m.Refusal.OTHER_SYSTEM),
        (m.ServerInfo(7, 15, 8), m.Refusal.OTHER_MAJOR),
        (m.ServerInfo(7, 16, 16), m.Refusal.OTHER_SEGMENT_SIZE),
    ],
)
def test_19_another_server_is_refused_by_name(server: m.ServerInfo, reason: m.Refusal) -> None:
    assert refusal(drive(safekeeper(), 5, m.ProposerGreeting(server, 22))) == reason


def _promoted_inside_a_record(*later: HistoryEntry) -> Safekeeper:
    """It knew 205 to be committed, inside a record that began at 200; the successor starts at 200.

    `later`: the epoch that it hears of that from, if it missed the successor's own.
    """
    core = safekeeper()
    led(core)
    core.step(e.MessageReceived(6, greeting(33)))
    core.step(e.MessageReceived(6, vote(4, 33, timeline=2)))
    core.step(e.WalAligned(200, 200, 100))
    successors = [HistoryEntry(3, 200, 2), *later] if later else [HistoryEntry(4, 200, 2)]
    history = EPOCH_1.succeeded(200, successors)
    drive(core, 6, m.Elected(4, 200, 200, False, history, MEMBERS.stamped(4)))
    drive(core, 6, m.Append(4, 200, 200, 120, 10))
    core.step(e.WalSynced(210))
    return core


def test_30_what_was_committed_inside_a_record_is_not_what_a_promotion_wrote_there() -> None:
    assert _promoted_inside_a_record().served_lsn == 200


def test_30_nor_what_it_wrote_there_in_an_epoch_that_was_missed() -> None:
    assert _promoted_inside_a_record(HistoryEntry(4, 208, 2)).served_lsn == 200


def test_24_mutant_9_would_serve_it() -> None:
    with mutant("9: the committed part of a record stays"):
        assert _promoted_inside_a_record().served_lsn == 205


def test_27_a_rebuild_forgets_its_history_before_its_wal() -> None:
    core = safekeeper()
    drive(core, 5, greeting(22), vote(9, 22))
    history = History((HistoryEntry(7, 800, 1), HistoryEntry(9, 1200, 1)))
    done = drive(core, 5, m.Elected(9, 1000, 1100, True, history, MEMBERS.stamped(9)))
    empty, reset, new, ack = done
    assert isinstance(empty, e.PersistControl)
    assert not empty.state.history
    assert reset == e.ResetWal(1000)
    assert isinstance(new, e.PersistControl)
    assert new.state.history == history
    assert ack == e.SendMessage(5, m.AppendAck(9, 1000, 0))


def test_27_a_rebuild_in_the_epoch_that_it_is_in_is_taken() -> None:
    """It was away, and the proposer of its own term has let go of what it lacks."""
    core = safekeeper()
    led(core)
    resumed = drive(core, 6, greeting(22), m.Resume(m.NodeId(2, 22)))
    assert not sent(resumed, m.Refused)
    history = core.control.history
    done = drive(core, 6, m.Elected(2, 1000, 1100, True, history, MEMBERS.stamped(2)))
    assert e.ResetWal(1000) in done, done


def test_27_a_log_that_began_anew_beyond_vcl_begins_anew_again() -> None:
    """What was committed ended inside a record that begins in the segment before: VCL lies below all that it has."""
    core = Safekeeper(e.ControlState(1, INFO, m.NodeId(1, 11), EPOCH_1, MEMBERS), 1100)
    drive(core, 5, greeting(22), vote(9, 22), begin_lsn=1024)
    history = EPOCH_1.succeeded(1020, [HistoryEntry(9, 1020, 1)])
    follow = m.Elected(9, 1020, 1040, False, history, MEMBERS.stamped(9))
    assert refusal(drive(core, 5, follow)) == m.Refusal.DIVERGED
    for start in (1024, 1008):
        drive(core, 6, greeting(22), m.Resume(m.NodeId(9, 22)), begin_lsn=1024)
        done = drive(core, 6, replace(follow, start_lsn=start, rebuild=True))
        assert e.ResetWal(start) in done, done


def test_27_a_log_that_begins_beyond_vcl_is_told_to_begin_anew() -> None:
    """It would be asked to go on from below its own first byte, refuse, and follow no proposer ever after."""
    for begin_lsn in (200, 208):
        core, done = candidate((200, 100), (200, 100))
        (compared,) = [each for each in done if isinstance(each, CompareWal)]
        core.step(WalCompared(compared.peer, compared.end_lsn, equal=True))
        assert core.vcl == 200
        late = m.VoteReply(core.node_id, 200, 0, 0, begin_lsn, EPOCH_1, MEMBERS)
        (asked,) = core.step(PeerReceived(2, late))
        assert isinstance(asked, SendMessage)
        assert isinstance(asked.message, m.Elected)
        assert asked.message.rebuild == (begin_lsn > core.vcl)


def test_27_a_rebuild_above_what_is_committed_is_refused() -> None:
    core = safekeeper()
    drive(core, 5, greeting(22), vote(9, 22))
    history = History((HistoryEntry(7, 800, 1), HistoryEntry(9, 1200, 1)))
    done = drive(core, 5, m.Elected(9, 1000, 999, True, history, MEMBERS.stamped(9)))
    assert refusal(done) == m.Refusal.DIVERGED


# -- one proposer -----------------------------------------------------------------------------------


def held(
    safekeeper: int, term: int = 1, commit_lsn: int = 0, timeline: int = 1
) -> m.SafekeeperGreeting:
    return m.SafekeeperGreeting(
        safekeeper, INFO, m.NodeId(term, 9), MEMBERS, 200, commit_lsn, timeline
    )


def proposer(flush_lsn: int = 300) -> Proposer:
    core = Proposer(22, INFO, Primary(Lineage(1), flush_lsn), MEMBERS, 3)
    for peer in range(3):
        core.step(PeerConnected(peer))
    return core


def test_17_bytes_are_compared_on_one_timeline() -> None:
    history = EPOCH_1.succeeded(190, [HistoryEntry(2, 190, 2)])
    core = Proposer(22, INFO, Primary(Lineage(2, (WalPosition(1, 190),)), 300), MEMBERS, 3)
    for peer in range(3):
        core.step(PeerConnected(peer))
        core.step(PeerReceived(peer, held(peer + 1, 2, timeline=2)))
    done = []
    for peer in range(2):
        reply = m.VoteReply(core.node_id, 200, 0, 0, 100, history, MEMBERS)
        done += core.step(PeerReceived(peer, reply))
    assert done == [CompareWal(0, 190, 200)]


def comparing() -> Proposer:
    """A candidate with a quorum of votes, whose server is asked for the WAL below VCL."""
    core = proposer()
    for peer in (0, 1):
        core.step(PeerReceived(peer, held(peer + 1)))
    for peer in (0, 1):
        reply = m.VoteReply(core.node_id, 200, 0, 0, 100, EPOCH_1, MEMBERS)
        core.step(PeerReceived(peer, reply))
    assert core.phase == "comparing"
    return core


def candidate(*logs: tuple[int, int]) -> tuple[Proposer, list[object]]:
    """One with the votes of logs that end and begin at these LSNs, and what it asks for then."""
    core = proposer()
    for peer in range(len(logs)):
        core.step(PeerReceived(peer, held(peer + 1)))
    done: list[object] = []
    for peer, (end, begin) in enumerate(logs):
        done += core.step(
            PeerReceived(peer, m.VoteReply(core.node_id, end, 0, 0, begin, EPOCH_1, MEMBERS))
        )
    return core, done


def test_17_a_voter_that_begins_at_vcl_does_not_stand_for_the_others() -> None:
    core, done = candidate((200, 200), (200, 150))
    assert done == [CompareWal(1, 150, 200)]
    (stop,) = core.step(WalCompared(1, 200, equal=False))
    assert isinstance(stop, Stop)
    assert stop.reason == StopReason.OTHER_BYTES


def test_17_the_comparison_goes_down_to_what_any_voter_has() -> None:
    """The most advanced voter began its log anew a page header below VCL; one that lags has the WAL before."""
    core, done = candidate((200, 192), (190, 100))
    assert done == [CompareWal(0, 192, 200)]
    assert core.step(WalCompared(0, 200, equal=True)) == [CompareWal(1, 100, 190)]
    core.step(WalCompared(1, 190, equal=True))
    assert core.phase == "leading"


def test_a_server_that_has_removed_the_last_segment_below_vcl_is_refused() -> None:
    core = comparing()
    assert core.step(WalCompared(0, 200, None, removed=True)) == []
    (last,) = core.step(Tick())
    assert last == CompareWal(0, 192, 200)  # one segment may be gone
    (stop,) = core.step(WalCompared(0, 200, None, removed=True))
    assert isinstance(stop, Stop)
    assert stop.reason == StopReason.REMOVED
    assert "removed" in stop.detail


@pytest.mark.parametrize(("timeline", "phase"), [(1, "stopped"), (2, "leading")])
def test_a_promoted_server_may_lack_the_segment_that_ends_with_vcl(
    timeline: int, phase: str
) -> None:
    """Its first checkpoint removes it; on the quorum's own timeline the slot keeps it."""
    lineage = Lineage(2, (WalPosition(1, 208),)) if timeline == 2 else Lineage(1)
    core = Proposer(22, INFO, Primary(lineage, 300), MEMBERS, 3)
    for peer in (0, 1):
        core.step(PeerConnected(peer))
        core.step(PeerReceived(peer, held(peer + 1)))
    for peer in (0, 1):
        reply = m.VoteReply(core.node_id, 208, 0, 0, 100, EPOCH_1, MEMBERS)
        core.step(PeerReceived(peer, reply))
    assert core.vcl == 208
    core.step(WalCompared(0, 208, None, removed=True))
    core.step(Tick())
    core.step(WalCompared(0, 208, None, removed=True))
    assert core.phase == phase


# -- where a quorum begins ---------------------------------------------------------------------------

#: What voters without a log, and with one of epoch 1 that begins at 96 (a segment's start) and has no byte, report.
EMPTY = m.VoteReply(m.NodeId(0, 0), 0, 0, 0, 0, History(), MEMBERS)
UNWRITTEN = m.VoteReply(m.NodeId(0, 0), 96, 0, 0, 96, History((HistoryEntry(1, 96, 1),)), MEMBERS)


def beginning(
    *replies: m.VoteReply, kept: int | None, flush_lsn: int = 300, may_begin: bool = True
) -> tuple[Proposer, list[object]]:
    """A candidate whose server keeps WAL from `kept` on, with these votes, and what it does then."""
    primary = Primary(Lineage(1), flush_lsn)
    core = Proposer(22, INFO, primary, MEMBERS, 3, primary_begin=kept, may_begin=may_begin)
    for peer in range(len(replies)):
        core.step(PeerConnected(peer))
        core.step(PeerReceived(peer, replace(held(peer + 1), flush_lsn=0, timeline=0)))
    done: list[object] = []
    for peer, reply in enumerate(replies):
        done += core.step(PeerReceived(peer, replace(reply, node_id=core.node_id)))
    return core, done


def test_a_new_quorum_begins_with_wal_that_its_server_keeps_and_has_flushed() -> None:
    core, done = beginning(EMPTY, EMPTY, kept=290)
    assert core.vcl == 296
    assert StartStreaming(core.node_id, 296) in done
    # The redo pointer of a checkpoint under way: nothing below its segment is kept.
    core, done = beginning(EMPTY, EMPTY, kept=321, flush_lsn=300)
    assert (core.vcl, done) == (320, [LocatePrimary()])
    assert core.step(PrimaryAt(310)) == []
    assert core.step(Tick()) == [LocatePrimary()]
    assert StartStreaming(core.node_id, 320) in core.step(PrimaryAt(325))


def test_a_quorum_without_a_byte_begins_again_where_its_server_keeps_wal() -> None:
    core, done = beginning(UNWRITTEN, UNWRITTEN, kept=290)
    assert StartStreaming(core.node_id, 296) in done
    assert core.history.entries == (HistoryEntry(core.node_id.term, 296, 1),)
    told = [each.message for each in done if isinstance(each, SendMessage)]
    elected = [each for each in told if isinstance(each, m.Elected)]
    assert [(each.start_lsn, each.rebuild) for each in elected] == [(296, True)] * 2
    # A safekeeper that has adopted the empty log takes it.
    state = e.ControlState(1, INFO, m.NodeId(1, 11), UNWRITTEN.history, MEMBERS)
    keeper = Safekeeper(state, 96)
    done_there = drive(keeper, 6, greeting(22), vote(2, 22), elected[0], begin_lsn=96)
    assert e.ResetWal(296) in done_there
    assert keeper.flush_lsn == 296


@pytest.mark.parametrize(
    ("changes", "kept", "may_begin"),
    [
        ({}, 100, True),  # the server keeps it
        ({}, None, True),  # a standby, which keeps nothing for us
        ({}, 290, False),  # a commit may wait for WAL in between
        ({"flush_lsn": 97}, 290, True),  # one record
        ({"flush_lsn": 97, "commit_lsn": 97}, 290, True),
        ({"restart_lsn": 100}, 290, True),  # all members had part of a record
        ({"begin_lsn": 80}, 290, True),  # older WAL, of a log whose history was pruned
        ({"history": History((HistoryEntry(1, 80, 1),))}, 290, True),  # a full resync
    ],
)
def test_1_a_log_that_may_have_held_a_record_is_continued(
    changes: dict[str, Any], kept: int | None, may_begin: bool
) -> None:
    """It may be one voter of the majority alone that tells it: any acknowledged record is at one of them."""
    for votes in permutations((replace(UNWRITTEN, **changes), UNWRITTEN)):
        core, _ = beginning(*votes, kept=kept, may_begin=may_begin)
        assert core.vcl == max(96, changes.get("flush_lsn", 0))


def test_a_server_that_left_the_timeline_of_an_empty_log_does_not_begin_it_again() -> None:
    """It was promoted below the log's beginning."""
    primary = Primary(Lineage(2, (WalPosition(1, 90),)), 300)
    core = Proposer(22, INFO, primary, MEMBERS, 3, primary_begin=290, may_begin=True)
    for peer in (0, 1):
        core.step(PeerConnected(peer))
        core.step(PeerReceived(peer, held(peer + 1)))
    for peer in (0, 1):
        done = core.step(PeerReceived(peer, replace(UNWRITTEN, node_id=core.node_id)))
    (stop,) = done
    assert isinstance(stop, Stop)
    assert stop.reason == StopReason.OTHER_HISTORY


def test_removed_wal_is_no_fault_when_a_later_vote_has_more() -> None:
    core = comparing()
    core.step(PeerReceived(2, held(3)))
    core.step(PeerReceived(2, m.VoteReply(core.node_id, 300, 0, 0, 100, EPOCH_1, MEMBERS)))
    core.step(WalCompared(0, 200, None, removed=True))
    core.step(Tick())
    (again,) = core.step(WalCompared(0, 200, None, removed=True))
    assert again == CompareWal(2, 296, 300)
    core.step(WalCompared(2, 300, equal=True))
    assert core.phase == "leading"


def test_1_a_later_vote_that_knows_of_more_than_vcl_is_heard_before_office() -> None:
    """Of two voters one was away, and the other's disk was rolled back while no proposer was in office."""
    core = comparing()
    core.step(PeerReceived(2, held(3)))
    more = m.VoteReply(core.node_id, 240, 224, 0, 100, EPOCH_1, MEMBERS)
    core.step(PeerReceived(2, more))
    core.step(WalCompared(0, 200, equal=True))  # on its way when that vote came
    core.step(WalCompared(2, 240, equal=True))
    assert core.phase == "leading"
    check_invariants(core, checked(core)._replace(leads=False))
    assert core.vcl == 240


def test_1_whatever_stale_logs_vote_in_any_order_vcl_is_not_below_what_they_know() -> None:
    """Each log ends and is committed somewhere, as rolled-back disks may have it; the third votes in COMPARING."""
    logs = [(end, commit) for end in (160, 200, 240) for commit in (0, 150, 160, 200, 240)]
    led = 0
    for votes in product([log for log in logs if log[1] <= log[0]], repeat=3):
        core = proposer()
        for peer in range(3):
            core.step(PeerReceived(peer, held(peer + 1)))
        before = checked(core)
        asked: list[object] = []
        for peer, (end, commit) in enumerate(votes):
            reply = m.VoteReply(core.node_id, end, commit, 0, 100, EPOCH_1, MEMBERS)
            asked += core.step(PeerReceived(peer, reply))
            before = check_invariants(core, before)
        for each in asked:  # answers to what is no longer asked are among them
            if isinstance(each, CompareWal):
                asked += core.step(WalCompared(each.peer, each.end_lsn, equal=True))
                before = check_invariants(core, before)
        assert core.phase == "leading", votes
        assert core.vcl >= max(commit for _, commit in votes), votes
        led += 1
    assert led > 1000


def test_1_a_later_vote_whose_log_lacks_what_it_knows_to_be_committed_names_the_disk() -> None:
    core = comparing()
    core.step(PeerReceived(2, held(3)))
    more = m.VoteReply(core.node_id, 160, 224, 0, 100, EPOCH_1, MEMBERS)
    (stop,) = core.step(PeerReceived(2, more))
    assert isinstance(stop, Stop)
    assert stop.reason == StopReason.BROKEN
    assert "was committed" in stop.detail


def test_a_comparison_that_failed_otherwise_is_tried_again() -> None:
    core = comparing()
    asked = [0]
    for _ in range(4):
        assert core.step(WalCompared(asked[-1], 200, None)) == []
        (again,) = core.step(Tick())
        assert isinstance(again, CompareWal)
        asked.append(again.peer)
    # Its segment may be damaged: the other has the same bytes.
    assert asked[:2] == [0, 1]
    assert [type(each) for each in core.step(WalCompared(asked[-1], 200, True))] != [CompareWal]


RIVAL = m.NodeId(7, 77)
OUTVOTED = m.Refused(m.Refusal.OLDER_TERM, RIVAL, f"the vote went to {RIVAL}")


def outvoted() -> Proposer:
    """A candidate whose first safekeeper has voted for another one."""
    core = proposer()
    core.step(PeerReceived(0, held(1)))
    core.step(PeerReceived(1, held(2)))
    assert core.step(PeerReceived(0, OUTVOTED)) == [PeerFault(0, OUTVOTED), ClosePeer(0)]
    core.step(PeerClosed(0))
    core.step(PeerConnected(0))
    return core


def test_5_who_hears_that_another_was_elected_stops_and_says_who() -> None:
    core = outvoted()
    elected = replace(held(1), node_id=RIVAL, configuration=MEMBERS.stamped(7))
    done = core.step(PeerReceived(0, elected))
    assert done == [Stop(StopReason.DISPLACED, f"the vote went to {RIVAL}", RIVAL)]
    assert core.step(PeerReceived(2, held(3))) == []


def test_33_a_vote_of_nobody_in_office_is_waited_for_and_then_outbid() -> None:
    core = outvoted()
    assert core.step(PeerReceived(0, replace(held(1), node_id=RIVAL))) == []
    asks = SendMessage(0, m.ProposerGreeting(INFO, 22))
    stop = [Stop(StopReason.OUTVOTED, f"the vote went to {RIVAL}", RIVAL)]
    ticks = 0
    while (done := core.step(Tick())) != stop:
        assert done == [asks]  # whether it was elected by now
        ticks += 1
    patience = core.limits.patience_ticks
    assert patience <= ticks <= 2 * patience
    again = Proposer(23, INFO, core.primary, MEMBERS, 3, above=core.heard_term)
    for peer in (1, 2):
        again.step(PeerConnected(peer))
        again.step(PeerReceived(peer, held(peer + 1)))
    assert again.node_id.term == RIVAL.term + 1


def test_33_who_has_a_quorum_goes_on_for_as_long_as_it_waits() -> None:
    core = outvoted()
    votes = [m.VoteReply(core.node_id, 0, 0, 0, 0, History(), MEMBERS)] * 2
    core.step(PeerReceived(2, held(3)))
    for peer, vote in enumerate(votes, 1):
        core.step(PeerReceived(peer, vote))
    assert core.leader is not None
    assert core.step(PeerReceived(0, replace(held(1), node_id=RIVAL))) == []
    assert not any(isinstance(each, Stop) for each in core.step(Tick()))


def test_5_a_refusal_in_its_own_name_is_no_other_proposer_s() -> None:
    """The vote came on a connection that broke, after the next one's greeting."""
    core = proposer()
    core.step(PeerReceived(0, held(1)))
    core.step(PeerReceived(1, held(2)))
    again = m.Refused(m.Refusal.OLDER_TERM, core.node_id, "it voted for you")
    assert core.step(PeerReceived(0, again)) == [ClosePeer(0)]
    core.step(PeerClosed(0))
    core.step(PeerConnected(0))
    known = replace(held(1), node_id=core.node_id)
    assert core.step(PeerReceived(0, known)) == [SendMessage(0, m.Resume(core.node_id))]


def test_12_who_has_voted_for_it_before_it_left_resumes_as_a_member() -> None:
    core = proposer()
    for peer in range(2):
        core.step(PeerReceived(peer, held(peer + 1)))
    former = replace(held(4), node_id=core.node_id)
    assert isinstance(core.step(PeerReceived(2, former))[0], PeerFault)  # a stranger
    core.membership.configuration = MEMBERS.joint({1, 2, 4})
    assert core._invited([MembersChanged(core.configuration)])[-1] == (
        SendMessage(2, m.Resume(core.node_id))
    )


def test_34_a_minority_of_another_cluster_stops_nobody() -> None:
    core = proposer()
    core.step(PeerReceived(0, held(1)))
    other = replace(held(9, commit_lsn=999), server=replace(INFO, system_id=1))
    fault, close = core.step(PeerReceived(2, other))
    assert isinstance(fault, PeerFault)
    assert close == ClosePeer(2)
    core.step(PeerClosed(2))
    told = core.step(PeerReceived(1, held(2)))
    assert [each.message for each in told if isinstance(each, SendMessage)] == [
        m.Vote(m.NodeId(2, 22), m.Purpose.ATTACH, 1, MEMBERS)
    ] * 2
    # A majority of them: it is this server that is in the wrong place.
    refused = m.Refused(m.Refusal.OTHER_SYSTEM, m.NodeId(), "1, but its WAL here is of 7")
    (stop,) = core.step(PeerReceived(0, refused))
    assert isinstance(stop, Stop)
    assert stop.reason == StopReason.OTHER_SERVER


FENCED = m.Refused(m.Refusal.FENCED_TIMELINE, m.NodeId(1, 77), "fenced")


def test_29_a_fenced_proposer_stops_and_says_so() -> None:
    core = proposer()
    for peer in range(3):
        core.step(PeerReceived(peer, held(peer + 1)))
    assert ClosePeer(0) in core.step(PeerReceived(0, FENCED))  # the other two may be a quorum
    done = core.step(PeerReceived(1, FENCED))
    assert done == [Stop(StopReason.FENCED, "fenced", m.NodeId(1, 77))]


def test_29_what_is_left_of_a_fence_is_taken_back_by_who_commits_without_it() -> None:
    core = proposer()
    for peer in range(3):
        core.step(PeerReceived(peer, held(peer + 1)))
    core.step(PeerReceived(0, FENCED))  # it was away when the failover was taken back

    def asked_again() -> m.Purpose:
        core.step(PeerClosed(0))
        core.step(PeerConnected(0))
        (told,) = core.step(PeerReceived(0, held(1)))
        assert isinstance(told, SendMessage)
        assert isinstance(told.message, m.Vote)
        return told.message.purpose

    assert asked_again() == m.Purpose.ATTACH
    for peer in (1, 2):
        core.step(PeerReceived(peer, m.VoteReply(core.node_id, 200, 0, 0, 200, EPOCH_1, MEMBERS)))
    assert core.phase == "leading"
    assert asked_again() == m.Purpose.ATTACH  # nobody follows yet
    for peer in (1, 2):
        core.step(PeerReceived(peer, m.AppendAck(core.node_id.term, 200, 0)))
    assert asked_again() == m.Purpose.ABORT


OLDER = m.Refused(m.Refusal.OLDER_TIMELINE, m.NodeId(1, 77), "timeline 1 was left for 2")


def test_5_a_minority_s_newer_timeline_ends_nobody_and_is_taken_back() -> None:
    core = proposer()
    for peer in range(3):
        core.step(PeerReceived(peer, held(peer + 1)))
    assert core.step(PeerReceived(0, OLDER)) == [PeerFault(0, OLDER), ClosePeer(0)]
    for peer in (1, 2):
        core.step(PeerReceived(peer, m.VoteReply(core.node_id, 200, 0, 0, 200, EPOCH_1, MEMBERS)))
    for peer in (1, 2):
        core.step(PeerReceived(peer, m.AppendAck(core.node_id.term, 200, 0)))
    core.step(PeerClosed(0))
    core.step(PeerConnected(0))
    (told,) = core.step(PeerReceived(0, held(1)))
    assert isinstance(told, SendMessage)
    assert isinstance(told.message, m.Vote)
    assert told.message.purpose == m.Purpose.ABORT


@pytest.mark.parametrize("reasons", [(OLDER, OLDER), (FENCED, OLDER), (OLDER, FENCED)])
def test_5_a_proposer_without_a_quorum_that_may_vote_for_it_ends(
    reasons: tuple[m.Refused, m.Refused],
) -> None:
    core = proposer()
    for peer in range(3):
        core.step(PeerReceived(peer, held(peer + 1)))
    assert ClosePeer(0) in core.step(PeerReceived(0, reasons[0]))
    (stop,) = core.step(PeerReceived(1, reasons[1]))
    assert isinstance(stop, Stop)
    assert stop.detail == reasons[1].detail


def test_5_a_refusal_that_is_over_counts_no_more() -> None:
    """The fence was taken back at the one, the address of the other was put right."""
    core = proposer()
    for peer in range(3):
        core.step(PeerReceived(peer, held(peer + 1)))
    core.step(PeerReceived(0, FENCED))
    core.step(PeerClosed(0))
    core.step(PeerConnected(0))
    core.step(PeerReceived(0, held(1)))
    core.step(PeerReceived(0, m.VoteReply(core.node_id, 200, 0, 0, 200, EPOCH_1, MEMBERS)))
    assert ClosePeer(1) in core.step(PeerReceived(1, FENCED))
    assert core.phase == "voting"
    foreign = m.Refused(m.Refusal.OTHER_SYSTEM, m.NodeId(1, 9), "another cluster's")
    core = proposer()
    core.step(PeerReceived(0, foreign))
    core.step(PeerClosed(0))
    core.step(PeerConnected(0))
    core.step(PeerReceived(0, held(1)))
    assert ClosePeer(1) in core.step(PeerReceived(1, foreign))
    assert core.phase == "greeting"


STRANGE = m.Refused(m.Refusal.OTHER_QUORUM, m.NodeId(3, 33), "it belongs to another quorum")


def strange(core: Proposer, *peers: int) -> list[object]:
    """What it does about safekeepers of another quorum at these addresses."""
    done: list[object] = []
    for peer in peers:
        core.step(PeerConnected(peer))
        done += core.step(PeerReceived(peer, STRANGE))
    return done


def test_strangers_that_were_asked_for_by_mistake_end_nobody() -> None:
    core = Proposer(22, INFO, Primary(Lineage(1), 300), MEMBERS, 7, configured=3)
    assert not [each for each in strange(core, 3, 4, 5, 6) if isinstance(each, Stop)]


def test_a_majority_of_the_configured_addresses_rules_a_proposer_out_that_has_no_quorum() -> None:
    core = Proposer(22, INFO, Primary(Lineage(1), 300), MEMBERS, 5, configured=3)
    assert not [each for each in strange(core, 0) if isinstance(each, Stop)]
    (stop,) = [each for each in strange(core, 2) if isinstance(each, Stop)]
    assert stop.reason == StopReason.OTHER_QUORUM


def test_a_proposer_whose_members_are_there_or_have_elected_it_is_ended_by_no_strangers() -> None:
    """The members have moved; other quorums have the addresses that are still configured."""
    core = Proposer(22, INFO, Primary(Lineage(1), 300), MEMBERS, 5, configured=3)
    for peer in (3, 4):
        core.step(PeerConnected(peer))
        core.step(PeerReceived(peer, held(peer - 2)))
    assert not [each for each in strange(core, 0, 1, 2) if isinstance(each, Stop)]
    for peer in (3, 4):
        reply = m.VoteReply(core.node_id, 200, 0, 0, 100, EPOCH_1, MEMBERS)
        core.step(PeerReceived(peer, reply))
    core.step(WalCompared(3, 200, equal=True))
    assert core.phase == "leading"
    for peer in (3, 4):
        core.step(PeerClosed(peer))
    assert not [each for each in strange(core, 0, 1, 2) if isinstance(each, Stop)]


def test_30_a_failover_needs_a_complete_record() -> None:
    """The log began inside one; a standby is promoted below it, and would then be refused."""
    members = Configuration(1, frozenset({1, 2, 3}))
    proposer = Proposer(100, INFO, None, members, 3, purpose=m.Purpose.FAILOVER)
    told: list[object] = []
    log = History((HistoryEntry(1, BASE, 1),))
    for peer in range(2):
        greeting = m.SafekeeperGreeting(peer + 1, INFO, m.NodeId(1, 9), members, BASE, 0, 1)
        proposer.step(PeerConnected(peer))
        proposer.step(PeerReceived(peer, greeting))
    for peer in range(2):
        reply = m.VoteReply(m.NodeId(2, 100), BASE, 0, 0, BASE, log, members)
        told += proposer.step(PeerReceived(peer, reply))
    assert [each.reason for each in told if isinstance(each, Stop)] == [StopReason.OTHER_HISTORY]


def test_33_a_dead_member_bars_nobody_from_office_after_many_epochs() -> None:
    """It holds back the restart LSN, and with it every epoch since, all in one segment or not."""
    entries = tuple(HistoryEntry(n + 1, 100 + n, 1) for n in range(MAX_ENTRIES))
    end, term = 100 + MAX_ENTRIES, MAX_ENTRIES
    core = proposer(end)
    core.step(PrimaryKeeps(96))
    for peer in (0, 1):
        core.step(PeerReceived(peer, held(peer + 1, term, end)))
    told = []
    for peer in (0, 1):
        vote = m.VoteReply(core.node_id, end, end - 1, 100, 100, History(entries), MEMBERS)
        told += core.step(PeerReceived(peer, vote))
    assert [type(each) for each in told] == [CompareWal], told
    core.step(WalCompared(0, end, equal=True))
    assert core.phase == "leading"
    assert len(core.history.entries) == MAX_ENTRIES
    # The dead one returns: what it has of the log is told apart no longer, so it begins anew.
    state = e.ControlState(3, INFO, m.NodeId(1, 11), History(entries[:1]), MEMBERS)
    laggard = Safekeeper(state, 101)
    core.step(PeerReceived(2, held(3)))
    (voted,) = sent(
        drive(laggard, 5, greeting(22), m.Vote(core.node_id, m.Purpose.ATTACH, 1, MEMBERS)),
        m.VoteReply,
    )
    assert isinstance(voted, m.VoteReply)
    (asked,) = core.step(PeerReceived(2, voted))
    assert isinstance(asked, SendMessage)
    assert isinstance(asked.message, m.Elected)
    assert asked.message.rebuild
    done = drive(laggard, 5, asked.message)
    assert e.ResetWal(asked.message.start_lsn) in done, done
    (ack,) = sent(done, m.AppendAck)
    assert isinstance(ack, m.AppendAck)
    fed = core.step(PeerReceived(2, ack))
    assert [type(each) for each in fed] == [ReadWal], fed


def test_27_a_safekeeper_that_lost_its_disk_is_not_asked_for_its_vote() -> None:
    core = proposer()
    core.step(PeerReceived(0, held(99)))  # S1 is back, empty, under another identity
    done = core.step(PeerReceived(2, held(3)))  # S3, which lacks what S1 and S2 acknowledged
    assert done == []
    assert core.phase == "greeting"


def test_12_a_change_that_was_completed_after_the_greetings_is_heard_of() -> None:
    core = proposer()
    core.step(PeerReceived(0, held(1)))  # S2 and S3 do not answer, and leave: S1 is left
    alone = MEMBERS.stamped(1).joint({1}).completed()
    assert core.step(Tick()) == [SendMessage(0, m.ProposerGreeting(INFO, 22))]
    core.step(PeerReceived(0, replace(held(1), configuration=alone)))
    assert core.phase == "voting"
    late = held(1, term=5)
    assert core.step(PeerReceived(0, late)) == []
    assert core.phase == "voting"


def test_37_a_safekeeper_that_is_gone_holds_back_no_vacuum() -> None:
    picture = Picture((1, BASE, BASE + 4))
    picture.reach(0, S1, S2, S3)
    picture.settle(0, S1, S2, S3)
    proposer = picture.proposer(0)
    for peer, xmin in ((S1, 700), (S2, 800)):
        feedback = m.HotStandbyFeedback(xmin, 0, 0, 0)
        held = proposer.peers[peer].flush_lsn
        ack = m.AppendAck(proposer.node_id.term, held, held, feedback)
        told = proposer.step(PeerReceived(peer, ack))
        assert (PassFeedback(feedback) in told) == (peer == S1)
    proposer.step(PeerClosed(S1))
    assert PassFeedback(m.HotStandbyFeedback(800, 0, 0, 0)) in proposer.step(Tick())
    proposer.step(PeerClosed(S2))
    assert PassFeedback(m.HotStandbyFeedback()) in proposer.step(Tick())
    assert not [each for each in proposer.step(Tick()) if isinstance(each, PassFeedback)]


def test_41_an_identity_at_two_addresses_is_refused_by_name() -> None:
    picture = Picture((1, BASE, BASE + 4))
    picture.reach(0, S1, S2)
    picture.settle(0, S1, S2)
    proposer = picture.proposer(0)
    first = proposer.peers[S1].greeting
    assert first is not None
    copy = max(proposer.peers) + 1
    proposer.step(PeerConnected(copy))
    told = proposer.step(PeerReceived(copy, first))
    (fault,) = [each for each in told if isinstance(each, PeerFault)]
    assert "answers at another address" in fault.refused.detail
    assert ClosePeer(copy) in told
    # Once the other is gone, it may have moved.
    proposer.step(PeerClosed(copy))
    proposer.step(PeerClosed(S1))
    proposer.step(PeerConnected(copy))
    told = proposer.step(PeerReceived(copy, replace(first, node_id=proposer.node_id)))
    assert not [each for each in told if isinstance(each, PeerFault)]


def rolled_back() -> tuple[Picture, list[object]]:
    """A quorum whose first safekeeper reconnects from a snapshot of its disk before the term."""
    picture = Picture((1, BASE, BASE + 4))
    picture.reach(0, S1, S2, S3)
    picture.settle(0, S1, S2, S3)
    proposer = picture.proposer(0)
    greeting = proposer.peers[S1].greeting
    assert greeting is not None
    assert greeting.node_id.term < proposer.node_id.term  # it had not voted when it greeted
    proposer.step(PeerClosed(S1))
    proposer.step(PeerConnected(S1))
    # One greeting may have been overtaken by a vote at another address: it is asked again.
    (again,) = proposer.step(PeerReceived(S1, greeting))
    assert isinstance(again, SendMessage)
    assert isinstance(again.message, m.ProposerGreeting)
    return picture, list(proposer.step(PeerReceived(S1, greeting)))


def test_41_a_disk_that_was_rolled_back_is_refused_by_name() -> None:
    picture, told = rolled_back()
    (fault,) = [each for each in told if isinstance(each, PeerFault)]
    assert "rolled back" in fault.refused.detail
    assert ClosePeer(S1) in told
    proposer = picture.proposer(0)
    assert proposer.configuration.distrusted == {S1 + 1}
    # The others persist it, so that the next proposer does not believe it either.
    asked = {each.peer for each in told if isinstance(each, SendMessage)}
    assert asked == {S2, S3}
    streaming = proposer.streaming
    assert streaming is not None
    assert streaming.members == {S2 + 1, S3 + 1}


def test_7_a_disk_that_was_rolled_back_is_not_believed_by_the_next_proposer() -> None:
    distrusting = replace(MEMBERS.stamped(1), generation=2, distrusted=frozenset({1}))
    core = proposer()
    core.step(PeerReceived(0, held(1)))
    told = core.step(PeerReceived(1, replace(held(2), configuration=distrusting)))
    assert core.phase == "greeting"  # the two are no quorum
    assert not [each for each in told if isinstance(each, SendMessage)]
    asked = core.step(PeerReceived(2, held(3)))
    assert {each.peer for each in asked if isinstance(each, SendMessage)} == {1, 2}
    (fault,) = [each for each in asked if isinstance(each, PeerFault)]
    assert "rolled back" in fault.refused.detail


def test_7_a_distrusted_vote_that_came_first_is_no_vote() -> None:
    core = proposer()
    for peer in range(3):
        core.step(PeerReceived(peer, held(peer + 1)))
    distrusting = replace(MEMBERS.stamped(1), generation=2, distrusted=frozenset({1}))
    core.step(PeerReceived(0, m.VoteReply(core.node_id, 200, 0, 0, 100, EPOCH_1, MEMBERS)))
    core.step(PeerReceived(1, m.VoteReply(core.node_id, 200, 0, 0, 100, EPOCH_1, distrusting)))
    assert core.phase == "voting"
    core.step(PeerReceived(2, m.VoteReply(core.node_id, 200, 0, 0, 100, EPOCH_1, MEMBERS)))
    assert core.phase == "comparing"


@pytest.mark.parametrize("compares", [False, True])
def test_7_who_refuses_its_vote_tells_whom_it_distrusts(compares: bool) -> None:
    """A proposer of an older timeline was campaigning already when the leader noticed the rolled-back disk."""
    core = proposer()
    for peer in range(3):
        core.step(PeerReceived(peer, held(peer + 1)))
    core.step(PeerReceived(0, m.VoteReply(core.node_id, 200, 0, 0, 100, EPOCH_1, MEMBERS)))
    if compares:
        core.step(PeerReceived(2, m.VoteReply(core.node_id, 200, 0, 0, 100, EPOCH_1, MEMBERS)))
        assert core.phase == "comparing"
    core.step(PeerReceived(1, m.Refused(m.Refusal.OLDER_TIMELINE, m.NodeId(1, 9))))
    core.step(PeerClosed(1))
    core.step(PeerConnected(1))
    distrusting = replace(MEMBERS.stamped(1), generation=2, distrusted=frozenset({1}))
    core.step(PeerReceived(1, replace(held(2), configuration=distrusting)))
    assert core.configuration.distrusted == {1}
    core.step(PeerReceived(2, m.VoteReply(core.node_id, 200, 0, 0, 100, EPOCH_1, MEMBERS)))
    assert core.phase == "voting"  # the first one's vote is none


def test_14_a_disk_that_was_rolled_back_behind_its_vote_is_distrusted() -> None:
    """It knows the term, and has lost the history that it took over in it, or WAL below where the epoch starts."""
    core = proposer()
    for peer in range(3):
        core.step(PeerReceived(peer, held(peer + 1)))
    for peer in range(3):
        core.step(PeerReceived(peer, m.VoteReply(core.node_id, 200, 0, 0, 200, EPOCH_1, MEMBERS)))
    for peer in range(3):
        core.step(PeerReceived(peer, m.AppendAck(core.node_id.term, 200, 0)))
    for history, flush_lsn in ((EPOCH_1, 200), (core.history, 190)):
        one = copied(core)
        one.step(PeerClosed(0))
        one.step(PeerConnected(0))
        one.step(PeerReceived(0, replace(held(1), node_id=core.node_id)))
        vote = m.VoteReply(core.node_id, flush_lsn, 0, 0, 100, history, MEMBERS)
        told = one.step(PeerReceived(0, vote))
        assert ClosePeer(0) in told
        assert one.configuration.distrusted == {1}


def test_7_what_is_distrusted_leaves_with_its_member() -> None:
    distrusting = MEMBERS.stamped(1).distrusting(1)
    assert not distrusting.has_quorum({1, 2})
    assert distrusting.has_quorum({2, 3})
    assert distrusting.quorum_lsn({1: 300, 2: 200, 3: 100}) == 100
    joint = distrusting.joint({2, 3, 4})
    assert joint.distrusted == {1}
    assert joint.completed() == Configuration(4, frozenset({2, 3, 4}), term=1)
