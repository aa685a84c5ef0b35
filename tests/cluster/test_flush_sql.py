"""The SQL of FLUSH: tokens, what they refuse, and who may wait or report. The lake's driver is played by its reports."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from spark_consumers.lake.flush import check_token
from spark_consumers.lake.flush_service import to_json
from spark_consumers.lake.tables.sources import Source
from tests.support.pgbouncer import transaction_pool
from tests.support.servers import (
    MAJORS_IN_TURN,
    Database,
    MakeServer,
    each_major,
    fresh_database,
)
from tests.support.waiting import wait_for
from tests.support.wal_server import backup, follow, promote, replayed, run
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import ConfigError, TusklineError, UsageError
from walsender_bridge.postgres.client.replication_connection import ReplicationConnection
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.provisioning.detach import detach
from walsender_bridge.provisioning.init import init
from walsender_bridge.runtime.sql import load

LAKE = "5f0c7a52-0000-4000-8000-000000000001"
NO_REASON = {"timeline": None, "visible": None, "epoch": None, "stage": None, "reason": None}


def source_of(shop: Database) -> CaptureSource:
    return CaptureSource("shop", shop.dsn, "tuskline_shop", "tuskline_shop", ("public.orders",))


@pytest.fixture
def attached(shop: Database) -> Iterator[Database]:
    """A database that `init` has prepared."""
    shop.execute("CREATE TABLE scratch (id int)")
    init(source_of(shop))
    yield shop
    shop.execute("SELECT pg_drop_replication_slot('tuskline_shop')")


@pytest.fixture
def driver(attached: Database) -> Iterator["Driver"]:
    with Driver(attached) as playing:
        yield playing


class Driver:
    """Reports as a driver does, when it is told to."""

    def __init__(self, database: Database) -> None:
        self.connection = psycopg.connect(
            database.dsn, autocommit=True, application_name="tuskline-lake"
        )
        self.dsn = database.dsn
        self.named = {"lake": LAKE, "stream": "shop"}

    def __enter__(self) -> Self:
        with ReplicationConnection.connect(self.dsn) as walsender:
            timelines = json.dumps(to_json(walsender.history(walsender.identify().timeline)))
        row = self.connection.execute(load("flush/channel").encode()).fetchone()
        assert row is not None
        self.connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(row[0])))
        self.connection.execute(
            load("flush/report_driver"),
            {**self.named, "publication": "tuskline_shop", "timelines": timelines},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def snapshot(self) -> tuple[str, int]:
        row = self.connection.execute(load("flush/snapshot").encode()).fetchone()
        assert row is not None
        return row[0], row[1]

    def report(self, **values: object) -> None:
        self.connection.execute(load("flush/report_lake"), {**self.named, **NO_REASON, **values})

    def asked(self) -> tuple[str, int]:
        """What a session asks for that waits: within ten seconds."""
        if self.connection.info.server_version >= 130005:
            (found,) = self.connection.notifies(timeout=10, stop_after=1)
            kind, _, xid = found.payload.partition(" ")
            return kind, int(xid)
        rows: list[tuple[int, str, int]] = []

        def marked() -> bool:
            rows[:] = self.connection.execute(load("flush/marked").encode()).fetchall()
            return bool(rows)

        wait_for(marked, 10, "a session waits")
        return rows[0][1:]

    def shows_all(self) -> None:
        visible, timeline = self.snapshot()
        self.report(timeline=timeline, visible=visible, epoch=1)


def token_of(database: Database, *statements: str, end: str = "COMMIT") -> str:
    """A token of a transaction with these statements."""
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        for statement in statements or ("INSERT INTO orders VALUES (1, 'a')",):
            connection.execute(statement.encode())
        row = connection.execute("SELECT tuskline.flush_token()").fetchone()
        assert row is not None
        connection.execute(end.encode())
        return str(row[0])


def refused(database: Database, token: str | None, timeout: str = "5s") -> psycopg.Error:
    with database.connect() as connection:
        with pytest.raises(psycopg.Error) as caught:
            connection.execute("CALL tuskline.wait_flush(%s, %s)", [token, timeout])
        assert caught.value.diag.message_hint
        return caught.value


@each_major
def test_34_a_wait_ends_when_the_transaction_is_reported_readable(
    attached: Database, driver: Driver
) -> None:
    driver.shows_all()
    token = token_of(attached)
    assert refused(attached, token, "0.3s").sqlstate == "TK001"
    ended: list[float] = []

    def wait() -> None:
        with psycopg.connect(attached.dsn, autocommit=True) as connection:
            connection.execute("CALL tuskline.wait_flush(%s, '30s')", [token])
            ended.append(time.monotonic())

    waiting = threading.Thread(target=wait)
    waiting.start()
    # The session that waits asks the driver for its transaction.
    assert driver.asked() == ("flush", int(token.rpartition(":")[2]))
    assert not ended
    driver.shows_all()
    waiting.join(10)
    assert ended
    # What is readable already is not asked for once more.
    list(driver.connection.notifies(timeout=0.2))
    with psycopg.connect(attached.dsn, autocommit=True) as connection:
        connection.execute(f"CALL tuskline.wait_flush('{token}')".encode())
        connection.execute(f"CALL tuskline.wait_sync('{token}', '1s')".encode())
    assert list(driver.connection.notifies(timeout=0.5)) == []


@each_major
def test_34_what_an_earlier_driver_has_shown_is_asked_for_again(
    attached: Database, driver: Driver
) -> None:
    """The lake may have lost epochs since: its newest links may be gone, or it was restored from a backup."""
    token = token_of(attached)
    driver.shows_all()
    with Driver(attached) as another:
        assert refused(attached, token, "0.3s").sqlstate == "TK001"
        another.shows_all()
        with attached.connect() as connection:
            connection.execute("CALL tuskline.wait_flush(%s, '5s')", [token])


@each_major
def test_tokens_of_transactions_that_did_not_commit_are_named(
    attached: Database, driver: Driver
) -> None:
    driver.shows_all()
    with psycopg.connect(attached.dsn) as open_one:
        open_one.execute("INSERT INTO orders VALUES (9, 'open')")
        (token,) = open_one.execute("SELECT tuskline.flush_token()").fetchone() or [""]
        error = refused(attached, token)
        assert (error.sqlstate, "still open" in str(error)) == ("TK002", True)
        open_one.rollback()
    assert refused(attached, token).sqlstate == "TK003"
    assert refused(attached, token_of(attached, end="ROLLBACK")).sqlstate == "TK003"
    assert refused(attached, "1:2:3").sqlstate == "22023"
    parts = token.split(":")
    cases = {1: "12345", 2: "1", 3: "7"}
    for place, value in cases.items():
        other = [*parts[:place], value, *parts[place + 1 :]]
        assert refused(attached, ":".join(other)).sqlstate == "TK004", other
    future = [*parts[:5], str(int(parts[5]) + 1_000_000)]
    assert refused(attached, ":".join(future)).sqlstate == "TK004"
    # Of a clone that went further on the same timeline.
    assert refused(attached, ":".join([*parts[:4], "FF/0", parts[5]])).sqlstate == "TK005"
    with (
        psycopg.connect(attached.dsn, autocommit=True) as connection,
        pytest.raises(psycopg.errors.InvalidParameterValue, match="timeout must not be NULL"),
    ):
        connection.execute("CALL tuskline.wait_flush(NULL, NULL)")


@each_major
def test_a_savepoint_that_is_rolled_back_after_the_token_changes_nothing(
    attached: Database, driver: Driver
) -> None:
    with psycopg.connect(attached.dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO orders VALUES (1, 'a')")
        connection.execute("SAVEPOINT s")
        row = connection.execute("SELECT tuskline.flush_token()").fetchone()
        connection.execute("ROLLBACK TO s")
        connection.execute("COMMIT")
        driver.shows_all()
        connection.execute("CALL tuskline.wait_flush(%s, '5s')", row)


def test_a_prepared_transaction_is_waited_for_after_commit_prepared(
    make_server: MakeServer,
) -> None:
    server = make_server(max_prepared_transactions="2")
    server.start()
    with fresh_database(server) as database:
        database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
        init(source_of(database))
        with Driver(database) as driver:
            token = token_of(database, end="PREPARE TRANSACTION 'p'")
            error = refused(database, token)
            assert error.sqlstate == "TK002"
            assert error.diag.message_hint == "Run COMMIT PREPARED first."
            database.execute("COMMIT PREPARED 'p'")
            assert refused(database, token, "0.2s").sqlstate == "TK001"
            driver.shows_all()
            with database.connect() as connection:
                connection.execute("CALL tuskline.wait_flush(%s, '5s')", [token])


@each_major
def test_a_wait_in_a_transaction_block_is_refused_with_a_hint(attached: Database) -> None:
    function = (
        "CREATE FUNCTION waits() RETURNS void LANGUAGE plpgsql AS"
        " $$BEGIN CALL tuskline.wait_flush(); END$$"
    )
    attached.execute(function)
    for begin, call in (
        ("BEGIN", "CALL tuskline.wait_flush()"),
        ("BEGIN", "DO $$BEGIN CALL tuskline.wait_sync(); END$$"),
        ("SELECT 1", "SELECT waits()"),
    ):
        with attached.connect() as connection:
            connection.execute(begin.encode())
            with pytest.raises(psycopg.errors.ActiveSqlTransaction) as caught:
                connection.execute(call.encode())
            assert "COMMIT first" in (caught.value.diag.message_hint or ""), call


@each_major
def test_the_timeout_names_the_lake_that_holds_it_back(attached: Database) -> None:
    token = token_of(attached)
    error = refused(attached, token, "0.2s")
    assert "no driver of it has ever connected" in (error.diag.message_detail or "")
    with Driver(attached) as driver:
        assert "no epoch has it yet" in (refused(attached, token, "0.2s").diag.message_detail or "")
        driver.report(stage="tables", reason="shop.public.orders (being copied)")
        error = refused(attached, token, "0.2s")
        assert f"stream shop of lake {LAKE}: tables: shop.public.orders" in (
            error.diag.message_detail or ""
        )
    time.sleep(0.3)
    error = refused(attached, token, "0.2s")
    assert "driver is not connected" in (error.diag.message_detail or "")
    assert "lake run" in (error.diag.message_hint or "")


@each_major
def test_34_a_lake_that_does_not_exist_is_an_error_at_once_that_names_those_that_do(
    attached: Database,
) -> None:
    def unknown(timeout: str = "60s", lake: str = "unknown") -> psycopg.Error:
        with attached.connect() as connection, pytest.raises(psycopg.Error) as caught:
            connection.execute("CALL tuskline.wait_flush(NULL, %s, %s)", [timeout, lake])
        return caught.value

    began = time.monotonic()
    error = unknown()
    assert (error.sqlstate, error.diag.message_primary) == (
        "TK008",
        'no lake "unknown" follows this database',
    )
    assert "tuskline lake run" in (error.diag.message_hint or "")
    with Driver(attached) as driver:
        error = unknown()
        assert error.sqlstate == "TK008"
        assert error.diag.message_hint == f"These lakes do: {LAKE}."
        assert unknown("0.3s", LAKE).sqlstate == "TK001"
        # A driver that has no row may be this lake's: its row was deleted by mistake, or it is about to register.
        attached.execute("DELETE FROM tuskline.lakes")
        assert unknown("0.3s", LAKE).sqlstate == "TK001"
        assert "no driver of it" in (unknown("0.3s", LAKE).diag.message_detail or "")
        driver.__enter__()
        attached.execute("ALTER PUBLICATION tuskline_shop RENAME TO another")
        assert unknown(lake=LAKE).sqlstate == "TK008"
    assert time.monotonic() - began < 20


@each_major
def test_an_ordinary_writer_may_wait_and_can_neither_report_nor_delay_others(
    attached: Database, driver: Driver
) -> None:
    writer, reader = f"{attached.name}_writer", f"{attached.name}_reader"
    attached.execute(
        f"CREATE ROLE {writer}",
        f"GRANT INSERT ON orders TO {writer}",
        f"CREATE ROLE {reader}",
        f"GRANT SELECT ON orders TO {reader}",
    )
    try:
        with psycopg.connect(attached.dsn, autocommit=True) as connection:
            connection.execute(f"SET SESSION AUTHORIZATION {writer}".encode())
            connection.execute("BEGIN")
            connection.execute("INSERT INTO orders VALUES (1, 'a')")
            row = connection.execute("SELECT tuskline.flush_token()").fetchone()
            for call in (
                "SELECT tuskline.wait_look('flush', 1, NULL, 'infinity', true)",
                "SELECT tuskline.wait_begin(NULL)",
            ):
                connection.execute(call.encode())
            # While this transaction is open, nobody waits for a lock of it.
            with psycopg.connect(attached.dsn, autocommit=True) as other:
                other.execute("SET lock_timeout = '200ms'")
                other.execute(load("flush/write").encode())
                other.execute("INSERT INTO orders VALUES (2, 'b')")
                driver.connection.execute("SET lock_timeout = '200ms'")
                driver.shows_all()
                other.execute("SELECT tuskline.flush_token()")
            connection.execute("COMMIT")
            driver.shows_all()
            connection.execute("CALL tuskline.wait_flush(%s, '5s')", row)
            for forbidden in (
                "SELECT tuskline.report_lake('x', 'shop', 1, '1:9999999:', 1, NULL, NULL)",
                "SELECT tuskline.report_driver('x', 'shop', 'tuskline_shop', '{}')",
                "UPDATE tuskline.lakes SET epoch = 1",
                "SELECT * FROM tuskline.lakes",
                "SELECT * FROM tuskline.behind(1, NULL)",
                "SELECT * FROM tuskline.request_channel",
                "SELECT tuskline.request_channel()",
                "UPDATE tuskline.flush SET token = 1",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(forbidden.encode())
            connection.execute("RESET SESSION AUTHORIZATION")
            connection.execute(f"SET SESSION AUTHORIZATION {reader}".encode())
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="wait for the lake"):
                connection.execute("CALL tuskline.wait_flush()")
    finally:
        attached.execute(f"DROP OWNED BY {writer}, {reader}", f"DROP ROLE {writer}, {reader}")


#: What a role without any privilege may call (docs/flush.md). All of it is harmless, or checks the role.
FOR_ALL = {
    *("flush_token", "wait_flush", "wait_sync", "wait_for", "wait_begin", "wait_look", "mark"),
    *("marks", "refused_commit", "database", "timeline", "committed", "may_flush"),
    *("request_channel", "report_driver", "report_lake"),
}


@contextmanager
def stranger(database: Database) -> Iterator[str]:
    """A role that may connect, and nothing else."""
    role = f"{database.name}_stranger"
    database.execute(f"CREATE ROLE {role}")
    try:
        yield role
    finally:
        database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def callable_by(database: Database, role: str) -> set[str]:
    query = (
        "SELECT p.proname FROM pg_proc AS p WHERE p.pronamespace = 'tuskline'::regnamespace"
        " AND has_function_privilege(%s, p.oid, 'EXECUTE')"
    )
    with database.connect() as connection:
        return {name for (name,) in connection.execute(query, [role])}


@each_major
def test_34_a_role_without_privileges_learns_nothing_of_lakes_from_the_functions(
    attached: Database, driver: Driver
) -> None:
    """Neither names of lakes and streams, nor reasons, nor outcomes of transactions; and it cannot ask the driver."""
    shown, hidden = token_of(attached), "9" * 17
    driver.shows_all()
    xid = shown.rpartition(":")[2]
    with stranger(attached) as role:
        assert callable_by(attached, role) == FOR_ALL
        for call in (
            f"SELECT * FROM tuskline.behind({hidden}, NULL)",
            "SELECT tuskline.check_lake('unknown')",
            f"SELECT tuskline.wait_look('flush', {hidden}, NULL, '-infinity', false)",
            f"SELECT tuskline.wait_look('flush', {hidden}, 'unknown', 'infinity', false)",
            f"SELECT tuskline.wait_look('flush', {hidden}, NULL, 'infinity', true)",
            f"SELECT tuskline.wait_look('flush', {xid}, NULL, 'infinity', false)",
            f"SELECT tuskline.committed('{shown}')",
            f"SELECT tuskline.wait_begin('{shown}')",
            "SELECT tuskline.wait_begin(NULL)",
            f"CALL tuskline.wait_flush('{shown}')",
            "CALL tuskline.wait_sync(NULL, '1s', 'unknown')",
        ):
            with attached.connect() as connection:
                connection.execute(f"SET SESSION AUTHORIZATION {role}".encode())
                with pytest.raises(psycopg.errors.InsufficientPrivilege) as caught:
                    connection.execute(call.encode())
                text = f"{caught.value.diag.message_primary} {caught.value.diag.message_detail}"
                assert LAKE not in text, call
        assert list(driver.connection.notifies(timeout=0.2)) == []


@each_major
def test_34_init_sets_the_privileges_of_an_earlier_version_and_of_hardened_databases(
    attached: Database, driver: Driver
) -> None:
    with stranger(attached) as role:
        # As an earlier version left them: every function is for PUBLIC.
        attached.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tuskline TO PUBLIC")
        init(source_of(attached))
        assert callable_by(attached, role) >= FOR_ALL
        assert not callable_by(attached, role) & {"behind", "check_lake", "check_waiter"}
        attached.execute(
            "REVOKE EXECUTE ON ALL ROUTINES IN SCHEMA tuskline FROM PUBLIC",
            "ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC",
            f"GRANT INSERT ON orders TO {role}",
        )
        init(source_of(attached))
        assert callable_by(attached, role) == FOR_ALL
        with psycopg.connect(attached.dsn, autocommit=True) as connection:
            connection.execute(f"SET SESSION AUTHORIZATION {role}".encode())
            with connection.transaction():
                connection.execute("INSERT INTO orders VALUES (1, 'a')")
                token = connection.execute("SELECT tuskline.flush_token()").fetchone()
            driver.shows_all()
            connection.execute("CALL tuskline.wait_flush(%s, '5s')", token)
            connection.execute("CALL tuskline.wait_sync(%s, '5s')", token)


@pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True)
def test_34_a_driver_that_does_not_answer_is_named_at_the_timeout(
    attached: Database, driver: Driver
) -> None:
    """One that is suspended stays connected."""
    driver.report(stage="tables", reason="none")
    error = refused(attached, token_of(attached), "11.5s")
    assert (error.sqlstate, error.diag.message_detail) == (
        "TK001",
        f"stream shop of lake {LAKE}: driver: the lake's driver is connected, but has not answered for 12 s",
    )


@each_major
def test_a_hostile_search_path_has_no_effect_on_the_wait(
    attached: Database, driver: Driver
) -> None:
    driver.shows_all()
    attached.execute(
        "CREATE SCHEMA trap",
        "CREATE FUNCTION trap.f(int, int) RETURNS int LANGUAGE plpgsql AS"
        " $$BEGIN RAISE 'trapped'; END$$",
        "CREATE OPERATOR trap.% (PROCEDURE = trap.f, LEFTARG = int, RIGHTARG = int)",
        "CREATE OPERATOR trap.+ (PROCEDURE = trap.f, LEFTARG = int, RIGHTARG = int)",
        "CREATE FUNCTION trap.pg_sleep(float8) RETURNS void LANGUAGE plpgsql AS"
        " $$BEGIN RAISE 'trapped'; END$$",
    )
    with psycopg.connect(attached.dsn, autocommit=True) as connection:
        connection.execute("SET search_path = trap, pg_catalog, public")
        with pytest.raises(psycopg.Error) as caught:
            connection.execute("CALL tuskline.wait_flush(NULL, '0.3s')")
        assert caught.value.sqlstate == "TK001"


@each_major
def test_a_lock_of_a_published_table_does_not_outlast_the_timeout_of_a_wait(
    attached: Database, driver: Driver
) -> None:
    driver.shows_all()
    with attached.connect() as other, psycopg.connect(attached.dsn, autocommit=True) as connection:
        other.autocommit = False
        other.execute("LOCK TABLE orders")
        connection.execute("SET statement_timeout = '10s'")
        with pytest.raises(psycopg.Error) as caught:
            connection.execute("CALL tuskline.wait_flush(NULL, '0.3s')")
        other.rollback()
    assert caught.value.sqlstate == "TK001"


@each_major
def test_a_lock_that_anyone_may_take_does_not_outlast_the_timeout_of_a_wait(
    attached: Database, driver: Driver
) -> None:
    driver.shows_all()
    with attached.connect() as other, psycopg.connect(attached.dsn, autocommit=True) as connection:
        # Those by which sessions ask before 13, of the next transactions.
        other.execute(
            "SELECT pg_advisory_lock(1953854315, (txid_current() + n)::int) FROM generate_series(0, 99) AS n"
        )
        connection.execute("SET statement_timeout = '10s'")
        with pytest.raises(psycopg.Error) as caught:
            connection.execute("CALL tuskline.wait_flush(NULL, '0.3s')")
    assert caught.value.sqlstate == "TK001"


def test_commits_that_wait_for_a_standby_do_not_outlast_the_timeout_of_a_wait(
    make_server: MakeServer,
) -> None:
    """As while the commit gate is closed."""
    server = make_server(wal_log_hints="on")
    server.start()
    shop = Database("postgres", server)
    shop.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    init(source_of(shop))
    with Driver(shop) as driver, psycopg.connect(shop.dsn, autocommit=True) as connection:
        connection.execute("SET statement_timeout = '10s'")
        # The first read of a row writes WAL, so the transaction has some, and would wait.
        driver.report(stage="log", reason="none")
        shop.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        shop.execute("SELECT pg_reload_conf()", "SELECT pg_sleep(0.2)", "CHECKPOINT")
        with pytest.raises(psycopg.Error) as caught:
            connection.execute("CALL tuskline.wait_flush(NULL, '0.3s')")
        assert caught.value.sqlstate == "TK001"
        # A transaction that has sent a notification holds the lock for it until a standby has its WAL.
        with shop.connect() as other, ThreadPoolExecutor(1) as pool:
            other.autocommit = False
            other.execute("INSERT INTO orders VALUES (1, 'a')")
            other.execute("NOTIFY other")
            held = pool.submit(other.commit)
            try:
                waits = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
                wait_for(lambda: run(server, waits), 10, "the commit waits")
                with pytest.raises(psycopg.Error) as caught:
                    connection.execute("CALL tuskline.wait_flush(NULL, '0.3s')")
            finally:
                run(server, f"SELECT pg_cancel_backend({other.info.backend_pid})")
            assert caught.value.sqlstate == "55P03"
            assert connection.execute("SHOW lock_timeout").fetchone() == ("0",)
            held.result(10)


@each_major
def test_a_role_may_wait_for_a_partition_or_a_schema_that_it_writes_to(shop: Database) -> None:
    role = f"{shop.name}_writer"
    shop.execute(
        "CREATE TABLE parted (id int) PARTITION BY LIST (id); CREATE TABLE part PARTITION OF parted DEFAULT",
        f"CREATE ROLE {role}; GRANT INSERT ON part TO {role}",
    )
    init(source_of(shop))
    query = f"SELECT tuskline.may_flush('{role}'::regrole)".encode()
    try:
        with shop.connect() as connection:
            assert connection.execute(query).fetchone() == (False,)
            version = connection.info.server_version
            # Before 13 a partition is published by itself.
            published = ["FOR TABLE parted"] if version >= 130000 else ["FOR TABLE part"]
            if version >= 150000:
                published += ["FOR TABLES IN SCHEMA public"]
            for each in published:
                connection.execute(f"CREATE PUBLICATION more {each}".encode())
                assert connection.execute(query).fetchone() == (True,)
                connection.execute("DROP PUBLICATION more")
    finally:
        shop.execute(
            f"DROP OWNED BY {role}; DROP ROLE {role}",
            "SELECT pg_drop_replication_slot('tuskline_shop')",
        )


@each_major
def test_34_sessions_of_a_pool_in_transaction_mode_wait_for_their_own_transactions(
    attached: Database, driver: Driver
) -> None:
    """Through PgBouncer: two server connections for four sessions, each of which has another one by its next transaction."""
    sessions = 4
    driver.shows_all()
    with transaction_pool(attached, 2) as dsn:

        def wait(number: int) -> float:
            with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as session:
                with session.transaction():
                    session.execute("INSERT INTO orders VALUES (%s, 'pooled')", [number])
                    row = session.execute("SELECT tuskline.flush_token()").fetchone()
                session.execute("CALL tuskline.wait_flush(%s, '30s')", row)
                ended = time.monotonic()
                # Nothing of the wait is left to the next session that gets this connection.
                state = session.execute(
                    "SELECT current_setting('search_path'), count(*) FROM pg_locks"
                    " WHERE pid = pg_backend_pid() AND locktype = 'advisory' GROUP BY 1"
                ).fetchall()
                assert state in ([], [(path, 0)])
                return ended

        with attached.connect() as direct:
            path = direct.execute("SHOW search_path").fetchall()[0][0]
        with ThreadPoolExecutor(sessions) as pool:
            waits = [pool.submit(wait, number) for number in range(sessions)]
            deadline = time.monotonic() + 60
            shown_at = time.monotonic()
            while not all(each.done() for each in waits) and time.monotonic() < deadline:
                list(driver.connection.notifies(timeout=0.5, stop_after=1))
                shown_at = time.monotonic()
                driver.shows_all()
            assert all(each.result(1) <= shown_at + 5 for each in waits)
    with attached.connect() as connection:
        assert connection.execute("SELECT count(*) FROM orders").fetchone() == (sessions,)


@each_major
def test_34_a_session_whose_client_has_vanished_ends_at_its_timeout(
    attached: Database, driver: Driver
) -> None:
    gone = psycopg.connect(attached.dsn, autocommit=True)
    pid = gone.info.backend_pid
    gone.pgconn.send_query(b"CALL tuskline.wait_flush(NULL, '2s')")
    assert driver.asked()[0] == "flush"
    gone.close()
    query = b"SELECT (SELECT count(*) FROM pg_stat_activity WHERE pid = %s), (SELECT count(*) FROM pg_locks WHERE pid = %s)"
    with attached.connect() as connection:

        def left() -> object:
            return connection.execute(query, [pid, pid]).fetchone()

        assert left() != (0, 0)
        wait_for(lambda: left() == (0, 0), 10, "the session has ended")


def test_what_a_restored_dump_says_of_the_lake_is_not_believed(
    attached: Database, driver: Driver, make_server: MakeServer
) -> None:
    # Far ahead of the IDs of another server.
    driver.report(timeline=1, visible="900000:900000:", epoch=1)
    with attached.connect() as connection:
        dumped = connection.execute("SELECT row_to_json(l)::text FROM tuskline.lakes AS l")
        (row,) = dumped.fetchall()
    server = make_server()
    server.start()
    with fresh_database(server) as other:
        other.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
        init(source_of(other))
        try:
            with other.connect() as connection:
                restored = "INSERT INTO tuskline.lakes SELECT * FROM json_populate_record(NULL::tuskline.lakes, %s)"
                connection.execute(restored, row)
                connection.commit()
            token = token_of(other)
            assert refused(other, token, "0.2s").sqlstate == "TK001"
            with Driver(other) as there:
                # Nothing of this server is in the lake yet.
                assert refused(other, token, "0.2s").sqlstate == "TK001"
                there.shows_all()
                with psycopg.connect(other.dsn, autocommit=True) as connection:
                    connection.execute("CALL tuskline.wait_flush(%s, '5s')", [token])
        finally:
            other.execute("SELECT pg_drop_replication_slot('tuskline_shop')")


@each_major
@pytest.mark.parametrize(
    "left",
    [
        "CREATE FUNCTION tuskline.wait_begin(token text) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint'",
        "CREATE TABLE tuskline.request_channel (name text)",
    ],
    ids=["function", "table"],
)
def test_functions_and_tables_that_another_role_has_left_there_are_not_used(
    shop: Database, left: str
) -> None:
    """They would stay the other role's, and run with the rights of whoever waits, or of the functions' owner."""
    role = f"stranger_{shop.name}"
    shop.execute(
        f"CREATE ROLE {role}; CREATE SCHEMA tuskline; GRANT CREATE, USAGE ON SCHEMA tuskline TO {role}",
        f"SET SESSION AUTHORIZATION {role}; {left}",
    )
    try:
        with pytest.raises(TusklineError, match="belongs to a role that is neither"):
            init(source_of(shop))
    finally:
        shop.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@each_major
def test_init_upgrades_the_functions_and_detach_removes_them(shop: Database) -> None:
    source = source_of(shop)
    init(source)
    shop.execute(
        "CREATE OR REPLACE FUNCTION tuskline.flush_token() RETURNS text LANGUAGE sql AS"
        " $$SELECT 'of an earlier version'$$"
    )
    assert init(source) == []
    assert token_of(shop).startswith("1:")
    detach(source)
    with shop.connect() as connection:
        query = "SELECT count(*) FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace WHERE n.nspname = 'tuskline'"
        assert connection.execute(query.encode()).fetchone() == (0,)
        query = "SELECT count(*) FROM pg_namespace WHERE nspname = 'tuskline'"
        assert connection.execute(query.encode()).fetchone() == (0,)


@pytest.mark.parametrize("major", MAJORS_IN_TURN)
def test_38_after_a_failover_a_lost_transaction_is_told_from_one_that_reached_the_standby(
    make_server: MakeServer, major: int
) -> None:
    primary = make_server(major, fsync="off")
    primary.start()
    shop = Database("postgres", primary)
    shop.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    init(source_of(shop))
    with Driver(shop) as driver:
        driver.shows_all()
    standby = backup(primary, primary.folder.with_name("standby"), wal="fetch")
    try:
        follow(standby, primary.dsn())
        standby.start()
        reached = token_of(shop, "INSERT INTO orders VALUES (1, 'reached')")
        end = parse_lsn(run(primary, "SELECT pg_current_wal_insert_lsn()")[0][0])
        wait_for(lambda: replayed(standby) >= end, 30, "the standby has it")
        on_standby = Database("postgres", standby)
        assert refused(on_standby, reached).sqlstate == "25006"
        standby.stop("fast")
        # Its ID is one that the promoted server gives to another transaction.
        lost = token_of(shop, "INSERT INTO orders VALUES (2, 'lost')")
        primary.kill()
        standby.start()
        promote(standby)
        on_standby.execute(
            *(f"INSERT INTO orders VALUES ({key}, 'other')" for key in range(10, 30))
        )
        assert refused(on_standby, reached, "0.3s").sqlstate == "TK006"
        with Driver(on_standby) as driver:
            assert refused(on_standby, reached, "0.3s").sqlstate == "TK001"
            driver.shows_all()
            with on_standby.connect() as connection:
                connection.execute("CALL tuskline.wait_flush(%s, '5s')", [reached])
                xid = int(lost.rpartition(":")[2])
                row = connection.execute("SELECT txid_status(%s)", [xid]).fetchone()
                assert row == ("committed",)
            assert refused(on_standby, lost).sqlstate == "TK005"
    finally:
        standby.destroy()


def test_a_token_is_checked_at_the_source_that_gave_it(
    attached: Database, pg_server: LocalServer
) -> None:
    sources = [Source("shop", attached.dsn, "tuskline_shop")]
    with fresh_database(pg_server) as other:
        other.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
        with pytest.raises(ConfigError, match="functions for flush tokens") as caught:
            check_token("1:2:3", [Source("other", other.dsn, "tuskline_other")])
        assert "tuskline init" in caught.value.repair
        there = CaptureSource("other", other.dsn, "tuskline_o", "tuskline_o", ("public.orders",))
        init(there)
        sources.append(Source("other", other.dsn, "tuskline_o"))
        assert check_token(token_of(attached), sources) == "shop"
        assert check_token(token_of(other), sources) == "other"
        with pytest.raises(UsageError, match="rolled back") as refusal:
            check_token(token_of(other, "SELECT 1", end="ROLLBACK"), sources)
        assert refusal.value.where == "other"
        with pytest.raises(UsageError, match="of another server or database"):
            check_token(token_of(other, "SELECT 1"), sources[:1])
        detach(there)


def test_a_driver_ignores_sessions_of_roles_that_may_not_write(attached: Database) -> None:
    reader = f"{attached.name}_reader"
    attached.execute(f"CREATE ROLE {reader}", f"GRANT SELECT ON orders TO {reader}")
    try:
        conninfo = make_conninfo(attached.dsn, user=reader)
        attached.execute(f"ALTER ROLE {reader} LOGIN PASSWORD 'secret'")
        with psycopg.connect(conninfo, password="secret") as stranger, attached.connect() as own:
            pids = [stranger.info.backend_pid]
            assert own.execute(load("flush/may_flush"), {"pids": pids}).fetchall() == []
    finally:
        attached.execute(f"DROP OWNED BY {reader}", f"DROP ROLE {reader}")
