"""The index of data files: of an epoch's new ones, of a copy's, and of all files of a table whose index is built again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.counted import removed_by_keys
from spark_consumers.lake.format.data_files import as_damage, opened, read_partial, write_partial
from spark_consumers.lake.format.iceberg_schema import by_number, places
from spark_consumers.lake.format.position_deletes import read_removed, write_positions
from spark_consumers.lake.format.puffin import write_vectors
from spark_consumers.lake.format.table_format import ROW_ID, FileInfo, ScanFile, Vector, name_of
from spark_consumers.lake.index.digests import Digests, Int64s, key_digests, row_digests
from spark_consumers.lake.index.merge import append, append_parts, in_order, merge_all, records_of
from spark_consumers.lake.index.run_format import (
    RECORD,
    DataFile,
    Records,
    Run,
    Tables,
    open_runs,
    write_run,
)
from spark_consumers.lake.store.place import place
from walsender_bridge.errors import CorruptError

#: Bytes of data files that one task reads.
_TASK_BYTES = 64 << 20
#: Rows of new data files whose records are sorted in memory; more are sorted in parts, which are merged on disk.
_SORTED_ROWS = 8 << 20


@dataclass(frozen=True)
class Identity:
    """The columns by whose values the rows of a table are found: its key, or all that PostgreSQL has.

    `schema`: of these columns in data files now, where they are found by their numbers.
    """

    schema: pa.Schema
    is_key: bool

    @classmethod
    def of(cls, key: Sequence[str], file_schema: pa.Schema) -> "Identity":
        """That of a table with this key (none: a multiset), whose data files have this schema."""
        names = tuple(key) or tuple(name for name in file_schema.names if name != ROW_ID)
        return cls(pa.schema([file_schema.field(name) for name in names]), bool(key))

    def digests(self, columns: Sequence[pa.Array]) -> Digests:
        """The digests of rows, given as these columns."""
        return (key_digests if self.is_key else row_digests)(columns, self.schema.types)

    def of_file(self, path: str) -> Digests:
        """The digests of all rows of a data file. Raises `CorruptError`."""
        checksums.check(place(path))
        parts = []
        with as_damage(path), opened(path) as file:
            whole = file.schema_arrow
            there = [whole.names[at] for at in places(whole, self.schema) if at is not None]
            for number in range(file.num_row_groups):
                group = by_number(file.read_row_group(number, columns=there), self.schema)
                parts.append(self.digests([_whole(column) for column in group.columns]))
        if not parts:
            return Digests(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
        return Digests(
            np.concatenate([part.high for part in parts]), np.concatenate([p.low for p in parts])
        )


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays([pa.array([], column.type), *column.chunks])


def add_files(
    folder: str,
    runs: Sequence[Run],
    name: str,
    identity: Identity,
    files: Sequence[FileInfo],
    vectors: Sequence[Vector] = (),
    gone: Iterable[str] = (),
) -> tuple[Run, ...]:
    """The table's runs after an epoch that added these data files, vectors, and removed the data files `gone`.

    Raises `IndexDamagedError`, `CorruptError`.
    """
    changed, away = tuple(vectors), frozenset(gone)
    parts = (_records(identity, some) for some in _by_rows(files))
    if sum(file.rows for file in files) > _SORTED_ROWS:
        return append_parts(folder, runs, name, parts, Tables((), changed, away))
    records, own = next(parts, (np.zeros(0, RECORD), ()))
    return append(folder, runs, name, records, Tables(own, changed, away))


def _records(identity: Identity, files: Sequence[FileInfo]) -> tuple[Records, tuple[DataFile, ...]]:
    """The records of all rows of these data files, and the files by their numbers."""
    parts = [records_of(identity.of_file(f.path), number) for number, f in enumerate(files)]
    for file, records in zip(files, parts, strict=True):
        _check_rows(file.path, file.rows, len(records))
    named = tuple(DataFile(name_of(f.path), f.rows, f.size, f.partition) for f in files)
    return np.concatenate([np.zeros(0, RECORD), *parts]), named


def _by_rows(files: Sequence[FileInfo]) -> Iterator[list[FileInfo]]:
    """The files in groups of at most `_SORTED_ROWS` rows, or of one file."""
    some: list[FileInfo] = []
    for file in files:
        if some and sum(f.rows for f in some) + file.rows > _SORTED_ROWS:
            yield some
            some = []
        some.append(file)
    if some:
        yield some


def _check_rows(path: str, wanted: int, found: int) -> None:
    if found != wanted:
        raise CorruptError(
            f"has {found} rows, but {wanted} are recorded", where=path, repair=checksums.REPAIR
        )


# -- of all files, on executors ---------------------------------------------------------------------


@dataclass(frozen=True)
class PartTask:
    """Make the run `name` of some data files. `key`: the columns that files of keys are by."""

    folder: str
    name: str
    identity: Identity
    key: tuple[str, ...]
    files: tuple[ScanFile, ...]
    converted: str


@dataclass(frozen=True)
class Part:
    """A run of some files, and the living rows in it. `converted`: a file with what their files of keys remove."""

    run: Run
    rows: int
    converted: str | None


def run_part(task: PartTask) -> Part:
    """Carry out the task. Raises `CorruptError`."""
    parts: list[Records] = []
    converted: dict[str, BitMap64] = {}
    for number, file in enumerate(task.files):
        digests = task.identity.of_file(file.path)
        _check_rows(file.path, file.rows, len(digests))
        removed = BitMap64() if file.vector is None else read_removed(task.folder, file.vector)
        if file.deletes:
            removed |= BitMap64(removed_by_keys(file, list(task.key)).astype(np.uint64))
            converted[file.name] = removed
        rows = _without(len(digests), removed)
        parts.append(records_of(digests.take(rows), number, rows))
    records = in_order(np.concatenate([np.zeros(0, RECORD), *parts]))
    tables = Tables(
        tuple(DataFile(f.name, f.rows, f.size, f.partition) for f in task.files),
        tuple(f.vector for f in task.files if f.vector is not None and not f.deletes),
    )
    if converted:
        write_partial(task.converted, bitmaps_table(converted))
    return Part(
        write_run(task.folder, task.name, [records], tables),
        len(records),
        task.converted if converted else None,
    )


def _without(count: int, removed: BitMap64) -> Int64s:
    kept = np.ones(count, np.bool_)
    kept[np.frombuffer(removed.to_array(), np.uint64).astype(np.int64)] = False
    return np.flatnonzero(kept)


def bitmaps_table(bitmaps: dict[str, BitMap64]) -> pa.Table:
    """Positions by data file, for another task."""
    return pa.table({"file": list(bitmaps), "removed": [b.serialize() for b in bitmaps.values()]})


def bitmaps_in(path: str) -> dict[str, BitMap64]:
    """What another task wrote."""
    rows = read_partial(path).to_pylist()
    return {row["file"]: BitMap64.deserialize(row["removed"]) for row in rows}


@dataclass(frozen=True)
class WholeTask:
    """Make one run, `name`, of those of the parts; and vectors of what files of keys remove, in files that begin with `vectors`.

    `by_position`: files of positions instead of vectors.
    """

    folder: str
    parts: tuple[Part, ...]
    name: str
    vectors: str
    by_position: bool = False


@dataclass(frozen=True)
class Whole:
    """The index of a table. `vectors` and `gone` take the place of its files of keys, if it has any."""

    runs: tuple[Run, ...]
    rows: int
    vectors: tuple[Vector, ...] = ()
    gone: tuple[str, ...] = ()


def run_whole(task: WholeTask) -> Whole:
    """Carry out the task."""
    rows = sum(part.rows for part in task.parts)
    converted: dict[str, BitMap64] = {}
    for part in task.parts:
        converted |= {} if part.converted is None else bitmaps_in(part.converted)
    removed = {name: bitmap for name, bitmap in sorted(converted.items()) if bitmap}
    with_rows = _rows_of(task) if removed else {}
    gone = frozenset(name for name, bitmap in removed.items() if len(bitmap) == with_rows[name])
    left = {name: bitmap for name, bitmap in removed.items() if name not in gone}
    write = write_positions if task.by_position else write_vectors
    vectors = tuple(write(task.folder, task.vectors, left))
    names = [part.run.name for part in task.parts]
    run = merge_all(task.folder, names, task.name, Tables((), vectors, gone))
    return Whole((run,), rows, vectors, tuple(sorted(gone)))


def _rows_of(task: WholeTask) -> dict[str, int]:
    with open_runs(task.folder, [part.run.name for part in task.parts]) as readers:
        return {f.name: f.rows for reader in readers for f in reader.tables.files}


#: Runs a function for each of some tasks on the executors; the results in their order.
OnExecutors = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


def build(
    run: OnExecutors,
    folder: str,
    identity: Identity,
    key: tuple[str, ...],
    files: Sequence[ScanFile],
    *,
    name: str,
    scratch: str,
    by_position: bool = False,
) -> Whole:
    """The index of a table with these data files, as the run `name`; nothing without files. Raises `CorruptError`.

    `by_position`: what files of keys remove gets into files of positions.
    """
    if not files:
        return Whole((), 0)
    tasks = [
        PartTask(folder, f"{scratch}.{n}.run", identity, key, some, f"{scratch}.{n}.arrow")
        for n, some in enumerate(in_groups(files))
    ]
    parts = tuple(run(run_part, tasks))
    (whole,) = run(run_whole, [WholeTask(folder, parts, f"index/{name}.run", name, by_position)])
    found: Whole = whole
    return found


def in_groups(files: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The files (of anything with a size) in groups of about `_TASK_BYTES`."""
    groups: list[list[Any]] = []
    size = 0
    for file in files:
        if not groups or size + file.size > _TASK_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [tuple(group) for group in groups]
