"""The slot resolver in doubt: what it must not call ready, and must not drop, on a ground that does not bear it."""

from dataclasses import replace

import pytest

from slot_sync.resolver.observed import (
    Confirmed,
    ReadinessTerms,
    Reserved,
    Selection,
    SlotCopy,
    StandbyRecord,
)
from slot_sync.resolver.record import remember, remember_primary
from slot_sync.resolver.transitions import (
    Advance,
    CopyState,
    Drop,
    Nothing,
    Reason,
    Reserve,
    Transition,
    Wait,
)
from tests.unit.test_resolver import (
    ALL,
    COPY,
    EMPTY,
    KEY,
    KNOWN,
    PRIMARY,
    SLOT,
    STANDBY,
    TEMPORARY,
    answered,
    only,
    primary,
    record,
    resolved,
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
        CopyState.INVALID,
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
    broken: SlotCopy, reason: Reason
) -> None:
    found = answered(here=standby(broken, upstream=None))
    assert (found.reason, found.action) == (reason, Drop("kept", "shop"))


def test_19_a_candidate_that_streams_from_another_slot_than_configured_is_another_standby() -> None:
    """A DSN that leads to a neighbor: its copies are not those that the record names."""
    here = standby(configured_slot="near")
    found = answered(here=here)
    assert (found.after, found.reason, found.action) == (
        CopyState.BLOCKED,
        Reason.OTHER_SLOT_NAME,
        Wait(),
    )
    assert "near" in found.repair
    # Nothing is dropped there, even if the slot is gone.
    gone, known = primary(None), record(replace(KNOWN, polls_gone=9))
    assert answered(gone, here, known).action == Wait()
    assert answered(here=standby(configured_slot="here")).after is CopyState.READY


@pytest.mark.parametrize(
    "here", [replace(EMPTY, configured_slot="near"), replace(EMPTY, system_id=8)]
)
def test_19_another_server_at_the_candidate_s_dsn_teaches_nothing(here) -> None:
    """What is on the candidate itself stays ours, for when it is found again."""
    found = resolved(PRIMARY, here, record(), ALL)
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
    after = remember(known, there, here, resolved(there, here, known, ALL)).of("kept")
    assert (after.decoded_at, after.slot_was, after.passed) == (None, None, None)
    # The primary itself teaches it.
    after = remember(known, there, STANDBY, resolved(there, STANDBY, known, ALL)).of("kept")
    assert after.decoded_at == 2000


def test_26_a_copy_that_went_back_is_seen_to_whoever_the_primary_is() -> None:
    back = standby(replace(COPY, confirmed_flush_lsn=900), upstream=None)
    after = remember(record(), PRIMARY, back, resolved(PRIMARY, back, record(), ALL)).of("kept")
    assert (after.decoded_at, after.proven_in) == (None, None)


@pytest.mark.parametrize("changes", [{"upstream": None}, {"timeline": 2}])
def test_26_nothing_is_reserved_from_another_primary(changes) -> None:
    """Its positions may be in the middle of a record here: no decoder would ever get on from there."""
    found = answered(here=replace(EMPTY, **changes), known=StandbyRecord())
    assert (found.after, found.action) == (CopyState.MISSING, Wait())
    assert found.reason in {Reason.UPSTREAM_UNKNOWN, Reason.OTHER_TIMELINE}
    # Nobody has told the primary of anything yet, since there is no copy: that is no reason to wait.
    first = primary(catalog_xmin=None, incarnation_id=None)
    assert isinstance(answered(first, EMPTY, StandbyRecord()).action, Reserve)


def test_10_a_primary_that_does_not_show_all_of_a_slot_is_told_so() -> None:
    """Without the extension there `two_phase_at` is not known, and no copy is wrong for that."""
    slot = replace(SLOT, two_phase=True, two_phase_at=None)
    copy = replace(COPY, two_phase=True, two_phase_at=50)
    found = answered(
        replace(primary(slot, incarnation_id=None), has_extension=False), standby(copy)
    )
    assert (found.after, found.reason, found.action) == (
        CopyState.BLOCKED,
        Reason.NO_EXTENSION,
        Wait(),
    )
    assert "on the primary" in found.repair


def test_27_a_copy_that_was_moved_while_the_primary_is_down_is_not_ready() -> None:
    """Somebody read from it: a client that goes on from there would never get what it passed."""
    known = remember(record(), PRIMARY, STANDBY, [answered()])
    down = {"walreceiver_status": None, "walreceiver_start": None}
    assert answered(None, standby(**down), known).after is CopyState.READY
    moved = replace(COPY, confirmed_flush_lsn=2400)
    found = answered(None, standby(moved, **down), known)
    assert (found.after, found.reason) == (CopyState.SUSPECT, Reason.PRIMARY_UNREACHABLE)
    assert "ahead" in found.why
    # PostgreSQL's own copy follows the slot without our knowing, and nobody can read from it.
    native = replace(moved, synced=True)
    assert answered(None, standby(native, **down), known).after is CopyState.READY


def test_27_wal_from_the_archive_may_have_removed_what_the_connection_held() -> None:
    known = remember(record(), PRIMARY, STANDBY, [answered()])
    down = {"walreceiver_status": None, "walreceiver_start": None}
    found = answered(None, standby(replays_archive=True, **down), known)
    assert (found.after, found.reason) == (CopyState.SUSPECT, Reason.PRIMARY_UNREACHABLE)
    assert "archive" in found.why


@pytest.mark.parametrize("active", [None, 5])
def test_20_a_candidate_with_an_old_primary_s_own_slot_is_not_ready(active: int | None) -> None:
    """What is to be kept there is not; it is only known why."""
    here = standby(replace(COPY, active_pid=active))
    known = remember_primary(record(), PRIMARY, ["kept"])
    found = answered(here=here, known=known)
    assert found.after is CopyState.LEFTOVER
    assert made(found).ready is False
    assert made(found).copies()[0].expected is True


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
                "stray": replace(KNOWN, name="stray", created=False, seen_on_primary=True),
            },
        )
        found = resolved(there, standby(COPY, stray), memory, wanted)
        assert only(found, "stray").after is CopyState.LEFTOVER
        assert only(found).after is CopyState.READY
        assert made(*found).ready is True


def test_32_an_unproven_copy_on_the_primary_is_told_and_removed() -> None:
    """The primary was promoted while it was proven; it pins WAL there, and nobody else would remove it."""
    leftover = replace(SLOT, name=TEMPORARY)
    there = replace(PRIMARY, logical_slots=(leftover, SLOT))
    found = only(resolved(there, STANDBY, record(), ALL), TEMPORARY)
    assert (found.after, found.reason) == (CopyState.LEFTOVER, Reason.UNPROVEN_NAME)
    assert found.action == Drop(TEMPORARY, "shop", on_primary=True)
    used = replace(PRIMARY, logical_slots=(replace(leftover, active_pid=7), SLOT))
    assert only(resolved(used, STANDBY, record(), ALL), TEMPORARY).action == Wait()
    # Also where the record knows nothing of it: another controller's, or one of the other server.
    assert only(resolved(there, STANDBY, StandbyRecord(), ALL), TEMPORARY).action == found.action
    # A standby that is given as the primary proves such copies itself.
    other = replace(there, in_recovery=True)
    assert not [each for each in resolved(other, STANDBY, record(), ALL) if each.slot == TEMPORARY]
    # It says nothing of the candidate.
    assert made(*resolved(there, STANDBY, record(), ALL)).ready is True


def test_nothing_is_known_of_it_all_is_nothing_to_do() -> None:
    assert resolved(None, STANDBY, StandbyRecord(), ALL) == []
    assert answered(known=StandbyRecord()).action == Nothing()


NAMED = Selection(frozenset({"kept", "absent"}))


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (PRIMARY, STANDBY),
        (None, STANDBY),
        (PRIMARY, None),
        (replace(PRIMARY, logical_slots=(SLOT, replace(SLOT, name="absent", temporary=True))), STANDBY),
    ],
)  # fmt: skip
def test_44_a_literal_name_without_a_slot_is_not_ready(there, here) -> None:
    """A name that is misspelt, or a slot that was dropped: its client would find nothing after a promotion."""
    found = only(resolved(there, here, record(), NAMED), "absent")
    assert not found.safe
    assert found.counts
    if there is not None and here is not None:
        assert (found.after, found.reason) == (CopyState.MISSING, Reason.NO_SUCH_SLOT)
        assert "names" in found.repair


def test_44_a_literal_name_that_is_gone_from_the_primary_is_not_ready() -> None:
    named = Selection(frozenset({"kept"}))
    found = answered(primary(None), wanted=named)
    assert (found.after, found.reason, found.counts) == (CopyState.ORPHAN, Reason.GONE, True)
    # Chosen by a pattern, it is one slot fewer to keep.
    assert not answered(primary(None), wanted=Selection(patterns=("k*",))).counts


def test_44_a_foreign_slot_of_a_name_without_a_slot_is_told_once() -> None:
    stray = replace(COPY, name="absent")
    found = resolved(PRIMARY, standby(COPY, stray), record(), NAMED)
    assert [each.after for each in found if each.slot == "absent"] == [CopyState.STALE_BACKUP]


@pytest.mark.parametrize(
    ("there", "here"),
    [(replace(PRIMARY, in_recovery=True, logical_slots=()), STANDBY), (primary(None), replace(EMPTY, system_id=8))],
)  # fmt: skip
def test_44_a_wrong_server_without_slots_is_not_ready(there, here) -> None:
    """No slot is expected, since the server that was asked has none: that says nothing of the primary's."""
    found = resolved(there, here, StandbyRecord(), ALL)
    assert made(*found).ready is False


def test_39_a_client_ahead_of_the_standby_s_disk_is_not_ready() -> None:
    """What the client has confirmed and the standby not flushed, a promotion would lose; the copy itself is whole."""
    ahead = primary(replace(SLOT, confirmed_flush_lsn=2501))
    found = answered(ahead)
    assert (found.after, found.reason) == (CopyState.CLIENT_AHEAD, Reason.CLIENT_AHEAD)
    assert made(found).ready is False
    assert "synchronized_standby_slots" in found.repair
    assert found.evidence["flush_lsn"] == 2500
    # The copy follows as far as it can, and nothing that was proven of it is forgotten.
    assert isinstance(found.action, Advance)
    known = remember(record(), ahead, STANDBY, [found])
    assert known.of("kept").proven_in == KEY
    # What is flushed is replayed at a promotion: a standby that replays late, or whose replay is paused, has it.
    assert answered(ahead, standby(flush_lsn=2501)).after is CopyState.READY


def test_39_a_client_ahead_stays_so_when_the_primary_does_not_answer() -> None:
    ahead = primary(replace(SLOT, confirmed_flush_lsn=2501))
    known = remember(record(), ahead, STANDBY, resolved(ahead, STANDBY, record(), ALL))
    down = {"walreceiver_status": None, "walreceiver_start": None}
    found = answered(None, standby(**down), known)
    assert (found.after, found.reason) == (CopyState.CLIENT_AHEAD, Reason.CLIENT_AHEAD)
    assert made(found, primary=None).ready is False
    # It had received the rest before the connection broke.
    assert answered(None, standby(flush_lsn=2501, **down), known).after is CopyState.READY


def test_39_a_crash_of_the_primary_does_not_take_a_client_back() -> None:
    """The slot's confirmed_flush_lsn may be older after it; the client has what it has."""
    ahead = primary(replace(SLOT, confirmed_flush_lsn=2501))
    known = remember(record(), ahead, STANDBY, resolved(ahead, STANDBY, record(), ALL))
    assert answered(known=known).after is CopyState.CLIENT_AHEAD
    again = remember(known, PRIMARY, STANDBY, resolved(PRIMARY, STANDBY, known, ALL))
    assert answered(known=again).after is CopyState.CLIENT_AHEAD
    # On another timeline positions begin anew.
    there, here = replace(PRIMARY, timeline=2), standby(timeline=2)
    later = remember(again, there, here, resolved(there, here, again, ALL))
    assert later.of("kept").confirmed == Confirmed(2, 2000)


def test_44_a_proof_counts_for_a_limited_time_without_the_primary() -> None:
    down = standby(walreceiver_status=None, walreceiver_start=None)

    def after(age: int, limit: int | None) -> Transition:
        here = replace(down, clock=9400 + age)
        return only(resolved(None, here, record(), ALL, ReadinessTerms(max_age=limit)))

    for age, limit in ((100, 100), (10**9, None)):
        found = after(age, limit)
        assert (found.after, found.reason) == (CopyState.READY, Reason.PROVEN_BEFORE)
        assert made(found, primary=None).ready is True
        unknown = " ".join(made(found, primary=None).not_known)
        assert "created on the primary" in unknown
        assert "clients have confirmed" in unknown
    for age in (101, -1):
        found = after(age, 100)
        assert (found.safe, found.reason) == (False, Reason.PROVEN_LONG_AGO)
        assert made(found, primary=None).ready is None
    # What is known to be wrong is a no at any age.
    lost = replace(down, slots=(replace(COPY, wal_present=False),), clock=10**9)
    found = only(resolved(None, lost, record(), ALL, ReadinessTerms(max_age=100)))
    assert made(found, primary=None).ready is False


@pytest.mark.parametrize(
    ("idle_for", "state", "action"),
    [
        (20, CopyState.READY, Nothing()),
        (30, CopyState.READY, Advance("kept", "shop", 2000)),
        (100, CopyState.SUSPECT, Advance("kept", "shop", 2000)),
    ],
)
def test_40_an_idle_copy_is_used_before_a_checkpoint_invalidates_it(
    idle_for, state, action
) -> None:
    idle = replace(COPY, inactive_since=STANDBY.clock - idle_for)
    here = standby(idle, idle_timeout=100, version=180000)
    found = answered(here=here)
    assert (found.after, found.action) == (state, action)
    assert found.safe is (found.reason is not Reason.IDLE)
    # Without the primary nobody uses it.
    down = replace(here, walreceiver_status=None, walreceiver_start=None)
    assert answered(None, down).safe is (idle_for < 100)
    # Nothing invalidates it where there is no timeout, nor PostgreSQL's own copy anywhere.
    assert answered(here=replace(here, idle_timeout=0)).after is CopyState.READY
    assert (
        answered(here=standby(replace(idle, synced=True), idle_timeout=100)).after
        is CopyState.READY
    )


def test_40_a_copy_that_has_outgrown_the_standby_s_limit_is_not_ready() -> None:
    """max_slot_wal_keep_size is the standby's own: the checkpoint at the end of a promotion removes the copy's WAL."""
    # From segment 10 to 25, and one that the promotion itself begins.
    for limit, reason in ((None, Reason.PROVEN), (16, Reason.PROVEN), (15, Reason.OUTGROWN)):
        here = standby(slot_wal_segments=limit, segment_bytes=100)
        assert answered(here=here).reason is reason
        down = replace(here, walreceiver_status=None, walreceiver_start=None)
        assert answered(None, down).safe is (reason is Reason.PROVEN)
