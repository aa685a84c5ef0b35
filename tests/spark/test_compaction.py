"""Compaction beside a live writer: real tables, changes between the plan and the decision, and what readers see."""

import threading
from contextlib import contextmanager

import pytest

from spark_consumers import read
from spark_consumers.lake.compaction import plan
from spark_consumers.lake.compaction.offer import OFFERS
from spark_consumers.lake.compaction.rewrite import liveness_of, states
from spark_consumers.lake.maintenance import maintainer as maintainer_module
from spark_consumers.lake.maintenance.maintainer import Limits, Maintainer
from spark_consumers.lake.manifest import reader_leases
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.verify import verify
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.waiting import wait_for

DOCS, PAIRS, BAG = (f"{STREAM}.public.{name}" for name in ("docs", "pairs", "bag"))
ALL = (DOCS, PAIRS, BAG)


def files(pipeline, name):
    """The data files of a table now."""
    table = pipeline.head().tables[name]
    return states(liveness_of(str(pipeline.lake / table.path), table))


@contextmanager
def maintaining(pipeline, **limits):
    """A maintainer of the pipeline's lake, and a thread in which it carries out one plan after another."""
    made = Maintainer(pipeline.lake, Limits(interval=0.1, **limits))
    stop = threading.Event()
    thread = threading.Thread(target=made.run, args=(stop,))
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def settled(pipeline, made, accepted):
    """Run rounds until so many offers are accepted and none waits."""

    def done():
        pipeline.house.run_once()
        return made.summary.accepted >= accepted and not made.summary.waiting

    wait_for(done, 60, f"{accepted} accepted offers")


def churn(database, pipeline, rounds):
    for number in range(rounds):
        database.execute(
            f"INSERT INTO docs SELECT g, 'new', repeat('x', 50), {number} FROM generate_series({100 + 10 * number}, {109 + 10 * number}) g",
            f"UPDATE docs SET n = n + 1 WHERE id = {number + 1}",
            f"UPDATE docs SET title = 'changed' WHERE id = {100 + 10 * number}",
            f"INSERT INTO bag SELECT {number}, 0.5, 'bag', NULL FROM generate_series(1, 4)",
            f"DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = {number})",
            f"INSERT INTO pairs VALUES ({number + 10}, 'p', NULL, '{{1,2}}')",
        )
        pipeline.flush()


def test_small_and_half_dead_files_become_one_beside_the_writer(pipeline, database, monkeypatch):
    monkeypatch.setattr(reader_leases, "HOLD", 0.0)
    churn(database, pipeline, 6)
    before = {name: files(pipeline, name) for name in ALL}
    old = read(pipeline.spark, pipeline.lake)
    rows = {name: sorted(map(str, old[name].collect())) for name in ALL}
    epoch = pipeline.head().epoch
    with maintaining(pipeline) as made:
        settled(pipeline, made, 3)
    assert made.summary.refused == 0
    assert pipeline.head().epoch == epoch
    for name in ALL:
        after = files(pipeline, name)
        assert len(before[name]) > 5
        assert [file.removed for file in after] == [0] * len(after)
        assert len(after) == 1
    # What is read by an earlier link is as it was; and so is the epoch.
    assert {name: sorted(map(str, old[name].collect())) for name in ALL} == rows
    assert_equal(database.dsn, read(pipeline.spark, pipeline.lake))
    # The row index finds the rows where they are now.
    churn(database, pipeline, 1)
    database.execute("DELETE FROM docs WHERE id % 3 = 0", "DELETE FROM bag WHERE a = 2")
    assert_equal(database.dsn, pipeline.flush())
    assert_no_orphans(pipeline.spark, pipeline.lake)
    assert open_chain(pipeline.lake).store.names(OFFERS) == []
    assert verify(open_chain(pipeline.lake), lambda *_: None).errors == []
