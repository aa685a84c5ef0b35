"""Histories of tables that are masked, copied in chunks, renamed, switched to another mode, compacted; of keys that are no ordinary numbers."""

import hmac
import time
from datetime import UTC, datetime, timedelta
from hashlib import sha256

import pytest

from spark_consumers import read
from spark_consumers.lake import reader
from spark_consumers.lake.copy import bootstrap
from spark_consumers.lake.equality.record import EQUAL
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.status import read_status, table_rows
from spark_consumers.lake.writer import requests
from tests.spark.test_copy_chunks import CHUNK
from tests.spark.test_copy_chunks import ROWS as EVENTS
from tests.spark.test_copy_chunks import TABLES as CHUNKED
from tests.spark.test_copy_chunks import changes as between_chunks
from tests.spark.test_equality import compared, states
from tests.spark.test_history import CHANGES, NOTES, TABLES, Cuts, live, rule
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_no_orphans
from tests.support.lake_pipeline import Pipeline, maintaining
from tests.support.waiting import wait_for
from walsender_bridge.errors import TrimmedError
from walsender_bridge.postgres.column_masks import parse_masks
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.postgres.table_layout import CURRENT, LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern

KEY = b"0123456789abcdef0123456789abcdef"
#: A key of numbers that are none, equal to themselves alone; and 0, which -0 equals.
MARKS = (
    "CREATE TABLE marks (k float8, n numeric, at int, PRIMARY KEY (k, n))",
    "INSERT INTO marks VALUES ('NaN', 'NaN', 0), ('Infinity', 'NaN', 1), ('-Infinity', 2.50, 2), (0, 1, 3)",
)
MARK_ROWS = "SELECT CASE WHEN k IN ('NaN', 'Infinity', '-Infinity') THEN k::text ELSE k::int::text END, n::text, at FROM {}"
MARK_VALUES = (
    (
        "CASE WHEN k = double('inf') THEN 'Infinity' WHEN k = double('-inf') THEN '-Infinity' WHEN isnan(k) THEN 'NaN'"
        " ELSE CAST(CAST(k AS int) AS string) END"
    ),
    "n",
    "at",
)
MARK_CHANGES = (
    "UPDATE marks SET at = 10 WHERE k = 'NaN'",
    "UPDATE marks SET k = 'NaN', n = 2.50 WHERE k = '-Infinity'",
    "UPDATE marks SET k = '-0' WHERE k = 0",
    "DELETE FROM marks WHERE k = 'Infinity'",
    "UPDATE marks SET n = 'NaN', at = 5 WHERE k = '0'",
    "INSERT INTO marks VALUES ('Infinity', 'NaN', 7), ('-Infinity', 2.50, 8)",
    "UPDATE marks SET at = at + 1",
)


def shown(pipeline, *names):
    pipeline.house.run_once(force=True)
    return {f"{STREAM}.public.{name}" for name in names} <= {*pipeline.head().tables}


def begins(pipeline, name=NOTES):
    """Where the status says that the history of a table begins: its LSN, and the time."""
    chain = open_chain(pipeline.lake)
    rows = table_rows(pipeline.head(), read_status(chain), 0.0)
    (history,) = (row["history"] for row in rows if row["table"] == name)
    assert history is not None
    return parse_lsn(history["begins_at_lsn"]), datetime.fromisoformat(history["begins_at"])


@pytest.mark.iceberg_only("reads by Delta where it says so")
def test_14_28_histories_swap_their_names_on_delta_too(spark, tmp_path, database):
    database.execute(
        *TABLES,
        *MARKS,
        "CREATE TABLE others (LIKE notes INCLUDING ALL)",
        "INSERT INTO others SELECT * FROM notes WHERE id < 4",
    )
    published = ("public.notes", "public.others", "public.marks")
    with Pipeline(spark, tmp_path, database, published) as pipeline:
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse(layouts=[rule("public.*")], delta=True)
        wait_for(lambda: shown(pipeline, "notes", "others", "marks"), 90, "the tables")
        paths = {name: table.path for name, table in pipeline.head().tables.items()}
        notes, others = Cuts(database), Cuts(database, "others")
        marks = Cuts(database, "marks", MARK_ROWS, MARK_VALUES)
        notes.execute(*CHANGES[:3])
        others.save()
        for change in MARK_CHANGES[:4]:
            marks.execute(change)
        pipeline.flush()
        database.execute(
            "BEGIN; UPDATE notes SET t = 'before' WHERE id = 5; UPDATE others SET f = 8; ALTER TABLE notes RENAME TO x;"
            " ALTER TABLE others RENAME TO notes; ALTER TABLE x RENAME TO others; UPDATE notes SET t = 'swapped';"
            " UPDATE others SET f = 9 WHERE id = 5; COMMIT"
        )
        notes.name, others.name = others.name, notes.name
        for cuts in (notes, others):
            cuts.save()
        notes.execute("UPDATE others SET id = 60 WHERE id = 6", "DELETE FROM others WHERE id = 7")
        others.execute("DELETE FROM notes WHERE id = 2")
        for change in MARK_CHANGES[4:]:
            marks.execute(change)
        pipeline.barrier()
        # A live read has the names of its epoch.
        marks.assert_in(live(pipeline), counted=False)
        snapshot = pipeline.flush()
        by_delta = read(spark, pipeline.lake, format="delta")
        for cuts in (notes, others, marks):
            cuts.assert_in(snapshot)
            cuts.assert_in(by_delta)
        swapped = {NOTES: f"{STREAM}.public.others", f"{STREAM}.public.others": NOTES}
        assert {n: t.path for n, t in pipeline.head().tables.items()} == {
            swapped.get(name, name): path for name, path in paths.items()
        }
        assert states(compared(pipeline)) == dict.fromkeys(("notes", "others", "marks"), EQUAL)
        assert_no_orphans(spark, pipeline.lake)


def test_21_a_history_that_is_copied_in_chunks_is_complete_from_the_last_snapshot_on(
    spark, tmp_path, database, monkeypatch
):
    """Masks, too: every version has them."""
    database.execute(*CHUNKED, *TABLES)
    really, turns = bootstrap.TableCopier._with_next, []

    def with_next(copier, table, before, *given):
        if table.published.name == "events":
            turns.append(table.snapshot.lsn)
            database.execute(*between_chunks(len(turns)))
        return really(copier, table, before, *given)

    monkeypatch.setattr(bootstrap, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(bootstrap.TableCopier, "_with_next", with_next)
    with Pipeline(spark, tmp_path, database, ("public.events", "public.notes")) as pipeline:
        pipeline.house.close()
        masks = parse_masks({"t": "hash", "f": "drop"})
        pipeline.house = pipeline.lakehouse(
            layouts=[rule(masks=masks), rule("public.*")], copy_chunk_bytes=CHUNK, mask_key=KEY
        )
        wait_for(lambda: shown(pipeline, "events", "notes"), 300, "the tables")
        assert len(turns) >= 3
        cuts = Cuts(
            database,
            "events",
            "SELECT id, n, left(body, 9), length(long) FROM {} WHERE n > 0 OR id % 50 = 0",
            ("id", "n", "left(body, 9)", "length(long)"),
        )
        cuts.execute(*between_chunks(60)[:5])
        database.execute(*CHANGES[:3], "UPDATE notes SET t = 'twice' WHERE id = 4")
        frame = pipeline.flush()["events"]
        lsn, at = begins(pipeline, f"{STREAM}.public.events")
        assert lsn == max(turns)
        assert abs(at - datetime.now(UTC)) < timedelta(minutes=5)
        # From there on it is complete, and no version begins between the snapshots that has not been seen by then.
        found = frame.where("n > 0 OR id % 50 = 0").selectExpr(
            *("id", "n", "left(body, 9)", "length(long)"), "_valid_from_lsn", "_valid_to_lsn"
        )
        rows = [(tuple(row[:4]), row[4], row[5]) for row in found.collect()]
        for number, (cut, _, expected) in enumerate(cuts.saved):
            there = [row for row in rows if row[1] < cut and (row[2] is None or row[2] >= cut)]
            assert sorted(repr(row[0]) for row in there) == expected, number
        assert frame.where("_valid_to_lsn <= _valid_from_lsn").count() == 0
        assert frame.count() > EVENTS

        versions = pipeline.flush()[NOTES]
        assert versions.columns[:3] == ["id", "t", "body"]
        texts = {f"t{g}" for g in range(1, 10)} | {"twice"}
        hashed = {hmac.new(KEY, text.encode(), sha256).hexdigest() for text in texts}
        assert {row["t"] for row in versions.collect()} == hashed
        assert versions.where("_valid_to_lsn IS NOT NULL").count() == 4


def test_another_mode_is_another_copy_and_a_history_begins_with_each(
    spark, tmp_path, database, monkeypatch
):
    # No reader of this process keeps an epoch.
    monkeypatch.setattr(reader, "lease_on", lambda _: None)
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database, ("public.notes",)) as pipeline:

        def switched(mode):
            before = pipeline.head().tables[NOTES].path
            rules = [LayoutRule(Pattern.parse("public.notes"), TableLayout(), mode=mode)]
            pipeline.house.close()
            pipeline.house = pipeline.lakehouse(layouts=rules, retention_seconds=0.5)

            def is_copied():
                pipeline.house.run_once(force=True)
                table = pipeline.head().tables[NOTES]
                return table.path != before and table.state == "live"

            wait_for(is_copied, 60, f"the copy for {mode}")
            return pipeline.flush()

        pipeline.wait_for_tables("notes")
        pipeline.flush()
        assert (
            table_rows(pipeline.head(), read_status(open_chain(pipeline.lake)), 0.0)[0]["history"]
            is None
        )
        switched("history")
        first = begins(pipeline)
        cuts = Cuts(database)
        for number in range(6):
            cuts.execute(*CHANGES[2 * number : 2 * number + 2])
            snapshot = cuts.assert_in(pipeline.flush())
        # The beginning is what `min(_valid_from)` of the copied rows is.
        ((at, lsn),) = (
            snapshot[NOTES].selectExpr("min(_valid_from)", "min(_valid_from_lsn)").collect()
        )
        assert lsn + 1 == first[0]
        assert abs(at.astimezone(UTC) - first[1]) <= timedelta(milliseconds=1)
        # Small files become one, and what is older than the retention is expired: versions are not.
        epoch = snapshot.epoch
        with maintaining(pipeline, settled=0) as made:
            wait_for(lambda: pipeline.house.run_once() or made.summary.accepted, 60, "a compaction")
        cuts.execute(*CHANGES[12:])
        cuts.assert_in(pipeline.flush())
        cuts.assert_in(_expired(pipeline, epoch, database))
        assert states(compared(pipeline, "notes")) == {"notes": EQUAL}
        assert begins(pipeline) == first

        current = switched(CURRENT)
        assert current[NOTES].columns == ["id", "t", "body", "f"]
        database.execute("UPDATE notes SET f = 99")
        switched("history")
        second = begins(pipeline)
        assert second[0] > first[0]
        assert second[1] > first[1]
        cuts = Cuts(database)
        cuts.execute("INSERT INTO notes VALUES (70, 'a', 'b', 1)", "DELETE FROM notes WHERE id = 6")
        cuts.assert_in(pipeline.flush())
        # So does a copy that is asked for.
        requests.ask(open_chain(pipeline.lake), "resync", [NOTES])

        def is_another():
            pipeline.house.run_once(force=True)
            return begins(pipeline)[0] > second[0]

        wait_for(is_another, 60, "another history")
        assert pipeline.flush()[NOTES].where("_valid_to_lsn IS NOT NULL").count() == 0


def _expired(pipeline, epoch, database):
    """The newest epoch, once this one has expired."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        database.execute("SELECT pg_logical_emit_message(true, '', '')")
        newest = pipeline.flush()
        try:
            read(pipeline.spark, pipeline.lake, epoch=epoch)
        except TrimmedError:
            return newest
    pytest.fail(f"epoch {epoch} has not expired")
