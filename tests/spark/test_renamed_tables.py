"""Tables and schemas that are renamed at the source: the lake gives them their new names, and copies nothing."""

import threading

import pytest

from spark_consumers import read
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.manifest.table_version import LEFT
from spark_consumers.lake.views.definition import ViewDefinition
from spark_consumers.lake.writer import requests
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.feed_check import Applied, bag_of, changes_of, rows_of
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import dies
from tests.support.view_check import assert_views
from tests.support.waiting import wait_for
from walsender_bridge.postgres.table_layout import LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern

BAG, DOCS, PAIRS = (f"{STREAM}.public.{name}" for name in ("bag", "docs", "pairs"))


def paths(pipeline):
    """Where each table of the newest link is: a table that is copied again gets a place of its own."""
    return {name: table.path for name, table in pipeline.head().tables.items()}


def files_in(pipeline, path):
    return {file.name for file in (pipeline.lake / path / "data").glob("*.parquet")}


def links_of(pipeline):
    """What each link of a table leads to."""
    found = [link for link in pipeline.lake.glob("tables/*/*/*") if link.is_symlink()]
    return {link.relative_to(pipeline.lake / "tables" / STREAM): link.resolve() for link in found}


def assert_links(pipeline):
    """Engines that open a table by its folder find the one that has the name."""
    expected = {}
    for name, path in paths(pipeline).items():
        schema, table = name.split(".")[1:]
        expected[f"{schema}/{table}"] = (pipeline.lake / path).resolve()
    assert {str(link): to for link, to in links_of(pipeline).items()} == expected


def test_14_a_renamed_table_keeps_its_rows_and_its_files(pipeline, database):
    before, old = paths(pipeline), pipeline.flush()
    files = files_in(pipeline, before[DOCS])
    database.execute(
        "UPDATE docs SET title = 'before' WHERE id = 2",
        "ALTER TABLE docs RENAME TO papers",
        "UPDATE papers SET title = 'renamed' WHERE id = 1",
        "DELETE FROM papers WHERE id = 3",
    )
    after = pipeline.flush()
    papers = f"{STREAM}.public.papers"
    assert paths(pipeline) == {BAG: before[BAG], PAIRS: before[PAIRS], papers: before[DOCS]}
    assert files <= files_in(pipeline, before[DOCS])
    assert_equal(database.dsn, after)
    assert_links(pipeline)
    # An epoch keeps the names that it had.
    earlier = read(pipeline.spark, pipeline.lake, epoch=old.epoch)
    assert earlier["docs"].count() == 9
    assert "papers" not in earlier
    # Another writer looks for what was not published, in links that have the table under either name.
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse()
    database.execute("INSERT INTO papers VALUES (30, 'more')")
    assert_equal(database.dsn, pipeline.flush())
    assert_no_orphans(pipeline.spark, pipeline.lake)


def test_14_tables_that_swap_their_names_copy_nothing(pipeline, database):
    before = paths(pipeline)
    database.execute(
        "BEGIN; ALTER TABLE docs RENAME TO x; ALTER TABLE bag RENAME TO docs; INSERT INTO docs (a) VALUES (77);"
        " ALTER TABLE x RENAME TO bag; UPDATE bag SET title = 'moved' WHERE id = 1; COMMIT",
    )
    swapped = pipeline.flush()
    assert_equal(database.dsn, swapped)
    assert swapped["bag"].columns == ["id", "title", "body", "n", "f"]
    assert paths(pipeline) == {DOCS: before[BAG], BAG: before[DOCS], PAIRS: before[PAIRS]}
    assert_links(pipeline)
    # A cycle of three, with changes under each name that the log has them under.
    database.execute(
        "BEGIN; UPDATE docs SET a = 78; UPDATE bag SET n = 1; UPDATE pairs SET a = a + 10; ALTER TABLE docs RENAME TO x;"
        " ALTER TABLE bag RENAME TO docs; ALTER TABLE pairs RENAME TO bag; ALTER TABLE x RENAME TO pairs;"
        " UPDATE pairs SET a = a + 1; UPDATE docs SET n = n + 1; UPDATE bag SET a = a + 1; COMMIT"
    )
    assert_equal(database.dsn, pipeline.flush())
    assert paths(pipeline) == {DOCS: before[DOCS], PAIRS: before[BAG], BAG: before[PAIRS]}
    assert_links(pipeline)
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse()
    database.execute("UPDATE docs SET n = 7", "DELETE FROM bag", "UPDATE pairs SET f = 3")
    assert_equal(database.dsn, pipeline.flush())
    assert_no_orphans(pipeline.spark, pipeline.lake)


def test_14_a_new_table_under_the_earlier_name_is_copied_alone(pipeline, database):
    before = paths(pipeline)
    database.execute(
        "BEGIN; ALTER TABLE docs RENAME TO papers; CREATE TABLE docs (id int PRIMARY KEY, other text);"
        " INSERT INTO docs VALUES (1, 'new'); UPDATE papers SET n = 3; COMMIT",
        f"ALTER PUBLICATION {PUBLICATION} ADD TABLE docs",
        "INSERT INTO docs VALUES (2, 'newer')",
        "UPDATE papers SET n = 4 WHERE id = 1",
    )
    pipeline.flush()
    pipeline.wait_for_tables("docs", "papers")
    assert_equal(database.dsn, pipeline.flush())
    now = paths(pipeline)
    assert now.pop(DOCS) not in before.values()
    assert now == {BAG: before[BAG], PAIRS: before[PAIRS], f"{STREAM}.public.papers": before[DOCS]}
    assert_links(pipeline)
    # Where another table has the name until the same epoch, the first one is copied, and its second name leaves.
    database.execute(
        "DROP TABLE docs", "ALTER TABLE papers RENAME TO docs", "UPDATE docs SET n = 5"
    )

    def is_back():
        shown = pipeline.flush()
        return DOCS in shown.tables and shown["docs"].columns[1] == "title" and shown

    assert_equal(database.dsn, wait_for(is_back, 60, "the table"), only=[DOCS, BAG, PAIRS])
    assert pipeline.head().tables[f"{STREAM}.public.papers"].state == LEFT


def test_14_a_renamed_schema_and_another_schema_copy_nothing(pipeline, database):
    before = paths(pipeline)
    database.execute(
        "ALTER SCHEMA public RENAME TO shop",
        "UPDATE shop.bag SET a = 5",
        "CREATE SCHEMA other",
        "ALTER TABLE shop.docs SET SCHEMA other",
        "UPDATE other.docs SET n = 5 WHERE id = 2",
    )
    renamed = pipeline.flush()
    expected = {"other.docs": DOCS, "shop.bag": BAG, "shop.pairs": PAIRS}
    assert paths(pipeline) == {f"{STREAM}.{n}": before[was] for n, was in expected.items()}
    assert_equal(database.dsn, renamed)
    assert_links(pipeline)
    # Others open the table by its name, in its new schema.
    folder = str(pipeline.lake / "tables" / STREAM / "other" / "docs")
    assert pipeline.spark.read.format("iceberg").load(folder).count() == 9


def test_14_a_table_that_is_renamed_and_left_out_leaves(pipeline, database):
    before = paths(pipeline)
    database.execute(
        "ALTER TABLE docs RENAME TO private", f"ALTER PUBLICATION {PUBLICATION} DROP TABLE private"
    )
    pipeline.flush()
    left = pipeline.flush().manifest.tables[DOCS]
    assert (left.state, left.path) == (LEFT, before[DOCS])
    # Under its new name again, it is a new table there; the name that has left goes when that is asked for.
    database.execute(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE private")
    pipeline.wait_for_tables("private")
    assert paths(pipeline)[f"{STREAM}.public.private"] != before[DOCS]
    requests.ask(open_chain(pipeline.lake), "drop", [DOCS])
    dropped = pipeline.flush()
    assert DOCS not in dropped.manifest.tables
    assert_equal(database.dsn, dropped)


@pytest.mark.parametrize("point", ["staged", "before-manifest", "after-manifest"])
def test_14_a_writer_that_dies_around_a_rename_leaves_it_to_the_next(
    pipeline, database, monkeypatch, point
):
    before = paths(pipeline)
    database.execute("UPDATE docs SET n = 1", "UPDATE bag SET f = 2")
    swap = "BEGIN; ALTER TABLE {0} RENAME TO x; ALTER TABLE {1} RENAME TO {0}; ALTER TABLE x RENAME TO {1}; COMMIT"

    # While its epoch is written, which has the earlier names.
    meanwhile = swap.format("docs", "bag"), "UPDATE bag SET n = n + 1"
    dies(monkeypatch, pipeline, point, meanwhile)
    pipeline.house = pipeline.lakehouse()
    database.execute("DELETE FROM bag WHERE id = 4", "INSERT INTO docs (a) VALUES (1)")
    assert_equal(database.dsn, pipeline.flush())
    assert paths(pipeline) == {DOCS: before[BAG], BAG: before[DOCS], PAIRS: before[PAIRS]}
    assert_no_orphans(pipeline.spark, pipeline.lake)


def test_14_renames_under_load_keep_all_rows_and_copy_nothing(pipeline, database):
    """Every row is in one of the two tables at each epoch, whatever they are called."""
    database.execute(
        "CREATE TABLE one (id int PRIMARY KEY, n int)",
        "INSERT INTO one SELECT g, 0 FROM generate_series(1, 50) g",
        "CREATE TABLE two (LIKE one INCLUDING ALL)",
        "INSERT INTO two SELECT g, 1000 FROM generate_series(1, 50) g",
        f"ALTER PUBLICATION {PUBLICATION} ADD TABLE one, two",
    )
    pipeline.wait_for_tables("one", "two")
    before, stop = paths(pipeline), threading.Event()
    swap = "BEGIN; ALTER TABLE one RENAME TO x; ALTER TABLE two RENAME TO one; ALTER TABLE x RENAME TO two; COMMIT"

    def load():
        turn = 0
        while not stop.is_set():
            turn += 1
            moved = turn % 50 + 1
            database.execute(
                f"BEGIN; UPDATE one SET n = n + 1 WHERE id = {moved}; UPDATE two SET n = n - 1 WHERE id = {moved}; COMMIT"
            )
            if turn % 7 == 0:
                database.execute(swap)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(6):
            shown = pipeline.flush()
            live = read(pipeline.spark, pipeline.lake, live=True, log=pipeline.log.address)
            for snapshot in (shown, live):
                rows = [sum(r.n for r in snapshot[name].collect()) for name in ("one", "two")]
                # What one table loses the other one gets, in one transaction.
                assert sum(rows) == 50_000, rows
    finally:
        stop.set()
        thread.join(60)
    assert_equal(database.dsn, pipeline.flush())
    assert set(paths(pipeline).values()) == set(before.values())


def test_14_views_and_feeds_follow_renamed_tables(pipeline, database):
    view = ViewDefinition("views.totals", "SELECT count(*) AS docs, sum(n) AS n FROM docs")
    later = ViewDefinition("views.later", "SELECT id, title FROM papers WHERE id <> 3")
    rules = [LayoutRule(Pattern.parse("public.*"), TableLayout(), feed="{table}_changes")]
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(views=[view, later], layouts=rules)
    pipeline.wait_for_tables("docs_changes")
    first = pipeline.flush()
    assert_views(database, first, [view])
    feed = first.manifest.feeds[f"{DOCS}_changes"].table.path
    database.execute(
        "UPDATE docs SET n = 5 WHERE id = 2",
        "ALTER TABLE docs RENAME TO papers",
        "UPDATE papers SET n = 6 WHERE id = 1",
    )
    renamed = pipeline.flush()
    papers = f"{STREAM}.public.papers"
    assert (
        f"no table {DOCS}" in renamed.manifest.views["views.totals"].reason
        or "docs" in renamed.manifest.views["views.totals"].reason
    )
    assert_views(database, renamed, [later])
    feeds = renamed.manifest.feeds
    assert f"{DOCS}_changes" not in feeds
    assert (feeds[f"{papers}_changes"].table.path, feeds[f"{papers}_changes"].of) == (feed, papers)
    changes = changes_of(renamed, "papers_changes", first.epoch)
    assert [c["_op"] for c in changes].count("begin") == 0
    assert bag_of(Applied(rows_of(first["docs"]), ("id",)).apply(changes).rows) == bag_of(
        rows_of(renamed["papers"])
    )
    # A view over a name that another table has now is that table's, from the link on that says so.
    database.execute("ALTER TABLE papers RENAME TO docs")
    back = pipeline.flush()
    assert_views(database, back, [view])
    assert back.manifest.views["views.later"].table.state == "stale"


def test_14_a_table_with_other_settings_under_its_new_name_is_copied(pipeline, database):
    rules = [LayoutRule(Pattern.parse("public.papers"), TableLayout(), row_filter="id > 3")]
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(layouts=rules)
    before = paths(pipeline)
    database.execute("ALTER TABLE docs RENAME TO papers", "UPDATE papers SET n = 6 WHERE id > 1")
    pipeline.flush()
    pipeline.wait_for_tables("papers")
    after = pipeline.flush()
    assert after.manifest.tables[DOCS].state == LEFT
    assert paths(pipeline)[f"{STREAM}.public.papers"] not in before.values()
    assert sorted(row.id for row in after["papers"].collect()) == list(range(4, 10))


@pytest.mark.parametrize("name", ["aaa", "papers"])
def test_14_a_new_table_of_the_earlier_name_has_its_own_catalog_state(pipeline, database, name):
    before = paths(pipeline)
    database.execute(
        f"BEGIN; ALTER TABLE docs RENAME TO {name}; CREATE TABLE docs (id int PRIMARY KEY, other text);"
        f" INSERT INTO docs VALUES (1, 'new'); ALTER PUBLICATION {PUBLICATION} ADD TABLE docs; UPDATE {name} SET n = 3; COMMIT",
    )
    pipeline.flush()
    pipeline.wait_for_tables("docs", name)
    assert_equal(database.dsn, pipeline.flush())
    assert paths(pipeline)[f"{STREAM}.public.{name}"] == before[DOCS]
