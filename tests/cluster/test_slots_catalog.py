"""Transactions that changed the catalog just before a copy was found ready: the promoted slot knows of all of them.

An older transaction is open all the while, so that the snapshot itself has to name them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.extension import (
    CONTROL_PATH,
    ONE,
    buildable,
    catalog_reader,
)
from tests.support.servers import DEFAULT
from tests.support.slot_copies import (
    PUBLICATION,
    decoded,
    fields,
    inspect,
    rows,
    running_pair,
    without_background_writer,
)
from tests.support.slot_sync import SlotStack, slot_stack
from tests.support.snapshot_files import lacking

COPY, SECOND = "_tuskline_tmp_copy", "_tuskline_tmp_second"

#: What the transaction does in its savepoint, and the table that rows are written into later.
IN_A_SAVEPOINT = {
    "a table joins the publication": f"ALTER PUBLICATION {PUBLICATION} ADD TABLE late",
    "a table is made": "CREATE TABLE made (id bigint PRIMARY KEY, note text)",
}

#: What a transaction does that is open where a copy starts.
OPEN_AT_THE_START = {
    "a table joins the publication": f"ALTER PUBLICATION {PUBLICATION} ADD TABLE late",
    "a plugin's own table": "INSERT INTO chosen VALUES ('shop')",
}
#: A major whose snapshots do not name what is in progress.
NAMELESS = 15


def open_at_the_start() -> Iterator[object]:
    for what in OPEN_AT_THE_START:
        for major in buildable():
            own = "own" in what
            once = major == NAMELESS if own else major in {DEFAULT, CONTROL_PATH}
            marks = [] if once else [pytest.mark.long]
            yield pytest.param(major, what, marks=marks, id=f"pg{major}-{what}")


@pytest.mark.parametrize("what", IN_A_SAVEPOINT)
@pytest.mark.parametrize("major", ONE)
def test_a_savepoints_catalog_change_is_known_after_a_promotion(
    major: int, what: str, tmp_path: Path
) -> None:
    with slot_stack(major, tmp_path) as stack:
        pair = stack.pair
        pair.on_primary("CREATE TABLE late (id bigint PRIMARY KEY, note text)")
        pair.make_slot("kept")
        with stack.controller() as controller:
            stack.until(controller, "READY", "kept")
        table = "made" if "CREATE" in IN_A_SAVEPOINT[what] else "late"
        with (
            closing(psycopg.connect(pair.primary.dsn())) as older,
            closing(psycopg.connect(pair.primary.dsn())) as changing,
        ):
            older.execute("SELECT txid_current()")
            changing.execute("SAVEPOINT here")
            changing.execute(IN_A_SAVEPOINT[what].encode())
            changing.execute("RELEASE here")
            changing.commit()
            with stack.controller() as controller:
                for _ in range(4):
                    stack.turn_over("kept")
                    pair.catch_up()
                    controller.once(10)
                stack.until(controller, "READY", "kept")
            if table == "made":
                pair.on_primary(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE made")
            pair.on_primary(
                f"INSERT INTO {table} SELECT n, 'row-' || 500 + n FROM generate_series(1, 4) AS n"
            )
            pair.catch_up()
            wanted = decoded(pair.primary, "kept")
            assert wanted == [501, 502, 503, 504]
            pair.promote()
        found = decoded(pair.standby, "kept")
        assert [each for each in found if each > 500] == wanted


@pytest.mark.parametrize("major", ONE)
def test_a_plugins_own_catalog_table_is_known_after_a_promotion(major: int, tmp_path: Path) -> None:
    with running_pair(major, fail_points=False, **catalog_reader(major)) as pair:
        stack = SlotStack(pair, tmp_path)
        pair.on_primary(
            "CREATE TABLE chosen (name text) WITH (user_catalog_table = true)",
            "SELECT pg_create_logical_replication_slot('kept', 'catalog_reader')",
        )
        peek = "SELECT data FROM pg_logical_slot_peek_changes('kept', NULL, NULL)"
        read = "SELECT count(*) FROM pg_logical_slot_get_changes('kept', NULL, NULL)"

        def turn_over() -> None:
            stack.load.write()
            pair.on_primary("CHECKPOINT", read)
            pair.catch_up()

        def ready() -> None:
            with stack.controller() as controller:
                for _ in range(100):
                    turn_over()
                    if controller.once(10)["near"].ready:
                        return
            raise AssertionError("never ready")

        ready()
        with closing(psycopg.connect(pair.primary.dsn())) as older:
            older.execute("SELECT txid_current()")
            pair.on_primary("INSERT INTO chosen VALUES ('shop')")
            with stack.controller() as controller:
                for _ in range(4):
                    turn_over()
                    controller.once(10)
            ready()
            stack.load.write(2)
            pair.catch_up()
            wanted = rows(pair.primary, peek)
            assert wanted == [("shop: 1 chosen",)] * 2
            pair.promote()
        assert rows(pair.standby, peek)[-2:] == wanted


@pytest.mark.parametrize("major", ONE)
def test_38_what_a_fast_decoder_leaves_out_is_seen_and_written_over(
    major: int, tmp_path: Path
) -> None:
    """The comparison with the primary's snapshots, which tests make at READY, can fail."""
    with running_pair(major) as pair:
        stack = SlotStack(pair, tmp_path)
        pair.on_primary("CREATE TABLE chosen (name text) WITH (user_catalog_table = true)")
        pair.make_slot("kept")
        stack.consume("kept")
        pair.reserve(COPY, "kept")
        pair.prove(COPY, "kept")
        with closing(psycopg.connect(pair.primary.dsn())) as older:
            older.execute("SELECT txid_current()")
            pair.on_primary("INSERT INTO chosen VALUES ('shop')")
            for _ in range(3):
                stack.turn_over("kept")
            pair.catch_up()
            to = pair.slot("kept").confirmed_flush_lsn
            before = fields(pair.standby, COPY)
            pair.on_standby("SELECT pg_replication_slot_advance(%s, %s)", COPY, to)
            assert len(lacking(pair, anybodys=True)) == 1
            assert lacking(pair) == set()
            assert not inspect(pair.standby, COPY)["snapshot_complete"]
            # Another copy goes over the same WAL, from a snapshot of ours.
            pair.on_standby(
                "SELECT tuskline_slots.reserve(%s, 'pgoutput', %s, %s)", SECOND, *before[:2]
            )
            pair.on_standby("SELECT tuskline_slots.advance(%s, %s)", SECOND, to)
            assert lacking(pair, anybodys=True) == set()
            assert inspect(pair.standby, COPY)["snapshot_complete"]


@pytest.mark.parametrize(("major", "what"), [*open_at_the_start()])
def test_38_a_copy_that_starts_from_anothers_snapshot_writes_complete_ones(
    major: int, what: str, tmp_path: Path
) -> None:
    """A transaction changed the catalog before the copy's restart_lsn, and is open still at the next snapshot."""
    with running_pair(major) as pair:
        stack = SlotStack(pair, tmp_path)
        pair.on_primary(
            "CREATE TABLE late (id bigint PRIMARY KEY, note text)",
            "CREATE TABLE chosen (name text) WITH (user_catalog_table = true)",
        )
        for name in ("slow", "kept"):
            pair.make_slot(name)
            stack.consume(name)
        pair.reserve(COPY, "slow")
        pair.prove(COPY, "slow")
        with ExitStack() as sessions:
            sessions.enter_context(without_background_writer(pair.primary))

            def begun(statement: str) -> psycopg.Connection[Any]:
                opened = closing(psycopg.connect(pair.primary.dsn()))
                session = sessions.enter_context(opened)
                session.execute(statement.encode())
                return session

            def next_snapshot(*names: str) -> None:
                pair.on_primary("CHECKPOINT")
                for name in names:
                    stack.consume(name)
                pair.catch_up()

            begun("SELECT txid_current()")
            changing = begun(OPEN_AT_THE_START[what])
            next_snapshot("slow", "kept")
            to = pair.slot("slow").confirmed_flush_lsn
            pair.on_standby("SELECT tuskline_slots.advance(%s, %s)", COPY, to)
            second = begun("INSERT INTO shop VALUES (1001, '')")
            next_snapshot()
            begun("INSERT INTO shop VALUES (1002, '')")
            changing.commit()
            next_snapshot("kept")
            pair.reserve(SECOND, "kept")
            assert inspect(pair.standby, SECOND)["snapshot_complete"]
            to = pair.slot("kept").confirmed_flush_lsn
            pair.on_standby("SELECT tuskline_slots.advance(%s, %s)", SECOND, to)
            assert lacking(pair) == set()
            second.commit()
            next_snapshot("kept")
            to = pair.slot("kept").confirmed_flush_lsn
            pair.on_standby("SELECT tuskline_slots.advance(%s, %s)", SECOND, to)
            assert inspect(pair.standby, SECOND)["snapshot_complete"]
            assert lacking(pair) == set()
