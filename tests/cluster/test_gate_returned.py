"""42: an old primary that comes back as a standby without pg_rewind never opens the commit gate.

It asks for its old timeline from the beginning of a segment, so as long as it went on in the segment of the fork the
new primary lets it in, sends up to the fork, and hears as flushed what only the old primary had. The slot's
`restart_lsn` goes there and stays.
"""

from pathlib import Path

import psycopg
import pytest

from tests.cluster.test_gate import primary, slot
from tests.support.capture_stack import ChangeLog
from tests.support.fake_standby import FakeStandby
from tests.support.gate_stack import (
    CANDIDATE,
    gated,
    holding,
    insert,
    logged,
    make_candidate,
    make_slot,
)
from tests.support.servers import MAJORS_IN_TURN, Database
from tests.support.waiting import wait_for
from tests.support.wal_server import follow, promote, run
from walsender_bridge.demo.local_server import LocalServer

__all__ = ["primary", "slot"]

#: Bytes of WAL that only the old primary has: more than the new one writes in the test, and not a segment.
LOST = 4 << 20


def restart_lsn(dsn: str) -> int:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "SELECT (restart_lsn - '0/0'::pg_lsn)::bigint FROM pg_replication_slots"
            " WHERE slot_name = %s",
            [CANDIDATE],
        ).fetchone()
    assert row is not None
    return int(row[0] or 0)


@pytest.mark.parametrize("primary", MAJORS_IN_TURN, indirect=True)
def test_42_an_unrewound_candidate_releases_nothing(
    tmp_path: Path, log: ChangeLog, primary: LocalServer
) -> None:
    promoted = make_candidate(primary, primary.folder.with_name("standby"))
    try:
        promoted.start()
        sent = insert(primary.dsn(), 1)
        wait_for(lambda: restart_lsn(primary.dsn()) >= sent, 30, "the standby has it")
        promoted.stop("fast")
        run(primary, f"SELECT pg_logical_emit_message(true, 'lost', repeat('x', {LOST}))")
        lost = insert(primary.dsn())
        primary.stop("immediate")
        promoted.start()
        promote(promoted)
        dsn = promoted.dsn()
        make_slot(dsn)
        with gated(tmp_path, log, dsn) as capture:
            wait_for(capture.streams, 30, "capture streams")
            end = insert(dsn, 2)
            assert end < lost
            wait_for(lambda: logged(log) >= end - 1000, 30, "the log holds it")
            follow(primary, dsn, primary_slot_name=CANDIDATE)
            primary.start()
            wait_for(lambda: restart_lsn(dsn) >= lost, 30, "it has reported what was lost")

            def has_come_often() -> bool:
                # Each time for some milliseconds; the gate looks every 200 ms at most.
                assert log.committed_lsn() == 0
                return primary.log_tail(500).count("restarted WAL streaming") > 15

            wait_for(has_come_often, 30, "it comes again and again")
            wait_for(lambda: f"slot {CANDIDATE}" in holding(capture), 30, "it says why it waits")
        assert log.committed_lsn() == 0
    finally:
        promoted.destroy()


@pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True)
def test_42_what_a_slot_remembers_of_an_unrewound_candidate_counts_for_nobody(
    tmp_path: Path, log: ChangeLog, shop: Database, slot: str
) -> None:
    with gated(tmp_path, log, shop.dsn) as capture:
        wait_for(capture.streams, 30, "capture streams")
        with FakeStandby(shop.dsn, slot, ahead=1 << 20) as standby:
            ahead = standby.flushed
            wait_for(lambda: restart_lsn(shop.dsn) == ahead, 10, "the slot has been told")
            end = insert(shop.dsn, 1)
            wait_for(lambda: logged(log) >= end - 1000, 30, "the log holds it")
            wait_for(lambda: "that was not sent to it" in holding(capture), 10, "the reason")
        assert log.committed_lsn() == 0
        # Rewound, so that it lacks it: the slot still remembers the other position until it says its own.
        with FakeStandby(shop.dsn, slot, speaks=False) as standby:
            wait_for(lambda: "has not reported a position" in holding(capture), 10, "the reason")
            assert restart_lsn(shop.dsn) == ahead
            assert log.committed_lsn() == 0
            standby.flushed = insert(shop.dsn)
            standby.speaks = True
            wait_for(lambda: log.committed_lsn() > 0, 30, "it has it now")
