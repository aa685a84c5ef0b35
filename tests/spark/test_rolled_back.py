"""PostgreSQL, log and log server come back from one snapshot of their disk; the lake and a checkpoint are on another one.

The log has the same identity, its versions and offsets pass those that were read, and its rows are others.
"""

import shutil
import subprocess

import pytest
from pyspark.errors import StreamingQueryException

from spark_consumers import Source, read
from spark_consumers.lake.flush import flush
from spark_consumers.lake.writer import requests
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.lake_check import assert_equal
from tests.support.lake_pipeline import Pipeline
from tests.support.servers import Database
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.errors import DivergedError

NAMES = (f"{STREAM}.public.a", f"{STREAM}.public.b")


class Machine:
    """What is on the disk of which snapshots are taken."""

    def __init__(self, pipeline, server, folder):
        self.pipeline, self.server, self.folder = pipeline, server, folder
        self.parts = [server.data_dir, folder / "log-server", folder / "repository"]

    def snapshot(self):
        self._down()
        for part in self.parts:
            self._copy(part, part.with_name(f"{part.name}.snapshot"))
        self._up()

    def restore(self):
        self._down()
        for part in self.parts:
            self._copy(part.with_name(f"{part.name}.snapshot"), part)
        self._up()

    def _copy(self, source, target):
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", source, target], check=True)

    def _down(self):
        self.pipeline.capture.kill()
        self.pipeline.log.stop_repository()
        self.pipeline.log.kill_log_server()
        self.server.stop("fast")

    def _up(self):
        self.server.start()
        self.pipeline.log.start_log_server()
        self.pipeline.log.start_repository()
        self.pipeline.capture.start()
        wait_for(self.pipeline.capture.streams, 60, "capture streams")

    def insert(self, *keys):
        with self.pipeline.database.connect() as connection:
            for key in keys:
                connection.execute("INSERT INTO a VALUES (%s)", [key])
                connection.execute("INSERT INTO b VALUES (%s, 'x')", [key])

    def version(self):
        with LogClient(self.pipeline.log.address) as client:
            return client.status().version


@pytest.fixture
def machine(spark, tmp_path, make_server):
    server = make_server(fsync="off")
    server.start()
    database = Database("postgres", server)
    database.execute(
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE TABLE b (id int, t text)",
        "ALTER TABLE b REPLICA IDENTITY FULL",
    )
    with Pipeline(spark, tmp_path, database, ("public.a", "public.b")) as pipeline:
        pipeline.wait_for_tables("a", "b")
        yield Machine(pipeline, server, tmp_path)


def followed(pipeline, checkpoint):
    """What a query that goes on from its checkpoint has read by now: rows."""
    seen = []
    frame = pipeline.spark.readStream.format("tuskline").option("log", pipeline.log.address).load()
    query = (
        frame.writeStream.option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .foreachBatch(lambda rows, _: seen.append(rows.count()))
        .start()
    )
    query.awaitTermination()
    return sum(seen)


@pytest.mark.long
@pytest.mark.parametrize("has_passed", [True, False], ids=["passed the epoch", "behind it"])
def test_a_log_that_was_rolled_back_is_not_followed(machine, tmp_path, has_passed):
    pipeline, lake, checkpoint = machine.pipeline, machine.pipeline.lake, tmp_path / "checkpoint"
    machine.insert(1, 2, 3)
    assert_equal(pipeline.database.dsn, pipeline.flush())
    machine.snapshot()
    for key in range(10, 20, 2):
        machine.insert(key, key + 1)
        before = pipeline.flush()
    if has_passed:
        assert followed(pipeline, checkpoint)
    machine.restore()
    keys = iter(range(1001, 2000))
    while has_passed and machine.version() <= before.epoch + 3:
        machine.insert(next(keys))
        pipeline.barrier()

    house = pipeline.lakehouse()
    for _ in range(3):
        with pytest.raises(DivergedError, match="the log was rolled back"):
            house.run_once(force=True)
    states = {n: (t.state, t.reason[:23]) for n, t in pipeline.head().tables.items()}
    assert states == dict.fromkeys(NAMES, ("held", "the log was rolled back"))
    assert read(pipeline.spark, lake)["public.a"].count() == 13
    assert pipeline.head().epoch == before.epoch
    if has_passed:
        with pytest.raises(StreamingQueryException, match=r"DivergedError.*rolled back"):
            followed(pipeline, checkpoint)
    else:
        sources = [Source(STREAM, pipeline.database.dsn, PUBLICATION)]
        with pytest.raises(DivergedError, match=r"but epoch .* is published"):
            flush(str(lake), pipeline.log.address, sources, timeout=60)

    # The way out: every table is copied as it is now. One of them alone is not enough.
    chain = house._chain  # where requests are left
    requests.ask(chain, requests.RESYNC, NAMES[:1])
    for _ in range(2):
        with pytest.raises(DivergedError, match=rf"resync {NAMES[1]} copies"):
            house.run_once(force=True)
    requests.ask(chain, requests.RESYNC, NAMES[1:])

    def live():
        house.run_once(force=True)
        return {t.state for t in pipeline.head().tables.values()} == {"live"}

    wait_for(live, 60, "all tables are shown again")
    machine.insert(next(keys))
    after = pipeline.flush(house)
    assert after.epoch > before.epoch
    assert_equal(pipeline.database.dsn, after)
