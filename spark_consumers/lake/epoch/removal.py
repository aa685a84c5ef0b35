"""Finds by the row index where the rows are that an epoch removes, and writes what that changes, on the executors.

A removal is of a key (`Staged.deletes`) or of a number of rows that are equal in every column (`Staged.removals`; which
of several equal rows goes does not matter). The positions found are added to the deletion vectors of their data files; a
data file without a living row goes as a whole.

Where several tasks compose a table, each of them finds what its own part removes (`Located`), and leaves positions; one task adds
them to the vectors, a part at a time.

Every removal must find its rows: anything else means that the table and the log do not belong together, and is an error,
never a lost or additional row. Only a table that keeps deleted rows, or has a row filter, is asked for the row of any key that is changed, which it may not have.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from spark_consumers.fold.row_codes import row_codes
from spark_consumers.lake.epoch.packed import Index, TaskTables
from spark_consumers.lake.epoch.stage import (
    ComposeTask,
    Outcome,
    Patches,
    RangeTask,
    Staged,
    run_compose,
    run_range,
)
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.data_files import read_data, read_partial, write_partial
from spark_consumers.lake.format.position_deletes import write_positions
from spark_consumers.lake.format.puffin import write_vectors
from spark_consumers.lake.format.table_format import FileInfo, RowIds, Vector
from spark_consumers.lake.index.build import Identity, add_files, bitmaps_table, in_groups
from spark_consumers.lake.index.digests import Int64s, together
from spark_consumers.lake.index.liveness import Liveness
from spark_consumers.lake.index.lookup import NOTHING, Found, find
from spark_consumers.lake.index.run_format import (
    DataFile,
    IndexDamagedError,
    Run,
    RunReader,
    open_runs,
)
from spark_consumers.lake.tables.fault import TableFault, fault_of
from walsender_bridge.errors import CorruptError

#: A data file of less is small: many of them become one.
SMALL = 8 << 20


@dataclass(frozen=True)
class RemovalTask:
    """Find the rows that a table's staged changes remove. `runs`: its index. `small_files`: how many it may have.

    `located`: what the parts of the changes have found already; empty: nothing has been looked for.
    """

    target: Target
    staged: Staged
    runs: tuple[Run, ...]
    scratch: str
    small_files: int
    located: "tuple[Located, ...]" = ()


@dataclass(frozen=True)
class PatchedRows:
    """Some of these patches, of rows in these data files; `places`: which patch each is, its file, and its position."""

    files: tuple[DataFile, ...]
    places: str
    patches: Patches


@dataclass(frozen=True)
class Located:
    """What the changes of one part of a table remove: `found`, a file of positions in data files (None: nothing).

    `patched`: where the rows are that its patches complete. `damage`, `lacks`: see `Removed`.
    """

    table: str
    found: str | None = None
    patched: tuple[PatchedRows, ...] = ()
    damage: str = ""
    lacks: str = ""


@dataclass(frozen=True)
class Rewrite:
    """Data files of one partition whose living rows go into new files; `removed`: the positions of the others.

    `row_ids`: of each of the files, if the table's rows keep theirs. `emptied`: rows without marks get these (`fold.kept`).
    """

    files: tuple[DataFile, ...]
    removed: str
    row_ids: tuple[RowIds | None, ...] = ()
    emptied: tuple[int, int] | None = None


@dataclass(frozen=True)
class Removed:
    """What a table's write removes, and what is still to do for it.

    `vectors` take the place of `replaced`, and the data files `gone` of nothing. `runs`: the new index, if nothing is to
    do. `damage`: why the index has to be built again; then nothing else was done. `absent`: how many rows were not there.
    `lacks`: why the table has to be copied again; then nothing else was done, either.
    """

    table: str
    damage: str = ""
    vectors: tuple[Vector, ...] = ()
    replaced: tuple[Vector, ...] = ()
    gone: tuple[DataFile, ...] = ()
    patched: tuple[PatchedRows, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    runs: tuple[Run, ...] | None = None
    absent: int = 0
    lacks: str = ""


class _LacksError(Exception):
    """A value was not sent, and the table does not have its row."""


@dataclass(frozen=True)
class StageTask:
    """Stage changes, and find at once what they remove from tables whose changes are all in this task.

    `index`: of the one table of a `ComposeTask`; the tables of a `RangeTask` have theirs.
    """

    stage: RangeTask | ComposeTask
    index: Index | None = None

    @property
    def names(self) -> list[str]:
        """Of the tables that it may change."""
        if isinstance(self.stage, ComposeTask):
            return [self.stage.target.name]
        return [table.name for table in self.stage.tables]

    @property
    def target(self) -> Target | None:
        """Its one table."""
        return self.stage.target if isinstance(self.stage, ComposeTask) else None


def run_stage(
    task: StageTask,
) -> list[tuple[Outcome, "Removed | Located | None"]]:
    """Carry out the task; for each table what was staged, and what that removes, if it was looked for."""
    stage = task.stage
    if isinstance(stage, ComposeTask):
        assert task.index is not None
        staged = run_compose(stage)
        is_part = stage.share is not None
        return [_with_removed(staged, stage.target, task.index, stage.scratch, is_part=is_part)]
    tables = TaskTables(stage.tables, stage.stage)
    return [
        (one, None)
        if not isinstance(one, Staged) or one.table not in stage.whole
        else _with_removed(one, tables[one.table], tables.index(one.table), stage.scratch)
        for one in run_range(stage, tables)
    ]


def _with_removed(
    staged: Staged, target: Target, index: Index, scratch: str, *, is_part: bool = False
) -> tuple[Staged | TableFault, "Removed | Located | None"]:
    runs, small_files = index
    if runs is None or not (staged.changes_table or is_part):
        return staged, None
    task = RemovalTask(target, staged, runs, scratch, small_files)
    try:
        return staged, _run_location(task) if is_part else run_removal(task)
    except Exception as error:
        fault = fault_of(staged.table, error)
        if fault is None:
            raise
        return fault, None


def _run_location(task: RemovalTask) -> Located:
    """Find what one part of a table's changes removes."""
    name = task.target.name
    try:
        with open_runs(task.target.folder, [run.name for run in _runs_before(task)]) as runs:
            liveness = Liveness(task.target.folder, [run.tables for run in runs])
            found = _found(task, liveness, runs)
            patched = tuple(_patches(task, liveness, found)) if task.staged.patches else ()
    except IndexDamagedError as error:
        return Located(name, damage=str(error))
    except _LacksError as error:
        return Located(name, lacks=str(error))
    if not len(found):
        return Located(name)
    path = f"{task.scratch}/{task.target.scratch_name}-found.arrow"
    places = {"file": pa.array(found.files), "position": pa.array(found.positions)}
    return Located(name, write_partial(path, pa.table(places)), patched)


def _runs_before(task: RemovalTask) -> tuple[Run, ...]:
    """The table's index. With the table, it starts over."""
    return () if task.staged.truncated else task.runs


def run_removal(task: RemovalTask) -> Removed:
    """Carry out the task."""
    try:
        return _removed(task)
    except IndexDamagedError as error:
        return Removed(task.target.name, damage=str(error))
    except _LacksError as error:
        return Removed(task.target.name, lacks=str(error))


def _removed(task: RemovalTask) -> Removed:
    target, staged, old = task.target, task.staged, _runs_before(task)
    with open_runs(target.folder, [run.name for run in old]) as runs:
        liveness = Liveness(target.folder, [run.tables for run in runs])
        parts: Iterator[Found]
        if task.located:
            parts = map(_read_found, task.located)
            patched = tuple(rows for part in task.located for rows in part.patched)
        else:
            found = _found(task, liveness, runs)
            parts = iter([found])
            patched = tuple(_patches(task, liveness, found)) if staged.patches else ()
        known = {file.name: file for file in liveness.current()}
        removed, gone, removed_rows = _added(parts, liveness)
        living = [file for name, file in known.items() if file not in gone]
        rewritten = _to_rewrite(task, living, liveness, removed)
        rewrites = _rewrites(task, rewritten, liveness, removed)
    gone += rewritten
    away = {file.name for file in gone}
    changed = {name: each for name, each in removed.items() if name not in away}
    stage = target.stage
    write = write_positions if target.by_position else write_vectors
    vectors = [
        replace(vector, partition=known[vector.file].partition)
        for vector in write(target.folder, f"{stage}-removed", changed)
    ]
    replaced = [v for n, v in liveness.vectors.items() if n in away or n in changed]
    result = Removed(
        target.name,
        vectors=tuple(vectors),
        replaced=tuple(v for v in replaced if v.file in known),
        gone=tuple(gone),
        patched=patched,
        rewrites=tuple(rewrites),
        absent=_absent(staged, removed_rows),
    )
    if patched or rewrites:
        return result
    return replace(result, runs=indexed(target, old, staged.rows, result))


def _read_found(part: Located) -> Found:
    if part.found is None:
        return NOTHING
    table = read_partial(part.found)
    files, positions = (np.asarray(one(table, name)) for name in ("file", "position"))
    return Found(np.zeros(len(files), np.int64), files, positions)


def _absent(staged: Staged, removed: int) -> int:
    """How many of the keys that are removed no row has; of a table without a key, none (`_found`)."""
    return sum(file.rows for file in staged.deletes) - removed if staged.deletes else 0


def _added(
    parts: Iterable[Found], liveness: Liveness
) -> tuple[dict[str, BitMap64], list[DataFile], int]:
    """The removed positions of the data files that have such rows, the files that have no others left, and how many were added."""
    added: dict[int, BitMap64] = {}
    count = 0
    for found in parts:
        count += len(found)
        order = np.argsort(found.files, kind="stable")
        numbers, counts = np.unique(found.files, return_counts=True)
        groups = np.split(order, np.cumsum(counts)[:-1]) if len(order) else []
        for number, rows in zip(numbers.tolist(), groups, strict=True):
            more = BitMap64(np.sort(found.positions[rows]).astype(np.uint64))
            added[number] = added[number] | more if number in added else more
    removed: dict[str, BitMap64] = {}
    gone: list[DataFile] = []
    for number, more in sorted(added.items()):
        file = liveness.files[number]
        vector = liveness.vectors.get(file.name)
        if len(more) + (0 if vector is None else vector.rows) == file.rows:
            gone.append(file)
        else:
            removed[file.name] = more | liveness.removed(file.name)
    return removed, gone, count


def indexed(
    target: Target, runs: tuple[Run, ...], rows: Sequence[FileInfo], removed: Removed
) -> tuple[Run, ...]:
    """The table's index after this epoch. Raises `IndexDamagedError`, `CorruptError`."""
    return add_files(
        target.folder,
        runs,
        f"index/{target.stage}.run",
        Identity.of(target.identity, target.file_schema),
        rows,
        removed.vectors,
        [file.name for file in removed.gone],
    )


def _found(task: RemovalTask, liveness: Liveness, runs: Sequence[RunReader]) -> Found:
    """The rows that are removed: of each key its row, or of each kind of row as many as are to go."""
    target, staged = task.target, task.staged
    identity = Identity.of(target.identity, target.file_schema)
    digests, counts = [], []
    for file in staged.deletes:
        table = read_partial(file.path)
        digests.append(identity.digests([one(table, name) for name in target.identity]))
        counts.append(np.ones(len(table), np.int64))
    for file in staged.removals:
        table = read_data(file.path)
        digests.append(identity.digests([one(table, f"c{i}") for i in range(len(target.columns))]))
        counts.append(np.asarray(table.column("n").combine_chunks()).astype(np.int64))
    if not digests:
        return NOTHING
    wanted = np.concatenate(counts)
    found = find(runs, liveness, together(digests), wanted)
    if staged.deletes:
        if not target.may_lack_rows:
            check_found(target, len(found), len(wanted))
        return found
    there = np.bincount(found.wanted, minlength=len(wanted))
    if len(short := np.flatnonzero(there != wanted)):
        check_found(target, int(there[short[0]]), int(wanted[short[0]]))
    return found


def _patches(task: RemovalTask, liveness: Liveness, found: Found) -> Iterator[PatchedRows]:
    """Where the rows are that patches complete: each is among those that are removed."""
    target, staged = task.target, task.staged
    names = [f"s{i}" for i in range(len(target.identity))]
    patches = [read_data(each.file.path, names) for each in staged.patches]
    deletes = [read_partial(file.path) for file in staged.deletes]
    types = [target.file_schema.field(name).type for name in target.identity]
    keys = [
        pa.concat_arrays([pa.array([], t), *(one(d, name) for d in deletes)])
        for name, t in zip(target.identity, types, strict=True)
    ]
    wanted = [
        pa.concat_arrays([one(some, name).cast(kind) for some in patches])
        for name, kind in zip(names, types, strict=True)
    ]
    there, here = row_codes([keys, wanted])
    place = np.full(int(max(there.max(initial=-1), here.max(initial=-1))) + 1, -1, np.int64)
    place[there[found.wanted]] = np.arange(len(found))
    at = place[here]
    if target.row_filter is not None and (at < 0).any():
        raise _LacksError(
            "an UPDATE moved a row into its row filter, or may have done so, and an unchanged TOAST value was not sent; with"
            " REPLICA IDENTITY FULL it is sent"
        )
    check_found(target, int((at >= 0).sum()), len(here))
    prefix = f"{task.scratch}/{target.stage}-{target.scratch_name}-places"
    first = 0
    for number, (its, some) in enumerate(zip(staged.patches, patches, strict=True)):
        mine = at[first : first + len(some)]
        first += len(some)
        yield from _places(f"{prefix}-{number}", its, liveness, found, mine)


def _places(
    prefix: str, patches: Patches, liveness: Liveness, found: Found, at: Int64s
) -> Iterator[PatchedRows]:
    """The patches of one file, which complete the rows `at` of what was found: by groups of data files."""
    files = found.files[at].astype(np.int64)
    numbers = np.unique(files).tolist()
    groups = in_groups([liveness.files[n] for n in numbers])
    for part, group in enumerate(groups):
        mine = [n for n in numbers if liveness.files[n] in group]
        rows = np.flatnonzero(np.isin(files, mine))
        # In the order of the files.
        rows = rows[np.lexsort((found.positions[at[rows]], files[rows]))]
        numbered = {n: i for i, n in enumerate(mine)}
        places = pa.table(
            {
                "patch": pa.array(rows),
                "file": pa.array([numbered[n] for n in files[rows].tolist()], pa.int64()),
                "position": pa.array(found.positions[at[rows]].astype(np.int64)),
            }
        )
        yield PatchedRows(group, write_partial(f"{prefix}-{part}.arrow", places), patches)


def _to_rewrite(
    task: RemovalTask,
    files: Sequence[DataFile],
    liveness: Liveness,
    removed: dict[str, BitMap64],
) -> list[DataFile]:
    """The data files whose living rows go into new ones: all of them, if a TRUNCATE marks them.

    Small ones, if they are many in their partition; and others that are half dead, unless a maintainer rewrites them, or have
    any removed row in a table that is copied on write.
    """

    def dead(file: DataFile) -> int:
        if file.name in removed:
            return len(removed[file.name])
        vector = liveness.vectors.get(file.name)
        return 0 if vector is None else vector.rows

    def is_due(file: DataFile) -> bool:
        if file.size < SMALL and small[file.partition] > task.small_files:
            return True
        if task.target.copy_on_write:
            return dead(file) > 0
        # A maintainer leaves files of an earlier partition spec to the writer.
        maintained = task.target.is_maintained and task.target.arrangement.is_current(
            file.partition
        )
        return not maintained and file.size >= SMALL and 2 * dead(file) > file.rows

    if task.staged.emptied is not None:
        return [*files]
    small = Counter(file.partition for file in files if file.size < SMALL)
    return [file for file in files if is_due(file)]


def _rewrites(
    task: RemovalTask,
    files: Sequence[DataFile],
    liveness: Liveness,
    removed: dict[str, BitMap64],
) -> list[Rewrite]:
    target, found = task.target, []
    for number, group in enumerate(_to_combine(files)):
        bitmaps = {f.name: removed.get(f.name) or liveness.removed(f.name) for f in group}
        path = f"{task.scratch}/{target.stage}-{target.scratch_name}-rewrite-{number}.arrow"
        places = write_partial(path, bitmaps_table(bitmaps))
        found.append(Rewrite(group, places, emptied=task.staged.emptied))
    return found


def _to_combine(files: Sequence[DataFile]) -> Iterator[tuple[DataFile, ...]]:
    """The files in groups, each of one partition."""
    by_partition = defaultdict(list)
    for file in files:
        by_partition[file.partition].append(file)
    for same in by_partition.values():
        yield from in_groups(same)


def check_found(target: Target, found: int, wanted: int) -> None:
    """Raise `CorruptError` if the table does not have the rows that the log says it has."""
    if found != wanted:
        raise CorruptError(
            f"expected {wanted} rows in the table before the epoch, found {found}",
            where=target.name,
            repair=f"tuskline table resync {target.name}",
        )


def one(table: pa.Table, name: str) -> pa.Array:
    """A column as one array."""
    column = table.column(name)
    chunks = column.chunks
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays([pa.array([], column.type), *chunks])


def positions(removed: BitMap64) -> Int64s:
    """Positions as indexes of an array."""
    return np.frombuffer(removed.to_array(), np.uint64).astype(np.int64)
