"""Tables with all versions of each row: PostgreSQL's own rows at every cut are what the lake has of it, at each epoch and in live reads."""

import random
from datetime import UTC

import pytest

from spark_consumers import read
from spark_consumers.lake.epoch import epoch_writer as epoch_module
from spark_consumers.lake.epoch import plan
from spark_consumers.lake.equality.record import EQUAL
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.views.definition import ViewDefinition
from spark_consumers.lake.writer import requests
from tests.spark.test_equality import compared, states
from tests.spark.test_recorded_changes import install
from tests.spark.test_soft_delete import _change
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_no_orphans
from tests.support.lake_pipeline import Pipeline, dies
from tests.support.pinned import connect_pinned
from tests.support.waiting import wait_for
from walsender_bridge.postgres.table_layout import (
    HISTORY,
    LayoutRule,
    PartitionField,
    SortField,
    TableLayout,
)
from walsender_bridge.postgres.table_patterns import Pattern

NOTES = f"{STREAM}.public.notes"
TABLES = (
    "CREATE TABLE notes (id int PRIMARY KEY, t text, body text, f float8)",
    "ALTER TABLE notes ALTER body SET STORAGE EXTERNAL",
    "INSERT INTO notes SELECT g, 't' || g, repeat(chr(96 + g), 4000), g FROM generate_series(1, 9) g",
)
ROWS = "SELECT id, t, left(body, 3) || length(body), f::text FROM {}"
#: The same of the lake.
VALUES = ("id", "t", "concat(left(body, 3), length(body))", "CAST(CAST(f AS int) AS string)")
CHANGES = (
    "UPDATE notes SET f = 20 WHERE id = 2",
    "UPDATE notes SET f = 21, t = 'twice' WHERE id = 2",
    # Its values are in the lake alone, one of them out of line; then with a body that was never sent.
    "DELETE FROM notes WHERE id = 1",
    "BEGIN; UPDATE notes SET f = 22 WHERE id = 2; DELETE FROM notes WHERE id = 2; COMMIT",
    "UPDATE notes SET id = 30 WHERE id = 3",
    # Nobody has seen these.
    "BEGIN; INSERT INTO notes VALUES (40, 'short', 'life', 1); DELETE FROM notes WHERE id = 40; COMMIT",
    "INSERT INTO notes VALUES (1, 'again', NULL, NULL)",
    "BEGIN; UPDATE notes SET id = 3, f = 5 WHERE id = 30; UPDATE notes SET id = 31 WHERE id = 3; COMMIT",
    "BEGIN; DELETE FROM notes WHERE id = 4; INSERT INTO notes VALUES (4, 'x', 'y', 1); COMMIT",
    """BEGIN; INSERT INTO notes VALUES (50, 'a', 'b', 1); UPDATE notes SET f = 9; TRUNCATE notes;
        INSERT INTO notes VALUES (5, 'new', 'b', 2); COMMIT""",
    "INSERT INTO notes SELECT g, 'u', repeat('u', 4000), g FROM generate_series(6, 9) g",
    "UPDATE notes SET t = 'v'",
    "TRUNCATE notes",
    "INSERT INTO notes VALUES (6, 'last', NULL, NULL)",
)


def rule(pattern="public.notes", layout=None, **options):
    return LayoutRule(Pattern.parse(pattern), layout or TableLayout(), mode=HISTORY, **options)


class Cuts:
    """What the source had at each of several LSNs: its own rows, as it says them itself.

    `name`: of the table, now. `rows`: its rows in PostgreSQL's SQL, and `values` the same in Spark's.
    """

    def __init__(self, database, name="notes", rows=ROWS, values=VALUES):
        self._database, self.name, self._rows, self._values = database, name, rows, values
        self.saved = []
        self.save()

    def save(self):
        with connect_pinned(self._database.dsn) as connection:
            rows = connection.execute(self._rows.format(self.name).encode()).fetchall()
            query = b"SELECT pg_current_wal_insert_lsn() - '0/0', clock_timestamp()"
            ((lsn, time),) = connection.execute(query).fetchall()
        self.saved.append((int(lsn), time, sorted(map(repr, rows))))

    def execute(self, *changes):
        for change in changes:
            self._database.execute(change)
            self.save()

    def assert_in(self, snapshot, *, counted=True):
        """At each cut the lake's versions are the source's rows, by LSN and by time; and there are no others."""
        full = f"{STREAM}.public.{self.name}"
        frame = snapshot[full].selectExpr(
            *self._values, "_valid_from_lsn", "_valid_to_lsn", "_valid_from", "_valid_to"
        )
        width = len(self._values)
        found = [(tuple(row[:width]), *row[width:]) for row in frame.collect()]
        assert not counted or snapshot.manifest.tables[full].rows == len(found)
        seen = set()
        for number, (lsn, time, expected) in enumerate(self.saved):
            at = [row for row in found if row[1] < lsn and (row[2] is None or row[2] >= lsn)]
            assert sorted(repr(row[0]) for row in at) == expected, number
            then = [
                row
                for row in found
                if row[3].astimezone(UTC) <= time
                and (row[4] is None or time < row[4].astimezone(UTC))
            ]
            assert sorted(repr(row[0]) for row in then) == expected, number
            seen |= {row[:3] for row in at}
        # Each transaction has a cut behind it, so a version that is in none was never visible.
        assert len(seen) == len(found)
        return snapshot


@pytest.fixture
def notes(spark, tmp_path, database):
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database, ("public.notes",)) as pipeline:
        pipeline.house = pipeline.lakehouse(layouts=[rule()])
        pipeline.wait_for_tables("notes")
        yield pipeline


def live(pipeline):
    return read(pipeline.spark, pipeline.lake, live=True, log=pipeline.log.address)


@pytest.mark.parametrize("ranges", [False, True], ids=["at-once", "in-ranges"])
def test_25_29_a_history_has_the_rows_of_every_commit(notes, database, monkeypatch, ranges):
    if ranges:
        monkeypatch.setattr(plan, "RANGE_BYTES", 1)
    cuts = Cuts(database)
    for number, change in enumerate(CHANGES):
        cuts.execute(change)
        if number % 3 == 2 or number == len(CHANGES) - 1:
            # The next change finds this one's versions in the table, or behind the epoch.
            notes.barrier()
            cuts.assert_in(live(notes), counted=False)
        if number % 4 == 3:
            cuts.assert_in(notes.flush())
    cuts.assert_in(notes.flush())
    assert states(compared(notes, "notes")) == {"notes": EQUAL}
    assert_no_orphans(notes.spark, notes.lake)


def test_6_a_history_survives_dying_writers_and_added_columns(
    notes, database, monkeypatch, request
):
    draw = random.Random(request.config.getoption("--seed"))
    install(database)
    monkeypatch.setattr(epoch_module, "_COMPACT_FILES", 1)
    layout = TableLayout(
        (PartitionField("bucket", "id", 2),), (SortField("_valid_from", False, False),)
    )
    views = [
        ViewDefinition("views.open", "SELECT id, f FROM notes WHERE _valid_to_lsn IS NULL"),
        ViewDefinition("views.counts", "SELECT id, count(*) AS n FROM notes GROUP BY id"),
    ]
    options = {"layouts": [rule(layout=layout, feed="{table}_changes")], "views": views}
    path = notes.head().tables[NOTES].path
    notes.house.close()
    notes.house = notes.lakehouse(**options)
    notes.flush()
    notes.house.run_once()
    cuts = Cuts(database)
    points = ["staged", "before-manifest", "after-manifest"]
    for number in range(5):
        if number == 1:
            # In an epoch of its own: together with a TRUNCATE, which rewrites the table, too, it would be copied.
            notes.house.run_once()
            database.execute("ALTER TABLE notes ADD extra int")
            notes.flush()
        for _ in range(draw.randrange(1, 4)):
            cuts.execute(f"BEGIN; {'; '.join(_change(draw) for _ in range(4))}; COMMIT")
        if number in {0, 2, 3}:
            dies(monkeypatch, notes, points.pop())
            notes.house = notes.lakehouse(**options)
        snapshot = cuts.assert_in(notes.flush())
    assert snapshot["notes"].columns[-5:] == [
        *("extra", "_valid_from", "_valid_from_lsn", "_valid_to", "_valid_to_lsn"),
    ]
    assert notes.head().tables[NOTES].path == path
    with connect_pinned(database.dsn) as connection:
        rows = connection.execute(b"SELECT id, f FROM notes").fetchall()
    assert sorted(map(repr, map(tuple, snapshot["open"].collect()))) == sorted(map(repr, rows))
    counted = snapshot["notes"].groupBy("id").count().collect()
    assert sorted(map(tuple, snapshot["counts"].collect())) == sorted(map(tuple, counted))
    assert not [name for name in snapshot["notes_changes"].columns if name.startswith("_valid")]
    assert states(compared(notes, "notes")) == {"notes": EQUAL}
    assert_no_orphans(notes.spark, notes.lake)


@pytest.mark.iceberg_only("reads by Delta where it says so")
def test_28_a_history_is_a_delta_table_and_a_copy_begins_another(spark, tmp_path, database):
    database.execute(
        *TABLES,
        "CREATE TABLE bag (id int PRIMARY KEY)",
        "ALTER TABLE bag REPLICA IDENTITY FULL",
        'CREATE TABLE taken (id int PRIMARY KEY, "_Valid_To" date)',
    )
    published = ("public.notes", "public.bag", "public.taken")
    with Pipeline(spark, tmp_path, database, published) as pipeline:
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse(layouts=[rule("public.*")], delta=True)
        pipeline.wait_for_tables("notes")

        def refused():
            pipeline.house.run_once(force=True)
            return len(pipeline.head().not_copied) == 2

        wait_for(refused, 60, "refused copies")
        reasons = pipeline.head().not_copied
        assert "the history cannot be kept: it has no key" in reasons[f"{STREAM}.public.bag"]
        assert "its column '_Valid_To' has a name" in reasons[f"{STREAM}.public.taken"]

        cuts = Cuts(database)
        cuts.execute(*CHANGES[:4])
        pipeline.flush()
        cuts.assert_in(read(spark, pipeline.lake, format="delta", allow_stale=True))
        path = pipeline.head().tables[NOTES].path
        requests.ask(open_chain(pipeline.lake), "resync", [NOTES])

        def copied():
            pipeline.house.run_once(force=True)
            table = pipeline.head().tables[NOTES]
            return table.path != path and table.state == "live"

        wait_for(copied, 60, "another copy")
        cuts = Cuts(database)
        cuts.execute(*CHANGES[4:7])
        cuts.assert_in(pipeline.flush())
