"""A copy in chunks whose driver is suspended, whose disk fills, and whose server is replaced, in the middle of a chunk."""

import contextlib
import os
import signal
import subprocess
import threading
from contextlib import ExitStack, suppress
from pathlib import PurePath

import psycopg
import pytest
from psycopg.errors import UniqueViolation

from spark_consumers import Lakehouse, Source, read
from spark_consumers.lake.copy import bootstrap
from spark_consumers.lake.flush import flush
from spark_consumers.lake.format.iceberg import IcebergFormat
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.writer import table_work
from tests.spark.test_copy_chunks import CHUNK, NAME, TABLES, changes, pipeline_of, step_of
from tests.spark.test_copy_failover import CANDIDATE, servers, synced
from tests.support.capture_stack import PUBLICATION, STREAM, CaptureProcess, ChangeLog
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.servers import majors
from tests.support.slot_failover import several
from tests.support.small_disk import fill, mounted
from tests.support.stack import Stack
from tests.support.waiting import wait_for
from tests.support.wal_server import promote
from walsender_bridge.capture.gate.core import Rule
from walsender_bridge.errors import Cause, TusklineError, UnavailableError

__all__ = ["servers"]
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
#: Bytes a second, with which a chunk takes seconds.
RATE = 150_000


@contextlib.contextmanager
def loaded(database):
    """Changes in all chunks, for as long as the block lasts."""
    stop = threading.Event()

    def load():
        turn = 0
        with database.connect() as connection:
            while not stop.wait(0.2):
                turn += 1
                for statement in changes(turn % 90):
                    with suppress(UniqueViolation):
                        connection.execute(statement)

    writer = threading.Thread(target=load)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def processes_of(pid):
    """The process and all below it."""
    found = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    lines = (line.split() for line in found.stdout.splitlines())
    parents = {int(child): int(parent) for child, parent in lines}
    below = [pid]
    for each in below:
        below += [child for child, parent in parents.items() if parent == each]
    return below


def head_of(stack):
    """The newest link."""
    found = open_chain(stack.lake).head()
    assert found is not None
    return found


def chunks_of(lake):
    """How many chunks of the table the newest link has; None: it is no partial copy."""
    head = open_chain(lake).head()
    copy = head.copies.get(NAME) if head is not None else None
    return len(copy.chunks) if copy is not None and copy.is_partial else None


@pytest.mark.parametrize("whole", [False, True], ids=["the driver alone", "its JVM, too"])
def test_a_driver_that_slept_in_a_chunk_ends_and_the_next_one_s_copy_is_the_table(
    tmp_path, database, spark, whole
):
    database.execute(*TABLES)
    settings = f"copy_chunk_bytes = {CHUNK}\ncopy_rate = {RATE}\n"
    source = Source(STREAM, database.dsn, f"tuskline_{STREAM}")
    with Stack(tmp_path, {STREAM: database.dsn}, epoch_interval=0.5, lake=settings) as stack:
        stack.start("log-server", "bridge", "lake")
        with loaded(database):
            before = wait_for(lambda: chunks_of(stack.lake), 240, "a chunk")
            driver = stack.pid("lake")
            asleep = processes_of(driver) if whole else [driver]
            for pid in asleep:
                os.kill(pid, signal.SIGSTOP)
            newer = Lakehouse(
                spark,
                stack.lake,
                stack.log_address,
                [source],
                epoch_interval=0.5,
                copy_chunk_bytes=CHUNK,
                copy_rate=RATE,
            )
            stop = threading.Event()
            running = threading.Thread(target=newer.run, args=(stop,))
            running.start()
            try:
                wait_for(
                    lambda: (chunks_of(stack.lake) or 0) > before or NAME in head_of(stack).tables,
                    240,
                    "the newer driver's chunk",
                )
                for pid in asleep:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                assert stack.wait("lake", 180) == Cause.FENCED
                wait_for(lambda: NAME in head_of(stack).tables, 300, "the whole table")
            finally:
                for pid in asleep:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                stop.set()
                running.join(120)
            assert not running.is_alive()
        stack.start("lake")
        flush(stack.lake, stack.log_address, [source], timeout=240)
        assert stack.stop("lake") == 0
        assert_equal(database.dsn, read(spark, stack.lake))
        assert_no_orphans(spark, stack.lake)


def test_a_disk_that_fills_in_a_chunk_costs_that_chunk_alone(
    tmp_path, database, spark, monkeypatch
):
    lake = tmp_path / "lake"
    lake.mkdir()
    # From which chunk on each attempt began.
    begun: list[int] = []
    monkeypatch.setattr(bootstrap, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(table_work, "_NOT_BEGUN", 0.5)
    with mounted(lake, "-o", "size=80m"), pipeline_of(spark, tmp_path, database) as pipeline:
        ballast, full = lake / "ballast", threading.Event()

        def step(before, _chunk, read_it):
            begun.append(len(before.chunks))
            if len(before.chunks) == 2 and not full.is_set():
                assert fill(ballast) > 1 << 20
                full.set()
            database.execute(*changes(len(begun)))
            return read_it()

        step_of(monkeypatch, step)
        house = pipeline.lakehouse(copy_chunk_bytes=CHUNK)

        failed: list[Exception] = []

        def rounds():
            # A full disk fails rounds as well, each by name.
            try:
                house.run_once(force=True)
            except (OSError, TusklineError) as error:
                failed.append(error)

        wait_for(lambda: rounds() or full.is_set(), 240, "the disk is full")
        wait_for(lambda: rounds() or len(failed) > 3, 120, "rounds fail")
        assert all("No space left" in str(error) for error in failed)
        ballast.unlink()
        wait_for(lambda: rounds() or NAME in pipeline.head().readable, 300, "the table")
        assert_equal(database.dsn, pipeline.flush(house))
        assert begun.count(0) == begun.count(1) == 1
        assert_no_orphans(spark, pipeline.lake)


def test_a_chunk_that_fails_again_and_again_leaves_no_files(tmp_path, database, spark, monkeypatch):
    """Each attempt would leave as many bytes as a chunk has, until the disk is full."""
    monkeypatch.setattr(bootstrap, "SNAPSHOT_SECONDS", 0.0)
    really, failures = IcebergFormat.write, 3
    # Data files when an attempt at the third chunk begins, and those of its chunks.
    found: list[tuple[set[str], set[str]]] = []
    with pipeline_of(spark, tmp_path, database) as pipeline:
        house = pipeline.lakehouse(copy_chunk_bytes=CHUNK)

        def step(before, _chunk, read_it):
            if len(before.chunks) == 2:
                folder = pipeline.lake / before.path
                files = house._format.scan(str(folder), before.snapshot_id)
                there = {file.name for file in (folder / "data").glob("copy-t*.parquet")}
                found.append((there, {PurePath(file.path).name for file in files}))
            return read_it()

        def write(self, path, term, made):
            if "events" in path and 1 <= len(found) <= failures:
                raise UnavailableError("the store does not answer")
            return really(self, path, term, made)

        monkeypatch.setattr(IcebergFormat, "write", write)
        step_of(monkeypatch, step)
        wait_for(
            lambda: house.run_once(force=True) and NAME in pipeline.head().readable,
            300,
            "the table",
        )
        assert len(found) == failures + 1
        assert all(there == wanted for there, wanted in found)
        assert_equal(database.dsn, pipeline.flush(house))
        assert_no_orphans(spark, pipeline.lake)


@pytest.mark.skipif(18 not in majors(), reason="PostgreSQL 18 synchronizes slots by itself")
def test_a_standby_that_is_promoted_in_a_chunk_begins_the_copy_again(
    tmp_path, spark, servers, monkeypatch
):
    primary, standby = servers
    with psycopg.connect(primary.dsn(), autocommit=True) as connection:
        for statement in TABLES:
            connection.execute(statement)
    standby.start()
    dsn = several(primary, standby)
    monkeypatch.setattr(bootstrap, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(table_work, "_NOT_BEGUN", 0.5)
    moved = threading.Event()
    paths = set()

    with ExitStack() as stack:
        log = stack.enter_context(ChangeLog(tmp_path))
        tables = ("public.orders", "public.events")
        gate = Rule((CANDIDATE,))
        capture = CaptureProcess(tmp_path, log, dsn, *tables, gate=gate)
        stack.enter_context(capture)
        wait_for(capture.streams, 60, "capture streams")
        with psycopg.connect(primary.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO orders VALUES (1, 'x')")
        wait_for(lambda: log.committed_lsn() > 0, 30, "it flows")
        wait_for(lambda: synced(primary, standby), 90, "the slot is on the standby")

        def step(before, _chunk, read_it):
            paths.add(before.path)
            if len(before.chunks) == 2 and not moved.is_set():
                primary.kill()
                promote(standby)
                moved.set()
            return read_it()

        step_of(monkeypatch, step)
        source = Source(STREAM, dsn, PUBLICATION)
        house = Lakehouse(
            spark,
            tmp_path / "lake",
            log.address,
            [source],
            epoch_interval=3600,
            copy_chunk_bytes=CHUNK,
        )
        stack.callback(house.close)

        def rounds():
            with suppress(TusklineError, psycopg.Error):
                house.run_once(force=True)

        wait_for(lambda: rounds() or moved.is_set(), 240, "two chunks")
        with psycopg.connect(standby.dsn(), autocommit=True) as connection:
            for statement in changes(7):
                connection.execute(statement)

        def shown():
            rounds()
            head = open_chain(tmp_path / "lake").head()
            return head is not None and NAME in head.readable

        wait_for(shown, 300, "the table")
        with psycopg.connect(standby.dsn(), autocommit=True) as connection:
            connection.execute("UPDATE events SET n = -1 WHERE id % 5 = 0")
        flushing = threading.Event()
        running = threading.Thread(target=house.run, args=(flushing,))
        running.start()
        try:
            flush(tmp_path / "lake", log.address, [source], timeout=120)
        finally:
            flushing.set()
            running.join(60)
        assert len(paths) > 1
        assert_equal(standby.dsn(), read(spark, tmp_path / "lake"))
