"""The demo's verification: the sums at every epoch, every table at the end, and a planted error that must be found.

It runs after the load, in a Spark session that shares nothing with the pipeline's.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # Spark's own convention

from spark_consumers import read
from spark_consumers.lake.manifest.chain import Manifest, open_chain
from spark_consumers.lake.reader import Snapshot
from walsender_bridge.demo.bank import ACCOUNTS, OPENING_BALANCE, SCHEMA, TABLES
from walsender_bridge.demo.compare import (
    TableDifference,
    TableShape,
    comparable,
    difference,
    postgres_rows,
    shape_of,
)


@dataclass(frozen=True, slots=True)
class Violation:
    """A sum that is wrong at an epoch."""

    epoch: int
    stream: str
    what: str


def published_epochs(lake: str) -> list[Manifest]:
    """One manifest for each epoch with tables, oldest first (a takeover repeats an epoch)."""
    first: dict[int, Manifest] = {}
    for manifest in open_chain(lake).links():
        if manifest.readable:
            first.setdefault(manifest.epoch, manifest)
    return list(first.values())


def check_epochs(
    spark: SparkSession, lake: str, epochs: Sequence[Manifest], streams: Sequence[str]
) -> list[Violation]:
    """Check the bank's three sums for each stream at each of `epochs`."""
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda manifest: _check_epoch(spark, lake, manifest, streams), epochs)
        return [violation for violations in found for violation in violations]


def _check_epoch(
    spark: SparkSession, lake: str, manifest: Manifest, streams: Sequence[str]
) -> list[Violation]:
    snapshot = read(spark, lake, epoch=manifest.epoch)
    violations = []
    for stream in streams:
        if any(f"{stream}.{SCHEMA}.{name}" not in manifest.readable for name in TABLES):
            # Before the load: this stream's tables are still being copied.
            continue
        accounts, transfers, audit = (
            snapshot[f"{stream}.{SCHEMA}.{name}"] for name in ("accounts", "transfers", "audit")
        )
        row = (
            accounts.agg(
                F.count("*").alias("accounts"),
                F.sum("balance").alias("balance"),
                F.sum("moves").alias("moves"),
            )
            .crossJoin(transfers.agg(F.count("*").alias("transfers")))
            .crossJoin(audit.agg(F.coalesce(F.sum("delta"), F.lit(0)).alias("delta")))
            .first()
        )
        violations += [
            Violation(manifest.epoch, stream, what)
            for what in broken_sums(row.asDict() if row else {})
        ]
    return violations


def broken_sums(figures: Mapping[str, Any]) -> list[str]:
    """The rules of the bank that these sums violate, as sentences."""
    broken = []
    if figures.get("accounts") != ACCOUNTS:
        broken.append(f"{figures.get('accounts')} accounts, not {ACCOUNTS}")
    opening = Decimal(ACCOUNTS * OPENING_BALANCE)
    if figures.get("balance") != opening:
        broken.append(f"balances sum to {figures.get('balance')}, not {opening}")
    if figures.get("moves") != 2 * figures.get("transfers", 0):
        broken.append(f"{figures.get('moves')} moves by {figures.get('transfers')} transfers")
    if figures.get("delta") != 0:
        broken.append(f"the audit trail sums to {figures.get('delta')}")
    return broken


def compare_all(snapshot: Snapshot, sources: Mapping[str, str]) -> list[TableDifference]:
    """Compare every table of every source (stream -> DSN) with the lake's snapshot."""
    found = []
    for stream, dsn in sources.items():
        with psycopg.connect(dsn) as connection:
            for name in TABLES:
                shape = shape_of(connection, f"{SCHEMA}.{name}")
                expected = postgres_rows(connection, shape)
                actual = lake_rows(snapshot[f"{stream}.{SCHEMA}.{name}"], shape)
                found.append(difference(shape, expected, actual))
    return found


def lake_rows(frame: DataFrame, shape: TableShape) -> Iterable[tuple[Any, ...]]:
    """The lake's rows as comparable tuples, in the order of PostgreSQL's columns."""
    columns = frame.select(*shape.columns).toArrow().columns
    return (
        comparable(row) for row in zip(*(column.to_pylist() for column in columns), strict=True)
    )


def planted_error_found(
    spark: SparkSession, snapshot: Snapshot, stream: str, dsn: str, directory: Path
) -> bool:
    """Whether the comparison finds a changed row, in a copy of a table with a key and of one without.

    The unchanged copies must compare equal first; otherwise a difference would prove nothing.
    """
    catalog = "planted"
    spark.conf.set(f"spark.sql.catalog.{catalog}", "org.apache.iceberg.spark.SparkCatalog")
    spark.conf.set(f"spark.sql.catalog.{catalog}.type", "hadoop")
    spark.conf.set(f"spark.sql.catalog.{catalog}.warehouse", str(directory))
    spark.conf.set(f"spark.sql.catalog.{catalog}.cache-enabled", "false")
    changes = {
        "accounts": "UPDATE {copy} SET balance = balance + 0.01 WHERE id = 1",
        "audit": "UPDATE {copy} SET delta = delta + 0.01"
        " WHERE transfer = (SELECT min(transfer) FROM {copy})",
    }
    with psycopg.connect(dsn) as connection:
        for name, change in changes.items():
            copy = f"{catalog}.copy.{name}"
            shape = shape_of(connection, f"{SCHEMA}.{name}")
            snapshot[f"{stream}.{SCHEMA}.{name}"].writeTo(copy).createOrReplace()
            verdicts = []
            for statement in (None, change):
                if statement:
                    spark.sql(statement.format(copy=copy))
                actual = lake_rows(spark.table(copy), shape)
                verdicts.append(difference(shape, postgres_rows(connection, shape), actual).equal)
            if verdicts != [True, False]:
                return False
    return True


def freshness(
    epochs: Sequence[Manifest], commits: Mapping[str, Sequence[tuple[float, int]]]
) -> np.ndarray:
    """When each commit returned, and the seconds from then to the first epoch that has it: two columns.

    `commits` maps a stream to (seconds since the Unix epoch, an LSN at or past the commit's end). The LSN
    is read after COMMIT, so the figure is never too small.
    """
    delays = [np.empty((0, 2))]
    published = np.array([manifest.published_at for manifest in epochs])
    for stream, pairs in commits.items():
        if not pairs or not epochs:
            continue
        ends = np.array([manifest.streams[stream].lsn for manifest in epochs], dtype=np.uint64)
        times = np.array([time for time, _ in pairs])
        lsns = np.array([lsn for _, lsn in pairs], dtype=np.uint64)
        epoch = np.searchsorted(ends, lsns)
        known = epoch < len(epochs)
        waited = published[epoch[known]] - times[known]
        delays.append(np.column_stack((times[known], waited)))
    return np.concatenate(delays)
