"""Tasks of bringing a table level: the source's rows that it lacks, as data files, and the rows that go from it, for the row index."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from spark_consumers.lake.comparison.lake import Division
from spark_consumers.lake.comparison.sums import split
from spark_consumers.lake.epoch.removal import one
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.arranged_files import write_arranged
from spark_consumers.lake.format.data_files import write_partial, write_table
from spark_consumers.lake.format.table_format import FileInfo


@dataclass(frozen=True)
class ReadTask:
    """Read these pieces of the source, and write of each digest as many rows as are `wanted` into a data file. `number`: of the task."""

    reader: DataSourceReader
    pieces: tuple[InputPartition, ...]
    wanted: Mapping[bytes, int]
    division: Division
    target: Target
    number: int


def run_read(task: ReadTask) -> tuple[FileInfo, ...]:
    """Carry out the task; the files."""
    left = Counter(task.wanted)
    held: list[pa.RecordBatch] = []
    for piece in task.pieces:
        batches: Any = task.reader.read(piece)
        for batch in batches:
            digested = task.division.digested(batch.columns)
            rows = list(_chosen(split(digested.rows), left))
            if rows:
                held.append(batch.take(pa.array(rows)))
    if not held:
        return ()
    whole = pa.Table.from_batches(held)
    columns = [one(whole, name) for name in whole.column_names]
    path = f"{task.target.prefix}-added-{task.number}.parquet"
    return write_arranged(path, columns, task.target.file_schema, task.target.arrangement)


def _chosen(digests: Sequence[bytes], left: Counter[bytes]) -> Iterator[int]:
    """The places of the rows that are wanted still, which are taken off."""
    for place, digest in enumerate(digests):
        if left[digest] > 0:
            left[digest] -= 1
            yield place


@dataclass(frozen=True)
class Removals:
    """A file of what goes: of keys, or of distinct rows with how many of each; and of how many rows it is."""

    file: FileInfo
    rows: int


@dataclass(frozen=True)
class RemoveTask:
    """For `view_sink.sink`: take of each digest, in the last column of the rows, as many rows as are to go, and write what finds them."""

    target: Target
    gone: Mapping[bytes, int]
    scratch: str

    def run(self, batches: Iterator[pa.RecordBatch], attempt: str) -> Removals | None:
        """The file; None without rows."""
        left = Counter(self.gone)
        counts: list[int] = []
        held: list[pa.RecordBatch] = []
        for batch in batches:
            # Equal rows are one row of the file, and how many go is known by their digest.
            rows = []
            for place, digest in enumerate(batch.column(batch.num_columns - 1).to_pylist()):
                if left[digest] > 0:
                    counts.append(left.pop(digest))
                    rows.append(place)
            if rows:
                held.append(batch.take(pa.array(rows)))
        if not held:
            return None
        whole = pa.Table.from_batches(held)
        columns = [
            one(whole, name).cast(field.type)
            for name, field in zip(whole.column_names[:-1], self.target.columns, strict=True)
        ]
        path = f"{self.scratch}/{self.target.scratch_name}-{attempt}"
        return Removals(self._written(path, columns, counts), sum(counts))

    def _written(self, path: str, columns: list[pa.Array], counts: list[int]) -> FileInfo:
        if not self.target.key:
            fields = {f"c{i}": column for i, column in enumerate(columns)}
            table = pa.table({**fields, "n": pa.array(counts), "i": np.arange(len(counts))})
            return write_table(f"{path}-removals.parquet", table)
        schema = pa.schema([self.target.file_schema.field(name) for name in self.target.key])
        keys = [
            columns[place].cast(field.type)
            for place, field in zip(self.target.key_positions, schema, strict=True)
        ]
        file = write_partial(f"{path}-deletes.arrow", pa.table(keys, schema=schema))
        return FileInfo(file, len(counts), 0)
