"""Folds the changes of a table with a key to their net effect: one row for each key.

Applied to any table that the changes fit, a fold gives the same result as the changes one after another. Folds
compose: `compose(fold(a), fold(b)) == fold(a + b)`, so ranges are folded apart, on different executors.

A fold holds, for each key that was touched,

- whether a row with this key was in the table before (`existed`): if so, that row goes;
- its row after the changes: none (`ABSENT`), a row of which every column is known (`ROW`), or a row of which
  some columns were never sent (`PATCH`).

Columns that were never sent are PostgreSQL's unchanged TOAST values. They are followed *column by column*:
a later change that leaves a column alone keeps what an earlier one set. What is still unknown at the end
stands in the table as it was before, in the row with the key `source`, which is another than the patch's
own key when the key was changed on the way. Nothing of this is guessed: changes that cannot follow from
one another (an update of a key that was just deleted) are an error.

No row is visited one by one, except those whose key was changed or took another's place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_consumers.fold.row_codes import Int64s, row_codes, take
from walsender_bridge.errors import CorruptError

ABSENT, ROW, PATCH = range(3)
_INSERT, _UPDATE, _DELETE, _TRUNCATE = b"IUDT"
_NO_OLD = 0

Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]


class FoldableChanges(Protocol):
    """The input of a fold: a `spark_consumers.decode.entries.ChangeBatch`, or anything with these fields of it."""

    @property
    def ops(self) -> Bytes:
        """`I`, `U`, `D`, `T`."""

    @property
    def columns(self) -> list[pa.Array]:
        """New values, NULL for Delete and Truncate and where unchanged."""

    @property
    def unchanged(self) -> Bools | None:
        """Rows by columns: not sent, the value stays."""

    @property
    def old_columns(self) -> list[pa.Array] | None:
        """Values before, as far as `old_kind` says."""

    @property
    def old_kind(self) -> Bytes:
        """0, `K` (only the key's columns are there) or `O`."""


@dataclass(frozen=True)
class Fold:
    """The net effect of a run of changes. All arrays have one item for each touched key.

    `columns` holds whole rows (`ROW`), the known columns (`PATCH`) or only the key (`ABSENT`); `key` is the
    positions of the key's columns. `unset` (rows by columns, for patches) marks what is not known, `source`
    has the key columns of the row that has it; both are None when there is no patch. `emptied`: when the table's living rows were
    deleted by a TRUNCATE, if it keeps deleted rows (`fold.kept`).
    """

    key: tuple[int, ...]
    truncated: bool
    existed: Bools
    state: Bytes
    columns: list[pa.Array]
    unset: Bools | None = None
    source: list[pa.Array] | None = None
    emptied: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.state)

    @property
    def added(self) -> int:
        """By how many rows the table grows (if truncated, from none)."""
        there = self.state != ABSENT
        return int((there & ~self.existed).sum()) - int((~there & self.existed).sum())

    @property
    def keys(self) -> list[pa.Array]:
        """The key's columns."""
        return [self.columns[k] for k in self.key]

    def deletes(self) -> list[pa.Array]:
        """Keys (as their columns) of the rows that go from the table before anything is added."""
        mask = pa.array(self.existed)
        return [column.filter(mask) for column in self.keys]

    def rows(self) -> list[pa.Array]:
        """Columns of the rows to add that are known whole."""
        mask = pa.array(self.state == ROW)
        return [column.filter(mask) for column in self.columns]

    @property
    def patches(self) -> Int64s:
        """Positions of the patches."""
        return np.flatnonzero(self.state == PATCH)


@dataclass
class Run:
    """All changes of a run after its last TRUNCATE, as arrays of equal length."""

    ops: Bytes
    columns: list[pa.Array]
    unchanged: Bools | None
    old_columns: list[pa.Array] | None
    old_kind: Bytes
    truncated: bool


def fold(
    changes: Sequence[FoldableChanges],
    key: Sequence[int],
    *,
    key_columns: int | None = None,
    keeps: bool = False,
) -> Fold:
    """Fold changes in commit order; at least one batch, all with the same columns.

    `key_columns`: the first so many of `key` are the key, and what follows stands for values of it that are not there
    (`quarantine`); None: all of them. `keeps`: an update of a key leaves the row with the old one, and any row may have been there
    (`fold.kept`). Raises `CorruptError` for changes that cannot follow from one another.
    """
    run = joined(changes, key)
    check_old_keys(run, key, key_columns or len(key))
    pool, code, before = key_codes(run, key)
    moved = (before >= 0) & (before != code) & (run.ops == _UPDATE)
    involved = np.isin(code, np.concatenate([code[moved], before[moved]]))
    involved |= moved
    slow = np.flatnonzero(involved)
    fast = np.flatnonzero(~involved)
    width = len(run.columns)
    parts = [_fold_sorted(run, fast, code), _fold_one_by_one(run, slow, code, before, keeps=keeps)]
    codes, existed, state, source = (np.concatenate([p[i] for p in parts]) for i in range(4))
    picks = [np.concatenate([p[4][c] for p in parts]) for c in range(width)]
    kept = existed | (state != ABSENT)
    codes, existed, state, source = codes[kept], existed[kept], state[kept], source[kept]
    # Any row of the pool with that code has the key's columns.
    everywhere = np.concatenate([code, before])
    place = np.zeros(int(everywhere.max(initial=0)) + 1, np.int64)
    place[everywhere[everywhere >= 0]] = np.flatnonzero(everywhere >= 0)
    columns = [take(run.columns[c], picks[c][kept]) for c in range(width)]
    for k, keys in zip(key, pool, strict=True):
        columns[k] = take(keys, place[codes])
    patch = state == PATCH
    unset = where = None
    if patch.any():
        unset = np.column_stack([p[kept] < 0 for p in picks]) & patch[:, None]
        unset[:, list(key)] = False
        at = np.where(patch, place[np.maximum(source, 0)], -1)
        where = [take(keys, at) for keys in pool]
    return Fold(tuple(key), run.truncated, existed, state.astype(np.uint8), columns, unset, where)


def joined(changes: Sequence[FoldableChanges], key: Sequence[int]) -> Run:
    """One run of the batches: from after the last TRUNCATE, the key's unchanged (TOAST) values filled in."""
    ops = np.concatenate([c.ops for c in changes])
    columns = [
        pa.concat_arrays(list(parts)) for parts in zip(*(c.columns for c in changes), strict=True)
    ]
    old_kind = np.concatenate([c.old_kind for c in changes])
    unchanged = old = None
    if any(c.unchanged is not None for c in changes):
        none = [np.zeros((len(c.ops), len(columns)), np.bool_) for c in changes]
        unchanged = np.concatenate(
            [n if c.unchanged is None else c.unchanged for c, n in zip(changes, none, strict=True)]
        )
    if any(c.old_columns is not None for c in changes):
        old = [
            pa.concat_arrays(
                [
                    pa.nulls(len(c.ops), column.type) if c.old_columns is None else c.old_columns[i]
                    for c in changes
                ]
            )
            for i, column in enumerate(columns)
        ]
    truncates = np.flatnonzero(ops == _TRUNCATE)
    start = int(truncates[-1]) + 1 if len(truncates) else 0
    if start:
        ops, old_kind = ops[start:], old_kind[start:]
        columns = [c.slice(start) for c in columns]
        unchanged = None if unchanged is None else unchanged[start:]
        old = None if old is None else [c.slice(start) for c in old]
    if unchanged is not None and old is not None:
        unchanged = unchanged.copy()
        for k in key:
            # A key kept out of line that did not change is in the old tuple, not in the new one.
            fill = unchanged[:, k] & (old_kind != _NO_OLD)
            if fill.any():
                columns[k] = pc.if_else(pa.array(fill), old[k], columns[k])
                unchanged[fill, k] = False
    return Run(ops, columns, unchanged, old, old_kind, bool(start))


def check_old_keys(run: Run, key: Sequence[int], count: int) -> None:
    """See that old tuples have the key: its columns are NOT NULL, so what is NULL there was not sent."""
    if run.old_columns is None:
        return
    for number in range(count):
        nulls = [pc.is_null(run.old_columns[k]).to_numpy(False) for k in key[number::count]]
        if (np.logical_and.reduce(nulls) & (run.old_kind != _NO_OLD)).any():
            raise CorruptError(
                "an update or delete identifies its row by columns other than the table's key",
                where="change log",
                repair="set one replica identity for the table and its partitions, then copy the table again",
            )


def key_codes(run: Run, key: Sequence[int]) -> tuple[list[pa.Array], Int64s, Int64s]:
    """The keys after and before all changes, end to end; and for each change the code of both.

    The key after a Delete is the deleted one. A change without an old tuple has -1 before.
    """
    new = [run.columns[k] for k in key]
    if run.old_columns is None:
        if (run.ops == _DELETE).any():
            raise CorruptError("a Delete message lacks the key", where="change log")
        return [*new], row_codes([new])[0], np.full(len(run.ops), -1, np.int64)
    old = [run.old_columns[k] for k in key]
    if ((run.ops == _DELETE) & (run.old_kind == _NO_OLD)).any():
        raise CorruptError("a Delete message lacks the key", where="change log")
    deleted = pa.array(run.ops == _DELETE)
    new = [pc.if_else(deleted, o, n) for o, n in zip(old, new, strict=True)]
    code, before = row_codes([new, old])
    before = np.where(run.old_kind != _NO_OLD, before, -1)
    pool = [pa.concat_arrays([n, o]) for n, o in zip(new, old, strict=True)]
    return pool, code, before


_Part = tuple[Int64s, Bools, Bytes, Int64s, list[Int64s]]
"""codes, existed, state, code of the source, and for each column the change that set it (-1: none)"""


def _fold_sorted(run: Run, rows: Int64s, code: Int64s) -> _Part:
    """The changes at `rows`, whose keys never changed: sorted by key, and evaluated from both ends."""
    width = len(run.columns)
    if not len(rows):
        nothing = np.zeros(0, np.int64)
        return nothing, np.zeros(0, np.bool_), np.zeros(0, np.uint8), nothing, [nothing] * width
    order = rows[np.argsort(code[rows], kind="stable")]
    codes, ops = code[order], run.ops[order]
    same = codes[1:] == codes[:-1]
    gone = ops[:-1] == _DELETE
    wrong = same & ((ops[1:] == _INSERT) != gone)
    first = np.flatnonzero(np.concatenate([[True], ~same]))
    last = np.concatenate([first[1:], [len(order)]]) - 1
    if wrong.any() or (run.truncated and (ops[first] != _INSERT).any()):
        raise inconsistent()
    existed = ops[first] != _INSERT
    there = ops[last] != _DELETE
    newest = np.where(there, order[last], -1)
    state = np.where(there, ROW, ABSENT).astype(np.uint8)
    if run.unchanged is None or not run.unchanged[order[last]].any():
        return codes[first], existed, state, codes[first], [newest] * width
    at = np.arange(len(order))
    picks = []
    for c in range(width):
        sets = ~run.unchanged[order, c] & (ops != _DELETE)
        set_at = np.maximum.accumulate(np.where(sets, at, -1))[last]
        # Values set before this key's first change belong to the preceding key. Values set before a delete do
        # not matter: the insert after it sets every column again.
        picks.append(np.where(there & (set_at >= first), order[np.maximum(set_at, 0)], -1))
    unknown = there & np.logical_or.reduce([p < 0 for p in picks])
    state[unknown] = PATCH
    return codes[first], existed, state, codes[first], picks


@dataclass(slots=True)
class _Held:
    """What is known of one key's row on the way: which change set each column (-1: none yet)."""

    existed: bool
    state: int
    source: int
    set_by: Int64s | int


def _fold_one_by_one(run: Run, rows: Int64s, code: Int64s, before: Int64s, *, keeps: bool) -> _Part:
    """The changes at `rows` in order, key changes among them. `keeps`: see `fold`."""
    width = len(run.columns)
    held: dict[int, _Held] = {}

    def touch(key: int, *, existed: bool) -> _Held:
        """The row at this key; if it is not known yet, then as the table has it."""
        found = held.get(key)
        if found is None:
            found = _Held(existed, PATCH if existed else ABSENT, key, -1)
            held[key] = found
        return found

    for row in rows.tolist():
        op, key = int(run.ops[row]), int(code[row])
        if op == _INSERT:
            target = touch(key, existed=False)
            if target.state != ABSENT:
                raise inconsistent()
            target.state, target.set_by = ROW, row
            continue
        origin = key if op == _DELETE or before[row] < 0 else int(before[row])
        current = touch(origin, existed=not run.truncated)
        if current.state == ABSENT:
            raise inconsistent()
        state, source, set_by = current.state, current.source, current.set_by
        if op == _DELETE or (origin != key and not keeps):
            current.state = ABSENT
        if op == _DELETE:
            continue
        target = touch(key, existed=keeps)
        if origin != key and target.state != ABSENT and not keeps:
            raise inconsistent()
        skipped = run.unchanged[row] if run.unchanged is not None else None
        if skipped is None or not skipped.any():
            target.state, target.set_by = ROW, row
        else:
            known = np.where(skipped, set_by, row)
            target.state = PATCH if state == PATCH and (known < 0).any() else ROW
            target.set_by, target.source = known, source
    count = len(held)
    values = list(held.values())
    set_by = np.empty((count, width), np.int64)
    for i, h in enumerate(values):
        set_by[i] = -1 if h.state == ABSENT else h.set_by
    return (
        np.fromiter(held, np.int64, count),
        np.fromiter((h.existed for h in values), np.bool_, count),
        np.fromiter((h.state for h in values), np.uint8, count),
        np.fromiter((h.source for h in values), np.int64, count),
        [set_by[:, c] for c in range(width)],
    )


def compose(first: Fold, then: Fold) -> Fold:
    """The fold of `first`'s changes followed by `then`'s.

    Raises `CorruptError` when the one cannot follow the other.
    """
    if then.truncated or not len(first):
        if first.truncated and not then.truncated and then.existed.any():
            raise inconsistent()
        return replace(then, truncated=first.truncated or then.truncated)
    sources = then.keys if then.source is None else then.source
    ours, theirs, source = row_codes([first.keys, then.keys, sources])
    place = np.full(int(max(c.max(initial=0) for c in (ours, theirs, source))) + 1, -1, np.int64)
    place[ours] = np.arange(len(ours))
    known = place[theirs]
    met = known >= 0
    existed = np.where(met, first.existed[known], then.existed)
    was_there = np.where(met, first.state[known] != ABSENT, False)
    if (met & (was_there != then.existed)).any() or (
        first.truncated and (~met & then.existed).any()
    ):
        raise inconsistent()

    # A patch whose source `first` touched takes what is known there.
    patch = then.state == PATCH
    origin = np.where(patch, place[source], -1)
    through = origin >= 0
    if through.any() and (first.state[origin[through]] == ABSENT).any():
        raise inconsistent()
    state = then.state.copy()
    columns = list(then.columns)
    unset, where = then.unset, then.source
    if through.any():
        assert unset is not None
        assert where is not None
        unset = unset.copy()
        for c, column in enumerate(columns):
            filled = through & unset[:, c]
            if filled.any():
                theirs_then_ours = pa.concat_arrays([column, first.columns[c]])
                rows = np.where(filled, len(column) + origin, np.arange(len(column)))
                columns[c] = take(theirs_then_ours, rows)
                still = first.unset[origin, c] if first.unset is not None else np.False_
                unset[:, c] = np.where(filled, still, unset[:, c])
        if first.source is not None:
            deeper = through & (first.state[origin] == PATCH)
            where = [
                take(pa.concat_arrays([t, f]), np.where(deeper, len(t) + origin, np.arange(len(t))))
                for t, f in zip(where, first.source, strict=True)
            ]
        state[patch & ~unset.any(axis=1)] = ROW

    rest = np.ones(len(ours), np.bool_)
    rest[known[met]] = False
    kept = existed | (state != ABSENT)
    return stacked(
        chosen(first, rest),
        chosen(Fold(then.key, False, existed, state, columns, unset, where), kept),
    )


def chosen(part: Fold, mask: Bools) -> Fold:
    """The rows of the fold at which the mask is true."""
    rows = pa.array(mask)
    return Fold(
        part.key,
        part.truncated,
        part.existed[mask],
        part.state[mask],
        [c.filter(rows) for c in part.columns],
        None if part.unset is None else part.unset[mask],
        None if part.source is None else [c.filter(rows) for c in part.source],
    )


def stacked(upper: Fold, lower: Fold) -> Fold:
    """Both one under the other; they share no key."""
    state = np.concatenate([upper.state, lower.state])
    unset = source = None
    if (state == PATCH).any():
        width = len(upper.columns)
        unset = np.concatenate(
            [
                np.zeros((len(p), width), np.bool_) if p.unset is None else p.unset
                for p in (upper, lower)
            ]
        )
        source = [
            pa.concat_arrays(
                [
                    pa.nulls(len(p), p.columns[k].type) if p.source is None else p.source[i]
                    for p in (upper, lower)
                ]
            )
            for i, k in enumerate(upper.key)
        ]
    return Fold(
        upper.key,
        upper.truncated,
        np.concatenate([upper.existed, lower.existed]),
        state,
        [pa.concat_arrays([u, d]) for u, d in zip(upper.columns, lower.columns, strict=True)],
        unset,
        source,
    )


def inconsistent() -> CorruptError:
    """The error of changes that cannot follow from one another."""
    return CorruptError(
        "changes are inconsistent: an existing row is inserted, or a missing one changed",
        where="change log",
        repair="copy the table again; its history in the log has a gap",
    )
