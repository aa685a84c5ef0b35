"""`freshness`: seconds from a commit on PostgreSQL until Spark can read it in all ten tables, live and in the lake, against a MERGE per table.

pgbench calls a function that changes one row of each of ten tables, with the number of the call, 100 times a second. In turn, the
pipeline publishes epochs as fast as it can, and the peer, which is what a user writes by hand, has a streaming query for
each table that merges its changes into an Iceberg table. A commit is readable when the lake has an epoch with it, or when
the last of the peer's ten tables has it: then the round, or the MERGE, has returned. The reader's query is not counted. Live, a reader reads again
and again, while the pipeline publishes an epoch every 15 seconds; a commit is readable when a live read with it has returned. In each turn a side has
caught up before the load begins, and every commit of the load counts.

The second part has no peer: a hundred tables are read live while a transaction changes one row of one of them, in turn, 2,000 times a second.

Equal means: both have the same rows after each round; and in every epoch, and in five live reads of each turn, the tables end at the same call.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame

from benchmarks import workload
from benchmarks.lakes import Bench, Lake, bench, sums_of
from benchmarks.processes import tree_cpu_seconds
from benchmarks.report import Report, Round, load
from spark_consumers import Snapshot, read
from tests.support.waiting import wait_for

NAME = "freshness"
TABLES = tuple(f"f{number}" for number in range(10))
MANY = tuple(f"m{number}" for number in range(100))
_PARTS = ("merge", "many")
_WORK, _MANY_WORK = "ten tables", "a hundred tables"
_SPACE = "tuskline.bench"
#: Seconds between epochs while live reads are measured.
_CALM = 15.0
#: Seconds within which a side has everything after the load has ended.
_CATCH_UP = 300
#: Live reads of each turn whose tables are all looked at.
_CHECKED = 5
#: When something was readable (seconds since 1970), and the last call that it has.
Event = tuple[float, int]
#: The last call that a snapshot has; with True, all of its tables are looked at.
End = Callable[[Snapshot, bool], int]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--seconds", type=int, default=60, help="of load in each turn")
    parser.add_argument(
        "--rate", type=int, default=100, help="transactions a second, on ten tables"
    )
    parser.add_argument("--many-rate", type=int, default=2000, help="the same, on a hundred")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Ten tables against the peer, and a hundred live."""
    seconds = max(int(options.seconds * options.scale), 5)
    with bench([], memory="3g") as running:
        peer_name = "Structured Streaming with MERGE, Iceberg in Spark"
        report = Report(NAME, [{"name": peer_name, "version": running.spark.version}])
        if "merge" in options.parts:
            _against_merge(running, report, options, seconds, say)
        if "many" in options.parts:
            _many(running, report, options, seconds, say)
    return report


def _against_merge(
    running: Bench,
    report: Report,
    options: argparse.Namespace,
    seconds: int,
    say: Callable[[str], None],
) -> None:
    """All rounds: the lake, live reads of it and the peer, in turn."""
    workload.execute(running.server, "benchmark/freshness")
    lake = Lake(running, "own", running.publish("freshness", TABLES))
    lake.copy(len(TABLES))
    calls = _Calls(running, "change", "numbers", len(TABLES))
    peer = _Peer(running, lake)
    for number in range(-1, options.rounds):
        live = _Live(running, lake, _same_call)
        sides: list[_Own | _Live | _Peer] = [_Own(running, lake), live, peer]
        for side in sides if number % 2 else reversed(sides):
            turn = _turn(side, _WORK, calls, seconds, options.rate)
            say(f"{number + 1}/{options.rounds} {_told(turn)}")
            if number >= 0:
                report.add(turn)
        with _Own(running, lake).running():
            pass
        with peer.running():
            pass
        report.unequal += [f"round {number + 1}: {why}" for why in _unequal(lake, peer)]
    lake.close()
    for name in ("p50", "p99"):
        other = report.median(_Peer.name, _WORK, name)
        for kind, name_of_side in (("lake", _Own.name), ("live", _Live.name)):
            own = report.median(name_of_side, _WORK, name)
            report.ratio(f"{kind}_{name}_vs_merge", own, other)
            report.ratios[f"{kind}_{name}_seconds"] = round(own, 3)


def _many(
    running: Bench,
    report: Report,
    options: argparse.Namespace,
    seconds: int,
    say: Callable[[str], None],
) -> None:
    """All rounds of live reads of a hundred tables."""
    workload.execute(running.server, "benchmark/many")
    lake = Lake(running, "many", running.publish("many", MANY))
    lake.copy(len(MANY))
    calls = _Calls(running, "change_one", "numbers_of_many", 1)
    for number in range(-1, options.rounds):
        turn = _turn(_Live(running, lake, _in_turn), _MANY_WORK, calls, seconds, options.many_rate)
        say(
            f"{number + 1}/{options.rounds} {_told(turn)}, {turn.rows / turn.wall:,.0f} transactions/s"
        )
        if number >= 0:
            report.add(turn)
    lake.close()
    for name in ("p50", "p99", "rows_s"):
        own = report.median(_Live.name, _MANY_WORK, name)
        report.ratios[f"live_many_{name}"] = round(own, 3)


def _told(turn: Round) -> str:
    more = turn.more
    return (
        f"{turn.side}: p50 {more['p50']:.2f} s, p99 {more['p99']:.2f} s, "
        f"{more['steps']:.0f} steps, load {turn.load}"
    )


class _Own:
    """The lake. Its rounds run in a thread."""

    name = "own"

    def __init__(self, running: Bench, lake: Lake) -> None:
        self._bench, self._lake = running, lake
        self._published: list[tuple[float, int]] = []

    @contextmanager
    def running(self, pause: float = 0.0) -> Iterator[None]:
        """Publish epochs until the caller is done, with a pause behind each, and everything up to then."""
        self._lake.epoch(self._bench.barrier(), _WORK)
        self._published.clear()
        stop = threading.Event()

        def rounds() -> None:
            while not stop.wait(pause):
                made = self._lake.house.run_once(force=True)
                if made is not None:
                    self._published.append((time.time(), made.epoch))
            self._lake.house.run_once(force=True)

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(rounds)
            try:
                yield
                until = self._bench.barrier()
                if not pause:
                    wait_for(
                        lambda: self._lake.head().epoch >= until, _CATCH_UP, "the lake has all"
                    )
            finally:
                stop.set()
        done.result()

    def events(self) -> list[Event]:
        """When each epoch was published, and where its tables end. Raises `ValueError` if they end at different calls."""
        found = []
        for when, epoch in self._published:
            snapshot = read(self._bench.spark, self._lake.root, epoch=epoch)
            found.append((when, _same_call(snapshot, True)))
        return found


class _Live:
    """Live reads, one after the other, in a thread. Epochs are published meanwhile, as by a lake of calm pace."""

    name = "live"

    def __init__(self, running: Bench, lake: Lake, end: "End") -> None:
        self._bench, self._lake, self._end = running, lake, end
        self._read: list[tuple[float, Snapshot]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Read until the caller is done, and everything up to then."""
        stop = threading.Event()

        def reads() -> None:
            while not stop.is_set():
                self._read.append(self._one())

        with _Own(self._bench, self._lake).running(_CALM), ThreadPoolExecutor(1) as pool:
            # The first one starts Python workers.
            self._one()
            done = pool.submit(reads)
            try:
                yield
                self._bench.barrier()
            finally:
                stop.set()
            done.result()
            self._read.append(self._one())

    def _one(self) -> tuple[float, Snapshot]:
        found = read(self._bench.spark, self._lake.root, live=True, log=self._bench.log.address)
        return time.time(), found

    def events(self) -> list[Event]:
        """When each read returned, and where its tables end. Raises `ValueError` if they end at different calls."""
        last = len(self._read) - 1
        checked = {last * part // (_CHECKED - 1) for part in range(_CHECKED)}
        ends = (self._end(one, number in checked) for number, (_, one) in enumerate(self._read))
        # One whose tables are not all looked at ends a little later than is known.
        return list(zip([when for when, _ in self._read], accumulate(ends, max), strict=True))


class _Peer:
    """What a user writes: for each table a query that merges its changes, of which a window function keeps the last one of each key."""

    name = "merge"

    def __init__(self, running: Bench, lake: Lake) -> None:
        self._bench, self._first = running, lake.head().epoch + 1
        self._began = 0.0
        running.spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {_SPACE}")
        snapshot = read(running.spark, lake.root)
        for table in TABLES:
            writer = snapshot[f"public.{table}"].writeTo(f"{_SPACE}.{table}").using("iceberg")
            writer = writer.tableProperty("format-version", "3")
            for kind in ("merge", "update", "delete"):
                writer = writer.tableProperty(f"write.{kind}.mode", "merge-on-read")
            writer.create()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Merge changes until the caller is done, and everything up to then."""
        queries: list[Any] = []
        try:
            self._bench.barrier()
            # One after the other: each starts a Python worker, and catches up.
            for table in TABLES:
                queries.append(self._query(table))
                queries[-1].processAllAvailable()
            self._began = time.time()
            yield
            self._bench.barrier()
            for query in queries:
                query.processAllAvailable()
        finally:
            for query in queries:
                query.stop()

    def _query(self, table: str) -> Any:
        stream = (
            self._bench.spark.readStream.format("tuskline")
            .option("log", self._bench.log.address)
            .option("mode", "table")
            .option("tables", f"public.{table}")
            .option("startingVersion", self._first)
            .load()
        )
        return (
            stream.writeStream.option("checkpointLocation", str(self._bench.folder / table))
            .foreachBatch(lambda batch, _: self._merge(table, batch))
            .start()
        )

    def _merge(self, table: str, batch: DataFrame) -> None:
        view = f"batch_{table}"
        batch.createOrReplaceTempView(view)
        batch.sparkSession.sql(f"""
            MERGE INTO {_SPACE}.{table} AS t
            USING (
                SELECT * FROM (
                    SELECT *, coalesce(id, _before.id) AS k, row_number() OVER (
                        PARTITION BY coalesce(id, _before.id) ORDER BY _version DESC, _offset DESC, _sequence DESC) AS last
                    FROM {view})
                WHERE last = 1) AS s
            ON t.id = s.k
            WHEN MATCHED AND s._op = 'D' THEN DELETE
            WHEN MATCHED THEN UPDATE SET n = s.n, v = s.v
            WHEN NOT MATCHED AND s._op <> 'D' THEN INSERT (id, n, v) VALUES (s.id, s.n, s.v)
        """)

    def events(self) -> list[Event]:
        """When all tables had the calls up to which one, by the times of their snapshots."""
        made = [(table, *snapshot) for table in TABLES for snapshot in self._snapshots(table)]
        behind = dict.fromkeys(TABLES, 0)
        found = []
        for table, when, end in sorted(made, key=itemgetter(1)):
            behind[table] = max(end, behind[table])
            found.append((when, min(behind.values())))
        return found

    def _snapshots(self, table: str) -> list[Event]:
        """The table's snapshots of this turn, and the one before."""
        spark, name = self._bench.spark, f"{_SPACE}.{table}"
        rows = spark.sql(f"SELECT snapshot_id, committed_at FROM {name}.snapshots").collect()
        every = sorted((row["committed_at"].timestamp(), row["snapshot_id"]) for row in rows)
        started = [one for one in every if one[0] < self._began]
        chosen = started[-1:] + every[len(started) :]
        frames = [
            spark.read.option("versionAsOf", snapshot).table(name).selectExpr(f"{when}D", "max(n)")
            for when, snapshot in chosen
        ]
        return [(row[0], row[1]) for row in reduce(DataFrame.unionAll, frames).collect()]

    def frames(self) -> dict[str, DataFrame]:
        """Its tables."""
        return {table: self._bench.spark.table(f"{_SPACE}.{table}") for table in TABLES}


@dataclass(frozen=True)
class _Calls:
    """A load: this function is called, the sequence numbers its calls, each changes so many rows."""

    bench: Bench
    function: str
    sequence: str
    rows: int

    def run(self, seconds: int, rate: int) -> list[float]:
        """Run it. When each transaction had ended, in seconds since 1970."""
        server = self.bench.server
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "script")
            script.write_text(f"SELECT {self.function}();\n")
            command = [str(server.installation.tool("pgbench")), "-n", "-M", "prepared"]
            command += ["-c", "1", "-R", str(rate), "-T", str(seconds), "-f", str(script), "-l"]
            command += ["--log-prefix", str(Path(folder, "log")), server.dsn()]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"pgbench failed: {done.stderr[-500:]}")
            (log,) = Path(folder).glob("log.*")
            lines = [line.split() for line in log.read_text().splitlines()]
        return [int(line[4]) + int(line[5]) / 1e6 for line in lines]

    def last(self) -> int:
        """The number of the last call."""
        query = sql.SQL("SELECT last_value - (NOT is_called)::int FROM {}")
        with psycopg.connect(self.bench.server.dsn()) as connection:
            row = connection.execute(query.format(sql.Identifier(self.sequence))).fetchone()
        assert row is not None
        return int(row[0])


def _turn(side: "_Own | _Live | _Peer", work: str, calls: _Calls, seconds: int, rate: int) -> Round:
    with side.running():
        first = calls.last() + 1
        busy, cpu, began = load(), tree_cpu_seconds(os.getpid()), time.monotonic()
        commits = calls.run(seconds, rate)
        wall, cpu = time.monotonic() - began, tree_cpu_seconds(os.getpid()) - cpu
    events = side.events()
    waited = sorted(readable(commits, first, events))
    p50, p99 = statistics.median(waited), waited[int(len(waited) * 0.99)]
    more = {"p50": p50, "p99": p99, "steps": float(len(events))}
    return Round(side.name, work, len(commits) * calls.rows, wall, cpu, None, busy, more)


def readable(commits: Sequence[float], first: int, events: Sequence[Event]) -> list[float]:
    """For each commit, the seconds until the first event that has it. The commits are those of the calls from `first` on."""
    ends = [end for _, end in events]
    return [events[bisect_left(ends, call)][0] - when for call, when in enumerate(commits, first)]


def _same_call(snapshot: Snapshot, whole: bool) -> int:
    """The call at which this snapshot of the ten tables ends. Raises `ValueError` if they end at different ones."""
    ends = set(_ends(snapshot, TABLES if whole else TABLES[:1]))
    if len(ends) > 1:
        raise ValueError(f"version {snapshot.epoch}: the tables end at {sorted(ends)}")
    return ends.pop()


def _in_turn(snapshot: Snapshot, whole: bool) -> int:
    """A call that this snapshot of a hundred tables has; at most a hundred more follow. Raises `ValueError` if it lacks one before its last."""
    ends = _ends(snapshot, MANY if whole else MANY[:1])
    last = max(ends)
    for number, end in enumerate(ends):
        if end != max(last - (last - number) % len(MANY), 0):
            raise ValueError(f"version {snapshot.epoch} has call {last}; m{number} ends at {end}")
    return last


def _ends(snapshot: Snapshot, tables: Sequence[str]) -> list[int]:
    """The calls at which these tables of a snapshot end."""
    frames = [
        snapshot[f"public.{table}"].selectExpr(f"{number}", "max(n)")
        for number, table in enumerate(tables)
    ]
    rows = sorted(tuple(row) for row in reduce(DataFrame.unionAll, frames).collect())
    return [int(end) for _, end in rows]


def _unequal(lake: Lake, peer: _Peer) -> list[str]:
    """The tables in which the two have different rows."""
    own = lake.sums(TABLES)
    other = sums_of(peer.frames())
    return [
        f"{one[0]} has {one[1:]} and {two[1:]}"
        for one, two in zip(own, other, strict=True)
        if one != two
    ]
