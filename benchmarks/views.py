"""`views`: what an epoch costs with views over a table of ten million rows, against a hundred thousand, and against computing them again.

One server, one log, and three lakes: `small` and `large` keep the same three views over tables of different sizes, `bare` keeps none
over the large one. In each round the same number of rows changes in both tables. `job` is what is written by hand without views: three queries
over the lake's tables, whose results are stored as Parquet.

A view must have the rows that the job has.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import psycopg
from psycopg import sql

from benchmarks.lakes import Bench, Lake, bench, sums_of
from benchmarks.processes import tree_cpu_seconds
from benchmarks.report import Report, Round, load
from spark_consumers import read
from spark_consumers.lake.views.definition import ViewDefinition
from walsender_bridge.demo.local_server import LocalServer

NAME = "views"
_CUSTOMERS, _REGIONS = 10_000, 100
_QUERIES = {
    "regions": """SELECT region, count(*) AS orders, sum(amount) AS amount, avg(quantity) AS quantity
      FROM {orders} GROUP BY region""",
    "large_orders": "SELECT id, customer, amount FROM {orders} WHERE amount > 995",
    "named": """SELECT o.id, c.name, o.quantity FROM {orders} o JOIN customers c ON o.customer = c.id
      WHERE o.quantity = 1 AND c.id % 10 = 0""",
}
_WORK = "views"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the large table")
    parser.add_argument("--small-rows", type=int, default=100_000, help="of the small one")
    parser.add_argument("--changes", type=int, default=1000, help="rows of an epoch")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """All rounds: the three lakes and the job, in turn."""
    report = Report(NAME)
    sizes = {
        f"orders_{name}": max(int(rows * options.scale), 2 * options.changes)
        for name, rows in (("small", options.small_rows), ("large", options.rows))
    }
    with bench(memory="4g", fill=partial(_fill, sizes=sizes)) as running:
        lakes = [_lake(running, name, name) for name in ("small", "large")]
        lakes.append(_lake(running, "bare", "large", with_views=False))
        for lake in lakes:
            say(f"{lake.name}: copied in {lake.copy(2):.1f} s")
        # The first change makes the row index of tables and views.
        for number in range(-1, options.rounds):
            running.execute(
                *(_change(name, rows, number, options.changes) for name, rows in sizes.items())
            )
            version = running.barrier()
            turns = [
                *(partial(lake.epoch, version, _WORK) for lake in lakes),
                partial(_job, running, lakes[1]),
            ]
            for turn in turns if number % 2 else turns[::-1]:
                _keep(report, turn(), number, options.rounds, say)
            _compare(report, running, lakes[1])
        for lake in lakes:
            lake.close()
    _ratios(report)
    return report


def _keep(
    report: Report, turn: Round, number: int, rounds: int, say: Callable[[str], None]
) -> None:
    say(
        f"{number + 1}/{rounds} {turn.side}: {turn.wall:.2f} s, CPU {turn.cpu:.2f} s, load {turn.load}"
    )
    if number >= 0:
        report.add(turn)


def _ratios(report: Report) -> None:
    for figure, suffix in (("wall", ""), ("cpu", "_cpu")):
        sides = ("small", "large", "bare", "job")
        small, large, bare, job = (report.median(side, _WORK, figure) for side in sides)
        report.ratio(f"epoch_large_vs_small{suffix}", large, small)
        report.ratio(f"epoch_with_views_vs_without{suffix}", large, bare)
        # What the views add to an epoch, against the job, which has no epoch.
        report.ratio(f"views_vs_job{suffix}", large - bare, job)


def _lake(running: Bench, name: str, size: str, *, with_views: bool = True) -> Lake:
    orders = f"orders_{size}"
    views = [
        ViewDefinition(f"views.{each}", query.format(orders=orders))
        for each, query in _QUERIES.items()
    ]
    source = running.publish(name, ["customers", orders])
    return Lake(running, name, source, views=views if with_views else ())


def _job(running: Bench, lake: Lake) -> Round:
    """The views' queries by hand, over the tables of the lake's newest epoch."""
    busy, cpu, began = load(), tree_cpu_seconds(os.getpid()), time.monotonic()
    found = read(running.spark, lake.root)
    for table in ("customers", "orders_large"):
        found[f"public.{table}"].createOrReplaceTempView(table)
    for name, query in _QUERIES.items():
        frame = running.spark.sql(query.format(orders="orders_large"))
        frame.write.mode("overwrite").parquet(_stored(running, name))
    wall, cpu = time.monotonic() - began, tree_cpu_seconds(os.getpid()) - cpu
    return Round("job", _WORK, 0, wall, cpu, None, busy)


def _stored(running: Bench, name: str) -> str:
    return str(running.folder / "job" / name)


def _compare(report: Report, running: Bench, lake: Lake) -> None:
    """The views of the lake, and what the job makes of the same epoch."""
    _job(running, lake)
    found = read(running.spark, lake.root)
    for name in _QUERIES:
        stored = running.spark.read.parquet(_stored(running, name))
        # PostgreSQL's averages are numeric, Spark's have another scale.
        types = dict(stored.dtypes)
        kept = found[f"views.{name}"].selectExpr(
            *(f"cast({c} AS {types[c]}) AS {c}" for c in types)
        )
        if sums_of({name: kept}) != sums_of({name: stored}):
            report.unequal.append(f"{name}: the view has other rows than its query")


def _fill(server: LocalServer, sizes: dict[str, int]) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE customers (id int PRIMARY KEY, name text NOT NULL)")
        connection.execute(
            "INSERT INTO customers SELECT g, 'customer ' || g FROM generate_series(0, %s) AS g",
            [_CUSTOMERS - 1],
        )
        for name, rows in sizes.items():
            table = sql.Identifier(name)
            connection.execute(
                sql.SQL(
                    "CREATE TABLE {} (id bigint PRIMARY KEY, customer int NOT NULL, region int NOT NULL,"
                    " amount numeric(12, 2) NOT NULL, quantity int NOT NULL)"
                ).format(table)
            )
            connection.execute(
                sql.SQL(
                    "INSERT INTO {} SELECT g, g * 7919 % {}, g * 31 % {}, (g * 613 % 100000) / 100.0, g % 50"
                    " FROM generate_series(1, {}::bigint) AS g"
                ).format(table, _CUSTOMERS, _REGIONS, rows)
            )
        connection.execute("VACUUM ANALYZE")


def _change(name: str, rows: int, number: int, changes: int) -> sql.Composed:
    """Update so many rows in one transaction, others in each round, all over the table."""
    step = rows // changes
    change = sql.SQL(
        "UPDATE {} SET amount = amount + 1, quantity = quantity + 1 WHERE id = ANY ({})"
    )
    keys = [each * step + (number + 1) % step + 1 for each in range(changes)]
    return change.format(sql.Identifier(name), sql.Literal(keys))
