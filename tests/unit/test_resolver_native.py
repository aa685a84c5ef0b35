"""Copies of PostgreSQL's own where the extension is not: a verdict by SQL alone, and nothing stronger."""

from dataclasses import replace
from typing import Any

import pytest

from slot_sync.resolver.observed import ObservedStandby, ReadinessTerms, StandbyRecord
from slot_sync.resolver.record import remember
from slot_sync.resolver.transitions import CopyState, Nothing, Reason, Transition
from tests.unit.test_resolver import (
    ALL,
    COPY,
    KNOWN,
    PRIMARY,
    SLOT,
    STANDBY,
    only,
    record,
    resolved,
)
from tests.unit.test_slot_report import made

NATIVE_SLOT = replace(SLOT, failover=True)
#: What the view shows: no incarnation ids, no snapshots, no WAL.
THERE = replace(
    PRIMARY,
    wal_lsn=STANDBY.replay_lsn,
    has_extension=False,
    logical_slots=(NATIVE_SLOT,),
    physical_slots=(replace(PRIMARY.physical_slots[0], incarnation_id=None),),
)
NATIVE_COPY = replace(COPY, synced=True, snapshot_present=None, wal_present=None)
ACCEPTED = ReadinessTerms(max_age=1000, accept_native=True)


def here(copy: Any = NATIVE_COPY, **changes: Any) -> ObservedStandby:
    slots = () if copy is None else (copy,)
    values = {"version": 170006, "has_extension": False, "native_sync": True, "slots": slots}
    return replace(STANDBY, **{**values, **changes})


def judged(
    there: Any = THERE, standby: Any = None, known: Any = None, terms: ReadinessTerms = ACCEPTED
) -> Transition:
    return only(resolved(there, standby or here(), known or StandbyRecord(), ALL, terms))


def test_45_a_synchronized_copy_is_synced_and_what_is_not_shown_is_said() -> None:
    found = judged(terms=ReadinessTerms())
    assert (found.after, found.reason, found.action) == (
        CopyState.SYNCED,
        Reason.SYNCED_ONLY,
        Nothing(),
    )
    assert "accept_native" in found.repair
    assert made(found).ready is None
    words = " ".join(made(found).not_known)
    assert all(word in words for word in ("snapshot", "incarnation id", "WAL"))
    accepted = judged()
    assert (accepted.after, accepted.safe) == (CopyState.SYNCED, True)
    assert made(accepted).ready is True
    assert made(accepted).not_known


@pytest.mark.parametrize(
    ("there", "standby", "state", "reason"),
    [
        (THERE, here(replace(NATIVE_COPY, persistency="temporary")), "PROVING", "not_persistent"),
        (THERE, here(replace(NATIVE_COPY, invalidation="rows_removed")), "INVALID", "invalidated"),
        (THERE, here(replace(NATIVE_COPY, synced=False)), "CONFLICT", "name_taken"),
        (THERE, here(replace(NATIVE_COPY, plugin="other")), "INVALID", "fields_differ"),
        (THERE, here(replace(NATIVE_COPY, confirmed_flush_lsn=2001)), "SUSPECT", "ahead"),
        (THERE, here(None), "MISSING", "native_pending"),
        (THERE, here(flush_lsn=1999), "CLIENT_AHEAD", "client_ahead"),
        (THERE, here(native_sync=False), "SUSPECT", "not_synchronized"),
        (THERE, here(walreceiver_status=None), "SUSPECT", "not_streaming"),
        (THERE, here(upstream=None), "SUSPECT", "upstream_unknown"),
        (THERE, here(None, native_sync=False), "BLOCKED", "no_extension"),
        (THERE, here(version=160002), "BLOCKED", "no_extension"),
        (replace(THERE, logical_slots=(SLOT,)), here(None), "BLOCKED", "no_extension"),
        (replace(THERE, databases={5: 91}), here(), "SUSPECT", "database_pending"),
        (
            replace(THERE, physical_slots=(replace(THERE.physical_slots[0], catalog_xmin=None),)),
            here(),
            "SUSPECT",
            "no_catalog_xmin",
        ),
        (
            replace(THERE, logical_slots=(replace(NATIVE_SLOT, wal_status="lost"),)),
            here(),
            "INVALID",
            "lost_on_primary",
        ),
    ],
)
def test_45_what_sql_shows_against_a_copy_is_named(
    there: Any, standby: ObservedStandby, state: str, reason: str
) -> None:
    found = judged(there, standby)
    assert (found.after, found.reason, found.safe) == (state, reason, False)
    assert made(found).ready is False


def test_45_a_copy_of_ours_is_not_judged_by_sql() -> None:
    """Nothing but the extension shows whether it is whole; and it is no stranger's, to be dropped."""
    ours = here(replace(NATIVE_COPY, synced=False))
    assert judged(standby=ours, known=record()).reason is Reason.NO_EXTENSION


def test_45_without_the_primary_the_last_look_counts_for_its_time() -> None:
    known = remember(StandbyRecord(), THERE, here(), [judged()])
    down = {"walreceiver_status": None, "walreceiver_start": None}
    found = judged(None, here(**down), known)
    assert (found.after, found.safe) == (CopyState.SYNCED, True)
    assert any("created on the primary" in word for word in found.not_known)
    assert made(judged(None, here(**down), known, ReadinessTerms()), primary=None).ready is None
    old = judged(None, here(clock=STANDBY.clock + 1001, **down), known)
    assert (old.reason, old.safe) == (Reason.PROVEN_LONG_AGO, False)
    not_ours = replace(NATIVE_COPY, synced=False)
    for changes, reason in (
        ({"timeline": 2}, Reason.PRIMARY_UNREACHABLE),
        ({"flush_lsn": 1999}, Reason.CLIENT_AHEAD),
        ({"slots": ()}, Reason.PRIMARY_UNREACHABLE),
        ({"slots": (not_ours,)}, Reason.PRIMARY_UNREACHABLE),
        ({"native_sync": False}, Reason.NOT_SYNCHRONIZED),
        ({"databases": {5: 89}}, Reason.DATABASE_PENDING),
    ):
        found = judged(None, here(**{**down, **changes}), known)
        assert (found.reason, found.safe) == (reason, False), changes
    invalid = here(replace(NATIVE_COPY, invalidation="rows_removed"), **down)
    assert judged(None, invalid, known).after is CopyState.INVALID


def test_45_what_was_proven_with_the_extension_is_not_forgotten() -> None:
    known = record(replace(KNOWN, created=False))
    after = remember(known, THERE, here(), [judged()]).of("kept")
    assert (after.proven_at, after.proven_in) == (KNOWN.proven_at, KNOWN.proven_in)
