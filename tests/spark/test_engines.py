"""What other engines show of a lake: PostgreSQL's columns and rows at the published cut, after changes of every kind."""

from contextlib import closing

import pytest
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.table import StaticTable

from spark_consumers.lake.epoch import epoch_writer as epoch_module
from tests.cluster.test_types import SETUP, TEXTUAL, TYPED
from tests.support.capture_stack import STREAM
from tests.support.engines import assert_read_by_engines, connected, metadata_of
from tests.support.lake_check import assert_no_orphans
from tests.support.lake_pipeline import PUBLISHED, TABLES, Pipeline
from tests.support.pinned import connect_pinned
from tests.support.trino import QueryError, trino
from tests.support.waiting import wait_for
from walsender_bridge.postgres.table_layout import LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern

MORE_TABLES = (
    "CREATE TABLE days (day date, id int, note text, PRIMARY KEY (day, id)) PARTITION BY RANGE (day)",
    "CREATE TABLE days_1 PARTITION OF days FOR VALUES FROM ('2024-01-01') TO ('2024-02-01')",
    "CREATE TABLE days_2 PARTITION OF days FOR VALUES FROM ('2024-02-01') TO ('2024-03-01')",
    "INSERT INTO days SELECT date '2024-01-01' + g, g, 'n' || g FROM generate_series(0, 58) g",
    "CREATE TABLE many (id bigint PRIMARY KEY, v int)",
)
ALL = (*PUBLISHED, "public.days", "public.many")
#: Each is an epoch.
EPOCHS = (
    (
        "UPDATE docs SET title = title || '!' WHERE id < 5",
        "UPDATE docs SET id = id + 100 WHERE id > 7",
        "UPDATE pairs SET b = 'xx', a = 5 WHERE a = 1",
        "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE t = 'three')",
        "UPDATE days SET day = day + 31 WHERE day = '2024-01-10'",
        "DELETE FROM days WHERE id % 7 = 0",
        "UPDATE many SET v = -v WHERE id % 1000 = 1 OR id % 4999 = 0",
    ),
    (
        "BEGIN; INSERT INTO docs SELECT 9, 'back', 'b', 1, 'NaN'; DELETE FROM docs WHERE id < 3; COMMIT",
        "UPDATE bag SET a = 2 WHERE f = '-0'",
        "INSERT INTO bag SELECT 1, 0, 'three', '{a,NULL}' FROM generate_series(1, 2)",
        "DELETE FROM many WHERE id BETWEEN 1000 AND 70000 AND id % 3 > 0",
    ),
    (
        "ALTER TABLE docs ADD extra timestamptz",
        "UPDATE docs SET extra = '2024-01-01 00:00+02' WHERE id = 4",
        "ALTER TABLE bag ADD more numeric(9, 2)",
        "INSERT INTO bag (a, more) VALUES (3, 4.50)",
        "TRUNCATE pairs",
        "INSERT INTO pairs VALUES (7, 'new')",
    ),
)
REMADE = (
    ("ALTER TABLE docs RENAME title TO heading",),
    ("ALTER TABLE docs ALTER n TYPE numeric(20, 3)", "ALTER TABLE pairs ALTER a TYPE bigint"),
    ("ALTER TABLE docs DROP COLUMN f", "ALTER TABLE bag DROP COLUMN t", "TRUNCATE days"),
)
TOUCHED = (
    "UPDATE docs SET n = n + 1",
    "UPDATE pairs SET tags = '{1}'",
    "INSERT INTO bag (a) VALUES (9)",
)


def followed(pipeline, database):
    """Every engine and our own reader have PostgreSQL's rows at the cut."""
    assert_read_by_engines(database.dsn, pipeline.lake, pipeline.flush())


def assert_counted(pipeline, database):
    """Counts are right, which may come from the metadata, and filters, by which data files are left out."""
    file = metadata_of(pipeline.lake)[f"{STREAM}.public.many"]
    for condition in ("true", "v < 0", "id > 4000"):
        with database.connect() as connection:
            own = f"SELECT count(*) FROM many WHERE {condition}".encode()
            wanted = connection.execute(own).fetchone()
        with closing(connected()) as duckdb:
            query = f"SELECT count(*) FROM iceberg_scan(?) WHERE {condition}"
            assert duckdb.execute(query, [file]).fetchone() == wanted
        row_filter = AlwaysTrue() if condition == "true" else condition
        scan = StaticTable.from_metadata(file).scan(row_filter=row_filter)
        assert (scan.count(),) == (scan.to_arrow().num_rows,) == wanted


@pytest.mark.parametrize(
    ("rows", "each"),
    # So many rows have several row groups, so positions are of all sizes.
    [(5_000, False), pytest.param(200_000, True, marks=pytest.mark.long)],
    ids=["once", "each epoch"],
)
@pytest.mark.timeout(600)
def test_other_engines_read_postgresql_s_rows_after_every_kind_of_change(
    spark, tmp_path, database, monkeypatch, rows, each
):
    monkeypatch.setattr(epoch_module, "_COMPACT_FILES", 3)
    database.execute(*TABLES, *MORE_TABLES)
    database.execute(f"INSERT INTO many SELECT g, g FROM generate_series(1, {rows}) g")
    with Pipeline(spark, tmp_path, database, ALL) as pipeline:
        pipeline.wait_for_tables("docs", "pairs", "bag", "days", "many")
        for statements in EPOCHS:
            database.execute(*statements)
            followed(pipeline, database) if each else pipeline.flush()
        followed(pipeline, database)
        assert list(pipeline.lake.glob("tables/*/*/*/data/*.puffin"))
        assert_counted(pipeline, database)
        for number, remade in enumerate(REMADE, 1):
            database.execute(*remade, *TOUCHED)
            if each or number == len(REMADE):
                followed(pipeline, database)


WRITTEN_AGAIN = {"default": "copy-on-write", f"{STREAM}.public.days": "vectors"}


def deletes_of(pipeline):
    """Of each table the version of Iceberg's format, and whether PyIceberg sees files with deletes in it."""
    found = {}
    for name, file in metadata_of(pipeline.lake).items():
        table = StaticTable.from_metadata(file)
        files = [d for task in table.scan().plan_files() for d in task.delete_files]
        found[name.rpartition(".")[2]] = (table.metadata.format_version, bool(files))
    return found


def test_a_table_that_is_copied_on_write_has_no_deletes_at_all(spark, tmp_path, database):
    names = ("docs", "bag", "days", "odd")
    database.execute(
        *TABLES,
        *MORE_TABLES,
        "CREATE TABLE odd (id int PRIMARY KEY, d date)",
        "INSERT INTO odd VALUES (1, '2024-01-01'), (2, '2024-01-02')",
    )
    aside = {"on_unrepresentable_value": {"default": "quarantine"}}
    with Pipeline(spark, tmp_path, database, [f"public.{name}" for name in names]) as pipeline:
        pipeline.wait_for_tables(*names)
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse(**aside)
        database.execute(
            *(statement for statement in EPOCHS[0] if "many" not in statement),
            "INSERT INTO odd VALUES (3, 'infinity')",
            "DELETE FROM odd WHERE id = 1",
        )
        pipeline.flush()
        before = pipeline.head().tables
        assert all(deletes for _, deletes in deletes_of(pipeline).values())
        pipeline.house.close()
        # Without a change of a table, and without a copy.
        pipeline.house = pipeline.lakehouse(deletes=WRITTEN_AGAIN, **aside)
        wait_for(lambda: pipeline.house.run_once(force=True), 60, "the epoch that replaces vectors")
        after = pipeline.head().tables
        assert {n: t.path for n, t in after.items()} == {n: t.path for n, t in before.items()}
        assert {n: t.rows for n, t in after.items()} == {n: t.rows for n, t in before.items()}
        assert [n for n, (_, deletes) in deletes_of(pipeline).items() if deletes] == ["days"]
        # Of a table that is only rewritten, the quarantined rows are kept.
        assert after[f"{STREAM}.public.odd"].quarantined_rows == 1
        database.execute(
            "DELETE FROM odd WHERE id = 3",
            *(s for epoch in EPOCHS[1:] for s in epoch if "many" not in s and "docs" not in s),
            "ALTER TABLE docs RENAME title TO heading",
            "UPDATE docs SET n = 0 WHERE id = 4",
        )
        pipeline.flush()
        database.execute("UPDATE docs SET n = 1 WHERE id = 5")
        followed(pipeline, database)
        # A copy has the version of the format that engines without vectors know, until its first vector.
        assert deletes_of(pipeline)["docs"] == (2, False)
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse()
        database.execute("UPDATE docs SET n = 2 WHERE id = 6")
        followed(pipeline, database)
        assert deletes_of(pipeline)["docs"] == (3, True)
        assert_no_orphans(pipeline.spark, pipeline.lake)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_trino_reads_tables_that_are_copied_on_write(spark, tmp_path, database):
    kinds = {**TYPED, **TEXTUAL}
    database.execute(*TABLES, *MORE_TABLES, *SETUP, types_table(kinds))
    fill_types(database, kinds, 1)
    names = ("docs", "bag", "days", "pairs", "t")
    tables = [f"public.{name}" for name in names]
    with (
        trino(tmp_path / "trino") as server,
        Pipeline(spark, tmp_path, database, tables) as pipeline,
    ):
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse(deletes={"default": "copy-on-write"})
        pipeline.wait_for_tables(*names)
        fill_types(database, kinds, 1000)
        database.execute("DELETE FROM t WHERE id % 5 = 0")
        for statements in EPOCHS:
            database.execute(*(s for s in statements if "many" not in s))
            shown = pipeline.flush()
        assert {version for version, _ in deletes_of(pipeline).values()} == {2}
        assert_read_by_engines(database.dsn, pipeline.lake, shown, {"Trino": server.rows})
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse()
        database.execute("UPDATE docs SET n = 2 WHERE id = 6")
        pipeline.flush()
        assert deletes_of(pipeline)["docs"] == (3, True)
        # It fails, rather than show what was removed.
        with pytest.raises(QueryError, match="Unexpected PUFFIN file format"):
            server.rows(metadata_of(pipeline.lake)[f"{STREAM}.public.docs"])
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse(deletes={"default": "copy-on-write"})
        shown = pipeline.flush()
        assert deletes_of(pipeline)["docs"] == (3, False)
        assert_read_by_engines(database.dsn, pipeline.lake, shown, {"Trino": server.rows})


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_trino_reads_position_deletes_in_tables_with_partitions(spark, tmp_path, database):
    database.execute(
        *TABLES, *MORE_TABLES, "INSERT INTO many SELECT g, g FROM generate_series(1, 99) g"
    )
    names = ("docs", "bag", "days", "pairs", "many")
    layouts = [
        LayoutRule(Pattern.parse(f"public.{name}"), TableLayout.parse(fields))
        for name, fields in (
            ("docs", ["bucket(3, id)", "truncate(1, title)"]),
            ("days", ["month(day)"]),
            ("pairs", ["hour(at)", "b"]),
            ("many", ["truncate(50, v)"]),
        )
    ]
    with (
        trino(tmp_path / "trino") as server,
        Pipeline(spark, tmp_path, database, [f"public.{name}" for name in names]) as pipeline,
    ):
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse(
            deletes={"default": "position-deletes"}, layouts=layouts
        )
        pipeline.wait_for_tables(*names)
        for statements in EPOCHS:
            database.execute(*statements)
            shown = pipeline.flush()
            assert_read_by_engines(database.dsn, pipeline.lake, shown, {"Trino": server.rows})
        assert deletes_of(pipeline)["many"] == deletes_of(pipeline)["days"] == (2, True)


def types_table(kinds):
    columns = ", ".join(f"c{i} {kind}" for i, kind in enumerate(kinds))
    return f"CREATE TABLE t (id int PRIMARY KEY, {columns})"


def fill_types(database, kinds, first):
    """A row for each value."""
    values = [(f"c{i}", v) for i, kind in enumerate(kinds) for v in kinds[kind]]
    with connect_pinned(database.dsn, autocommit=True) as connection:
        for number, (column, value) in enumerate(values, first):
            connection.execute(
                f"INSERT INTO t (id, {column}) VALUES (%s, %s)".encode(), [number, value]
            )


def test_other_engines_read_values_of_every_type(spark, tmp_path, database):
    kinds = {**TYPED, **TEXTUAL}
    database.execute(*SETUP, types_table(kinds))
    fill_types(database, kinds, 1)
    with Pipeline(spark, tmp_path, database, ["public.t"]) as pipeline:
        pipeline.wait_for_tables("t")
        fill_types(database, kinds, 1000)
        database.execute("DELETE FROM t WHERE id % 5 = 0")
        followed(pipeline, database)
