"""The rows by which two snapshots of a table differ, read on the executors from its data files.

A row that is in one snapshot only is in a data file that only that one has, or its position is removed in the later one. So what is
read depends on what an epoch has written, not on the table's size. Rows that an epoch has only moved into another file are both
removed and added.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.data_files import as_damage, opened
from spark_consumers.lake.format.iceberg_schema import by_number, places
from spark_consumers.lake.format.position_deletes import read_removed
from spark_consumers.lake.format.table_format import ScanFile, Vector
from spark_consumers.lake.store.place import place

#: Changed rows of a task, and rows that it may read for them, about.
_ROWS, _READ = 500_000, 2_000_000


@dataclass(frozen=True)
class ChangedFile:
    """A data file of which rows were added (`sign` 1) or removed (-1).

    All its rows, without those that `without` removes; or, if `only`, those that it removes and `without` does not. `stored`: the rows
    of the file, of which all may have to be read.
    """

    path: str
    sign: int
    rows: int
    stored: int
    without: Vector | None = None
    only: Vector | None = None


def changed_files(before: Sequence[ScanFile], after: Sequence[ScanFile]) -> list[ChangedFile]:
    """The data files with the rows by which two snapshots differ. Pure.

    A data file is never written again, and its removed rows only become more.
    """
    old, new = ({file.path: file for file in files} for files in (before, after))

    def whole(file: ScanFile, sign: int) -> ChangedFile:
        gone = 0 if file.vector is None else file.vector.rows
        return ChangedFile(file.path, sign, file.rows - gone, file.rows, file.vector)

    found = [whole(file, 1) for path, file in new.items() if path not in old]
    found += [whole(file, -1) for path, file in old.items() if path not in new]
    for path, file in new.items():
        was = old.get(path)
        if was is not None and file.vector is not None and file.vector != was.vector:
            gone = file.vector.rows - (0 if was.vector is None else was.vector.rows)
            found.append(ChangedFile(path, -1, gone, file.rows, was.vector, file.vector))
    return [each for each in found if each.rows]


@dataclass(frozen=True)
class ChangesTask:
    """Read the changed rows of these files of the table in `folder`, as `schema` (of its data files) with the column `sign` behind it."""

    folder: str
    files: tuple[ChangedFile, ...]
    schema: pa.Schema
    sign: str

    def run(self) -> Iterator[pa.RecordBatch]:
        """The rows."""
        for file in self.files:
            yield from self._rows(file)

    def _rows(self, changed: ChangedFile) -> Iterator[pa.RecordBatch]:
        without, only = (
            None if vector is None else read_removed(self.folder, vector)
            for vector in (changed.without, changed.only)
        )
        checksums.check(place(changed.path))
        with as_damage(changed.path):
            file = opened(changed.path)
        begin = 0
        there = [at for at in places(file.schema_arrow, self.schema) if at is not None]
        columns = [file.schema_arrow.names[at] for at in there]
        with file:
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                at = _wanted(begin, count, without, only)
                begin += count
                if len(at):
                    yield from self._group(file, group, at, changed, columns)

    def _group(
        self,
        file: pq.ParquetFile,
        group: int,
        at: "np.ndarray",
        changed: ChangedFile,
        columns: list[str],
    ) -> Iterator[pa.RecordBatch]:
        with as_damage(changed.path):
            rows = file.read_row_group(group, columns=columns)
        rows = by_number(rows, self.schema).take(pa.array(at))
        signs = pa.repeat(pa.scalar(changed.sign, pa.int32()), len(rows))
        yield from rows.append_column(self.sign, signs).combine_chunks().to_batches()


def _wanted(
    begin: int, count: int, without: BitMap64 | None, only: BitMap64 | None
) -> "np.ndarray":
    """Which of the rows of a row group that begins at this position."""
    chosen = np.zeros(count, np.bool_)
    if only is None:
        chosen[:] = True
    else:
        chosen[_within(only, begin, count)] = True
    if without is not None:
        chosen[_within(without, begin, count)] = False
    return np.flatnonzero(chosen)


def _within(positions: BitMap64, begin: int, count: int) -> "np.ndarray":
    found = np.frombuffer(positions.to_array(), np.uint64).astype(np.int64)
    return found[(found >= begin) & (found < begin + count)] - begin


def changes_tasks(
    folder: str, files: Sequence[ChangedFile], schema: pa.Schema, sign: str
) -> list[ChangesTask]:
    """The tasks that read these files; one at least."""
    groups: list[list[ChangedFile]] = [[]]
    rows = stored = 0
    for file in files:
        if groups[-1] and (rows + file.rows > _ROWS or stored + file.stored > _READ):
            groups.append([])
            rows = stored = 0
        groups[-1].append(file)
        rows, stored = rows + file.rows, stored + file.stored
    return [ChangesTask(folder, tuple(group), schema, sign) for group in groups]


def count(files: Mapping[str, Sequence[ChangedFile]]) -> int:
    """The changed rows of all tables."""
    return sum(file.rows for each in files.values() for file in each)
