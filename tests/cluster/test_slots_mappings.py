"""Catalogs that VACUUM FULL has moved, and copies made after a restartpoint has removed what tells where to.

Such files (pg_logical/mappings) are removed on a standby without logical slots, whatever a copy may need later.
"""

from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tests.support.extension import ONE
from tests.support.slot_copies import (
    PUBLICATION,
    Pair,
    decoded,
    fields,
    inspect,
    rows,
    running_pair,
)
from tests.support.slot_sync import STANDBY, SlotStack, slot_stack
from tests.support.snapshot_files import MAPPINGS, mappings_lacking
from tests.support.waiting import wait_for

COPY = "_tuskline_tmp_copy"
WANTED = [501, 502, 503]


def mapped(pair: Pair) -> set[str]:
    return {path.name for path in (pair.standby.data_dir / MAPPINGS).iterdir()}


def end(pair: Pair) -> str:
    return rows(pair.primary, "SELECT pg_current_wal_lsn()::text")[0][0]


def read_to(pair: Pair, name: str, position: str) -> None:
    rows(
        pair.primary,
        "SELECT count(*) FROM pg_logical_slot_get_binary_changes(%s, %s, NULL,"
        " 'proto_version', '1', 'publication_names', %s)",
        name,
        position,
        PUBLICATION,
    )


def marks(stack: SlotStack) -> list[str]:
    """Positions, each after a row and a record of what runs."""
    found = []
    for _ in range(6):
        stack.load.write()
        stack.pair.on_primary("CHECKPOINT")
        found.append(end(stack.pair))
    return found


def publish_fill_and_rewrite(pair: Pair) -> None:
    """One transaction publishes a table and fills it; then the catalog is moved, and the standby forgets where to."""
    with closing(psycopg.connect(pair.primary.dsn())) as connection:
        connection.execute(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE late".encode())
        connection.execute(
            "INSERT INTO late SELECT n, 'row-' || 500 + n FROM generate_series(1, 3) AS n"
        )
        connection.commit()
    pair.on_primary("VACUUM FULL pg_publication_rel", "CHECKPOINT")
    pair.catch_up()
    assert mapped(pair)


def forget(pair: Pair) -> None:
    rows(pair.standby, "CHECKPOINT")
    assert not mapped(pair)


def late(found: list[int]) -> list[int]:
    return [each for each in found if each > 500]


@pytest.mark.parametrize("major", ONE)
def test_mapping_files_removed_before_a_copy_was_made_are_restored(
    major: int, tmp_path: Path
) -> None:
    with slot_stack(major, tmp_path) as stack:
        pair = stack.pair
        pair.on_primary("CREATE TABLE late (id bigint PRIMARY KEY, note text)")
        pair.make_slot("kept")
        places = marks(stack)
        publish_fill_and_rewrite(pair)
        forget(pair)
        assert mappings_lacking(pair, "kept")
        with stack.controller() as controller:

            def ready() -> bool:
                if places:
                    read_to(pair, "kept", places.pop(0))
                return controller.once(10)[STANDBY].ready is True

            wait_for(ready, 60, "the copy is ready")
        assert inspect(pair.standby, "kept")["mappings_complete"]
        assert mappings_lacking(pair, "kept") == set()
        rows(pair.standby, "CHECKPOINT")
        assert mappings_lacking(pair, "kept") == set()
        assert late(decoded(pair.primary, "kept")) == WANTED
        pair.promote()
        assert late(decoded(pair.standby, "kept")) == WANTED


@pytest.mark.parametrize("major", ONE)
def test_a_restartpoint_in_progress_keeps_mapping_files_from_being_restored(major: int) -> None:
    """It may have looked for slots before this one was there, and removes files later. CHECKPOINT ends it."""
    restore = f"SELECT tuskline_slots.restore_mappings('{COPY}')"
    spread = "pg_backup_start('x')" if major >= 15 else "pg_start_backup('x', false, false)"
    with running_pair(major) as pair:
        pair.make_slot("kept")
        pair.on_primary(
            "INSERT INTO shop SELECT n, repeat('x', 800) FROM generate_series(1, 20000) AS n",
            "CHECKPOINT",
        )
        pair.reserve(COPY, "kept")

        def refused() -> bool:
            try:
                rows(pair.standby, restore)
            except psycopg.errors.ObjectNotInPrerequisiteState as error:
                return "a restartpoint is in progress" in str(error)
            return False

        assert not refused()
        backup = psycopg.pq.PGconn.connect(pair.standby.dsn().encode())
        try:
            backup.send_query(f"SELECT {spread}".encode())
            wait_for(refused, 60, "the restartpoint is in progress")
            assert refused()
            rows(pair.standby, "CHECKPOINT")
            assert not refused()
        finally:
            backup.finish()


@pytest.mark.parametrize("major", ONE)
def test_a_position_that_went_back_needs_its_mapping_files_anew(major: int) -> None:
    with running_pair(major) as pair:
        pair.make_slot("kept")
        pair.reserve(COPY, "kept")
        pair.prove(COPY, "kept")
        before = fields(pair.standby, COPY)
        pair.prove(COPY, "kept")
        assert fields(pair.standby, COPY).restart_lsn != before.restart_lsn
        move = "SELECT tuskline_slots.set_fields(%s, %s, %s, %s, %s)"
        pair.on_standby(move, COPY, *fields(pair.standby, COPY), True)
        assert inspect(pair.standby, COPY)["mappings_complete"]
        pair.on_standby(move, COPY, *before, True)
        assert not inspect(pair.standby, COPY)["mappings_complete"]
