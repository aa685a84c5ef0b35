"""Copied rows as the data files of partitions, or sorted: in memory until there are enough of them for files."""

import time
from collections.abc import Iterator

import pyarrow as pa

from spark_consumers.lake.format.arranged_files import write_arranged
from spark_consumers.lake.format.data_files import numbered
from spark_consumers.lake.format.table_format import FileInfo
from spark_consumers.lake.layout.arrangement import Arrangement

#: Bytes of rows that are held, so that a table that cannot be read in parts does not have to fit into memory.
_HELD = 256 << 20


def write_parts(
    path: str,
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    arrangement: Arrangement,
    rate: float | None,
) -> tuple[list[FileInfo], int]:
    """Write the rows, no faster than `rate` bytes a second; the files, whose names begin as `path`, and the rows' bytes."""
    files: list[FileInfo] = []
    held: list[pa.RecordBatch] = []
    size = waiting = 0
    began = time.monotonic()

    def write() -> None:
        rows = pa.Table.from_batches(held)
        columns = [pa.concat_arrays([pa.array([], c.type), *c.chunks]) for c in rows.columns]
        name = numbered(path, len(files))
        files.extend(write_arranged(name, columns, schema, arrangement))

    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        waiting += batch.nbytes
        if waiting >= _HELD:
            write()
            held, waiting = [], 0
        if rate is not None:
            time.sleep(max(0.0, size / rate - (time.monotonic() - began)))
    if held:
        write()
    return files, size
