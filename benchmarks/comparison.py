"""`comparison`: the sums by which `verify` and `reattach` compare a table, of the source and of the lake.

Two tables: one that is divided by ranges of its numeric key, and one whose key is a text, which is divided by a hash. The source computes
its sums over one connection, without rests; Spark computes those of the lake's snapshot. CPU seconds of PostgreSQL, and of Spark with
its Python workers. Equal means: the same number of rows and the same sums of each chunk.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import workload
from benchmarks.lakes import Bench, Lake, bench
from benchmarks.processes import tree_cpu_seconds
from benchmarks.report import Report, Round, load
from spark_consumers import read
from spark_consumers.lake.comparison.chunks import Chunks
from spark_consumers.lake.comparison.lake import Division, sums_of
from spark_consumers.lake.comparison.source import Load, SourceRows
from spark_consumers.lake.comparison.sums import Sums, added
from spark_consumers.lake.equality.run import CHUNK_BYTES
from spark_consumers.snapshot.exported import ExportedSnapshot
from tests.support.capture_stack import STREAM
from walsender_bridge.demo.local_server import LocalServer

NAME = "comparison"
#: Rows of pgbench_accounts in one unit of pgbench's scale.
_UNIT = 100_000
_CASES = (("ranges", "pgbench_accounts"), ("hash", "events"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--postgres", type=int, help="the server's major (the newest here)")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Both tables, one after the other."""
    report = Report(NAME)
    units = max(int(options.rows * options.scale) // _UNIT, 1)

    def fill(server: LocalServer) -> None:
        say(f"writing {units * _UNIT} rows")
        workload.pgbench(server, "-i", "-q", "-s", str(units))
        workload.execute(server, "benchmark/keyless")

    with bench(memory="3g", major=options.postgres, fill=fill) as running:
        for case, name in _CASES:
            lake = Lake(running, f"lake_{name}", running.publish(f"only_{name}", [name]))
            try:
                lake.copy()
                compared = _Compared(running, lake, f"only_{name}", f"{STREAM}.public.{name}")
                for number in range(-1, options.rounds):
                    for turn in (compared.source(case), compared.lake(case)):
                        say(f"{case} {number + 1} {turn.side}: {turn.rows / turn.wall:,.0f} rows/s")
                        # The first round is a warm-up.
                        if number >= 0:
                            report.add(turn)
            finally:
                lake.close()
            for side in ("source", "lake"):
                for figure in ("rows_s", "rows_cpu_s"):
                    report.median(side, case, figure)
    return report


@dataclass
class _Compared:
    """One table on both sides, neither of which changes."""

    running: Bench
    of_lake: Lake
    publication: str
    name: str
    #: As the first round has divided it: samples differ.
    chunks: Chunks | None = None

    def source(self, case: str) -> Round:
        """The source's sums."""
        busy, server = load(), self.running.server.pid
        with ExportedSnapshot(self.running.server.dsn()) as exported:
            there = next(
                t
                for t in exported.tables(self.publication)
                if f"{STREAM}.{t.full_name}" == self.name
            )
            limits = Load(1.0, 3600)
            with SourceRows(exported, time.monotonic(), limits, lambda: None) as rows:
                chunks = self.chunks = self.chunks or rows.divided(there, CHUNK_BYTES)
                relations = [(r.schema, r.name, r.oid) for r in rows.relations(there)]
                cpu, began = tree_cpu_seconds(server), time.monotonic()
                found: dict[int, Sums] = {}
                if chunks.column:
                    for number in range(chunks.count):
                        for part in chunks.ranges(number, relations):
                            its = added(rows.sums(there, chunks, None, part))
                            found[number] = found.get(number, Sums()).plus(its.get(0, Sums()))
                else:
                    parts = rows.blocks(there, CHUNK_BYTES)
                    sums = (rows.sums(there, chunks, None, part) for part in parts)
                    found = added(each for some in sums for each in some)
                wall, cpu = time.monotonic() - began, tree_cpu_seconds(server) - cpu
        return self._round("source", case, found, wall, cpu, busy)

    def lake(self, case: str) -> Round:
        """The lake's sums, of the same chunks."""
        snapshot = read(self.running.spark, self.of_lake.root)
        table = snapshot.manifest.tables[self.name]
        names = [name for name, *_ in table.layout]
        assert self.chunks is not None
        division = Division.of(table, self.chunks, range(self.chunks.count))
        busy, cpu, began = load(), self._own_cpu(), time.monotonic()
        found = sums_of(snapshot[self.name].select(*names), division)
        return self._round(
            "lake", case, found, time.monotonic() - began, self._own_cpu() - cpu, busy
        )

    def _own_cpu(self) -> float:
        """Of Spark and its workers. The server is a child of this process, too."""
        return tree_cpu_seconds(os.getpid()) - tree_cpu_seconds(self.running.server.pid)

    def _round(
        self, side: str, case: str, found: dict[int, Sums], wall: float, cpu: float, busy: float
    ) -> Round:
        result: list[Any] = sorted(
            (n, s.rows, s.first, s.second) for n, s in found.items() if s.rows
        )
        rows = sum(each.rows for each in found.values())
        return Round(side, case, rows, wall, cpu, result, busy)
