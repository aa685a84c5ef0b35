"""Counts the rows that a reader of a table's snapshot gets, from its files, without Spark.

A checksum shows that a file is what was written. The number of rows in the epoch's manifest shows that what was written
is the table: it is maintained from epoch to epoch by the changes in the log, never counted in the files.
"""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark_consumers.fold.row_codes import row_codes
from spark_consumers.lake.format.data_files import as_damage, read_data, readable
from spark_consumers.lake.format.position_deletes import read_removed
from spark_consumers.lake.format.snapshot_files import files_of
from spark_consumers.lake.format.table_format import ScanFile
from spark_consumers.lake.store.place import Place, place
from walsender_bridge.errors import CorruptError


def count(manifest_list: Place, identity: list[str]) -> int:
    """The rows of the snapshot with this manifest list; `identity`: the columns that its files of keys are by.

    Raises `CorruptError` for files that cannot be read, or do not have the number of rows that their manifest states, and
    `NotSupportedError` for deletes that Tuskline does not write.
    """
    total = 0
    for file in files_of(manifest_list):
        check_rows(file)
        total += file.rows - len(removed_by_keys(file, identity))
        if file.vector is not None:
            positions = read_removed(place(file.path).parent.parent, file.vector)
            if positions and positions.max() >= file.rows:
                raise CorruptError(
                    f"a deletion vector has position {positions.max()} of {file.rows} rows",
                    where=file.path,
                )
            total -= len(positions)
    return total


def check_rows(file: ScanFile) -> None:
    """Raise `CorruptError` if the data file does not have the number of rows that its manifest states."""
    with as_damage(file.path):
        there = pq.read_metadata(readable(file.path)).num_rows
    if there != file.rows:
        raise CorruptError(
            f"has {there} rows, but its manifest records {file.rows}", where=file.path
        )


def removed_by_keys(
    file: ScanFile, identity: list[str]
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The positions of the rows that are in one of the data file's files of keys."""
    if not file.deletes:
        return np.zeros(0, np.int64)
    there = read_data(file.path, identity)
    gone = [read_data(path, identity) for path in file.deletes]
    keys = [_one(there, name) for name in identity]
    deleted = [pa.concat_arrays([_one(table, name) for table in gone]) for name in identity]
    here, away = row_codes([keys, deleted])
    return np.flatnonzero(np.isin(here, away))


def _one(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return pa.concat_arrays([pa.array([], column.type), *column.chunks])
