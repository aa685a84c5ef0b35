"""`apply`: upserts and deletes into a large table, against the MERGE that a user writes by hand, and reads straight after.

One table of 10 million rows, copied into a lake by the pipeline, and from there into the peer's table (format version 3, merge
on read, which is MERGE's fastest here). In each round the server changes rows all over the table; then both sides read the
same versions of the log and write them in turn: an epoch of the lake, and one MERGE of the changes, of which a window function
has kept the last one of each key. Only this is measured, while the server is idle. Then a query reads the lake's table, the same rows,
written plainly, and the peer's table, which has deletion vectors for the same rows; then a maintainer rewrites what is due, and the
query reads all of them again. A maintainer shows that it lives from the beginning, as beside a driver of `tuskline up`, so epochs leave
rewriting to it.

Equal means: after each round both tables have the same number of rows, and the same sum of hashes over all columns.
"""

import argparse
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from psycopg import sql
from pyspark.sql import DataFrame

from benchmarks.lakes import Bench, Lake, bench, sums
from benchmarks.processes import tree_cpu_seconds
from benchmarks.report import Report, Round, load
from spark_consumers import read
from spark_consumers.lake.maintenance.maintainer import Limits, Maintainer

NAME = "apply"
_TABLE, _WORK = "big", "changes"
_PEER, _PLAIN = "tuskline.bench.peer", "tuskline.bench.plain"
#: Of the changes, how many are updates; the others are deletes and inserts in equal parts.
_UPDATES = 0.6
#: Rounds of reads, and how many before do not count: they are short, and the JVM compiles in the first ones.
_READS, _WARM_READS = 7, 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--changes", type=int, default=500_000, help="of a round")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """All rounds: the lake, the MERGE, in turn; then the reads."""
    rows = max(int(options.rows * options.scale), 1000)
    changes = max(int(options.changes * options.scale), 100)
    make = sql.SQL("CREATE TABLE {} (id bigint PRIMARY KEY, n int NOT NULL, v text)")
    with bench([make.format(sql.Identifier(_TABLE))], memory="3g") as running:
        report = Report(
            NAME, [{"name": "MERGE, Iceberg in Spark", "version": running.spark.version}]
        )
        say(f"writing {rows} rows")
        _insert(running, 1, rows)
        lake = Lake(running, "own", running.publish("apply", [_TABLE]))
        say(f"copied in {_copy(lake, running):.1f} s")
        version = lake.head().epoch
        maintainer = Maintainer(lake.root, Limits(settled=0))
        maintainer.begin()
        for number in range(-1, options.rounds):
            _change(running, rows, changes, number)
            until = running.barrier()
            turns = _turn(running, lake, version, until, own_first=number % 2 == 0)
            version = until
            for turn in turns:
                say(
                    f"{number + 1}/{options.rounds} {turn.side}: {turn.rows / turn.wall:,.0f} rows/s, "
                    f"{turn.rows / turn.cpu:,.0f} a CPU second, load {turn.load}"
                )
                if number >= 0:
                    report.add(turn)
            if _own(running, lake) != sums(running.spark.table(_PEER)):
                report.unequal.append(f"round {number + 1}: the tables have different rows")
        _write_plain(running, lake)
        _read(report, running, lake, say, "read")
        _maintain(lake, maintainer, say)
        if _own(running, lake) != sums(running.spark.table(_PEER)):
            report.unequal.append("after maintenance the tables have different rows")
        _read(report, running, lake, say, "read_maintained")
        lake.close()
    for name in ("rows_s", "rows_cpu_s"):
        own, peer = (report.median(side, _WORK, name) for side in ("own", "merge"))
        report.ratio(f"{name}_vs_plain_merge", own, peer)
        report.ratios[name] = own
    return report


def _insert(running: Bench, first: int, last: int) -> None:
    fill = sql.SQL(
        "INSERT INTO {} SELECT g, g % 1000, 'value ' || g FROM generate_series({}, {}) g"
    )
    running.execute(fill.format(sql.Identifier(_TABLE), sql.Literal(first), sql.Literal(last)))


def _change(running: Bench, rows: int, changes: int, number: int) -> None:
    """Change rows all over the table, and insert behind its end."""
    number += 1
    updates, others = int(changes * _UPDATES), int(changes * (1 - _UPDATES) / 2)
    every, each = max(rows // updates, 1), max(rows // others, 1)
    table = sql.Identifier(_TABLE)
    running.execute(
        sql.SQL("UPDATE {} SET n = n + 1 WHERE id % {} = {}").format(
            table, sql.Literal(every), sql.Literal(number % every)
        ),
        sql.SQL("DELETE FROM {} WHERE id % {} = {}").format(
            table, sql.Literal(each), sql.Literal(number % each)
        ),
    )
    first = rows + 1 + number * others
    _insert(running, first, first + others - 1)


def _copy(lake: Lake, running: Bench) -> float:
    """Have the pipeline copy the table, and the peer's table made of that; seconds of the copy."""
    seconds = lake.copy()
    name = f"public.{_TABLE}"
    running.spark.sql("CREATE NAMESPACE IF NOT EXISTS tuskline.bench")
    frame = read(running.spark, lake.root)[name]
    properties = {"format-version": "3"} | {
        f"write.{kind}.mode": "merge-on-read" for kind in ("merge", "update", "delete")
    }
    writer = frame.writeTo(_PEER).using("iceberg")
    for key, value in properties.items():
        writer = writer.tableProperty(key, value)
    writer.create()
    return seconds


def _turn(running: Bench, lake: Lake, version: int, until: int, *, own_first: bool) -> list[Round]:
    def own() -> Round:
        return lake.epoch(until, _WORK)

    def peer() -> Round:
        busy, cpu, began = load(), tree_cpu_seconds(os.getpid()), time.monotonic()
        _merge(running, version, until)
        wall, cpu = time.monotonic() - began, tree_cpu_seconds(os.getpid()) - cpu
        return Round("merge", _WORK, 0, wall, cpu, None, busy)

    turns = [side() for side in ((own, peer) if own_first else (peer, own))]
    # The epoch knows how many changes there were.
    return [replace(turn, rows=max(t.rows for t in turns)) for turn in turns]


def _merge(running: Bench, version: int, until: int) -> None:
    """What a user writes by hand, of the versions after the one up to the other."""
    spark = running.spark
    batch = (
        spark.read.format("tuskline")
        .option("log", running.log.address)
        .option("mode", "table")
        .option("tables", f"public.{_TABLE}")
        .option("startingVersion", version + 1)
        .option("endingVersion", until)
        .load()
    )
    batch.createOrReplaceTempView("batch")
    spark.sql(f"""
        MERGE INTO {_PEER} AS t
        USING (
            SELECT * FROM (
                SELECT *, coalesce(id, _before.id) AS k, row_number() OVER (
                    PARTITION BY coalesce(id, _before.id) ORDER BY _version DESC, _offset DESC, _sequence DESC) AS last
                FROM batch)
            WHERE last = 1) AS s
        ON t.id = s.k
        WHEN MATCHED AND s._op = 'D' THEN DELETE
        WHEN MATCHED THEN UPDATE SET n = s.n, v = s.v
        WHEN NOT MATCHED AND s._op <> 'D' THEN INSERT (id, n, v) VALUES (s.id, s.n, s.v)
    """)


def _own(running: Bench, lake: Lake) -> list[str]:
    return sums(read(running.spark, lake.root)[f"public.{_TABLE}"])


def _maintain(lake: Lake, maintainer: Maintainer, say: Callable[[str], None]) -> None:
    """Have the maintainer do what is due, while the pipeline decides on its offers."""
    stop = threading.Event()

    def maintain() -> None:
        try:
            while maintainer.run_once(stop):
                pass
        finally:
            stop.set()

    thread = threading.Thread(target=maintain)
    began = time.monotonic()
    thread.start()
    while not stop.wait(0.05):
        lake.house.run_once()
    thread.join()
    done = maintainer.summary
    say(
        f"maintained in {time.monotonic() - began:.1f} s: {done.files_before} files became "
        f"{done.files_after}, {done.rewritten_bytes / 1e6:.0f} MB, {done.refused} offers refused"
    )
    maintainer.close()


def _write_plain(running: Bench, lake: Lake) -> None:
    frame = read(running.spark, lake.root)[f"public.{_TABLE}"]
    frame.writeTo(_PLAIN).using("iceberg").create()


def _read(
    report: Report,
    running: Bench,
    lake: Lake,
    say: Callable[[str], None],
    work: str,
) -> None:
    """The same query over the lake's table, over its rows, written plainly, and over the peer's table."""
    for number in range(-_WARM_READS, _READS):
        sides = {
            "own": lambda: read(running.spark, lake.root)[f"public.{_TABLE}"],
            "plain": lambda: running.spark.table(_PLAIN),
            "merge": lambda: running.spark.table(_PEER),
        }
        for side, found in sides.items():
            turn = _query(side, work, found)
            say(f"{work}, {number + 1}/{_READS} {side}: {turn.wall:.2f} s, load {turn.load}")
            if number >= 0:
                report.add(turn)
    own, *others = (report.median(side, work, "wall") for side in ("own", "plain", "merge"))
    for other, wall in zip(("plain", "merge"), others, strict=True):
        report.ratio(work.replace("read", f"read_vs_{other}"), own, wall)


def _query(side: str, work: str, found: Callable[[], DataFrame]) -> Round:
    busy, cpu, began = load(), tree_cpu_seconds(os.getpid()), time.monotonic()
    row = found().selectExpr("count(*)", "sum(n)", "sum(id)").first()
    wall, cpu = time.monotonic() - began, tree_cpu_seconds(os.getpid()) - cpu
    assert row is not None
    return Round(side, work, int(row[0]), wall, cpu, [str(value) for value in row], busy)
