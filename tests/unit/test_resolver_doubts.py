"""The slot resolver in doubt: what it must not call ready, and must not drop, on a ground that does not bear it."""

from dataclasses import replace

import pytest

from slot_sync.resolver.observed import Copy, Record, Selection
from slot_sync.resolver.record import remember, remember_primary
from slot_sync.resolver.resolver import resolve
from slot_sync.resolver.transitions import Drop, Nothing, Reason, State, Wait
from tests.unit.test_resolver import (
    ALL,
    COPY,
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
    # A snapshot that came back, with the folder of its slots.
    found = answered(None, standby(replace(COPY, confirmed_flush_lsn=9000), **down), known)
    assert found.after is State.SUSPECT


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
