"""How rows are removed from a table, and what rows keep that are only moved: position deletes, and row ids."""

from pyiceberg.table import StaticTable

from spark_consumers.lake.epoch import epoch_writer as epoch_module
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.verify import verify
from spark_consumers.lake.writer import requests
from tests.support.capture_stack import STREAM
from tests.support.engines import assert_read_by_engines, metadata_of
from tests.support.lake_check import assert_no_orphans
from tests.support.lake_pipeline import Pipeline
from tests.support.waiting import wait_for
from walsender_bridge.postgres.table_layout import LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern

TABLES = (
    "CREATE TABLE t (id int PRIMARY KEY, v int, part int)",
    "INSERT INTO t SELECT g, g, g % 3 FROM generate_series(1, 300) g",
    "CREATE TABLE bag (a int)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag SELECT g % 7 FROM generate_series(1, 100) g",
)
BY_PART = LayoutRule(Pattern.parse("public.t"), TableLayout.parse(["part"]))


def restarted(pipeline, choice, **options):
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(deletes={"default": choice}, **options)


def equal_everywhere(pipeline, database):
    assert_read_by_engines(database.dsn, pipeline.lake, pipeline.flush())


def deletes_of(pipeline, name):
    """The version of Iceberg's format, and the formats of the files with deletes that PyIceberg plans to read."""
    table = StaticTable.from_metadata(metadata_of(pipeline.lake)[f"{STREAM}.public.{name}"])
    files = {d.file_format for task in table.scan().plan_files() for d in task.delete_files}
    return table.metadata.format_version, {str(kind.value) for kind in files}


def test_a_table_goes_from_each_way_of_removing_rows_to_the_others(spark, tmp_path, database):
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database, ["public.t", "public.bag"]) as pipeline:
        restarted(pipeline, "position-deletes", layouts=[BY_PART])
        pipeline.wait_for_tables("t", "bag")
        paths = {n: t.path for n, t in pipeline.head().tables.items()}
        for change in ("id % 5 = 0", "id % 7 = 0"):
            database.execute(
                f"UPDATE t SET v = -v WHERE {change}",
                f"DELETE FROM t WHERE {change} AND part = 1",
                "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = 2)",
            )
            equal_everywhere(pipeline, database)
            assert deletes_of(pipeline, "t") == deletes_of(pipeline, "bag") == (2, {"PARQUET"})
        restarted(pipeline, "copy-on-write", layouts=[BY_PART])
        wait_for(lambda: pipeline.house.run_once(force=True), 60, "an epoch without changes")
        equal_everywhere(pipeline, database)
        assert deletes_of(pipeline, "t") == deletes_of(pipeline, "bag") == (2, set())
        restarted(pipeline, "position-deletes", layouts=[BY_PART])
        database.execute("UPDATE t SET part = part + 1 WHERE id < 9", "DELETE FROM t WHERE id = 44")
        equal_everywhere(pipeline, database)
        assert deletes_of(pipeline, "t") == (2, {"PARQUET"})
        restarted(pipeline, "vectors", layouts=[BY_PART])
        database.execute("DELETE FROM t WHERE id IN (46, 50)")
        equal_everywhere(pipeline, database)
        version, kinds = deletes_of(pipeline, "t")
        assert version == 3
        assert "PUFFIN" in kinds
        assert {n: t.path for n, t in pipeline.head().tables.items()} == paths
        assert verify(open_chain(pipeline.lake), lambda *_: None).errors == []
        assert_no_orphans(spark, pipeline.lake)


def test_a_table_in_version_3_keeps_vectors_until_it_is_copied_again(
    spark, tmp_path, database, capsys
):
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database, ["public.t"]) as pipeline:
        pipeline.wait_for_tables("t")
        restarted(pipeline, "position-deletes")
        database.execute("UPDATE t SET v = 0 WHERE id = 5")
        equal_everywhere(pipeline, database)
        assert deletes_of(pipeline, "t") == (3, {"PUFFIN"})
        # Logs are in the one or the other, as other tests of the process have left it.
        said = "".join(capsys.readouterr())
        assert "table keeps deletion vectors" in said
        assert f"tuskline table resync {STREAM}.public.t" in said
        requests.ask(open_chain(pipeline.lake), "resync", [f"{STREAM}.public.t"])
        before = pipeline.head().tables[f"{STREAM}.public.t"].path

        def is_another():
            pipeline.house.run_once(force=True)
            return pipeline.head().tables[f"{STREAM}.public.t"].path != before

        wait_for(is_another, 60, "another copy")
        database.execute("UPDATE t SET v = 1 WHERE id = 6")
        equal_everywhere(pipeline, database)
        assert deletes_of(pipeline, "t") == (2, {"PARQUET"})


def lineage(pipeline, name):
    """Of each row of a table of integers, by the first one: its id, and which commit changed it last."""
    table = pipeline.head().tables[f"{STREAM}.public.{name}"]
    frame = pipeline.spark.read.format("iceberg").option("versionAsOf", table.snapshot_id)
    rows = frame.load(str(pipeline.lake / table.path))
    found = rows.selectExpr(rows.columns[0], "_row_id", "_last_updated_sequence_number").collect()
    assert len({row[1] for row in found}) == len(found), "no two rows have the same id"
    return {row[0]: tuple(row[1:]) for row in found}


def files_of(pipeline, name):
    table = StaticTable.from_metadata(metadata_of(pipeline.lake)[f"{STREAM}.public.{name}"])
    return {task.file.file_path for task in table.scan().plan_files()}


def test_rows_that_are_only_moved_keep_their_ids(spark, tmp_path, database, monkeypatch):
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database, ["public.t"]) as pipeline:
        restarted(pipeline, "vectors", layouts=[BY_PART])
        pipeline.wait_for_tables("t")
        database.execute("UPDATE t SET v = -v WHERE id <= 30", "INSERT INTO t VALUES (1000, 1, 1)")
        pipeline.flush()
        before, files = lineage(pipeline, "t"), files_of(pipeline, "t")
        # Small files become one, whose rows are of several commits; and again, with ids that files have by now.
        monkeypatch.setattr(epoch_module, "_COMPACT_FILES", 1)
        for number in range(2, 8):
            database.execute(f"INSERT INTO t VALUES (100{number}, 1, 1), (101{number}, 1, 2)")
            pipeline.flush()
        after = lineage(pipeline, "t")
        assert not files & files_of(pipeline, "t")
        assert {key: after[key] for key in before} == before
        # Written again for another spec and a removed row, of which the other rows of its file are only moved.
        restarted(pipeline, "copy-on-write")
        database.execute("DELETE FROM t WHERE id = 7", "UPDATE t SET v = 5 WHERE id = 8")
        equal_everywhere(pipeline, database)
        last = lineage(pipeline, "t")
        assert set(after) - set(last) == {7}
        assert {key for key in last if last[key] != after[key]} == {8}
        assert last[8][1] > max(sequence for _, sequence in after.values())
