"""Completes changes from the table's own data files, on the executors, where the row index has found the rows (`removal`).

- A *patch* is a row of which some columns were never sent (unchanged TOAST). Their values are those that the row had
  before this epoch, under the key `source`. Only the row groups that have such rows are read.
- A *rewrite* puts the living rows of data files into a new one.

The files are read here rather than through a Spark query: a query that finds ten rows costs seconds of
planning and waiting, and an epoch has one for each such table.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_consumers.lake.epoch import quarantine
from spark_consumers.lake.epoch.quarantine import QuarantineFile
from spark_consumers.lake.epoch.removal import (
    PatchedRows,
    Removed,
    Rewrite,
    indexed,
    one,
)
from spark_consumers.lake.epoch.rewritten import rewritten, row_groups
from spark_consumers.lake.epoch.table_changes import Moved
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.arranged_files import write_arranged
from spark_consumers.lake.format.data_files import as_damage, read_data, read_partial
from spark_consumers.lake.format.iceberg_schema import by_number
from spark_consumers.lake.format.table_format import FileInfo, name_of
from spark_consumers.lake.index.build import bitmaps_in
from spark_consumers.lake.index.digests import Int64s
from spark_consumers.lake.index.run_format import IndexDamagedError, Run


@dataclass(frozen=True)
class CompleteTask:
    """Complete rows of some of a table's files. `number` distinguishes the tasks.

    Either `patched`, of which `patches` is the file that the staging wrote, and `rows` those that go into one file with
    them; or `rewrite`.
    """

    target: Target
    number: int
    patched: PatchedRows | None = None
    patches: str | None = None
    rows: str | None = None
    rewrite: Rewrite | None = None


@dataclass(frozen=True)
class Completed:
    """The files that have the completed rows: the representable ones, and the quarantined ones.

    `dropped`: how many rows do not meet the table's row filter. `moved`: which rows are in other files now, as they were.
    """

    table: str
    rows: tuple[FileInfo, ...] = ()
    quarantined: QuarantineFile | None = None
    dropped: int = 0
    moved: Moved | None = None


def run_complete(task: CompleteTask) -> Completed:
    """Carry out the task."""
    prefix = f"{task.target.prefix}-{{}}-{task.number}.parquet"
    if task.rewrite is not None:
        files = rewritten(task.target, task.rewrite, prefix.format("rewritten"))
        return Completed(task.target.name, files, moved=moved(task.rewrite, files))
    return _patch(task, prefix.format("rows"))


def moved(rewrite: Rewrite, files: tuple[FileInfo, ...]) -> Moved | None:
    """The move that a rewrite into these files is; none if it has changed rows."""
    if rewrite.emptied is not None:
        return None
    removed = bitmaps_in(rewrite.removed)
    old = {file.name: len(removed[file.name]) for file in rewrite.files}
    return Moved(old, rewrite.removed, tuple(name_of(file.path) for file in files))


def _patch(task: CompleteTask, path: str) -> Completed:
    assert task.patched is not None
    assert task.patches is not None
    target = task.target
    schema = target.file_schema
    patches = read_data(task.patches)
    # Behind the table's own columns, where a value of the epoch does not fit (`quarantine`).
    width = len(target.columns)
    wide = [
        one(patches, f"c{i}")
        for i in range(quarantine.width(width))
        if f"c{i}" in patches.column_names
    ]
    aside = quarantine.is_unrepresentable(wide, width)
    quarantined: list[list[pa.Array]] = []
    parts: list[list[pa.Array]] = []
    dropped = 0
    for before, at in _rows_before(target, task.patched):
        found = pa.array(at)
        part = []
        for i, column in enumerate(schema):
            sent = one(patches, f"c{i}").take(found).cast(column.type)
            unset = one(patches, f"u{i}").take(found)
            part.append(pc.if_else(unset, one(before, column.name), sent))
        if target.row_filter is not None:
            meets = target.row_filter.matches(schema.names, part)
            dropped += int((~meets).sum())
            part = [column.filter(pa.array(meets)) for column in part]
            # Such a table has no quarantined rows.
            parts.append(part)
            continue
        out = aside[at]
        if out.any():
            kinds = target.columns.types
            whole = [c.cast(kind) for c, kind in zip(part[:width], kinds, strict=True)]
            whole += [column.take(found) for column in wide[width:]]
            quarantined.append([c.filter(pa.array(out)) for c in whole])
            part = [c.filter(pa.array(~out)) for c in part]
        parts.append(part)
    if task.rows is not None:
        table = read_data(task.rows)
        parts.append([one(table, name) for name in schema.names])
    file = None
    if quarantined:
        file = quarantine.write_quarantined(target, f"patched-{task.number}", _stacked(quarantined))
    files: tuple[FileInfo, ...] = ()
    if parts:
        files = write_arranged(path, _stacked(parts), schema, target.arrangement)
    return Completed(target.name, files, file, dropped)


def _rows_before(target: Target, patched: PatchedRows) -> Iterator[tuple[pa.Table, Int64s]]:
    """The rows to patch, as they were, and the number of the patch of each: a row group at a time."""
    places = read_partial(patched.places)
    patch, files, position = (
        np.asarray(one(places, name)) for name in ("patch", "file", "position")
    )
    for number, data in enumerate(patched.files):
        mine = np.flatnonzero(files == number)
        begin = 0
        for file, group, count in row_groups(target, data.name):
            here = mine[(position[mine] >= begin) & (position[mine] < begin + count)]
            if len(here):
                with as_damage(data.name):
                    rows = by_number(file.read_row_group(group), target.file_schema)
                yield rows.take(pa.array(position[here] - begin)), patch[here]
            begin += count


def _stacked(parts: list[list[pa.Array]]) -> list[pa.Array]:
    return [pa.concat_arrays(list(same)) for same in zip(*parts, strict=True)]


@dataclass(frozen=True)
class IndexTask:
    """Add the new data files of a table to its index, when all of them are written."""

    target: Target
    runs: tuple[Run, ...]
    rows: tuple[FileInfo, ...]
    removed: Removed


@dataclass(frozen=True)
class Indexed:
    """The table's new index; or why it has to be built again."""

    table: str
    runs: tuple[Run, ...] = ()
    damage: str = ""


def run_index(task: IndexTask) -> Indexed:
    """Carry out the task."""
    try:
        runs = indexed(task.target, task.runs, task.rows, task.removed)
    except IndexDamagedError as error:
        return Indexed(task.target.name, damage=str(error))
    return Indexed(task.target.name, runs)
