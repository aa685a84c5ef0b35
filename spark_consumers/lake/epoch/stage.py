"""What the executors do for an epoch: read a range of the log, fold it, write each table's files.

A table whose changes are all in one range gets its data files at once. Where an epoch is large enough to be
read in several ranges, each range leaves a partial fold for every table, and a second task composes a
table's partials in order and writes its files. A very large epoch has several such tasks for a table: its partials are divided by
the digests of its keys (`divided`), and each task composes one part of each. So what a task holds is bounded, and a table gets a
file of rows and one of keys for each part.

Runs without Spark: a task is a function of its arguments, and what it returns is small.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pyarrow as pa

from spark_consumers.decode.entries import ChangeBatch, decode_entries, rows_of
from spark_consumers.decode.frames import Transaction
from spark_consumers.decode.spans import MAX_BUFFER
from spark_consumers.fold.history import compose_history, fold_history
from spark_consumers.fold.kept import compose_kept, fold_kept
from spark_consumers.fold.keyed import ABSENT, Fold, compose, fold
from spark_consumers.fold.multiset import MultisetFold, compose_multisets, fold_multiset
from spark_consumers.fold.serial import fold_from_table
from spark_consumers.lake.epoch import divided, quarantine
from spark_consumers.lake.epoch.divided import Share
from spark_consumers.lake.epoch.feed_rows import FeedFiles, FeedTarget
from spark_consumers.lake.epoch.packed import PackedTable, TaskTables
from spark_consumers.lake.epoch.quarantine import QuarantineFile
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.arranged_files import write_arranged
from spark_consumers.lake.format.data_files import (
    read_partial,
    write_data,
    write_partial,
    write_table,
)
from spark_consumers.lake.format.table_format import ROW_ID, FileInfo
from spark_consumers.lake.tables.chunks import missing
from spark_consumers.lake.tables.fault import TableFault, fault_of
from spark_consumers.lake.tables.recorded import DDL_TABLE, TableRecord, records_in
from spark_consumers.lake.tables.row_filter import RowFilter
from spark_consumers.lake.tables.schema_match import (
    SchemaMismatch,
    by_layout,
    columns_of,
    conformed,
    mismatch,
    unexpected,
)
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.pgoutput import Relation
from walsender_bridge.postgres.table_layout import CURRENT, HISTORY, SOFT_DELETE
from walsender_bridge.runtime import fail_point

#: Bytes of a column that a task composes: what Arrow's arrays of texts can hold.
_MOST_BYTES = MAX_BUFFER
#: Changes of one table that are held unfolded.
_PENDING_ROWS = 200_000
#: By the mode of a table.
_COMPOSE: Final = {CURRENT: compose, SOFT_DELETE: compose_kept, HISTORY: compose_history}


@dataclass(frozen=True)
class RangeTask:
    """Read [start, end) of a stream for some tables; `number` orders the ranges of an epoch.

    `addresses`: of the replicas to read from, in the order to try. The tables in `whole` get their files, whose names begin
    with `stage`; the others leave partials in `scratch`. `begun`: see `decode_entries`; None: the range starts where a commit ends. `parts`: in how many parts partials are
    written, where they can be divided. `before_lsn`: only changes of transactions whose commit record starts below it count; None: all.
    """

    stream: str
    addresses: tuple[str, ...]
    start: int
    end: int
    number: int
    scratch: str
    stage: str
    tables: tuple[PackedTable, ...]
    whole: frozenset[str]
    begun: Transaction | None = None
    parts: int = 1
    before_lsn: Lsn | None = None


@dataclass(frozen=True)
class ComposeTask:
    """Compose one table's partials, in order, and write its files. Without partials, only its quarantined rows.

    `share`: only that part of each of them, whose files the target's prefix is of.
    """

    target: Target
    partials: tuple[str, ...]
    scratch: str
    changes: int
    share: Share | None = None


@dataclass(frozen=True)
class Patches:
    """A file of rows with columns that were never sent, and the rows that go into one data file with them, once completed."""

    file: FileInfo
    rows: FileInfo | None


@dataclass(frozen=True)
class Staged:
    """What is written of one table.

    `partial`: a fold, if other ranges have changes of this table too, in so many `parts`. Otherwise files: `rows` (one for each
    partition), `deletes` (keys), and what only the table itself can complete: `patches` (rows with columns that were never
    sent) and `removals` (rows of a multiset, with how many of each are removed). `added`: by how many rows the table grows
    (if `truncated`, from none), as far as the rows that are to be removed are there. `emptied`: see `Fold`. `changes`: how many were folded. `quarantined`: the quarantined rows. `partitions`: those
    that have changes, and are not among the target's, or had them too early. `linked`: see `divided`.
    """

    table: str
    number: int
    changes: int
    partial: str | None = None
    rows: tuple[FileInfo, ...] = ()
    deletes: tuple[FileInfo, ...] = ()
    patches: tuple[Patches, ...] = ()
    removals: tuple[FileInfo, ...] = ()
    truncated: bool = False
    added: int = 0
    quarantined: tuple[QuarantineFile, ...] = ()
    partitions: frozenset[int] = frozenset()
    parts: int = 1
    linked: str | None = None
    emptied: tuple[int, int] | None = None

    @property
    def changes_table(self) -> bool:
        """Whether the table gets other rows; if not, only quarantined ones have changed."""
        return (
            self.truncated
            or self.emptied is not None
            or any((self.rows, self.deletes, self.removals, self.patches))
        )


@dataclass(frozen=True)
class Recorded:
    """A schema change of a table in the range."""

    table: str
    record: TableRecord


@dataclass(frozen=True)
class Fed:
    """Data files of a table's change feed, with the changes of the range; or why the feed cannot have these."""

    table: str
    files: tuple[FileInfo, ...] = ()
    fault: TableFault | None = None


#: What a range leaves of each of its tables.
Outcome = Staged | SchemaMismatch | TableFault | Recorded | Fed


@dataclass
class PendingTable:
    """One table's changes so far: folded and unfolded."""

    target: Target
    changes: int = 0
    rows: int = 0
    batches: list[ChangeBatch] = field(default_factory=list)
    folded: Fold | MultisetFold | None = None
    partitions: set[int] = field(default_factory=set)

    def add(self, batch: ChangeBatch) -> None:
        """Take more changes, which come after those that are there."""
        self.changes += len(batch)
        self.rows += len(batch)
        self.batches.append(batch)
        self.partitions |= unexpected(batch, self.target.partitions)
        if self.rows >= _PENDING_ROWS:
            self.fold()

    def fold(self) -> Fold | MultisetFold:
        """All changes so far, folded. Raises `CorruptError` with the table's name."""
        if self.batches:
            new: Fold | MultisetFold
            with of_table(self.target):
                if quarantine.has_unrepresentable(self.batches):
                    new = quarantine.fold_wide(self.batches, self.target.key_positions)
                elif self.target.mode == HISTORY:
                    new = fold_history(self.batches, self.target.key_positions)
                elif self.target.mode == SOFT_DELETE:
                    new = fold_kept(self.batches, self.target.key_positions)
                elif self.target.key:
                    new = fold(self.batches, self.target.key_positions)
                else:
                    new = fold_multiset(self.batches)
                before = self.folded
                self.folded = new if before is None else composed(self.target, before, new)
            self.batches, self.rows = [], 0
        assert self.folded is not None
        return self.folded


@contextmanager
def of_table(target: Target) -> Iterator[None]:
    """Changes that do not fold are a fault of this table, which a copy repairs."""
    try:
        yield
    except (CorruptError, NotSupportedError) as error:
        raise type(error)(
            error.what, where=target.name, repair=f"tuskline table resync {target.name}"
        ) from None


def composed(
    target: Target, first: Fold | MultisetFold, then: Fold | MultisetFold
) -> Fold | MultisetFold:
    """The fold of the changes of both. Raises `CorruptError`, and `NotSupportedError` if they may be too large for Arrow."""
    first, then = quarantine.alike(first, then)
    for column, more in zip(first.columns, then.columns, strict=True):
        if column.nbytes + more.nbytes > _MOST_BYTES:
            raise NotSupportedError(
                "the changes of one epoch that must be composed by one task have more than 2 GiB in one column"
            )
    if isinstance(first, MultisetFold):
        assert isinstance(then, MultisetFold)
        return compose_multisets(first, then)
    assert isinstance(then, Fold)
    return _COMPOSE[target.mode](first, then)


@dataclass
class RangeFolds:
    """What a range has of its tables: their changes, those that do not fit, faults and feeds, each by the table's name; and schema changes.

    `feed_faults`: of feeds alone, whose tables can continue.
    """

    tables: dict[str, PendingTable] = field(default_factory=dict)
    mismatches: dict[str, list[SchemaMismatch]] = field(default_factory=dict)
    faults: dict[str, TableFault] = field(default_factory=dict)
    recorded: list[Recorded] = field(default_factory=list)
    feeds: dict[str, FeedFiles] = field(default_factory=dict)
    feed_faults: dict[str, TableFault] = field(default_factory=dict)

    @property
    def whole(self) -> Iterator[PendingTable]:
        """The tables of which all changes fit."""
        return (
            table
            for name, table in self.tables.items()
            if name not in self.mismatches and name not in self.faults
        )

    @property
    def found(self) -> list[SchemaMismatch | TableFault]:
        """Why the others cannot continue."""
        return [*(m for found in self.mismatches.values() for m in found), *self.faults.values()]


def run_range(task: RangeTask, tables: TaskTables) -> list[Outcome]:
    """Read, fold and write. For a table with a change of another shape its mismatches are returned instead.

    For a table whose changes cannot be applied that fault is returned. `tables`: the task's. Raises the log's errors.
    """
    read = read_range(task, tables)
    staged = []
    for table in read.whole:
        with caught(table.target, read.faults):
            staged.append(_stage(task, table))
    return [*staged, *_fed(read, tables), *read.found, *read.recorded]


def _fed(read: RangeFolds, tables: TaskTables) -> Iterator[Fed]:
    """The feeds' files. What makes one of them fail is no fault of its table, and none of the others'."""
    for name, feed in read.feeds.items():
        files: tuple[FileInfo, ...] = ()
        if name not in read.feed_faults:
            with caught(tables[name], read.feed_faults):
                files = feed.close()
        yield Fed(name, files, read.feed_faults.get(name))


def read_range(task: RangeTask, tables: TaskTables) -> RangeFolds:
    """Read the changes of these tables. Raises the log's errors."""
    read = RangeFolds()

    def failed(relation: Relation, error: Exception) -> None:
        found = [fault_of(target.name, error) for target in tables.of(relation)]
        read.faults.update({fault.table: fault for fault in found if fault is not None})
        if None in found:
            raise error

    with StreamReader(task.stream, task.addresses, holds=task.end) as reader:

        def schema(digest: bytes) -> bytes:
            return reader.schemas([digest])[digest]

        wanted = {*tables.relations, DDL_TABLE}
        entries = reader.read(task.start, task.end, relations=sorted(wanted))
        keeping = tables.keeping_unrepresentable()
        batches = decode_entries(
            entries,
            schema,
            relations=wanted,
            keep_unrepresentable=keeping,
            failed=failed,
            begun=task.begun,
            masking=tables.masking,
        )
        for decoded in batches:
            batch = decoded
            if task.before_lsn is not None:
                batch = rows_of(decoded, decoded.commit_lsn < task.before_lsn)
            if batch.relation.full_name == DDL_TABLE:
                read.recorded += _recorded(batch, tables)
                continue
            for target in tables.of(batch.relation):
                if target.name not in read.faults:
                    with caught(target, read.faults):
                        _take(task, target, batch, read)
            fail_point.hit("staging")
    return read


def _recorded(batch: ChangeBatch, tables: TaskTables) -> Iterator[Recorded]:
    """The schema changes of the task's tables that their copies do not have."""
    for record in records_in(batch):
        for target in tables.of_oid(record.relation):
            first = target.chunks[0][1] if target.chunks else target.start_lsn
            if record.commit_lsn >= first:
                yield Recorded(target.name, record)


@contextmanager
def caught(target: Target, faults: dict[str, TableFault]) -> Iterator[None]:
    """Record a fault of this table alone, and continue with the others."""
    try:
        yield
    except Exception as error:
        fault = fault_of(target.name, error)
        if fault is None:
            raise
        faults[fault.table] = fault


def _take(task: RangeTask, target: Target, batch: ChangeBatch, read: RangeFolds) -> None:
    """Add the batch to what is pending of its table, or to its mismatches if it does not fit."""
    pending, mismatches = read.tables, read.mismatches
    if target.feed is not None and target.name not in read.feed_faults:
        with caught(target, read.feed_faults):
            _feed(task, target, target.feed, batch, read)
    new, reason = missing(batch, target.start_lsn, target.chunks, target.key, target.columns.names)
    if not len(new):
        return
    for layout, part in by_layout(new, target.layouts):
        why = reason
        if why is None:
            why = mismatch(part, target.columns, layout, target.key, target.relation_id)
        if why is None and target.name not in mismatches:
            table = pending.setdefault(target.name, PendingTable(target))
            table.add(conformed(part, target.columns, layout))
            continue
        # If it fits: back to the earlier state after another one. That is a change, too.
        _note(mismatches.setdefault(target.name, []), task.number, target, part, why or "")


def _feed(
    task: RangeTask, target: Target, to: FeedTarget, batch: ChangeBatch, read: RangeFolds
) -> None:
    """Add the batch to the table's feed. Of a table that was copied, this may be the only place for changes that the copy has already.

    What does not fit is left out: if it is not older than the copy, the table's mismatch ends the epoch.
    """
    feed = read.feeds.setdefault(target.name, FeedFiles(to, task.number, target.key_positions))
    for layout, part in by_layout(batch, target.layouts):
        if mismatch(part, target.columns, layout, target.key, target.relation_id) is None:
            # As it was sent: a column that came later is NULL, whatever its default.
            sent = layout and replace(layout, defaults=())
            feed.add(conformed(part, target.columns, sent))


def _note(
    known: list[SchemaMismatch], number: int, target: Target, batch: ChangeBatch, reason: str
) -> None:
    columns = columns_of(batch.sent)
    if not known or (known[-1].columns, known[-1].reason) != (columns, reason):
        key = batch.sent.key
        offset = int(batch.offset[0])
        known.append(SchemaMismatch(target.name, number, offset, columns, key, reason))


def _stage(task: RangeTask, table: PendingTable) -> Staged:
    name, folded = table.target.name, table.fold()
    if name in task.whole:
        staged = write_fold(table.target, folded, task.scratch, task.number, table.changes)
    else:
        path = f"{task.scratch}/{task.number}-{table.target.scratch_name}"
        partial, linked = divided.write(path, table.target, folded, task.parts)
        staged = Staged(name, task.number, table.changes, partial, parts=task.parts, linked=linked)
    return replace(staged, partitions=frozenset(table.partitions))


def composing_of(target: Target, staged: Sequence[Staged], scratch: str) -> list[ComposeTask]:
    """The tasks that compose a table's partials, which are in order: one for each part, and one for linked keys, if there are any."""
    partials = tuple(one.partial for one in staged if one.partial is not None)
    linked = tuple(one.linked for one in staged if one.linked is not None)
    changes = total_changes(staged)
    return [
        ComposeTask(target, partials, scratch, changes)
        if share is None
        else ComposeTask(
            replace(target, prefix=f"{target.prefix}-part{share.part}"),
            partials,
            f"{scratch}/part{share.part}",
            0 if share.part else changes,
            share,
        )
        for share in divided.shares(staged[0].parts, linked)
    ]


def joined(parts: Sequence[Staged]) -> Staged:
    """What is staged of a table, from its parts. Raises `UnsupportedValueError` if too many rows are quarantined."""
    if len(parts) == 1:
        return parts[0]
    quarantine.check_count(parts[0].table, sum(f.rows for part in parts for f in part.quarantined))
    return replace(
        parts[0],
        changes=total_changes(parts),
        rows=tuple(file for part in parts for file in part.rows),
        deletes=tuple(file for part in parts for file in part.deletes),
        patches=tuple(file for part in parts for file in part.patches),
        removals=tuple(file for part in parts for file in part.removals),
        added=sum(part.added for part in parts),
        quarantined=tuple(file for part in parts for file in part.quarantined),
    )


def composed_tables(target: Target, tables: Iterable[pa.Table]) -> Fold | MultisetFold | None:
    """The folds in these tables, composed in their order; None without any. Raises `CorruptError` with the table's name."""
    whole: Fold | MultisetFold | None = None
    with of_table(target):
        for table in tables:
            part = fold_from_table(table)
            whole = part if whole is None else composed(target, whole, part)
    return whole


def run_compose(task: ComposeTask) -> Staged:
    """Compose a table's partials and write its files."""
    share = task.share
    tables = (
        divided.read(path, task.target, share) if share else read_partial(path)
        for path in task.partials
    )
    whole = composed_tables(task.target, tables)
    return write_fold(task.target, whole, task.scratch, 0, task.changes, task.share)


def with_held(
    target: Target, folded: Fold | MultisetFold | None, share: Share | None = None
) -> Fold | MultisetFold:
    """The fold (None: there are no changes), which is that part of it, behind the table's quarantined rows, if it has any."""
    before = quarantine.held(target)
    if before is not None:
        if share is not None:
            before = divided.chosen(before, target, share)
        with of_table(target):
            folded = before if folded is None else composed(target, before, folded)
    assert folded is not None
    return folded if target.row_filter is None else filtered(target, target.row_filter, folded)


def filtered(
    target: Target, condition: RowFilter, folded: Fold | MultisetFold
) -> Fold | MultisetFold:
    """The fold of a table that has only the rows that meet the condition.

    The fold has each row as the source has it behind all changes, and a key whose row was there goes in any case, if the table has
    it. So it is sufficient to leave out rows that do not meet the condition. Of a patch that may not be known yet: then it is
    evaluated when the patch is completed.
    """
    names = target.columns.names
    meets = condition.matches(names, folded.columns)
    if isinstance(folded, MultisetFold):
        chosen = pa.array(meets)
        rows = [column.filter(chosen) for column in folded.columns]
        return replace(folded, columns=rows, delta=folded.delta[meets])
    unset = folded.unset
    if unset is None:
        unset = np.zeros((len(folded), len(names)), np.bool_)
    read = [place for place, name in enumerate(names) if name in condition.columns]
    known = ~unset[:, read].any(axis=1)
    state = np.where(known & ~meets, ABSENT, folded.state).astype(np.uint8)
    return replace(folded, state=state)


def write_fold(
    target: Target,
    folded: Fold | MultisetFold | None,
    scratch: str,
    number: int,
    changes: int,
    share: Share | None = None,
) -> Staged:
    """Write a table's files, those of its quarantined rows too. `share`: the fold is that part of it."""
    folded = with_held(target, folded, share)
    columns = len(target.columns)
    quarantined: list[pa.Array] | None = None
    if isinstance(folded, MultisetFold):
        if len(folded.columns) > columns:
            with of_table(target):
                folded, quarantined = quarantine.multiset_parts(folded, columns)
        rows = folded.rows()
        hidden = [pa.nulls(len(rows[0]), f.type) for f in target.file_schema if f.name == ROW_ID]
        gone, counts = folded.removals()
        removals: tuple[FileInfo, ...] = ()
        if len(counts):
            fields = {f"c{i}": column for i, column in enumerate(gone)}
            file = write_table(
                f"{scratch}/{target.scratch_name}-removals.parquet",
                pa.table({**fields, "n": pa.array(counts), "i": np.arange(len(counts))}),
            )
            removals = (file,)
        return Staged(
            target.name,
            number,
            changes,
            rows=write_arranged(
                f"{target.prefix}.parquet",
                [*rows, *hidden],
                target.file_schema,
                target.arrangement,
            ),
            removals=removals,
            truncated=folded.truncated,
            added=folded.added,
            quarantined=_write_quarantined(target, quarantined),
        )
    whole, added = folded.rows(), folded.added
    if len(folded.columns) > columns:
        with of_table(target):
            found = quarantine.parts(folded, columns)
        whole, added, quarantined = found.rows, found.added, found.quarantined
    patches = _write_patches(target, folded, whole, scratch)
    return Staged(
        target.name,
        number,
        changes,
        rows=()
        if patches
        else write_arranged(
            f"{target.prefix}.parquet", whole, target.file_schema, target.arrangement
        ),
        deletes=_write_deletes(target, folded, scratch),
        patches=patches,
        truncated=folded.truncated,
        added=added,
        quarantined=_write_quarantined(target, quarantined),
        emptied=folded.emptied,
    )


def _write_quarantined(
    target: Target, quarantined: list[pa.Array] | None
) -> tuple[QuarantineFile, ...]:
    file = quarantine.write_quarantined(target, "rows", quarantined) if quarantined else None
    return () if file is None else (file,)


def _write_deletes(target: Target, folded: Fold, scratch: str) -> tuple[FileInfo, ...]:
    keys = pa.schema([target.file_schema.field(name) for name in target.identity])
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(folded.deletes()[: len(keys)], keys, strict=True)
    ]
    if not len(columns[0]):
        return ()
    path = f"{scratch}/{target.scratch_name}-deletes.arrow"
    return (FileInfo(write_partial(path, pa.table(columns, schema=keys)), len(columns[0]), 0),)


def _write_patches(
    target: Target, folded: Fold, whole: list[pa.Array], scratch: str
) -> tuple[Patches, ...]:
    """The file of the patches, if there are any, and one of the `whole` rows: data files are written when all rows are complete."""
    at = folded.patches
    if not len(at):
        return ()
    assert folded.unset is not None
    assert folded.source is not None
    rows = pa.array(at)
    fields = {f"c{i}": column.take(rows) for i, column in enumerate(folded.columns)}
    fields |= {f"u{i}": pa.array(folded.unset[at, i]) for i in range(len(folded.columns))}
    fields |= {f"s{i}": column.take(rows) for i, column in enumerate(folded.source)}
    path = f"{scratch}/{target.scratch_name}"
    file = write_table(f"{path}-patches.parquet", pa.table(fields))
    return (Patches(file, write_data(f"{path}-rows.parquet", whole, target.file_schema)),)


def total_changes(staged: Iterable[Staged]) -> int:
    """How many changes went into these."""
    return sum(s.changes for s in staged)


def in_order(staged: Sequence[Staged]) -> list[Staged]:
    """In the order of their ranges."""
    return sorted(staged, key=lambda s: s.number)
