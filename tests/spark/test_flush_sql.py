"""FLUSH and SYNC from SQL sessions, with a real log, capture and driver."""

import copy
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg
import pytest

from spark_consumers import Source, read
from spark_consumers.lake import flush_service
from spark_consumers.lake.flush import check_token, sync
from spark_consumers.lake.flush_service import FlushService
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.capture_stack import PUBLICATION, STREAM, CaptureProcess
from tests.support.lake_check import assert_equal
from tests.support.lake_pipeline import Pipeline
from tests.support.servers import MAJORS_IN_TURN, Database, majors
from tests.support.slot_failover import several
from tests.support.stack import Stack
from tests.support.waiting import wait_for
from tests.support.wal_server import backup, follow, promote, replayed, run
from walsender_bridge.capture.gate.core import Rule
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.provisioning.init import init

TEN = 10


@dataclass(frozen=True)
class Both(Database):
    """A database of a primary or its standby, whichever takes writes."""

    either: str

    @property
    def dsn(self):
        return self.either


@contextmanager
def serving(pipeline, house=None):
    """The service beside a driver, which connects to the source."""
    house = house or pipeline.house
    sources = [Source(STREAM, pipeline.database.dsn, PUBLICATION)]
    where = str(pipeline.lake), pipeline.log.address, sources
    with FlushService(*where, lambda: house.is_writer):
        wait_for(lambda: listens(pipeline), 20, "the driver listens")
        yield
    wait_for(lambda: not listens(pipeline), 20, "the driver has left")


@contextmanager
def driving(pipeline):
    """The driver's loop and the service, as `tuskline lake run` has them."""
    stop = threading.Event()
    thread = threading.Thread(target=pipeline.house.run, args=(stop,))
    thread.start()
    try:
        with serving(pipeline):
            yield
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def listens(pipeline):
    if not open_chain(pipeline.lake).exists():
        return False
    with pipeline.database.connect() as connection:
        query = "SELECT count(*) FROM pg_stat_activity AS a JOIN tuskline.lakes AS l ON l.driver = a.pid WHERE l.lake = %s"
        return connection.execute(query, [lake_id(pipeline)]).fetchone()[0] > 0


def lake_id(pipeline):
    return open_chain(pipeline.lake).identity()["lake"]


def resident():
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def stage(pipeline):
    """What the driver says that a wait is at."""
    with pipeline.database.connect() as connection:
        query = "SELECT stage FROM tuskline.lakes WHERE lake = %s"
        return connection.execute(query, [lake_id(pipeline)]).fetchone()[0]


@contextmanager
def waits_for_capture(pipeline, timeout="90s"):
    """A session that waits for the capture, which stops: its process, and what it will have."""
    pipeline.capture.__exit__(None, None, None)
    with (
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(pipeline.database.dsn, autocommit=True) as session,
    ):
        token = insert(session, 1000)
        wait = pool.submit(session.execute, "CALL tuskline.wait_flush(%s, %s)", [token, timeout])
        wait_for(lambda: stage(pipeline) == "capture", 20, "the round waits for the capture")
        yield session.info.backend_pid, wait


def epochs(pipeline):
    """The numbers of the epochs that were published."""
    return sorted({link.epoch for link in open_chain(pipeline.lake).links()})


@pytest.fixture
def attached(pipeline, database):
    """The pipeline, over a database that `init` has prepared."""
    source = CaptureSource(STREAM, database.dsn, f"tuskline_{STREAM}", PUBLICATION)
    init(source)
    return pipeline


def synced(primary, standby):
    """Whether the standby has the slot of capture."""
    run(primary, "SELECT pg_log_standby_snapshot()")
    query = "SELECT synced AND NOT temporary FROM pg_replication_slots WHERE slot_name = 'tuskline_shop'"
    found = run(standby, query)
    return bool(found and found[0][0])


def insert(connection, key):
    with connection.transaction():
        connection.execute("INSERT INTO docs (id, title) VALUES (%s, 'sql')", [key])
        return connection.execute("SELECT tuskline.flush_token()").fetchone()[0]


def held(database, token, timeout="6s", call="wait_flush"):
    """What the error at the timeout says holds the transaction back."""
    with database.connect() as connection:
        with pytest.raises(psycopg.Error) as caught:
            connection.execute(f"CALL tuskline.{call}(%s, %s)", [token, timeout])
        assert caught.value.sqlstate == "TK001", caught.value
        assert caught.value.diag.message_hint
        return caught.value.diag.message_detail


def test_8_ten_sessions_that_wait_at_once_make_one_epoch(attached, database):
    with driving(attached):
        with ThreadPoolExecutor(TEN) as pool:
            connections = [database.connect() for _ in range(TEN)]
            tokens = [insert(each, 1000 + n) for n, each in enumerate(connections)]
            before = epochs(attached)
            together = threading.Barrier(TEN)

            def wait(number):
                together.wait()
                connections[number].execute("CALL tuskline.wait_flush(%s)", [tokens[number]])
                return read(attached.spark, attached.lake).epoch

            seen = list(pool.map(wait, range(TEN)))
        after = epochs(attached)
        assert len(after) == len(before) + 1, (before, after)
        assert set(seen) == {after[-1]}
        assert_equal(database.dsn, read(attached.spark, attached.lake))
        for each in connections:
            each.close()


@pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True)
def test_34_a_wait_on_an_idle_system_is_short_and_leaves_it_idle(attached, database):
    with driving(attached), database.connect() as connection:
        insert(connection, 1000)
        connection.execute("CALL tuskline.wait_flush()")
        with LogClient(attached.log.address) as log:
            began = time.monotonic()
            token = insert(connection, 1001)
            connection.execute("CALL tuskline.wait_flush(%s)", [token])
            seconds = time.monotonic() - began
            print(f"insert to readable: {seconds:.2f} s")
            assert seconds < 15
            assert read(attached.spark, attached.lake)["docs"].where("id = 1001").count() == 1
            published, version = epochs(attached), log.status().version
            # Neither the report nor the wait causes another version or epoch.
            time.sleep(4)
            assert (epochs(attached), log.status().version) == (published, version)
            # A row that was deleted by mistake is back with the next wait.
            database.execute("DELETE FROM tuskline.lakes")
            connection.execute("CALL tuskline.wait_flush(%s, '20s')", [insert(connection, 1002)])
            published = epochs(attached)
            # What is readable already costs no epoch.
            connection.execute("CALL tuskline.wait_flush(%s, '2s')", [token])
            assert epochs(attached) == published


def test_9_a_sync_forces_nothing(attached, database):
    sources = [Source(STREAM, database.dsn, PUBLICATION)]
    with serving(attached), database.connect() as connection:
        token = insert(connection, 1000)
        assert check_token(token, sources) == STREAM
        before = epochs(attached)
        with ThreadPoolExecutor(2) as pool, database.connect() as waiting:
            waits = [
                pool.submit(waiting.execute, "CALL tuskline.wait_sync(%s)", [token]),
                pool.submit(sync, str(attached.lake), sources, timeout=60),
            ]
            for _ in range(8):
                attached.house.run_once()
                time.sleep(0.25)
            assert not any(each.done() for each in waits)
            assert epochs(attached) == before
            attached.house.run_once(force=True)
            for each in waits:
                each.result(20)
        assert len(epochs(attached)) == len(before) + 1
        assert_equal(database.dsn, read(attached.spark, attached.lake))


def test_34_the_timeout_names_the_stage_and_the_table_that_hold_it_back(attached, database):
    with database.connect() as connection:
        token = insert(connection, 1000)
        assert "driver of it has ever" in held(database, token, "0.5s")
        with driving(attached):
            connection.execute("CALL tuskline.wait_flush(%s)", [token])
            database.execute(
                "CREATE TABLE late (id int PRIMARY KEY)",
                f"ALTER PUBLICATION {PUBLICATION} ADD TABLE late",
            )
            with psycopg.connect(database.dsn) as blocking:
                # A copy's snapshot waits for the transactions that run.
                blocking.execute("INSERT INTO late VALUES (6)")
                told = held(database, insert(connection, 1001), "12s")
                assert f"tables: {STREAM}.public.late" in told
            connection.execute("CALL tuskline.wait_flush()")
            assert read(attached.spark, attached.lake)["late"].count() == 1
            attached.capture.__exit__(None, None, None)
            assert ": capture: " in held(database, insert(connection, 1002))
        assert "driver is not connected" in held(database, insert(connection, 1003), "1s")


def test_34_a_wait_goes_on_with_the_driver_that_follows(attached, database):
    with ExitStack() as stack:
        with driving(attached):
            _, wait = stack.enter_context(waits_for_capture(attached))
        attached.house.close()
        attached.house = attached.lakehouse()
        attached.capture.__enter__()
        assert not wait.done()
        with driving(attached):
            wait.result(60)
            assert_equal(database.dsn, read(attached.spark, attached.lake))


def test_34_a_session_that_ends_while_it_waits_leaves_nothing_behind(attached, database):
    def rounds():
        # The listener has the name, too.
        return sum(each.name == f"flush-{STREAM}" for each in threading.enumerate()) - 1

    def sessions():
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        return set(connection.execute(query).fetchall())

    with driving(attached), database.connect() as connection:
        attached.capture.__exit__(None, None, None)
        wait_for(lambda: len(sessions()) == 1, 20, "the listener alone is connected")
        before = sessions()
        with waits_for_capture(attached) as (pid, wait):
            assert rounds() == 1
            connection.execute("SELECT pg_terminate_backend(%s)", [pid])
            with pytest.raises(psycopg.errors.AdminShutdown):
                wait.result(10)
        wait_for(lambda: rounds() == 0, 20, "the round has ended")
        wait_for(lambda: sessions() == before, 20, "its connections are closed")
        assert connection.execute("SELECT count(*) FROM tuskline.lakes").fetchone() == (1,)
        published = epochs(attached)
        attached.capture.__enter__()
        time.sleep(3)
        # Nobody waits for an epoch any more.
        assert epochs(attached) == published
        connection.execute("CALL tuskline.wait_flush()")
        assert_equal(database.dsn, read(attached.spark, attached.lake))


def test_34_of_two_lakes_over_a_source_both_are_waited_for_or_the_one_that_is_named(
    attached, database, tmp_path
):
    second = copy.copy(attached)
    second.lake = tmp_path / "second"
    second.house = second.lakehouse()
    second.wait_for_tables("docs", "pairs", "bag")
    first_id, second_id = lake_id(attached), lake_id(second)
    with driving(attached), database.connect() as connection:
        with serving(second):
            token = insert(connection, 1000)
            named = "CALL tuskline.wait_flush(%s, '60s', %s)"
            connection.execute(named, [token, first_id])
            assert read(attached.spark, attached.lake)["docs"].where("id = 1000").count() == 1
            told = held(database, token)
            assert second_id in told
            assert first_id not in told
        with driving(second):
            connection.execute("CALL tuskline.wait_flush(%s)", [token])
            for lake in (attached.lake, second.lake):
                assert_equal(database.dsn, read(attached.spark, lake))


@contextmanager
def flooding(*floods):
    """Each runs again and again, `flood(turn)`, with pauses: the server itself needs more than a core for what is sent without one."""
    stop, turns = threading.Event(), [0] * len(floods)

    def run_one(number):
        while not stop.is_set():
            floods[number](turns[number])
            turns[number] += 1
            stop.wait(0.2)

    with ThreadPoolExecutor(len(floods)) as pool:
        running = [pool.submit(run_one, number) for number in range(len(floods))]
        try:
            yield turns
        finally:
            stop.set()
        for each in running:
            each.result(60)


@contextmanager
def stranger(database):
    """Connections of a role that may not write."""
    role = f"{database.name}_stranger"
    database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'")
    try:
        yield lambda: psycopg.connect(database.dsn, user=role, password="secret", autocommit=True)
    finally:
        database.execute(f"DROP ROLE {role}")


def timed_wait(connection, key):
    """Seconds."""
    token, began = insert(connection, key), time.monotonic()
    connection.execute("CALL tuskline.wait_flush(%s, '240s')", [token])
    return time.monotonic() - began


def most_epochs(waits):
    """How many epochs waits of these seconds may have written: a round ends when nothing has been heard of its sessions for five seconds."""
    return sum(1 + int(seconds // 5) for seconds in waits)


@pytest.mark.long
def test_34_a_flood_of_notifications_delays_no_wait_and_no_epoch(attached, database):
    """By a role that may not write, on channels that it can guess: what a listener has to read would delay the requests behind it."""
    floods = [
        "SELECT pg_notify('tuskline_flush', 'flush ' || g + {0}) FROM generate_series(1, 20000) AS g",
        "SELECT pg_notify('tuskline_requests', repeat('x', 7000) || g + {0}) FROM generate_series(1, 2000) AS g",
    ]
    heard, hear = [], flush_service._heard

    def counted(*arguments):
        heard.append(hear(*arguments))
        return heard[-1]

    def flood(number, turn):
        sessions[number].execute(floods[number].format(20000 * turn).encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            sessions[number].execute("CALL tuskline.wait_flush()")

    with stranger(database) as connect, connect() as one, connect() as two:
        sessions = [one, two]
        with driving(attached), database.connect() as connection:
            alone = [timed_wait(connection, 1000 + n) for n in range(2)]
            published = epochs(attached)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(flush_service, "_heard", counted)
                with flooding(partial(flood, 0), partial(flood, 1)) as turns:
                    wait_for(lambda: min(turns) >= 5, 60, "both floods run")
                    assert epochs(attached) == published
                    flooded = [timed_wait(connection, 1100 + n) for n in range(2)]
                    assert min(turns) >= 5
            # Nothing of the floods reaches the driver.
            assert {pid for each in heard for pid, _ in each} == {connection.info.backend_pid}
            assert len(epochs(attached)) - len(published) <= most_epochs(flooded)
            print(f"waits: alone {alone}, flooded {flooded}; sent {turns}")
            assert max(flooded) < 60
            queue = "SELECT pg_notification_queue_usage() < 0.0001"
            wait_for(lambda: connection.execute(queue).fetchone()[0], 20, "the queue is read")


@pytest.mark.long
def test_34_a_flood_on_the_channel_itself_takes_no_memory_and_delays_no_wait(attached, database):
    """By one that knows the channel: what is not read would be before the requests of others, and make them end at their timeouts."""
    with database.connect() as connection:
        (channel,) = connection.execute("SELECT tuskline.request_channel()").fetchone()

    def flood(payload, rows, turn):
        query = f"SELECT pg_notify(%s, {payload} || g + {rows * turn}) FROM generate_series(1, {rows}) AS g"
        session.execute(query, [channel])

    def both(turn):
        flood("'flush '", 20000, turn)
        flood("repeat('x', 7000)", 2000, turn)

    with (
        stranger(database) as connect,
        connect() as session,
        driving(attached),
        database.connect() as connection,
    ):
        timed_wait(connection, 1000)
        published, used = epochs(attached), resident()
        with flooding(both) as turns:
            wait_for(lambda: turns[0] >= 5, 60, "the flood runs")
            flooded = [timed_wait(connection, 1100 + n) for n in range(3)]
            grown = resident() - used
        print(f"waits: flooded {flooded}; sent {turns}; grown {grown >> 20} MiB")
        assert max(flooded) < 200
        assert grown < 100 << 20
        assert len(epochs(attached)) - len(published) <= most_epochs(flooded)
        queue = "SELECT pg_notification_queue_usage() < 0.0001"
        wait_for(lambda: connection.execute(queue).fetchone()[0], 60, "the queue is read")


def test_34_a_wait_outlives_the_walsender_and_the_connections_of_the_driver(attached, database):
    """All that Tuskline has at the server is terminated in mid-wait, as an administrator or a restart does."""
    others = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        " AND pid <> pg_backend_pid() AND pid <> %s"
    )
    with (
        driving(attached),
        database.connect() as connection,
        waits_for_capture(attached) as (pid, wait),
    ):
        assert connection.execute(others, [pid]).rowcount >= 1
        attached.capture.__enter__()
        wait_for(attached.capture.streams, 60, "capture streams")
        # The walsender among them.
        connection.execute(others, [pid])
        wait.result(60)
        assert_equal(database.dsn, read(attached.spark, attached.lake))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_34_a_wait_ends_at_its_timeout_or_goes_on_when_its_driver_is_killed_or_suspended(
    spark, tmp_path, database
):
    """`lake run` as a process: SIGSTOP, SIGKILL, and another one, which a supervisor starts."""
    database.execute("CREATE TABLE docs (id int PRIMARY KEY, title text)")
    with Stack(tmp_path, {STREAM: database.dsn}, epoch_interval=3600) as stack:
        assert stack.cli("init").returncode == 0
        stack.start("log-server", "bridge", "lake")
        with database.connect() as connection, ThreadPoolExecutor(2) as pool:
            connection.execute("CALL tuskline.wait_flush(NULL, '180s')")

            def waits(key, timeout):
                """What a session that waits for its insert will have."""
                session = stack_sessions.enter_context(database.connect())
                token = insert(session, key)
                return pool.submit(
                    session.execute, "CALL tuskline.wait_flush(%s, %s)", [token, timeout]
                )

            with ExitStack() as stack_sessions:
                stack.signal("lake", signal.SIGSTOP)
                short, long = waits(1, "12s"), waits(2, "240s")
                with pytest.raises(psycopg.Error) as caught:
                    short.result(60)
                assert caught.value.sqlstate == "TK001"
                assert "is connected, but has not answered for" in str(caught.value)
                assert "lake run" in str(caught.value)
                stack.signal("lake", signal.SIGCONT)
                long.result(60)
                stack.signal("lake", signal.SIGSTOP)
                short, long = waits(3, "4s"), waits(4, "240s")
                stack.kill("lake")
                with pytest.raises(psycopg.Error) as caught:
                    short.result(60)
                assert caught.value.sqlstate == "TK001"
                assert "driver is not connected" in str(caught.value)
                assert not long.done()
                stack.start("lake")
                long.result(180)
            assert read(spark, stack.lake)["docs"].count() == 4


@pytest.mark.skipif(18 not in majors(), reason="PostgreSQL 18 synchronizes slots by itself")
def test_34_a_token_from_before_a_failover_is_waited_for_on_the_promoted_standby(
    spark, tmp_path, make_server
):
    primary = make_server(18, fsync="off")
    primary.start()
    run(primary, "CREATE TABLE docs (id int PRIMARY KEY, title text)")
    run(primary, "SELECT pg_create_physical_replication_slot('standby_a', true)")
    standby = backup(primary, primary.folder.with_name("standby"), wal="fetch")
    follow(
        standby,
        primary.dsn(),
        primary_slot_name="standby_a",
        hot_standby_feedback="on",
        sync_replication_slots="on",
    )
    standby.start()
    with ExitStack() as stack:
        stack.callback(standby.destroy)
        database = Both("postgres", primary, several(primary, standby))
        init(CaptureSource(STREAM, primary.dsn(), f"tuskline_{STREAM}", PUBLICATION))
        pipeline = Pipeline(spark, tmp_path, database, ("public.docs",))
        gate = Rule(("standby_a",))
        pipeline.capture = CaptureProcess(
            tmp_path, pipeline.log, database.dsn, "public.docs", gate=gate
        )
        stack.enter_context(pipeline)
        with driving(pipeline):
            wait_for(lambda: synced(primary, standby), 90, "the slot is on the standby")
            with psycopg.connect(primary.dsn(), autocommit=True) as connection:
                token = insert(connection, 1)
                end = parse_lsn(run(primary, "SELECT pg_current_wal_insert_lsn()")[0][0])
            wait_for(lambda: replayed(standby) >= end, 30, "the standby has it")
            primary.kill()
            promote(standby)
            with psycopg.connect(standby.dsn(), autocommit=True) as connection:
                # Capture and driver find the new primary while the session waits.
                connection.execute("CALL tuskline.wait_flush(%s, '90 s')", [token])
                assert read(spark, pipeline.lake)["docs"].count() == 1
                position = pipeline.head().streams[STREAM]
                assert position.timeline == 2
