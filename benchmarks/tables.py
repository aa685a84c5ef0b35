"""`tables`: what an epoch costs as tables and epochs become many, against few of them: changed tables must be all that counts.

One server with 1,000 tables, one log, and two lakes over it: `few` follows 20 tables, `many` all of them. In turn, the same 20
tables change, and each lake publishes its epoch. Then all 1,000 change.
"""

import argparse
from collections.abc import Callable, Sequence

from psycopg import sql

from benchmarks.lakes import Bench, Lake, bench
from benchmarks.report import Report

NAME = "tables"
#: Changed tables of an epoch, and rows of each.
_CHANGED, _ROWS = 20, 50


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--tables", type=int, default=1000, help="of the large lake")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """All rounds: few tables, many tables, in turn."""
    report = Report(NAME)
    count = max(int(options.tables * options.scale), 2 * _CHANGED)
    names = [f"t{number:04}" for number in range(count)]
    with bench([_table(name) for name in names]) as running:
        _many(report, running, names, options.rounds, say)
    return report


def _table(name: str) -> sql.Composed:
    make = sql.SQL("CREATE TABLE {} (id bigint PRIMARY KEY, n int NOT NULL, v text)")
    return make.format(sql.Identifier(name))


def _many(
    report: Report, running: Bench, names: Sequence[str], rounds: int, say: Callable[[str], None]
) -> None:
    changed = names[: min(_CHANGED, len(names))]
    lakes = [
        Lake(running, "few", running.publish("few", changed)),
        Lake(running, "many", running.publish("many", names)),
    ]
    for lake in lakes:
        lake.create()
        say(
            f"{lake.name}: {len(lake.head().tables)} tables; taken over in {lake.take_over():.1f} s"
        )
    # Rows to change, and a warm-up: the whole of it does not count.
    running.execute(*(_fill(name) for name in names))
    version = running.barrier()
    for lake in lakes:
        say(f"{lake.name}: first epoch in {lake.epoch(version, 'first').wall:.1f} s")
    for number in range(-1, rounds):
        running.execute(_change(changed, number))
        version = running.barrier()
        for lake in lakes if number % 2 else lakes[::-1]:
            turn = lake.epoch(version, "20 changed")
            say(
                f"{number + 1}/{rounds} {lake.name}: {turn.wall:.2f} s, CPU {turn.cpu:.2f} s, load {turn.load}"
            )
            if number >= 0:
                report.add(turn)
    found = [lake.sums(changed) for lake in lakes]
    if found[0] != found[1]:
        report.unequal.append("the two lakes have other rows")
    for number in range(rounds):
        running.execute(_change(names, number))
        version = running.barrier()
        turn = lakes[1].epoch(version, "all changed")
        say(f"all changed: {turn.wall:.2f} s, CPU {turn.cpu:.2f} s, load {turn.load}")
        report.add(turn)
    few, many = (report.median(side, "20 changed", "wall") for side in ("few", "many"))
    report.ratio("epoch_20_of_1000_vs_20_of_20", many, few)
    few, many = (report.median(side, "20 changed", "cpu") for side in ("few", "many"))
    report.ratio("epoch_20_of_1000_vs_20_of_20_cpu", many, few)
    report.ratios["epoch_1000_of_1000_seconds"] = report.median("many", "all changed", "wall")
    for lake in lakes:
        lake.close()


def _fill(name: str) -> sql.Composed:
    fill = sql.SQL("INSERT INTO {} SELECT g, g, 'value ' || g FROM generate_series(1, {}) AS g")
    return fill.format(sql.Identifier(name), sql.Literal(_ROWS))


def _change(names: Sequence[str], number: int) -> sql.Composed:
    """Update half of the rows of each, in one transaction."""
    one = sql.SQL("UPDATE {} SET n = n + 1 WHERE id % 2 = {}")
    updates = [one.format(sql.Identifier(name), sql.Literal(number % 2)) for name in names]
    return sql.SQL("; ").join(updates)
