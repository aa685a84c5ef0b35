"""A PostgreSQL that is stopped answers nothing, and its kernel accepts everything: no call waits for ever."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from spark_consumers.lake.flush import force_barrier
from spark_consumers.snapshot import watchdog
from spark_consumers.snapshot.exported import ExportedSnapshot
from spark_consumers.sources.snapshot import SnapshotSource
from tests.support.capture_stack import CaptureProcess, ChangeLog, make_tables
from tests.support.servers import Database, MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.capture import source
from walsender_bridge.errors import DeadlineError, TusklineError
from walsender_bridge.postgres.client import replication_connection as connection_module
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.client.replication_connection import ReplicationConnection


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process is stopped, and goes on after the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_call_on_a_bounded_connection_ends(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedConnection, "limit", 1.0)
    with BoundedConnection.connect(database.dsn, autocommit=True) as connection:
        assert connection.execute("SELECT 7").fetchone() == (7,)
        # Longer than a look at the clock, and shorter than the limit.
        connection.execute("SELECT pg_sleep(0.4)")
        with stopped(connection.info.backend_pid):
            began = time.monotonic()
            with pytest.raises(DeadlineError, match="did not answer in 1 s") as raised:
                connection.execute("SELECT 8")
            assert time.monotonic() - began < 20
        assert connection.closed
    assert database.name in raised.value.where


def test_what_capture_asks_before_it_streams_ends(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedConnection, "limit", 1.0)
    monkeypatch.setattr(connection_module, "ANSWER_SECONDS", 1.0)
    own = source.CaptureSource("shop", database.dsn, "slot", "publication")
    with (
        source.connect(own) as connection,
        stopped(connection.info.backend_pid),
        pytest.raises(DeadlineError),
    ):
        source.prepare(connection, own)
    with ReplicationConnection.connect(database.dsn) as walsender:
        ((_, pid),) = database_walsenders(database)
        with stopped(pid), pytest.raises(DeadlineError):
            walsender.identify()


def database_walsenders(database: Database) -> list[tuple[str, int]]:
    """Application name and pid of each."""
    with database.connect() as connection:
        return connection.execute(
            "SELECT application_name, pid FROM pg_stat_activity"
            " WHERE backend_type = 'walsender' AND datname = %s",
            [database.name],
        ).fetchall()


def test_a_slot_that_waits_for_transactions_is_told_from_a_stopped_server(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_ALIVE_SECONDS", 0.1)
    looks = 0
    with (
        psycopg.connect(database.dsn) as busy,
        ReplicationConnection.connect(database.dsn) as walsender,
    ):
        busy.execute("SELECT pg_current_xact_id()")

        def check() -> None:
            nonlocal looks
            looks += 1
            if looks == 5:
                # The server was only waiting: the slot is made when the transaction ends.
                busy.rollback()

        assert walsender.create_slot("slow", check=check) > 0
        assert looks >= 5

        def dead() -> None:
            raise DeadlineError("stopped")

        busy.execute("SELECT pg_current_xact_id()")
        with pytest.raises(DeadlineError, match="stopped"):
            walsender.create_slot("never", check=dead)


def test_capture_says_what_it_waits_for_and_goes_on(
    tmp_path: Path, make_server: MakeServer
) -> None:
    server = make_server(fsync="off")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
    assert server.pid is not None
    with ChangeLog(tmp_path) as log:
        capture = CaptureProcess(tmp_path, log, server.dsn(connect_timeout=2), "public.orders")
        with stopped(server.pid), capture:
            waiting = wait_for(
                lambda: capture.status().get("state") == "waiting" and capture.status(),
                30,
                "the status says so",
            )
            assert "timeout expired" in waiting["error"]["what"]
            with pytest.raises(TusklineError, match="timeout expired"):
                force_barrier(log.address, {"shop": server.dsn(connect_timeout=2)}, timeout=5)
            os.kill(server.pid, signal.SIGCONT)
            wait_for(capture.streams, 60, "capture streams")
            with psycopg.connect(server.dsn(), autocommit=True) as connection:
                connection.execute("INSERT INTO orders VALUES (1, 'after')")
            wait_for(lambda: log.replica_status().end_offset > 1, 30, "it is in the log")


def test_capture_that_waits_for_its_slot_can_be_stopped_and_leaves_none(
    tmp_path: Path, database: Database
) -> None:
    with database.connect() as connection:
        make_tables(connection)
    with ChangeLog(tmp_path) as log, psycopg.connect(database.dsn) as busy:
        # A slot waits for whatever has an xid when it is made.
        busy.execute("SELECT pg_current_xact_id()")
        with CaptureProcess(tmp_path, log, database.dsn, "public.orders") as capture:
            wait_for(lambda: _slots(database), 30, "the slot is being made")
            assert capture.stop() == 0
        wait_for(lambda: not _slots(database), 30, "the server has given up")
        busy.rollback()
    assert not _slots(database)


def _slots(database: Database) -> list[tuple[str]]:
    with database.connect() as connection:
        return connection.execute(
            "SELECT slot_name FROM pg_replication_slots WHERE database = %s", [database.name]
        ).fetchall()


@pytest.mark.long
def test_a_copy_from_a_server_that_stops_ends(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "QUIET_SECONDS", 0.5)
    monkeypatch.setattr(BoundedConnection, "limit", 1.0)
    server = make_server(fsync="off")
    server.start()
    assert server.pid is not None
    dsn = server.dsn(connect_timeout=2)
    with psycopg.connect(dsn, autocommit=True) as connection:
        # More than all buffers on the way hold.
        connection.execute(
            "CREATE TABLE big AS SELECT g AS id, repeat('x', 900) AS pad"
            " FROM generate_series(1, 150000) g"
        )
        connection.execute("CREATE PUBLICATION p FOR TABLE big")
        with ExportedSnapshot(dsn) as snapshot:
            options = {"dsn": dsn, "snapshot": snapshot.snapshot, "table": "public.big"}
            table = SnapshotSource({**options, "publication": "p", "partitions": "1"})
            reader = table.reader(table.schema())
            (piece,) = reader.partitions()
            batches = reader.read(piece)
            next(batches)
            row = connection.execute(
                "SELECT pid FROM pg_stat_activity WHERE query LIKE 'COPY%'"
            ).fetchone()
            assert row is not None
            with stopped(row[0]), stopped(server.pid), pytest.raises(DeadlineError):
                for _ in batches:
                    pass
            # One that is only slow is left alone.
            monkeypatch.setattr(watchdog, "QUIET_SECONDS", 0.1)
            rows = 0
            for batch in reader.read(piece):
                assert isinstance(batch, pa.RecordBatch)
                rows += batch.num_rows
            assert rows == 150_000
