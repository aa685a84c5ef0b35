"""Large transactions, prepared ones and messages on real servers: into the log whole, once, or not at all."""

import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from spark_consumers.snapshot.exported import ExportedSnapshot, reading
from tests.support.capture_stack import (
    CaptureProcess,
    ChangeLog,
    check_equal,
    content,
    make_tables,
    slot_lsn,
    wal_end,
)
from tests.support.listeners import of_process
from tests.support.servers import MAJORS_IN_TURN, Database, MakeServer
from tests.support.sizes import need_disk, scaled
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import Cause, DeadlineError
from walsender_bridge.postgres.protocol import pgoutput

TABLES = ("public.orders", "public.audit")
#: So little that every transaction of more than some hundred rows is streamed.
WORK_MEM = "64kB"


@pytest.fixture
def server(make_server: MakeServer, request: pytest.FixtureRequest) -> LocalServer:
    """A server of the test's own, which streams early, with the two tables."""
    major = getattr(request, "param", 16)
    settings = {"fsync": "off", "max_prepared_transactions": "5", "autovacuum": "off"}
    if major >= 13:
        settings["logical_decoding_work_mem"] = WORK_MEM
    server = make_server(major, **settings)
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
    return server


each_major = pytest.mark.parametrize("server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)


def streams(server: LocalServer) -> bool:
    """Whether this server sends transactions in progress (14 and later)."""
    return server.installation.major >= 14


def fill(connection: psycopg.Connection[Any], first: int, count: int = 2000) -> None:
    """Rows in both tables, many enough to be streamed."""
    for table in ("orders", "audit"):
        connection.execute(
            f"INSERT INTO {table} SELECT g, repeat(md5(g::text), 3)"  # a test's table
            " FROM generate_series(%s::bigint, %s) g".encode(),
            [first, first + count - 1],
        )


def spool_files(capture: CaptureProcess) -> list[Path]:
    """Its files; folders may go while they are looked for."""
    return [
        Path(folder) / name
        for folder, _, names in os.walk(capture.spool)
        for name in names
        if name.endswith(".spool")
    ]


def spooled(capture: CaptureProcess) -> int:
    """Bytes in spool files."""
    return sum(path.stat().st_size for path in spool_files(capture) if path.exists())


def wait_spooled(capture: CaptureProcess, size: int = 1) -> None:
    wait_for(lambda: spooled(capture) >= size, 30, "the transaction is spooled")


def wait_empty(capture: CaptureProcess) -> None:
    wait_for(lambda: not spool_files(capture), 30, "the spool is empty")


@each_major
def test_30_streamed_transactions_are_in_the_log_whole_or_not_at_all(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    with (
        psycopg.connect(server.dsn()) as one,
        psycopg.connect(server.dsn()) as two,
        psycopg.connect(server.dsn(), autocommit=True) as small,
    ):
        # Two at once, with subtransactions that are kept, rolled back, nested, and many.
        fill(one, 0)
        fill(two, 10_000)
        with one.transaction():
            fill(one, 20_000)
            with one.transaction(force_rollback=True):
                with one.transaction():
                    fill(one, 30_000)
                fill(one, 35_000)
            fill(one, 40_000)
        one.execute(
            """DO $$ BEGIN FOR i IN 1..600 LOOP
                BEGIN
                    INSERT INTO orders VALUES (50000 + i, repeat('s', 200));
                    IF i % 3 = 0 THEN RAISE division_by_zero; END IF;
                EXCEPTION WHEN division_by_zero THEN NULL; END;
            END LOOP; END $$"""
        )
        small.execute("INSERT INTO orders VALUES (1000000, 'between')")
        fill(two, 60_000)
        if streams(server):
            wait_spooled(capture)
        wait_for(log.committed_lsn, 30, "the small one")
        before = log.replica_status()
        two.rollback()
        if streams(server):
            wait_for(lambda: len(spool_files(capture)) == 1, 30, "one is left")
        assert log.replica_status().last_end_lsn == before.last_end_lsn
        # A table that is altered inside: the rows behind it have its new column.
        fill(one, 80_000)
        one.execute("ALTER TABLE orders ADD COLUMN kept text")
        fill(one, 90_000)
        one.commit()
        small.execute("INSERT INTO orders VALUES (1000001, 'after', 'kept')")
    found = check_equal(log, server.dsn())
    wait_empty(capture)
    assert len(found.keys["orders"]) == 4 * 2000 + 2000 + 400 + 2
    # Its commit came last but one, and all of it is in one piece: `content` saw no other inside.
    assert found.keys["orders"][0] == 1000000
    assert capture.stop() == 0
    assert not list(capture.spool.iterdir())


@each_major
def test_30_a_transaction_that_the_server_cannot_stream_comes_when_it_has_committed(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    """PostgreSQL's own fault: an ALTER TABLE rolled back, and another kept, in a streamed transaction."""
    with psycopg.connect(server.dsn()) as large:
        fill(large, 0)
        with large.transaction(force_rollback=True):
            large.execute("ALTER TABLE orders ADD COLUMN gone text")
            fill(large, 10_000)
        fill(large, 20_000)
        large.execute("ALTER TABLE orders ADD COLUMN kept text")
        fill(large, 30_000)
    found = check_equal(log, server.dsn())
    assert len(found.keys["orders"]) == 6000
    wait_empty(capture)


@pytest.mark.parametrize("rows", [300, 1000])
def test_30_a_streamed_transaction_that_comes_in_one_batch(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess, rows: int
) -> None:
    assert capture.process is not None
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("INSERT INTO orders VALUES (0, 'before')")
        check_equal(log, server.dsn())
        # While capture stands still, all of it gathers in the connection.
        capture.process.send_signal(signal.SIGSTOP)
        with connection.transaction():
            fill(connection, 10, rows)
        time.sleep(1.0)
        capture.process.send_signal(signal.SIGCONT)
    check_equal(log, server.dsn())
    wait_empty(capture)


@each_major
def test_30_prepared_transactions_and_messages(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    with (
        psycopg.connect(server.dsn(), autocommit=True) as connection,
        psycopg.connect(server.dsn(), autocommit=True) as other,
    ):
        for number, size in enumerate((1, 1, 2000, 2000)):
            connection.execute("BEGIN")
            fill(connection, number * 10_000, size)
            connection.execute(f"PREPARE TRANSACTION 'p{number}'".encode())
        if server.installation.major >= 14:
            other.execute("SELECT pg_logical_emit_message(false, 'alone', 'x')")
            with other.transaction():
                other.execute("SELECT pg_logical_emit_message(true, 'inside', '\\xff'::bytea)")
                other.execute("INSERT INTO orders VALUES (1000000, 'small')")
        other.execute("INSERT INTO orders VALUES (1000001, 'small')")
        wait_for(lambda: log.committed_lsn() > 0, 30, "the small ones")
        # Capture starts again between PREPARE and the end: everything is sent again.
        capture.kill()
        for number, end in enumerate(("COMMIT", "ROLLBACK", "COMMIT", "ROLLBACK")):
            connection.execute(f"{end} PREPARED 'p{number}'".encode())
        capture.start()
    found = check_equal(log, server.dsn())
    wait_empty(capture)
    assert len(found.keys["audit"]) == 2001
    kinds = [pgoutput.parse_message(m) for m in log.messages() if m[0] == pgoutput.MESSAGE]
    if server.installation.major >= 14:
        assert [(m.transactional, m.prefix, m.content) for m in kinds] == [
            (False, "alone", b"x"),
            (True, "inside", b"\xff"),
        ]


def test_30_capture_is_killed_in_a_stream_and_in_its_replay(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    with psycopg.connect(server.dsn()) as large:
        fill(large, 0)
        wait_spooled(capture)
        capture.kill()
        assert spooled(capture)
        dead = next(capture.spool.iterdir())
        capture.start()
        fill(large, 10_000)
        # The dead session's files are removed, and everything is sent again.
        wait_for(lambda: not dead.exists(), 30, "the dead session's folder is gone")
        wait_spooled(capture)
        assert log.replica_status().end_offset == 1
        # 40 MB of noise: some entries in the log, and the transaction not at its end.
        large.execute(
            "INSERT INTO orders SELECT 100000 + g, (SELECT string_agg(md5(random()::text), '')"
            " FROM generate_series(1, 120 + 0 * g)) FROM generate_series(1, 10000) g"
        )
        large.commit()
    kills = 0
    while kills < 2:
        status = log.replica_status()
        assert status.committed_end == 1
        if status.end_offset - status.committed_end >= 2:
            capture.kill()
            kills += 1
            assert content(log).keys["orders"] == []
            capture.start()
            _wait_writer(log, status.term)
    found = check_equal(log, server.dsn())
    assert len(found.ends) <= 2  # it, and the flush table's
    wait_empty(capture)


def _wait_writer(log: ChangeLog, term: int) -> None:
    wait_for(lambda: log.replica_status().term > term, 30, "the next writer")


def test_30_the_server_is_killed_in_a_stream_and_in_its_replay(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    large = psycopg.connect(server.dsn())
    fill(large, 0)
    wait_spooled(capture)
    server.kill()
    large.close()
    # It never committed.
    wait_empty(capture)
    server.start()
    with psycopg.connect(server.dsn()) as large:
        fill(large, 10_000)
        large.execute(
            "INSERT INTO orders SELECT 100000 + g, (SELECT string_agg(md5(random()::text), '')"
            " FROM generate_series(1, 120 + 0 * g)) FROM generate_series(1, 10000) g"
        )
        large.commit()
        wait_for(lambda: log.replica_status().end_offset > 2, 60, "its replay has begun")
        server.kill()
    server.start()
    found = check_equal(log, server.dsn())
    assert len(found.keys["orders"]) == 12_000
    wait_empty(capture)


#: Bytes on disk for each byte of a large transaction: the server's heap and WAL, the spool, and some for the log.
DISK = 3.5


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "megabytes",
    [
        60,
        pytest.param(300, marks=pytest.mark.long),
        pytest.param(scaled(5000), marks=pytest.mark.long, id="5000"),
    ],
)
def test_30_a_large_transaction_takes_little_of_captures_memory(
    tmp_path: Path, log: ChangeLog, server: LocalServer, megabytes: int
) -> None:
    need_disk(tmp_path, DISK * megabytes)
    with (
        CaptureProcess(
            tmp_path, log, server.dsn(), *TABLES, spool_limit=2 * megabytes << 20
        ) as capture,
        psycopg.connect(server.dsn(), autocommit=True) as connection,
    ):
        wait_for(capture.streams, 30, "capture streams")
        # As long on disk and in the WAL as in the stream.
        connection.execute("ALTER TABLE orders ALTER pad SET STORAGE EXTERNAL")
        connection.execute("INSERT INTO orders VALUES (0, 'warm')")
        wait_for(log.committed_lsn, 30, "the first one")
        before, began = resident(capture), time.monotonic()
        with connection.transaction():
            connection.execute(
                "INSERT INTO orders SELECT g, repeat(md5(g::text), 320) FROM generate_series(1, %s) g",
                [megabytes * 100],
            )
            spooled = wait_for(
                lambda: spooled_bytes(capture, megabytes << 19), 600, "it is spooled"
            )
        inserted = time.monotonic() - began
        check_equal(log, server.dsn(), 200 + megabytes / 5)
        grown = resident(capture) - before
        wait_empty(capture)
    print(
        f"{megabytes} MB: {inserted:.0f} s until it committed, {time.monotonic() - began:.0f} s until the log "
        f"was compared; {spooled >> 20} MiB spooled before; capture had {before >> 20} MiB, and {grown >> 20} "
        "MiB more at the most"
    )
    assert grown < 32 << 20


def spooled_bytes(capture: CaptureProcess, least: int) -> int:
    """What the spool has on disk, if that is no less."""
    assert capture.process is not None
    assert capture.process.poll() is None, capture.output.read_text()
    found = sum(file.stat().st_size for file in spool_files(capture))
    return found if found >= least else 0


def resident(capture: CaptureProcess) -> int:
    """The most memory that the process has had, in bytes."""
    assert capture.process is not None
    return of_process(capture.process.pid, "VmHWM") << 10


def test_a_spool_past_its_limit_is_a_named_error_and_the_server_can_do_without_one(
    tmp_path: Path, log: ChangeLog, server: LocalServer
) -> None:
    with CaptureProcess(tmp_path, log, server.dsn(), *TABLES, spool_limit=100_000) as capture:
        wait_for(capture.streams, 30, "capture streams")
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            fill(connection, 0)
        assert capture.wait() == Cause.SPOOL
        assert "spool_limit" in capture.output.read_text()
        assert not spool_files(capture)
    with CaptureProcess(tmp_path, log, server.dsn(), *TABLES, spool_limit=0):
        check_equal(log, server.dsn())


def test_a_spool_that_cannot_be_written_is_a_named_error(
    tmp_path: Path, log: ChangeLog, server: LocalServer
) -> None:
    capture = CaptureProcess(tmp_path, log, server.dsn(), *TABLES)
    capture.spool.write_text("not a folder")
    with capture:
        assert capture.wait() == Cause.SPOOL
        assert str(capture.spool) in capture.output.read_text()


def test_an_idle_database_on_a_busy_server_holds_back_no_wal(
    tmp_path: Path, log: ChangeLog, database: Database
) -> None:
    """The other database writes 50 MB; nothing happens in this one."""
    with database.connect() as connection:
        make_tables(connection)
        with CaptureProcess(tmp_path, log, database.dsn, *TABLES) as capture:
            wait_for(capture.streams, 30, "capture streams")
            start = wal_end(connection)
            with psycopg.connect(database.server.dsn(), autocommit=True) as busy:
                busy.execute(
                    "CREATE TABLE busy AS SELECT repeat(md5(g::text), 30) AS pad"
                    " FROM generate_series(1, 50000) g"
                )
                busy.execute("DROP TABLE busy")
                end = wal_end(busy)
                assert end - start > 50_000_000
                _wait_confirmed(connection)
                # restart_lsn follows at records of the transactions that run: a checkpoint writes one.
                for _ in range(2):
                    busy.execute("CHECKPOINT")
                    _wait_confirmed(connection)
            assert slot_lsn(connection, "restart_lsn") - start > 50_000_000
            assert log.replica_status().end_offset == 1


def _wait_confirmed(connection: psycopg.Connection[Any]) -> None:
    end = wal_end(connection)
    wait_for(lambda: slot_lsn(connection) >= end, 30, "the slot is confirmed")


def test_30_a_prepared_transaction_is_whole_after_a_trim_and_a_snapshot(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    """The log's beginning goes while it is prepared; a copy waits for it, and then has all of it."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for number, size in enumerate((1, 2000)):
            connection.execute("BEGIN")
            fill(connection, number * 10_000, size)
            connection.execute(f"PREPARE TRANSACTION 'p{number}'".encode())
        connection.execute("INSERT INTO orders VALUES (1000000, 'trimmed')")
        wait_for(log.committed_lsn, 30, "the log has the small one")
        told = (
            r"waits for the prepared transaction 'p[01]' of database postgres, which is \d+ s old"
        )
        with pytest.raises(DeadlineError, match=told) as raised:
            ExportedSnapshot(server.dsn(), timeout=1.0)
        assert "COMMIT PREPARED 'p" in raised.value.repair
        log.stop_repository()
        log.retention = 0.1
        log.start_repository()
        wait_for(lambda: log.replica_status().low_offset > 1, 30, "the log is trimmed")
        log.stop_repository()
        log.retention = 3600.0
        log.start_repository()
        capture.kill()
        capture.start()
        for number in range(2):
            connection.execute(f"COMMIT PREPARED 'p{number}'".encode())
        with ExportedSnapshot(server.dsn(), timeout=30.0) as snapshot:
            copied_to = snapshot.lsn
            with reading(server.dsn(), snapshot.snapshot) as copy:
                copied = sorted(
                    key for (key,) in copy.execute("SELECT id FROM public.orders").fetchall()
                )
        wait_for(lambda: len(content(log).keys["orders"]) == 2001, 30, "both are in the log")
        found = content(log)
    assert copied == sorted([1000000, *found.keys["orders"]])
    assert max(found.ends) <= copied_to
    wait_empty(capture)
