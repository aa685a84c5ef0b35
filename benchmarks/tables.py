"""`tables`: what an epoch costs as tables and epochs become many, against few of them: changed tables must be all that counts.

One server with 1,000 tables, one log, and lakes over it that publish the same changes in turn. `few` follows 20 tables, `many`
all of them, and the same 20 change; then all 1,000 change. `young` and `old` follow one table, which had 100 and 10,000 epochs
before, a minute apart and retained for a day: these are made directly (`lakes.Lake.age`), with all that they leave. `plain` and `delta`
follow 100 tables, which all change; those of `delta` have Delta logs.

The lakes must have the same rows, and those of the server; so must Delta's reader, of every tenth table.
"""

import argparse
import os
from collections.abc import Callable, Sequence

from psycopg import sql

from benchmarks.lakes import Bench, Lake, bench
from benchmarks.processes import tree_cpu_seconds
from benchmarks.report import Report

NAME = "tables"
#: Changed tables of an epoch, and rows of each.
_CHANGED, _ROWS = 20, 50
#: 20 changed tables among many; all of them; a table with many epochs; Delta logs of so many tables.
_PARTS = ("some", "all", "old", "delta")
_DELTA = 100
#: Epochs of the young lake.
_YOUNG = 100


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--tables", type=int, default=1000, help="of the large lake")
    parser.add_argument("--epochs", type=int, default=10_000, help="of the old lake")
    parser.add_argument("--retained", type=int, default=1440, help="of these")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """All rounds: few tables, many tables, in turn."""
    report = Report(NAME)
    count = max(int(options.tables * options.scale), 2 * _CHANGED)
    names = [f"t{number:04}" for number in range(count)]
    with bench([_table(name) for name in names]) as running:
        if {"some", "all"} & set(options.parts):
            _many(report, running, names, options, say)
        if "old" in options.parts:
            _old(report, running, names[0], options, say)
        if "delta" in options.parts:
            _delta(report, running, names[:_DELTA], options.rounds, say)
    return report


def _table(name: str) -> sql.Composed:
    make = sql.SQL("CREATE TABLE {} (id bigint PRIMARY KEY, n int NOT NULL, v text)")
    return make.format(sql.Identifier(name))


def _many(
    report: Report,
    running: Bench,
    names: Sequence[str],
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> None:
    changed = names[:_CHANGED]
    lakes = [
        Lake(running, "few", running.publish("few", changed)),
        Lake(running, "many", running.publish("many", names)),
    ]
    for lake in lakes:
        lake.create()
        count = len(lake.head().tables)
        say(f"{lake.name}: {count} tables; taken over in {lake.take_over():.1f} s")
        # The first one shows the tables. From then on they are taken over when they are changed.
        lake.close()
        cpu, seconds = tree_cpu_seconds(os.getpid()), lake.take_over()
        report.ratios[f"takeover_{lake.name}_seconds"] = seconds
        report.ratios[f"takeover_{lake.name}_cpu_seconds"] = tree_cpu_seconds(os.getpid()) - cpu
        say(f"{lake.name}: taken over again in {seconds:.1f} s")
    running.execute(*(_fill(name) for name in changed))
    version = running.barrier()
    for lake in lakes:
        say(f"{lake.name}: first epoch in {lake.epoch(version, 'first').wall:.1f} s")
    if "some" in options.parts:
        _in_turn(report, running, lakes, changed, "20 changed", options.rounds, say)
        _ratios(report, "epoch_20_of_1000_vs_20_of_20", "many", "few", "20 changed")
    if "all" in options.parts:
        _all(report, running, lakes[1], names, options.rounds, say)
    for lake in lakes:
        lake.close()


def _all(
    report: Report,
    running: Bench,
    lake: Lake,
    names: Sequence[str],
    rounds: int,
    say: Callable[[str], None],
) -> None:
    """Change every table; once more at first, to have rows to change, which does not count."""
    running.execute(*(_fill(name) for name in names[_CHANGED:]))
    for number in range(rounds + 1):
        turn = lake.epoch(running.barrier(), "all changed")
        say(f"all changed: {turn.wall:.2f} s, CPU {turn.cpu:.2f} s, load {turn.load}")
        if number:
            report.add(turn)
        running.execute(_change(names, number))
    report.ratios["epoch_1000_of_1000_seconds"] = report.median(lake.name, "all changed", "wall")


def _old(
    report: Report,
    running: Bench,
    name: str,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> None:
    source = running.publish("one", [name])
    # Emptied, since the lakes' tables begin without a row.
    running.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(name)))
    lakes = [Lake(running, "young", source), Lake(running, "old", source)]
    for lake, epochs in zip(lakes, (_YOUNG, options.epochs), strict=True):
        lake.age(epochs, options.retained)
        say(f"{lake.name}: {epochs} epochs; taken over in {lake.take_over():.1f} s")
    running.execute(_fill(name))
    version = running.barrier()
    for lake in lakes:
        lake.epoch(version, "first")
    _in_turn(report, running, lakes, [name], "one changed", options.rounds, say)
    _ratios(report, "epoch_10000_vs_100", "old", "young", "one changed")
    for lake in lakes:
        lake.close()


def _delta(
    report: Report,
    running: Bench,
    names: Sequence[str],
    rounds: int,
    say: Callable[[str], None],
) -> None:
    """Change every table of two lakes, of which one has Delta logs; once more at first, to have rows to change."""
    source, work = running.publish("hundred", names), "all changed, with Delta logs"
    running.execute(*(sql.SQL("DELETE FROM {}").format(sql.Identifier(name)) for name in names))
    lakes = [Lake(running, "delta", source, delta=True), Lake(running, "plain", source)]
    for lake in lakes:
        lake.create()
        lake.take_over()
    running.execute(*(_fill(name) for name in names))
    version = running.barrier()
    for lake in lakes:
        lake.epoch(version, "first")
    _in_turn(report, running, lakes, names, work, rounds, say)
    # Delta's reader takes seconds for each.
    some = names[::10]
    if lakes[0].sums(some, format="delta") != lakes[1].sums(some):
        report.unequal.append(f"{work}: Delta reads different rows")
    _ratios(report, "epoch_with_delta_vs_without", "delta", "plain", work)
    for lake in lakes:
        lake.close()


def _in_turn(
    report: Report,
    running: Bench,
    lakes: Sequence[Lake],
    changed: Sequence[str],
    work: str,
    rounds: int,
    say: Callable[[str], None],
) -> None:
    """Change these tables and have each lake publish that, so many times; one more at first, which does not count."""
    for number in range(-1, rounds):
        running.execute(_change(changed, number))
        version = running.barrier()
        for lake in lakes if number % 2 else lakes[::-1]:
            turn = lake.epoch(version, work)
            say(
                f"{work}, {number + 1}/{rounds} {lake.name}: {turn.wall:.2f} s, CPU {turn.cpu:.2f} s, load {turn.load}"
            )
            if number >= 0:
                report.add(turn)
    found = [lake.sums(changed) for lake in lakes]
    if found[0] != found[1]:
        report.unequal.append(f"{work}: the lakes have different rows")


def _ratios(report: Report, key: str, own: str, peer: str, work: str) -> None:
    """Of wall and CPU seconds, and of the driver's own alone."""
    for name, suffix in (("wall", ""), ("cpu", "_cpu"), ("driver_cpu", "_driver_cpu")):
        report.ratio(
            f"{key}{suffix}", report.median(own, work, name), report.median(peer, work, name)
        )


def _fill(name: str) -> sql.Composed:
    fill = sql.SQL("INSERT INTO {} SELECT g, g, 'value ' || g FROM generate_series(1, {}) AS g")
    return fill.format(sql.Identifier(name), sql.Literal(_ROWS))


def _change(names: Sequence[str], number: int) -> sql.Composed:
    """Update half of the rows of each, in one transaction."""
    one = sql.SQL("UPDATE {} SET n = n + 1 WHERE id % 2 = {}")
    updates = [one.format(sql.Identifier(name), sql.Literal(number % 2)) for name in names]
    return sql.SQL("; ").join(updates)
