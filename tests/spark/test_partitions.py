"""Tables with partitions, sort orders and options of their own: equal to PostgreSQL in every engine, and pruned."""

from collections import Counter
from pathlib import PurePath
from random import Random

import pyarrow.parquet as pq
import pytest
from pyiceberg.table import StaticTable

from spark_consumers.lake.epoch import epoch_writer as epoch_module
from spark_consumers.lake.epoch import plan
from tests.support.capture_stack import STREAM
from tests.support.engines import assert_read_by_engines, metadata_of
from tests.support.iceberg_check import assert_valid
from tests.support.lake_check import assert_no_orphans
from tests.support.lake_pipeline import Pipeline, maintaining
from tests.support.table_format import DELTA
from tests.support.waiting import wait_for
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
    for metadata in metadata_of(pipeline.lake).values():
        assert_valid(metadata)


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


@pytest.mark.both_formats
def test_11_an_epoch_of_many_ranges_writes_one_file_for_each_partition_that_it_touches(
    spark, tmp_path, database, monkeypatch, table_format
):
    database.execute(*ORDERS)
    with Pipeline(spark, tmp_path, database, ["public.orders", "public.bag"]) as pipeline:
        restarted(pipeline, rule("public.orders", ["region"]))
        pipeline.wait_for_tables("orders", "bag")
        monkeypatch.setattr(plan, "RANGE_BYTES", 1)
        before = {name: files_of(pipeline, name) for name in ("orders", "bag")}
        link = pipeline.head().link
        for number in range(6):
            database.execute(
                "BEGIN",
                f"UPDATE orders SET note = 'r{number}' WHERE day = '2024-01-02' AND id % 4 < 2",
                f"INSERT INTO orders (id, region) VALUES ({100 + number}, 'new')",
                f"INSERT INTO bag VALUES ({number}, 'x'), ({number}, 'y')",
                "COMMIT",
            )
            # The log has it before the next one comes: each is a range of its own.
            pipeline.barrier()
        equal_everywhere(pipeline, database)
        assert pipeline.head().link == link + 1
        written = {name: files_of(pipeline, name) - before[name] for name in before}
        touched = Counter(partition for _, partition in written["orders"])
        # Two of the regions that there were, and a new one.
        assert sorted(touched.values()) == [1, 1, 1], touched
        assert len(written["bag"]) == 1
        if table_format == DELTA:
            shown = pipeline.flush()
            for name, files in written.items():
                place = "regexp_extract(_metadata.file_path, '[^/]+$', 0)"
                read = {row[0] for row in shown[name].selectExpr(place).distinct().collect()}
                there = {PurePath(file).name for file, _ in files_of(pipeline, name)}
                assert {PurePath(file).name for file, _ in files} <= read == there


def files_of(pipeline, name):
    """The data files of a table, each with its partition."""
    return {
        (task.file.file_path, str(task.file.partition))
        for task in table_of(pipeline, name).scan().plan_files()
    }


def test_data_files_are_sorted_and_compressed_as_the_options_say(spark, tmp_path, database):
    database.execute(*ORDERS)
    codec = {"write.parquet.compression-codec": "gzip", "team": "shop"}
    with Pipeline(spark, tmp_path, database, ["public.orders"]) as pipeline:
        layout = TableLayout.parse(["day"], ["amount desc", "id"], codec)
        restarted(pipeline, LayoutRule(Pattern.parse("*.orders"), layout))
        pipeline.wait_for_tables("orders")
        database.execute("UPDATE orders SET amount = 100 - amount WHERE id < 30")
        equal_everywhere(pipeline, database)
        orders = table_of(pipeline, "orders")
        assert orders.properties["team"] == "shop"
        files = [task.file for task in orders.scan().plan_files()]
        assert len(files) == 6
        for file in files:
            assert file.sort_order_id == orders.sort_order().order_id == 1
            there = pq.ParquetFile(file.file_path)
            assert there.metadata.row_group(0).column(0).compression == "GZIP"
            amounts = there.read()["amount"].to_pylist()
            assert amounts == sorted(amounts, reverse=True)
        restarted(pipeline)
        database.execute("UPDATE orders SET amount = 1 WHERE id = 5")
        equal_everywhere(pipeline, database)
        orders = table_of(pipeline, "orders")
        assert "team" not in orders.properties
        assert orders.properties["write.parquet.compression-codec"] == "zstd"


def test_a_layout_that_a_table_cannot_have_is_named_there_alone(spark, tmp_path, database, capsys):
    database.execute(*ORDERS)
    by_day = rule("public.*", ["day(at)"])
    name = f"{STREAM}.public.bag"
    orders = f"{STREAM}.public.orders"
    with Pipeline(spark, tmp_path, database, ["public.orders", "public.bag"]) as pipeline:
        restarted(pipeline, by_day)
        pipeline.wait_for_tables("orders")

        def refused(table):
            pipeline.house.run_once(force=True)
            return pipeline.head().not_copied.get(table, "")

        said = wait_for(lambda: refused(name), 60, "a copy that fails")
        assert "partition field day(at): the table has no column 'at'" in said
        assert "HINT:  correct the first [[lake.tables]]" in said
        assert name not in pipeline.flush().tables
        restarted(pipeline, rule("public.bag", ["a"]), by_day)
        pipeline.wait_for_tables("bag")
        # A table that follows is not stopped by it: no row of it is wrong.
        capsys.readouterr()
        restarted(pipeline, by_day)
        database.execute("UPDATE bag SET t = 'x' WHERE a = 1")
        equal_everywhere(pipeline, database)
        # Logs are in the one or the other, as other tests of the process have left it.
        assert "table keeps its layout" in "".join(capsys.readouterr())
        assert [f.name for f in table_of(pipeline, "bag").spec().fields] == ["a"]
        # The column of a partition goes at the source: the table is copied again, which needs another layout.
        database.execute("ALTER TABLE orders RENAME at TO moment", "UPDATE orders SET note = 'z'")
        said = wait_for(lambda: refused(orders), 60, "another copy that fails")
        assert "no column 'at'" in said
        database.execute("UPDATE bag SET t = 'y' WHERE a = 2")
        shown = pipeline.flush()
        assert set(shown.stale) == {orders}
        assert shown["bag"].where("t = 'y'").count() == 8
        restarted(pipeline, rule("public.orders", ["day(moment)"]), by_day)

        def follows_again():
            pipeline.house.run_once(force=True)
            return pipeline.head().tables[orders].state == "live"

        wait_for(follows_again, 60, "a copy in the other layout")
        equal_everywhere(pipeline, database)
        assert [f.name for f in table_of(pipeline, "orders").spec().fields] == ["moment_day"]


def test_partition_fields_and_options_stop_no_new_column(spark, tmp_path, database):
    column = "Größe 列"
    database.execute(
        f'CREATE TABLE days (id int PRIMARY KEY, at date, "{column}" text)',
        "INSERT INTO days SELECT g, date '1969-12-20' + g, 'g' || g % 3 FROM generate_series(1, 20) g",
    )
    kept = {"write.metadata.metrics.column.gone": "none"}
    layout = TableLayout.parse(["day(at)", f'truncate(2, "{column}")'], [], kept)
    with Pipeline(spark, tmp_path, database, ["public.days"]) as pipeline:
        rules = [LayoutRule(Pattern.parse("public.days"), layout)]
        restarted(pipeline, *rules, deletes={"default": "position-deletes"})
        pipeline.wait_for_tables("days")
        # A manifest with a field of another alphabet ends the process of DuckDB.
        equal_everywhere(pipeline, database)
        first = pipeline.head().tables[f"{STREAM}.public.days"].path
        database.execute("ALTER TABLE days ADD plain int", "UPDATE days SET plain = 1 WHERE id < 5")
        equal_everywhere(pipeline, database)
        # Version 3 of the format, by another way to set a property.
        restarted(pipeline, *rules)
        database.execute("DELETE FROM days WHERE id = 7")
        equal_everywhere(pipeline, database)
        assert pipeline.head().tables[f"{STREAM}.public.days"].path == first
        # Iceberg takes no column with the name of a partition field: the table is copied again.
        database.execute("ALTER TABLE days ADD at_day int", "UPDATE days SET at_day = id")

        def is_copied():
            pipeline.house.run_once(force=True)
            there = pipeline.head().tables[f"{STREAM}.public.days"]
            return there.path != first and there.state == "live"

        wait_for(is_copied, 60, "another copy")
        equal_everywhere(pipeline, database)
        assert table_of(pipeline, "days").spec().fields[0].name == "at_day_"


FIELDS = (
    *("id", "bucket(3, id)", "truncate(10, id)", "region", "truncate(1, region)"),
    *("bucket(2, region)", "year(at)", "month(at)", "day(at)", "hour(at)", "at", "month(day)"),
    *("day", "bucket(2, day)", "amount", "truncate(500, amount)", "bucket(3, amount)", "ok"),
)
SORTS = ("id", "region desc nulls last", "at nulls first", "amount desc", "ok")


def random_layout(draw):
    fields = draw.sample(FIELDS, draw.randint(0, 2))
    try:
        return TableLayout.parse(fields, draw.sample(SORTS, draw.randint(0, 2)))
    except ValueError:
        return random_layout(draw)


def random_change(draw):
    """A statement that changes some rows."""
    some = f"id % {draw.randint(2, 9)} = {draw.randint(0, 8)}"
    value = draw.choice(
        [
            *("region = NULL", "region = repeat('w', 3000)", "region = 'é' || id", "note = 'm'"),
            *("at = at + interval '3 hours'", "at = NULL", "at = '1969-12-31 23:59:59.999999+00'"),
            *("region = repeat(chr(1114111), 20)", "region = ''", "at = '0001-01-01 00:00:00+00'"),
            *("day = '0001-01-01'", "day = '9999-12-31'", "amount = -amount", "amount = NULL"),
            *("ok = NOT ok", "id = -id - 1000000 - (random() * 1000000)::int"),
        ]
    )
    return draw.choice(
        [
            *[f"UPDATE orders SET {value} WHERE {some}"] * 4,
            f"DELETE FROM orders WHERE {some}",
            "INSERT INTO orders SELECT max(id) + 1, 'new', now(), now()::date, 'n', 5.5, true FROM orders",
        ]
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_random_changes_of_a_table_of_random_layouts(spark, tmp_path, database, monkeypatch, seed):
    draw = Random(seed)
    monkeypatch.setattr(epoch_module, "_COMPACT_FILES", 2)
    database.execute(*ORDERS, "ALTER TABLE orders ADD ok boolean", "UPDATE orders SET ok = id < 9")
    choices = ["vectors", "copy-on-write", "position-deletes"]
    with Pipeline(spark, tmp_path, database, ["public.orders"]) as pipeline:
        for number in range(12):
            layout = random_layout(draw)
            rules = [LayoutRule(Pattern.parse("public.orders"), layout)]
            # Version 3, which has no way back, comes last.
            deletes = draw.choice(choices[1:] if number < 8 else choices)
            print(number, layout, deletes)
            restarted(pipeline, *rules, deletes={"default": deletes})
            pipeline.wait_for_tables("orders")
            with maintaining(pipeline):
                for _ in range(4):
                    database.execute(*(random_change(draw) for _ in range(draw.randint(1, 4))))
                    pipeline.flush()
            # What it has offered until then.
            pipeline.house.run_once()
            equal_everywhere(pipeline, database)
        assert_no_orphans(spark, pipeline.lake)
