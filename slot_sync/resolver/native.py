"""PostgreSQL's own copies (17 and later) where the extension is missing, as on managed services: what SQL shows of them.

The verdict is weaker than READY, and has a name of its own: SYNCED. PostgreSQL reports the copy as synchronized, which
its documentation says to check before a failover; the standby streams from this very primary through its configured
slot, and no client is ahead of its disk. What only the extension shows is not verified (`NOT_SHOWN`), so SYNCED is no
proof, and the operator decides whether it suffices (`ReadinessTerms.accept_native`); otherwise the verdict is unknown.
"""

from dataclasses import replace

from slot_sync.resolver import client, database
from slot_sync.resolver.feedback_epoch import link_problem, physical_slot
from slot_sync.resolver.observed import (
    CopyRecord,
    LogicalSlot,
    ObservedPrimary,
    ObservedStandby,
    ReadinessTerms,
    SlotCopy,
    StandbyRecord,
)
from slot_sync.resolver.transitions import CopyState, Nothing, Reason, Transition, Wait

#: The first version that synchronizes slots by itself (server_version_num).
FIRST = 170_000
#: What SYNCED does not verify.
NOT_SHOWN = (
    "whether the snapshot at its restart_lsn is complete: PostgreSQL advances its copies in fast-forward mode",
    "whether the primary has kept, without a gap, the catalog rows that the copy needs: no incarnation id identifies the epoch",
    "whether all WAL that the copy needs is on the standby's disk",
    "whether it belongs to the current slot, or to a dropped one of that name: no incarnation id identifies the slot",
    "whether mapping files of rewritten catalogs that the copy needs were removed before PostgreSQL created it",
)
#: Only PostgreSQL itself may move its copy, and its worker is off (17 and later).
SWITCHED_OFF = (
    "sync_replication_slots is off on the standby, so PostgreSQL does not keep its copy up to date"
)
SWITCH_ON = "on the standby: set sync_replication_slots = on, and reload"
_REPAIR = "install the extension for a proof, or accept SYNCED as sufficient: accept_native = true in [slots]"


def evaluate_by_sql(
    primary: ObservedPrimary,
    standby: ObservedStandby,
    record: StandbyRecord,
    name: str,
    terms: ReadinessTerms,
) -> Transition | None:
    """The transition of one slot; `None`: PostgreSQL does not synchronize it, so only the extension could copy it."""
    slot, copy = primary.logical(name), standby.slot(name)
    if standby.version < FIRST or slot is None or not slot.failover:
        return None
    remembered = record.of(name)
    if (copy is None or not copy.synced) and (remembered.created or not standby.native_sync):
        return None
    after, reason, why, repair = _found(slot, copy, primary, standby, remembered)
    return _transition(remembered, after, reason, why, repair, terms)


def remember_synced(
    record: StandbyRecord, primary: ObservedPrimary, standby: ObservedStandby
) -> StandbyRecord:
    """The record with what SQL shows of PostgreSQL's own copies; the proofs of all copies stay."""
    copies = dict(record.copies)
    for slot in primary.logical_slots:
        copy, before = standby.slot(slot.name), record.of(slot.name)
        if slot.temporary or copy is None or not copy.synced:
            continue
        found = _found(slot, copy, primary, standby, before)[0]
        after = replace(
            before,
            confirmed=client.confirmed_so_far(before, slot, primary.timeline),
            settled=database.settled_by(before, slot, primary),
            state=found,
        )
        if found in {CopyState.SYNCED, CopyState.CLIENT_AHEAD}:
            after = replace(after, synced_at=standby.clock)
        copies[slot.name] = after
    return replace(record, copies=copies)


def synced_before(
    remembered: CopyRecord, standby: ObservedStandby, terms: ReadinessTerms
) -> Transition:
    """The transition of a copy that SQL has shown to be synchronized, when the primary does not answer."""
    copy, confirmed = standby.slot(remembered.name), remembered.confirmed
    problem = None if copy is None else _problem_of_its_own(copy)
    age = standby.clock - (remembered.synced_at or 0)
    state, reason, repair = (
        CopyState.SUSPECT,
        Reason.PRIMARY_UNREACHABLE,
        "check that the primary can be reached",
    )
    if copy is None or not copy.synced:
        why = "PostgreSQL's own copy does not exist any more"
    elif problem is not None:
        state, reason, why = problem
    elif not standby.native_sync:
        reason, why, repair = Reason.NOT_SYNCHRONIZED, SWITCHED_OFF, SWITCH_ON
    elif not database.is_replayed_to(remembered.settled, standby):
        reason, why, repair = Reason.DATABASE_PENDING, database.WHY, database.REPAIR
    elif confirmed is None or confirmed.timeline != standby.timeline:
        why = "the standby is on another timeline"
    elif client.is_ahead(confirmed, standby.flush_lsn):
        state, reason, why = CopyState.CLIENT_AHEAD, Reason.CLIENT_AHEAD, client.WHY
    elif terms.max_age is not None and not 0 <= age <= terms.max_age:
        state, reason = CopyState.BLOCKED, Reason.PROVEN_LONG_AGO
        why = f"it was last seen synchronized {age / 1e6:.0f} s ago"
    else:
        state, reason, repair = CopyState.SYNCED, Reason.SYNCED_ONLY, _REPAIR
        why = f"it was last seen synchronized {age / 1e6:.0f} s ago"
    return _transition(
        remembered, state, reason, f"the primary does not answer, and {why}", repair, terms
    )


def _found(
    slot: LogicalSlot,
    copy: SlotCopy | None,
    primary: ObservedPrimary,
    standby: ObservedStandby,
    before: CopyRecord,
) -> tuple[CopyState, Reason, str, str]:
    """The state, reason, explanation and hint of a slot with `failover`."""
    if slot.wal_status == "lost" or slot.invalidation is not None:
        why = "the slot is lost on the primary, and its client cannot continue from it"
        return CopyState.INVALID, Reason.LOST_ON_PRIMARY, why, "drop it there, and create it again"
    if copy is None:
        why = "PostgreSQL has not created its copy yet"
        return CopyState.MISSING, Reason.NATIVE_PENDING, why, "check the standby's log"
    if not copy.synced:
        why = "the standby has a slot of that name that PostgreSQL does not synchronize"
        repair = f"on the standby: SELECT pg_drop_replication_slot('{copy.name}')"
        return CopyState.CONFLICT, Reason.NAME_TAKEN, why, repair
    link = link_problem(primary, standby)
    if link is not None and link.reason is not Reason.NO_INCARNATION_ID:
        return CopyState.SUSPECT, link.reason, link.why, link.repair
    problem = _problem_of_its_own(copy)
    if problem is not None:
        return *problem, "check the standby's log"
    if not standby.native_sync:
        return CopyState.SUSPECT, Reason.NOT_SYNCHRONIZED, SWITCHED_OFF, SWITCH_ON
    if (copy.plugin, copy.datoid, copy.two_phase) != (slot.plugin, slot.datoid, slot.two_phase):
        why = "plugin, database or two_phase differ from the slot on the primary"
        return (
            CopyState.INVALID,
            Reason.FIELDS_DIFFER,
            why,
            "PostgreSQL corrects this itself; if it does not, check the standby's log",
        )
    if not database.is_replayed_to(database.settled_by(before, slot, primary), standby):
        return CopyState.SUSPECT, Reason.DATABASE_PENDING, database.WHY, database.REPAIR
    physical = physical_slot(primary, standby)
    if physical is None or physical.catalog_xmin is None:
        why = "the standby's physical slot holds no catalog rows"
        return (
            CopyState.SUSPECT,
            Reason.NO_CATALOG_XMIN,
            why,
            "wait for the standby's next hot-standby feedback",
        )
    here, there = copy.confirmed_flush_lsn, slot.confirmed_flush_lsn
    if here is None or there is None or here > there:
        why = "the copy is ahead of the slot: the primary lost the slot's position in a crash"
        return (
            CopyState.SUSPECT,
            Reason.AHEAD,
            why,
            "wait until the slot's client has confirmed the copy's position",
        )
    if client.is_ahead(client.confirmed_so_far(before, slot, primary.timeline), standby.flush_lsn):
        return CopyState.CLIENT_AHEAD, Reason.CLIENT_AHEAD, client.WHY, client.REPAIR
    why = "PostgreSQL reports it as synchronized; without the extension nothing else is known"
    return CopyState.SYNCED, Reason.SYNCED_ONLY, why, _REPAIR


def _problem_of_its_own(copy: SlotCopy) -> tuple[CopyState, Reason, str] | None:
    """A problem of the copy itself that rules out its use after a promotion."""
    if copy.invalidation is not None:
        return CopyState.INVALID, Reason.INVALIDATED, "the standby has invalidated the copy"
    if copy.persistency != "persistent":
        why = "PostgreSQL has not finished the copy, and a promotion would lose it"
        return CopyState.PROVING, Reason.NOT_PERSISTENT, why
    return None


def _transition(
    remembered: CopyRecord,
    after: CopyState,
    reason: Reason,
    why: str,
    repair: str,
    terms: ReadinessTerms,
) -> Transition:
    synced = after is CopyState.SYNCED
    accepted = synced and terms.accept_native
    return Transition(
        remembered.name,
        remembered.state,
        after,
        reason,
        why,
        repair="" if accepted else repair,
        action=Nothing() if synced else Wait(),
        not_known=NOT_SHOWN if synced else (),
        accepted=accepted,
    )
