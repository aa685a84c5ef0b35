"""The rows by which two snapshots of a table differ, read on the executors from its data files.

A row that is in one snapshot only is in a data file that only that one has, or its position is removed in the later one. So what is
read depends on what an epoch has written, not on the table's size. Rows that an epoch has only moved into another file (`Moved`)
are not among the changes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.data_files import as_damage, opened
from spark_consumers.lake.format.iceberg_schema import by_number, places
from spark_consumers.lake.format.position_deletes import read_removed
from spark_consumers.lake.format.table_format import ScanFile, Vector, name_of
from spark_consumers.lake.index.build import bitmaps_in
from spark_consumers.lake.store.place import place

#: Changed rows of a task, and rows that it may read for them, about.
_ROWS, _READ = 500_000, 2_000_000


@dataclass(frozen=True)
class Moved:
    """Rows that a write of a table has put into other data files as they were (`removal.Rewrite`).

    `old`: the names of the data files that they were in, and how many of each file's rows have not been moved; `removed`: the scratch
    file that has the positions of these (`index.build.bitmaps_in`). `new`: the names of the data files that they are in.
    """

    old: Mapping[str, int]
    removed: str
    new: Collection[str]


@dataclass(frozen=True)
class ChangedFile:
    """A data file of which rows were added (`sign` 1) or removed (-1).

    All its rows, without those that `without` removes; or, if `only`, those that it removes and `without` does not. `only` may be a
    scratch file (`Moved.removed`). `stored`: the rows of the file, of which all may have to be read.
    """

    path: str
    sign: int
    rows: int
    stored: int
    without: Vector | None = None
    only: Vector | str | None = None


def changed_files(
    before: Sequence[ScanFile], after: Sequence[ScanFile], moves: Sequence[Moved] = ()
) -> list[ChangedFile]:
    """The data files with the rows by which two snapshots differ; `moves`: of the write that made the later one. Pure.

    A data file is never written again, and its removed rows only become more.

    **Safety of moves.** A move's new files have the rows of its old files but for those at the removed positions, so of all these files only
    rows count that are at such a position and were not removed before. That holds if the move is part of this difference: all its
    old files are in the first snapshot only, all its new files in the second only, with no removed rows, and as many rows in total as
    the move says. Any other move is left out. Its files then count whole, as removed and added, which is right for every write. So

    - the write of an earlier attempt, which was found instead of this one's, has files of other names, and so have those of a
      write that was begun again with another index;
    - an UPDATE of a row in an old file removes its position, and the new row, also one that is completed from it (a patch), is in a file
      of the epoch's own rows, which is of no move;
    - rows that a rewrite changes (a TRUNCATE marks them deleted) are of no move (`complete.moved`);
    - a row filter is asked for rows that changes bring, not for those that are moved;
    - the new files may be in other partitions than the old ones: a move is of all of them together.
    """
    old, new = ({file.path: file for file in files} for files in (before, after))
    first = {file.name: file for file in before if file.path not in new}
    second = {file.name: file for file in after if file.path not in old}
    found: list[ChangedFile] = []
    for move in moves:
        if _is_of(move, first, second):
            found += [
                _removed_from(first.pop(name), dead, move.removed)
                for name, dead in move.old.items()
            ]
            for name in move.new:
                del second[name]
    found += [_whole(file, 1) for file in second.values()]
    found += [_whole(file, -1) for file in first.values()]
    for path, file in new.items():
        was = old.get(path)
        if was is not None and file.vector is not None and file.vector != was.vector:
            found.append(_removed_from(was, file.vector.rows, file.vector))
    return [each for each in found if each.rows]


def _is_of(move: Moved, first: Mapping[str, ScanFile], second: Mapping[str, ScanFile]) -> bool:
    """Whether the move is between these data files, which only one of the snapshots has."""
    if not (move.old.keys() <= first.keys() and set(move.new) <= second.keys()):
        return False
    old, new = [first[name] for name in move.old], [second[name] for name in move.new]
    moved = sum(file.rows for file in old) - sum(move.old.values())
    grown = all(_dead(first[name]) <= dead for name, dead in move.old.items())
    return grown and moved == sum(file.rows for file in new) and not any(f.vector for f in new)


def _dead(file: ScanFile) -> int:
    return 0 if file.vector is None else file.vector.rows


def _whole(file: ScanFile, sign: int) -> ChangedFile:
    return ChangedFile(file.path, sign, file.rows - _dead(file), file.rows, file.vector)


def _removed_from(file: ScanFile, dead: int, positions: Vector | str) -> ChangedFile:
    """Of a data file as it was: so many rows are removed now, at these positions."""
    return ChangedFile(file.path, -1, dead - _dead(file), file.rows, file.vector, positions)


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
        without, only = (self._positions(changed, at) for at in (changed.without, changed.only))
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

    def _positions(self, changed: ChangedFile, at: Vector | str | None) -> BitMap64 | None:
        if isinstance(at, str):
            return bitmaps_in(at)[name_of(changed.path)]
        return None if at is None else read_removed(self.folder, at)

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
