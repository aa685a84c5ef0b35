"""Keys and replica identities that change: the lake has PostgreSQL's rows after every such change."""

from itertools import product

import pytest

from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import Pipeline

#: Each is what a table is given from scratch: its primary key, or none.
KEYS = {
    "none": "",
    "id": "ALTER TABLE {t} ADD CONSTRAINT {t}_key PRIMARY KEY (id)",
    "both": "ALTER TABLE {t} ADD CONSTRAINT {t}_key PRIMARY KEY (id, region)",
}
IDENTITIES = {
    "default": "DEFAULT",
    "full": "FULL",
    "index": "USING INDEX {t}_code",
    "nothing": "NOTHING",
}
STATES = [*product(KEYS, IDENTITIES)]
#: What goes through FULL, whose messages do not tell the key, and one of each other kind.
SOME = [
    (("id", "full"), ("both", "full")),
    (("id", "full"), ("id", "default")),
    (("id", "default"), ("both", "full")),
    (("both", "full"), ("id", "index")),
    (("id", "index"), ("both", "default")),
    (("none", "nothing"), ("id", "default")),
    (("id", "default"), ("none", "default")),
]
ALL = [(before, after) for before, after in product(STATES, STATES) if before != after]


def told_apart(state):
    """Whether PostgreSQL lets a table in this state have updates and deletes."""
    key, identity = state
    return identity in {"full", "index"} or (identity == "default" and key != "none")


def into(table, state):
    """Statements that put a table into a state."""
    key, identity = state
    yield f"ALTER TABLE {table} DROP CONSTRAINT IF EXISTS {table}_key"
    if KEYS[key]:
        yield KEYS[key].format(t=table)
    yield f"ALTER TABLE {table} REPLICA IDENTITY {IDENTITIES[identity].format(t=table)}"


def doubles(table, state):
    """Rows that only the new state lets in: like those that are there, as far as its key allows that."""
    key, _ = state
    if key != "id":
        yield f"INSERT INTO {table} SELECT id, 2, 1000 + id, 'second' FROM {table} WHERE region = 1"
    if key == "none":
        yield f"INSERT INTO {table} SELECT id, region, 2000 + id, 'third' FROM {table} WHERE region = 1"
    yield f"INSERT INTO {table} VALUES (50, 1, 50, 'more')"


def changes(table, state, turn):
    """An update, a change of the key and a delete, each of one row; an insert."""
    yield f"INSERT INTO {table} VALUES (60 + {turn}, 1, 60 + {turn}, 'turn {turn}')"
    if told_apart(state):
        one = "WHERE ctid = (SELECT ctid FROM {} WHERE id = {} ORDER BY ctid {} LIMIT 1)"
        last, first = one.format(table, turn, "DESC"), one.format(table, turn, "ASC")
        yield f"UPDATE {table} SET note = note || ' changed' {last}"
        yield f"UPDATE {table} SET id = 70 + {turn}, code = 80 + {turn} {first}"
        yield f"DELETE FROM {table} {one.format(table, turn + 2, 'ASC')}"


def undone(table, state):
    """Take away what the state before would not take."""
    same = f"DELETE FROM {table} WHERE note LIKE 'second%' OR note LIKE 'third%'"
    yield same if told_apart(state) else f"TRUNCATE {table}"


@pytest.mark.parametrize(
    "moves", [SOME, pytest.param(ALL, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_32_rows_follow_every_change_of_key_and_identity(spark, tmp_path, database, moves):
    tables = {f"t{number}": move for number, move in enumerate(moves)}
    for table in tables:
        database.execute(
            f"CREATE TABLE {table} (id int NOT NULL, region int NOT NULL, code int NOT NULL, note text)",
            f"CREATE UNIQUE INDEX {table}_code ON {table} (code)",
            f"INSERT INTO {table} SELECT g, 1, g, 'row ' || g FROM generate_series(1, 9) g",
            *into(table, ("id", "default")),
        )
    with Pipeline(spark, tmp_path, database, [f"public.{table}" for table in tables]) as pipeline:
        for table, (before, _) in tables.items():
            database.execute(*into(table, before))
        pipeline.wait_for_tables(*tables)
        for table, (before, after) in tables.items():
            moved = *into(table, after), *doubles(table, after)
            if int(table[1:]) % 2:
                # The same epoch has changes before and after.
                moved = *changes(table, before, 1), *moved, *changes(table, after, 2)
            database.execute(*moved)
        assert_equal(database.dsn, pipeline.flush())
        for table, (_, after) in tables.items():
            database.execute(*changes(table, after, 4))
        assert_equal(database.dsn, pipeline.flush())
        for table, (before, after) in tables.items():
            database.execute(*undone(table, after), *into(table, before))
            database.execute(*changes(table, before, 5))
        shown = pipeline.flush()
        assert_equal(database.dsn, shown)
        assert {t.state for t in shown.manifest.tables.values()} == {"live"}
        assert len(shown.manifest.tables) == len(moves), STREAM
        assert_no_orphans(spark, pipeline.lake)
