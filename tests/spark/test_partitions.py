"""Tables with partitions, sort orders and options of their own: equal to PostgreSQL in every engine, and pruned."""

from pyiceberg.table import StaticTable

from spark_consumers.lake.epoch import epoch_writer as epoch_module
from tests.support.capture_stack import STREAM
from tests.support.engines import assert_read_by_engines, metadata_of
from tests.support.lake_check import assert_no_orphans
from tests.support.lake_pipeline import Pipeline
from walsender_bridge.postgres.table_layout import LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern

ORDERS = (
    "CREATE TABLE orders (id int PRIMARY KEY, region text, at timestamptz, day date, note text, amount numeric(9, 2))",
    "ALTER TABLE orders ALTER region SET STORAGE EXTERNAL, ALTER note SET STORAGE EXTERNAL",
    """INSERT INTO orders SELECT g, CASE g % 4 WHEN 0 THEN NULL ELSE repeat('r' || g % 4, 2000) END,
    timestamptz '2024-01-01 23:30+00' + g * interval '5 hours', date '2024-01-01' + g % 3,
    repeat('n', 3000), g * 1.25 FROM generate_series(1, 60) g""",
    "CREATE TABLE bag (a int, t text)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag SELECT g % 5, 't' || g % 3 FROM generate_series(1, 40) g",
)


def rule(pattern, partition=(), sort=(), **options):
    named = {name.replace("_", "."): value for name, value in options.items()}
    return LayoutRule(Pattern.parse(pattern), TableLayout.parse(partition, sort, named))


def restarted(pipeline, *rules, **options):
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(layouts=rules, **options)


def equal_everywhere(pipeline, database):
    assert_read_by_engines(database.dsn, pipeline.lake, pipeline.flush())


def table_of(pipeline, name):
    return StaticTable.from_metadata(metadata_of(pipeline.lake)[f"{STREAM}.public.{name}"])


def files_for(table, condition):
    return len(list(table.scan(row_filter=condition).plan_files()))


def test_partitions_come_go_and_change_while_rows_do(spark, tmp_path, database, monkeypatch):
    monkeypatch.setattr(epoch_module, "_COMPACT_FILES", 3)
    database.execute(*ORDERS)
    with Pipeline(spark, tmp_path, database, ["public.orders", "public.bag"]) as pipeline:
        first = rule("public.orders", ["day(at)", "region"], ["amount desc nulls last", "id"])
        restarted(pipeline, first, rule("public.b*", ["bucket(4, a)"]))
        pipeline.wait_for_tables("orders", "bag")
        before = {n: t.path for n, t in pipeline.head().tables.items()}
        equal_everywhere(pipeline, database)
        database.execute(
            "UPDATE orders SET note = 'x' WHERE id % 3 = 0",  # the partition's column is unchanged TOAST
            "UPDATE orders SET region = 'moved' WHERE id BETWEEN 10 AND 20",
            "UPDATE orders SET region = NULL, at = NULL WHERE id = 31",
            "UPDATE orders SET id = id + 1000 WHERE id < 4",
            "DELETE FROM orders WHERE day = '2024-01-02' AND id > 40",
            "UPDATE bag SET a = a + 1 WHERE t = 't1'",
            "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = 0)",
            "INSERT INTO bag VALUES (NULL, 'none'), (NULL, NULL)",
        )
        equal_everywhere(pipeline, database)
        orders = table_of(pipeline, "orders")
        assert [f.name for f in orders.spec().fields] == ["at_day", "region"]
        assert 0 < files_for(orders, "region == 'moved'") < files_for(orders, "id > 0") / 4
        # Another spec, without a copy: new files have it, and old ones keep theirs.
        restarted(
            pipeline,
            rule("public.orders", ["truncate(10, amount)", "month(day)"], ["id"]),
            rule("public.bag", ["truncate(1, t)", "a"]),
        )
        database.execute(
            "UPDATE orders SET amount = amount + 7 WHERE id % 5 = 0",
            "INSERT INTO orders (id, day) VALUES (2000, '2031-05-05')",
            "UPDATE bag SET t = 'u' WHERE a = 2",
        )
        equal_everywhere(pipeline, database)
        specs = {f.file.spec_id for f in table_of(pipeline, "orders").scan().plan_files()}
        assert len(specs) == 2
        # And none again.
        restarted(pipeline)
        database.execute(
            "UPDATE orders SET note = 'y' WHERE id % 4 < 2", "DELETE FROM bag WHERE a = 3"
        )
        equal_everywhere(pipeline, database)
        database.execute("TRUNCATE bag", "INSERT INTO bag VALUES (1, 'last')")
        equal_everywhere(pipeline, database)
        assert {n: t.path for n, t in pipeline.head().tables.items()} == before
        assert_no_orphans(spark, pipeline.lake)
