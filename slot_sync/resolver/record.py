"""The record after a poll: what was observed, and which actions are about to start.

Safety: it is saved *before* the actions are carried out. So it always names a slot that we created, wherever a process
ends; a slot that it does not name is not ours before it is taken over. What a crash leaves of an action shows at the next
poll: a reservation that does not exist was not made; a rename has ended when the old name is gone.

A proof belongs to a feedback epoch. In no epoch, or another one, it is void, and so is the time at which the copies were
first seen. A copy's record that stays as it was, because an action on it is under way, becomes void all the same: each
record has the generation that it is of.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from slot_sync.resolver.client import confirmed_so_far
from slot_sync.resolver.conditions import SlotView, is_heard, is_held, needed_from, xmin_is_decoded
from slot_sync.resolver.database import settled_by
from slot_sync.resolver.evaluate import view_of
from slot_sync.resolver.feedback_epoch import epoch_key, is_linked, setup_problem
from slot_sync.resolver.foreign import is_ours, kept_elsewhere
from slot_sync.resolver.incarnation import incarnation_by
from slot_sync.resolver.native import remember_synced
from slot_sync.resolver.observed import (
    TEMPORARY_PREFIX,
    CopyRecord,
    FeedbackEpochKey,
    ObservedPrimary,
    ObservedStandby,
    Reserved,
    Sighting,
    SlotCopy,
    SlotPosition,
    StandbyRecord,
)
from slot_sync.resolver.transitions import (
    SAFE,
    CopyState,
    Drop,
    Reason,
    Rename,
    Reserve,
    Transition,
)
from walsender_bridge.runtime import invariants
from walsender_bridge.runtime.invariants import Invariant

#: Reasons for which the server that answered is not the candidate that the record is of.
ANOTHER_STANDBY = frozenset({Reason.OTHER_SYSTEM, Reason.OTHER_SLOT_NAME})


def remember(
    record: StandbyRecord,
    primary: ObservedPrimary | None,
    standby: ObservedStandby | None,
    transitions: Iterable[Transition],
) -> StandbyRecord:
    """The record after a poll, to be saved before the actions of its transitions are carried out.

    The record stays as it was if one of the servers did not answer or its slots could not be inspected, or the standby was
    promoted or is another server. The slot's position counts only if this was shown to be the primary that the standby
    streams from: positions and transactions of another history mean nothing in this one.
    """
    if primary is None or standby is None or not standby.in_recovery:
        return record
    problem = setup_problem(primary, standby)
    if problem is not None and problem.reason in ANOTHER_STANDBY:
        return record
    if not (primary.has_extension and standby.has_extension):
        return record if problem is not None else remember_synced(record, primary, standby)
    key = epoch_key(primary, standby)
    generation = record.generation
    if key is None or key != record.epoch:
        generation += 1
    by_name = {each.slot: each for each in transitions}
    copies = {}
    for name in sorted(by_name.keys() | record.copies.keys()):
        if name.startswith(TEMPORARY_PREFIX):
            continue  # never a slot to keep
        found = _remembered(record, primary, standby, name, by_name.get(name), key, generation)
        bare = CopyRecord(name, state=found.state, polls_gone=found.polls_gone)
        if found != bare or primary.logical(name) is not None:
            copies[name] = found
    return StandbyRecord(
        key, standby.walreceiver_start if key is not None else None, generation, copies
    )


def under_way(before: CopyRecord, after: CopyRecord) -> CopyRecord:
    """The record of a copy on which an action is under way: unchanged except for the observations of the slot itself."""
    return replace(
        before, confirmed=after.confirmed, settled=after.settled, incarnation=after.incarnation
    )


def _remembered(
    record: StandbyRecord,
    primary: ObservedPrimary,
    standby: ObservedStandby,
    name: str,
    transition: Transition | None,
    key: FeedbackEpochKey | None,
    generation: int,
) -> CopyRecord:
    before = record.of(name)
    if transition is not None and transition.reason is Reason.OTHER_CONTROLLER:
        return _taken_over(before, standby, transition)
    here = standby.slot(name)
    unproven = standby.slot(before.temporary_name or "")
    after = _names(before, here, unproven)
    copy = here if here is not None and is_ours(after, here) else unproven
    slot = primary.logical(name)
    after = replace(
        after,
        polls_gone=before.polls_gone + 1 if slot is None and is_linked(primary, standby) else 0,
        polls_ahead=before.polls_ahead + 1
        if transition is not None and transition.reason is Reason.AHEAD
        else 0,
        state=transition.after if transition is not None else before.state,
    )
    if not primary.in_recovery and primary.timeline == standby.timeline:
        # Also while the standby is disconnected, since the slot's client continues. Positions of another timeline do not count.
        after = replace(after, confirmed=confirmed_so_far(before, slot, primary.timeline))
    if slot is not None and is_linked(primary, standby):
        after = replace(
            after,
            settled=settled_by(before, slot, primary),
            incarnation=incarnation_by(before, slot),
        )
    held = False
    if copy is None:
        after = replace(
            after,
            generation=0,
            seen=None,
            removed_before=None,
            reserved=None,
            decoded_at=None,
            slot_was=None,
            passed=None,
            proven_in=None,
        )
    else:
        after = _seen(after, copy, standby, key, generation)
        if slot is not None and is_linked(primary, standby):
            view = view_of(slot, copy, primary, standby, record)
            after, held = _learned(after, view), is_held(view)
        elif after.decoded_at is not None and (copy.confirmed_flush_lsn or 0) < after.decoded_at:
            after = replace(after, decoded_at=None, proven_in=None)
    if transition is None:
        return after
    whole = transition.safe or transition.after is CopyState.CLIENT_AHEAD
    if whole or isinstance(transition.action, Rename):
        after = replace(after, proven_at=standby.clock)
        # If the primary stops answering, only what the physical slot held is known to have been kept until the end.
        if after.decoded_at is not None and held:
            after = replace(after, proven_in=key)
    if isinstance(transition.action, Reserve):
        name = transition.action.temporary_name
        return replace(after, temporary_name=name, incarnation_id=name)
    if isinstance(transition.action, Rename):
        return replace(after, renaming=True)
    return after


def _taken_over(before: CopyRecord, standby: ObservedStandby, transition: Transition) -> CopyRecord:
    """The record of a copy that another controller created: it is ours from now on, and unproven.

    The client's position belongs to the slot, and stays. After an interrupted rename the copy has both names.
    """
    copy = kept_elsewhere(before.name, before, standby)
    if copy is None or not transition.counts:
        return before
    both = before.temporary_name or copy.incarnation_id or copy.name
    return CopyRecord(
        before.name,
        created=not copy.has_temporary_name,
        temporary_name=both if standby.slot(both) is not None else None,
        incarnation_id=copy.incarnation_id,
        confirmed=before.confirmed,
        settled=before.settled,
        incarnation=before.incarnation,
        state=transition.after,
    )


def _names(before: CopyRecord, here: SlotCopy | None, unproven: SlotCopy | None) -> CopyRecord:
    """Which slots of the standby are ours, by the actions started and the slots found."""
    after = before
    if unproven is None:
        if before.renaming and here is not None and is_ours(before, here):
            after = replace(after, created=True)
        after = replace(after, temporary_name=None, renaming=False)
    elif here is not None and not is_ours(before, here):
        after = replace(after, renaming=False)  # another session took the name meanwhile
    if here is None:
        after = replace(after, created=False, seen_on_primary=False)
    elif not is_ours(before, here):
        after = replace(after, created=False)
    return after


def _learned(before: CopyRecord, view: SlotView) -> CopyRecord:
    """What this poll establishes for good; what was established of a copy that has moved back is void."""
    here, slot = view.copy.confirmed_flush_lsn, view.slot
    needed = needed_from(view)
    after = replace(
        before,
        slot_was=None
        if slot.confirmed_flush_lsn is None or slot.catalog_xmin is None
        else SlotPosition(slot.confirmed_flush_lsn, slot.catalog_xmin),
        passed=None if here is None or needed is None else SlotPosition(here, needed),
    )
    if not xmin_is_decoded(view):
        after = replace(after, decoded_at=None, proven_in=None)
    elif before.decoded_at is None or here is None or here < before.decoded_at:
        after = replace(after, decoded_at=here)
    if before.removed_before is None and is_heard(view):
        after = replace(after, removed_before=slot.catalog_xmin)
    return after


def _seen(
    before: CopyRecord,
    copy: SlotCopy,
    standby: ObservedStandby,
    key: FeedbackEpochKey | None,
    generation: int,
) -> CopyRecord:
    after = replace(before, generation=generation)
    if key is None:
        after = replace(after, seen=None, removed_before=None, proven_in=None)
    elif before.generation != generation or before.seen is None:
        after = replace(
            after,
            seen=Sighting(standby.clock, standby.flush_lsn),
            removed_before=None,
            proven_in=None,
        )
    if after.reserved is None and copy.restart_lsn is not None and copy.catalog_xmin is not None:
        after = replace(after, reserved=Reserved(copy.restart_lsn, copy.catalog_xmin))
    return after


def remember_primary(
    record: StandbyRecord, primary: ObservedPrimary, names: Iterable[str]
) -> StandbyRecord:
    """The record of a server that is the primary now: its slots of these names are its own, not copies of ours."""
    copies = dict(record.copies)
    for name in names:
        if primary.logical(name) is not None:
            copies[name] = CopyRecord(name, seen_on_primary=True)
    return StandbyRecord(generation=record.generation + 1, copies=copies)


# -- invariants of a poll ---------------------------------------------------------------------------

#: Why a copy may be called safe (`conditions.py`).
_PROOFS = frozenset({Reason.PROVEN, Reason.RENAME_CUT, Reason.PROVEN_BEFORE, Reason.BEHIND})


class _Decided(NamedTuple):
    """One transition, and the record before and after the poll."""

    transition: Transition
    before: StandbyRecord
    after: StandbyRecord
    in_recovery: bool

    @property
    def copy(self) -> CopyRecord:
        return self.after.of(self.transition.slot)


def check_invariants(
    transitions: Iterable[Transition],
    before: StandbyRecord,
    after: StandbyRecord,
    *,
    in_recovery: bool,
) -> None:
    """Check a poll before `after` is saved and the actions start. Raises `InvariantError`.

    `in_recovery`: the candidate is in recovery or did not answer; it was not promoted.
    """
    for each in transitions:
        decided = _Decided(each, before, after, in_recovery)
        invariants.check(f"copy of slot {each.slot}", INVARIANTS, decided, _describe)


def _describe(decided: _Decided) -> str:
    each, copy = decided.transition, decided.copy
    return (
        f"{each.before} to {each.after}, {each.reason}, {each.action}; recorded: created {copy.created}, temporary name"
        f" {copy.temporary_name}, renaming {copy.renaming}; generation {decided.before.generation} to"
        f" {decided.after.generation}"
    )


def _reservation_is_recorded(decided: _Decided) -> bool:
    action = decided.transition.action
    if not isinstance(action, Reserve):
        return True
    name = action.temporary_name
    return name.startswith(TEMPORARY_PREFIX) and decided.copy.temporary_name == name


def _rename_is_recorded(decided: _Decided) -> bool:
    action, slot = decided.transition.action, decided.transition.slot
    return not isinstance(action, Rename) or (action.name == slot and decided.copy.renaming)


def _rename_is_of_a_proven_copy(decided: _Decided) -> bool:
    each = decided.transition
    return not isinstance(each.action, Rename) or each.reason is Reason.PROVEN


def _drop_is_recorded(decided: _Decided) -> bool:
    action = decided.transition.action
    if not isinstance(action, Drop):
        return True
    if action.name.startswith(TEMPORARY_PREFIX) and (action.on_primary or not decided.in_recovery):
        # Out of recovery a copy can no longer be proven, and no client uses that name, whichever controller created it.
        return True
    copies = [*decided.before.copies.values(), *decided.after.copies.values()]
    return any(
        action.name == each.temporary_name
        or (
            action.name == each.name
            and (each.created or each.seen_on_primary or each.incarnation_id)
        )
        for each in copies
    )


INVARIANTS: tuple[Invariant[_Decided], ...] = (
    Invariant(
        "safe_only_when_proven",
        "pg_failover_slots: a copy is ready once it is proven",
        lambda decided: (
            decided.transition.after not in SAFE or decided.transition.reason in _PROOFS
        ),
    ),
    Invariant(
        "reservation_is_recorded",
        "the record always names a slot that we created",
        _reservation_is_recorded,
    ),
    Invariant(
        "rename_is_of_a_proven_copy",
        "an unproven copy never has the name that a client would use",
        _rename_is_of_a_proven_copy,
    ),
    Invariant(
        "rename_is_recorded",
        "an interrupted rename is known at the next poll",
        _rename_is_recorded,
    ),
    Invariant(
        "drop_is_recorded",
        "only a slot that the record names is dropped, or an unproven copy on a primary",
        _drop_is_recorded,
    ),
    Invariant(
        "generation_never_goes_back",
        "a proof belongs to one feedback epoch",
        lambda decided: (
            decided.after.generation
            >= decided.before.generation + (decided.after.epoch != decided.before.epoch)
        ),
    ),
)
