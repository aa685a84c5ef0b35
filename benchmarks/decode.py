"""`decode`: entries of the log to Arrow columns, against the straightforward decoder in Python.

Both decode the same entries, which a real server's changes were captured into, in this process. Rows per
CPU second of the process, with Arrow held to one thread. Before a ratio is reported, every value of the two is
compared.
"""

import argparse
import gc
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks import capture, log_reader, workload
from benchmarks.report import Report, Round, load
from benchmarks.workload import SLOT, STREAM, Workload
from spark_consumers.decode.entries import ChangeBatch, decode_entries
from tests.support.plain_decoder import Change, PlainDecoder
from tests.support.stack import Stack
from walsender_bridge.change_log.client import LogEntry

NAME = "decode"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--transactions", type=int, default=100_000, help="of TPC-B")
    parser.add_argument("--wide-rows", type=int, default=300_000)
    parser.add_argument("--postgres", type=int, help="the server's major (the newest here)")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Both loads, one after the other."""
    report = Report(NAME, [{"name": "plain Python decoder", "version": "tests/support"}])
    transactions = max(int(options.transactions * options.scale), 1)
    rows = max(int(options.wide_rows * options.scale), 1)
    threads = pa.cpu_count()
    pa.set_cpu_count(1)
    try:
        for make in (
            partial(workload.tpcb, transactions, major=options.postgres),
            partial(workload.wide, rows, major=options.postgres),
        ):
            with make() as work:
                say(f"{work.name}: capturing the load")
                entries, schemas = _captured(work)
            _rounds(report, work.name, entries, schemas, options.rounds, say)
    finally:
        pa.set_cpu_count(threads)
    return report


def _captured(work: Workload) -> tuple[list[LogEntry], dict[bytes, bytes]]:
    """The load as entries of a log, and the schemas that they name."""
    with (
        tempfile.TemporaryDirectory(prefix="tuskline-bench-") as folder,
        Stack(Path(folder), {STREAM: work.dsn}) as stack,
        work.slot(SLOT),
    ):
        capture.start(stack)
        capture.wait_committed(stack, work)
        entries = [
            LogEntry(e.offset, e.version, e.global_offset, bytes(e.data))
            for e in log_reader.entries(stack.log_address, STREAM)
        ]
        schemas = log_reader.schemas(stack.log_address, STREAM)
        stack.stop("bridge")
    return entries, schemas


def _rounds(
    report: Report,
    work: str,
    entries: list[LogEntry],
    schemas: dict[bytes, bytes],
    rounds: int,
    say: Callable[[str], None],
) -> None:
    def own() -> list[ChangeBatch]:
        return list(decode_entries(entries, schemas.__getitem__))

    def plain() -> list[Change]:
        return PlainDecoder(schemas.__getitem__).decode(entries)

    difference = differs(own(), plain())
    if difference is not None:
        report.unequal.append(f"{work}: {difference}")
    for number in range(rounds):
        for side, decode in (("own", own), ("plain", plain)):
            turn = _turn(side, work, decode)
            report.add(turn)
            say(
                f"{work} {number + 1}/{rounds} {side}: {turn.rows / turn.cpu:,.0f} rows/CPU s, load {turn.load}"
            )
    own_rate, plain_rate = (report.median(s, work, "rows_cpu_s") for s in ("own", "plain"))
    report.ratios[f"{work}_rows_per_cpu_s"] = round(own_rate)
    report.ratio(f"vs_plain_{work}", own_rate, plain_rate)


def _turn(side: str, work: str, decode: Callable[[], Any]) -> Round:
    """Decode the whole load repeatedly for a second: one side takes a tenth of that.

    What the other side left is gone before: a million objects of it would be walked by each collection of garbage.
    """
    gc.collect()
    busy, wall, cpu = load(), 0.0, 0.0
    rows = 0
    counts: dict[str, int] = {}
    while wall < 1.0:
        began, spent = time.monotonic(), time.process_time()
        found = decode()
        wall, cpu = wall + time.monotonic() - began, cpu + time.process_time() - spent
        counts = _counts(found)
        rows += sum(counts.values())
        del found
    return Round(side, work, rows, wall, cpu, counts, busy)


def _counts(found: list[ChangeBatch] | list[Change]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for each in found:
        if isinstance(each, Change):
            counts[each.relation] += 1
        else:
            counts[each.relation.full_name] += len(each)
    return dict(sorted(counts.items()))


def differs(batches: list[ChangeBatch], changes: list[Change]) -> str | None:
    """The first relation and column in which the two differ, value by value; None if they do not."""

    def name(change: Change) -> str:
        return change.relation

    plain = {key: list(group) for key, group in groupby(sorted(changes, key=name), name)}
    own: dict[str, list[ChangeBatch]] = {}
    for batch in batches:
        own.setdefault(batch.relation.full_name, []).append(batch)
    if plain.keys() != own.keys():
        return f"tables {sorted(own)}, where the plain decoder has {sorted(plain)}"
    for relation, parts in own.items():
        rows = plain[relation]
        ops = [chr(op) for part in parts for op in part.ops]
        if ops != [row.op for row in rows]:
            return f"{relation}: the operations differ"
        if [int(x) for part in parts for x in part.xid] != [row.xid for row in rows]:
            return f"{relation}: the transactions differ"
        for i, column in enumerate(parts[0].relation.columns):
            values = [value for part in parts for value in part.columns[i].to_pylist()]
            if values != [None if row.new is None else row.new[i] for row in rows]:
                return f"{relation}.{column.name}: the values differ"
    return None
