"""Completes changes from the table's own data files, on the executors.

- A *patch* is a row of which some columns were never sent (unchanged TOAST). Their values are those that
  the row had before this epoch, under the key `source`.
- A *removal* removes a number of rows that are equal in every column from a multiset. Which of several equal rows
  is removed does not matter; the hidden column `ROW_ID` distinguishes them.
- *Compaction* rewrites the table's rows, without those that delete files have removed.

Every patch must find its row and every removal its rows (the driver counts them): anything else means that
the table and the log do not belong together, and is an error, never a lost or additional row.

The files are read here rather than through a Spark query: a query that finds ten rows costs seconds of
planning and waiting, and an epoch has one for each such table.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark_consumers.fold.row_codes import row_codes
from spark_consumers.lake.epoch import quarantine
from spark_consumers.lake.epoch.quarantine import QuarantineFile
from spark_consumers.lake.epoch.stage import Staged, Target
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.data_files import as_damage, read_data, whole_file, write_data
from spark_consumers.lake.format.table_format import ROW_ID, FileInfo, ScanFile
from walsender_bridge.errors import CorruptError

#: Bytes of a table's files that one task scans.
_SCAN_BYTES = 64 << 20
#: With at most this many values, files that contain none of them are not opened.
_NARROWED = 200


@dataclass(frozen=True)
class CompleteTask:
    """Scan some of a table's files, as it was before the epoch. `number` distinguishes the tasks.

    `patches` and `removals` are files that the staging wrote, and `rows` those that go into one file with
    the patched ones.
    """

    target: Target
    number: int
    files: tuple[ScanFile, ...]
    patches: str | None = None
    rows: str | None = None
    removals: str | None = None
    compact: bool = False


@dataclass(frozen=True)
class Completed:
    """What was found.

    The number of patched rows, and the files that have them: the representable ones, and the quarantined ones; for each
    removal the `ROW_ID`s of equal rows; the table's rewritten rows.
    """

    table: str
    patched: int = 0
    rows: FileInfo | None = None
    quarantined: QuarantineFile | None = None
    compacted: FileInfo | None = None
    gone: dict[int, list[str]] = field(default_factory=dict)


def run_complete(task: CompleteTask) -> Completed:
    """Carry out the task on these files."""
    prefix = f"{task.target.prefix}-{{}}-{task.number}.parquet"
    count, rows, quarantined = (
        (0, None, None)
        if task.patches is None
        else _patch(task, task.patches, prefix.format("rows"))
    )
    return Completed(
        task.target.name,
        patched=count,
        rows=rows,
        quarantined=quarantined,
        compacted=_compact(task, prefix.format("compacted")) if task.compact else None,
        gone={} if task.removals is None else _find(task, task.removals),
    )


def _patch(
    task: CompleteTask, staged: str, path: str
) -> tuple[int, FileInfo | None, QuarantineFile | None]:
    target = task.target
    schema = target.file_schema
    patches = read_data(staged)
    wanted = [
        _one(patches, f"s{i}").cast(schema.field(name).type) for i, name in enumerate(target.key)
    ]
    # Behind the table's own columns, where a value of the epoch does not fit (`quarantine`).
    width = len(target.columns)
    wide = [
        _one(patches, f"c{i}")
        for i in range(quarantine.width(width))
        if f"c{i}" in patches.column_names
    ]
    aside = quarantine.is_unrepresentable(wide, width)
    quarantined: list[list[pa.Array]] = []
    parts: list[list[pa.Array]] = []
    count = 0
    for group, deleted in _groups(task, list(target.key)):
        keys = [_one(group.keys, name) for name in target.key]
        here, there, gone = row_codes([keys, wanted, deleted])
        place = np.full(int(max(c.max(initial=-1) for c in (here, there, gone))) + 1, -1)
        place[there] = np.arange(len(there))
        # A deleted row of that key is an older one: the row itself is in another file.
        place[gone] = -1
        rows = np.flatnonzero(place[here] >= 0)
        if not len(rows):
            continue
        at = place[here[rows]]
        found = pa.array(at)
        before = group.read().take(pa.array(rows))
        part = []
        for i, column in enumerate(schema):
            sent = _one(patches, f"c{i}").take(found).cast(column.type)
            unset = _one(patches, f"u{i}").take(found)
            part.append(pc.if_else(unset, _one(before, column.name), sent))
        count += len(rows)
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
        parts.append([_one(table, name) for name in schema.names])
    if not parts:
        return 0, None, None
    file = None
    if quarantined:
        file = quarantine.write_quarantined(target, f"patched-{task.number}", _stacked(quarantined))
    return count, write_data(path, _stacked(parts), schema), file


def _stacked(parts: list[list[pa.Array]]) -> list[pa.Array]:
    return [pa.concat_arrays(list(same)) for same in zip(*parts, strict=True)]


def _find(task: CompleteTask, removals: str) -> dict[int, list[str]]:
    schema = task.target.file_schema
    names = [name for name in schema.names if name != ROW_ID]
    table = read_data(removals)
    wanted = [_one(table, f"c{i}").cast(schema.field(n).type) for i, n in enumerate(names)]
    counts = table.column("n").to_pylist()
    found: dict[int, list[str]] = defaultdict(list)
    for group, deleted in _groups(task, schema.names):
        here, there = row_codes([[_one(group.keys, n) for n in names], wanted])
        place = np.full(int(max(here.max(initial=-1), there.max(initial=-1))) + 1, -1)
        place[there] = np.arange(len(there))
        rows = np.flatnonzero(place[here] >= 0)
        ids = _one(group.keys, ROW_ID).take(pa.array(rows))
        alive = pc.invert(pc.is_in(ids, value_set=deleted[0])).to_pylist()
        for number, row_id, is_there in zip(
            place[here[rows]].tolist(), ids.to_pylist(), alive, strict=True
        ):
            if is_there and len(found[number]) < counts[number]:
                found[number].append(row_id)
    return dict(found)


def _compact(task: CompleteTask, path: str) -> FileInfo | None:
    target = task.target
    identity = list(target.key) or [ROW_ID]
    rows = 0
    with (
        whole_file(path) as file,
        pq.ParquetWriter(file, target.file_schema, compression="zstd") as writer,
    ):
        for group, deleted in _groups(task, identity):
            here, gone = row_codes([[_one(group.keys, name) for name in identity], deleted])
            kept = np.flatnonzero(~np.isin(here, gone))
            if len(kept):
                whole = group.read().select(target.file_schema.names)
                writer.write_table(whole.take(pa.array(kept)).cast(target.file_schema))
                rows += len(kept)
    if not rows:
        checksums.remove(Path(path))
        return None
    return FileInfo(path, rows, Path(path).stat().st_size)


@dataclass(frozen=True)
class _Group:
    """A row group of a data file: some columns, and the way to all of them."""

    path: str
    file: pq.ParquetFile
    number: int
    keys: pa.Table
    schema: pa.Schema

    def read(self) -> pa.Table:
        """All columns."""
        with as_damage(self.path):
            return _filled(self.file.read_row_group(self.number), self.schema)


def _groups(task: CompleteTask, columns: list[str]) -> Iterator[tuple[_Group, list[pa.Array]]]:
    """Each row group with its `columns`, and the identities that are deleted from its file."""
    identity = task.target.key or (ROW_ID,)
    fields = [task.target.file_schema.field(name) for name in identity]
    wanted = pa.schema([task.target.file_schema.field(name) for name in columns])
    for scanned in task.files:
        deletes = [read_data(path, list(identity)) for path in scanned.deletes]
        deleted = [
            pa.concat_arrays(
                [
                    pa.array([], f.type),
                    *(chunk for d in deletes for chunk in d.column(f.name).chunks),
                ]
            )
            for f in fields
        ]
        checksums.check(Path(scanned.path))
        with as_damage(scanned.path):
            file = pq.ParquetFile(scanned.path)
        with file:
            for number in range(file.num_row_groups):
                with as_damage(scanned.path):
                    keys = _filled(file.read_row_group(number, columns=columns), wanted)
                yield _Group(scanned.path, file, number, keys, task.target.file_schema), deleted


def _filled(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with NULL in the columns that it had not yet when its file was written."""
    for column in schema:
        if column.name not in table.column_names:
            table = table.append_column(column, pa.nulls(len(table), column.type))
    return table


def _one(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    chunks = column.chunks
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays([pa.array([], column.type), *chunks])


# -- on the driver, before and after ------------------------------------------------------------


def narrowed(target: Target, staged: Staged) -> tuple[str | None, Sequence[Any]]:
    """A column and the few values to look for, if Iceberg can skip files by them."""
    path, prefix = (staged.patches, "s") if staged.patches else (staged.removals, "c")
    names = target.key if staged.patches else tuple(target.columns.names)
    assert path is not None
    for i, name in enumerate(names):
        kind = target.file_schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind)):
            continue
        values = read_data(path.path, [f"{prefix}{i}"]).column(0).unique()
        if len(values) <= _NARROWED and not values.null_count:
            return name, values.to_pylist()
    return None, ()


def in_groups(files: Sequence[ScanFile]) -> list[tuple[ScanFile, ...]]:
    """The files in groups of about `_SCAN_BYTES`."""
    groups: list[list[ScanFile]] = []
    size = 0
    for file in files:
        if not groups or size + file.size > _SCAN_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [tuple(group) for group in groups]


def removed(target: Target, removals: FileInfo, completed: Sequence[Completed]) -> pa.Array:
    """The `ROW_ID`s of the rows that go: as many as wanted of each kind."""
    gone: list[str] = []
    counts = read_data(removals.path, ["n"]).column(0).to_pylist()
    for number, count in enumerate(counts):
        found = [row for part in completed for row in part.gone.get(number, ())]
        check_found(target, min(len(found), count), count)
        gone += sorted(found)[:count]
    return pa.array(gone, pa.string())


def check_found(target: Target, found: int, wanted: int) -> None:
    """Raise `CorruptError` if the table does not have the rows that the log says it has."""
    if found != wanted:
        raise CorruptError(
            f"expected {wanted} rows in the table before the epoch, found {found}",
            where=target.name,
            repair=f"tuskline table resync {target.name}",
        )
