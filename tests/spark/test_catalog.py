"""Other engines find a table by its name, at what was published last, whatever was copied again or has died."""

from contextlib import contextmanager

import pytest
from pyiceberg.catalog import load_catalog
from pyspark.errors import AnalysisException

from spark_consumers import read
from spark_consumers.lake.manifest.chain import Manifest, open_chain
from spark_consumers.lake.writer import requests
from spark_consumers.spark.session import catalog_settings
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import PUBLISHED
from tests.support.stack import Stack
from tests.support.waiting import wait_for
from walsender_bridge.errors import FencedError

DOCS, PAIRS, BAG = (f"{STREAM}.{relation}" for relation in PUBLISHED)
ROW_ID = "_tuskline_row"


@contextmanager
def opened(lake):
    """The lake's catalog, as PyIceberg opens it."""
    found = load_catalog("tuskline", type="sql", uri=f"sqlite:///{lake}/catalog.db")
    try:
        yield found
    finally:
        found.close()


def rows(frame):
    """The rows of a DataFrame, of a table without a key too, in one order."""
    return sorted(str(tuple(row)) for row in frame.drop(ROW_ID).collect())


class Names:
    """The tables of a pipeline's lake by name, in PyIceberg and in the Spark catalog `catalog`."""

    def __init__(self, pipeline, catalog):
        self.spark, self.lake, self.catalog = pipeline.spark, pipeline.lake, catalog
        for key, value in catalog_settings(pipeline.lake, catalog).items():
            self.spark.conf.set(key, value)

    def check(self):
        """Every table that is published is there, with its columns, at its published snapshot."""
        shown = read(self.spark, self.lake, allow_stale=True)
        tables = shown.manifest.readable
        with opened(self.lake) as found:
            assert {".".join(n) for n in found.list_tables(f"{STREAM}.public")} == set(tables)
            for name, table in tables.items():
                there = found.load_table(name)
                assert there.location() == f"{self.lake}/{table.path}"
                assert there.current_snapshot().snapshot_id == table.snapshot_id
                columns = {field.name for field in there.schema().fields}
                assert columns - {ROW_ID} == set(shown[name].columns)
        for name in tables:
            assert rows(self.spark.table(f"{self.catalog}.{name}")) == rows(shown[name])
        return shown

    def scanned(self, name):
        """The table's `id`s as PyIceberg reads them."""
        with opened(self.lake) as found:
            return sorted(found.load_table(name).scan().to_arrow()["id"].to_pylist())


def copied_again(pipeline, name, house=None):
    """Run rounds until the table is shown in another folder."""
    before = pipeline.head().tables[name].path

    def done():
        pipeline.flush(house)
        table = pipeline.head().tables[name]
        return table.path != before and table.state == "live"

    wait_for(done, 90, f"the copy of {name}")


@pytest.mark.long
def test_a_table_keeps_its_name_over_changes_copies_and_ddl(pipeline, database):
    names = Names(pipeline, "kept")
    pipeline.flush()
    names.check()
    # A lake of the version before, which has no names, gets them with the takeover.
    (pipeline.lake / "catalog.db").unlink()
    for name in (DOCS, PAIRS, BAG):
        (pipeline.lake / "tables" / name.replace(".", "/")).unlink()
    with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_NOT_FOUND"):
        names.spark.table(f"kept.{DOCS}")
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse()
    pipeline.house.run_once()
    names.check()
    assert names.scanned(DOCS) == list(range(1, 10))
    database.execute("DELETE FROM docs WHERE id = 1", "UPDATE pairs SET tags = '{}'")
    pipeline.flush()
    names.check()
    assert names.scanned(DOCS) == list(range(2, 10))
    requests.ask(open_chain(pipeline.lake), "resync", [DOCS])
    copied_again(pipeline, DOCS)
    names.check()
    assert names.scanned(DOCS) == list(range(2, 10))
    database.execute("ALTER TABLE pairs ADD more int", "INSERT INTO pairs VALUES (3, 'z')")
    database.execute("ALTER TABLE docs RENAME title TO headline")
    copied_again(pipeline, DOCS)
    shown = names.check()
    assert "headline" in shown[DOCS].columns
    assert "more" in shown[PAIRS].columns
    # What nobody publishes any more, `read` shows as it was, and so does its name.
    database.execute(f"ALTER PUBLICATION {PUBLICATION} DROP TABLE bag", "DELETE FROM docs")
    wait_for(lambda: pipeline.flush().stale.keys() == {BAG}, 60, "the table's leave")
    names.check()
    pipeline.house._writer.kept.expire(pipeline.head(), 0.0)
    names.check()
    assert_no_orphans(pipeline.spark, pipeline.lake)


@pytest.mark.long
def test_a_driver_that_was_suspended_puts_nothing_older_back(pipeline, database):
    names, older, newer = Names(pipeline, "fenced"), pipeline.house, pipeline.lakehouse()
    pipeline.flush()
    mine = older._writer.engines._names
    follow = mine.follow
    slept: list[Manifest] = []

    def sleep(head):
        if not slept:
            slept.append(head)
            database.execute("DELETE FROM docs WHERE id > 5")
            newer.run_once()
            requests.ask(open_chain(pipeline.lake), "resync", [DOCS])
            copied_again(pipeline, DOCS, newer)
            names.check()
        follow(head)

    mine.follow = sleep
    database.execute("UPDATE docs SET title = 'of the older one'")
    pipeline.barrier()
    older.run_once(force=True)
    assert slept
    assert_equal(database.dsn, names.check())
    with pytest.raises(FencedError):
        pipeline.flush(older)
    assert_equal(database.dsn, names.check())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_driver_that_dies_before_its_names_are_written_leaves_them_to_the_next(
    tmp_path, database
):
    database.execute("CREATE TABLE one (id int PRIMARY KEY)", "INSERT INTO one VALUES (0)")
    name = "shop.public.one"

    def head():
        return open_chain(tmp_path / "lake").head()

    def named():
        with opened(tmp_path / "lake") as found:
            if not found.table_exists(name):
                return None
            return found.load_table(name).current_snapshot().snapshot_id

    def is_right():
        return named() == head().tables[name].snapshot_id

    def first():
        return (found := head()) is not None and name in found.tables

    with Stack(tmp_path, {"shop": database.dsn}, epoch_interval=0.5) as stack:
        stack.start("log-server", "bridge", "lake")
        wait_for(first, 240, "the first epoch")
        wait_for((tmp_path / "lake" / "catalog.db").exists, 30, "the catalog")
        wait_for(is_right, 30, "the first names")
        stack.kill("lake")
        for number, place in enumerate(("after-manifest", "catalog-written"), 1):
            before = named()
            database.execute(f"INSERT INTO one VALUES ({number})")
            stack.start("lake", env={"TUSKLINE_FAIL_POINT": place})
            assert stack.wait("lake", 240) == -9
            # Readable, as it was; at the second place SQLite takes the half of a transaction back.
            assert named() == before
        stack.start("lake")
        database.execute("INSERT INTO one VALUES (3)")
        wait_for(lambda: head().tables[name].rows == 4, 240, "the last epoch")
        wait_for(is_right, 60, "the names of the last epoch")
        with opened(tmp_path / "lake") as found:
            ids = found.load_table(name).scan().to_arrow()["id"].to_pylist()
        assert sorted(ids) == [0, 1, 2, 3]
