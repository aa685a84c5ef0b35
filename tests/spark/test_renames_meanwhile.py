"""Tables that are renamed while something else is under way with them: a wait in SQL, a pin, quarantined rows, a copy of their partitions."""

import pytest

from spark_consumers import read
from spark_consumers.lake.copy import bootstrap
from spark_consumers.lake.epoch.quarantined_rows import rows_of
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.writer import requests
from tests.spark.test_flush_sql import driving
from tests.spark.test_renamed_tables import BAG, DOCS, PAIRS, paths
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import Pipeline
from tests.support.pin_requests import Pins
from tests.support.waiting import wait_for
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.errors import LakeError
from walsender_bridge.provisioning.init import init

PAPERS = f"{STREAM}.public.papers"


def test_14_a_session_that_waits_in_sql_finds_the_table_under_its_new_name(pipeline, database):
    init(CaptureSource(STREAM, database.dsn, f"tuskline_{STREAM}", PUBLICATION))
    before = paths(pipeline)
    with driving(pipeline), database.connect() as connection:
        for key, (was, now) in enumerate(
            (("docs", "papers"), ("papers", "texts"), ("texts", "docs"))
        ):
            with connection.transaction():
                connection.execute(f"ALTER TABLE {was} RENAME TO {now}".encode())
                connection.execute(
                    f"INSERT INTO {now} (id, title) VALUES ({100 + key}, 'x')".encode()
                )
                row = connection.execute("SELECT tuskline.flush_token()").fetchone()
            connection.execute("CALL tuskline.wait_flush(%s, '60 s')", row)
            shown = read(pipeline.spark, pipeline.lake)
            assert shown.tables == sorted([BAG, PAIRS, f"{STREAM}.public.{now}"])
            assert shown[now].where(f"id = {100 + key}").count() == 1
        # And tables that swap their names.
        with connection.transaction():
            connection.execute(
                "ALTER TABLE docs RENAME TO x; ALTER TABLE bag RENAME TO docs; ALTER TABLE x RENAME TO bag; UPDATE docs SET a = 5"
            )
            row = connection.execute("SELECT tuskline.flush_token()").fetchone()
        connection.execute("CALL tuskline.wait_flush(%s, '60 s')", row)
        assert_equal(database.dsn, read(pipeline.spark, pipeline.lake))
    assert paths(pipeline) == {DOCS: before[BAG], BAG: before[DOCS], PAIRS: before[PAIRS]}


def test_14_a_pin_has_the_earlier_name_and_quarantined_rows_go_with_the_table(pipeline, database):
    pipeline.house.close()
    policy = {"on_unrepresentable_value": {"default": "quarantine"}}
    pipeline.house = pipeline.lakehouse(**policy)
    database.execute("UPDATE docs SET n = 'NaN' WHERE id IN (3, 4)")
    old = pipeline.flush()
    assert (old["docs"].count(), old.manifest.tables[DOCS].quarantined_rows) == (7, 2)
    pins = Pins(pipeline)
    assert pins.pin("before", old.epoch) == f"pins epoch {old.epoch}"
    before = paths(pipeline)

    database.execute(
        "ALTER TABLE docs RENAME TO papers", "UPDATE papers SET n = 'NaN' WHERE id = 5"
    )
    renamed = pipeline.flush()
    table = renamed.manifest.tables[PAPERS]
    assert (table.path, table.rows, table.quarantined_rows) == (before[DOCS], 6, 3)
    assert {row.key["id"] for row in rows_of(pipeline.lake, PAPERS, table)} == {"3", "4", "5"}
    # A request by the new name; one by the earlier name is of no table.
    asked = requests.ask(open_chain(pipeline.lake), requests.RETRY, [PAPERS])
    earlier = requests.ask(open_chain(pipeline.lake), requests.RETRY, [DOCS])
    wait_for(
        lambda: pipeline.flush() and requests.finished(pipeline.head(), asked), 60, "the retry"
    )
    with pytest.raises(LakeError):
        requests.finished(pipeline.head(), earlier)
    assert pipeline.flush().manifest.tables[PAPERS].quarantined_rows == 3
    database.execute("UPDATE papers SET n = 1 WHERE id < 5", "DELETE FROM papers WHERE id = 5")
    mended = pipeline.flush()
    assert mended.manifest.tables[PAPERS].quarantined_rows == 0
    assert_equal(database.dsn, mended)

    # The pin keeps the epoch as it was, with its name, and can be released.
    del old
    pins.expire()
    pinned = read(pipeline.spark, pipeline.lake, pin="before")
    assert pinned.tables == [BAG, DOCS, PAIRS]
    assert pinned["docs"].count() == 7
    assert paths(pipeline)[PAPERS] == before[DOCS]
    pins.unpin("before")
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(**policy)
    database.execute("INSERT INTO papers VALUES (12, 'twelve')")
    assert_equal(database.dsn, pipeline.flush())
    assert_no_orphans(pipeline.spark, pipeline.lake)


def test_14_partitions_that_are_renamed_during_a_copy_are_copied_from_another_snapshot(
    spark, tmp_path, database, monkeypatch, caplog
):
    database.execute(
        "CREATE TABLE parted (id int PRIMARY KEY, t text) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF parted FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE p2 PARTITION OF parted FOR VALUES FROM (100) TO (200)",
        "INSERT INTO parted SELECT g, 't' || g FROM generate_series(0, 199) g",
    )
    #: What comes between a snapshot and its read: the second of these gives a name of the snapshot to another table.
    changes = [
        "ALTER TABLE p1 RENAME TO q1; UPDATE parted SET t = 'one' WHERE id = 1",
        "ALTER TABLE q1 RENAME TO x; ALTER TABLE p2 RENAME TO q1; ALTER TABLE x RENAME TO p2; DELETE FROM parted WHERE id = 150",
        "ALTER TABLE parted RENAME TO whole; UPDATE whole SET t = 'two' WHERE id = 2",
    ]
    really, attempts = bootstrap.TableCopier._with_next, []

    def with_next(copier, table, *given):
        attempts.append(table.published.full_name)
        if changes:
            database.execute(changes.pop(0))
        return really(copier, table, *given)

    monkeypatch.setattr(bootstrap.TableCopier, "_with_next", with_next)
    monkeypatch.setattr("spark_consumers.lake.writer.table_work._AFTER_FAILURE", 0.2)
    with Pipeline(spark, tmp_path, database, ("public.parted",)) as pipeline:

        def shown():
            pipeline.house.run_once(force=True)
            return f"{STREAM}.public.whole" in pipeline.head().tables

        wait_for(shown, 90, "the table")
        assert attempts[:3] == ["public.parted"] * 3
        assert attempts[3] == "public.whole"
        assert not changes
        whole = pipeline.flush()
        assert_equal(database.dsn, whole, only=[f"{STREAM}.public.whole"])
        path = paths(pipeline)[f"{STREAM}.public.whole"]
        # Partitions of a table that the lake has may have any names.
        database.execute(
            "ALTER TABLE q1 RENAME TO q3",
            "UPDATE whole SET t = 'three' WHERE id % 50 = 3",
            "ALTER TABLE p2 RENAME TO q1",
        )
        assert_equal(database.dsn, pipeline.flush(), only=[f"{STREAM}.public.whole"])
        assert paths(pipeline)[f"{STREAM}.public.whole"] == path
