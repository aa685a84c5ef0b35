"""A job as a user submits it to a cluster: two executors, nothing registered. Prints one line of JSON.

python -m tests.support.executor_job LOG CHECKPOINT
"""

import json
import os
import sys

from pyspark.sql import DataFrame, SparkSession


def main(address: str, checkpoint: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local-cluster[2,1,1024]")
    for key, value in {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.defaultJavaOptions": os.environ["TUSKLINE_TEST_JAVA"],
        "spark.driver.memory": "512m",
        "spark.executor.defaultJavaOptions": os.environ["TUSKLINE_TEST_JAVA"],
        "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
        "spark.executorEnv.TUSKLINE_TEST_PROBE": os.environ["TUSKLINE_TEST_PROBE"],
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    rows: list[tuple[int, str]] = []

    def take(frame: DataFrame, batch: int) -> None:
        del batch
        rows.extend((row["id"], row["note"]) for row in frame.select("id", "note").collect())

    frame = (
        session.readStream.format("tuskline")
        .option("log", address)
        .option("tables", "public.orders")
        .option("mode", "table")
        .option("partitionBytes", "1")
        .load()
    )
    query = (
        frame.writeStream.foreachBatch(take)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(300)
    session.stop()
    print(json.dumps({"driver": os.getpid(), "rows": sorted(rows)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
