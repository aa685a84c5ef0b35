"""Capture on real servers: what arrives in the log, whatever is killed on the way.

Keys are counted, never assumed: `check_equal` compares the log with the tables key by key, and fails on a
doubled, lost or split transaction.
"""

import random
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.capture_stack import (
    CaptureProcess,
    ChangeLog,
    Load,
    check_equal,
    content,
    make_tables,
    slot_lsn,
    wal_end,
)
from tests.support.servers import MAJORS_IN_TURN, MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.demo.local_server import LocalServer


@pytest.fixture
def server(make_server: MakeServer, request: pytest.FixtureRequest) -> LocalServer:
    """A server of the test's own (it is killed), with the two tables."""
    server = make_server(
        getattr(request, "param", 16),
        fsync="off",
        wal_sender_timeout="3s",
        max_wal_size="64MB",
        min_wal_size="32MB",
    )
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
    return server


each_major = pytest.mark.parametrize("server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)


@each_major
def test_27_the_slot_is_confirmed_and_wal_stays_flat_while_no_consumer_runs(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        begin, worst = wal_end(connection), 0
        for number in range(60):
            connection.execute(
                "INSERT INTO orders SELECT %s * 4000 + g, repeat(md5(g::text), 28)"
                " FROM generate_series(1, 4000) g",
                [number],
            )
            if number % 10 == 9:
                connection.execute("CHECKPOINT")
            worst = max(worst, wal_end(connection) - slot_lsn(connection))
        written = wal_end(connection) - begin
        assert written > 200 << 20
        _wait_confirmed(connection)
        # restart_lsn follows the next running-transactions record; then old WAL may go.
        for _ in range(2):
            connection.execute("CHECKPOINT")
            _wait_confirmed(connection)
        kept = connection.execute("SELECT sum(size) FROM pg_ls_waldir()").fetchone()
        assert kept is not None
        assert int(kept[0]) <= 112 << 20, f"{written >> 20} MiB written, {int(kept[0]) >> 20} kept"
        print(f"written {written >> 20} MiB, kept {int(kept[0]) >> 20}, worst lag {worst >> 20}")
    check_equal(log, server.dsn())


def _wait_confirmed(connection: psycopg.Connection[Any]) -> None:
    end = wal_end(connection)
    wait_for(lambda: slot_lsn(connection) >= end, 30, "the slot is confirmed")


@each_major
def test_28_32_nothing_is_lost_or_doubled_when_each_part_is_killed(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    victims = ["capture", "log-server", "server", "repository"] * 2
    rng.shuffle(victims)
    with Load(server.dsn()):
        for victim in victims:
            time.sleep(rng.uniform(0.2, 0.8))
            match victim:
                case "capture":
                    capture.kill()
                    capture.start()
                case "log-server":
                    log.kill_log_server()
                    time.sleep(rng.uniform(0.0, 0.3))
                    log.start_log_server()
                case "server":
                    server.kill()
                    time.sleep(rng.uniform(0.0, 0.3))
                    server.start()
                case _:
                    log.stop_repository()
                    time.sleep(rng.uniform(0.0, 0.3))
                    log.start_repository()
        time.sleep(0.5)
    found = check_equal(log, server.dsn())
    assert len(found.ends) > 100
    # 32: at rest, the last transaction is the one that a reconnect could double.
    for _ in range(3):
        capture.kill()
        capture.start()
        wait_for(capture.streams, 30, "capture streams again")
    again = check_equal(log, server.dsn())
    assert again.ends[: len(found.ends)] == found.ends


def test_30_capture_killed_inside_a_transaction_of_many_entries(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    kills = 0
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("INSERT INTO orders VALUES (0, 'before')")
        wait_for(lambda: log.committed_lsn() > 0, 30, "the small transaction")
        connection.execute(
            "INSERT INTO orders SELECT g, (SELECT string_agg(md5(g::text || i), '')"
            " FROM generate_series(1, 12) i) FROM generate_series(1, 100000) g"
        )
        deadline = time.monotonic() + 60
        while kills < 2 and time.monotonic() < deadline:
            status = log.replica_status()
            if status.end_offset - status.committed_end >= 2:
                capture.kill()
                kills += 1
                assert content(log).keys["orders"] == [0]
                capture.start()
                _wait_term(log, status.term + 1)
    assert kills == 2
    found = check_equal(log, server.dsn())
    assert found.keys["orders"] == list(range(100_001))


def _wait_term(log: ChangeLog, term: int) -> None:
    wait_for(lambda: log.replica_status().term >= term, 30, "the next writer is there")


def test_33_what_the_repository_has_not_committed_is_not_confirmed(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("INSERT INTO orders VALUES (1, 'committed')")
        first = wait_for(log.committed_lsn, 30, "the first transaction")
        wait_for(lambda: slot_lsn(connection) >= first, 30, "the slot")
        log.stop_repository()
        connection.execute("INSERT INTO orders VALUES (2, 'durable only')")
        wait_for(lambda: log.replica_status().last_end_lsn > first, 30, "it is durable")
        before = log.replica_status()
        time.sleep(2.5)
        assert log.replica_status().committed_end == before.committed_end
        assert slot_lsn(connection) < before.last_end_lsn
        log.start_repository()
        wait_for(lambda: slot_lsn(connection) >= before.last_end_lsn, 30, "now it is confirmed")
    check_equal(log, server.dsn())


def test_33_what_a_seal_removes_before_its_commit_is_sent_again(
    tmp_path: Path, server: LocalServer
) -> None:
    """It was durable on both log servers, and the stream goes on with one of them, from its last commit."""
    with (
        ChangeLog(tmp_path, ReplicationPolicy(2, 1, 1.0)) as log,
        CaptureProcess(tmp_path, log, server.dsn(), "public.orders", "public.audit") as capture,
        psycopg.connect(server.dsn(), autocommit=True) as connection,
    ):
        wait_for(capture.streams, 30, "capture streams")
        wait_for(lambda: log.members() == [0, 1], 60, "both log servers are in sync")
        connection.execute("INSERT INTO orders VALUES (1, 'committed')")
        first = wait_for(log.committed_lsn, 30, "the first transaction")
        wait_for(lambda: slot_lsn(connection) >= first, 30, "the slot")
        log.stop_repository()
        connection.execute("INSERT INTO orders VALUES (2, 'durable only')")
        wait_for(lambda: log.replica_status().last_end_lsn > first, 30, "it is durable")
        before = log.replica_status()
        capture.kill()
        log.kill_log_server(1)
        log.start_repository()
        wait_for(lambda: log.replica_status().term > before.term, 30, "the stream is sealed")
        after = log.replica_status()
        assert after.end_offset == after.committed_end == before.committed_end < before.end_offset
        assert slot_lsn(connection) < before.last_end_lsn
        # The repository, which is new, issues no version until it has heard both.
        log.start_log_server(1)
        capture.start()
        wait_for(lambda: slot_lsn(connection) >= before.last_end_lsn, 60, "now it is confirmed")
        assert sorted(check_equal(log, server.dsn()).keys["orders"]) == [1, 2]


@pytest.mark.long
@pytest.mark.parametrize("server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)
def test_keepalives_are_answered_while_the_log_server_hangs(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    query = "SELECT pid FROM pg_stat_replication WHERE application_name = 'tuskline-capture-shop'"
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        before = connection.execute(query).fetchall()
        assert len(before) == 1
        log.signal_log_server(signal.SIGSTOP)
        try:
            # More than the queue takes in one go, and longer than wal_sender_timeout (3 s).
            for number in range(12):
                connection.execute(
                    "INSERT INTO orders SELECT %s * 10000 + g, (SELECT string_agg(md5(g::text || i),"
                    " '') FROM generate_series(1, 60) i) FROM generate_series(1, 8000) g",
                    [number],
                )
            wait_for(lambda: capture.status()["in_flight_bytes"] > 60 << 20, 60, "it is stuck")
            time.sleep(8.0)
            assert connection.execute(query).fetchall() == before
            stuck = capture.status()
            assert 60 << 20 < stuck["in_flight_bytes"] < 70 << 20
        finally:
            log.signal_log_server(signal.SIGCONT)
        check_equal(log, server.dsn())
        assert connection.execute(query).fetchall() == before


def test_a_fast_shutdown_does_not_wait_for_an_idle_capture(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("INSERT INTO orders VALUES (1, 'x')")
    began = time.monotonic()
    server.stop("fast", timeout=30)
    assert time.monotonic() - began < 10
    server.start()
    check_equal(log, server.dsn())
    assert capture.stop() == 0


def test_schemas_that_change_under_load_are_followed(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for number in range(5):
            with connection.transaction():
                connection.execute("INSERT INTO orders VALUES (%s, 'a')", [number * 10])
                connection.execute(f"ALTER TABLE orders ADD COLUMN extra{number} text".encode())
                connection.execute("INSERT INTO orders VALUES (%s, 'b')", [number * 10 + 1])
        connection.execute("CREATE TYPE mood AS ENUM ('calm')")
        connection.execute("ALTER TABLE orders ADD COLUMN mood mood DEFAULT 'calm'")
        connection.execute("INSERT INTO orders VALUES (99, 'c')")
    check_equal(log, server.dsn())
