"""Copied rows as data files of a table, written where they are read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, InputPartition

from spark_consumers.lakehouse.files import sync
from spark_consumers.lakehouse.table_format import FileInfo


def write_source(
    spark: Any, reader: DataSourceReader, prefix: str, schema: pa.Schema, ids: str | None
) -> list[FileInfo]:
    """Write what a data source reads, a file a partition; the rows never pass through the JVM.

    With `ids` a last column is added that tells every row from all others: text that begins with `ids`.
    Returns the files that have rows. An error on an executor is raised by Spark.
    """

    def write(numbered: tuple[int, InputPartition]) -> FileInfo:
        number, partition = numbered
        batches: Any = reader.read(partition)
        if ids is not None:
            batches = _with_ids(batches, f"{ids}-{number}-")
        return _write_file(_path(prefix), batches, schema)

    work = list(enumerate(reader.partitions()))
    found = spark.sparkContext.parallelize(work, len(work)).map(write).collect()
    return [file for file in found if file.rows]


def _path(prefix: str) -> str:
    """A name of its own for each attempt of each task."""
    context = TaskContext.get()
    assert context is not None
    return f"{prefix}-{context.partitionId()}-{context.taskAttemptId()}.parquet"


def _with_ids(batches: Iterator[pa.RecordBatch], prefix: str) -> Iterator[pa.RecordBatch]:
    rows = 0
    for batch in batches:
        ids = pa.array([f"{prefix}{rows + i}" for i in range(len(batch))], pa.string())
        rows += len(batch)
        yield pa.RecordBatch.from_arrays(
            [*batch.columns, ids], [*(f"c{i}" for i in range(len(batch.columns))), "id"]
        )


def _write_file(path: str, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> FileInfo:
    rows = 0
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "xb") as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for batch in batches:
            fitted = [c.cast(f.type) for c, f in zip(batch.columns, schema, strict=True)]
            writer.write_batch(pa.record_batch(fitted, schema=schema))
            rows += len(batch)
    if not rows:
        target.unlink()
        return FileInfo(path, 0, 0)
    return FileInfo(path, rows, sync(target))
