"""Lakes to measure: one server, its log, and lakes of some of its tables, which are made without a copy.

Only the beginning is short-cut: each table is an empty Iceberg table, as a copy of the empty table would have made it, and one
link names them all. From the takeover on everything is what a user runs: capture, log server, the pipeline, its epochs.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark.sql import SparkSession

from benchmarks import workload
from benchmarks.processes import tree_cpu_seconds
from benchmarks.report import Round, load
from spark_consumers import Lakehouse, Source, read
from spark_consumers.decode.types import arrow_schema, text_columns
from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.concurrently import each
from spark_consumers.lake.copy.bootstrap import usable_key
from spark_consumers.lake.epoch.log_view import first_link
from spark_consumers.lake.format.data_files import Stage, write_data
from spark_consumers.lake.format.iceberg import IcebergFormat
from spark_consumers.lake.format.iceberg_refs import VERSION, branch_of
from spark_consumers.lake.format.table_format import ROW_ID, TableWrite
from spark_consumers.lake.manifest.chain import Chain, Manifest, TableVersion, open_chain
from spark_consumers.lake.tables.new_folder import new_folder
from spark_consumers.lake.tables.schema_change import schema_hash
from spark_consumers.lake.tables.sources import shapes
from spark_consumers.snapshot.exported import ExportedSnapshot, PublishedTable
from spark_consumers.spark.jars import paths
from spark_consumers.spark.session import session
from tests.support.capture_stack import STREAM, CaptureProcess, ChangeLog
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient, LogStatus
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.runtime.sql import load as statement

#: What creates an empty table in a lake: as the copier, version 0 of term 1.
_TERM, _VERSION = 1, 0
#: The key of a row that no client has.
_NO_KEY = -1
#: Seconds between two epochs, by default.
_EVERY = 60.0


@dataclass
class Bench:
    """A server with tables, captured into a log, and a Spark session."""

    server: LocalServer
    log: ChangeLog
    spark: SparkSession
    folder: Path

    def execute(self, *statements: sql.Composed) -> None:
        """Run statements, each in a transaction of its own."""
        with psycopg.connect(self.server.dsn(), autocommit=True) as connection:
            for one in statements:
                connection.execute(one)

    def publish(self, publication: str, tables: Sequence[str]) -> Source:
        """A publication of these tables (of `public`), as a lake's source."""
        names = sql.SQL(", ").join(sql.Identifier("public", name) for name in tables)
        make = sql.SQL("CREATE PUBLICATION {} FOR TABLE tuskline.flush, {}")
        self.execute(make.format(sql.Identifier(publication), names))
        return Source(STREAM, self.server.dsn(), publication)

    def barrier(self) -> int:
        """The version by which the log has everything that was committed before."""
        with psycopg.connect(self.server.dsn(), autocommit=True) as connection:
            row = connection.execute(statement("flush/position").encode()).fetchone()
            assert row is not None
            connection.execute(statement("flush/write").encode())
        with LogClient(self.log.address) as log:
            return log.barrier({STREAM: row[0]}, timeout=120)

    def status(self) -> LogStatus:
        """The log's."""
        with LogClient(self.log.address) as log:
            return log.status()


@contextmanager
def bench(
    tables: Sequence[sql.Composed] = (),
    *,
    memory: str = "2g",
    major: int | None = None,
    jars: Sequence[str] = (),
    fill: Callable[[LocalServer], None] | None = None,
) -> Iterator[Bench]:
    """A new server on which these statements have run, or that was filled, its tables in `public` captured.

    `jars`: of the session, besides its own.
    """
    with (
        workload.server(major) as server,
        tempfile.TemporaryDirectory(prefix="tuskline-bench-") as name,
    ):
        folder = Path(name)
        conf = {"spark.driver.memory": memory, "spark.log.level": "ERROR"}
        if jars:
            conf["spark.jars"] = ",".join([*map(str, paths()), *jars])
        if fill is not None:
            fill(server)
        spark = session("benchmark", lake=folder / "unused", conf=conf)
        try:
            log = ChangeLog(folder)
            running = Bench(server, log, spark, folder)
            running.execute(*tables)
            capture = CaptureProcess(folder, log, server.dsn(), "public.*")
            with log, capture:
                wait_for(capture.streams, 120, "capture streams")
                yield running
        finally:
            spark.stop()


class Lake:
    """One lake of the bench, driven an epoch at a time."""

    def __init__(self, bench: Bench, name: str, source: Source, **options: Any) -> None:
        self._bench, self.name, self._source = bench, name, source
        self._options = options
        self.root = bench.folder / name
        self.chain: Chain = open_chain(self.root)
        self._house: Lakehouse | None = None

    def create(self) -> None:
        """Make its tables, and the link that names them."""
        self.chain.publish(self._tables(), None)

    def _tables(self) -> Manifest:
        """Make its tables; the first link."""
        bench = self._bench
        bench.barrier()
        status = bench.status()
        lake = self.chain.initialise(status.log_id, IcebergFormat.name)
        tables = IcebergFormat(bench.spark, lake, FolderCatalog(self.root))
        made = first_link(lake, status, time.time())
        cut = status.streams[STREAM]
        with ExportedSnapshot(self._source.dsn) as snapshot:
            published = {
                t.full_name: t
                for t in snapshot.tables(self._source.publication)
                if t.schema == "public"
            }
            with psycopg.connect(self._source.dsn, autocommit=True) as connection:
                found = shapes(connection, self._source.publication)

            def create(name: str, table: PublishedTable) -> TableVersion:
                path = new_folder(STREAM, table.schema, table.name, _TERM)
                folder, columns = str(self.root / path), arrow_schema(table.columns)
                key = usable_key(table)
                layout = columns if key else columns.append(pa.field(ROW_ID, pa.string()))
                tables.create(folder, layout)
                written = tables.write(folder, _TERM, TableWrite(_VERSION, None, "", count=0))
                return TableVersion(
                    path=path,
                    format=IcebergFormat.name,
                    snapshot_id=written.snapshot,
                    schema_hash=schema_hash(columns, key),
                    key=key,
                    text_columns=tuple(text_columns(table.columns)),
                    start_lsn=snapshot.lsn,
                    offset=cut.end_offset,
                    rows=0,
                    relation_id=table.oid,
                    layout=tuple((c.name, c.type_oid, c.typmod) for c in table.columns),
                    system_id=snapshot.system_id,
                    timeline=snapshot.timeline,
                    shape=found.shapes[name].dump(),
                    runs=(),
                )

            versions = each(published.items(), create)
        names = [f"{STREAM}.{name}" for name in published]
        return replace(made, tables=dict(zip(names, versions, strict=True)))

    def age(self, epochs: int, retained: int) -> None:
        """Make its one table and its chain what so many epochs leave, of which the last `retained` have not expired.

        Real snapshots, with the manifests that these make, and real links, but neither the log nor Spark has a part in them.
        In each, a data file of one row takes the place of the one before.
        """
        bench, first = self._bench, self._tables()
        ((name, table),) = first.tables.items()
        tables = IcebergFormat(bench.spark, first.lake, FolderCatalog(self.root))
        folder = str(self.root / table.path)
        kept = min(epochs, retained)
        with LogClient(bench.log.address) as log:
            log.raise_version(first.epoch + epochs)
        numbers = range(epochs - kept + 1, epochs + 1)
        stages = [Stage(number + 1, _TERM, 1) for number in numbers]
        snapshots = _snapshots(bench.spark, tables, folder, stages)
        head = None
        for number, stage, snapshot in zip(numbers, map(str, stages), snapshots, strict=True):
            made = replace(
                first,
                link=number + 1,
                epoch=first.epoch + number,
                previous_epoch=first.epoch + number - 1,
                steady_at=first.steady_at - (epochs - number) * _EVERY,
                stage=stage,
                tables={name: replace(table, snapshot_id=snapshot, rows=1, stage=stage)},
            )
            self.chain.publish(made, head)
            head = made
        tables.forget(folder)

    @property
    def house(self) -> Lakehouse:
        """Its pipeline; the first round takes the lake over."""
        if self._house is None:
            self._house = Lakehouse(
                self._bench.spark,
                self.root,
                self._bench.log.address,
                [self._source],
                catalog=f"catalog_{self.name}",
                epoch_interval=1e6,
                **self._options,
            )
        return self._house

    def take_over(self) -> float:
        """Seconds that the takeover takes."""
        began = time.monotonic()
        self.house.run_once()
        return time.monotonic() - began

    def copy(self, tables: int = 1) -> float:
        """Have the pipeline copy so many tables, which are all that the source has; seconds."""
        began = time.monotonic()
        while (head := self.chain.head()) is None or len(head.tables) < tables:
            self._bench.barrier()
            self.house.run_once(force=True)
            time.sleep(0.2)
        return time.monotonic() - began

    def head(self) -> Manifest:
        """The newest link."""
        found = self.chain.head()
        assert found is not None
        return found

    def epoch(self, version: int, work: str) -> Round:
        """Publish everything up to this version of the log, which is there. `driver_cpu`: seconds of this process alone."""
        busy, before, own = load(), self.head().epoch, time.process_time()
        cpu, began = tree_cpu_seconds(os.getpid()), time.monotonic()
        changes = 0
        while before < version:
            made = self.house.run_once(force=True)
            if made is not None:
                before, changes = made.epoch, changes + made.changes
        wall, cpu = time.monotonic() - began, tree_cpu_seconds(os.getpid()) - cpu
        more = {"driver_cpu": time.process_time() - own}
        return Round(self.name, work, changes, wall, cpu, None, busy, more)

    def sums(self, tables: Sequence[str], **options: Any) -> list[Any]:
        """`sums_of` these tables, as readers see them who read with these options."""
        found = read(self._bench.spark, self.root, **options)
        return sums_of({name: found[f"public.{name}"] for name in tables})

    def close(self) -> None:
        """End its pipeline."""
        if self._house is not None:
            self._house.close()
            self._house = None


def _snapshots(
    spark: SparkSession, tables: IcebergFormat, folder: str, stages: Sequence[Stage]
) -> list[int]:
    """Commit a snapshot of each stage to the table in this folder, all at once; their ids."""
    jvm: Any = spark._jvm  # noqa: SLF001  # PySpark has no public way to its JVM
    iceberg, branch = jvm.org.apache.iceberg, branch_of(_TERM)
    schema = tables.schemas(folder)[1]
    data = f"{folder}/data/{stages[0]}.parquet"
    row = [pa.array([_NO_KEY if not i else None], field.type) for i, field in enumerate(schema)]
    written = write_data(data, row, schema)
    assert written is not None
    made: list[int] = []

    def file(number: int) -> Any:
        path = Path(folder, "data", f"{stages[number]}.parquet")
        if not path.exists():
            path.hardlink_to(data)
        unpartitioned = iceberg.PartitionSpec.unpartitioned()
        return (
            iceberg.DataFiles.builder(unpartitioned)
            .withPath(str(path))
            .withFormat("parquet")
            .withFileSizeInBytes(written.size)
            .withRecordCount(written.rows)
            .build()
        )

    def change(table: Any) -> Any:
        transaction = table.newTransaction()
        for number, stage in enumerate(stages):
            update = transaction.newRowDelta()
            update.addRows(file(number))
            if number:
                update.removeRows(file(number - 1))
            update.set(VERSION, str(number))
            update.set("tuskline.stage", str(stage))
            update.toBranch(branch)
            update.commit()
            made.append(transaction.currentMetadata().ref(branch).snapshotId())
        return transaction.currentMetadata()

    tables._commit(folder, _TERM, change)  # noqa: SLF001  # as its own writes do
    return made


def sums(frame: Any) -> list[str]:
    """Count, and a sum of hashes over all columns, of a DataFrame."""
    count, total = frame.selectExpr("count(*)", _hashed(frame)).first()
    return [str(count), str(total)]


def sums_of(tables: Mapping[str, Any]) -> list[Any]:
    """Name, count and a sum of hashes over all columns of each table, in one query."""
    frames = [
        frame.selectExpr(f"'{name}' AS name", "count(*)", _hashed(frame))
        for name, frame in tables.items()
    ]
    return sorted([str(value) for value in row] for row in reduce(_union, frames).collect())


def _hashed(frame: Any) -> str:
    return f"sum(cast(xxhash64({', '.join(frame.columns)}) as decimal(38)))"


def _union(one: Any, other: Any) -> Any:
    return one.unionAll(other)
