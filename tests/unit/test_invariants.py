"""A core's state that is broken in one field is named by its invariant, and its driver writes nothing."""

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slot_sync.copier import SlotCopier
from slot_sync.plan import FailoverCandidate as SlotCandidate
from slot_sync.plan import SlotSyncPlan as SlotPlan
from slot_sync.report import SlotRound
from slot_sync.resolver import record as of_copies
from slot_sync.resolver.observed import TEMPORARY_PREFIX, CopyRecord, Selection, StandbyRecord
from slot_sync.resolver.transitions import Action, Drop, Reason, Rename, Reserve, Transition, Wait
from slot_sync.resolver.transitions import CopyState as SlotState
from spark_consumers.lake.manifest import takeover
from tests.support.log_entries import SCHEMAS, EntryMaker
from tests.support.quorum.explorer import INFO
from tests.unit.test_capture_core import new_state
from tests.unit.test_failover import PRIMARY, READY, VCL
from tests.unit.test_quorum_cores import EPOCH_1, MEMBERS, led, safekeeper
from tests.unit.test_repository import log_of, report
from tests.unit.test_repository_store import fill
from walsender_bridge.capture import core as capture_core
from walsender_bridge.capture import invariants as of_capture
from walsender_bridge.capture.core import CaptureState as Capturing
from walsender_bridge.capture.driver import Capture
from walsender_bridge.capture.events import AppendToReplica, StandbyStatusUpdate
from walsender_bridge.capture.gate import invariants as of_gate
from walsender_bridge.capture.gate import monitor
from walsender_bridge.capture.gate.core import (
    Decided,
    GateDecision,
    GateState,
    ObservedServer,
    Pass,
    Rule,
    Standing,
)
from walsender_bridge.capture.gate.monitor import OpenGate, ServerGate
from walsender_bridge.capture.settings import CaptureSettings
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.change_log.protocol import START, CommitContext, IssuedCommit
from walsender_bridge.change_log.replica import invariants as of_replica
from walsender_bridge.change_log.replica.core import Replica, ReplicaState
from walsender_bridge.change_log.replica.disk import BeforeRestart, PutDurable, tail_at
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.repository import invariants as of_repository
from walsender_bridge.change_log.repository.core import Repository, RepositoryTick, TermGiven
from walsender_bridge.change_log.repository.store import RepositoryStore
from walsender_bridge.errors import Cause, InvariantError
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, WalPosition
from walsender_bridge.postgres.protocol.replication import SystemIdentity
from walsender_bridge.quorum.failover import invariants as of_failover
from walsender_bridge.quorum.failover import plan
from walsender_bridge.quorum.failover.plan import FailoverQuorum, FailoverStep, PromotionCandidate
from walsender_bridge.quorum.failover.run import FailoverRun, FailoverSettings
from walsender_bridge.quorum.proposer import invariants as of_proposer
from walsender_bridge.quorum.proposer.core import Proposer
from walsender_bridge.quorum.proposer.driver import ProposerSession
from walsender_bridge.quorum.proposer.effects import Lineage, Primary
from walsender_bridge.quorum.proposer.leader import LeaderState
from walsender_bridge.quorum.proposer.membership import Membership
from walsender_bridge.quorum.proposer.peer import PeerState, SafekeeperPeer
from walsender_bridge.quorum.proposer.primary.wal_source import NoPrimary
from walsender_bridge.quorum.proposer.replication import Streaming
from walsender_bridge.quorum.proposer.settings import ProposerSettings
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.safekeeper import invariants as of_safekeeper
from walsender_bridge.quorum.safekeeper.core import Safekeeper
from walsender_bridge.quorum.safekeeper.driver import SafekeeperDriver
from walsender_bridge.quorum.safekeeper.effects import Fence, PersistControl
from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings
from walsender_bridge.runtime.invariants import REPAIR, Invariant


def names(invariants: Sequence[Invariant[Any]]) -> list[str]:
    return [each.name for each in invariants]


def files(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


# -- a safekeeper -----------------------------------------------------------------------------------


def _control(**fields: Any) -> Callable[[Safekeeper], None]:
    def broken(core: Safekeeper) -> None:
        core.control = replace(core.control, **fields)

    return broken


def _sets(**fields: Any) -> Callable[[Any], None]:
    def broken(target: Any) -> None:
        for name, value in fields.items():
            setattr(target, name, value)

    return broken


def _out_of_order() -> History:
    """A history refuses to be made so; a bit that turns over in memory asks nobody."""
    history = History((HistoryEntry(1, 100, 1), HistoryEntry(2, 200, 1)))
    object.__setattr__(history, "entries", history.entries[::-1])
    return history


OF_QUORUM = replace(MEMBERS, quorum=4).stamped(2)
SAFEKEEPER = {
    "identity_never_changes": _control(safekeeper=9),
    "server_never_changes": _control(server=replace(INFO, system_id=INFO.system_id + 1)),
    "one_vote_in_a_term": _control(node_id=m.NodeId(2, 33)),
    "history_within_vote": _control(history=History((HistoryEntry(3, 100, 1),))),
    "history_ascends": _control(history=_out_of_order()),
    "log_begins_in_its_history": _control(history=History((HistoryEntry(2, 250, 1),))),
    "flush_lsn_within_written": _sets(flush_lsn=211),
    "served_lsn_within_commit_and_flush": _sets(served_lsn=206),
    "commit_lsn_never_goes_back": _sets(commit_lsn=204, served_lsn=204),
    "restart_lsn_never_goes_back": _sets(restart_lsn=119),
    "control_file_not_ahead": _control(commit_lsn=300),
    "membership_never_goes_back": _control(configuration=replace(OF_QUORUM, term=1)),
    "quorum_id_never_changes": _control(configuration=replace(OF_QUORUM, quorum=5)),
    "fence_is_of_a_vote": _control(fence=Fence(3, 1)),
    "writer_has_greeted": _sets(owner=77),
}


@pytest.fixture
def voter() -> Safekeeper:
    """A safekeeper in term 2, whose WAL is flushed to 210 and committed to 205."""
    core = safekeeper()
    led(core)
    core.control = replace(core.control, configuration=OF_QUORUM)
    return core


@pytest.mark.parametrize("name", names(of_safekeeper.INVARIANTS))
def test_a_broken_safekeeper_is_named_by_its_invariant(voter, name):
    before = of_safekeeper.check_invariants(voter, of_safekeeper.checked(voter))
    SAFEKEEPER[name](voter)
    with pytest.raises(InvariantError, match=f"invariant {name} ") as found:
        of_safekeeper.check_invariants(voter, before)
    assert found.value.where.startswith("safekeeper ")
    assert found.value.repair == REPAIR


def test_a_safekeeper_with_a_fault_stops_and_writes_nothing(tmp_path, monkeypatch):
    settings = SafekeeperSettings(tmp_path / "data", "127.0.0.1", 0, tmp_path / "positions")
    driver = SafekeeperDriver(settings)
    before = files(settings.data_dir)
    assert before

    stranger = driver.core.control.safekeeper ^ 1

    def faulty(core: Safekeeper, event: object) -> list[object]:
        core.control = replace(core.control, safekeeper=stranger)
        return [PersistControl(core.control)]

    monkeypatch.setattr(Safekeeper, "step", faulty)
    with pytest.raises(InvariantError, match="identity_never_changes") as found:
        driver.run()
    assert found.value.cause == Cause.INVARIANT
    assert files(settings.data_dir) == before


# -- a proposer -------------------------------------------------------------------------------------


@pytest.fixture
def leader() -> Proposer:
    """Leads in term 2 from 200 on: two of three have 250, which is committed."""
    core = Proposer(22, INFO, Primary(Lineage(1), 300), MEMBERS, 3)
    core.node_id = m.NodeId(2, 22)
    core.membership = Membership(MEMBERS.stamped(2, 4))
    history = EPOCH_1.succeeded(200, [HistoryEntry(2, 200, 1)])
    for number, peer in core.peers.items():
        peer.greeting = m.SafekeeperGreeting(number + 1, INFO, core.node_id, MEMBERS, 200, 0, 1)
        peer.reply = m.VoteReply(core.node_id, 200, 150, 120, 100, EPOCH_1, MEMBERS)
        peer.state = PeerState.STREAMING
        peer.flush_lsn, peer.sent_lsn = 250, 300
    streaming = Streaming(
        core.peers,
        core.configuration,
        history,
        epoch_start=200,
        commit_lsn=250,
        restart_lsn=150,
        segment_size=16,
        limits=core.limits,
        primary_begin=100,
    )
    streaming.end, streaming.established, streaming.acked = 300, True, {1: 250, 2: 250, 3: 200}
    core.leader = LeaderState(2, 200, history, core.peers, core.membership, streaming)
    return core


def _membership(**fields: Any) -> Callable[[Proposer], None]:
    def broken(core: Proposer) -> None:
        configuration = replace(core.configuration, **fields)
        core.membership.use(configuration)
        assert core.streaming is not None
        core.streaming.use(configuration)

    return broken


def _streaming(**fields: Any) -> Callable[[Proposer], None]:
    return lambda core: _sets(**fields)(core.streaming)


def _peer(core: Proposer) -> SafekeeperPeer:
    return core.peers[0]


def _without_votes(core: Proposer) -> None:
    for peer in core.peers.values():
        peer.reply = None


PROPOSER: dict[str, Callable[[Proposer], None]] = {
    "one_process_has_one_node_id": _sets(node_id=m.NodeId(3, 22)),
    "membership_never_goes_back": _membership(term=1),
    "quorum_id_never_changes": _membership(quorum=5),
    "elected_by_a_quorum": _without_votes,
    "epoch_is_the_term": lambda core: _sets(term=1)(core.leader),
    "counts_by_the_membership_in_force": _streaming(configuration=Configuration()),
    "commit_lsn_never_goes_back": _streaming(commit_lsn=249),
    "commit_lsn_backed_by_majorities": _streaming(commit_lsn=251),
    "commit_lsn_in_this_epoch": _streaming(epoch_start=251, queue_begin=251),
    "commit_lsn_within_end": _streaming(end=240),
    "restart_lsn_never_goes_back": _streaming(restart_lsn=149),
    "restart_lsn_within_commit": _streaming(restart_lsn=251),
    "acknowledged_within_end": _streaming(acked={1: 250, 2: 250, 3: 301}),
    "queue_is_bounded": _streaming(queue_begin=301),
    "in_flight_is_bounded": lambda core: _sets(sent_lsn=301)(_peer(core)),
}


@pytest.mark.parametrize("name", names(of_proposer.INVARIANTS))
def test_a_broken_proposer_is_named_by_its_invariant(leader, name):
    before = of_proposer.check_invariants(leader, of_proposer.checked(leader))
    if name == "elected_by_a_quorum":
        before = before._replace(leads=False)
    PROPOSER[name](leader)
    with pytest.raises(InvariantError, match=f"invariant {name} "):
        of_proposer.check_invariants(leader, before)


def test_a_commit_that_no_majority_has_is_noticed_in_the_hot_step_itself(leader):
    before = of_proposer.checked(leader)
    assert of_proposer.check_commit(leader, before) is before
    leader.streaming.commit_lsn = 251
    with pytest.raises(InvariantError, match="commit_lsn_backed_by_majorities"):
        of_proposer.check_commit(leader, before)


def test_a_proposer_with_a_fault_tells_nobody_and_stops(tmp_path, monkeypatch):
    record = tmp_path / "quorum.json"
    settings = ProposerSettings("", (), "test", "slot", quorum_file=record)
    session = ProposerSession(settings, MEMBERS, lambda *_: None, source=NoPrimary(INFO))
    performed: list[object] = []

    def faulty(core: Proposer, event: object) -> list[object]:
        core.node_id = m.NodeId(5, core.node_id.proposer + 1)
        return [event]

    monkeypatch.setattr(Proposer, "step", faulty)
    monkeypatch.setattr(ProposerSession, "_perform", lambda _, effect: performed.append(effect))
    with pytest.raises(InvariantError, match="one_process_has_one_node_id"):
        session.run()
    assert not performed
    assert not record.exists()


# -- a replica of the change log --------------------------------------------------------------------


def _filled(replica: HostedReplica) -> None:
    """Four transactions of which two are committed, and one of these is trimmed."""
    replica.create("s", "log")
    session, _ = replica.open_writer(3)
    maker = EntryMaker()
    for version in (5, 6):
        replica.append(session, [maker.whole()], list(SCHEMAS.values()), None, MAX_LSN)
        replica.commit([IssuedCommit(CommitContext(version, version - 4, version - 4, 1))], 1)
    replica.append(session, [maker.whole(), maker.whole()], (), None, MAX_LSN)
    replica.trim(2, 2)


def _current(**fields: Any) -> Callable[[Replica], None]:
    def broken(core: Replica) -> None:
        core.current = replace(core.current, **fields)

    return broken


def _sealed_with_a_tail(core: Replica) -> None:
    core.state = ReplicaState.SEALED
    core.current = replace(core.current, sealed_at=core.current.committed_end)


REPLICA: dict[str, Callable[[Replica], None]] = {
    "stream_never_changes": _current(log_id="another"),
    "term_never_goes_back": _current(term=2),
    "version_never_goes_back": _current(context=CommitContext(5, 2, 2, 1)),
    "committed_end_never_goes_back": _current(context=CommitContext(7, 1, 2, 1)),
    "global_offsets_ascend": _current(context=CommitContext(7, 2, 1, 1)),
    "low_watermark_never_goes_back": _current(low_offset=1),
    "trimmed_within_committed": _current(low_offset=4),
    "committed_within_written": _sets(tail=tail_at(START)),
    "commit_ends_a_transaction": _current(position=START),
    "uncommitted_ends_follow": lambda core: _sets(tail=tail_at(core.current.position))(core),
    "state_fits_the_seal": _sets(state=ReplicaState.SEALING),
    "restart_may_be_removed": _current(before_restart=BeforeRestart(None, None)),
    "sealed_takes_nothing": _sealed_with_a_tail,
}


@pytest.mark.parametrize("name", names(of_replica.INVARIANTS))
def test_a_broken_replica_is_named_by_its_invariant(tmp_path, name):
    hosted = HostedReplica(tmp_path / "s")
    _filled(hosted)
    core = hosted._core
    of_replica.check_invariants(core, core.current)
    before = core.current
    REPLICA[name](core)
    with pytest.raises(InvariantError, match=f"invariant {name} "):
        of_replica.check_invariants(core, before)
    core.current, core.state = before, ReplicaState.LEARNING
    hosted.close()


def test_a_replica_with_a_fault_stops_and_writes_nothing(tmp_path, monkeypatch):
    hosted = HostedReplica(tmp_path / "s")
    _filled(hosted)
    right = hosted.status()
    before = files(tmp_path)

    def faulty(core: Replica, end: int, term: int, version: int) -> list[object]:
        core.current = replace(core.current, low_offset=end + 1)
        return [PutDurable(core.current)]

    monkeypatch.setattr(Replica, "seal", faulty)
    for ask in (lambda: hosted.seal(3, 9, 9), hosted.status, lambda: hosted.trim(2, 9)):
        with pytest.raises(InvariantError, match="trimmed_within_committed"):
            ask()
    assert hosted.report("k") is None
    hosted.close()
    assert files(tmp_path) == before
    again = HostedReplica(tmp_path / "s")
    again.recover()
    assert again.status() == right
    again.close()


# -- the metadata repository ------------------------------------------------------------------------


def _repository() -> Repository:
    """Two streams of two commits each, in versions 1 and 2."""
    state = log_of("a", "b")
    for version in (0, 1):
        at = version + 1
        state.apply(RepositoryTick(at, tuple(report(name, version, at, 1) for name in ("a", "b"))))
    state.apply(RepositoryTick(3, tuple(report(name, 2, 3, 0) for name in ("a", "b")), issue=False))
    return state


def _commit_of_a(context: CommitContext, end: int) -> Callable[[Repository], None]:
    def broken(state: Repository) -> None:
        last = state.streams["a"].last
        position = replace(last.position, end_offset=end)
        state.streams["a"].history.append(replace(last, context=context, position=position))

    return broken


def _with_another_member(state: Repository) -> None:
    state.streams["a"].members = state.streams["a"].replicas = ("k", "l")


REPOSITORY: dict[str, Callable[[Repository], object]] = {
    "log_id_never_changes": _sets(log_id="another"),
    "streams_and_terms_stay": lambda state: state.streams.pop("b"),
    "version_never_goes_back": _sets(version=1),
    "published_never_goes_back": _sets(published=1),
    "published_within_version": _sets(forced_version=3),
    "clock_never_goes_back": _sets(clock=0.5),
    "commits_follow_each_other": _commit_of_a(CommitContext(2, 4, 5, 1), 5),
    "commit_ends_a_transaction": _commit_of_a(CommitContext(3, 3, 5, 1), 9),
    "global_ranges_leave_no_gap": _sets(next_global=6),
    "members_are_assigned": lambda state: setattr(state.streams["a"], "members", ("x",)),
    "members_change_while_sealed": _with_another_member,
    "trimmed_never_goes_back": lambda state: setattr(state.streams["a"], "trimmed", 99),
    "applied_within_version": lambda state: state.streams["a"].applied.update(k=3),
    "history_reaches_published": lambda state: state.streams["a"].history.__setitem__(
        slice(None), [replace(state.streams["a"].last, context=CommitContext(3, 3, 5, 0))]
    ),
}


@pytest.mark.parametrize("name", names(of_repository.INVARIANTS))
def test_a_broken_repository_is_named_by_its_invariant(name):
    state = _repository()
    before = of_repository.checked(state)
    of_repository.check_invariants(state, before)
    REPOSITORY[name](state)
    with pytest.raises(InvariantError, match=f"invariant {name} "):
        of_repository.check_invariants(state, before)


def test_a_repository_with_a_fault_writes_neither_this_record_nor_a_later_one(
    tmp_path, monkeypatch
):
    path = tmp_path / "repository.sqlite"
    store = RepositoryStore(path)
    fill(store, 3)
    right, before = store.state.to_record(), files(tmp_path)

    def faulty(state: Repository, record: object) -> bool:
        state.next_global += 1
        return True

    with monkeypatch.context() as patch:
        patch.setattr(Repository, "apply", faulty)
        with pytest.raises(InvariantError, match="global_ranges_leave_no_gap"):
            store.append(TermGiven("a", 5))
    with pytest.raises(InvariantError, match="global_ranges_leave_no_gap"):
        store.append(TermGiven("a", 6))
    assert files(tmp_path) == before
    assert store.state.to_record() == right
    store.close()


# -- a capture session ------------------------------------------------------------------------------


def _capturing() -> Capturing:
    """A session that has received and logged up to 2000, of which 1500 are committed and confirmed."""
    state = new_state(logged_lsn=2000, committed_lsn=1500, confirmed=WalPosition(1, 1500))
    state.in_flight.append((10, 0.0))
    state.in_flight_bytes = 10
    return state


def _another_history(state: Capturing) -> None:
    state.overlap.done, state.confirming = False, WalPosition(1, 1400)


CAPTURE: dict[str, Callable[[Capturing], None]] = {
    "confirmed_never_goes_back": _sets(confirmed=WalPosition(1, 1499)),
    "confirm_only_what_is_committed": _sets(confirming=WalPosition(1, 1501)),
    "confirm_only_the_same_history": _another_history,
    "committed_lsn_never_goes_back": _sets(committed_lsn=1499),
    "received_lsn_never_goes_back": _sets(received_lsn=1999, logged_lsn=1999),
    "logged_within_received": _sets(logged_lsn=2001),
    "whole_within_buffer": _sets(whole=1),
    "in_flight_adds_up": _sets(in_flight=deque()),
}


@pytest.mark.parametrize("name", names(of_capture.INVARIANTS))
def test_a_broken_capture_session_is_named_by_its_invariant(name):
    state = _capturing()
    before = of_capture.check_invariants(state, of_capture.checked(state))
    CAPTURE[name](state)
    with pytest.raises(InvariantError, match=f"invariant {name} "):
        of_capture.check_invariants(state, before)


def test_capture_with_a_fault_stops_and_appends_and_reports_nothing(tmp_path, monkeypatch):
    own, state = CaptureSource("shop", "", "slot", "publication", ()), _capturing()
    told = tmp_path / "status.json"
    settings = CaptureSettings(own, "", tmp_path / "spool", 0, tmp_path / "gate", status_file=told)
    capture = Capture(settings, OpenGate())
    done: list[object] = []

    def faulty(state: Capturing, event: object) -> list[object]:
        state.confirmed = WalPosition(1, 1)
        return [
            AppendToReplica((b"entry",), (), WalPosition(1, 2000), 0),
            StandbyStatusUpdate(2000, 2000),
        ]

    def session() -> None:
        read, write = os.pipe()
        with os.fdopen(read), os.fdopen(write):
            walsender: Any = SimpleNamespace(
                fileno=lambda: read, send=done.append, flush=lambda: True, receive=list
            )
            handover: Any = SimpleNamespace(put=done.append, acks=list)
            watch: Any = SimpleNamespace(position=lambda: 0)
            nothing: Any = None
            capture._stream(walsender, handover, nothing, state, nothing, watch, nothing)

    monkeypatch.setattr(capture_core, "step", faulty)
    monkeypatch.setattr(capture, "_session", session)
    with pytest.raises(InvariantError, match="confirmed_never_goes_back"):
        capture.run()
    assert not done
    assert json.loads(told.read_text())["error"]["code"] == "INVARIANT"


# -- the commit gate --------------------------------------------------------------------------------


def _held() -> GateState:
    """One candidate and the safekeepers have 1000, which has passed."""
    state = GateState(Rule(("a", "b"), quorum=1, safekeepers=True), timeline=2, shown=1000)
    state.position, state.quorum = 1000, 1100
    state.candidates["a"].flush_lsn = 1100
    return state


def _two_servers(state: GateState) -> None:
    for each in state.candidates.values():
        each.standing = Standing.PROMOTED


GATE: dict[str, tuple[Callable[[GateState], None], int]] = {
    "timeline_never_goes_back": (_sets(timeline=1), 1),
    "position_never_goes_back": (_sets(position=999), 2),
    "shown_never_goes_back": (_sets(shown=999), 2),
    "nothing_passes_when_left_behind": (_sets(position=1001, shown=1001), 1),
    "passed_within_the_server": (_sets(position=1201, shown=1201), 2),
    "passed_by_the_safekeepers": (_sets(position=1101, shown=1101), 2),
    "passed_by_the_counted": (_sets(position=1101, shown=1101, quorum=1101), 2),
    "one_candidate_is_the_server": (_two_servers, 2),
}


@pytest.mark.parametrize("name", names(of_gate.INVARIANTS))
def test_a_broken_gate_is_named_by_its_invariant(name):
    state = _held()
    before = of_gate.checked(state)
    broken, timeline = GATE[name]
    seen = ObservedServer(0.0, timeline, 1200, {})
    of_gate.check_invariants(state, before, seen)
    broken(state)
    with pytest.raises(InvariantError, match=f"invariant {name} "):
        of_gate.check_invariants(state, before, seen)


def test_a_gate_with_a_fault_records_nothing_and_lets_nothing_through(tmp_path, monkeypatch):
    record = tmp_path / "gate.jsonl"
    own, identity = (
        CaptureSource("shop", "", "slot", "publication", ()),
        SystemIdentity(7, 2, 0, "shop"),
    )
    gate = ServerGate(Rule(("a",)), record)
    watch = monitor._ServerWatch(gate, own, identity, 0, lambda: None)
    before = files(tmp_path)
    facts = {"timeline": 2, "in_recovery": False, "flush_lsn": 1200, "slots": {}, "was": ""}
    answer = SimpleNamespace(fetchone=lambda: [{**facts, "may_see": True}])
    connection: Any = SimpleNamespace(execute=lambda *_: answer)

    def faulty(state: GateState, seen: ObservedServer) -> list[object]:
        state.position = state.shown = 1300
        return [Decided(GateDecision.TIMELINE, "", 2, 0, "a fault"), Pass(1300)]

    monkeypatch.setattr(monitor, "step", faulty)
    with pytest.raises(InvariantError, match="passed_within_the_server"):
        watch._poll(connection)
    assert watch.position() == 0
    assert files(tmp_path) == before


# -- a failover -------------------------------------------------------------------------------------

FAILOVER: dict[str, tuple[FailoverStep, PromotionCandidate, FailoverQuorum]] = {
    "a_primary_is_only_attached": (FailoverStep.PROMOTE, PRIMARY, VCL),
    "promoted_with_all_that_may_be_committed": (
        FailoverStep.PROMOTE,
        replace(READY, replay_lsn=199),
        VCL,
    ),
    "promoted_with_the_bytes_of_the_quorum": (
        FailoverStep.PROMOTE,
        READY,
        replace(VCL, equal_to=None),
    ),
    "promoted_with_its_own_wal_committed": (FailoverStep.PROMOTE, replace(READY, end_lsn=201), VCL),
    "promoted_guarded": (FailoverStep.PROMOTE, replace(READY, guarded=False), VCL),
    "attached_on_a_newer_timeline": (FailoverStep.ATTACH, PRIMARY, replace(VCL, fenced=2)),
}


@pytest.mark.parametrize("name", names(of_failover.INVARIANTS))
def test_a_wrong_next_step_of_a_failover_is_named_by_its_invariant(name):
    of_failover.check_invariants(FailoverStep.PROMOTE, READY, VCL)
    of_failover.check_invariants(FailoverStep.ATTACH, PRIMARY, VCL)
    with pytest.raises(InvariantError, match=f"invariant {name} "):
        of_failover.check_invariants(*FAILOVER[name])


def test_a_failover_with_a_fault_promotes_nobody(monkeypatch):
    proposer = ProposerSettings("", (), "test", "slot")
    run = FailoverRun(FailoverSettings(proposer, "", promote=pytest.fail))
    done: list[FailoverStep] = []
    monkeypatch.setattr(run, "_server", SimpleNamespace(probe=lambda: READY, where="standby"))
    monkeypatch.setattr(run, "_check", lambda: None)
    monkeypatch.setattr(run, "_perform", lambda *_: pytest.fail("it was done"))
    monkeypatch.setattr(plan, "next_step", lambda *_, **__: FailoverStep.PROMOTE)
    with pytest.raises(InvariantError, match="promoted_with_the_bytes_of_the_quorum"):
        run._advance(done, replace(VCL, equal_to=None), INFO)
    assert not done


# -- copies of slots --------------------------------------------------------------------------------

TEMPORARY = f"{TEMPORARY_PREFIX}x"


def _found(action: Action, reason: Reason = Reason.PROVEN, state: str = "PROVING") -> Transition:
    return Transition("s", "", SlotState(state), reason, "why", action=action)


def _record(generation: int = 5, **fields: Any) -> StandbyRecord:
    return StandbyRecord(copies={"s": CopyRecord("s", **fields)}, generation=generation)


NEW = Reserve(TEMPORARY, "db", "pgoutput", 1, 1, False, None)
UNPROVEN, RENAMING = _record(temporary_name=TEMPORARY), _record(renaming=True)
COPIES: dict[str, tuple[Transition, StandbyRecord, StandbyRecord]] = {
    "safe_only_when_proven": (_found(Wait(), Reason.NO_MAPPINGS, "READY"), _record(), _record()),
    "reservation_is_recorded": (_found(NEW, Reason.NOT_CREATED), _record(), _record()),
    "rename_is_of_a_proven_copy": (
        _found(Rename(TEMPORARY, "s", "db"), Reason.NO_MAPPINGS),
        UNPROVEN,
        RENAMING,
    ),
    "rename_is_recorded": (_found(Rename(TEMPORARY, "s", "db")), UNPROVEN, UNPROVEN),
    "drop_is_recorded": (_found(Drop("s", "db"), Reason.GONE, "ORPHAN"), UNPROVEN, UNPROVEN),
    "generation_never_goes_back": (_found(Wait()), _record(), _record(generation=4)),
}


@pytest.mark.parametrize("name", names(of_copies.INVARIANTS))
def test_a_broken_poll_of_a_slot_s_copy_is_named_by_its_invariant(name):
    of_copies.check_invariants(
        [_found(NEW, Reason.NOT_CREATED)], _record(), UNPROVEN, in_recovery=True
    )
    of_copies.check_invariants(
        [_found(Rename(TEMPORARY, "s", "db"))], UNPROVEN, RENAMING, in_recovery=True
    )
    of_copies.check_invariants(
        [_found(Drop(TEMPORARY, "db"))], UNPROVEN, UNPROVEN, in_recovery=True
    )
    # On a server that is not in recovery nobody proves a copy any more.
    promoted = _found(Drop(TEMPORARY, "db"), Reason.UNPROVEN_NAME, "LEFTOVER")
    of_copies.check_invariants([promoted], _record(), _record(), in_recovery=False)
    elsewhere = _found(Drop(TEMPORARY, "db", on_primary=True), Reason.UNPROVEN_NAME, "LEFTOVER")
    of_copies.check_invariants([elsewhere], _record(), _record(), in_recovery=True)
    with pytest.raises(InvariantError, match="invariant drop_is_recorded "):
        of_copies.check_invariants([promoted], _record(), _record(), in_recovery=True)
    transition, before, after = COPIES[name]
    with pytest.raises(InvariantError, match=f"invariant {name} "):
        of_copies.check_invariants([transition], before, after, in_recovery=True)


def test_a_controller_with_a_fault_records_nothing_and_begins_nothing(tmp_path, monkeypatch):
    candidate = SlotCandidate("near", "host=127.0.0.1 port=1", "slot")
    plan_of_slots = SlotPlan("host=127.0.0.1 port=1", (candidate,), Selection(), tmp_path)
    nothing: Any = None
    with SlotCopier(candidate, plan_of_slots, nothing) as copier:
        dropped = _found(Drop("users_slot", "db"), Reason.GONE, "ORPHAN")
        found = SlotRound("near", "", 0.0, (dropped,), _record(), None, None)
        monkeypatch.setattr(copier, "_resolved", lambda *_: found)
        monkeypatch.setattr(copier, "_begin", lambda _: pytest.fail("it was begun"))
        before = files(tmp_path)
        with pytest.raises(InvariantError, match="drop_is_recorded"):
            copier.round(0.0, act=True)
        assert files(tmp_path) == before


# -- a writer of the lake ---------------------------------------------------------------------------


def _link(number: int, term: int, epoch: int = 9) -> Any:
    return SimpleNamespace(link=number, term=term, epoch=epoch, versions=(), written=())


HEAD = takeover.Past(head=_link(4, 3), ours=_link(4, 3))
ASKED = takeover.Past(asked=frozenset({"a", "b"}), needed=frozenset({"a"}))
STAGED = takeover.Leftover(takeover.LeftoverKind.STAGING, "_tuskline/staging/copy-t3-x")
LAKE: dict[str, tuple[takeover.Effect, takeover.Past]] = {
    "takeover_publishes_a_newer_term": (takeover.Publish(_link(5, 3), _link(4, 3)), HEAD),
    "table_is_taken_under_its_own_term": (takeover.TakeTable("t", 1, 2, 9), HEAD),
    "only_older_terms_are_swept": (takeover.Remove(STAGED), HEAD),
    "only_unneeded_files_are_removed": (takeover.RemovePrepared("a"), ASKED),
}


@pytest.mark.parametrize("name", names(takeover.INVARIANTS))
def test_a_wrong_effect_of_a_lake_s_writer_is_named_by_its_invariant(name):
    takeover.check_invariants(takeover.Publish(_link(5, 4), _link(4, 3)), HEAD)
    takeover.check_invariants(takeover.TakeTable("t", 1, 3, 9), HEAD)
    takeover.check_invariants(takeover.RemovePrepared("b"), ASKED)
    with pytest.raises(InvariantError, match=f"invariant {name} "):
        takeover.check_invariants(*LAKE[name])


def test_a_takeover_under_a_term_that_was_used_is_named_by_its_invariant():
    used = takeover.Past(head=_link(4, 3), used_term=4)
    takeover.check_invariants(takeover.Publish(_link(5, 5), _link(4, 3)), used)
    for before in (_link(4, 3), None):
        with pytest.raises(InvariantError, match="takeover_publishes_a_newer_term"):
            takeover.check_invariants(takeover.Publish(_link(5, 4), before), used)


def test_a_lake_s_writer_with_a_fault_removes_nothing():
    def faulty() -> Any:
        yield takeover.ReadHead()
        yield takeover.Remove(STAGED)

    def do(effect: takeover.Effect) -> Any:
        assert isinstance(effect, takeover.ReadHead), "it was removed"
        return _link(4, 3)

    with pytest.raises(InvariantError, match="only_older_terms_are_swept"):
        takeover.carry_out(faulty(), do)
