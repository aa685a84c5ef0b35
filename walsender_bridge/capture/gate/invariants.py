"""The invariants of the commit gate. Pure.

They are checked after each step, before its decisions are recorded and before the position advances.
"""

from typing import NamedTuple

from walsender_bridge.capture.gate.core import GateState, ObservedServer, Standing
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.runtime import invariants
from walsender_bridge.runtime.invariants import Invariant


class Checked(NamedTuple):
    """The state before a step."""

    timeline: int
    position: Lsn
    shown: Lsn


class _Step(NamedTuple):
    state: GateState
    before: Checked
    seen: ObservedServer

    @property
    def moved(self) -> bool:
        return self.state.position != self.before.position


def checked(state: GateState) -> Checked:
    """Capture the gate's state before a step, for the check after it."""
    return Checked(state.timeline, state.position, state.shown)


def check_invariants(state: GateState, before: Checked, seen: ObservedServer) -> None:
    """`seen`: the observation of the step. Raises `InvariantError`."""
    invariants.check("commit gate", INVARIANTS, _Step(state, before, seen), _describe)


def _describe(step: _Step) -> str:
    state = step.state
    shown = [
        f"{each.slot} {each.standing} {format_lsn(max(each.flush_lsn, 0))}"
        for each in state.candidates.values()
    ]
    return (
        f"timeline {state.timeline}, position {format_lsn(max(state.position, 0))}, shown"
        f" {format_lsn(max(state.shown, 0))}, quorum {format_lsn(max(state.quorum, 0))}, server"
        f" {format_lsn(step.seen.flush_lsn)}; {', '.join(shown) or 'no candidates'}; before: timeline"
        f" {step.before.timeline}, position {format_lsn(step.before.position)}"
    )


def _passed_by_the_counted(step: _Step) -> bool:
    state = step.state
    if not step.moved:
        return True
    have = sum(each.flush_lsn >= state.position for each in state.counted)
    return have >= min(state.rule.quorum or len(state.counted), len(state.counted))


def _passed_by_the_safekeepers(step: _Step) -> bool:
    state = step.state
    return not (step.moved and state.rule.safekeepers) or state.position <= state.quorum


def _one_is_the_server(step: _Step) -> bool:
    standings = [each.standing for each in step.state.candidates.values()]
    return standings.count(Standing.PROMOTED) <= 1


INVARIANTS: tuple[Invariant[_Step], ...] = (
    Invariant(
        "timeline_never_goes_back",
        "a server that was left behind shows nothing",
        lambda step: step.state.timeline >= step.before.timeline,
    ),
    Invariant(
        "position_never_goes_back",
        "what was shown stays shown",
        lambda step: step.state.position >= step.before.position,
    ),
    Invariant(
        "shown_never_goes_back",
        "what was shown stays shown",
        lambda step: step.state.shown >= max(step.before.shown, step.state.position),
    ),
    Invariant(
        "nothing_passes_when_left_behind",
        "a server that was left behind shows nothing",
        lambda step: not (step.moved and step.seen.timeline < step.state.timeline),
    ),
    Invariant(
        "passed_within_the_server",
        "a position is of WAL that is on disk",
        lambda step: not step.moved or step.state.position <= step.seen.flush_lsn,
    ),
    Invariant(
        "passed_by_the_safekeepers",
        "a quorum has what consumers are shown",
        _passed_by_the_safekeepers,
    ),
    Invariant(
        "passed_by_the_counted",
        "whoever may be promoted has what consumers are shown",
        _passed_by_the_counted,
    ),
    Invariant("one_candidate_is_the_server", "one server is promoted", _one_is_the_server),
)
