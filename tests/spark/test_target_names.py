"""Tables that have other names in the lake than at their source, for all who read them."""

import logging

import pytest

from spark_consumers import read
from spark_consumers.lake.equality import run as equality
from spark_consumers.lake.equality.record import EQUAL
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.reader import view_names
from spark_consumers.lake.status import read_status, table_rows
from spark_consumers.lake.tables.sources import Source
from spark_consumers.lake.views.definition import ViewDefinition
from spark_consumers.lake.writer import requests
from tests.spark.test_equality import FAST
from tests.spark.test_renamed_tables import BAG, DOCS, PAIRS, links_of, paths
from tests.spark.test_rest_lake import NAMESPACE, RestPipeline
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.engines import ENGINES, metadata_of
from tests.support.feed_check import changes_of
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import TABLES, Pipeline, dies
from tests.support.rest_catalog import RestServer
from tests.support.view_check import answer, assert_same
from tests.support.waiting import wait_for
from walsender_bridge.postgres.table_layout import LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern
from walsender_bridge.postgres.target_name import parse_name

PAPERS = f"{STREAM}.sales.papers"


def named(*names, **more):
    """Sections, by pattern and name."""
    patterns = [(Pattern.parse(pattern), name) for pattern, name in names]
    return [LayoutRule(p, TableLayout(), name=parse_name(n, p), **more) for p, n in patterns]


def restarted(pipeline, *names, feed="", **options):
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(layouts=named(*names, feed=feed), **options)


def in_lake(pipeline):
    """Which table each name leads to."""
    return {name: table.path for name, table in pipeline.head().readable.items()}


def assert_links(pipeline):
    found = {str(link): to.name for link, to in links_of(pipeline).items()}
    expected = {
        name.split(".", 1)[1].replace(".", "/"): path for name, path in in_lake(pipeline).items()
    }
    assert found == {name: path.rpartition("/")[2] for name, path in expected.items()}


def live(pipeline):
    return read(pipeline.spark, pipeline.lake, live=True, log=pipeline.log.address)


def test_a_table_has_its_name_in_the_lake_for_all_who_read_it(spark, tmp_path, database):
    database.execute(*TABLES)
    view = ViewDefinition(
        "views.totals", "SELECT count(*) AS papers, sum(n) AS n FROM sales.papers"
    )
    with Pipeline(spark, tmp_path, database) as pipeline:
        layouts = [
            *named(("public.docs", "sales.papers"), feed="{table}_log"),
            *named(("public.*", "copy.{table}_c"), delta=False),
        ]
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse(layouts=layouts, views=[view], delta=True)

        def shown():
            pipeline.house.run_once(force=True)
            return len(pipeline.head().readable) == 5

        wait_for(shown, 90, "the tables")
        first = pipeline.flush()
        names = [PAPERS, f"{PAPERS}_log", f"{STREAM}.copy.bag_c", f"{STREAM}.copy.pairs_c"]
        assert first.tables == sorted([*names, f"{STREAM}.views.totals"])
        assert "docs" not in first
        assert_equal(database.dsn, first, only=[PAPERS, *names[2:]])
        # A new table's folder is called after its name in the lake; so is the link, by which others open it.
        assert paths(pipeline)[DOCS].startswith(f"tables/{STREAM}/sales/papers%")
        assert_links(pipeline)
        assert (
            spark.read.format("iceberg")
            .load(f"{pipeline.lake}/tables/{STREAM}/sales/papers")
            .count()
            == 9
        )
        files = metadata_of(pipeline.lake)
        assert {*files} == {*first.tables}
        assert all(engine(files[PAPERS]).num_rows == 9 for engine in ENGINES.values())
        assert read(spark, pipeline.lake, format="delta")["papers"].count() == 9
        # Which tables have a Delta log is said by their names at the source, too.
        logs = {
            n: (pipeline.lake / path / "_delta_log").exists() for n, path in paths(pipeline).items()
        }
        assert logs == {DOCS: True, BAG: False, PAIRS: False}
        assert first.register_views("v").keys() >= {"v_sales_papers", "v_copy_bag_c"}
        assert view_names(pipeline.head().readable)["sales_papers"] == PAPERS

        database.execute("UPDATE docs SET n = 50 WHERE id = 1", "DELETE FROM bag WHERE a IS NULL")
        pipeline.barrier()
        tail = live(pipeline)
        assert_equal(database.dsn, tail, only=[PAPERS, names[2], names[3]], counted=False)
        with database.connect() as connection:
            totals = answer(connection, "SELECT count(*) AS papers, sum(n) AS n FROM docs")
        assert_same(view, totals, tail["totals"])
        second = pipeline.flush()
        assert_equal(database.dsn, second, only=[PAPERS, names[2], names[3]])
        assert_same(view, totals, second["totals"])
        assert [c["_op"] for c in changes_of(second, "papers_log", first.epoch)] == ["update"]

        # Requests, status and verify know the table by its name at the source.
        rows = {
            row["table"]: row["lake_name"]
            for row in table_rows(pipeline.head(), read_status(open_chain(pipeline.lake)), 0.0)
        }
        assert (rows[DOCS], rows[BAG]) == (PAPERS, f"{STREAM}.copy.bag_c")
        record = equality.begin(open_chain(pipeline.lake), {STREAM}, [], 1.0, 1)
        source = Source(STREAM, database.dsn, PUBLICATION)
        record = equality.verify(
            spark, str(pipeline.lake), pipeline.log.address, [source], record, FAST
        )
        assert {n: t.state for n, t in record.tables.items()} == dict.fromkeys(
            (BAG, DOCS, PAIRS), EQUAL
        )
        path = paths(pipeline)[DOCS]
        requests.ask(open_chain(pipeline.lake), "resync", [DOCS])
        wait_for(lambda: pipeline.flush() and paths(pipeline)[DOCS] != path, 60, "another copy")
        assert_equal(database.dsn, pipeline.flush(), only=[PAPERS])
        assert_links(pipeline)
        assert_no_orphans(spark, pipeline.lake)


def test_names_of_tables_that_the_lake_has_move_with_an_epoch(pipeline, database):
    before, old = paths(pipeline), pipeline.flush()
    restarted(
        pipeline, ("public.docs", "sales.papers"), ("public.bag", "sales.bag"), feed="{table}_log"
    )
    # The writer asks for an epoch itself, as there may be nothing else for one.
    wait_for(lambda: pipeline.house.run_once() or PAPERS in in_lake(pipeline), 30, "an epoch")
    moved = pipeline.flush()
    assert paths(pipeline) == before
    assert_equal(database.dsn, moved, only=[PAPERS, f"{STREAM}.sales.bag", PAIRS])
    feed = moved.manifest.feeds[f"{PAPERS}_log"].table.path
    # An epoch keeps the names that it had.
    earlier = read(pipeline.spark, pipeline.lake, epoch=old.epoch)
    assert earlier.tables == [BAG, DOCS, PAIRS]
    assert earlier["docs"].count() == 9

    # Two tables exchange their names; the feeds go with them.
    database.execute("UPDATE docs SET n = 4 WHERE id = 4")
    restarted(
        pipeline, ("public.docs", "sales.bag"), ("public.bag", "sales.papers"), feed="{table}_log"
    )
    swapped = pipeline.flush()
    assert paths(pipeline) == before
    assert_equal(database.dsn, swapped, only=[PAPERS, f"{STREAM}.sales.bag"])
    assert swapped["sales.bag"].columns[1] == "title"
    assert swapped.manifest.feeds[f"{STREAM}.sales.bag_log"].table.path == feed
    assert_links(pipeline)

    # Without sections each has its own name again.
    restarted(pipeline)
    assert pipeline.flush().tables == [BAG, DOCS, PAIRS]
    assert paths(pipeline) == before
    assert_links(pipeline)
    database.execute("INSERT INTO docs VALUES (10, 'ten')")
    assert_equal(database.dsn, pipeline.flush())
    assert_no_orphans(pipeline.spark, pipeline.lake)


@pytest.mark.parametrize("point", ["staged", "before-manifest", "after-manifest"])
def test_a_writer_that_dies_while_names_move_leaves_that_to_the_next(
    pipeline, database, monkeypatch, point
):
    before = paths(pipeline)
    sections = ("public.docs", "public.bag"), ("public.bag", "public.docs")
    restarted(pipeline, *sections)
    dies(monkeypatch, pipeline, point, ["UPDATE docs SET n = 8 WHERE id = 1"])
    assert in_lake(pipeline) in ({**before}, {**before, DOCS: before[BAG], BAG: before[DOCS]})
    restarted(pipeline, *sections)
    assert_equal(database.dsn, pipeline.flush())
    assert in_lake(pipeline) == {DOCS: before[BAG], BAG: before[DOCS], PAIRS: before[PAIRS]}
    assert_links(pipeline)


def test_a_name_that_another_table_view_or_feed_has_is_refused_by_name(pipeline, database, caplog):
    before = paths(pipeline)
    view = ViewDefinition("sales.totals", "SELECT count(*) AS docs FROM sales.docs")
    sections = [
        *named(("public.docs", "sales.docs"), feed="{table}_changes"),
        *named(("other.*", "sales.{table}")),
    ]
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(layouts=sections, views=[view])
    wait_for(
        lambda: pipeline.flush() and "totals" in read(pipeline.spark, pipeline.lake), 60, "the view"
    )
    # New tables come that match a pattern: their names are those of a table, a feed and a view.
    caplog.set_level(logging.ERROR)
    database.execute("CREATE SCHEMA other")
    for name in ("docs", "docs_changes", "totals", "more"):
        database.execute(
            f"CREATE TABLE other.{name} (id int PRIMARY KEY); INSERT INTO other.{name} VALUES (1)",
            f"ALTER PUBLICATION {PUBLICATION} ADD TABLE other.{name}",
        )
    wait_for(lambda: pipeline.flush() and "more" in read(pipeline.spark, pipeline.lake), 60, "more")
    head = pipeline.head()
    assert f"{STREAM}.other.docs" not in {*head.tables, *head.copies}
    reasons = {name.removeprefix(f"{STREAM}.other."): why for name, why in head.not_copied.items()}
    assert {*reasons} == {"docs", "docs_changes", "totals"}
    assert f"{STREAM}.sales.docs is the name of table {DOCS} in the lake" in reasons["docs"]
    assert f"is the name of the change feed of {DOCS}" in reasons["docs_changes"]
    assert "is the name of view sales.totals" in reasons["totals"]
    assert all(
        "Give one of them another name in [[lake.tables]]" in why for why in reasons.values()
    )
    # The others continue; and the names of tables that are there stay with them.
    database.execute("UPDATE docs SET n = 5 WHERE id = 3", "INSERT INTO other.more VALUES (2)")
    shown = pipeline.flush()
    assert_equal(database.dsn, shown, only=[f"{STREAM}.sales.docs", f"{STREAM}.sales.more", BAG])
    assert paths(pipeline)[DOCS] == before[DOCS]
    # Once the section is corrected, the tables are copied.
    sections = [sections[0], *named(("other.*", "sales.other_{table}"))]
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(layouts=sections, views=[view])
    names = [f"{STREAM}.sales.other_{name}" for name in ("docs", "docs_changes", "totals", "more")]
    wait_for(lambda: pipeline.flush() and {*names} <= in_lake(pipeline).keys(), 90, "the others")
    assert_equal(database.dsn, pipeline.flush(), only=names)
    assert not pipeline.head().not_copied


def test_a_table_that_is_renamed_has_the_name_that_its_new_name_gets(pipeline, database):
    before = paths(pipeline)
    sections = ("public.docs", "sales.papers"), ("public.b*", "sales.{table}")
    restarted(pipeline, *sections)
    pipeline.flush()
    # No section is of the new name; one is of the other table's.
    database.execute(
        "ALTER TABLE docs RENAME TO texts",
        "ALTER TABLE bag RENAME TO bags",
        "UPDATE texts SET n = 6 WHERE id = 2",
        "UPDATE bags SET f = 2 WHERE a = 1",
    )
    renamed = pipeline.flush()
    texts, bags = f"{STREAM}.public.texts", f"{STREAM}.public.bags"
    expected = {texts: before[DOCS], f"{STREAM}.sales.bags": before[BAG], PAIRS: before[PAIRS]}
    assert in_lake(pipeline) == expected
    assert paths(pipeline) == {texts: before[DOCS], bags: before[BAG], PAIRS: before[PAIRS]}
    assert_equal(database.dsn, renamed)
    assert_links(pipeline)
    # A table of the source has by then the name that another one has in the lake.
    database.execute(
        "CREATE SCHEMA sales",
        "ALTER TABLE texts SET SCHEMA sales",
        "ALTER TABLE sales.texts RENAME TO bags",
    )
    taken = pipeline.flush()
    assert in_lake(pipeline) == expected
    wait_for(lambda: pipeline.house.run_once() or pipeline.head().not_copied, 30, "the reason")
    why = pipeline.head().not_copied[f"{STREAM}.sales.bags"]
    assert f"it keeps the name {texts}: {STREAM}.sales.bags is the name of table {bags}" in why
    assert_equal(database.dsn, taken, only=[texts, f"{STREAM}.sales.bags"])


def test_in_a_rest_catalog_a_table_keeps_the_name_that_it_came_with(spark, tmp_path, database):
    database.execute(*TABLES)
    with RestServer().running() as server:
        pipeline = RestPipeline(spark, tmp_path, database)
        pipeline.server = server
        with pipeline:
            restarted(pipeline, ("public.docs", "sales.papers"), ("public.b*", "sales.{table}_c"))
            names = {PAPERS, f"{STREAM}.sales.bag_c", PAIRS}

            def shown():
                pipeline.house.run_once(force=True)
                return in_lake(pipeline).keys() == names

            wait_for(shown, 90, "the tables")
            pipeline.house.run_once()
            metadata = server.tables[(*NAMESPACE, STREAM, "sales", "papers")]
            assert metadata["location"].endswith(paths(pipeline)[DOCS])
            # Another name, and one for a table that is copied again, are for tables that come.
            restarted(pipeline, ("public.docs", "sales.texts"), ("public.pairs", "sales.pairs"))
            database.execute("UPDATE docs SET n = 9 WHERE id = 2")
            path = paths(pipeline)[DOCS]
            requests.ask(open_chain(pipeline.lake), "resync", [DOCS])
            wait_for(lambda: pipeline.flush() and paths(pipeline)[DOCS] != path, 60, "a copy")
            assert_equal(database.dsn, pipeline.flush())
            assert in_lake(pipeline).keys() == names
            assert paths(pipeline)[DOCS].startswith(f"tables/{STREAM}/sales/papers%")
