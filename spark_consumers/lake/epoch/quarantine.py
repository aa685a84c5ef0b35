"""Rows with unrepresentable values: folded like all others, and kept beside their table.

A table with that policy is folded *wide* as soon as a value is unrepresentable: its own columns (NULL for an
unrepresentable value) are followed by PostgreSQL's text of each unrepresentable value (NULL for the others), and then by
the provenance of the change (`ABOUT`). A row is *quarantined* while it has any such text. The fold needs no special
case: an unsent column keeps its text as it keeps its value, a key is its columns and their texts, and each change that
replaces, moves, truncates or deletes a row does so to its texts.

Invariant: the table and its quarantined rows together are the source's table at the epoch's cut, and share no row.
The quarantined rows of all earlier epochs (`held`) are the first part of every fold, as rows that are there and that
the table does not have. So later changes of a row need no rule of their own: if it is representable, it is added to the
table; if not, it is written with the others; if it is deleted, it is in neither. Each epoch that changes the table
rewrites all its quarantined rows, in files that only the manifest names, so they belong to the epoch as the table does: a
replayed or abandoned round leaves nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath

import numpy as np
import pyarrow as pa

from spark_consumers.decode.entries import ChangeBatch
from spark_consumers.decode.spans import of_numbers
from spark_consumers.decode.types import ColumnType, apart, from_text
from spark_consumers.fold.keyed import PATCH, Bools, Bytes, Fold, fold
from spark_consumers.fold.multiset import MultisetFold, fold_multiset
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.data_files import read_data, write_table
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.store.place import place
from walsender_bridge.errors import CorruptError, UnsupportedValueError
from walsender_bridge.postgres.protocol.lsn import Lsn

#: The policies for a row with an unrepresentable value.
FAIL, QUARANTINE = "fail", "quarantine"
#: The last change of a quarantined row: its position in the log, its transaction, and the log's version (0
#: and NULL for the initial copy, which has its snapshot's LSN). `skipped`: an operator accepted that it is missing.
ABOUT = pa.schema(
    [
        ("offset", pa.int64()),
        ("lsn", pa.int64()),
        ("xid", pa.int64()),
        ("version", pa.int64()),
        ("commit_time", pa.int64()),
        ("skipped", pa.bool_()),
    ]
)
#: What the names of a file's columns begin with.
# On disk in lakes of all formats.
VALUE, UNREPRESENTABLE, ABOUT_IT = "value ", "unfit ", "about "
#: The limit of one table's quarantined rows, since every epoch that changes the table rewrites them.
MAX_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class QuarantineFile:
    """A file of quarantined rows (`path`), their number, and how many of them are skipped."""

    path: str
    rows: int
    skipped: int


@dataclass(frozen=True)
class FoldParts:
    """A wide fold, split: the rows for the table, and the whole quarantined rows."""

    rows: list[pa.Array]
    added: int
    quarantined: list[pa.Array]


@dataclass
class _WideBatch:
    """A batch as `FoldableChanges`, with the texts of unrepresentable values and each change's provenance."""

    ops: Bytes
    columns: list[pa.Array]
    unchanged: Bools | None
    old_columns: list[pa.Array] | None
    old_kind: Bytes


def width(columns: int) -> int:
    """How many columns a table of so many has when it is folded wide."""
    return 2 * columns + len(ABOUT)


def has_unrepresentable(batches: Sequence[ChangeBatch]) -> bool:
    """Whether these changes have an unrepresentable value."""
    return any(batch.unrepresentable or batch.old_unrepresentable for batch in batches)


def fold_wide(batches: Sequence[ChangeBatch], key: tuple[int, ...]) -> Fold | MultisetFold:
    """Fold changes wide; `key` are the positions of the table's key, none for a multiset."""
    wide = [_widened(batch) for batch in batches]
    if not key:
        return fold_multiset(wide, provenance=len(ABOUT))
    return fold(wide, _wide_key(key, len(batches[0].columns)), key_columns=len(key))


def alike(
    first: Fold | MultisetFold, then: Fold | MultisetFold
) -> tuple[Fold | MultisetFold, Fold | MultisetFold]:
    """Both folds, both wide if one of them is."""
    least = min(len(first.columns), len(then.columns))
    if len(first.columns) != len(then.columns):
        first, then = (_wide(f) if len(f.columns) == least else f for f in (first, then))
    return first, then


def held(target: Target) -> Fold | MultisetFold | None:
    """The quarantined rows of earlier epochs as the fold that comes before all others; None without any."""
    if not target.quarantine_files:
        return None
    table = pa.concat_tables([read_data(path) for path in target.quarantine_files])
    columns = [
        # A column that the table got since is NULL in them.
        table.column(field.name).combine_chunks()
        if field.name in table.column_names
        else pa.nulls(len(table), field.type)
        for field in file_schema(target.columns)
    ]
    if target.retry_quarantined:
        columns = _tried_again(columns, target.columns)
    count = len(table)
    if not target.key:
        inserts = _WideBatch(
            np.full(count, ord("I"), np.uint8), columns, None, None, np.zeros(count, np.uint8)
        )
        return fold_multiset([inserts], provenance=len(ABOUT))
    return Fold(
        _wide_key(target.key_positions, len(target.columns)),
        truncated=False,
        existed=np.zeros(count, np.bool_),
        state=np.ones(count, np.uint8),
        columns=columns,
    )


def parts(folded: Fold, columns: int) -> FoldParts:
    """A wide fold of a table with so many columns. Patches are left to `complete`, representable or not."""
    unrepresentable = is_unrepresentable(folded.columns, columns)
    there = folded.state != 0
    if (folded.existed & is_unrepresentable(folded.keys, len(folded.key) // 2)).any():
        raise CorruptError("a row with an unrepresentable key is missing from the quarantine")
    stays = there & ~unrepresentable
    whole = there & (folded.state != PATCH)
    added = int((stays & ~folded.existed).sum()) - int((folded.existed & ~stays).sum())
    return FoldParts(
        _chosen(folded.columns[:columns], whole & ~unrepresentable),
        added,
        _chosen(folded.columns, whole & unrepresentable),
    )


def multiset_parts(folded: MultisetFold, columns: int) -> tuple[MultisetFold, list[pa.Array]]:
    """The fold for the table, of `columns` columns, and the quarantined rows, with their multiplicity."""
    unrepresentable = is_unrepresentable(folded.columns, columns)
    if (unrepresentable & (folded.delta < 0)).any():
        raise CorruptError("an unrepresentable row is missing from the quarantine")
    fit = MultisetFold(
        folded.truncated,
        _chosen(folded.columns[:columns], ~unrepresentable),
        folded.delta[~unrepresentable],
    )
    aside = MultisetFold(
        truncated=False,
        columns=_chosen(folded.columns, unrepresentable),
        delta=folded.delta[unrepresentable],
    )
    return fit, aside.rows()


def is_unrepresentable(wide: Sequence[pa.Array], columns: int) -> Bools:
    """Which of these rows have an unrepresentable value; `wide` has that many columns, then their texts."""
    texts = wide[columns : 2 * columns]
    found = np.zeros(len(wide[0]), np.bool_)
    for text in texts:
        if text.null_count < len(text):
            found |= np.asarray(text.is_valid())
    return found


def write_quarantined(
    target: "Target | QuarantineOfCopy", name: str, columns: list[pa.Array]
) -> QuarantineFile | None:
    """Write quarantined rows (wide); None, and no file, without any. `name` distinguishes the files of a round.

    Raises `UnsupportedValueError` if there are too many.
    """
    count = len(columns[0])
    if not count:
        return None
    check_count(target.name, count)
    skipped = int(np.asarray(columns[-1].fill_null(False)).sum())
    stage = place(target.prefix)
    path = stage.parent.parent / "quarantine" / f"{stage.name}-{name}.parquet"
    table = pa.Table.from_arrays(columns, schema=file_schema(target.columns))
    return QuarantineFile(write_table(str(path), table).path, count, skipped)


def check_count(table: str, rows: int) -> None:
    """Raise `UnsupportedValueError` if a table has too many quarantined rows."""
    if rows > MAX_ROWS:
        raise UnsupportedValueError(
            f"{rows} rows have unrepresentable values; at most {MAX_ROWS} can be quarantined",
            where=table,
            repair="exclude the column from the publication, or change it at the source",
        )


def file_schema(columns: pa.Schema) -> pa.Schema:
    """Quarantined rows as their file has them: a `value` and an `unrepresentable` column for each column, and `ABOUT`."""
    values = [pa.field(f"{VALUE}{field.name}", field.type) for field in columns]
    texts = [pa.field(f"{UNREPRESENTABLE}{name}", pa.string()) for name in columns.names]
    about = [field.with_name(f"{ABOUT_IT}{field.name}") for field in ABOUT]
    return pa.schema([*values, *texts, *about])


@dataclass(frozen=True)
class QuarantineOfCopy:
    """What a copy's task needs to write its quarantined rows apart; `lsn` is the snapshot's. See `Target`."""

    name: str
    prefix: str
    columns: pa.Schema
    lsn: Lsn

    def split(
        self, batches: Iterator[pa.RecordBatch], found: list[pa.Table]
    ) -> Iterator[pa.RecordBatch]:
        """The representable rows, of batches with their texts behind them; the others go to `found`, wide."""
        columns = len(self.columns)
        for batch in batches:
            unrepresentable = is_unrepresentable(batch.columns, columns)
            fit = pa.RecordBatch.from_arrays(batch.columns[:columns], schema=self.columns)
            if unrepresentable.any():
                count = int(unrepresentable.sum())
                zero, none = of_numbers(np.zeros(count, np.int64)), pa.nulls(count, pa.int64())
                place = of_numbers(np.full(count, self.lsn, np.int64))
                about = [zero, place, none, zero, none, pa.nulls(count, pa.bool_())]
                wide = [*_chosen(batch.columns, unrepresentable), *about]
                found.append(pa.Table.from_arrays(wide, schema=file_schema(self.columns)))
                fit = fit.filter(pa.array(~unrepresentable))
            yield fit

    def write(self, name: str, found: list[pa.Table]) -> QuarantineFile | None:
        """Write what `split` found."""
        if not found:
            return None
        columns = [column.combine_chunks() for column in pa.concat_tables(found).columns]
        return write_quarantined(self, name, columns)


def quarantines(policy: Mapping[str, str], name: str) -> bool:
    """Whether unrepresentable rows of this table (`stream.schema.table`) are quarantined.

    `policy`: `fail` or `quarantine` by table, and for all others as `default`.
    """
    return policy.get(name, policy.get("default", FAIL)) == QUARANTINE


def with_quarantined(table: TableVersion, files: Iterable[QuarantineFile | None]) -> TableVersion:
    """The table with these quarantined rows instead of those that it had."""
    there = [file for file in files if file is not None]
    return replace(
        table,
        quarantine_files=tuple(f"quarantine/{PurePath(file.path).name}" for file in there),
        quarantined_rows=sum(file.rows for file in there),
        skipped_rows=sum(file.skipped for file in there),
        retry_quarantined=False,
    )


def with_more_quarantined(table: TableVersion, files: Iterable[QuarantineFile]) -> TableVersion:
    """The table with these quarantined rows beside those that it had."""
    more = with_quarantined(table, files)
    return replace(
        more,
        quarantine_files=(*table.quarantine_files, *more.quarantine_files),
        quarantined_rows=table.quarantined_rows + more.quarantined_rows,
        skipped_rows=table.skipped_rows + more.skipped_rows,
    )


def _widened(batch: ChangeBatch) -> _WideBatch:
    count = len(batch)
    nothing = pa.nulls(count, pa.string())
    positions = range(len(batch.columns))
    about = [
        of_numbers(batch.offset.astype(np.int64)),
        of_numbers(batch.commit_lsn.astype(np.int64)),
        of_numbers(batch.xid.astype(np.int64)),
        of_numbers(batch.version.astype(np.int64)),
        of_numbers(batch.commit_time),
        pa.nulls(count, pa.bool_()),
    ]
    unchanged = batch.unchanged
    if unchanged is not None:
        provenance = np.zeros((count, len(ABOUT)), np.bool_)
        unchanged = np.hstack([unchanged, unchanged, provenance])
    old = None
    if batch.old_columns is not None:
        texts = [batch.old_unrepresentable.get(i, nothing) for i in positions]
        old = [*batch.old_columns, *texts, *about]
    columns = [*batch.columns, *(batch.unrepresentable.get(i, nothing) for i in positions), *about]
    return _WideBatch(batch.ops, columns, unchanged, old, batch.old_kind)


def _wide(folded: Fold | MultisetFold) -> Fold | MultisetFold:
    """A fold of representable changes only, made wide."""
    count, columns = len(folded.columns[0]), len(folded.columns)
    more = [pa.nulls(count, pa.string())] * columns
    more += [pa.nulls(count, kind) for kind in ABOUT.types]
    if isinstance(folded, MultisetFold):
        return replace(folded, columns=[*folded.columns, *more], provenance=len(ABOUT))
    unset, source = folded.unset, folded.source
    if unset is not None and source is not None:
        # A row with an unrepresentable unsent column keeps the provenance of that value.
        provenance = np.repeat((folded.state == PATCH)[:, None], len(ABOUT), axis=1)
        unset = np.hstack([unset, unset, provenance])
        source = [*source, *([pa.nulls(count, pa.string())] * len(source))]
    return replace(
        folded,
        key=_wide_key(folded.key, columns),
        columns=[*folded.columns, *more],
        unset=unset,
        source=source,
    )


def _wide_key(key: tuple[int, ...], columns: int) -> tuple[int, ...]:
    """An unrepresentable key is identified by its text."""
    return (*key, *(columns + position for position in key))


def _tried_again(wide: list[pa.Array], schema: pa.Schema) -> list[pa.Array]:
    """The rows with every text converted again; a text that is now representable becomes a value."""
    columns, made = len(schema), list(wide)
    for i, arrow in enumerate(schema.types):
        text = wide[columns + i]
        at = np.flatnonzero(np.asarray(text.is_valid()))
        if not len(at):
            continue
        kind = ColumnType(0, -1, arrow, kept_as_text=False)
        values, still = apart(text.take(of_numbers(at)), arrow, partial(from_text, kind=kind))
        place = np.arange(len(text))
        place[at] = len(text) + np.arange(len(at))
        rows = of_numbers(place)
        made[i] = pa.concat_arrays([wide[i], values]).take(rows)
        texts = pa.nulls(len(at), pa.string()) if still is None else still
        made[columns + i] = pa.concat_arrays([text, texts]).take(rows)
    return made


def _chosen(columns: Sequence[pa.Array], mask: Bools) -> list[pa.Array]:
    chosen = pa.array(mask)
    return [column.filter(chosen) for column in columns]
