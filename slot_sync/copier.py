"""One candidate: probes it and the primary, calls the resolver, saves the record, and starts the actions.

Invariant: what an action relies on is in the record, on disk, before the action starts. While an action on a slot is
under way, the record of that slot stays as it was when the action started, so that a half-finished one is never
mistaken for something else.

Nothing here waits for an action, so a slot whose action hangs delays no other slot, and no report.
"""

import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

from slot_sync.apply import carry_out, does_something
from slot_sync.keyed_worker_pool import KeyedWorkerPool
from slot_sync.plan import FailoverCandidate, SlotSyncPlan
from slot_sync.probe.shared import SharedProbe
from slot_sync.probe.standby import StandbyProbe
from slot_sync.record_file import RecordFile
from slot_sync.report import SlotRound
from slot_sync.resolver.observed import ObservedPrimary, ObservedStandby, StandbyRecord
from slot_sync.resolver.record import check_invariants, remember, remember_primary, under_way
from slot_sync.resolver.resolver import resolve
from slot_sync.resolver.transitions import SAFE, Advance, CopyState, Reason, SetFields, Transition
from slot_sync.sessions import Sessions
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.closing import Closing

#: Seconds for which a verdict that is unchanged is not saved again.
FRESH: Final = 1.0
#: States of a copy in which the standby was seen to have all that the client has confirmed.
_CLIENT_BEHIND: Final = {*SAFE, CopyState.SYNCED}
#: Failed conditions that decoding a record of the running transactions (`xl_running_xacts`) satisfies.
UNDECODED: Final = frozenset({Reason.NO_SNAPSHOT, Reason.FOREIGN_SNAPSHOT, Reason.XMIN_NOT_DECODED})
#: The first version in which such a record can be requested, and the seconds between two requests.
LOGS_SNAPSHOTS: Final = 160_000
ASK_SECONDS: Final = 2.0

_log = logs.logger()


class SlotCopier(Closing):
    """Maintains the copies on one candidate, or only probes them."""

    def __init__(
        self, candidate: FailoverCandidate, plan: SlotSyncPlan, primary: SharedProbe
    ) -> None:
        self.candidate = candidate
        self._plan = plan
        self._primary = primary
        self._standby = StandbyProbe(candidate.dsn, plan.primary_dsn)
        self._file = RecordFile(plan.folder, candidate.name)
        #: The record, while this controller is active; None: another controller may write it.
        self._record: StandbyRecord | None = None
        self._saved_at = float("-inf")
        self._asked_at = float("-inf")
        self._sessions = Sessions(candidate.dsn), Sessions(plan.primary_dsn)
        self._workers = KeyedWorkerPool(candidate.name)
        self._failures: dict[str, TusklineError] = {}
        self._logged: dict[str, str] = {}

    def probe(self, since: float) -> SlotRound:
        """The candidate's state, by the saved record. Changes and writes nothing. `since`: as in `round`."""
        return self._resolved(self._record or self._file.peek() or StandbyRecord(), since)

    def round(self, since: float, *, act: bool) -> tuple[SlotRound, int]:
        """Probe, save the record, and start the actions (`act`); returns the state and the number of started actions.

        The primary is seen as it was at `since` or later, in monotonic seconds: a moment after the last round. Raises
        `ConfigError` if the record cannot be written, and `InvariantError`; then no action is started.
        """
        if not act:
            self._record = None
            return self.probe(since), 0
        before = self._file.load() if self._record is None else self._record
        found = self._resolved(before, since)
        startable = [each for each in found.transitions if each.slot not in found.busy]
        in_recovery = found.standby is None or found.standby.in_recovery
        check_invariants(startable, before, found.record, in_recovery=in_recovery)
        self._remember(found.record, before, found.transitions)
        self._log_changes(found.transitions)
        begun = sum(self._begin(each) for each in startable)
        if any(each.reason in UNDECODED for each in found.expected):
            self._ask_for_a_snapshot(found.primary)
        return replace(found, busy=self._workers.busy()), begun

    def _ask_for_a_snapshot(self, primary: ObservedPrimary | None) -> None:
        """Have the primary log the snapshot that a copy's decoder waits for; an idle one does not do so by itself (16+)."""
        now = time.monotonic()
        if (
            primary is None
            or primary.version < LOGS_SNAPSHOTS
            or now - self._asked_at < ASK_SECONDS
        ):
            return
        self._asked_at = now
        _, sessions = self._sessions
        # Without the privilege the request is skipped; a server that does not answer shows at the next probe.
        with suppress(TusklineError), sessions.lent(None) as session:
            session.one("slot_sync/log_snapshot")

    def settle(self, seconds: float) -> bool:
        """Wait for the started actions; returns whether all have ended."""
        return self._workers.wait(seconds)

    def close(self) -> None:
        """Close the connections; actions under way end by themselves."""
        self._workers.close()
        for each in (self._standby, *self._sessions):
            each.close()

    def _resolved(self, before: StandbyRecord, since: float) -> SlotRound:
        """The state that follows from the record `before` and this probe, with the record to save."""
        primary: ObservedPrimary | None = None
        standby: ObservedStandby | None = None
        primary_error: TusklineError | None = None
        standby_error: TusklineError | None = None
        # An action that ends during the probe may have been seen half-finished, so it counts as under way.
        busy = self._workers.busy()
        for slot, error in self._workers.ended().items():
            self._failures.pop(slot, None)
            if error is not None:
                self._failures[slot] = error
        # In this order: the resolver's argument rests on it.
        try:
            primary = self._primary.since(since)
        except TusklineError as error:
            primary_error = error
        try:
            standby = replace(self._standby.read(), configured_slot=self.candidate.slot)
        except TusklineError as error:
            standby_error = error
        now = time.time()
        transitions = resolve(primary, standby, before, self._plan.wanted, self._plan.terms)
        record = remember(before, primary, standby, transitions)
        if primary is not None and standby is not None and _are_one(primary, standby):
            # Both servers of a pair may be named as candidates; one of them is the primary now.
            names = [slot.name for slot in primary.logical_slots]
            record = remember_primary(before, primary, names)
            transitions = [each for each in transitions if each.reason is not Reason.PROMOTED]
        kept = {
            slot: under_way(before.of(slot), record.of(slot))
            for slot in busy
            if slot in before.copies
        }
        record = replace(record, copies={**record.copies, **kept})
        self._failures = {
            each.slot: self._failures[each.slot]
            for each in transitions
            if each.slot in self._failures and not each.safe
        }
        return SlotRound(
            self.candidate.name,
            self._standby.where,
            now,
            tuple(transitions),
            record,
            primary,
            standby,
            primary_error,
            standby_error,
            dict(self._failures),
            busy,
        )

    def _remember(
        self, record: StandbyRecord, before: StandbyRecord, transitions: tuple[Transition, ...]
    ) -> None:
        """Save the record. A copy is never ahead of its slot's position in the file, unless another session moved it."""
        now = time.monotonic()
        moves = any(isinstance(each.action, Advance | SetFields) for each in transitions)
        if moves or _timeless(record) != _timeless(before) or now - self._saved_at > FRESH:
            self._file.save(record)
            self._saved_at = now
        self._record = record

    def _begin(self, transition: Transition) -> bool:
        action = transition.action
        if not does_something(action):
            return False
        standby, primary = self._sessions
        return self._workers.submit(transition.slot, lambda: carry_out(action, standby, primary))

    def _log_changes(self, transitions: tuple[Transition, ...]) -> None:
        for each in transitions:
            if self._logged.get(each.slot) != each.after:
                _log.info(
                    "slot copy",
                    standby=self.candidate.name,
                    slot=each.slot,
                    state=str(each.after),
                    before=each.before,
                    why=each.why,
                )
        self._logged = {each.slot: each.after for each in transitions}


def _are_one(primary: ObservedPrimary, standby: ObservedStandby) -> bool:
    """The candidate is the primary."""
    return (
        not standby.in_recovery
        and not primary.in_recovery
        and primary.system_id == standby.system_id
        and primary.postmaster_start == standby.postmaster_start
    )


def _timeless(record: StandbyRecord) -> StandbyRecord:
    """The record without the fields that change at each poll of a moving slot; an older value is true too, but proves less.

    For a client's position this holds only if the standby had flushed as much at the same poll.
    """
    copies = {
        name: replace(
            each,
            proven_at=None,
            synced_at=None,
            slot_was=None,
            passed=None,
            confirmed=None if each.state in _CLIENT_BEHIND else each.confirmed,
        )
        for name, each in record.copies.items()
    }
    return replace(record, copies=copies)
