"""A program with a session of Spark Connect: it reads a lake, its log and a snapshot. Prints one line of JSON.

python -m tests.support.connect_job SERVER LAKE LOG DSN SNAPSHOT FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from tuskline import Lakehouse, errors, read, session


def main(server: str, lake: str, log: str, dsn: str, snapshot: str, folder: str) -> None:
    # As a user's own program does; `session` then finds it, and adds the lake's catalog.
    spark = SparkSession.builder.remote(server).getOrCreate()
    assert session(lake=lake) is spark
    assert pyspark.SparkContext._jvm is None, "this is no session of Spark Connect"
    snap = read(spark, lake)
    again = read(spark, lake, epoch=snap.epoch)
    views = snap.register_views("now")
    answer = {
        "session": type(spark).__module__,
        "epoch": snap.epoch,
        "again": again.epoch,
        "tables": {name: rows(frame) for name, frame in snap.items()},
        "live": {n: rows(f) for n, f in read(spark, lake, live=True, log=log).items()},
        "named": rows(spark.table("tuskline.shop.public.docs")),
        "views": {view: spark.sql(f"SELECT * FROM `{view}`").count() for view in views},
    }
    changes = spark.read.format("tuskline").option("log", log).load()
    answer["changes"] = sorted(([r.relation, r.op, r.after] for r in changes.collect()), key=str)
    table = spark.read.format("tuskline-snapshot").option("dsn", dsn).option("snapshot", snapshot)
    answer["snapshot"] = rows(table.option("table", "public.pairs").load())
    stream = (
        spark.readStream.format("tuskline")
        .option("log", log)
        .option("mode", "table")
        .option("tables", "public.docs")
        .load()
    )
    query = (
        stream.select("_op", "id", "title")
        .writeStream.format("parquet")
        .option("path", f"{folder}/streamed")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    answer["streamed"] = rows(spark.read.parquet(f"{folder}/streamed"))
    try:
        Lakehouse(spark, lake, log, [])
    except errors.NotSupportedError as error:
        answer["written"] = error.what
    try:
        _lost(spark, lake, snap)
    except Exception as error:
        answer["lost"] = f"{type(error).__name__}: {error}"
    # Over Spark Connect this ends the session, not the server.
    spark.stop()
    print(json.dumps(answer, default=str))


def rows(frame: Any) -> list[list[Any]]:
    """All rows, ordered, as text where JSON has no such value."""
    return sorted(([str(value) for value in row] for row in frame.collect()), key=str)


def _lost(spark: Any, lake: str, snap: Any) -> None:
    """Damage the newest metadata of a table, then open it."""
    path = Path(lake, snap.manifest.readable[snap.resolve("pairs")].path, "metadata")
    newest = max(path.glob("v*.metadata.json"), key=lambda file: int(file.name[1:].split(".")[0]))
    newest.write_bytes(newest.read_bytes().replace(b"snapshot", b"snapshOt", 1))
    read(spark, lake, epoch=snap.epoch)["pairs"].count()


if __name__ == "__main__":
    main(*sys.argv[1:])
