"""Capture and its slot and publication: made, adopted, refused; a log is never continued by guess."""

import time
from pathlib import Path

import psycopg
import pytest

from tests.support import old_files
from tests.support.capture_stack import (
    PUBLICATION,
    SLOT,
    CaptureProcess,
    ChangeLog,
    check_equal,
    make_tables,
    slot_lsn,
    wal_end,
)
from tests.support.servers import DEFAULT, Database, MakeServer, drop_slot, each_major
from tests.support.waiting import wait_for
from walsender_bridge.capture.status_record import CaptureStatus
from walsender_bridge.demo.local_server import LocalServer, by_major
from walsender_bridge.errors import Cause
from walsender_bridge.runtime import status_file

TABLES = ("public.orders", "public.audit")


def captured(capture: CaptureProcess, log: ChangeLog, dsn: str, *statements: str) -> None:
    """Run the capture, then the statements, until the log is equal; then stop it."""
    capture.start()
    wait_for(capture.streams, 30, "capture streams")
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())
    check_equal(log, dsn)
    assert capture.stop() == 0


@each_major
def test_29_a_slot_that_was_dropped_and_made_again_is_refused(
    tmp_path: Path, log: ChangeLog, shop: Database
) -> None:
    capture = CaptureProcess(tmp_path, log, shop.dsn, *TABLES)
    captured(capture, log, shop.dsn, "INSERT INTO orders VALUES (1, 'logged')")
    before = log.replica_status()
    drop_slot(shop, SLOT)
    capture.start()
    assert capture.wait() == Cause.DIVERGED
    assert "the slot is gone" in capture.output.read_text()
    # What commits now is in no slot: a new one would skip it in silence.
    shop.execute(
        "INSERT INTO orders VALUES (2, 'skipped')",
        f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')",
        "INSERT INTO orders VALUES (3, 'sent')",
    )
    capture.start()
    assert capture.wait() == Cause.DIVERGED
    assert "recreated" in capture.output.read_text()
    assert capture.status()["error"]["code"] == "DIVERGED"
    after = log.replica_status()
    assert (after.end_offset, after.confirmed_to) == (before.end_offset, before.confirmed_to)


def test_29_a_server_that_lost_what_the_log_has_is_refused_and_listed(
    tmp_path: Path, log: ChangeLog, make_server: MakeServer
) -> None:
    server = make_server(fsync="off")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
    capture = CaptureProcess(tmp_path, log, server.dsn(), *TABLES)
    captured(capture, log, server.dsn())
    server.stop()
    old = old_files.keep(server)
    server.start()
    captured(
        capture,
        log,
        server.dsn(),
        *(f"INSERT INTO orders VALUES ({n}, pg_current_xact_id()::text)" for n in range(3)),
    )
    with psycopg.connect(server.dsn()) as connection:
        xids = [xid for (xid,) in connection.execute("SELECT pad FROM orders").fetchall()]
    server.stop()
    old_files.bring_back(server, old)
    server.start()
    capture.start()
    assert capture.wait() == Cause.DIVERGED
    said = capture.output.read_text()
    assert "restored or replaced" in said
    for xid in xids:
        assert f"xid {xid}," in said


@pytest.mark.parametrize(
    "idle",
    [False, pytest.param(True, marks=pytest.mark.long)],
    ids=["log ahead of the copy", "log idle since"],
)
def test_29_a_copy_of_the_server_that_ran_on_by_itself_is_refused(
    tmp_path: Path, log: ChangeLog, make_server: MakeServer, *, idle: bool
) -> None:
    server = make_server(fsync="off")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
    capture = CaptureProcess(tmp_path, log, server.dsn(), *TABLES)
    captured(capture, log, server.dsn(), "INSERT INTO orders VALUES (1, 'both')")
    server.stop()
    old = old_files.keep(server)
    server.start()
    if idle:
        capture.start()
        wait_for(capture.streams, 30, "capture streams")
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("CREATE TABLE unpublished AS SELECT generate_series(1, 5000)")
            connection.execute("CHECKPOINT")
            end = wal_end(connection)
        wait_for(lambda: _confirmed(log) >= end, 30, "the idle slot is confirmed to the end")
        assert capture.stop() == 0
    else:
        captured(capture, log, server.dsn(), "INSERT INTO orders VALUES (2, 'the original')")
    before = log.replica_status()
    server.stop()
    old_files.bring_back(server, old)
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        # The same timeline; its WAL soon reaches past everything that the log knows.
        connection.execute("INSERT INTO orders VALUES (3, 'the copy')")
        connection.execute("SELECT pg_switch_wal()")
        connection.execute("INSERT INTO orders VALUES (4, 'the copy')")
        assert wal_end(connection) > _confirmed(log)
        at = slot_lsn(connection)
    capture.start()
    assert capture.wait() == Cause.DIVERGED
    said = capture.output.read_text()
    assert "continued independently" in said
    after = log.replica_status()
    assert (after.end_offset, after.confirmed_to) == (before.end_offset, before.confirmed_to)
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        assert slot_lsn(connection) == at, "nothing was confirmed"


def _confirmed(log: ChangeLog) -> int:
    confirmed = log.replica_status().confirmed_to
    return 0 if confirmed is None else confirmed[1]


def test_29_another_cluster_further_ahead_with_an_older_slot_is_refused(
    tmp_path: Path, log: ChangeLog, make_server: MakeServer
) -> None:
    server = make_server(fsync="off")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
        connection.execute("SELECT pg_switch_wal()")
    captured(CaptureProcess(tmp_path, log, server.dsn(), *TABLES), log, server.dsn())
    before = log.replica_status()
    place = server.folder.resolve().with_name("another")
    # Not a copy of the clusters that tests share, which all have one identifier.
    other = LocalServer.create(
        by_major()[DEFAULT],
        place,
        settings={"fsync": "off"},
        template_cache=place.with_name("another-template"),
    )
    with other:
        other.start()
        with psycopg.connect(other.dsn(), autocommit=True) as connection:
            make_tables(connection)
            connection.execute(
                f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')".encode()
            )
            assert slot_lsn(connection) < _confirmed(log)
            while wal_end(connection) <= _confirmed(log):
                connection.execute("SELECT pg_switch_wal()")
                connection.execute("INSERT INTO orders SELECT count(*), 'other' FROM orders")
        capture = CaptureProcess(tmp_path, log, other.dsn(), *TABLES)
        capture.start()
        assert capture.wait() == Cause.DIVERGED
        assert "system identifier" in capture.output.read_text()
    after = log.replica_status()
    assert (after.end_offset, after.confirmed_to) == (before.end_offset, before.confirmed_to)


@each_major
def test_an_existing_slot_and_publication_are_adopted(
    tmp_path: Path, log: ChangeLog, shop: Database
) -> None:
    shop.execute(
        f"CREATE PUBLICATION {PUBLICATION} FOR TABLE orders",
        f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')",
        "INSERT INTO orders VALUES (1, 'since the slot')",
    )
    capture = CaptureProcess(tmp_path, log, shop.dsn, *TABLES)
    captured(capture, log, shop.dsn)
    with shop.connect() as connection:
        rows = connection.execute(
            "SELECT schemaname || '.' || tablename FROM pg_publication_tables WHERE pubname = %s",
            [PUBLICATION],
        ).fetchall()
    assert {name for (name,) in rows} == {*TABLES, "tuskline.flush"}


def test_all_tables_are_captured_when_none_is_named(
    tmp_path: Path, log: ChangeLog, shop: Database
) -> None:
    capture = CaptureProcess(tmp_path, log, shop.dsn)
    shop.execute("INSERT INTO orders VALUES (1, 'before')")
    captured(capture, log, shop.dsn, "TRUNCATE orders", "INSERT INTO orders VALUES (2, 'after')")


def test_a_table_that_publishing_would_break_is_refused(
    tmp_path: Path, log: ChangeLog, shop: Database
) -> None:
    shop.execute("CREATE TABLE bare (id int)")
    capture = CaptureProcess(tmp_path, log, shop.dsn, "public.bare")
    capture.start()
    assert capture.wait() == Cause.PUBLICATION
    assert "REPLICA IDENTITY FULL" in capture.output.read_text()
    shop.execute("INSERT INTO bare VALUES (1)", "UPDATE bare SET id = 2")


@pytest.mark.parametrize(
    ("statement", "cause", "word"),
    [
        ("CREATE ROLE {0} LOGIN PASSWORD 'planted-secret'", Cause.PRIVILEGE, "permission"),
        ("SELECT 1", Cause.AUTHENTICATION, "password"),
    ],
    ids=["role without REPLICATION", "unknown role"],
)
def test_a_role_that_may_not_is_refused_by_name_and_its_password_is_not_shown(
    tmp_path: Path, log: ChangeLog, shop: Database, statement: str, cause: Cause, word: str
) -> None:
    role = f"weak_{shop.name}"
    shop.execute(statement.format(role))
    try:
        dsn = shop.server.dsn(shop.name, user=role, password="planted-secret")
        capture = CaptureProcess(tmp_path, log, dsn, *TABLES)
        capture.start()
        assert capture.wait() == cause
        said = capture.output.read_text() + capture.status_file.read_text()
        assert word in said
        assert "planted-secret" not in said
    finally:
        shop.execute(f"DROP ROLE IF EXISTS {role}")


def test_a_second_capture_waits_for_the_slot_and_takes_over(
    tmp_path: Path, log: ChangeLog, shop: Database
) -> None:
    first = CaptureProcess(tmp_path, log, shop.dsn, *TABLES)
    with first:
        wait_for(first.streams, 30, "the first streams")
        shop.execute("INSERT INTO orders VALUES (1, 'x')")
        own = tmp_path / "second.json"
        second = CaptureProcess(tmp_path, log, shop.dsn, *TABLES, status_file=own)
        with second:
            # The slot is the first's: the second waits and takes over when it dies.

            def told(state: str) -> bool:
                """Whether the second says why it waits, in this state, which may last for milliseconds."""
                for _ in range(200):
                    found = status_file.read(own, CaptureStatus)
                    if found is not None and found.state == state and found.error is not None:
                        why = found.error.sentence
                        return "walsender of a capture of this" in why and "timeout" in why
                    time.sleep(0.001)
                return False

            wait_for(lambda: told("waiting"), 30, "the reason")
            wait_for(lambda: told("connecting"), 30, "the reason, while it connects again")
            first.kill()
            check_equal(log, shop.dsn)
            assert second.stop() == 0


def test_a_server_below_wal_level_logical_is_refused(
    tmp_path: Path, log: ChangeLog, make_server: MakeServer
) -> None:
    server = make_server(fsync="off", wal_level="replica")
    server.start()
    capture = CaptureProcess(tmp_path, log, server.dsn())
    capture.start()
    assert capture.wait() == Cause.SERVER_SETTING
    assert "wal_level" in capture.output.read_text()
