"""`tuskline flush` beside a start and a failure: the README's order of commands, and an end that is said at once."""

import contextlib
import time

import psycopg

from spark_consumers import read
from tests.support.attached import Attached
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause


def is_dropped(connection: psycopg.Connection) -> bool:
    """Whether the slot is gone; its walsender is ended, and capture may come back before the drop."""
    connection.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots")
    with contextlib.suppress(psycopg.errors.ObjectInUse):
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        return True
    return False


def test_flush_right_after_up_in_the_background_waits_for_the_first_copies(
    tmp_path, make_server: MakeServer, spark
):
    server = make_server(fsync="off")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        connection.execute("INSERT INTO orders SELECT generate_series(1, 1000)")
    source = {"dsn": server.dsn(), "tables": ["public.orders"]}
    with Attached(tmp_path, {"shop": source}, lake=True, epoch_interval=60) as tuskline:
        tuskline.json("init")
        started = tuskline.run("up", "--background")
        assert started.returncode == 0, started.stderr
        try:
            flushed = tuskline.run("flush", "--json", seconds=240)
            log = (tuskline.directory / "log" / "logs" / "up.log").read_text()
            assert flushed.returncode == 0, flushed.stderr + log
            assert read(spark, str(tuskline.lake))["public.orders"].count() == 1000
            # What cannot come is not waited for.
            with psycopg.connect(server.dsn(), autocommit=True) as connection:
                connection.execute("DROP PUBLICATION tuskline_shop")
                wait_for(lambda: is_dropped(connection), 60, "the slot is free and dropped")
            began = time.monotonic()
            failed = tuskline.run("flush", "--json", seconds=240)
            assert failed.returncode in {Cause.PUBLICATION, Cause.SLOT, Cause.DIVERGED}, (
                failed.stderr
            )
            assert time.monotonic() - began < 60
        finally:
            tuskline.json("down")


def test_flush_without_anything_that_runs_fails_at_once(tmp_path, make_server: MakeServer):
    server = make_server(fsync="off")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    source = {"dsn": server.dsn(), "tables": ["public.orders"]}
    with Attached(tmp_path, {"shop": source}, lake=True) as tuskline:
        tuskline.json("init")
        began = time.monotonic()
        error = tuskline.error("flush", code=Cause.UNAVAILABLE)
        assert time.monotonic() - began < 60
        assert tuskline.log_listen in error["where"]


def test_flush_right_after_create_table_has_the_table(tmp_path, make_server: MakeServer, spark):
    server = make_server(fsync="off")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        with Attached(tmp_path, {"shop": {"dsn": server.dsn()}}, lake=True) as tuskline:
            tuskline.json("init")
            tuskline.up()
            flushed = tuskline.run("flush", seconds=240)
            assert flushed.returncode == 0, flushed.stderr + tuskline.logs()
            # Several, so that capture's own look does not come just before each of the flushes.
            for name in ("first", "second", "third"):
                connection.execute(f"CREATE TABLE {name} (id int PRIMARY KEY)")
                connection.execute(f"INSERT INTO {name} SELECT generate_series(1, 7)")
                tuskline.json("flush")
                assert read(spark, str(tuskline.lake))[f"shop.public.{name}"].count() == 7
            assert tuskline.stop_up() == 0
