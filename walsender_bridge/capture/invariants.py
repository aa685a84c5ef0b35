"""The invariants of a capture session. Pure.

The driver checks them after steps that are not hot, acknowledgements and ticks, and before their effects: before anything is
appended to the log with a position to confirm, or reported to the server.
"""

from typing import NamedTuple

from walsender_bridge.capture.core import CaptureState
from walsender_bridge.capture.events import CopyDataReceived, Event, Replayed
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition, format_lsn
from walsender_bridge.runtime import invariants
from walsender_bridge.runtime.invariants import Invariant


class Checked(NamedTuple):
    """The state at the last check, with which the next one compares."""

    confirmed: WalPosition
    confirming: WalPosition
    committed_lsn: Lsn
    received_lsn: Lsn


class _Step(NamedTuple):
    state: CaptureState
    before: Checked


def checked(state: CaptureState) -> Checked:
    """Capture the session's state for the first check."""
    return Checked(state.confirmed, state.confirming, state.committed_lsn, state.received_lsn)


def is_hot(event: Event) -> bool:
    """Whether the step only moves rows into entries."""
    return type(event) is CopyDataReceived or type(event) is Replayed


def check_invariants(state: CaptureState, before: Checked) -> Checked:
    """Check the invariants; return the state for the next check. Raises `InvariantError`."""
    invariants.check("capture", INVARIANTS, _Step(state, before), _describe)
    return checked(state)


def _describe(step: _Step) -> str:
    state = step.state
    lsns = "received_lsn", "logged_lsn", "committed_lsn", "durable_lsn", "idle_lsn"
    positions = [f"{name} {format_lsn(max(getattr(state, name), 0))}" for name in lsns]
    confirmed = format_lsn(state.confirmed.lsn), format_lsn(state.confirming.lsn)
    return (
        f"{', '.join(positions)}, confirmed {confirmed[0]}, confirming {confirmed[1]}, {len(state.in_flight)} appends of"
        f" {state.in_flight_bytes} bytes in flight"
    )


def _confirms_what_is_committed(step: _Step) -> bool:
    """An earlier session may have confirmed empty transactions, which this session has not received."""
    state = step.state
    if state.confirming == step.before.confirming:
        return True
    return state.confirming.lsn <= max(state.committed_lsn, state.idle_lsn)


def _whole_within_buffer(step: _Step) -> bool:
    state = step.state
    return 0 <= state.whole <= len(state.buffer) and 0 <= state.whole_bytes <= state.buffer_bytes


INVARIANTS: tuple[Invariant[_Step], ...] = (
    Invariant(
        "confirmed_never_goes_back",
        "never early: a slot only moves forward",
        lambda step: step.state.confirmed.lsn >= step.before.confirmed.lsn,
    ),
    Invariant(
        "confirm_only_what_is_committed",
        "never early: the log has committed what ends before",
        _confirms_what_is_committed,
    ),
    Invariant(
        "confirm_only_the_same_history",
        "the server sends again what the log holds, first",
        lambda step: step.state.overlap.done or step.state.confirming == step.before.confirming,
    ),
    Invariant(
        "committed_lsn_never_goes_back",
        "Varlog: what is committed stays",
        lambda step: step.state.committed_lsn >= step.before.committed_lsn,
    ),
    Invariant(
        "received_lsn_never_goes_back",
        "exactly once: transactions come in commit order",
        lambda step: step.state.received_lsn >= step.before.received_lsn,
    ),
    Invariant(
        "logged_within_received",
        "exactly once: an entry is of what was received",
        lambda step: step.state.logged_lsn <= step.state.received_lsn,
    ),
    Invariant(
        "whole_within_buffer", "an entry is cut where a transaction ends", _whole_within_buffer
    ),
    Invariant(
        "in_flight_adds_up",
        "bounded: bytes wait only in appends without an answer",
        lambda step: (
            step.state.in_flight_bytes >= 0
            if step.state.in_flight
            else step.state.in_flight_bytes == 0
        ),
    ),
)
