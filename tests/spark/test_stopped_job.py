"""A Spark job that is stopped holds nothing on the primary, and catches up from the log alone."""

import threading

import psycopg
import pytest

from spark_consumers import Source, read
from spark_consumers.lake.flush import flush, force_barrier
from tests.support.servers import MAJORS_IN_TURN
from tests.support.stack import Stack
from tests.support.waiting import wait_for

SLOT = """
    SELECT (confirmed_flush_lsn - '0/0'::pg_lsn)::bigint,
           (pg_current_wal_flush_lsn() - restart_lsn)::bigint
    FROM pg_replication_slots WHERE slot_name = 'tuskline_shop'
"""


def _confirmed(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(SLOT).fetchone()


def _write(dsn, stop, written):
    with psycopg.connect(dsn, autocommit=True) as connection:
        while not stop.is_set():
            with connection.transaction():
                connection.execute(
                    "INSERT INTO orders (body) SELECT repeat(md5(random()::text), 30)"
                    " FROM generate_series(1, 50)"
                )
                connection.execute("UPDATE totals SET n = n + 50")
            written.append(50)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)
def test_a_stopped_job_does_not_hold_the_slot(tmp_path, database, spark):
    database.execute(
        "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text)",
        "CREATE TABLE totals (id int PRIMARY KEY, n bigint NOT NULL)",
        "INSERT INTO totals VALUES (1, 0)",
    )
    with Stack(tmp_path, {"shop": database.dsn}) as stack:
        stack.start("log-server", "bridge", "lake")
        first = wait_for(lambda: _first_epoch(stack), 120, "the initial copy\n" + stack.logs())
        assert stack.stop("lake") == 0

        # The job is down during the whole load.
        stop = threading.Event()
        written: list[int] = []
        writer = threading.Thread(target=_write, args=(database.dsn, stop, written))
        writer.start()
        try:
            wait_for(lambda: sum(written) >= 5_000, 60, "the load")
        finally:
            stop.set()
            writer.join()
        version = force_barrier(stack.log_address, {"shop": database.dsn}, timeout=30)
        loaded_to = _position(database.dsn)
        confirmed, held = wait_for(
            lambda: _keeps_up(database.dsn, loaded_to), 20, "the slot is confirmed"
        )
        assert confirmed >= loaded_to
        # What the slot still holds is the reach of the running transactions, not the load (> 5 MB).
        assert held < 2 << 20, held
        assert version > first

        stack.start("lake")
        flush(
            stack.lake,
            stack.log_address,
            [Source("shop", database.dsn, "tuskline_shop")],
            timeout=90,
        )
        snapshot = read(spark, stack.lake)
        with database.connect() as connection:
            expected = set(connection.execute("SELECT id, body FROM orders").fetchall())
            total = connection.execute("SELECT n FROM totals").fetchone()[0]
        rows = [tuple(row) for row in snapshot["public.orders"].collect()]
        assert len(rows) == len(expected) == sum(written) == total
        assert set(rows) == expected
        assert [row["n"] for row in snapshot["public.totals"].collect()] == [total]


def _first_epoch(stack):
    from spark_consumers.lake.manifest.chain import open_chain
    from walsender_bridge.errors import TusklineError

    try:
        head = open_chain(stack.lake).head()
    except TusklineError:
        return None
    return head.epoch if head and len(head.readable) == 2 else None


def _position(dsn):
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "SELECT (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint"
        ).fetchone()
    assert row
    return row[0]


def _keeps_up(dsn, position):
    # restart_lsn moves when the server logs its running transactions; a checkpoint does that now.
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CHECKPOINT")
    confirmed, held = _confirmed(dsn)
    return (confirmed, held) if confirmed >= position and held < 2 << 20 else None
