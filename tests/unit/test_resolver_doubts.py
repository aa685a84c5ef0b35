"""The slot resolver in doubt: what it must not call ready, and must not drop, on a ground that does not bear it."""

from dataclasses import replace

import pytest

from slot_sync.resolver.observed import Copy, Record, Reserved, Selection
from slot_sync.resolver.record import remember, remember_primary
from slot_sync.resolver.resolver import resolve
from slot_sync.resolver.transitions import Drop, Nothing, Reason, Reserve, State, Wait
from tests.unit.test_resolver import (
    ALL,
    COPY,
    EMPTY,
    KNOWN,
    PRIMARY,
    SLOT,
    STANDBY,
    TEMPORARY,
    answered,
    only,
    primary,
    record,
    standby,
)
from tests.unit.test_slot_report import made


@pytest.mark.parametrize(
    "here",
    [
        standby(upstream=None),
        standby(timeline=2),
        standby(walreceiver_slot_name="other"),
        standby(walreceiver_status=None),
    ],
)
def test_2_a_copy_that_differs_is_dropped_for_the_real_primary_only(here) -> None:
    """Another server of this history may have another slot of that name: an old primary that came back alone, say."""
    there = primary(replace(SLOT, two_phase=True, two_phase_at=50))
    found = answered(there, here)
    assert (found.after, found.reason, found.action) == (
        State.INVALID,
        Reason.FIELDS_DIFFER,
        Wait(),
    )
    assert answered(there).action == Drop("kept", "shop")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (replace(COPY, invalidation="rows_removed"), Reason.INVALIDATED),
        (replace(COPY, wal_present=False), Reason.WAL_GONE),
    ],
)
def test_8_a_copy_that_is_broken_by_itself_is_dropped_whoever_the_primary_is(
    broken: Copy, reason: Reason
) -> None:
    found = answered(here=standby(broken, upstream=None))
    assert (found.reason, found.action) == (reason, Drop("kept", "shop"))


def test_19_a_candidate_that_streams_from_another_slot_than_configured_is_another_standby() -> None:
    """A DSN that leads to a neighbour: its copies are not those that the record names."""
    here = standby(configured_slot="near")
    found = answered(here=here)
    assert (found.after, found.reason, found.action) == (
        State.BLOCKED,
        Reason.OTHER_SLOT_NAME,
        Wait(),
    )
    assert "near" in found.repair
    # Nothing is dropped there, even if the slot is gone.
    gone, known = primary(None), record(replace(KNOWN, polls_gone=9))
    assert answered(gone, here, known).action == Wait()
    assert answered(here=standby(configured_slot="here")).after is State.READY


@pytest.mark.parametrize(
    "here", [replace(EMPTY, configured_slot="near"), replace(EMPTY, system_id=8)]
)
def test_19_another_server_at_the_candidate_s_dsn_teaches_nothing(here) -> None:
    """What is on the candidate itself stays ours, for when it is found again."""
    found = resolve(PRIMARY, here, record(), ALL)
    assert remember(record(), PRIMARY, here, found) == record()


@pytest.mark.parametrize("here", [standby(upstream=None), standby(timeline=2)])
def test_26_another_primary_s_positions_mean_nothing(here) -> None:
    """An old primary that lives on has a slot of that name, too, of a history that the standby is not in.

    There nothing that was deleted before 900 is needed from 1900 on. Here the copy, which stands at 2000 and was
    reserved with 700, may need what was deleted by 600, as long as no decoder has moved it.
    """
    known = record(
        replace(KNOWN, decoded_at=None, slot_was=None, proven_in=None, reserved=Reserved(1000, 700))
    )
    there = primary(replace(SLOT, confirmed_flush_lsn=1900, catalog_xmin=900))
    after = remember(known, there, here, resolve(there, here, known, ALL)).of("kept")
    assert (after.decoded_at, after.slot_was, after.passed) == (None, None, None)
    # The primary itself teaches it.
    after = remember(known, there, STANDBY, resolve(there, STANDBY, known, ALL)).of("kept")
    assert after.decoded_at == 2000


def test_26_a_copy_that_went_back_is_seen_to_whoever_the_primary_is() -> None:
    back = standby(replace(COPY, confirmed_flush_lsn=900), upstream=None)
    after = remember(record(), PRIMARY, back, resolve(PRIMARY, back, record(), ALL)).of("kept")
    assert (after.decoded_at, after.proven_in) == (None, None)


@pytest.mark.parametrize("changes", [{"upstream": None}, {"timeline": 2}])
def test_26_nothing_is_reserved_from_another_primary(changes) -> None:
    """Its positions may be in the middle of a record here: no decoder would ever get on from there."""
    found = answered(here=replace(EMPTY, **changes), known=Record())
    assert (found.after, found.action) == (State.MISSING, Wait())
    assert found.reason in {Reason.UPSTREAM_UNKNOWN, Reason.OTHER_TIMELINE}
    # Nobody has told the primary of anything yet, since there is no copy: that is no reason to wait.
    first = primary(catalog_xmin=None, marker=None)
    assert isinstance(answered(first, EMPTY, Record()).action, Reserve)


def test_10_a_primary_that_does_not_show_all_of_a_slot_is_told_so() -> None:
    """Without the extension there `two_phase_at` is not known, and no copy is wrong for that."""
    slot = replace(SLOT, two_phase=True, two_phase_at=None)
    copy = replace(COPY, two_phase=True, two_phase_at=50)
    found = answered(replace(primary(slot, marker=None), has_extension=False), standby(copy))
    assert (found.after, found.reason, found.action) == (
        State.BLOCKED,
        Reason.NO_EXTENSION,
        Wait(),
    )
    assert "on the primary" in found.repair


def test_27_a_copy_that_was_moved_while_the_primary_is_down_is_not_ready() -> None:
    """Somebody read from it: a client that goes on from there would never get what it passed."""
    known = remember(record(), PRIMARY, STANDBY, [answered()])
    down = {"walreceiver_status": None, "walreceiver_start": None}
    assert answered(None, standby(**down), known).after is State.READY
    moved = replace(COPY, confirmed_flush_lsn=2400)
    found = answered(None, standby(moved, **down), known)
    assert (found.after, found.reason) == (State.SUSPECT, Reason.PRIMARY_UNREACHABLE)
    assert "ahead" in found.why
    # PostgreSQL's own copy follows the slot without our knowing, and nobody can read from it.
    native = replace(moved, synced=True)
    assert answered(None, standby(native, **down), known).after is State.READY


def test_27_wal_from_the_archive_may_have_removed_what_the_connection_held() -> None:
    known = remember(record(), PRIMARY, STANDBY, [answered()])
    down = {"walreceiver_status": None, "walreceiver_start": None}
    found = answered(None, standby(replays_archive=True, **down), known)
    assert (found.after, found.reason) == (State.SUSPECT, Reason.PRIMARY_UNREACHABLE)
    assert "archive" in found.why


@pytest.mark.parametrize("active", [None, 5])
def test_20_a_candidate_with_an_old_primary_s_own_slot_is_not_ready(active: int | None) -> None:
    """What is to be kept there is not; it is only known why."""
    here = standby(replace(COPY, active_pid=active))
    known = remember_primary(record(), PRIMARY, ["kept"])
    found = answered(here=here, known=known)
    assert found.after is State.LEFTOVER
    assert made(found).ready is False
    assert made(found).rows()[0]["expected"] is True


def test_20_a_leftover_that_is_not_to_be_kept_says_nothing_of_the_others() -> None:
    stray = replace(COPY, name="stray")
    known = remember_primary(record(), PRIMARY, [])
    known = replace(known, copies={**known.copies, "stray": replace(KNOWN, name="stray")})
    for wanted in (ALL, Selection(frozenset({"kept"}))):
        slots = (SLOT,) if wanted == ALL else (SLOT, replace(SLOT, name="stray"))
        there = replace(PRIMARY, logical_slots=slots)
        memory = replace(
            record(),
            copies={
                "kept": KNOWN,
                "stray": replace(KNOWN, name="stray", made=False, seen_on_primary=True),
            },
        )
        found = resolve(there, standby(COPY, stray), memory, wanted)
        assert only(found, "stray").after is State.LEFTOVER
        assert only(found).after is State.READY
        assert made(*found).ready is True


def test_32_an_unproven_copy_on_the_primary_is_told_and_removed() -> None:
    """The primary was promoted while it was proven; it pins WAL there, and nobody else would remove it."""
    leftover = replace(SLOT, name=TEMPORARY)
    there = replace(PRIMARY, logical_slots=(leftover, SLOT))
    found = only(resolve(there, STANDBY, record(), ALL), TEMPORARY)
    assert (found.after, found.reason) == (State.LEFTOVER, Reason.UNPROVEN_NAME)
    assert found.action == Drop(TEMPORARY, "shop", on_primary=True)
    used = replace(PRIMARY, logical_slots=(replace(leftover, active_pid=7), SLOT))
    assert only(resolve(used, STANDBY, record(), ALL), TEMPORARY).action == Wait()
    # A standby that is given as the primary proves such copies itself.
    other = replace(there, in_recovery=True)
    assert not [each for each in resolve(other, STANDBY, record(), ALL) if each.slot == TEMPORARY]
    # It says nothing of the candidate.
    assert made(*resolve(there, STANDBY, record(), ALL)).ready is True


def test_nothing_is_known_of_it_all_is_nothing_to_do() -> None:
    assert resolve(None, STANDBY, Record(), ALL) == []
    assert answered(known=Record()).action == Nothing()
