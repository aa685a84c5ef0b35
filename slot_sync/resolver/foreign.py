"""Slots on a standby that are not copies of ours: their origin, and what may be done about them.

Safety: a slot is ours by its incarnation id (`SlotCopy.incarnation_id`), never by its name, which any client may take once
ours is dropped. A slot is only dropped here if a record names it, or its name is one that no client uses and the server
has been promoted. All others are reported, with a hint, and left alone.

A copy with a controller's incarnation id that our record does not name is of another record: of a controller on another
machine, or of one that has lost its folder. Our record does not cover it, so it is not known to be safe. The active
controller takes it over (`record.py`) as if it were just reserved. From then on it must meet all conditions of a copy, none
of which rests on who created it: so a copy that came with a backup is never READY before it is proven here.
"""

from collections.abc import Iterable
from hashlib import sha256

from slot_sync.resolver.feedback_epoch import precedes
from slot_sync.resolver.observed import (
    TEMPORARY_PREFIX,
    CopyRecord,
    LogicalSlot,
    ObservedPrimary,
    ObservedStandby,
    SlotCopy,
    StandbyRecord,
)
from slot_sync.resolver.transitions import (
    Action,
    CopyState,
    Drop,
    Nothing,
    Reason,
    Transition,
    Wait,
)

#: The first major version on which clients can create a logical slot on a standby (server_version_num).
_FIRST_WITH_OWN_SLOTS = 160000
_WAIT = Wait()


def is_ours(remembered: CopyRecord, here: SlotCopy) -> bool:
    """The slot under the real name is the one that we created, or PostgreSQL's own copy."""
    return here.synced or (
        here.incarnation_id is not None and here.incarnation_id == remembered.incarnation_id
    )


def temporary_prefix(name: str) -> str:
    """The prefix of the temporary names, and so of the incarnation ids, that controllers give to copies of that slot."""
    return f"{TEMPORARY_PREFIX}{name[:24]}_{sha256(name.encode()).hexdigest()[:8]}_"


def _is_kept_elsewhere(name: str, remembered: CopyRecord, here: SlotCopy) -> bool:
    """A controller created it as a copy of that slot, it is usable, and our record does not name it."""
    return (
        here.incarnation_id is not None
        and here.incarnation_id.startswith(temporary_prefix(name))
        and not is_ours(remembered, here)
        and here.invalidation is None
        and here.wal_present is True
    )


def kept_elsewhere(name: str, remembered: CopyRecord, standby: ObservedStandby) -> SlotCopy | None:
    """The copy of that slot, proven or not, that a controller with another record created."""
    here = standby.slot(name)
    if here is not None:
        return here if _is_kept_elsewhere(name, remembered, here) else None
    if standby.slot(remembered.temporary_name or "") is not None:
        return None
    prefix = temporary_prefix(name)
    return next((each for each in standby.slots if each.name.startswith(prefix)), None)


def elsewhere(
    name: str,
    remembered: CopyRecord,
    copy: SlotCopy,
    *,
    counts: bool = True,
    action: Action = _WAIT,
) -> Transition:
    """The transition of a copy that our record does not name, but another controller's may."""
    return Transition(
        name,
        remembered.state,
        CopyState.KEPT_ELSEWHERE,
        Reason.OTHER_CONTROLLER,
        "a controller with another record created the copy, and the record here does not contain it",
        repair="query that controller's machine; or stop it and run `tuskline slots sync` here, which proves the copy"
        if counts
        else "",
        evidence={
            "copy": copy.name,
            "incarnation_id": copy.incarnation_id,
            "active_pid": copy.active_pid,
        },
        action=action,
        counts=counts,
    )


def foreign_slot(
    slot: LogicalSlot,
    here: SlotCopy,
    unproven_copy: SlotCopy | None,
    remembered: CopyRecord,
    standby: ObservedStandby,
    *,
    linked: bool,
) -> Transition:
    """The transition of a slot on the standby that has the name of a selected one, and that we did not create."""
    evidence = {"copy": here.name, "plugin": here.plugin, "active_pid": here.active_pid}
    if remembered.seen_on_primary and here.plugin is not None and here.database is not None:
        idle = here.active_pid is None and linked
        return Transition(
            slot.name,
            remembered.state,
            CopyState.LEFTOVER,
            Reason.OLD_PRIMARY,
            "it is the slot itself, from when this standby was the primary",
            repair="" if idle else "end the session that uses it",
            evidence=evidence,
            action=Drop(here.name, here.database, any_slot=True) if idle else Wait(),
        )
    action: Action = Nothing()
    if unproven_copy is not None:
        action = (
            Wait()
            if unproven_copy.active_pid is not None or unproven_copy.database is None
            else Drop(unproven_copy.name, unproven_copy.database)
        )
    same_kind = (here.plugin, here.datoid) == (slot.plugin, slot.datoid)
    if same_kind and _is_kept_elsewhere(slot.name, remembered, here):
        return elsewhere(slot.name, remembered, here, action=action)
    if _is_stale(here, slot, standby):
        return Transition(
            slot.name,
            remembered.state,
            CopyState.STALE_BACKUP,
            Reason.FROM_A_BACKUP,
            "the slot came with a backup; it retains WAL here, but the rows it needs are removed",
            repair=f"on the standby: SELECT pg_drop_replication_slot('{here.name}')",
            evidence=evidence,
            action=action,
        )
    return Transition(
        slot.name,
        remembered.state,
        CopyState.CONFLICT,
        Reason.NAME_TAKEN,
        "the standby has a slot of that name that Tuskline did not create",
        repair="drop it, or exclude this slot from [slots]",
        evidence=evidence,
        action=action,
    )


def _is_stale(here: SlotCopy, slot: LogicalSlot | None, standby: ObservedStandby) -> bool:
    """A slot as a restored snapshot or a copied data directory contains it: idle, and nowhere ahead of its original."""
    if (
        here.plugin is None
        or here.persistency != "persistent"
        or here.synced
        or here.active_pid is not None
    ):
        return False
    if standby.version < _FIRST_WITH_OWN_SLOTS:
        return True
    if slot is None or (here.plugin, here.datoid) != (slot.plugin, slot.datoid):
        return False
    return (
        (here.restart_lsn or 0) <= (slot.restart_lsn or 0)
        and (here.confirmed_flush_lsn or 0) <= (slot.confirmed_flush_lsn or 0)
        and here.catalog_xmin is not None
        and slot.catalog_xmin is not None
        and not precedes(slot.catalog_xmin, here.catalog_xmin)
    )


def unexpected(
    primary: ObservedPrimary,
    standby: ObservedStandby,
    record: StandbyRecord,
    expected: frozenset[str],
) -> list[Transition]:
    """Logical slots of the standby that belong to no selected slot, as far as an operator should know of them."""
    ours = {each.temporary_name for each in record.copies.values()}
    theirs = (kept_elsewhere(name, record.of(name), standby) for name in expected)
    ours |= {
        name for copy in theirs if copy is not None for name in (copy.name, copy.incarnation_id)
    }
    result = []
    for here in sorted(standby.slots, key=lambda each: each.name):
        if here.plugin is None or here.name in expected or here.name in ours:
            continue
        if here.has_temporary_name:
            result.append(
                Transition(
                    here.name,
                    "",
                    CopyState.LEFTOVER,
                    Reason.UNPROVEN_NAME,
                    "an unproven copy that the record does not name; another controller may be running",
                    repair=f"if none is: SELECT tuskline_slots.drop('{here.name}') in database {here.database}",
                    counts=False,
                )
            )
        elif record.of(here.name).seen_on_primary:
            result.append(
                Transition(
                    here.name,
                    record.of(here.name).state,
                    CopyState.LEFTOVER,
                    Reason.OLD_PRIMARY,
                    "a slot from when this standby was the primary; it is not selected now",
                    repair=f"on the standby: SELECT pg_drop_replication_slot('{here.name}')",
                    counts=False,
                )
            )
        elif _is_kept_elsewhere(here.name, record.of(here.name), here):
            result.append(elsewhere(here.name, record.of(here.name), here, counts=False))
        elif _is_stale(here, primary.logical(here.name), standby):
            result.append(
                Transition(
                    here.name,
                    "",
                    CopyState.STALE_BACKUP,
                    Reason.FROM_A_BACKUP,
                    "the slot came with a backup; it retains WAL here, but the rows it needs are removed",
                    repair=f"on the standby: SELECT pg_drop_replication_slot('{here.name}')",
                )
            )
    return result


def unproven(
    slots: Iterable[SlotCopy] | Iterable[LogicalSlot],
    record: StandbyRecord,
    *,
    on_primary: bool = False,
) -> list[Transition]:
    """The transitions of unproven copies on a server that is not in recovery, which no client can use.

    They retain WAL there. `on_primary`: that server is the primary now; the candidate is another one.
    """
    states = {each.temporary_name: each.state for each in record.copies.values()}
    result = []
    for slot in slots:
        if not slot.name.startswith(TEMPORARY_PREFIX):
            continue
        idle = slot.active_pid is None and slot.database is not None
        result.append(
            Transition(
                slot.name,
                states.get(slot.name, ""),
                CopyState.LEFTOVER,
                Reason.UNPROVEN_NAME,
                "the server was promoted before this copy was proven",
                action=Drop(slot.name, slot.database or "", on_primary) if idle else Wait(),
                counts=False,
            )
        )
    return result
