"""A promotion before the end of what the standby has on disk: its WAL ends within a record that goes on in another segment.

The physical slot on the primary then names a position beyond the one where the new timeline begins. Whatever believes
that number (the gate, capture's confirmations, a copy) must not have taken it for more than the whole records before it.
"""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.capture_stack import SLOT, ChangeLog, check_equal
from tests.support.extension import ONE
from tests.support.slot_copies import PHYSICAL, received, rows
from tests.support.slot_failover import Reader, captured, positions, transactions, until_both
from tests.support.slot_sync import STANDBY, SlotStack, slot_stack
from tests.support.waiting import wait_for
from walsender_bridge.postgres.protocol.lsn import parse_lsn

SEGMENT = 16 << 20
#: Of one record: several segments.
RECORD = 80_000_000


def lsn(stack: SlotStack, expression: str, *, standby: bool = False) -> int:
    where = stack.pair.standby if standby else stack.pair.primary
    return parse_lsn(str(rows(where, f"SELECT ({expression})::text")[0][0]))


def held(stack: SlotStack) -> int:
    """What the standby's slot says that it has."""
    slot = f"SELECT restart_lsn FROM pg_replication_slots WHERE slot_name = '{PHYSICAL}'"
    return lsn(stack, slot)


def stop_within_a_record(stack: SlotStack) -> tuple[psycopg.Connection[Any], int, int]:
    """A transaction with rows, whose last record is half on disk for good; where that begins, and the segment's end."""
    primary = stack.pair.primary
    wal = primary.data_dir / "pg_wal"
    writer = psycopg.connect(primary.dsn())
    writer.execute("INSERT INTO shop VALUES (900001, 'row-900001')")
    writer.execute("INSERT INTO orders VALUES (900001, 'x')")
    begin = lsn(stack, "pg_current_wal_insert_lsn()")
    before = {path.name for path in wal.iterdir()}

    def write() -> None:
        try:
            writer.execute(f"SELECT pg_logical_emit_message(true, 'half', repeat('x', {RECORD}))")
        except psycopg.Error:
            return

    threading.Thread(target=write, daemon=True).start()
    # When the next segment is there, the one before is flushed, in the middle of the record.
    wait_for(
        lambda: {p.name for p in wal.iterdir() if len(p.name) == 24} - before,
        20,
        "a segment is full",
    )
    os.kill(writer.info.backend_pid, signal.SIGSTOP)
    return writer, begin, begin - begin % SEGMENT + SEGMENT


@pytest.mark.parametrize("major", ONE)
def test_34_a_switch_point_inside_a_record_that_crosses_a_segment(
    major: int, tmp_path: Path, log: ChangeLog
) -> None:
    with slot_stack(major, tmp_path) as stack:
        pair = stack.pair
        pair.make_slot("kept")
        with (
            Reader(pair.primary, "kept", tmp_path / "plain") as plain,
            captured(stack, log, tmp_path),
            stack.watching() as reports,
        ):
            until_both(stack, reports, "kept", SLOT)
            rows(pair.primary, "INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 9) AS n")
            end = lsn(stack, "pg_current_wal_insert_lsn()")
            pair.catch_up()
            wait_for(lambda: log.committed_lsn() > 0, 30, "it is shown")
            writer, begin, boundary = stop_within_a_record(stack)
            assert end <= begin < boundary < begin + RECORD
            wait_for(lambda: held(stack) >= boundary, 30, "the standby has half of the record")
            beyond = held(stack)
            # The gate and the controller have looked at this position for a while.
            seen = len(reports)
            wait_for(lambda: len(reports) > seen + 15, 60, "there were polls")
            verdict = reports[-1][STANDBY]
            assert verdict.ready, verdict.problems
            shown = log.committed_lsn()
            assert 0 < shown <= begin
            pair.primary.kill()
            read = plain.end()
            writer.close()
            assert lsn(stack, "pg_last_wal_receive_lsn()", standby=True) >= beyond
            pair.promote(stop=None)
            history = rows(pair.standby, "SELECT pg_read_file('pg_wal/00000002.history')")[0][0]
            switch = parse_lsn(history.split("\t")[1])
            assert end <= switch < boundary <= beyond
            # Each copy stands before the switch, and can be decoded over it.
            for name in ("kept", SLOT):
                copy = positions(pair.standby, name)
                assert copy["restart_lsn"] <= copy["confirmed_flush_lsn"] <= switch
                assert copy["snapshot_present"]
                assert copy["wal_present"]
            rows(pair.standby, "INSERT INTO shop VALUES (900002, 'row-900002')")
            rows(pair.standby, "INSERT INTO orders SELECT n, 'x' FROM generate_series(10, 19) AS n")
            again = transactions(pair.standby, "kept")
            after = received(pair.standby, "kept")
            found = check_equal(log, pair.standby.dsn())
        assert sorted(found.keys["orders"]) == [*range(1, 20)]
        assert shown in found.ends
        assert set(read) | set(after) == {*stack.load.written, 900002}
        assert after[-1] == 900002
        assert after == [row for each in again for row in each.rows]
        assert len(after) == len(set(after))
        assert len(read) == len(set(read))
