"""Compaction beside a live writer: real tables, changes between the plan and the decision, and what readers see."""

import threading
from collections import Counter

import pytest

from spark_consumers import read
from spark_consumers.lake.compaction import rewrite
from spark_consumers.lake.compaction.offer import OFFERS
from spark_consumers.lake.compaction.plan import Group
from spark_consumers.lake.compaction.rewrite import liveness_of, states
from spark_consumers.lake.format import checksums
from spark_consumers.lake.index import build
from spark_consumers.lake.maintenance import maintainer as maintainer_module
from spark_consumers.lake.maintenance.maintainer import Limits, Maintainer
from spark_consumers.lake.manifest import reader_leases
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.manifest.sealed_json import parse
from spark_consumers.lake.verify import verify
from spark_consumers.lake.writer import requests
from tests.support.capture_stack import STREAM
from tests.support.engines import metadata_of
from tests.support.iceberg_check import assert_valid
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import maintaining
from tests.support.waiting import wait_for
from walsender_bridge.errors import CorruptError
from walsender_bridge.postgres.table_layout import LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern

DOCS, PAIRS, BAG = (f"{STREAM}.public.{name}" for name in ("docs", "pairs", "bag"))
ALL = (DOCS, PAIRS, BAG)


def files(pipeline, name):
    """The data files of a table now."""
    table = pipeline.head().tables[name]
    return states(liveness_of(str(pipeline.lake / table.path), table))


def settled(pipeline, made, accepted):
    """Run rounds until so many offers are accepted and none waits."""

    def done():
        pipeline.house.run_once()
        return made.summary.accepted >= accepted and not made.summary.waiting

    wait_for(done, 60, f"{accepted} accepted offers")


def churn(database, pipeline, first, rounds):
    """Epochs that insert, update and delete in all three tables."""
    for number in range(first, first + rounds):
        database.execute(
            "INSERT INTO docs SELECT g, 'new', repeat('x', 50), 1 FROM "
            f"generate_series({100 + 10 * number}, {109 + 10 * number}) g",
            f"UPDATE docs SET n = n + 1 WHERE id = {number + 1}",
            f"UPDATE docs SET title = 'changed' WHERE id = {100 + 10 * number}",
            f"INSERT INTO bag SELECT {number}, 0.5, 'bag', NULL FROM generate_series(1, 4)",
            f"DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = {number})",
            "INSERT INTO pairs SELECT g, 'p', NULL, '{1,2}' FROM "
            f"generate_series({10 * number + 10}, {10 * number + 13}) g",
        )
        pipeline.flush()


def rows_of(snapshot):
    return {name: sorted(map(str, snapshot[name].collect())) for name in ALL}


def offered(pipeline, monkeypatch, meanwhile):
    """Have a maintainer prepare its offers, `meanwhile` happen, and then the offers made and decided; the outcomes by table."""
    ask, waiting = requests.ask, []

    def later(*arguments, **options):
        waiting.append((arguments, options))

    made = Maintainer(pipeline.lake, Limits())
    with monkeypatch.context() as patch:
        patch.setattr(requests, "ask", later)
        # Nothing is awaited.
        patch.setattr(Maintainer, "_outcomes", lambda *_: False)
        made.run_once(threading.Event())
    assert waiting
    meanwhile()
    for arguments, options in waiting:
        ask(*arguments, **options)
    pipeline.house.run_once()
    chain = open_chain(pipeline.lake)
    outcomes = {}
    for (_, _, (table,)), options in waiting:
        record = chain.store.read(f"{OFFERS}/{options['offer']}")
        outcomes[table] = parse(record, "")
        chain.store.remove(f"{OFFERS}/{options['offer']}")
    made.close()
    return outcomes


def test_small_and_half_dead_files_become_one_beside_the_writer(pipeline, database, monkeypatch):
    churn(database, pipeline, 0, 6)
    before = {name: files(pipeline, name) for name in ALL}
    old = read(pipeline.spark, pipeline.lake)
    rows, epoch = rows_of(old), pipeline.head().epoch
    with maintaining(pipeline) as made:
        settled(pipeline, made, 3)
    assert made.summary.refused == 0
    assert pipeline.head().epoch == epoch
    for name in ALL:
        (after,) = files(pipeline, name)
        assert len(before[name]) > 5
        assert after.removed == 0
    # What is read by an earlier link is as it was; and so is the epoch.
    assert rows_of(old) == rows
    assert_equal(database.dsn, read(pipeline.spark, pipeline.lake))
    # The row index finds the rows where they are now.
    churn(database, pipeline, 6, 5)
    database.execute("DELETE FROM docs WHERE id % 3 = 0", "DELETE FROM bag WHERE a = 2")
    assert_equal(database.dsn, pipeline.flush())
    for metadata in metadata_of(pipeline.lake).values():
        assert_valid(metadata)

    def changes_all():
        database.execute(
            "UPDATE docs SET n = n + 1 WHERE id % 4 = 1",
            "DELETE FROM docs WHERE id % 5 = 2",
            # All rows of a file.
            "DELETE FROM pairs WHERE a BETWEEN 60 AND 63",
            "DELETE FROM bag WHERE ctid IN (SELECT min(ctid) FROM bag WHERE a > 5 GROUP BY a)",
            "INSERT INTO bag SELECT 9, 0.5, 'bag', NULL FROM generate_series(1, 4)",
            "ALTER TABLE pairs ADD more int",
            "UPDATE pairs SET more = a WHERE a % 4 = 0",
        )
        pipeline.flush()

    # Rows that were removed since are carried over, and new columns change nothing.
    outcomes = offered(pipeline, monkeypatch, changes_all)
    assert {name: each["accepted"] for name, each in outcomes.items()} == dict.fromkeys(ALL, True)
    assert any(file.removed for file in files(pipeline, DOCS))
    assert any(file.removed for file in files(pipeline, BAG))
    assert_equal(database.dsn, read(pipeline.spark, pipeline.lake))
    churn(database, pipeline, 11, 1)
    database.execute("UPDATE docs SET n = 0", "DELETE FROM bag WHERE a > 2", "DELETE FROM pairs")
    assert_equal(database.dsn, pipeline.flush())
    monkeypatch.setattr(reader_leases, "HOLD", 0.0)
    writer = pipeline.house._writer
    writer.kept.expire(writer.head, 0.0)
    assert_no_orphans(pipeline.spark, pipeline.lake)
    assert open_chain(pipeline.lake).store.names(OFFERS) == []
    assert verify(open_chain(pipeline.lake), lambda *_: None).errors == []


def test_a_table_that_has_settled_has_no_vectors_after_maintenance(pipeline, database):
    database.execute("INSERT INTO docs SELECT g, 'new', NULL, 1 FROM generate_series(1000, 1999) g")
    pipeline.flush()
    stop = threading.Event()
    with maintaining(pipeline) as made:
        settled(pipeline, made, 0)
    database.execute("UPDATE docs SET n = n + 1 WHERE id BETWEEN 1000 AND 1049")
    pipeline.flush()
    early = Maintainer(pipeline.lake, Limits())
    assert not early.run_once(stop)
    early.close()
    assert sum(file.removed for file in files(pipeline, DOCS)) == 50
    with maintaining(pipeline, settled=0) as made:
        settled(pipeline, made, 1)
    assert [file.removed for file in files(pipeline, DOCS) if file.removed] == []
    assert_equal(database.dsn, read(pipeline.spark, pipeline.lake))
    assert verify(open_chain(pipeline.lake), lambda *_: None).errors == []


def test_offers_of_more_rows_than_are_sorted_at_once_follow_each_other(
    pipeline, database, monkeypatch
):
    monkeypatch.setattr(build, "_SORTED_ROWS", 10)
    for begin in (0, 6):
        churn(database, pipeline, begin, 6)
        with maintaining(pipeline, settled=0) as made:
            settled(pipeline, made, 3)
        assert made.summary.refusals == ()
        assert [len(files(pipeline, name)) for name in ALL] == [1, 1, 1]
    assert_equal(database.dsn, read(pipeline.spark, pipeline.lake))
    assert verify(open_chain(pipeline.lake), lambda *_: None).errors == []


def test_files_that_only_the_row_index_has_are_not_replaced(pipeline, database, monkeypatch):
    churn(database, pipeline, 0, 6)
    with monkeypatch.context() as patch, maintaining(pipeline, settled=0) as made:
        # As if the run of an offer did not say which files it replaces.
        patch.setattr(rewrite, "add_files", lambda *given: build.add_files(*given[:6]))
        settled(pipeline, made, 3)
    assert all(len(files(pipeline, name)) > 5 for name in ALL)
    before, rows = pipeline.head(), rows_of(read(pipeline.spark, pipeline.lake))
    maker = Maintainer(pipeline.lake, Limits(settled=0))
    with pytest.raises(CorruptError, match="in the table's row index, but not in its snapshot"):
        maker.run_once(threading.Event())
    maker.close()
    with monkeypatch.context() as patch:
        # A maintainer that does not compare them.
        patch.setattr(rewrite, "strays", lambda *_: [])
        patch.setattr(rewrite, "_data_files", lambda *_: dict.fromkeys(all_files(pipeline), None))
        outcomes = offered(pipeline, monkeypatch, lambda: None)
    assert all("snapshot and its row index differ" in o["reason"] for o in outcomes.values())
    assert not any(each["accepted"] for each in outcomes.values())
    after = pipeline.head().tables
    assert [after[n].snapshot_id for n in ALL] == [before.tables[n].snapshot_id for n in ALL]
    assert rows_of(read(pipeline.spark, pipeline.lake)) == rows


def all_files(pipeline):
    return [file.name for name in ALL for file in files(pipeline, name)]


def test_an_offer_that_is_not_right_any_more_is_refused_and_leaves_no_file(
    pipeline, database, monkeypatch
):
    churn(database, pipeline, 0, 5)

    def emptied():
        database.execute("TRUNCATE docs", "INSERT INTO docs VALUES (1), (2), (3)")
        requests.ask(open_chain(pipeline.lake), "resync", [BAG])
        path = pipeline.head().tables[BAG].path
        while pipeline.head().tables[BAG].path == path:
            pipeline.flush()

    outcomes = offered(pipeline, monkeypatch, emptied)
    assert "removed or moved" in outcomes[DOCS]["reason"]
    assert "copied again" in outcomes[BAG]["reason"]
    assert outcomes[PAIRS]["accepted"]
    assert_equal(database.dsn, read(pipeline.spark, pipeline.lake))
    assert_no_orphans(pipeline.spark, pipeline.lake)

    def taken_over():
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse()
        pipeline.house.run_once()

    churn(database, pipeline, 20, 5)
    outcomes = offered(pipeline, monkeypatch, taken_over)
    assert {each["reason"] for each in outcomes.values()} == {
        "it was made under term 1, but the present term is 2"
    }
    # Without a commit of its own, as a file of it was lost.
    path = pipeline.lake / pipeline.head().tables[DOCS].path

    def loses_a_file():
        for file in path.glob("data/compacted-*.parquet"):
            checksums.remove(file)

    outcomes = offered(pipeline, monkeypatch, loses_a_file)
    assert "missing" in outcomes[DOCS]["reason"]
    assert outcomes[BAG]["accepted"]
    database.execute("UPDATE docs SET n = 7", "DELETE FROM bag WHERE a < 23")
    assert_equal(database.dsn, pipeline.flush())
    # A maintainer that is killed leaves files and a record: the writer removes both.
    churn(database, pipeline, 30, 5)
    with monkeypatch.context() as patch:
        patch.setattr(requests, "ask", lambda *_, **__: None)
        patch.setattr(Maintainer, "_outcomes", lambda *_: False)
        dead = Maintainer(pipeline.lake, Limits())
        dead.run_once(threading.Event())
        dead.close()
    assert open_chain(pipeline.lake).store.names(OFFERS)
    writer = pipeline.house._writer
    writer.compactions.sweep(writer.head, [])
    assert open_chain(pipeline.lake).store.names(OFFERS) == []
    assert_equal(database.dsn, pipeline.flush())
    assert_no_orphans(pipeline.spark, pipeline.lake)


def test_tables_that_are_copied_on_write_are_compacted_without_vectors(
    pipeline, database, monkeypatch
):
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(deletes={"default": "copy-on-write"})
    churn(database, pipeline, 0, 5)
    monkeypatch.setattr(maintainer_module, "groups", _all_of)

    def removes():
        database.execute("DELETE FROM docs WHERE id = 101", "INSERT INTO bag VALUES (99)")
        pipeline.flush()

    outcomes = offered(pipeline, monkeypatch, removes)
    assert "no deletion vectors" in outcomes[DOCS]["reason"]
    assert outcomes[BAG]["accepted"]
    assert outcomes[PAIRS]["accepted"]
    for name in ALL:
        assert all(file.removed == 0 for file in files(pipeline, name))
    assert_equal(database.dsn, read(pipeline.spark, pipeline.lake))
    database.execute("DELETE FROM docs WHERE id % 2 = 0", "DELETE FROM bag WHERE a = 3")
    assert_equal(database.dsn, pipeline.flush())
    assert_no_orphans(pipeline.spark, pipeline.lake)


def test_partitions_and_row_ids_stay_and_sorted_tables_are_left_to_the_writer(
    pipeline, database, monkeypatch
):
    def rule(name, partition=(), sort=()):
        return LayoutRule(Pattern.parse(name), TableLayout.parse(partition, sort, {}))

    rules = [rule("public.docs", ["bucket(2, id)"]), rule("public.pairs", (), ["a desc"])]
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(layouts=[*rules, rule("public.bag", ["a"])])
    plain = {file.name for file in files(pipeline, DOCS)}
    churn(database, pipeline, 0, 6)
    before, ids = {name: files(pipeline, name) for name in ALL}, row_ids(pipeline, DOCS)

    def removes():
        # Of files that were written in partitions, and of the one that was there before.
        database.execute("DELETE FROM docs WHERE id % 7 = 3", "DELETE FROM bag WHERE a = 5")
        pipeline.flush()

    outcomes = offered(pipeline, monkeypatch, removes)
    assert {name for name, each in outcomes.items() if each["accepted"]} == {DOCS}
    after = files(pipeline, DOCS)
    assert plain <= {file.name for file in after}, "they are of an earlier spec"
    assert (
        Counter(file.partition for file in after if file.name not in plain).most_common(1)[0][1]
        <= 2
        < len(before[DOCS])
    )
    assert any(file.removed for file in after if "compacted" in file.name)
    left = row_ids(pipeline, DOCS)
    assert left == {key: found for key, found in ids.items() if key in left}
    assert len(left) < len(ids)
    assert_equal(database.dsn, read(pipeline.spark, pipeline.lake))
    churn(database, pipeline, 6, 2)
    assert_equal(database.dsn, pipeline.flush())
    assert_no_orphans(pipeline.spark, pipeline.lake)


def row_ids(pipeline, name):
    """Iceberg's id and last change of each row, by the table's first column."""
    found = read(pipeline.spark, pipeline.lake)[name]
    rows = found.selectExpr(found.columns[0], "_row_id", "_last_updated_sequence_number").collect()
    return {key: tuple(kept) for key, *kept in rows}


def _all_of(found, _, **__):
    """One group of all files, whatever is gained."""
    return [Group(tuple(found))]
