"""`snapshot`: a table of PostgreSQL into an Iceberg table, against Spark's own JDBC source.

Three tables: pgbench_accounts, where JDBC is partitioned over ranges of its numeric key; a table whose key is
a text, which JDBC reads over one connection, as it comes; and one of 19 columns like the public records of taxis, on which other
products have published figures, without a key. Both sides write the same kind of Iceberg table
in the same session. JDBC's partitions are transactions of their own; the copy is of one exact LSN.

Wall seconds from the first query of the catalog to the committed table; CPU seconds and peak memory of Spark and its Python
workers, which share one session. Equal means: row count, and a sum of hashes over all columns of every row.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import DataFrame, SparkSession

from benchmarks import workload
from benchmarks.processes import peak_memory, tree_cpu_seconds
from benchmarks.report import Report, Round, load
from spark_consumers.snapshot.exported import ExportedSnapshot
from spark_consumers.spark import jars
from spark_consumers.spark.session import session
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.runtime import cache

NAME = "snapshot"
DRIVER = "org.postgresql:postgresql:42.7.7"
#: Rows of pgbench_accounts in one unit of pgbench's scale.
_UNIT = 100_000
_CASES = (
    ("accounts", "public.pgbench_accounts", "aid", "rows_s_vs_jdbc_keyed"),
    ("events", "public.events", None, "rows_s_vs_jdbc_plain"),
    ("taxi", "public.taxi", None, "rows_s_vs_jdbc_wide"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--jdbc-partitions", type=int, default=8)
    parser.add_argument("--postgres", type=int, help="the server's major (the newest here)")


def driver_available() -> bool:
    """Whether the driver is in the cache, or Maven can fetch it."""
    return any(_folder().glob("*.jar")) or shutil.which("mvn") is not None


def _folder() -> Path:
    return cache.folder() / "benchmarks" / DRIVER.replace(":", "-")


def _driver() -> Path:
    target = _folder()
    with cache.exclusive(target):
        if not target.is_dir():
            aside = target.with_name(f".{target.name}.new")
            shutil.rmtree(aside, ignore_errors=True)
            command = ["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={DRIVER}"]
            command.append(f"-DoutputDirectory={aside}")
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"Maven could not get {DRIVER}:\n{done.stdout[-1500:]}")
            aside.rename(target)
    return next(target.glob("*.jar"))


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Both tables, one after the other."""
    report = Report(NAME, [{"name": "Spark JDBC", "version": DRIVER}])
    units = max(int(options.rows * options.scale) // _UNIT, 1)
    with (
        workload.server(options.postgres) as server,
        tempfile.TemporaryDirectory(prefix="tuskline-bench-") as folder,
    ):
        say(f"writing {units * _UNIT} rows")
        workload.pgbench(server, "-i", "-q", "-s", str(units))
        for name in ("keyless", "taxi"):
            workload.execute(server, f"benchmark/{name}")
        paths = [str(jar) for jar in (*jars.paths(), _driver())]
        conf = {"spark.jars": ",".join(paths), "spark.driver.memory": "3g"}
        spark = session("benchmark", lake=Path(folder) / "lake", conf=conf)
        try:
            _rounds(report, spark, server, units * _UNIT, options, say)
        finally:
            spark.stop()
    return report


def _rounds(
    report: Report,
    spark: SparkSession,
    server: LocalServer,
    rows: int,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> None:
    spark.sql("CREATE NAMESPACE IF NOT EXISTS tuskline.bench")
    for case, table, key, name in _CASES:
        # A warm-up round that does not count: both sides then have workers, and the JVM has compiled.
        for number in range(-1, options.rounds):
            for side, read in (
                ("own", lambda table=table: _own(spark, server, table)),
                (
                    "jdbc",
                    lambda table=table, key=key: _jdbc(
                        spark, server, table, key, rows, options.jdbc_partitions
                    ),
                ),
            ):
                turn = _turn(spark, side, case, rows, read)
                say(f"{case} {number + 1}/{options.rounds} {side}: {rows / turn.wall:,.0f} rows/s")
                if number >= 0:
                    report.add(turn)
        own, peer = (report.median(side, case, "rows_s") for side in ("own", "jdbc"))
        for side in ("own", "jdbc"):
            report.median(side, case, "rows_cpu_s")
            report.median(side, case, "peak_mb")
        report.ratio(name, own, peer)
    report.ratios["wide_rows_cpu_s"] = report.median("own", "taxi", "rows_cpu_s")


def _turn(spark: SparkSession, side: str, case: str, rows: int, read: Callable[[], None]) -> Round:
    busy, cpu, began = load(), tree_cpu_seconds(os.getpid()), time.monotonic()
    with peak_memory(os.getpid()) as peak:
        read()
    wall, cpu = time.monotonic() - began, tree_cpu_seconds(os.getpid()) - cpu
    found = spark.table("tuskline.bench.copy")
    hashed = f"sum(cast(xxhash64({', '.join(found.columns)}) as decimal(38)))"
    count, total = found.selectExpr("count(*)", hashed).first() or (0, 0)
    spark.sql("DROP TABLE tuskline.bench.copy PURGE")
    return Round(side, case, rows, wall, cpu, [int(count), str(total)], busy, {"peak_mb": peak()})


def _own(spark: SparkSession, server: LocalServer, table: str) -> None:
    with ExportedSnapshot(server.dsn()) as exported:
        frame = (
            spark.read.format("tuskline-snapshot")
            .option("dsn", server.dsn())
            .option("snapshot", exported.snapshot)
            .option("table", table)
            .load()
        )
        _write(frame)


def _jdbc(
    spark: SparkSession,
    server: LocalServer,
    table: str,
    key: str | None,
    rows: int,
    partitions: int,
) -> None:
    given = conninfo_to_dict(server.dsn())
    chosen: dict[str, Any] = {
        "url": f"jdbc:postgresql://{given['host']}:{given['port']}/{given['dbname']}",
        "user": given["user"],
        "password": given.get("password", ""),
        "driver": "org.postgresql.Driver",
        "dbtable": table,
        # Without it the driver holds the whole table in memory.
        "fetchsize": 10_000,
    }
    if key is not None:
        chosen |= {"partitionColumn": key, "lowerBound": 1, "upperBound": rows + 1}
        chosen |= {"numPartitions": partitions}
    _write(spark.read.format("jdbc").options(**chosen).load())


def _write(frame: DataFrame) -> None:
    frame.writeTo("tuskline.bench.copy").using("iceberg").create()
