"""A copy that holds what the failover has left behind is never shown."""

from contextlib import ExitStack

import psycopg
import pytest

from spark_consumers import Lakehouse, Source, read
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.capture_stack import PUBLICATION, STREAM, CaptureProcess, ChangeLog, make_tables
from tests.support.lake_check import assert_equal
from tests.support.servers import majors
from tests.support.slot_failover import several
from tests.support.waiting import wait_for
from tests.support.wal_server import backup, follow, promote, run
from walsender_bridge.capture.gate.core import Rule

CANDIDATE = "standby_a"
ORDERS = f"{STREAM}.public.orders"


def insert(dsn, first, last):
    with psycopg.connect(dsn, autocommit=True) as connection:
        for key in range(first, last + 1):
            connection.execute("INSERT INTO orders VALUES (%s, %s)", [key, "x" * 200])


@pytest.fixture
def servers(make_server):
    """A primary, and a standby that has its slot as well (18 synchronizes slots by itself)."""
    primary = make_server(18, fsync="off")
    primary.start()
    with psycopg.connect(primary.dsn(), autocommit=True) as connection:
        make_tables(connection)
        connection.execute("SELECT pg_create_physical_replication_slot(%s, true)", [CANDIDATE])
    standby = backup(primary, primary.folder.with_name("standby"), wal="fetch")
    follow(
        standby,
        primary.dsn(),
        primary_slot_name=CANDIDATE,
        hot_standby_feedback="on",
        sync_replication_slots="on",
    )
    yield primary, standby
    standby.destroy()


def synced(primary, standby):
    run(primary, "SELECT pg_log_standby_snapshot()")
    found = run(
        standby,
        "SELECT synced AND NOT temporary AND invalidation_reason IS NULL FROM pg_replication_slots"
        f" WHERE slot_name = 'tuskline_{STREAM}'",
    )
    return bool(found and found[0][0])


@pytest.mark.skipif(18 not in majors(), reason="PostgreSQL 18 synchronizes slots by itself")
def test_38_a_copy_beyond_the_fork_is_made_once_more_after_the_failover(spark, tmp_path, servers):
    primary, standby = servers
    standby.start()
    dsn = several(primary, standby)
    with ExitStack() as stack:
        log = stack.enter_context(ChangeLog(tmp_path))
        capture = CaptureProcess(
            tmp_path,
            log,
            dsn,
            "public.orders",
            gate=Rule((CANDIDATE,)),
        )
        stack.enter_context(capture)
        wait_for(capture.streams, 60, "capture streams")
        insert(primary.dsn(), 1, 3)
        wait_for(lambda: log.committed_lsn() > 0, 30, "it flows")
        # A server that found nothing to synchronize looks again after up to 30 s.
        wait_for(lambda: synced(primary, standby), 90, "the slot is on the standby")
        standby.stop("fast")
        # Nobody but the primary has these, so the log does not show them; the copy has them.
        insert(primary.dsn(), 10, 15)
        sources = [Source(STREAM, dsn, PUBLICATION)]
        house = Lakehouse(spark, tmp_path / "lake", log.address, sources, epoch_interval=3600)
        stack.callback(house.close)

        def head():
            house.run_once(force=True)
            return open_chain(tmp_path / "lake").head()

        wait_for(lambda: ORDERS in head().copies, 60, "the copy")
        copy = head().copies[ORDERS]
        assert ORDERS not in head().tables
        primary.kill()
        standby.start()
        promote(standby)
        # Below the copy's LSN and beyond it.
        insert(standby.dsn(), 20, 60)
        wait_for(lambda: log.committed_lsn() > copy.start_lsn, 60, "the log is beyond the copy")
        wait_for(lambda: ORDERS in head().readable, 60, "the table is shown")
        assert run(standby, "SELECT count(*) FROM orders")[0][0] == 44
        assert_equal(standby.dsn(), read(spark, tmp_path / "lake"))
        assert head().tables[ORDERS].path != copy.path
