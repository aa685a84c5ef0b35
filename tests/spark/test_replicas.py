"""A Spark job over a log whose streams have two replicas: it reads from both, and goes on with one."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pyspark.sql import Row, SparkSession

from spark_consumers.sources.changes import TusklineSource
from tests.support.capture_stack import ChangeLog
from tests.support.change_entries import Table, insert
from tests.support.log_writer import LogWriter
from tests.support.waiting import wait_for
from walsender_bridge.change_log.repository.membership import ReplicationPolicy

ORDERS = Table(1, "orders", (("id", 23, -1), ("note", 25, -1)))
#: Each is a commit, a range and a task.
COMMITS, ROWS = 12, 20


def test_41_a_job_reads_from_both_replicas_and_one_may_be_killed(
    spark: SparkSession, tmp_path: Path
) -> None:
    began, may_go_on = tmp_path / "began", tmp_path / "may-go-on"

    def held(rows: Iterable[Row]) -> Iterator[Row]:
        """What was read, once the test lets it pass."""
        began.touch()
        deadline = time.monotonic() + 60
        while not may_go_on.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield from rows

    with ChangeLog(tmp_path, ReplicationPolicy(2, 2, 60.0)) as log, contextlib.ExitStack() as stack:
        writer = LogWriter(log, "shop")
        stack.callback(writer.close)
        for commit in range(COMMITS):
            ids = range(commit * ROWS, (commit + 1) * ROWS)
            writer.commit([ORDERS], [insert(ORDERS, [i, f"note {i}"]) for i in ids])
        options = {"log": log.address, "tables": "public.orders", "mode": "table"}
        options["partitionBytes"] = "1"
        source = TusklineSource(options)
        planned: list[Any] = [*source.reader(source.schema()).partitions()]
        both = [f"grpc://{each}" for each in log.listens]
        assert [task.addresses[0] for task in planned] == both * (COMMITS // 2)
        frame = spark.read.format("tuskline").options(**options).load().select("id", "note")
        job = stack.enter_context(ThreadPoolExecutor(1)).submit(
            frame.rdd.mapPartitions(held).collect
        )
        # Whatever becomes of the test, the job has to end.
        stack.callback(may_go_on.touch)
        wait_for(began.exists, 60, "the first task")
        log.kill_log_server(1)
        may_go_on.touch()
        rows = sorted(tuple(row) for row in job.result(60))
    assert rows == [(i, f"note {i}") for i in range(COMMITS * ROWS)]
