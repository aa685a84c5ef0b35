"""What is seen of an epoch that takes long, while it is under way."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spark_consumers.lake.epoch.progress import EpochProgress
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.status import read_status, writing_now
from spark_consumers.spark.job_group import described
from tests.support.waiting import wait_for
from walsender_bridge.runtime import fail_point


def test_a_long_epoch_shows_what_it_does_while_it_does_it(pipeline, database, monkeypatch):
    chain, going_on, hit = open_chain(pipeline.lake), threading.Event(), fail_point.hit

    def held(name):
        hit(name)
        if name == "table-written":
            assert going_on.wait(120)

    def shown():
        return writing_now(pipeline.head(), read_status(chain), time.time())

    def all_written():
        found = shown()
        return found is not None and found.tables_done == 2 and found

    monkeypatch.setattr(fail_point, "hit", held)
    database.execute("UPDATE docs SET n = n + 1")
    database.execute("UPDATE pairs SET at = now()")
    version = pipeline.barrier()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(pipeline.house.run_once, force=True)
        try:
            found = wait_for(all_written, 120, "an epoch with its tables written")
        finally:
            going_on.set()
        assert writing.result(120).epoch == version
    assert (found.epoch, found.stage, found.tables) == (version, "write tables", 2)
    assert found.began_at <= found.stage_at <= time.time()
    # It is published, whatever the last report has.
    assert shown() is None


def test_the_tasks_of_a_step_are_counted_while_it_runs(spark, tmp_path):
    context, gate = spark.sparkContext, tmp_path / "gate"
    progress = EpochProgress(context)
    progress.begin(7)
    progress.step("fold and write", group="epoch 7")

    def task(number, path=str(gate)):
        while number == 0 and not Path(path).exists():
            time.sleep(0.05)
        return number

    def run():
        with described(context, "epoch 7", "tasks"):
            return context.parallelize(range(3), 3).map(task).collect()

    def seen():
        found = progress.now()
        assert found is not None
        return found

    def counts():
        return seen().tasks_done, seen().tasks

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            wait_for(lambda: counts() == (2, 3), 60, "all tasks but one")
            # The last one does not end: nothing moves.
            moved_at = seen().moved_at
            assert seen().began_at < moved_at == seen().moved_at
        finally:
            gate.touch()
        assert running.result(60) == [0, 1, 2]
    progress.step("write tables", tables=2)
    progress.done()
    assert (seen().tasks, seen().tables_done) == (0, 1)
    assert seen().moved_at > moved_at
    progress.end()
    assert progress.now() is None
