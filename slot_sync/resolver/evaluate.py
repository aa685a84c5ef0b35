"""Evaluates one copy of a slot, and chooses the action that brings it nearer to READY.

Safety: a copy is READY by `conditions.py` alone (`silent.py`: by what was proven before, while the primary does not
answer). The actions cannot do harm: an advance decodes, and moves the copy no farther than the slot; the fields are set
only to the slot's own three, where a snapshot for them exists, or `catalog_xmin` alone is set back, to hold more; a rename
applies only to a safe copy. A copy is not moved while nothing is held: that would raise what the copy stands for, and prove
nothing.
"""

from collections.abc import Mapping
from dataclasses import replace

from slot_sync.resolver import client
from slot_sync.resolver.conditions import Condition, SlotView, first_failed, needed_from
from slot_sync.resolver.database import is_replayed_to, settled_by
from slot_sync.resolver.feedback_epoch import (
    epoch_key,
    is_linked,
    link_problem,
    physical_slot,
    precedes,
)
from slot_sync.resolver.incarnation import incarnation_by
from slot_sync.resolver.native import SWITCH_ON, SWITCHED_OFF
from slot_sync.resolver.observed import (
    CopyRecord,
    LogicalSlot,
    ObservedPrimary,
    ObservedStandby,
    SlotCopy,
    StandbyRecord,
)
from slot_sync.resolver.transitions import (
    Action,
    Advance,
    CopyState,
    Drop,
    Nothing,
    Reason,
    Rename,
    RestoreMappings,
    SetFailover,
    SetFields,
    Transition,
    Wait,
)

#: Polls in a row in which a copy may be ahead of its slot, as it is for a moment after a crash of the primary.
AHEAD_POLLS = 3
#: The part of idle_replication_slot_timeout after which a copy with nothing to decode is acquired for a moment.
IDLE_SHARE = 0.25
#: Recorded states of a copy that is evaluated for the first time.
_NEW = frozenset({"", CopyState.RESERVING, CopyState.MISSING, CopyState.KEPT_ELSEWHERE})
#: Bytes that a copy may be behind its slot and still be READY: a segment of WAL.
LAG_BYTES = 16 * 1024 * 1024


def view_of(
    slot: LogicalSlot,
    copy: SlotCopy,
    primary: ObservedPrimary,
    standby: ObservedStandby,
    record: StandbyRecord,
) -> SlotView:
    """The input of one copy's conditions. What the record has of another epoch is void."""
    key = epoch_key(primary, standby)
    remembered = record.of(slot.name)
    if key is None or key != record.epoch or remembered.generation != record.generation:
        remembered = replace(remembered, seen=None, removed_before=None)
    return SlotView(
        slot,
        copy,
        remembered,
        key,
        physical_slot(primary, standby),
        standby.replay_lsn,
        standby.version,
        standby.idle_share(copy),
        standby.outgrown(copy),
        is_replayed_to(settled_by(record.of(slot.name), slot, primary), standby),
        incarnation_by(record.of(slot.name), slot),
    )


def evaluate(
    slot: LogicalSlot,
    copy: SlotCopy,
    primary: ObservedPrimary,
    standby: ObservedStandby,
    record: StandbyRecord,
) -> Transition:
    """The transition of a copy of ours whose slot is valid and consistent on the primary."""
    view = view_of(slot, copy, primary, standby, record)
    remembered = record.of(slot.name)
    failed = first_failed(view)
    proven = not copy.has_temporary_name
    evidence = {**_evidence(view), "flush_lsn": standby.flush_lsn}
    reason, why, repair = Reason.PROVEN, "all conditions hold", ""
    state = CopyState.READY if proven else CopyState.PROVING
    action: Action
    if failed is None:
        action = _follow(view, standby) if proven else rename(copy, slot)
        assert slot.confirmed_flush_lsn is not None
        assert copy.confirmed_flush_lsn is not None
        if proven and client.is_ahead(
            client.confirmed_so_far(remembered, slot, primary.timeline), standby.flush_lsn
        ):
            state, reason = CopyState.CLIENT_AHEAD, Reason.CLIENT_AHEAD
            why, repair = client.WHY, client.REPAIR
        elif proven and slot.confirmed_flush_lsn - copy.confirmed_flush_lsn > LAG_BYTES:
            state, reason = CopyState.LAGGING, Reason.BEHIND
            why = "all conditions hold, but a client would receive old transactions again"
            repair = "see how far the standby is behind"
    else:
        reason, why, repair = failed.reason, failed.why, failed.repair
        problem = link_problem(primary, standby)
        if failed.reason is Reason.NOT_HEARD and problem is not None:
            reason, why, repair = problem.reason, problem.why, problem.repair
        state = _state_of_failed(failed, remembered, proven=proven)
        if failed.reason is Reason.NO_MAPPINGS:
            action = restore_mappings(copy)
        elif failed.reason is Reason.XMIN_NOT_DECODED:
            action = _stand_back(view) or _follow(view, standby)
        elif state is not CopyState.INVALID:
            action = _follow(view, standby)
        elif failed.reason is Reason.FIELDS_DIFFER and not is_linked(primary, standby):
            action = Wait()  # the slot seen may be of another server than the copy's
        else:
            action = drop(copy)
        if isinstance(action, Nothing):
            action = Wait()
    if copy.failover != slot.failover and not copy.synced and failed is None:
        state = CopyState.SUSPECT if proven else CopyState.PROVING
        reason, why = (
            Reason.FAILOVER_DIFFERS,
            "its failover property differs from that of the slot on the primary",
        )
        repair, action = "", set_failover(copy, slot)
    if copy.synced and not standby.native_sync and state is not CopyState.INVALID:
        state, reason = CopyState.SUSPECT, Reason.NOT_SYNCHRONIZED
        why, repair, action = SWITCHED_OFF, SWITCH_ON, Wait()
    if copy.synced and not isinstance(action, Nothing | RestoreMappings):
        action = Wait()
    return Transition(
        slot.name,
        remembered.state,
        state,
        reason,
        why,
        repair=repair,
        evidence=evidence,
        action=action,
    )


def _state_of_failed(failed: Condition, remembered: CopyRecord, *, proven: bool) -> CopyState:
    if failed.reason is Reason.AHEAD and remembered.polls_ahead + 1 >= AHEAD_POLLS:
        return CopyState.INVALID
    if failed.state is not CopyState.SUSPECT or proven:
        return failed.state
    if failed.reason in {Reason.NOT_HEARD, Reason.RESERVED_LATER}:
        return CopyState.RESERVING
    return CopyState.PROVING


def _evidence(view: SlotView) -> Mapping[str, object]:
    slot, copy, physical = view.slot, view.copy, view.physical
    return {
        "copy": copy.name,
        "restart_lsn": (slot.restart_lsn, copy.restart_lsn),
        "confirmed_flush_lsn": (slot.confirmed_flush_lsn, copy.confirmed_flush_lsn),
        "catalog_xmin": (slot.catalog_xmin, copy.catalog_xmin),
        "held_catalog_xmin": None if physical is None else physical.catalog_xmin,
        "replay_lsn": view.replay_lsn,
        "snapshot_present": copy.snapshot_present,
        "snapshot_complete": copy.snapshot_complete,
        "wal_present": copy.wal_present,
        "mappings_complete": copy.mappings_complete,
        "invalidation": copy.invalidation,
        "persistency": copy.persistency,
    }


def _follow(view: SlotView, standby: ObservedStandby) -> Action:
    """Move the copy towards the slot: directly if a snapshot for the slot's position exists here, else by decoding.

    A copy without a snapshot is decoded once even if it is at the slot's position: decoding from its restart_lsn up to
    there can find one. A copy that has been idle for long is decoded too: that acquires it, and restarts
    idle_replication_slot_timeout. So a client has the rest of that time to connect after a promotion.
    """
    slot, copy = view.slot, view.copy
    if (
        slot.restart_lsn is None
        or slot.confirmed_flush_lsn is None
        or slot.catalog_xmin is None
        or copy.restart_lsn is None
        or copy.confirmed_flush_lsn is None
        or copy.catalog_xmin is None
        or copy.database is None
        or copy.active_pid is not None
        or view.key is None
    ):
        return Nothing()
    target = min(slot.confirmed_flush_lsn, view.replay_lsn)
    forward = target > copy.confirmed_flush_lsn
    if (
        forward
        and target == slot.confirmed_flush_lsn
        and slot.restart_lsn >= copy.restart_lsn
        and not precedes(slot.catalog_xmin, copy.catalog_xmin)
        and any(s.restart_lsn == slot.restart_lsn and s.snapshot_complete for s in standby.slots)
    ):
        return SetFields(copy.name, copy.database, slot.restart_lsn, target, slot.catalog_xmin)
    first = not copy.snapshot_complete and view.record.state in _NEW
    idle = view.idle_share > IDLE_SHARE
    if forward or ((first or idle) and target == copy.confirmed_flush_lsn):
        return Advance(copy.name, copy.database, target)
    return Nothing()


def _stand_back(view: SlotView) -> Action | None:
    """Set catalog_xmin back so that the copy holds all that it needs, which `reserve` did not, while the slot still holds it.

    A lower value is never wrong for the copy: each poll checks again whether the rows exist.
    """
    slot, copy, needed = view.slot, view.copy, needed_from(view)
    if (
        view.key is None
        or needed is None
        or slot.catalog_xmin is None
        or precedes(needed, slot.catalog_xmin)
        or copy.restart_lsn is None
        or copy.confirmed_flush_lsn is None
        or copy.database is None
        or copy.active_pid is not None
    ):
        return None
    return SetFields(
        copy.name,
        copy.database,
        copy.restart_lsn,
        copy.confirmed_flush_lsn,
        needed,
        may_go_back=True,
    )


def drop(copy: SlotCopy) -> Action:
    """Drop the copy, unless a process uses it."""
    if copy.active_pid is not None or copy.database is None:
        return Wait()
    return Drop(copy.name, copy.database)


def restore_mappings(copy: SlotCopy) -> Action:
    """Restore its mapping files, whoever uses or maintains the copy: the slot stays as it is."""
    return Wait() if copy.database is None else RestoreMappings(copy.name, copy.database)


def set_failover(copy: SlotCopy, slot: LogicalSlot) -> Action:
    """Set the copy's failover property to the slot's, unless a process uses the copy."""
    if copy.active_pid is not None or copy.database is None:
        return Wait()
    return SetFailover(copy.name, copy.database, slot.failover)


def rename(copy: SlotCopy, slot: LogicalSlot) -> Action:
    """Give the copy the slot's name, unless a process uses it."""
    if copy.active_pid is not None or copy.database is None:
        return Wait()
    return Rename(copy.name, slot.name, copy.database)
