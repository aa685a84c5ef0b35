"""A source's slot is lost: the tables are brought level by a comparison, and only the rows that differ are written."""

from typing import Any

import psycopg
import pytest

from spark_consumers.lake.copy import compared
from spark_consumers.lake.manifest.table_version import LIVE
from tests.support.capture_stack import SLOT, STREAM
from tests.support.lake_check import assert_equal
from tests.support.lake_pipeline import Pipeline
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.provisioning.reattach import reattach

#: Bytes of a chunk.
CHUNK = 64 << 10


@pytest.fixture
def logged(monkeypatch):
    """What the copier has logged of tables that were brought level, by name; and why others were copied."""
    found: dict[str, dict[str, Any]] = {"level": {}, "copied": {}}

    class Log:
        def info(self, what, **values):
            if what == "table brought level":
                found["level"][values.pop("table").rpartition(".")[2]] = values

        def warning(self, what, **values):
            if what == "table is copied instead of being brought level":
                found["copied"][values["table"].rpartition(".")[2]] = values["reason"]

    from spark_consumers.lake.copy import bootstrap

    monkeypatch.setattr(bootstrap, "log", Log())
    return found


def lose_slot(pipeline, *statements):
    """The slot is dropped, and these statements are in no log."""
    pipeline.capture.kill()
    database = pipeline.database

    def dropped():
        with database.connect() as connection:
            try:
                connection.execute("SELECT pg_drop_replication_slot(%s)", [SLOT])
            except psycopg.errors.ObjectInUse:
                return False
            return True

    wait_for(dropped, 30, "the slot is dropped")
    database.execute(*statements)


def begin_again(pipeline):
    """As `tuskline reattach` does; capture streams again."""
    with LogClient(pipeline.log.address) as log:
        reattach(pipeline.capture.settings.source, log)
    pipeline.capture.start()
    wait_for(pipeline.capture.streams, 60, "capture streams")


def paths(pipeline):
    return {name.rpartition(".")[2]: t.path for name, t in pipeline.head().tables.items()}


def live_again(pipeline):
    """Run rounds until all tables follow; the snapshot that shows it."""

    def follow():
        pipeline.house.run_once(force=True)
        return {t.state for t in pipeline.head().tables.values()} == {LIVE}

    wait_for(follow, 120, "all tables follow")
    return pipeline.flush()


def test_few_rows_of_many_are_written_after_a_lost_slot(
    spark, tmp_path, database, logged, monkeypatch
):
    monkeypatch.setattr(compared, "CHUNK_BYTES", CHUNK)
    database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, t text, f float8)",
        "INSERT INTO big SELECT g, repeat('x', 90), g FROM generate_series(1, 20000) g",
        "CREATE TABLE same (id int PRIMARY KEY)",
        "INSERT INTO same SELECT generate_series(1, 1000)",
    )
    with Pipeline(spark, tmp_path, database, ("public.big", "public.same")) as pipeline:
        pipeline.wait_for_tables("big", "same")
        database.execute("UPDATE big SET f = -f WHERE id % 1000 = 7")
        pipeline.flush()
        before, snapshots = paths(pipeline), pipeline.head().tables
        # What the log has of this is never read: the lake was not running.
        database.execute(
            "UPDATE big SET t = 'in the log' WHERE id = 11", "DELETE FROM big WHERE id = 12"
        )
        pipeline.barrier()
        lose_slot(
            pipeline,
            "UPDATE big SET t = 'lost' WHERE id = 5000",
            "DELETE FROM big WHERE id = 10000",
            "UPDATE big SET id = 30000 WHERE id = 10001",
            "INSERT INTO big VALUES (30001, NULL, 'NaN')",
        )
        begin_again(pipeline)
        snapshot = live_again(pipeline)
        assert_equal(database.dsn, snapshot)
        assert paths(pipeline) == before, "neither was copied"
        assert (
            snapshot.manifest.tables[f"{STREAM}.public.same"].snapshot_id
            == snapshots[f"{STREAM}.public.same"].snapshot_id
        )
        big, same = logged["level"]["big"], logged["level"]["same"]
        assert not logged["copied"]
        assert (big["rows"], big["added"], big["removed"]) == (20_000 - 2 + 1, 4, 5)
        assert big["chunks"] > 20
        assert big["different_chunks"] <= 6
        assert big["read"] < 10_000
        assert (same["rows"], same["added"], same["removed"]) == (1000, 0, 0)
        # It follows from there.
        database.execute(
            "UPDATE big SET t = 'after' WHERE id IN (11, 5000, 30000)",
            "DELETE FROM big WHERE id = 30001",
        )
        assert_equal(database.dsn, pipeline.flush())
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse()
        database.execute("DELETE FROM big WHERE id < 100")
        assert_equal(database.dsn, pipeline.flush())
