"""What the executors do for an epoch: read a range of the log, fold it, write each table's files.

A table whose changes are all in one range gets its data files at once. Where an epoch is large enough to be
read in several ranges, each range leaves a partial fold for every table, and a second task composes a
table's partials in order and writes its files. Either way a table gets one file of rows and one of keys.

Runs without Spark: a task is a function of its arguments, and what it returns is small.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from spark_consumers.bags import BagFold, compose_bags, fold_bag
from spark_consumers.decode import ChangeBatch, decode_entries
from spark_consumers.fold import Fold, compose, fold
from spark_consumers.lakehouse.files import read_partial, write_data, write_partial, write_table
from spark_consumers.lakehouse.table_format import FileInfo
from spark_consumers.serial import fold_from_table, fold_to_table
from spark_consumers.types import arrow_schema
from walsender_bridge import fail_point
from walsender_bridge.change_log.client import ReplicaClient
from walsender_bridge.errors import NotSupportedError

#: Changes of one table that are held unfolded.
_PENDING_ROWS = 200_000


@dataclass(frozen=True)
class Target:
    """One table as a task needs it.

    `name` is `stream.schema.table`, `relation` its last two parts, `prefix` the path that its data files
    begin with. `columns` are PostgreSQL's columns as Arrow types, `file_schema` those of the data files
    (`ROW_ID` last, if `key` is empty). Changes of transactions whose commit record starts below
    `start_lsn` are left out. `relation_id` is the OID of the table that was copied.
    """

    name: str
    relation: str
    prefix: str
    columns: pa.Schema
    file_schema: pa.Schema
    key: tuple[str, ...]
    start_lsn: int
    relation_id: int

    @property
    def key_positions(self) -> tuple[int, ...]:
        """Where the key's columns are among the columns."""
        return tuple(self.columns.get_field_index(name) for name in self.key)


@dataclass(frozen=True)
class RangeTask:
    """Read [start, end) of a stream for some tables; `number` orders the ranges of an epoch.

    The tables in `whole` get their files; the others leave partials in `scratch`.
    """

    stream: str
    address: str
    start: int
    end: int
    number: int
    version: int
    scratch: str
    targets: tuple[Target, ...]
    whole: frozenset[str]


@dataclass(frozen=True)
class ComposeTask:
    """Compose one table's partials, in order, and write its files."""

    target: Target
    partials: tuple[str, ...]
    version: int
    scratch: str
    changes: int


@dataclass(frozen=True)
class Staged:
    """What is written of one table.

    `partial`: a fold, if other ranges have changes of this table too. Otherwise files: `rows`, `deletes`
    (keys), and what only the table itself can complete: `patches` (rows with columns that were never
    sent; `rows` is then no data file yet) and `removals` (rows of a bag, with how many of each go). `added`: rows more than before, or
    than none if `truncated`. `changes`: how many were folded.
    """

    table: str
    number: int
    changes: int
    partial: str | None = None
    rows: FileInfo | None = None
    deletes: FileInfo | None = None
    patches: FileInfo | None = None
    removals: FileInfo | None = None
    truncated: bool = False
    added: int = 0


@dataclass
class _Pending:
    """One table's changes so far: folded, and not yet."""

    target: Target
    changes: int = 0
    rows: int = 0
    batches: list[ChangeBatch] = field(default_factory=list)
    folded: Fold | BagFold | None = None

    def add(self, batch: ChangeBatch) -> None:
        self.changes += len(batch)
        self.rows += len(batch)
        self.batches.append(batch)
        if self.rows >= _PENDING_ROWS:
            self.fold()

    def fold(self) -> Fold | BagFold:
        """All that came so far, folded."""
        if self.batches:
            new: Fold | BagFold
            if self.target.key:
                new = fold(self.batches, self.target.key_positions)
            else:
                new = fold_bag(self.batches)
            self.folded = new if self.folded is None else composed(self.folded, new)
            self.batches, self.rows = [], 0
        assert self.folded is not None
        return self.folded


def composed(first: Fold | BagFold, then: Fold | BagFold) -> Fold | BagFold:
    """The fold of the changes of both."""
    if isinstance(first, BagFold):
        assert isinstance(then, BagFold)
        return compose_bags(first, then)
    assert isinstance(then, Fold)
    return compose(first, then)


def run_range(task: RangeTask) -> list[Staged]:
    """Read, fold and write. Raises the log's errors, and `NotSupportedError` for a changed table."""
    targets = {target.relation: target for target in task.targets}
    pending: dict[str, _Pending] = {}
    with ReplicaClient(task.address) as replica:

        def schema(digest: bytes) -> bytes:
            return replica.schemas(task.stream, [digest])[digest]

        entries = replica.read(task.stream, task.start, task.end, relations=sorted(targets))
        for batch in decode_entries(entries, schema, relations=targets):
            target = targets[batch.relation.full_name]
            fitting = _fit(batch, target)
            if len(fitting):
                pending.setdefault(target.name, _Pending(target)).add(fitting)
            fail_point.hit("staging")
    return [_stage(task, table) for table in pending.values()]


def _stage(task: RangeTask, table: _Pending) -> Staged:
    name, folded = table.target.name, table.fold()
    if name in task.whole:
        return write_fold(
            table.target, folded, task.version, task.scratch, task.number, table.changes
        )
    path = f"{task.scratch}/{task.number}-{name}.arrow"
    write_partial(path, fold_to_table(folded))
    return Staged(name, task.number, table.changes, partial=path)


def run_compose(task: ComposeTask) -> Staged:
    """Compose a table's partials and write its files."""
    key = task.target.key_positions
    whole, *rest = (fold_from_table(read_partial(path), key) for path in task.partials)
    for part in rest:
        whole = composed(whole, part)
    return write_fold(task.target, whole, task.version, task.scratch, 0, task.changes)


def write_fold(
    target: Target, folded: Fold | BagFold, version: int, scratch: str, number: int, changes: int
) -> Staged:
    """Write a table's files."""
    if isinstance(folded, BagFold):
        rows = folded.rows()
        ids = [f"{version}-{number}-{i}" for i in range(len(rows[0]))]
        gone, counts = folded.removals()
        removals = None
        if len(counts):
            fields = {f"c{i}": column for i, column in enumerate(gone)}
            removals = write_table(
                f"{scratch}/{target.name}-removals.parquet",
                pa.table({**fields, "n": pa.array(counts), "i": np.arange(len(counts))}),
            )
        return Staged(
            target.name,
            number,
            changes,
            rows=write_data(
                f"{target.prefix}.parquet", [*rows, pa.array(ids, pa.string())], target.file_schema
            ),
            removals=removals,
            truncated=folded.truncated,
            added=folded.added,
        )
    keys = pa.schema([target.file_schema.field(name) for name in target.key])
    patches = _write_patches(target, folded, scratch)
    # Where there are patches, the one file of rows is written when they are complete.
    path = f"{scratch}/{target.name}-rows.parquet" if patches else f"{target.prefix}.parquet"
    return Staged(
        target.name,
        number,
        changes,
        rows=write_data(path, folded.rows(), target.file_schema),
        deletes=write_data(f"{target.prefix}-deletes.parquet", folded.deletes(), keys),
        patches=patches,
        truncated=folded.truncated,
        added=folded.added,
    )


def _write_patches(target: Target, folded: Fold, scratch: str) -> FileInfo | None:
    at = folded.patches
    if not len(at):
        return None
    assert folded.unset is not None
    assert folded.source is not None
    rows = pa.array(at)
    fields = {f"c{i}": column.take(rows) for i, column in enumerate(folded.columns)}
    fields |= {f"u{i}": pa.array(folded.unset[at, i]) for i in range(len(folded.columns))}
    fields |= {f"s{i}": column.take(rows) for i, column in enumerate(folded.source)}
    return write_table(f"{scratch}/{target.name}-patches.parquet", pa.table(fields))


def _fit(batch: ChangeBatch, target: Target) -> ChangeBatch:
    """The batch without what the initial copy has.

    Raises `NotSupportedError` if the table is not what it was when it was copied.
    """
    relation = batch.relation
    if not len(batch) or batch.commit_lsn[-1] < target.start_lsn:
        return _rows(batch, np.zeros(len(batch), np.bool_))
    if relation.oid != target.relation_id:
        # Its new rows would be added to the old table's.
        raise NotSupportedError(
            "the table was dropped and another was made under its name",
            where=target.name,
            repair="this version copies it anew only into a new lake",
        )
    sent = arrow_schema(relation.columns)
    if sent != target.columns:
        # Columns are sent in the order in which they were made: another order is a column that was dropped
        # and made anew, with other values in the old rows.
        raise NotSupportedError(
            f"its columns changed from ({_told(target.columns)}) to ({_told(sent)})",
            where=target.name,
            repair="this version does not follow schema changes: undo it, or make a new lake",
        )
    if target.key and relation.replica_identity != "f" and _is_told_by_key(batch):
        identity = {column.name for column in relation.columns if column.is_key}
        if identity != set(target.key):
            raise NotSupportedError(
                f"its replica identity changed from {sorted(target.key)} to {sorted(identity)}",
                where=target.name,
                repair="set it back, or use REPLICA IDENTITY FULL",
            )
    if batch.commit_lsn[0] < target.start_lsn:
        return _rows(batch, batch.commit_lsn >= target.start_lsn)
    return batch


def _is_told_by_key(batch: ChangeBatch) -> bool:
    return bool((batch.ops == ord("U")).any() or (batch.ops == ord("D")).any())


def _told(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name} {f.type}" for f in schema)


def _rows(batch: ChangeBatch, mask: np.ndarray) -> ChangeBatch:
    chosen = pa.array(mask)
    return replace(
        batch,
        ops=batch.ops[mask],
        commit_lsn=batch.commit_lsn[mask],
        xid=batch.xid[mask],
        commit_time=batch.commit_time[mask],
        offset=batch.offset[mask],
        version=batch.version[mask],
        sequence=batch.sequence[mask],
        columns=[c.filter(chosen) for c in batch.columns],
        unchanged=None if batch.unchanged is None else batch.unchanged[mask],
        old_columns=None
        if batch.old_columns is None
        else [c.filter(chosen) for c in batch.old_columns],
        old_kind=batch.old_kind[mask],
    )


def total_changes(staged: Iterable[Staged]) -> int:
    """How many changes went into these."""
    return sum(s.changes for s in staged)


def in_order(staged: Sequence[Staged]) -> list[Staged]:
    """By the ranges that they come from."""
    return sorted(staged, key=lambda s: s.number)
