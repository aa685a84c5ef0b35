"""What a checkpoint of the standby invalidates, and so a promotion: idle slots (18), and those that need much WAL."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from slot_sync.report import SlotReport
from slot_sync.resolver.transitions import CopyState, Transition
from tests.support.extension import MAJORS, ONE
from tests.support.slot_copies import PHYSICAL, decoded, inspect, rows
from tests.support.slot_sync import STANDBY, slot_stack
from tests.support.waiting import wait_for
from walsender_bridge.doctor import slots as doctor

IDLE = [each for each in MAJORS if isinstance(each.values[0], int) and each.values[0] >= 18]
#: Seconds of idle_replication_slot_timeout.
TIMEOUT = 4


@pytest.mark.long
@pytest.mark.parametrize("major", IDLE)
def test_40_a_copy_of_an_idle_slot_is_not_invalidated(major: int, tmp_path: Path) -> None:
    with slot_stack(major, tmp_path) as stack:
        pair = stack.pair
        pair.make_slot("kept")
        for statement in (
            f"ALTER SYSTEM SET idle_replication_slot_timeout = '{TIMEOUT}s'",
            "SELECT pg_reload_conf()",
        ):
            rows(pair.standby, statement)
        candidates = {STANDBY: (pair.standby.dsn(), PHYSICAL)}
        told = {each.check: each for each in doctor.examine(pair.primary.dsn(), candidates)}
        assert told["idle_replication_slot_timeout"].severity is doctor.WARNING
        invalid = "SELECT invalidation_reason FROM pg_replication_slots WHERE slot_name = 'kept'"
        with stack.watching() as reports:

            def ready() -> bool:
                stack.turn_over("kept")
                return bool(reports and reports[-1].rounds and reports[-1].ready)

            wait_for(ready, 60, "the copy is ready")
            # Its client has nothing to read, and there are restartpoints all the time.
            began, seen = time.monotonic(), len(reports)
            while time.monotonic() < began + 2 * TIMEOUT:
                pair.on_primary("CHECKPOINT")
                pair.catch_up()
                rows(pair.standby, "CHECKPOINT")
                assert rows(pair.standby, invalid) == [(None,)]
                time.sleep(TIMEOUT / 10)
            assert {each.reason for each in _of(reports[seen:])} == {"proven"}
        stack.load.write(3)
        pair.catch_up()
        pair.promote()
        rows(pair.standby, "CHECKPOINT")
        assert rows(pair.standby, invalid) == [(None,)]
        assert decoded(pair.standby, "kept")[-3:] == stack.load.written[-3:]


@pytest.mark.long
@pytest.mark.parametrize("major", IDLE)
def test_40_a_copy_that_nobody_keeps_in_use_is_not_ready(major: int, tmp_path: Path) -> None:
    """The controller has stopped: a promotion would invalidate the copy."""
    with slot_stack(major, tmp_path) as stack:
        stack.pair.make_slot("kept")
        with stack.controller() as controller:
            stack.until(controller, "READY", "kept")
            rows(stack.pair.standby, "ALTER SYSTEM SET idle_replication_slot_timeout = '2s'")
            rows(stack.pair.standby, "SELECT pg_reload_conf()")
            stack.until(controller, "READY", "kept")
            idle = "SELECT inactive_since < clock_timestamp() - interval '2 s' FROM pg_replication_slots"
            wait_for(lambda: rows(stack.pair.standby, idle) == [(True,)], 20, "it is idle")
            stack.pair.primary.stop("immediate")
            (found,) = controller.once(10)[STANDBY].transitions
            assert (found.after, found.safe) == (CopyState.SUSPECT, False)
            assert "idle" in found.why


def _of(reports: list[SlotReport]) -> Iterator[Transition]:
    for report in reports:
        if STANDBY in report.rounds:
            yield from report[STANDBY].transitions


@pytest.mark.parametrize("major", [each for each in ONE if each.values[0] >= 13])
def test_40_a_copy_that_a_promotion_would_leave_without_wal(major: int, tmp_path: Path) -> None:
    """The same checkpoint removes WAL beyond the standby's own max_slot_wal_keep_size, rounded down to whole segments."""
    with slot_stack(major, tmp_path) as stack:
        pair = stack.pair
        pair.make_slot("kept")
        for statement in (
            "ALTER SYSTEM SET max_slot_wal_keep_size = '47MB'",
            "ALTER SYSTEM SET wal_keep_size = 0",
            "SELECT pg_reload_conf()",
        ):
            rows(pair.standby, statement)
        with (
            stack.controller() as controller,
            closing(psycopg.connect(pair.primary.dsn())) as early,
        ):
            # The third segment after the copy's is then less than 47 MB away, and more than two segments.
            pair.on_primary("SELECT pg_logical_emit_message(false, '', repeat('x', 4 << 20))")
            stack.until(controller, "READY", "kept")
            # It pins the slot's restart_lsn, and its copy's; nobody writes a checkpoint.
            early.execute("INSERT INTO shop VALUES (100001, 'row-100001')")
            for _ in range(3):
                stack.load.write()
                pair.on_primary("SELECT pg_switch_wal()")
            pair.catch_up()
            (found,) = controller.once(10)[STANDBY].transitions
            assert (found.after, found.reason) == (CopyState.SUSPECT, "outgrown")
            pair.promote()
            rows(pair.standby, "CHECKPOINT")
            assert inspect(pair.standby, "kept")["invalidation"] == "wal_removed"
