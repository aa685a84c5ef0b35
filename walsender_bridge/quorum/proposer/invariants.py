"""What must hold of a proposer after each step. Pure.

The driver checks it after every step except the hot ones, which carry WAL and acknowledgements, and before the step's
effects. After a hot step that moved `commit_lsn` it checks one thing, on which COMMIT depends: that majorities have
acknowledged that much. Rule numbers are those of quorum/README.md.
"""

from collections.abc import Callable
from typing import NamedTuple

from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.quorum.proposer.core import Proposer
from walsender_bridge.quorum.proposer.effects import Event, PeerReceived, WalRead, WalReceived
from walsender_bridge.quorum.proposer.leader import LeaderState
from walsender_bridge.quorum.proposer.peer import PeerState, SafekeeperPeer
from walsender_bridge.quorum.proposer.replication import Streaming
from walsender_bridge.quorum.protocol.configuration import Configuration, majority
from walsender_bridge.quorum.protocol.messages import AppendAck, NodeId
from walsender_bridge.runtime import invariants
from walsender_bridge.runtime.invariants import Invariant


class Checked(NamedTuple):
    """The state at the last check, for the next one to compare with. The LSNs are 0 until the election."""

    node_id: NodeId
    configuration: Configuration
    leads: bool
    commit_lsn: Lsn
    restart_lsn: Lsn


class _Step(NamedTuple):
    core: Proposer
    before: Checked


def checked(core: Proposer) -> Checked:
    """The initial state, for the first check to compare with."""
    streaming = core.streaming
    if streaming is None:
        return Checked(core.node_id, core.configuration, False, 0, 0)
    lsns = streaming.commit_lsn, streaming.restart_lsn
    return Checked(core.node_id, core.configuration, True, *lsns)


def is_hot(event: Event) -> bool:
    """WAL arrives, or is acknowledged: at each commit."""
    kind = type(event)
    if kind is PeerReceived:
        return type(event.message) is AppendAck  # type: ignore[union-attr]  # it is a PeerReceived
    return kind is WalReceived or kind is WalRead


def check_invariants(core: Proposer, before: Checked) -> Checked:
    """Check; returns the state for the next check. Raises `InvariantError`."""
    invariants.check("proposer", INVARIANTS, _Step(core, before), _describe)
    return checked(core)


def check_commit(core: Proposer, before: Checked) -> Checked:
    """As `check_invariants`, after a hot step: only whether majorities have the WAL that it committed."""
    streaming = core.streaming
    if streaming is None or streaming.commit_lsn == before.commit_lsn:
        return before
    invariants.check("proposer", _OF_COMMITS, _Step(core, before), _describe)
    return before._replace(commit_lsn=streaming.commit_lsn)


def _describe(step: _Step) -> str:
    core, streaming = step.core, step.core.streaming
    state = f"{core.phase}, {core.node_id}, membership {core.configuration.version}"
    if streaming is None:
        return state
    lsns = "epoch_start", "queue_begin", "restart_lsn", "commit_lsn", "end"
    positions = [f"{name} {format_lsn(max(getattr(streaming, name), 0))}" for name in lsns]
    acked = [f"{each:032x} {format_lsn(max(lsn, 0))}" for each, lsn in streaming.acked.items()]
    return f"{state}, {', '.join(positions)}; acknowledged: {', '.join(acked) or 'nothing'}"


def _one_node_id(step: _Step) -> bool:
    now, before = step.core.node_id, step.before.node_id
    return now == before or (before.term == 0 and now.proposer == before.proposer)


def _quorum_stays(step: _Step) -> bool:
    return step.before.configuration.quorum in {0, step.core.configuration.quorum}


def _elected_by_a_quorum(step: _Step) -> bool:
    """Checked at the moment of the election: a voter may become distrusted later."""
    core = step.core
    if core.leader is None or step.before.leads:
        return True
    peers = core.peers.values()
    voters = {p.identity for p in peers if p.reply and p.reply.node_id == core.node_id}
    return core.configuration.has_quorum(voters)


def _of_leader(holds: Callable[[Proposer, LeaderState], bool]) -> Callable[[_Step], bool]:
    return lambda step: step.core.leader is None or holds(step.core, step.core.leader)


def _of_wal(holds: Callable[[Streaming], bool]) -> Callable[[_Step], bool]:
    def asked(step: _Step) -> bool:
        streaming = step.core.streaming
        return streaming is None or holds(streaming)

    return asked


def _leader_has_the_term(core: Proposer, leader: LeaderState) -> bool:
    return leader.term == core.node_id.term == leader.history.latest_election_epoch > 0


def _commit_is_backed(step: _Step) -> bool:
    """By the memberships in force when it moved. Later a member may do a full resync, or leave."""
    streaming = step.core.streaming
    if streaming is None or not step.before.leads or streaming.commit_lsn == step.before.commit_lsn:
        return True
    lsn, configuration = streaming.commit_lsn, streaming.configuration
    have = {each for each, acked in streaming.acked.items() if acked >= lsn}
    have -= configuration.distrusted
    return all(len(group & have) >= majority(group) > 0 for group in configuration.groups)


def _queue_is_bounded(streaming: Streaming) -> bool:
    begin, end = streaming.queue_begin, streaming.end
    return streaming.epoch_start <= begin <= end <= begin + streaming.limits.queue_bytes


def _sent_within_bounds(streaming: Streaming) -> bool:
    def bounded(peer: SafekeeperPeer) -> bool:
        in_flight = peer.sent_lsn - peer.flush_lsn
        return 0 <= in_flight <= streaming.limits.inflight_bytes and peer.sent_lsn <= streaming.end

    return all(bounded(p) for p in streaming.peers.values() if p.state == PeerState.STREAMING)


_OF_COMMITS: tuple[Invariant[_Step], ...] = (
    Invariant(
        "commit_lsn_never_goes_back",
        "rule 7",
        lambda step: (
            step.core.streaming is None or step.core.streaming.commit_lsn >= step.before.commit_lsn
        ),
    ),
    Invariant("commit_lsn_backed_by_majorities", "rules 4 and 10", _commit_is_backed),
    Invariant(
        "commit_lsn_in_this_epoch",
        "rule 4, Raft: a leader commits by WAL of its own term",
        _of_wal(lambda wal: not wal.established or wal.commit_lsn >= wal.epoch_start),
    ),
    Invariant("commit_lsn_within_end", "rule 4", _of_wal(lambda wal: wal.commit_lsn <= wal.end)),
)
INVARIANTS: tuple[Invariant[_Step], ...] = (
    Invariant("one_process_has_one_node_id", "rule 5", _one_node_id),
    Invariant(
        "membership_never_goes_back",
        "rule 10",
        lambda step: step.core.configuration.version >= step.before.configuration.version,
    ),
    Invariant("quorum_id_never_changes", "rule 10", _quorum_stays),
    Invariant("elected_by_a_quorum", "rules 1 and 10", _elected_by_a_quorum),
    Invariant("epoch_is_the_term", "rule 2", _of_leader(_leader_has_the_term)),
    Invariant(
        "counts_by_the_membership_in_force",
        "rule 10",
        _of_leader(lambda core, leader: leader.streaming.configuration == core.configuration),
    ),
    *_OF_COMMITS,
    Invariant(
        "restart_lsn_never_goes_back",
        "rule 7",
        lambda step: (
            step.core.streaming is None
            or step.core.streaming.restart_lsn >= step.before.restart_lsn
        ),
    ),
    Invariant(
        "restart_lsn_within_commit",
        "rule 7",
        _of_wal(lambda wal: wal.restart_lsn <= wal.commit_lsn),
    ),
    Invariant(
        "acknowledged_within_end",
        "rule 4: a safekeeper only has WAL that was sent",
        _of_wal(lambda wal: all(lsn <= wal.end for lsn in wal.acked.values())),
    ),
    Invariant("queue_is_bounded", "rule 8", _of_wal(_queue_is_bounded)),
    Invariant("in_flight_is_bounded", "rule 8", _of_wal(_sent_within_bounds)),
)
