"""Copied rows as data files of a table, written where they are read."""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, InputPartition

from spark_consumers.lake.copy.arranged_copy import write_parts
from spark_consumers.lake.epoch.quarantine import QuarantineFile, QuarantineOfCopy
from spark_consumers.lake.format.data_files import PartsWriter, new_file
from spark_consumers.lake.format.table_format import FileInfo
from spark_consumers.lake.layout.arrangement import PLAIN, Arrangement
from spark_consumers.lake.status import CopyStatus
from spark_consumers.lake.store.place import carried
from spark_consumers.spark.job_group import described
from spark_consumers.spark.slots import slots
from walsender_bridge.errors import UnavailableError


@dataclass
class CopyProgress:
    """How far the copy of one table is. Written by the copy's threads, read by any thread.

    `bytes` are those of the rows in memory, `pieces` the parts in which the table is read; times are seconds
    since the Unix epoch. A table that waits for its turn has begun at 0. `waits_for`: the transaction that has to end first, and
    how; empty otherwise. `levels`: the table is brought level (`leveling`), so the rows are those that the source has compared, and the pieces
    its queries; of the rows, `changed` are written or removed.
    """

    began_at: float = 0.0
    rows: int = 0
    bytes: int = 0
    pieces: int = 0
    pieces_done: int = 0
    waits_for: str = ""
    levels: bool = False
    changed: int = 0
    #: Set when the table is not to be copied any more.
    is_unwanted: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def begin(self, pieces: int) -> None:
        """The copy begins, or its next chunk does."""
        self.began_at = self.began_at or time.time()
        self.pieces += pieces

    def begin_again(self) -> None:
        """The table is copied instead of being brought level."""
        with self._lock:
            self.levels = False
            self.rows = self.bytes = self.pieces = self.pieces_done = self.changed = 0

    def add(self, rows: int, size: int) -> None:
        """A piece is done."""
        with self._lock:
            self.rows += rows
            self.bytes += size
            self.pieces_done += 1

    def status(self, now: float) -> CopyStatus:
        """The progress as the status file has it."""
        seconds = max(now - self.began_at, 1e-3) if self.began_at else 0.0
        return CopyStatus(
            began_at=self.began_at,
            rows=self.rows,
            bytes=self.bytes,
            pieces=self.pieces,
            pieces_done=self.pieces_done,
            rows_per_second=round(self.rows / seconds, 1) if seconds else 0.0,
            bytes_per_second=round(self.bytes / seconds, 1) if seconds else 0.0,
            waits_for=self.waits_for,
            levels=self.levels,
            changed=self.changed,
        )


class _Pace:
    """Limits writes to a number of bytes a second, by delaying the start of the next part.

    No task sleeps on an executor: it would occupy a core that other tasks need.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def wait(self, stop: threading.Event) -> None:
        """Wait until the written bytes are within the rate, or until `stop`."""
        while not stop.is_set():
            with self._lock:
                left = self._free_at - time.monotonic()
            if left <= 0:
                return
            stop.wait(min(left, 1.0))

    def spent(self, size: int) -> None:
        """Count these bytes as written."""
        if self._rate is not None:
            with self._lock:
                self._free_at += size / self._rate


def write_source(
    spark: Any,
    reader: DataSourceReader,
    prefix: str,
    schema: pa.Schema,
    *,
    beside: Mapping[str, int] | None = None,
    arrangement: Arrangement = PLAIN,
    rate: float | None = None,
    progress: CopyProgress | None = None,
    stop: threading.Event | None = None,
    apart: QuarantineOfCopy | None = None,
    description: str = "",
) -> tuple[list[FileInfo], list[QuarantineFile]]:
    """Write what a data source reads, a file a partition; the rows never pass through the JVM.

    Every partition is a separate job, as many at a time as there are cores: other work of the session gets the
    next free core, and need not wait for the whole table. `beside`: the values of columns behind the source's, by name. `arrangement`: how the files are written, several for a
    partition where the table has partitions of its own. `rate`: bytes a second, of all partitions together.
    `apart`: rows that do not fit are written to separate files; the reader identifies them. `description`: what Spark's
    UI says of its jobs. Returns the files that have rows, and those of rows that do not fit. An error on an executor is
    raised by Spark; `stop` ends the copy between two partitions, with `UnavailableError`.
    """
    work = list(enumerate(reader.partitions()))
    context = spark.sparkContext
    at_once = max(1, min(len(work), slots(context)))
    # If a table cannot be read in parts, its single task has to keep to the rate.
    within = rate if len(work) == 1 else None
    pace, stop = _Pace(rate), stop or threading.Event()
    progress = progress or CopyProgress()
    progress.begin(len(work))
    # The reader knows all partitions; it is sent once, and not with each of them.
    shared = context.broadcast(reader)

    def write(
        numbered: tuple[int, InputPartition],
    ) -> tuple[list[FileInfo], int, QuarantineFile | None]:
        batches: Any = shared.value.read(numbered[1])
        quarantined: list[pa.Table] = []
        if apart is not None:
            batches = apart.split(batches, quarantined)
        batches = (_with_others(batch, schema, beside or {}) for batch in batches)
        path = _path(prefix)
        if arrangement.fields or arrangement.sort:
            files, size = write_parts(path, batches, schema, arrangement, within)
        else:
            files, size = _write_file(path, batches, schema, arrangement, within)
        file_of_quarantined = None
        if apart is not None:
            file_of_quarantined = apart.write(
                path.removeprefix(f"{prefix}-").removesuffix(".parquet"), quarantined
            )
        return files, size, file_of_quarantined

    def run(numbered: tuple[int, InputPartition]) -> tuple[list[FileInfo], QuarantineFile | None]:
        pace.wait(stop)
        if stop.is_set():
            raise UnavailableError(
                "the copy was stopped", repair="no action is needed: it restarts with the lake job"
            )
        done: tuple[list[FileInfo], int, QuarantineFile | None]
        part = f"{description}, part {numbered[0] + 1} of {len(work)}"
        with described(context, "tuskline copy", part):
            (done,) = context.parallelize([numbered], 1).map(carried(write)).collect()
        progress.add(sum(file.rows for file in done[0]), done[1])
        pace.spent(done[1])
        return done[0], done[2]

    with ThreadPoolExecutor(at_once, thread_name_prefix="piece") as pool:
        futures = [pool.submit(run, numbered) for numbered in work]
        try:
            found = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
    shared.unpersist()
    files = [file for files, _ in found for file in files]
    return files, [aside for _, aside in found if aside]


def _with_others(
    batch: pa.RecordBatch, schema: pa.Schema, beside: Mapping[str, int]
) -> pa.RecordBatch:
    """The rows with these values in the columns behind the source's, and NULL in those that are not named."""
    for field_ in list(schema)[batch.num_columns :]:
        values = pa.nulls(len(batch), field_.type)
        if field_.name in beside:
            value = pa.scalar(beside[field_.name], pa.int64()).cast(field_.type)
            values = pa.repeat(value, len(batch))
        batch = batch.append_column(field_, values)
    return batch


def _path(prefix: str) -> str:
    """A unique name for each attempt of each task."""
    context = TaskContext.get()
    assert context is not None
    return f"{prefix}-{context.partitionId()}-{context.taskAttemptId()}.parquet"


def _write_file(
    path: str,
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    arrangement: Arrangement,
    rate: float | None,
) -> tuple[list[FileInfo], int]:
    """Write one file, no faster than `rate` bytes a second; the file, if there are rows, and the bytes of these."""
    rows = size = 0
    began = time.monotonic()
    with (
        new_file(path) as new,
        PartsWriter(new.file, schema, arrangement.codec, arrangement.level) as writer,
    ):
        for batch in batches:
            fitted = [c.cast(f.type) for c, f in zip(batch.columns, schema, strict=True)]
            writer.write(pa.table(fitted, schema=schema))
            rows += len(batch)
            size += batch.nbytes
            if rate is not None:
                time.sleep(max(0.0, size / rate - (time.monotonic() - began)))
        new.is_wanted = rows > 0
    return ([FileInfo(path, rows, new.size)], size) if rows else ([], 0)
