"""The transition of one slot: with a copy, without a copy, or of a copy without its slot.

Safety: `evaluate.py` decides whether a copy is safe. Only slots of ours are dropped here, and only after the primary was
shown to be the one that the standby streams from; no copy is created where another record or PostgreSQL maintains one.
"""

from dataclasses import replace
from fnmatch import fnmatchcase

from slot_sync.resolver import database
from slot_sync.resolver.database import is_same_row
from slot_sync.resolver.evaluate import drop, evaluate
from slot_sync.resolver.feedback_epoch import FeedbackEpochProblem, is_linked, link_problem
from slot_sync.resolver.foreign import (
    elsewhere,
    foreign_slot,
    is_ours,
    kept_elsewhere,
    temporary_prefix,
)
from slot_sync.resolver.observed import (
    CopyRecord,
    LogicalSlot,
    ObservedPrimary,
    ObservedStandby,
    Selection,
    SlotCopy,
    StandbyRecord,
)
from slot_sync.resolver.transitions import (
    Action,
    CopyState,
    MarkIncarnation,
    Nothing,
    Reason,
    Reserve,
    Transition,
    Wait,
)

#: Consecutive polls that must show the primary without a slot before its copy is dropped.
GONE_POLLS = 3


def is_wanted(slot: LogicalSlot, wanted: Selection) -> bool:
    """The selection matches the slot, or is empty."""
    if wanted == Selection():
        return True
    return (
        slot.name in wanted.names
        or slot.plugin in wanted.plugins
        or slot.database in wanted.databases
        or any(fnmatchcase(slot.name, pattern) for pattern in wanted.patterns)
    )


def transition_of(
    primary: ObservedPrimary,
    standby: ObservedStandby,
    record: StandbyRecord,
    wanted: Selection,
    name: str,
) -> Transition:
    """The transition of one slot that is selected, or that we have a copy of. Both servers' settings allow it."""
    slot = primary.logical(name)
    remembered = record.of(name)
    here = standby.slot(name)
    unproven_copy = standby.slot(remembered.temporary_name or "")
    if slot is None or not is_wanted(slot, wanted):
        linked = is_linked(primary, standby)
        found = _orphan(slot, remembered, here, unproven_copy, linked=linked)
        return replace(found, counts=name in wanted.names)
    if here is not None and not is_ours(remembered, here):
        return foreign_slot(
            slot, here, unproven_copy, remembered, standby, linked=is_linked(primary, standby)
        )
    if slot.wal_status == "lost" or slot.invalidation is not None:
        return Transition(
            name,
            remembered.state,
            CopyState.INVALID,
            Reason.LOST_ON_PRIMARY,
            "the slot is lost on the primary, and its client cannot continue from it",
            repair="drop it there, create it again, and let its client start over",
            evidence={"wal_status": slot.wal_status, "invalidation": slot.invalidation},
            action=Wait(),
        )
    if slot.restart_lsn is None or slot.confirmed_flush_lsn is None or slot.catalog_xmin is None:
        return Transition(
            name,
            remembered.state,
            CopyState.BLOCKED,
            Reason.SLOT_BEING_CREATED,
            "the slot on the primary is not consistent yet",
            repair="end long-running transactions there",
            action=Wait(),
        )
    if here is not None and unproven_copy is not None:
        return Transition(
            name,
            remembered.state,
            CopyState.PROVING,
            Reason.RENAME_CUT,
            "a rename was interrupted: the slot exists under both names",
            action=drop(unproven_copy),
        )
    found = _kept(slot, here or unproven_copy, primary, standby, record)
    if slot.incarnation_id is None and is_linked(primary, standby):
        return replace(
            found, action=MarkIncarnation(slot.name, f"{primary.wal_lsn:x}-{standby.clock:x}")
        )
    return found


def _kept(
    slot: LogicalSlot,
    copy: SlotCopy | None,
    primary: ObservedPrimary,
    standby: ObservedStandby,
    record: StandbyRecord,
) -> Transition:
    """The transition of a slot that is consistent on the primary, and whose name is free or ours on the standby."""
    remembered = record.of(slot.name)
    if copy is not None and slot.failover and standby.native_sync and not copy.synced:
        return _gives_way(copy, remembered, linked=is_linked(primary, standby))
    if copy is None:
        theirs = kept_elsewhere(slot.name, remembered, standby)
        if theirs is not None:
            return elsewhere(slot.name, remembered, theirs)
        link = None if is_linked(primary, standby) else link_problem(primary, standby)
        replayed = is_same_row(slot, primary, standby)
        return _missing(slot, remembered, standby, link, replayed=replayed)
    return evaluate(slot, copy, primary, standby, record)


def _gives_way(copy: SlotCopy, remembered: CopyRecord, *, linked: bool) -> Transition:
    """PostgreSQL creates its own copy, and a slot of that name stops its synchronization of all other slots too."""
    return Transition(
        remembered.name,
        remembered.state,
        CopyState.SUSPECT,
        Reason.GIVES_WAY,
        "PostgreSQL synchronizes this slot itself (failover), so this copy has to be dropped",
        repair="wait until PostgreSQL has created its own copy; if it does not, check the standby's log",
        action=drop(copy) if linked else Wait(),
    )


def _orphan(
    slot: LogicalSlot | None,
    remembered: CopyRecord,
    here: SlotCopy | None,
    unproven_copy: SlotCopy | None,
    *,
    linked: bool,
) -> Transition:
    ours = here if here is not None and is_ours(remembered, here) else None
    copy = unproven_copy or ours
    polls = remembered.polls_gone + 1
    due = linked and (slot is not None or polls >= GONE_POLLS)
    action: Action = Nothing()
    if copy is not None:
        action = drop(copy) if due and not copy.synced else Wait()
    if slot is not None:
        return Transition(
            remembered.name,
            remembered.state,
            CopyState.ORPHAN,
            Reason.DESELECTED,
            "[slots] no longer selects the slot",
            action=action,
            counts=False,
        )
    return Transition(
        remembered.name,
        remembered.state,
        CopyState.ORPHAN,
        Reason.GONE,
        "the slot no longer exists on the primary",
        evidence={"polls_gone": polls, "linked": linked},
        action=action,
        counts=False,
    )


def _missing(
    slot: LogicalSlot,
    remembered: CopyRecord,
    standby: ObservedStandby,
    link: FeedbackEpochProblem | None,
    *,
    replayed: bool,
) -> Transition:
    """The transition of a slot without a copy. `link`: why the standby is not known to stream from this very primary.

    `replayed`: its database is the same on the standby.
    """

    def missing(reason: Reason, why: str, repair: str, action: Action) -> Transition:
        return Transition(
            slot.name,
            remembered.state,
            CopyState.MISSING,
            reason,
            why,
            repair=repair,
            evidence={
                "confirmed_flush_lsn": slot.confirmed_flush_lsn,
                "replay_lsn": standby.replay_lsn,
            },
            action=action,
        )

    if slot.failover and standby.native_sync:
        return missing(
            Reason.NATIVE_PENDING,
            "PostgreSQL has not created its copy yet",
            "check that primary_conninfo names a database, and check the standby's log",
            Wait(),
        )
    if link is not None:
        return missing(link.reason, link.why, link.repair, Wait())
    assert slot.restart_lsn is not None
    assert slot.confirmed_flush_lsn is not None
    if slot.confirmed_flush_lsn > standby.replay_lsn:
        return missing(
            Reason.AHEAD_OF_STANDBY,
            "the slot is ahead of the standby's replay position",
            "wait; recovery_min_apply_delay prolongs this",
            Wait(),
        )
    if not replayed:
        return missing(Reason.DATABASE_PENDING, database.WHY, database.REPAIR, Wait())
    return missing(
        Reason.NOT_CREATED,
        "the standby has no copy",
        "",
        Reserve(
            temporary_name(slot.name, standby.clock),
            slot.database,
            slot.plugin,
            slot.restart_lsn,
            slot.confirmed_flush_lsn,
            slot.two_phase,
            slot.two_phase_at,
        ),
    )


def temporary_name(name: str, clock: int) -> str:
    """A name for an unproven copy that no other copy ever had: at most 63 characters, with the slot's own for readers."""
    return f"{temporary_prefix(name)}{clock:x}"
