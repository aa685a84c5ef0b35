"""`snapshot`: a table of PostgreSQL into an Iceberg table, against Spark's own JDBC source.

Three tables: pgbench_accounts, where JDBC is partitioned over ranges of its numeric key; a table whose key is
a text, which JDBC reads over one connection, as it comes; and one of 19 columns like the public records of taxis, on which other
products have published figures, without a key. Both sides write the same kind of Iceberg table
in the same session. JDBC's partitions are transactions of their own; the copy is of one exact LSN. A third side is what `tuskline lake run`
does: the first copy of a lake, whose executors write Parquet files themselves, up to the epoch that shows it.

Wall seconds from the first query of the catalog to the committed table; CPU seconds and peak memory of Spark and its Python
workers, which share one session. Equal means: row count, and a sum of hashes over all columns of every row.
"""

import argparse
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import DataFrame

from benchmarks import workload
from benchmarks.lakes import Bench, Lake, bench
from benchmarks.processes import peak_memory, tree_cpu_seconds
from benchmarks.report import Report, Round, load
from spark_consumers import read
from spark_consumers.snapshot.exported import ExportedSnapshot
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
    """All tables, one after the other."""
    report = Report(NAME, [{"name": "Spark JDBC", "version": DRIVER}])
    units = max(int(options.rows * options.scale) // _UNIT, 1)

    def fill(server: LocalServer) -> None:
        say(f"writing {units * _UNIT} rows")
        workload.pgbench(server, "-i", "-q", "-s", str(units))
        for name in ("keyless", "taxi"):
            workload.execute(server, f"benchmark/{name}")

    with bench(memory="3g", major=options.postgres, jars=[str(_driver())], fill=fill) as running:
        _rounds(report, running, units * _UNIT, options, say)
    return report


def _rounds(
    report: Report,
    running: Bench,
    rows: int,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> None:
    running.spark.sql("CREATE NAMESPACE IF NOT EXISTS tuskline.bench")
    for case, table, key, name in _CASES:
        sides: dict[str, Callable[[], AbstractContextManager[DataFrame]]] = {
            "own": partial(_own, running, table),
            "lake": partial(_lake, running, table),
            "jdbc": partial(_jdbc, running, table, key, rows, options.jdbc_partitions),
        }
        # A warm-up round that does not count: all sides then have workers, and the JVM has compiled.
        for number in range(-1, options.rounds):
            for side, copy in sides.items():
                turn = _turn(side, case, rows, copy)
                say(f"{case} {number + 1}/{options.rounds} {side}: {rows / turn.wall:,.0f} rows/s")
                if number >= 0:
                    report.add(turn)
        for side in sides:
            report.median(side, case, "rows_cpu_s")
            report.median(side, case, "peak_mb")
        peer = report.median("jdbc", case, "rows_s")
        report.ratio(name, report.median("own", case, "rows_s"), peer)
        report.ratio(f"lake_{name}", report.median("lake", case, "rows_s"), peer)
    for side, prefix in (("own", ""), ("lake", "lake_")):
        report.ratios[f"{prefix}wide_rows_cpu_s"] = report.median(side, "taxi", "rows_cpu_s")


def _turn(
    side: str, case: str, rows: int, copy: Callable[[], AbstractContextManager[DataFrame]]
) -> Round:
    busy, cpu, began = load(), tree_cpu_seconds(os.getpid()), time.monotonic()
    with ExitStack() as stack:
        with peak_memory(os.getpid()) as peak:
            found = stack.enter_context(copy())
        wall, cpu = time.monotonic() - began, tree_cpu_seconds(os.getpid()) - cpu
        hashed = f"sum(cast(xxhash64({', '.join(found.columns)}) as decimal(38)))"
        count, total = found.selectExpr("count(*)", hashed).first() or (0, 0)
    more = {"peak_mb": peak()}
    return Round(side, case, rows, wall, cpu, [int(count), str(total)], busy, more)


@contextmanager
def _own(running: Bench, table: str) -> Iterator[DataFrame]:
    dsn = running.server.dsn()
    with ExportedSnapshot(dsn) as exported:
        frame = (
            running.spark.read.format("tuskline-snapshot")
            .option("dsn", dsn)
            .option("snapshot", exported.snapshot)
            .option("table", table)
            .load()
        )
        written = _written(frame)
    yield written
    _drop(running)


@contextmanager
def _lake(running: Bench, table: str) -> Iterator[DataFrame]:
    """The first copy of a lake, up to the epoch that shows it."""
    name = table.partition(".")[2]
    lake = Lake(running, f"lake_{name}", running.publish(f"only_{name}", [name]))
    try:
        lake.copy()
        yield read(running.spark, lake.root)[table]
    finally:
        lake.close()
        shutil.rmtree(lake.root)
        running.execute(
            sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(f"only_{name}")),
        )


@contextmanager
def _jdbc(
    running: Bench,
    table: str,
    key: str | None,
    rows: int,
    partitions: int,
) -> Iterator[DataFrame]:
    given = conninfo_to_dict(running.server.dsn())
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
    yield _written(running.spark.read.format("jdbc").options(**chosen).load())
    _drop(running)


def _written(frame: DataFrame) -> DataFrame:
    frame.writeTo("tuskline.bench.copy").using("iceberg").create()
    return frame.sparkSession.table("tuskline.bench.copy")


def _drop(running: Bench) -> None:
    running.spark.sql("DROP TABLE tuskline.bench.copy PURGE")
