"""Counts the rows that a reader of a table's snapshot gets, from its files, without Spark.

A checksum shows that a file is what was written. The number of rows in the epoch's manifest shows that what was written
is the table: it is maintained from epoch to epoch by the changes in the log, never counted in the files.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark_consumers.fold.row_codes import row_codes
from spark_consumers.lake.format import avro
from spark_consumers.lake.format.data_files import as_damage, read_data
from spark_consumers.lake.format.iceberg_files import local
from walsender_bridge.errors import CorruptError

#: What a data file of Iceberg holds.
_DATA, _EQUALITY_DELETES = 0, 2
_DELETED = 2


@dataclass(frozen=True, slots=True)
class _File:
    """A data file or a file of deletes; `sequence` orders it among the others."""

    content: int
    path: Path
    rows: int
    sequence: int


def count(manifest_list: Path, identity: list[str]) -> int:
    """The rows of the snapshot with this manifest list; `identity`: the columns that its deletes are by.

    Raises `CorruptError` for files that cannot be read, or do not have the number of rows that their manifest states.
    """
    files: dict[int, list[_File]] = defaultdict(list)
    for file in _files(manifest_list):
        files[file.content].append(file)
    if other := [file for kind in set(files) - {_DATA, _EQUALITY_DELETES} for file in files[kind]]:
        raise CorruptError("holds deletes that Tuskline does not write", where=str(other[0].path))
    loaded = {file.path: read_data(file.path, identity) for file in files[_EQUALITY_DELETES]}
    total = 0
    for file in files[_DATA]:
        _check_rows(file)
        gone = [loaded[d.path] for d in files[_EQUALITY_DELETES] if d.sequence > file.sequence]
        total += _left(file, gone, identity) if gone else file.rows
    return total


def _files(manifest_list: Path) -> Iterator[_File]:
    for manifest in avro.rows(manifest_list):
        path = local(manifest["manifest_path"])
        for entry in avro.rows(path):
            if entry["status"] == _DELETED:
                continue
            found, sequence = entry["data_file"], entry.get("sequence_number")
            yield _File(
                found.get("content", _DATA),
                local(found["file_path"]),
                found["record_count"],
                manifest["sequence_number"] if sequence is None else sequence,
            )


def _check_rows(file: _File) -> None:
    with as_damage(file.path):
        there = pq.read_metadata(file.path).num_rows
    if there != file.rows:
        raise CorruptError(
            f"has {there} rows, but its manifest records {file.rows}", where=str(file.path)
        )


def _left(file: _File, gone: list[pa.Table], identity: list[str]) -> int:
    """How many rows of a data file are in none of these files of deletes."""
    there = read_data(file.path, identity)
    keys = [_one(there, name) for name in identity]
    deleted = [pa.concat_arrays([_one(table, name) for table in gone]) for name in identity]
    here, away = row_codes([keys, deleted])
    return int(np.count_nonzero(~np.isin(here, away)))


def _one(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return pa.concat_arrays([pa.array([], column.type), *column.chunks])
