"""Folds the changes of a table that keeps the rows that are deleted (`mode = "soft_delete"`). Pure.

The last two columns of such a table are the *marks*: when a row was deleted, and at which LSN; NULL in a living row. Its changes are
folded as updates of rows that may or may not be there:

- a DELETE sets the marks of the row with its key, and leaves all other columns alone, as an unchanged TOAST value is left alone;
- an INSERT, and an UPDATE, clear the marks, and set what they set;
- an UPDATE of the key sets the marks of the row with the old key, which stays, and writes one with the new key. What was not sent of
  that one is as in the other;
- a TRUNCATE sets the marks of the living rows: those of the fold, and (`Fold.emptied`) those of the table that the fold does not have.

Why that is right. A row of the table stands for a key. Its columns are those of the key's last row, which is what the fold keeps column
by column; its marks follow from the key's last change alone, and every change sets them. So a fold always knows its marks, and the result
does not depend on where an epoch ends: a row that is inserted and deleted within one is in the table, as it is if they are two. A patch
(`fold.keyed`) finds what it lacks in the table, since the source has had the row, and rows are never removed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_consumers.fold.keyed import Bools, Bytes, Fold, FoldableChanges, compose, fold
from spark_consumers.fold.row_codes import Int64s, row_codes, take

_INSERT, _UPDATE, _DELETE, _TRUNCATE = b"IUDT"
_NO_OLD = 0
#: The columns of the marks.
MARKS = 2

#: Microseconds since the Unix epoch, and an LSN.
Deleted = tuple[int, int]


class TimedChanges(FoldableChanges, Protocol):
    """The input: changes with the marks behind their columns, whatever these hold."""

    @property
    def commit_time(self) -> Int64s:
        """Microseconds since the Unix epoch."""

    @property
    def commit_lsn(self) -> "np.ndarray":
        """Where the transaction's commit record starts."""


@dataclass(frozen=True)
class _Updates:
    """Changes as updates of rows that may be there."""

    ops: Bytes
    columns: list[pa.Array]
    unchanged: Bools
    old_columns: list[pa.Array] | None
    old_kind: Bytes

    @classmethod
    def of(cls, changes: TimedChanges, first: int, end: int, key: Sequence[int]) -> Self:
        """The changes from `first` on, before `end`, among which is no TRUNCATE."""
        here = slice(first, end)
        ops = changes.ops[here]
        new = [column.slice(first, end - first) for column in changes.columns]
        old = changes.old_columns
        old = None if old is None else [column.slice(first, end - first) for column in old]
        kind = changes.old_kind[here]
        gone = ops == _DELETE
        width = len(new)
        unsent = np.zeros((len(ops), width), np.bool_)
        if changes.unchanged is not None:
            unsent = changes.unchanged[here].copy()
        moves = np.zeros(len(ops), np.bool_)
        if old is not None:
            has_old = kind != _NO_OLD
            for k in key:
                # A key kept out of line that did not change is in the old tuple only.
                new[k] = pc.if_else(pa.array(gone | (unsent[:, k] & has_old)), old[k], new[k])
                unsent[has_old, k] = False
            after, before = row_codes([[new[k] for k in key], [old[k] for k in key]])
            moves = (ops == _UPDATE) & has_old & (after != before)
        # Behind each update of a key, the deletion of the old one.
        rows = np.sort(np.concatenate([np.arange(len(ops)), np.flatnonzero(moves)]))
        is_second = np.concatenate([[False], rows[1:] == rows[:-1]]) if len(rows) else moves
        marked = gone[rows] | is_second
        unchanged = unsent[rows]
        unchanged[marked] = True
        unchanged[:, width - MARKS :] = False
        columns = [take(column, rows) for column in new]
        olds = None if old is None else [take(column, rows) for column in old]
        if olds is not None:
            second = pa.array(is_second)
            for k in key:
                columns[k] = pc.if_else(second, olds[k], columns[k])
        unchanged[np.ix_(marked, list(key))] = False
        for place, values in ((2, changes.commit_time), (1, changes.commit_lsn)):
            kind_of = columns[-place].type
            numbers = pa.array(values[here][rows].astype(np.int64), mask=~marked)
            columns[-place] = numbers.cast(kind_of)
        kinds = np.where(marked, _NO_OLD, kind[rows]).astype(np.uint8)
        updates = np.full(len(rows), _UPDATE, np.uint8)
        return cls(updates, columns, unchanged, olds, kinds)


def fold_kept(changes: Sequence[TimedChanges], key: Sequence[int]) -> Fold:
    """Fold changes in commit order; at least one batch, all with the same columns. Raises `CorruptError` as `fold`."""
    whole: Fold | None = None
    for part, then in _runs(changes, key):
        folded = fold(part, key, keeps=True)
        whole = folded if whole is None else compose_kept(whole, folded)
        if then is not None:
            whole = emptied(whole, then)
    assert whole is not None
    return whole


def _runs(
    changes: Sequence[TimedChanges], key: Sequence[int]
) -> Iterator[tuple[list[_Updates], Deleted | None]]:
    """The changes up to each TRUNCATE, and when that was; and those behind the last one."""
    run: list[_Updates] = []
    for batch in changes:
        first = 0
        for at in np.flatnonzero(batch.ops == _TRUNCATE).tolist():
            run.append(_Updates.of(batch, first, at, key))
            yield run, (int(batch.commit_time[at]), int(batch.commit_lsn[at]))
            run, first = [], at + 1
        run.append(_Updates.of(batch, first, len(batch.ops), key))
    yield run, None


def emptied(folded: Fold, at: Deleted) -> Fold:
    """The fold, and then a TRUNCATE."""
    *columns, times, lsns = folded.columns
    return replace(
        folded,
        columns=[*columns, *with_marks(times, lsns, at)],
        emptied=folded.emptied or at,
    )


def with_marks(times: pa.Array, lsns: pa.Array, at: Deleted) -> tuple[pa.Array, pa.Array]:
    """The marks of rows of which the living ones are deleted."""

    def marked(column: pa.Array, value: int) -> pa.Array:
        return pc.coalesce(column, pa.scalar(value, pa.int64()).cast(column.type))

    return marked(times, at[0]), marked(lsns, at[1])


def compose_kept(first: Fold, then: Fold) -> Fold:
    """The fold of `first`'s changes followed by `then`'s. Raises `CorruptError` as `compose`."""
    if then.emptied is not None:
        first = emptied(first, then.emptied)
    return replace(compose(first, then), emptied=first.emptied)
