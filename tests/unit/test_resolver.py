"""The slot resolver's table, row by row: what is shown, and what is answered."""

from dataclasses import replace
from typing import Any

import pytest

from slot_sync.probe.slot_rows import two_phase_at
from slot_sync.resolver.evaluate import AHEAD_POLLS, LAG_BYTES
from slot_sync.resolver.feedback_epoch import epoch_key, precedes
from slot_sync.resolver.foreign import unproven
from slot_sync.resolver.observed import (
    TEMPORARY_PREFIX,
    Confirmed,
    CopyRecord,
    Incarnation,
    LogicalSlot,
    ObservedPrimary,
    ObservedStandby,
    PhysicalSlot,
    ReadinessTerms,
    Reserved,
    SafekeeperUpstream,
    Selection,
    Settled,
    Sighting,
    SlotCopy,
    SlotPosition,
    StandbyRecord,
    Upstream,
)
from slot_sync.resolver.one_slot import GONE_POLLS, is_wanted, temporary_name
from slot_sync.resolver.record import check_invariants, remember, remember_primary
from slot_sync.resolver.resolver import resolve
from slot_sync.resolver.transitions import (
    Advance,
    CopyState,
    Drop,
    MarkIncarnation,
    Nothing,
    Reason,
    Rename,
    Reserve,
    SetFailover,
    SetFields,
    Transition,
    Wait,
)

ALL = Selection()
TEMPORARY = TEMPORARY_PREFIX + "kept"
SLOT = LogicalSlot("kept", "pgoutput", "shop", 1000, 2000, 700, datoid=5, incarnation_id="l1")
PHYSICAL = PhysicalSlot("here", 2500, None, 690, "m1", 11, 5000, reply_time=9000, flush_lsn=2500)
PRIMARY = ObservedPrimary(
    7, 1, False, 100, 150018, "logical", 2600, (SLOT,), (PHYSICAL,), databases={5: 90}
)
COPY = SlotCopy(
    "kept",
    "pgoutput",
    "shop",
    "persistent",
    1000,
    2000,
    700,
    700,
    snapshot_present=True,
    snapshot_complete=True,
    incarnation_id=TEMPORARY,
    wal_present=True,
    mappings_complete=True,
    datoid=5,
)
STANDBY = ObservedStandby(
    system_id=7,
    timeline=1,
    in_recovery=True,
    postmaster_start=200,
    version=150018,
    wal_level="logical",
    conf_load_time=300,
    clock=9500,
    hot_standby_feedback=True,
    wal_receiver_status_interval=10,
    primary_slot_name="here",
    walreceiver_status="streaming",
    walreceiver_slot_name="here",
    walreceiver_start=400,
    upstream=Upstream(7, False, 100),
    replay_lsn=2500,
    flush_lsn=2500,
    slots=(COPY,),
    native_sync=True,
    databases={5: 90},
)
KEY = epoch_key(PRIMARY, STANDBY)
KNOWN = CopyRecord(
    "kept",
    created=True,
    incarnation_id=TEMPORARY,
    seen=Sighting(8000, 2400),
    removed_before=690,
    reserved=Reserved(900, 680),
    decoded_at=1000,
    slot_was=SlotPosition(2000, 700),
    confirmed=Confirmed(1, 2000),
    settled=Settled(5, 90, 1900),
    incarnation=Incarnation("l1", 1000),
    proven_in=KEY,
    proven_at=9400,
    state="READY",
)
EMPTY = replace(STANDBY, slots=())
UNPROVEN = replace(KNOWN, created=False, temporary_name=TEMPORARY, state="PROVING")


def record(known: CopyRecord = KNOWN) -> StandbyRecord:
    return StandbyRecord(KEY, 400, copies={known.name: known})


def standby(*copies: SlotCopy, **changes: Any) -> ObservedStandby:
    return replace(STANDBY, slots=copies or (COPY,), **changes)


def primary(slot: LogicalSlot | None = SLOT, **physical: Any) -> ObservedPrimary:
    return replace(
        PRIMARY,
        logical_slots=() if slot is None else (slot,),
        physical_slots=(replace(PHYSICAL, **physical),),
    )


def only(transitions: list[Transition], name: str = "kept") -> Transition:
    (found,) = [each for each in transitions if each.slot == name]
    return found


def resolved(
    there: ObservedPrimary | None,
    here: ObservedStandby | None,
    before: StandbyRecord,
    wanted: Selection,
    *terms: ReadinessTerms,
) -> list[Transition]:
    """What the resolver decides, with the invariants checked as a controller does."""
    transitions = resolve(there, here, before, wanted, *terms)
    after = remember(before, there, here, transitions)
    in_recovery = here is None or here.in_recovery
    check_invariants(transitions, before, after, in_recovery=in_recovery)
    return transitions


def answered(
    there: ObservedPrimary | None = PRIMARY,
    here: ObservedStandby | None = STANDBY,
    known: StandbyRecord | None = None,
    wanted: Selection = ALL,
) -> Transition:
    return only(resolved(there, here, record() if known is None else known, wanted))


def test_6_a_copy_that_has_everything_is_ready() -> None:
    found = answered()
    assert (found.after, found.reason, found.action) == (CopyState.READY, Reason.PROVEN, Nothing())
    assert found.safe
    assert found.before == "READY"
    assert found.evidence["catalog_xmin"] == (700, 700)


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        (replace(STANDBY, system_id=8), Reason.OTHER_SYSTEM),
        (replace(STANDBY, wal_level="replica"), Reason.WAL_LEVEL),
        (replace(STANDBY, primary_slot_name=""), Reason.NO_SLOT_NAME),
        (replace(STANDBY, hot_standby_feedback=False), Reason.FEEDBACK_OFF),
        (replace(STANDBY, wal_receiver_status_interval=0), Reason.FEEDBACK_OFF),
        (replace(STANDBY, primary_slot_name="other"), Reason.NO_PHYSICAL_SLOT),
        (replace(STANDBY, upstream=Upstream(7, True, 100)), Reason.CASCADING),
        (replace(STANDBY, upstream=SafekeeperUpstream("sk:7433")), Reason.BEHIND_SAFEKEEPER),
        (
            replace(
                STANDBY, upstream=None, primary_slot_name="other", walreceiver_slot_name="other"
            ),
            Reason.CASCADING,
        ),
        (replace(STANDBY, has_extension=False), Reason.NO_EXTENSION),
    ],
)
def test_10_each_setting_is_named_with_its_repair(here: ObservedStandby, reason: Reason) -> None:
    found = answered(here=here)
    assert (found.after, found.reason, found.action) == (CopyState.BLOCKED, reason, Wait())
    assert found.repair
    # The library may be there, and the functions still those of the version before.
    assert reason != Reason.NO_EXTENSION or "ALTER EXTENSION tuskline UPDATE" in found.repair


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        (replace(PRIMARY, in_recovery=True), Reason.NOT_PRIMARY),
        (replace(PRIMARY, wal_level="replica"), Reason.WAL_LEVEL),
        (primary(wal_status="lost"), Reason.PHYSICAL_SLOT_LOST),
    ],
)
def test_10_what_the_primary_lacks_is_named_too(there: ObservedPrimary, reason: Reason) -> None:
    found = answered(there)
    assert (found.after, found.reason) == (CopyState.BLOCKED, reason)
    assert found.repair


@pytest.mark.parametrize(
    ("there", "here", "reason"),
    [
        (PRIMARY, standby(walreceiver_status=None), Reason.NOT_STREAMING),
        (PRIMARY, standby(upstream=None), Reason.UPSTREAM_UNKNOWN),
        (PRIMARY, standby(upstream=Upstream(7, False, 99)), Reason.UPSTREAM_UNKNOWN),
        (PRIMARY, standby(timeline=2), Reason.OTHER_TIMELINE),
        (PRIMARY, standby(walreceiver_slot_name="old"), Reason.NO_WALSENDER),
        (primary(active_pid=None), STANDBY, Reason.NO_WALSENDER),
        (primary(catalog_xmin=None), STANDBY, Reason.NO_CATALOG_XMIN),
    ],
)
def test_19_a_link_that_breaks_makes_a_copy_suspect(
    there: ObservedPrimary, here: ObservedStandby, reason: Reason
) -> None:
    found = answered(there, here)
    assert (found.after, found.reason, found.action) == (CopyState.SUSPECT, reason, Wait())


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (primary(backend_start=5001), STANDBY),
        (primary(active_pid=12), STANDBY),
        (primary(incarnation_id="m2"), STANDBY),
        (replace(PRIMARY, postmaster_start=101), standby(upstream=Upstream(7, False, 101))),
        (PRIMARY, standby(conf_load_time=301)),
    ],
)
def test_19_another_epoch_makes_a_copy_suspect_until_it_is_heard_of(
    there: ObservedPrimary, here: ObservedStandby
) -> None:
    found = answered(there, here)
    assert (found.after, found.reason) == (CopyState.SUSPECT, Reason.NOT_HEARD)
    after = remember(record(), there, here, [found])
    assert after.of("kept").proven_in is None
    assert answered(there, here, after).reason is Reason.NOT_HEARD
    heard = replace(there, physical_slots=(replace(there.physical_slots[0], reply_time=9501),))
    assert answered(heard, here, after).after is CopyState.READY


def test_19_a_reply_is_known_by_its_position_on_11() -> None:
    there = primary(reply_time=None, flush_lsn=2401)
    assert answered(there).after is CopyState.READY
    assert answered(primary(reply_time=None, flush_lsn=2400)).reason is Reason.NOT_HEARD


def test_19_an_epoch_with_a_gap_is_another_one() -> None:
    gap = primary(catalog_xmin=None)
    after = remember(record(), gap, STANDBY, [answered(gap)])
    assert after.epoch is None
    again = remember(after, PRIMARY, STANDBY, [answered(known=after)])
    assert again.epoch == KEY
    assert answered(known=again).reason is Reason.NOT_HEARD
    # A record of the copy that was kept from before the gap proves nothing either.
    kept = replace(again, copies={"kept": KNOWN})
    assert answered(known=kept).reason is Reason.NOT_HEARD


def test_19_a_new_physical_slot_is_marked_first() -> None:
    found = resolved(primary(incarnation_id=None), STANDBY, record(), ALL)
    mark = only(found, "here")
    assert isinstance(mark.action, MarkIncarnation)
    assert mark.action.slot == "here"
    assert only(found).reason is Reason.NO_INCARNATION_ID
    strange = resolved(primary(incarnation_id=None), standby(upstream=None), record(), ALL)
    assert [each.slot for each in strange] == ["kept"]


@pytest.mark.parametrize(
    ("copy", "known", "reason", "action"),
    [
        (
            replace(COPY, snapshot_present=False, snapshot_complete=False),
            KNOWN,
            Reason.NO_SNAPSHOT,
            Wait(),
        ),
        (
            replace(
                COPY, confirmed_flush_lsn=1500, snapshot_present=False, snapshot_complete=False
            ),
            KNOWN,
            Reason.NO_SNAPSHOT,
            Advance("kept", "shop", 2000),
        ),
        (replace(COPY, snapshot_complete=False), KNOWN, Reason.FOREIGN_SNAPSHOT, Wait()),
        (
            replace(COPY, confirmed_flush_lsn=1500, snapshot_complete=False),
            KNOWN,
            Reason.FOREIGN_SNAPSHOT,
            Advance("kept", "shop", 2000),
        ),
        (replace(COPY, catalog_xmin=689), KNOWN, Reason.RESERVED_LATER, Wait()),
        (
            replace(COPY, catalog_xmin=695),
            replace(KNOWN, removed_before=696),
            Reason.XMIN_BEHIND,
            Wait(),
        ),
        (
            replace(COPY, catalog_xmin=699),
            replace(KNOWN, removed_before=None),
            Reason.XMIN_BEHIND,
            Wait(),
        ),
        (replace(COPY, confirmed_flush_lsn=2001), KNOWN, Reason.AHEAD, Wait()),
        (
            replace(COPY, confirmed_flush_lsn=1999, catalog_xmin=701),
            replace(KNOWN, decoded_at=None, reserved=Reserved(1000, 701)),
            Reason.XMIN_NOT_DECODED,
            Advance("kept", "shop", 2000),
        ),
    ],
)
def test_18_each_condition_that_fails_makes_a_copy_suspect(
    copy: SlotCopy, known: CopyRecord, reason: Reason, action: object
) -> None:
    found = answered(here=standby(copy), known=record(known))
    assert (found.after, found.reason, found.action) == (CopyState.SUSPECT, reason, action)


def test_33_a_copy_that_is_ahead_of_replay_waits() -> None:
    found = answered(here=standby(COPY, replay_lsn=1999))
    assert (found.after, found.reason) == (CopyState.SUSPECT, Reason.NOT_REPLAYED)
    found = answered(here=replace(EMPTY, replay_lsn=1999), known=StandbyRecord())
    assert (found.after, found.reason) == (CopyState.MISSING, Reason.AHEAD_OF_STANDBY)
    assert found.action == Wait()


def test_12_a_transaction_that_stays_open_makes_a_busy_copy_neither_late_nor_unsafe() -> None:
    """It pins the slot's catalog_xmin at 650. The copy was reserved with 700, and is one poll behind for ever."""
    there = primary(replace(SLOT, catalog_xmin=650), catalog_xmin=700)
    known = record(
        replace(
            KNOWN,
            decoded_at=None,
            slot_was=None,
            reserved=Reserved(1000, 700),
            removed_before=650,
        )
    )
    # A server that is promoted keeps what the copy itself stands for, and no more.
    found = answered(there, known=known)
    assert (found.after, found.reason) == (CopyState.SUSPECT, Reason.XMIN_NOT_DECODED)
    back = SetFields("kept", "shop", 1000, 2000, 650, may_go_back=True)
    assert found.action == back
    known = remember(known, there, STANDBY, [found])
    assert known.of("kept").decoded_at is None
    holding = replace(COPY, catalog_xmin=650)
    found = answered(there, standby(holding), known)
    assert (found.after, found.action) == (CopyState.READY, Nothing())
    # The physical slot does not go back with it, so nobody knows how it is once the primary is silent.
    known = remember(known, there, standby(holding), [found])
    assert known.of("kept").proven_in is None
    moved = primary(replace(SLOT, confirmed_flush_lsn=2300, catalog_xmin=650), catalog_xmin=700)
    found = answered(moved, standby(holding), known)
    assert (found.after, found.action) == (
        CopyState.READY,
        SetFields("kept", "shop", 1000, 2300, 650),
    )
    # It has ended: until the copy has followed, rows that it needs may go.
    ended = primary(replace(SLOT, confirmed_flush_lsn=2400, catalog_xmin=720), catalog_xmin=700)
    found = answered(ended, standby(holding), known)
    assert (found.after, found.reason) == (CopyState.SUSPECT, Reason.RESERVED_LATER)
    assert found.action == SetFields("kept", "shop", 1000, 2400, 720)
    known = remember(known, ended, standby(holding), [found])
    followed = standby(replace(COPY, confirmed_flush_lsn=2400, catalog_xmin=720))
    found = answered(ended, followed, known)
    assert found.after is CopyState.READY
    assert remember(known, ended, followed, [found]).of("kept").proven_in == KEY


@pytest.mark.parametrize(
    ("copy", "reason"),
    [
        (replace(COPY, plugin="test_decoding"), Reason.FIELDS_DIFFER),
        (replace(COPY, two_phase=True, two_phase_at=1500), Reason.FIELDS_DIFFER),
        (replace(COPY, invalidation="rows_removed"), Reason.INVALIDATED),
        (replace(COPY, wal_present=False), Reason.WAL_GONE),
    ],
)
def test_8_an_invalid_copy_is_dropped_unless_it_is_used(copy: SlotCopy, reason: Reason) -> None:
    found = answered(here=standby(copy))
    assert (found.after, found.reason, found.action) == (
        CopyState.INVALID,
        reason,
        Drop("kept", "shop"),
    )
    assert answered(here=standby(replace(copy, active_pid=5))).action == Wait()


def test_9_a_copy_that_stays_ahead_is_made_again() -> None:
    copy = replace(COPY, confirmed_flush_lsn=2001)
    known = record()
    for _ in range(AHEAD_POLLS - 1):
        found = answered(here=standby(copy), known=known)
        assert found.after is CopyState.SUSPECT
        known = remember(known, PRIMARY, standby(copy), [found])
    found = answered(here=standby(copy), known=known)
    assert (found.after, found.action) == (CopyState.INVALID, Drop("kept", "shop"))


def test_6_a_copy_follows_and_is_lagging_when_it_is_far_behind() -> None:
    moved = replace(SLOT, restart_lsn=1200, confirmed_flush_lsn=2400, catalog_xmin=720)
    found = answered(primary(moved))
    assert (found.after, found.action) == (CopyState.READY, Advance("kept", "shop", 2400))
    # Another copy has a snapshot for the slot's own position.
    other = replace(COPY, name="other", restart_lsn=1200)
    found = only(
        resolved(primary(moved), standby(COPY, other), record(), Selection(frozenset({"kept"})))
    )
    assert found.action == SetFields("kept", "shop", 1200, 2400, 720)
    far = replace(moved, confirmed_flush_lsn=2000 + LAG_BYTES + 1)
    found = answered(primary(far), standby(flush_lsn=far.confirmed_flush_lsn))
    assert (found.after, found.reason, found.action) == (
        CopyState.LAGGING,
        Reason.BEHIND,
        Advance("kept", "shop", 2500),
    )
    assert found.safe


def test_4_a_missing_copy_is_reserved_under_a_temporary_name() -> None:
    found = answered(here=EMPTY, known=StandbyRecord())
    assert found.after is CopyState.MISSING
    assert found.action == Reserve(
        temporary_name("kept", STANDBY.clock), "shop", "pgoutput", 1000, 2000, False, None
    )
    written = remember(StandbyRecord(), PRIMARY, EMPTY, [found])
    assert written.of("kept").temporary_name == temporary_name("kept", STANDBY.clock)
    # The reservation failed: it is not there at the next poll, and is begun anew.
    again = answered(here=replace(EMPTY, clock=9600), known=written)
    assert again.action != found.action
    assert isinstance(again.action, Reserve)


def test_16_two_phase_goes_with_the_reservation() -> None:
    slot = replace(SLOT, two_phase=True, two_phase_at=1100)
    action = answered(primary(slot), EMPTY, StandbyRecord()).action
    assert isinstance(action, Reserve)
    assert (action.two_phase, action.two_phase_at) == (True, 1100)


def test_16_two_phase_that_begins_nowhere_goes_with_the_reservation_too() -> None:
    action = answered(
        primary(replace(SLOT, two_phase=True, two_phase_at=0)), EMPTY, StandbyRecord()
    ).action
    assert isinstance(action, Reserve)
    assert (action.two_phase, action.two_phase_at) == (True, 0)


def test_16_where_two_phase_began_is_read_from_what_shows_it() -> None:
    assert two_phase_at({"two_phase": True, "two_phase_at": "0/44C"}) == 0x44C
    assert two_phase_at({"two_phase": True, "two_phase_at": None}) == 0
    assert two_phase_at({"two_phase": True}) is None
    assert two_phase_at({"two_phase": False, "two_phase_at": None}) is None
    assert two_phase_at({}) is None


def test_temporary_names_fit_and_are_never_the_same() -> None:
    names = {
        temporary_name(name, 1_800_000_000_000_000) for name in ("a" * 63, "a" * 62 + "b", "a")
    }
    assert len(names) == 3
    assert all(len(name) <= 63 for name in names)


def test_18_an_unproven_copy_is_renamed_only_when_it_is_proven() -> None:
    copy = replace(COPY, name=TEMPORARY)
    found = answered(here=standby(copy), known=record(UNPROVEN))
    assert (found.after, found.action) == (CopyState.PROVING, Rename(TEMPORARY, "kept", "shop"))
    assert not found.safe
    found = answered(
        here=standby(replace(copy, snapshot_present=False, snapshot_complete=False)),
        known=record(UNPROVEN),
    )
    assert (found.after, found.reason) == (CopyState.PROVING, Reason.NO_SNAPSHOT)
    found = answered(primary(catalog_xmin=None), standby(copy), record(UNPROVEN))
    assert (found.after, found.reason) == (CopyState.RESERVING, Reason.NO_CATALOG_XMIN)


def test_32_a_rename_that_was_cut_is_finished() -> None:
    copy = replace(COPY, name=TEMPORARY)
    begun = answered(here=standby(copy), known=record(UNPROVEN))
    written = remember(record(UNPROVEN), PRIMARY, standby(copy), [begun])
    assert written.of("kept").renaming
    both = standby(copy, COPY)
    found = answered(here=both, known=written)
    assert (found.reason, found.action) == (Reason.RENAME_CUT, Drop(TEMPORARY, "shop"))
    after = remember(written, PRIMARY, both, [found])
    assert answered(known=after).after is CopyState.READY
    assert remember(after, PRIMARY, STANDBY, [answered(known=after)]).of("kept").created


def test_21_a_name_that_somebody_took_during_a_rename_is_not_ours() -> None:
    copy = replace(COPY, name=TEMPORARY)
    known = record(replace(UNPROVEN, renaming=True))
    both = standby(copy, replace(COPY, incarnation_id=None, active_pid=5))
    found = answered(here=both, known=known)
    assert (found.after, found.action) == (CopyState.CONFLICT, Drop(TEMPORARY, "shop"))
    after = remember(known, PRIMARY, both, [found])
    alone = standby(replace(COPY, incarnation_id=None, active_pid=5))
    found = answered(here=alone, known=after)
    assert (found.after, found.action) == (CopyState.CONFLICT, Nothing())


@pytest.mark.parametrize("incarnation_id", [None, TEMPORARY + "_of_somebody"])
def test_21_a_slot_of_a_copys_name_that_we_did_not_make_is_not_ours(
    incarnation_id: str | None,
) -> None:
    here = standby(replace(COPY, incarnation_id=incarnation_id, active_pid=5))
    found = answered(here=here)
    assert (found.after, found.reason, found.action) == (
        CopyState.CONFLICT,
        Reason.NAME_TAKEN,
        Nothing(),
    )
    after = remember(record(), PRIMARY, here, [found])
    assert not after.of("kept").created
    # Nor is it dropped once the primary has no such slot, or called ready when the primary is down.
    assert resolved(primary(None), here, after, ALL) == []
    assert not answered(None, here).safe


def test_2_an_orphan_is_dropped_after_some_polls_of_the_real_primary() -> None:
    there, known = primary(None), record()
    for _ in range(GONE_POLLS - 1):
        found = answered(there, known=known)
        assert (found.after, found.reason, found.action) == (CopyState.ORPHAN, Reason.GONE, Wait())
        known = remember(known, there, STANDBY, [found])
    assert answered(there, known=known).action == Drop("kept", "shop")
    # Not if it is not known that this is the primary: then the count begins anew.
    doubtful = standby(upstream=None)
    found = answered(there, doubtful, known)
    assert found.action == Wait()
    assert remember(known, there, doubtful, [found]).of("kept").polls_gone == 0


def test_2_a_slot_that_is_not_to_be_kept_any_more_goes() -> None:
    found = answered(wanted=Selection(names=frozenset({"other"})))
    assert (found.after, found.reason, found.action) == (
        CopyState.ORPHAN,
        Reason.DESELECTED,
        Drop("kept", "shop"),
    )


@pytest.mark.parametrize("version", [150018, 180000])
def test_31_a_slot_from_a_backup_is_named_and_left_alone(version: int) -> None:
    old = replace(COPY, restart_lsn=500, confirmed_flush_lsn=900, catalog_xmin=600)
    found = answered(here=standby(old, version=version), known=StandbyRecord())
    assert (found.after, found.action) == (CopyState.STALE_BACKUP, Nothing())
    assert "pg_drop_replication_slot('kept')" in found.repair
    # One that the primary does not have.
    stray = replace(old, name="stray")
    found = only(
        resolved(PRIMARY, standby(COPY, stray), record(), Selection(frozenset({"kept"}))), "stray"
    )
    assert found.after is CopyState.STALE_BACKUP


#: A copy that a controller with another record has made.
THEIRS = replace(COPY, incarnation_id=temporary_name("kept", 5))


def taken_over(here: ObservedStandby, before: StandbyRecord) -> CopyRecord:
    """What is remembered once it was found to be kept elsewhere."""
    (found,) = resolved(PRIMARY, here, before, ALL)
    assert (found.after, found.reason) == (CopyState.KEPT_ELSEWHERE, Reason.OTHER_CONTROLLER)
    assert found.undecided
    assert "drop" not in found.repair
    return remember(before, PRIMARY, here, [found]).of("kept")


@pytest.mark.parametrize("version", [150018, 180000])
def test_43_another_controllers_copy_is_taken_over_as_one_just_reserved(version: int) -> None:
    here = standby(THEIRS, version=version)
    known = taken_over(here, StandbyRecord())
    assert known == CopyRecord(
        "kept", created=True, incarnation_id=THEIRS.incarnation_id, state=CopyState.KEPT_ELSEWHERE
    )
    found = answered(here=here, known=record(known))
    assert (found.after, found.reason) == (CopyState.SUSPECT, Reason.NOT_HEARD)
    # One that was made anew since we looked: where its client was is true of it, too, and nothing else.
    known = taken_over(here, record())
    assert (known.confirmed, known.decoded_at, known.proven_in) == (KNOWN.confirmed, None, None)
    # With the primary silent nobody knows either.
    found = answered(None, here, record())
    assert (found.after, found.undecided) == (CopyState.KEPT_ELSEWHERE, True)


def test_43_another_controllers_unproven_copy_is_taken_over() -> None:
    theirs = replace(THEIRS, name=THEIRS.incarnation_id or "")
    known = taken_over(standby(theirs), StandbyRecord())
    assert (known.temporary_name, known.created) == (theirs.name, False)
    # After a rename that was cut off the copy has both names.
    both = standby(THEIRS, theirs)
    known = taken_over(both, StandbyRecord())
    assert (known.temporary_name, known.created) == (theirs.name, True)
    assert answered(here=both, known=record(known)).action == Drop(theirs.name, "shop")


def test_43_a_copy_that_is_not_to_be_kept_here_is_told_and_left_alone() -> None:
    stray = replace(THEIRS, name="stray", incarnation_id=temporary_name("stray", 5))
    only_kept = Selection(frozenset({"kept"}))
    found = resolved(PRIMARY, standby(COPY, stray), record(), only_kept)
    told = only(found, "stray")
    assert (told.after, told.counts, told.repair) == (CopyState.KEPT_ELSEWHERE, False, "")
    assert not remember(record(), PRIMARY, standby(COPY, stray), found).of("stray").created
    # Named here, with no such slot on the primary: that is what counts.
    found = resolved(PRIMARY, standby(COPY, stray), record(), Selection(frozenset({"stray"})))
    assert only(found, "stray").reason is Reason.NO_SUCH_SLOT


@pytest.mark.parametrize("version", [150018, 180000])
@pytest.mark.parametrize(
    "useless", [{"wal_present": False}, {"invalidation": "rows_removed"}], ids=str
)
def test_43_a_marked_copy_from_a_backup_that_is_of_no_use_is_stale(
    version: int, useless: dict[str, Any]
) -> None:
    old = replace(THEIRS, restart_lsn=500, confirmed_flush_lsn=900, catalog_xmin=600, **useless)
    found = answered(here=standby(old, version=version), known=StandbyRecord())
    assert (found.after, found.action) == (CopyState.STALE_BACKUP, Nothing())
    assert not found.undecided


def test_43_a_marked_copy_from_a_backup_is_not_ready_before_it_is_proven() -> None:
    old = replace(THEIRS, restart_lsn=500, confirmed_flush_lsn=900, catalog_xmin=600)
    known = record(taken_over(standby(old), StandbyRecord()))
    for _ in range(3):
        found = answered(here=standby(old), known=known)
        assert not found.safe
        known = remember(known, PRIMARY, standby(old), [found])


def test_21_a_foreign_slot_is_never_touched() -> None:
    used = standby(replace(COPY, active_pid=5), version=180000)
    found = answered(here=used, known=StandbyRecord())
    assert (found.after, found.reason, found.action) == (
        CopyState.CONFLICT,
        Reason.NAME_TAKEN,
        Nothing(),
    )


def test_20_an_old_primarys_slot_is_dropped_when_our_record_names_it() -> None:
    known = remember_primary(record(), PRIMARY, ["kept"])
    found = answered(known=known)
    assert (found.after, found.action) == (CopyState.LEFTOVER, Drop("kept", "shop", any_slot=True))
    assert answered(here=standby(replace(COPY, active_pid=5)), known=known).action == Wait()
    after = remember(known, PRIMARY, EMPTY, [answered(here=EMPTY, known=known)])
    assert not after.of("kept").seen_on_primary


def test_23_a_slot_that_is_lost_on_the_primary_is_told() -> None:
    found = answered(primary(replace(SLOT, wal_status="lost")))
    assert (found.after, found.reason, found.action) == (
        CopyState.INVALID,
        Reason.LOST_ON_PRIMARY,
        Wait(),
    )


def test_a_slot_that_is_being_made_is_awaited() -> None:
    found = answered(primary(replace(SLOT, confirmed_flush_lsn=None)), EMPTY, StandbyRecord())
    assert (found.after, found.reason) == (CopyState.BLOCKED, Reason.SLOT_BEING_CREATED)


def test_24_temporary_slots_are_ignored() -> None:
    assert resolved(primary(replace(SLOT, temporary=True)), EMPTY, StandbyRecord(), ALL) == []


def test_41_a_copy_gives_way_when_postgresql_keeps_its_slot() -> None:
    slot = replace(SLOT, failover=True)
    here = replace(standby(COPY), native_sync=True, version=170000)
    found = answered(primary(slot), here, record(KNOWN))
    assert (found.reason, found.action) == (Reason.GIVES_WAY, Drop(COPY.name, "shop"))
    assert not found.safe
    # In use, or with this not proven to be its primary, it stays; so it does where PostgreSQL keeps none.
    used = replace(here, slots=(replace(COPY, active_pid=7),))
    assert answered(primary(slot), used, record(KNOWN)).action == Wait()
    assert answered(primary(SLOT), here, record(KNOWN)).after is CopyState.READY


@pytest.mark.parametrize("value", [True, False])
def test_41_a_copy_is_ready_with_the_failover_of_its_slot(value: bool) -> None:
    slot, copy = replace(SLOT, failover=value), replace(COPY, failover=not value)
    here = standby(copy, native_sync=False)
    found = answered(primary(slot), here, record(KNOWN))
    assert (found.after, found.reason) == (CopyState.SUSPECT, Reason.FAILOVER_DIFFERS)
    assert found.action == SetFailover(COPY.name, "shop", value)
    used = standby(replace(copy, active_pid=7), native_sync=False)
    assert answered(primary(slot), used, record(KNOWN)).action == Wait()
    same = standby(replace(copy, failover=value), native_sync=False)
    assert answered(primary(slot), same, record(KNOWN)).after is CopyState.READY


def test_30_a_native_copy_is_judged_and_never_touched() -> None:
    slot = replace(SLOT, failover=True)
    here = replace(EMPTY, native_sync=True, version=170000)
    assert answered(primary(slot), here, StandbyRecord()).reason is Reason.NATIVE_PENDING
    native = replace(COPY, synced=True)
    known = record(replace(KNOWN, created=False))
    assert answered(primary(slot), standby(native), known).after is CopyState.READY
    unfinished = replace(native, persistency="temporary")
    found = answered(primary(slot), standby(unfinished), known)
    assert (found.after, found.reason, found.action) == (
        CopyState.PROVING,
        Reason.NOT_PERSISTENT,
        Wait(),
    )
    broken = replace(native, invalidation="rows_removed")
    found = answered(primary(slot), standby(broken), known)
    assert (found.after, found.action) == (CopyState.INVALID, Wait())
    # A leftover of the same name that is not PostgreSQL's own stops only itself.
    assert answered(
        primary(slot), standby(version=170000, native_sync=True), StandbyRecord()
    ).after in {
        CopyState.CONFLICT,
        CopyState.STALE_BACKUP,
    }


def test_27_with_the_primary_down_the_last_proof_counts() -> None:
    found = answered(None, standby(walreceiver_status=None, walreceiver_start=None))
    assert (found.after, found.reason) == (CopyState.READY, Reason.PROVEN_BEFORE)
    assert found.evidence["age"] == 100
    for against in (
        standby(walreceiver_start=401),
        standby(conf_load_time=301),
        standby(timeline=2),
        standby(replace(COPY, invalidation="wal_removed")),
        EMPTY,
    ):
        found = answered(None, against)
        assert (found.after, found.reason) == (CopyState.SUSPECT, Reason.PRIMARY_UNREACHABLE)
    never = record(replace(KNOWN, proven_at=None, proven_in=None))
    assert answered(None, known=never).reason is Reason.NEVER_PROVEN


def test_a_standby_that_does_not_answer_is_told() -> None:
    found = answered(here=None)
    assert (found.after, found.reason) == (CopyState.BLOCKED, Reason.STANDBY_UNREACHABLE)
    assert remember(record(), PRIMARY, None, [found]) == record()


def test_32_a_promotion_removes_what_was_being_proven() -> None:
    copy = replace(COPY, name=TEMPORARY)
    promoted = replace(standby(copy), in_recovery=False)
    found = resolved(PRIMARY, promoted, record(UNPROVEN), ALL)
    assert only(found, TEMPORARY).action == Drop(TEMPORARY, "shop")
    assert only(found).reason is Reason.PROMOTED
    slots = (replace(SLOT, name=TEMPORARY), SLOT, replace(SLOT, name=TEMPORARY + "2", active_pid=9))
    assert [each.action for each in unproven(slots, StandbyRecord())] == [
        Drop(TEMPORARY, "shop"),
        Wait(),
    ]


def test_29_an_unproven_copy_of_somebody_else_is_left_alone() -> None:
    other = replace(COPY, name=TEMPORARY + "_other")
    found = only(resolved(PRIMARY, standby(COPY, other), record(), ALL), other.name)
    assert (found.after, found.action) == (CopyState.LEFTOVER, Nothing())


def test_22_one_stuck_slot_stops_no_other() -> None:
    stuck = replace(SLOT, name="stuck", confirmed_flush_lsn=9999)
    found = resolved(replace(PRIMARY, logical_slots=(stuck, SLOT)), STANDBY, record(), ALL)
    assert [(each.slot, each.after) for each in found] == [
        ("kept", CopyState.READY),
        ("stuck", CopyState.MISSING),
    ]


def test_slots_are_chosen_by_name_pattern_plugin_or_database() -> None:
    for wanted in (
        Selection(frozenset({"kept"})),
        Selection(patterns=("k*t",)),
        Selection(plugins=frozenset({"pgoutput"})),
        Selection(databases=frozenset({"shop"})),
        ALL,
    ):
        assert is_wanted(SLOT, wanted)
    assert not is_wanted(SLOT, Selection(frozenset({"other"}), ("K*",)))


def test_transactions_are_compared_round_the_end() -> None:
    assert precedes(2**32 - 5, 10)
    assert not precedes(10, 2**32 - 5)
    assert not precedes(7, 7)
    young = replace(COPY, catalog_xmin=5)
    known = replace(KNOWN, removed_before=2**32 - 10)
    there = primary(replace(SLOT, catalog_xmin=5), catalog_xmin=2**32 - 10)
    assert answered(there, standby(young), record(known)).after is CopyState.READY


@pytest.mark.parametrize(
    ("version", "plugin", "synced", "foreign", "ready"),
    [
        (130018, "pgoutput", False, False, True),
        (130018, "pgoutput", False, True, False),
        (140000, "pgoutput", False, True, True),
        (140000, "pglogical_output", False, False, True),
        (140000, "pglogical_output", False, True, False),
        (170005, "pgoutput", True, True, True),
        (170005, "pglogical_output", True, False, False),
    ],
)
def test_18_what_other_decoders_leave_out_counts_by_major_and_plugin(
    version: int, plugin: str, synced: bool, foreign: bool, ready: bool
) -> None:
    slot = replace(SLOT, plugin=plugin)
    copy = replace(COPY, plugin=plugin, synced=synced, foreign_snapshot_after=foreign)
    found = answered(primary(slot), standby(copy, version=version))
    assert (found.after is CopyState.READY) == ready
    assert found.reason is (Reason.PROVEN if ready else Reason.FOREIGN_SNAPSHOT)


def test_18_a_hasty_synchronization_is_believed_only_where_the_slot_was_passed() -> None:
    hasty = replace(COPY, synced=True, confirmed_flush_lsn=1999, catalog_xmin=701)
    known = record(replace(KNOWN, removed_before=701))
    found = answered(here=standby(hasty, version=170004), known=known)
    assert found.reason is Reason.XMIN_NOT_DECODED
    assert answered(here=standby(hasty, version=170005), known=known).after is CopyState.READY
    passed = replace(hasty, confirmed_flush_lsn=2000, catalog_xmin=700)
    assert answered(here=standby(passed, version=170004)).after is CopyState.READY
