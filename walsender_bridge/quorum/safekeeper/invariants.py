"""What must hold of a safekeeper after each step. Pure.

The driver checks it after every step except the hot ones, which append and sync WAL, and before the step's effects. Rule
numbers are those of quorum/README.md.
"""

from itertools import pairwise
from typing import NamedTuple

from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.quorum.protocol.history import History
from walsender_bridge.quorum.protocol.messages import Append
from walsender_bridge.quorum.safekeeper.core import Safekeeper
from walsender_bridge.quorum.safekeeper.effects import (
    ControlState,
    Drained,
    Event,
    MessageReceived,
    WalSynced,
)
from walsender_bridge.runtime import invariants
from walsender_bridge.runtime.invariants import Invariant


class Checked(NamedTuple):
    """The state at the last check, for the next one to compare with."""

    control: ControlState
    commit_lsn: Lsn
    restart_lsn: Lsn


class _Step(NamedTuple):
    core: Safekeeper
    before: Checked

    @property
    def same_log(self) -> bool:
        """Whether the log was not truncated: neither its history changed, nor was there a full resync."""
        core = self.core
        resync = core.served_lsn == 0 and core.commit_lsn <= core.flush_lsn == core.written_lsn
        return core.control.history == self.before.control.history and not resync


def checked(core: Safekeeper) -> Checked:
    """The initial state, for the first check to compare with."""
    return Checked(core.control, core.commit_lsn, core.restart_lsn)


def is_hot(event: Event) -> bool:
    """WAL is written or synced: at each commit."""
    kind = type(event)
    if kind is MessageReceived:
        return type(event.message) is Append  # type: ignore[union-attr]  # it is a Received
    return kind is Drained or kind is WalSynced


def check_invariants(core: Safekeeper, before: Checked) -> Checked:
    """Check; returns the state for the next check. Raises `InvariantError`."""
    part = f"safekeeper {core.control.safekeeper:032x}"
    invariants.check(part, INVARIANTS, _Step(core, before), _describe)
    return checked(core)


def _describe(step: _Step) -> str:
    core, control = step.core, step.core.control
    lsns = "written", "flush", "commit", "restart", "served"
    state = [f"{name} {format_lsn(max(getattr(core, f'{name}_lsn'), 0))}" for name in lsns]
    return (
        f"{', '.join(state)}, vote {control.node_id}, {len(control.history.entries)} history entries up to"
        f" election epoch {control.history.latest_election_epoch}, membership {control.configuration.version}; before: vote"
        f" {step.before.control.node_id}, commit {format_lsn(step.before.commit_lsn)}"
    )


def _history_ascends(history: History) -> bool:
    entries = history.entries
    return all(
        one.name < two.name and one.start_lsn <= two.start_lsn for one, two in pairwise(entries)
    )


def _one_vote_a_term(step: _Step) -> bool:
    vote, before = step.core.control.node_id, step.before.control.node_id
    return vote == before or vote.term > before.term


def _quorum_stays(step: _Step) -> bool:
    """A membership that no elected proposer has stamped is not binding."""
    before = step.before.control.configuration
    return not before.is_foreign(step.core.control.configuration.quorum)


def _server_stays(step: _Step) -> bool:
    before = step.before.control.server
    return not before.system_id or step.core.control.server == before


def _served_is_committed(step: _Step) -> bool:
    core = step.core
    return 0 <= core.served_lsn <= min(core.commit_lsn, core.flush_lsn)


def _begins_in_its_history(step: _Step) -> bool:
    entries, core = step.core.control.history.entries, step.core
    if not entries:
        return core.written_lsn == 0
    return entries[0].start_lsn <= core.flush_lsn or core.flush_lsn == 0


def _writer_has_greeted(step: _Step) -> bool:
    core = step.core
    if core.owner is None:
        return not core.pending and core.aligned is None
    return core.owner in core.greeted


def _fence_is_of_a_vote(step: _Step) -> bool:
    fence = step.core.control.fence
    return fence is None or fence.term <= step.core.control.node_id.term


def _control_is_not_ahead(step: _Step) -> bool:
    core, control = step.core, step.core.control
    return control.commit_lsn <= core.commit_lsn and control.restart_lsn <= core.restart_lsn


INVARIANTS: tuple[Invariant[_Step], ...] = (
    Invariant(
        "identity_never_changes",
        "rule 10: it is drawn with the data directory",
        lambda step: step.core.control.safekeeper == step.before.control.safekeeper,
    ),
    Invariant("server_never_changes", "rule 6: a log is of one server", _server_stays),
    Invariant("one_vote_in_a_term", "rule 2, Neon: votes of a greater term only", _one_vote_a_term),
    Invariant(
        "history_within_vote",
        "rule 2: no election epoch above the term of the vote",
        lambda step: (
            step.core.control.history.latest_election_epoch <= step.core.control.node_id.term
        ),
    ),
    Invariant(
        "history_ascends",
        "rule 6, Neon: term history",
        # One that was checked before is immutable.
        lambda step: (
            step.core.control.history is step.before.control.history
            or _history_ascends(step.core.control.history)
        ),
    ),
    Invariant("log_begins_in_its_history", "rule 6", _begins_in_its_history),
    Invariant(
        "flush_lsn_within_written",
        "rule 4: only what was written is durable",
        lambda step: 0 <= step.core.flush_lsn <= step.core.written_lsn,
    ),
    Invariant(
        "served_lsn_within_commit_and_flush", "readers get committed WAL", _served_is_committed
    ),
    Invariant(
        "commit_lsn_never_goes_back",
        "rule 9: except at a truncation of its log",
        lambda step: not step.same_log or step.core.commit_lsn >= step.before.commit_lsn,
    ),
    Invariant(
        "restart_lsn_never_goes_back",
        "rule 7: except at a truncation of its log",
        lambda step: not step.same_log or step.core.restart_lsn >= step.before.restart_lsn,
    ),
    Invariant(
        "control_file_not_ahead", "the lazy LSNs may be older, never newer", _control_is_not_ahead
    ),
    Invariant(
        "membership_never_goes_back",
        "rule 10",
        lambda step: (
            step.core.control.configuration.version >= step.before.control.configuration.version
        ),
    ),
    Invariant("quorum_id_never_changes", "rule 10", _quorum_stays),
    Invariant("fence_is_of_a_vote", "a failover fences by a vote", _fence_is_of_a_vote),
    Invariant("writer_has_greeted", "rule 5: one connection may write", _writer_has_greeted),
)
