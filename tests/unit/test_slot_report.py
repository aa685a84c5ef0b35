"""Whether a candidate may be promoted, from what is known of its copies."""

from slot_sync.report import SlotReport, SlotRound
from slot_sync.resolver.observed import CopyRecord, ObservedPrimary, ObservedStandby, StandbyRecord
from slot_sync.resolver.transitions import CopyState, MarkIncarnation, Reason, Transition
from walsender_bridge.errors import ConnectionFailedError
from walsender_bridge.runtime import json_model

PRIMARY = ObservedPrimary(7, 1, False, 1, 160_014, "logical", 0x5000000)
STANDBY = ObservedStandby(
    system_id=7, timeline=1, in_recovery=True, postmaster_start=2, version=160_014,
    wal_level="logical", conf_load_time=3, clock=10_000_000, hot_standby_feedback=True,
    wal_receiver_status_interval=1, primary_slot_name="near", walreceiver_status="streaming",
    walreceiver_slot_name="near", walreceiver_start=4, upstream=None, replay_lsn=1, flush_lsn=1,
)  # fmt: skip
DOWN = ConnectionFailedError("refused", where="db", repair="start it")


def made(*transitions, primary=PRIMARY, standby=STANDBY, record=None, **other):
    known = record or StandbyRecord()
    return SlotRound("near", "db", 20.0, transitions, known, primary, standby, **other)


def found(name, state, **other):
    return Transition(name, "", state, Reason.PROVEN, "why", **other)


def test_each_slot_that_is_to_be_kept_has_to_be_safe():
    assert made().ready is True
    assert made(found("a", CopyState.READY), found("b", CopyState.LAGGING)).ready is True
    for state in set(CopyState) - {CopyState.READY, CopyState.LAGGING}:
        assert made(found("a", CopyState.READY), found("b", state)).ready is False, state


def test_what_nobody_expects_there_says_nothing_of_the_others():
    others = [
        found("near", CopyState.BLOCKED, action=MarkIncarnation("near", "x"), counts=False),
        found("b", CopyState.ORPHAN, counts=False),
    ]
    assert made(found("a", CopyState.READY), *others).ready is True
    assert [copy.expected for copy in made(found("a", CopyState.READY), *others).copies()] == [
        True,
        False,
        False,
    ]


def test_who_does_not_answer_is_unknown_unless_something_is_remembered():
    assert made(found("a", CopyState.BLOCKED), standby=None, standby_error=DOWN).ready is None
    assert made(primary=None, primary_error=DOWN).ready is None
    known = StandbyRecord(copies={"a": CopyRecord("a", created=True, proven_at=4_000_000)})
    silent = made(found("a", CopyState.READY), primary=None, record=known, primary_error=DOWN)
    assert silent.ready is True
    (copy,) = silent.copies()
    assert copy.age == 6.0
    assert "the primary does not answer" in silent.problems[0]


def test_several_candidates_are_no_better_than_the_worst():
    good, bad = made(found("a", CopyState.READY)), made(found("a", CopyState.SUSPECT))
    unknown = made(standby=None)
    assert SlotReport({"x": good}).ready is True
    assert SlotReport({"x": good, "y": unknown}).ready is None
    assert SlotReport({"x": good, "y": unknown, "z": bad}).ready is False
    assert SlotReport({}).ready is None


def test_positions_are_shown_as_postgresql_writes_them():
    evidence = {
        "restart_lsn": (0x16B374D848, None),
        "replay_lsn": 0x1000028,
        "catalog_xmin": (7, 8),
    }
    report = SlotReport({"near": made(found("a", CopyState.READY, evidence=evidence))})
    (row,) = json_model.plain(report.status())["slots"]
    assert row["evidence"] == {
        "restart_lsn": ["16/B374D848", None],
        "replay_lsn": "0/1000028",
        "catalog_xmin": [7, 8],
    }
