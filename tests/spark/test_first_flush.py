"""`tuskline flush` beside a start and a failure: the README's order of commands, and an end that is said at once."""

import contextlib
import time

import psycopg
import pytest

from spark_consumers import read
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.attached import Attached
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.cli.flush import flush
from walsender_bridge.errors import Cause
from walsender_bridge.runtime import logs


def is_dropped(connection: psycopg.Connection) -> bool:
    """Whether the slot is gone; its walsender is ended, and capture may come back before the drop."""
    connection.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots")
    with contextlib.suppress(psycopg.errors.ObjectInUse):
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        return True
    return False


@pytest.mark.long
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


def test_flush_right_after_create_table_has_the_table(
    tmp_path, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(logs.VARIABLE, "console")  # which the command hands on
    server = make_server(fsync="off")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        with Attached(tmp_path, {"shop": {"dsn": server.dsn()}}, lake=True) as tuskline:
            tuskline.json("init")
            tuskline.up()
            # In this process: capture's own look could come while another one starts.
            flush(tuskline.config, timeout=240)
            for name in ("first", "second"):
                connection.execute(f"CREATE TABLE {name} (id int PRIMARY KEY)")
                connection.execute(f"INSERT INTO {name} SELECT generate_series(1, 7)")
                flush(tuskline.config, timeout=240)
                head = open_chain(tuskline.lake).head()
                assert head is not None
                assert f"shop.public.{name}" in head.tables
                assert head.tables[f"shop.public.{name}"].rows == 7
            assert tuskline.stop_up() == 0
