"""Tables that keep deleted rows: what a trigger in PostgreSQL keeps is what the lake has, at each epoch and in live reads."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from spark_consumers import read
from spark_consumers.lake.epoch import epoch_writer as epoch_module
from spark_consumers.lake.epoch import plan
from spark_consumers.lake.equality import cut
from spark_consumers.lake.equality.record import EQUAL
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.views.definition import ViewDefinition
from spark_consumers.lake.writer import requests
from tests.spark.test_equality import behind_the_log, compared, named, states
from tests.spark.test_recorded_changes import install
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_no_orphans
from tests.support.lake_pipeline import Pipeline, dies
from tests.support.pinned import connect_pinned
from tests.support.waiting import wait_for
from walsender_bridge.postgres.column_masks import parse_masks
from walsender_bridge.postgres.table_layout import (
    CURRENT,
    SOFT_DELETE,
    LayoutRule,
    PartitionField,
    SortField,
    TableLayout,
)
from walsender_bridge.postgres.table_patterns import Pattern

NOTES = f"{STREAM}.public.notes"
#: Behind the table another one, which is not published, has what a trigger keeps.
TABLES = (
    "CREATE TABLE notes (id int PRIMARY KEY, t text, body text, f float8)",
    "ALTER TABLE notes ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE kept (id int PRIMARY KEY, t text, body text, f float8, gone boolean NOT NULL)",
    """CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF TG_OP = 'TRUNCATE' THEN
            UPDATE kept SET gone = true;
            RETURN NULL;
        END IF;
        IF TG_OP = 'DELETE' OR TG_OP = 'UPDATE' AND OLD.id IS DISTINCT FROM NEW.id THEN
            UPDATE kept SET gone = true WHERE id = OLD.id;
        END IF;
        IF TG_OP <> 'DELETE' THEN
            DELETE FROM kept WHERE id = NEW.id;
            INSERT INTO kept VALUES (NEW.id, NEW.t, NEW.body, NEW.f, false);
        END IF;
        RETURN NULL;
    END $$""",
    "CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON notes FOR EACH ROW EXECUTE FUNCTION keep()",
    "CREATE TRIGGER keep_all AFTER TRUNCATE ON notes FOR EACH STATEMENT EXECUTE FUNCTION keep()",
    "INSERT INTO notes SELECT g, 't' || g, repeat(chr(96 + g), 4000), g FROM generate_series(1, 9) g",
)
COLUMNS = "id, t, left(body, 3) || length(body), f::text"
CHANGES = (
    # Deleted by its key alone: the lake has the values, one of which is out of line.
    "DELETE FROM notes WHERE id = 1",
    "BEGIN; UPDATE notes SET f = 20 WHERE id = 2; DELETE FROM notes WHERE id = 2; COMMIT",
    "UPDATE notes SET id = 30 WHERE id = 3",
    "BEGIN; INSERT INTO notes VALUES (40, 'short', 'life', 1); DELETE FROM notes WHERE id = 40; COMMIT",
    "INSERT INTO notes VALUES (1, 'again', NULL, NULL)",
    # A key that a deleted row had, and a row that is deleted twice.
    "BEGIN; UPDATE notes SET id = 2, t = 'moved' WHERE id = 4; UPDATE notes SET id = 4 WHERE id = 30; COMMIT",
    "BEGIN; DELETE FROM notes WHERE id = 4; INSERT INTO notes VALUES (4, 'x', 'y', 1); DELETE FROM notes WHERE id = 4; COMMIT",
    "BEGIN; INSERT INTO notes VALUES (50, 'a', 'b', 1); TRUNCATE notes; INSERT INTO notes VALUES (5, 'new', 'b', 2); COMMIT",
    "INSERT INTO notes SELECT g, 'u', repeat('u', 4000), g FROM generate_series(6, 9) g",
    "TRUNCATE notes",
)


def rule(name="notes", mode=SOFT_DELETE, masks=None, layout=None):
    pattern = Pattern.parse(f"public.{name}")
    return LayoutRule(pattern, layout or TableLayout(), masks=parse_masks(masks or {}), mode=mode)


def kept_rows(database):
    with connect_pinned(database.dsn) as connection:
        rows = connection.execute(f"SELECT {COLUMNS}, gone FROM kept".encode()).fetchall()
    return sorted(map(repr, rows))


def lake_rows(snapshot):
    values = ("id", "t", "concat(left(body, 3), length(body))", "CAST(CAST(f AS int) AS string)")
    found = snapshot[NOTES].selectExpr(*values, "_deleted_at", "_deleted_lsn")
    rows = []
    for row in found.collect():
        *values, at, lsn = row
        assert (at is None) == (lsn is None)
        rows.append((*values, at is not None))
    return sorted(map(repr, rows))


def assert_kept(pipeline, snapshot):
    """The lake's rows are the trigger's, those that are deleted, too; and the source's are those that are not."""
    assert lake_rows(snapshot) == kept_rows(pipeline.database)
    return snapshot


@pytest.fixture
def soft(spark, tmp_path, database):
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database, ("public.notes",)) as pipeline:
        pipeline.house = pipeline.lakehouse(layouts=[rule()])
        pipeline.wait_for_tables("notes")
        yield pipeline


@pytest.mark.parametrize("ranges", [False, True], ids=["at-once", "in-ranges"])
def test_a_deleted_row_stays_with_its_last_values(soft, database, monkeypatch, ranges):
    if ranges:
        monkeypatch.setattr(plan, "RANGE_BYTES", 1)
    before = datetime.now(UTC) - timedelta(seconds=1)
    for number, change in enumerate(CHANGES):
        database.execute(change)
        soft.barrier()
        live = read(soft.spark, soft.lake, live=True, log=soft.log.address)
        assert_kept(soft, live)
        if number % 3 == 0:
            # The next change finds this one's rows in the table, or behind the epoch.
            assert_kept(soft, soft.flush())
    snapshot = assert_kept(soft, soft.flush())
    rows = snapshot[NOTES].selectExpr("_deleted_at", "_deleted_lsn").collect()
    assert all(before <= row[0].astimezone(UTC) <= datetime.now(UTC) for row in rows)
    assert len({row[1] for row in rows}) > 3
    assert snapshot.manifest.tables[NOTES].rows == len(rows)
    assert states(compared(soft, "notes")) == {"notes": EQUAL}
    assert_no_orphans(soft.spark, soft.lake)


def test_a_verified_table_may_have_deleted_rows_and_no_others(soft, database, monkeypatch):
    # As if Tuskline did not find out that a table was out of the publication.
    monkeypatch.setattr(cut, "unshown", lambda *_: {})
    database.execute("DELETE FROM notes WHERE id < 4", "UPDATE notes SET id = 60 WHERE id = 6")
    soft.flush()
    assert states(compared(soft, "notes")) == {"notes": EQUAL}
    behind_the_log(database, "notes", "DELETE FROM notes WHERE id = 5")
    assert named(compared(soft, "notes"), "notes") == [("extra", {"id": "5"}, ())]


def test_random_changes_with_partitions_columns_and_dying_writers(
    soft, database, monkeypatch, request
):
    draw = random.Random(request.config.getoption("--seed"))
    install(database)
    monkeypatch.setattr(epoch_module, "_COMPACT_FILES", 1)
    layout = TableLayout(
        (PartitionField("bucket", "id", 2),), (SortField("_deleted_at", False, False),)
    )
    path = soft.head().tables[NOTES].path
    soft.house.close()
    soft.house = soft.lakehouse(layouts=[rule(layout=layout)])
    soft.flush()
    soft.house.run_once()
    for number in range(8):
        if number == 2:
            # In an epoch of its own: together with a TRUNCATE, which rewrites the table, too, it would be copied without the deleted rows.
            soft.house.run_once()
            database.execute(
                "ALTER TABLE notes ADD extra int; ALTER TABLE notes RENAME extra TO more"
            )
            soft.flush()
        for _ in range(draw.randrange(1, 4)):
            database.execute(f"BEGIN; {'; '.join(_change(draw) for _ in range(4))}; COMMIT")
        if number in {3, 6}:
            dies(monkeypatch, soft, draw.choice(["staged", "before-manifest", "after-manifest"]))
            soft.house = soft.lakehouse(layouts=[rule(layout=layout)])
        soft.barrier()
        assert_kept(soft, read(soft.spark, soft.lake, live=True, log=soft.log.address))
        assert_kept(soft, soft.flush())
    assert soft.head().tables[NOTES].path == path
    assert soft.flush()[NOTES].columns == [
        *("id", "t", "body", "f", "more"),
        *("_deleted_at", "_deleted_lsn"),
    ]
    assert states(compared(soft, "notes")) == {"notes": EQUAL}
    assert_no_orphans(soft.spark, soft.lake)


def _change(draw):
    key, other = draw.randrange(12), draw.randrange(12)
    body = draw.choice(["NULL", "repeat('z', 4000)", "'b'"])
    return draw.choice(
        [
            f"DELETE FROM notes WHERE id = {key}",
            f"INSERT INTO notes (id, t, body, f) VALUES ({key}, 't{other}', {body}, {other}) ON CONFLICT DO NOTHING",
            f"INSERT INTO notes (id, t, body, f) VALUES ({key}, 't{other}', {body}, {other}) ON CONFLICT DO NOTHING",
            f"UPDATE notes SET f = {other} WHERE id = {key}",
            f"UPDATE notes SET body = {body} WHERE id = {key}",
            f"UPDATE notes SET id = {key} WHERE id = {other} AND NOT EXISTS (SELECT FROM notes WHERE id = {key})",
            f"UPDATE notes SET id = {key} WHERE id = {other} AND NOT EXISTS (SELECT FROM notes WHERE id = {key})",
            "TRUNCATE notes" if draw.random() < 0.3 else "SELECT 1",
        ]
    )


def test_a_copy_forgets_deleted_rows_and_earlier_epochs_have_them(soft, database):
    """For whatever reason the table is copied: on request, or for changes that have no message of their own."""
    install(database)
    database.execute("DELETE FROM notes WHERE id < 4")
    old = assert_kept(soft, soft.flush())
    soft.house.run_once()
    path = soft.head().tables[NOTES].path

    def copied(before):
        table = soft.head().tables[NOTES]
        return table.path != before and table.state == "live" and not table.resync

    requests.ask(open_chain(soft.lake), "resync", [NOTES])
    wait_for(lambda: soft.flush() and copied(path), 60, "the copy")
    database.execute("DELETE FROM kept WHERE gone")
    assert_kept(soft, soft.flush())
    # What is deleted from here on is kept, and a key that was forgotten is a new row.
    database.execute("DELETE FROM notes WHERE id = 5", "INSERT INTO notes VALUES (1, 'again')")
    assert_kept(soft, soft.flush())
    # A column that is added and a TRUNCATE before one comparison look like a rewrite.
    path = soft.head().tables[NOTES].path
    soft.house.run_once()
    database.execute(
        "BEGIN; TRUNCATE notes; INSERT INTO notes VALUES (6, 'new'); ALTER TABLE notes ADD extra int; COMMIT"
    )
    wait_for(lambda: soft.flush() and copied(path), 60, "another copy")
    database.execute("DELETE FROM kept WHERE gone")
    assert_kept(soft, soft.flush())
    # A reader of an earlier epoch has all of them.
    assert old[NOTES].where("_deleted_at IS NOT NULL").count() == 3
    assert old[NOTES].count() == 9
    assert_no_orphans(soft.spark, soft.lake)


def test_masks_stay_and_views_choose_the_living(spark, tmp_path, database):
    database.execute(*TABLES)
    views = (
        ViewDefinition("views.living", "SELECT id, f FROM notes WHERE _deleted_at IS NULL"),
        ViewDefinition(
            "views.counts",
            "SELECT _deleted_at IS NULL AS lives, count(*) AS n FROM notes GROUP BY 1",
        ),
    )
    with Pipeline(spark, tmp_path, database, ("public.notes",)) as pipeline:
        masks = {"t": {"constant": "masked"}, "body": "drop"}
        pipeline.house = pipeline.lakehouse(layouts=[rule(masks=masks)], views=views)
        pipeline.wait_for_tables("notes")
        for changes in (CHANGES[:6], CHANGES[6:8], CHANGES[8:]):
            database.execute(*changes)
            snapshot = pipeline.flush()
            rows = snapshot[NOTES].collect()
            assert {row.t for row in rows} == {"masked"}
            assert snapshot[NOTES].columns == ["id", "t", "f", "_deleted_at", "_deleted_lsn"]
            with connect_pinned(database.dsn) as connection:
                living = connection.execute("SELECT id, f FROM notes").fetchall()
                counts = connection.execute("SELECT NOT gone, count(*) FROM kept GROUP BY 1")
                expected = counts.fetchall()
            assert sorted(map(tuple, snapshot["living"].collect())) == sorted(living)
            assert sorted(map(tuple, snapshot["counts"].collect())) == sorted(expected)


def test_tables_whose_deleted_rows_cannot_be_kept_are_refused_by_name(spark, tmp_path, database):
    database.execute(
        "CREATE TABLE bag (a int)",
        "ALTER TABLE bag REPLICA IDENTITY FULL",
        'CREATE TABLE taken (id int PRIMARY KEY, "_Deleted_At" date)',
        "CREATE TABLE grows (id int PRIMARY KEY)",
    )
    published = ("public.bag", "public.taken", "public.grows")
    with Pipeline(spark, tmp_path, database, published) as pipeline:
        pipeline.house = pipeline.lakehouse(layouts=[rule("*")])
        pipeline.wait_for_tables("grows")

        def refused(count):
            pipeline.house.run_once(force=True)
            return len(pipeline.head().not_copied) == count

        wait_for(lambda: refused(2), 60, "refused copies")
        reasons = pipeline.head().not_copied
        assert "deleted rows cannot be kept: it has no key" in reasons[f"{STREAM}.public.bag"]
        assert (
            "its column '_Deleted_At' has a name that the lake uses"
            in reasons[f"{STREAM}.public.taken"]
        )
        database.execute(
            "ALTER TABLE grows ADD _deleted_lsn bigint", "INSERT INTO grows VALUES (1, 2)"
        )
        pipeline.barrier()
        wait_for(lambda: refused(3), 60, "a refused copy")
        assert "'_deleted_lsn'" in pipeline.head().not_copied[f"{STREAM}.public.grows"]


def test_another_mode_and_a_resync_begin_again(soft, database):
    database.execute("DELETE FROM notes WHERE id < 5")
    assert soft.flush()[NOTES].count() == 9
    paths = {soft.head().tables[NOTES].path}
    for mode, columns in ((CURRENT, 4), (SOFT_DELETE, 6)):
        soft.house.close()
        soft.house = soft.lakehouse(layouts=[rule(mode=mode)])

        def copied():
            soft.house.run_once(force=True)
            table = soft.head().tables[NOTES]
            return table.path not in paths and table.state == "live"

        wait_for(copied, 60, "a copy in another mode")
        paths.add(soft.head().tables[NOTES].path)
        snapshot = soft.flush()
        assert (snapshot[NOTES].count(), len(snapshot[NOTES].columns)) == (5, columns)
    links = open_chain(soft.lake).newest(50)
    reasons = [link.tables[NOTES].reason for link in links if NOTES in link.tables]
    assert any("its mode is configured differently" in reason for reason in reasons)
