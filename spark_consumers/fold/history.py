"""Folds the changes of a table that keeps every version of its rows (`mode = "history"`). Pure.

The last four columns of such a table say when a version began and ended: `_valid_from`, `_valid_from_lsn`, `_valid_to` and
`_valid_to_lsn`; the last two are NULL in the *open* version of a row. A version is what a row was between two commits: of a transaction's
changes of a row only the last one counts, since no snapshot of PostgreSQL has seen the others. So

- the end of a version is the beginning of what follows, and a version ends at the first commit that touches its key again;
- no two versions of a key end at one commit.

Therefore the key *and* `_valid_to_lsn` identify a version, and to this fold they are the key of a table: it yields a `keyed.Fold` whose key
ends with that column. A version that ends is the row with the key (k, NULL), which goes, and one with (k, LSN), which comes: as an update
of the key. What was not sent of a version (unchanged TOAST, and of the one that was open before the fold all columns) is a patch of the row that
was open before, so everything behind the fold is that of any table with a key.

Why that is right. The changes of a key, in commit order, are a chain. Each commit in it ends the version before, if there was one, and begins one
unless its last change is a DELETE. A column of a version is what the last change before its end has set: in the chain, or, for an UPDATE of the key,
in the chain of the key before (`_value_of`); where nothing in the fold has set it, it is that of the version that was open before. Folds compose
(`compose_history`), even within a transaction: a version that began in one part and is ended by the same commit in the next part was never visible, and
is dropped. A TRUNCATE ends the open versions, of the fold and (`Fold.emptied`) of the table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_consumers.fold.kept import Deleted, TimedChanges
from spark_consumers.fold.keyed import (
    ABSENT,
    PATCH,
    ROW,
    Bools,
    Bytes,
    Fold,
    Run,
    check_old_keys,
    chosen,
    compose,
    inconsistent,
    joined,
    key_codes,
    stacked,
)
from spark_consumers.fold.row_codes import Int64s, row_codes, take

_INSERT, _UPDATE, _DELETE, _TRUNCATE = b"IUDT"
#: The columns that say when a version began and ended.
VALIDITY = 4
#: Where the LSN at which a version began is, from the end.
_FROM_LSN = -3


@dataclass(frozen=True)
class _Part:
    """Consecutive changes of a batch."""

    ops: Bytes
    columns: list[pa.Array]
    unchanged: Bools | None
    old_columns: list[pa.Array] | None
    old_kind: Bytes
    commit_time: Int64s
    commit_lsn: Int64s

    @classmethod
    def of(cls, changes: TimedChanges, first: int, end: int) -> Self:
        here = slice(first, end)
        old = changes.old_columns
        return cls(
            changes.ops[here],
            [column.slice(first, end - first) for column in changes.columns],
            None if changes.unchanged is None else changes.unchanged[here],
            None if old is None else [column.slice(first, end - first) for column in old],
            changes.old_kind[here],
            changes.commit_time[here].astype(np.int64),
            changes.commit_lsn[here].astype(np.int64),
        )


def fold_history(changes: Sequence[TimedChanges], key: Sequence[int]) -> Fold:
    """Fold changes in commit order; at least one batch, all with the same columns. Raises `CorruptError` as `fold`."""
    whole: Fold | None = None
    for part, then in _runs(changes):
        folded = _versions(part, key)
        whole = folded if whole is None else compose_history(whole, folded)
        if then is not None:
            whole = _emptied(whole, then)
    assert whole is not None
    return whole


def _runs(changes: Sequence[TimedChanges]) -> Iterator[tuple[list[_Part], Deleted | None]]:
    """The changes up to each TRUNCATE, and when that was; and those behind the last one."""
    run: list[_Part] = []
    for batch in changes:
        first = 0
        for at in np.flatnonzero(batch.ops == _TRUNCATE).tolist():
            run.append(_Part.of(batch, first, at))
            yield run, (int(batch.commit_time[at]), int(batch.commit_lsn[at]))
            run, first = [], at + 1
        run.append(_Part.of(batch, first, len(batch.ops)))
    yield run, None


@dataclass(frozen=True)
class _Chains:
    """The changes by their keys, in commit order within each: an UPDATE of the key is in the chain of the old one, too, as its end.

    `row`: the change of each. `code`: its key's. `begins`: the row was not there before; `gone`: it is not there behind it. `first`: where
    its chain begins. `origin`: of a row that comes from another key, where that ends; -1: it does not.
    """

    row: Int64s
    code: Int64s
    begins: Bools
    gone: Bools
    first: Int64s
    origin: Int64s

    @classmethod
    def of(cls, run: Run, code: Int64s, before: Int64s) -> Self:
        """Raises `CorruptError` for changes that cannot follow from one another."""
        moved = (run.ops == _UPDATE) & (before >= 0) & (before != code)
        rows = np.sort(np.concatenate([np.arange(len(run.ops)), np.flatnonzero(moved)]))
        again = rows[1:] == rows[:-1]
        leaves, comes = np.append(again, False), np.append(False, again)
        if not len(rows):
            leaves = comes = np.zeros(0, np.bool_)
        codes = np.where(leaves, before[rows], code[rows])
        order = np.argsort(codes, kind="stable")
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        # Where an UPDATE of the key leaves is just before it comes.
        origin = np.where(comes[order], place[order - 1] if len(order) else order, -1)
        codes, rows = codes[order], rows[order]
        gone = (run.ops[rows] == _DELETE) | leaves[order]
        begins = (run.ops[rows] == _INSERT) | comes[order]
        same = codes[1:] == codes[:-1]
        if (same & (begins[1:] != gone[:-1])).any():
            raise inconsistent()
        starts = np.flatnonzero(np.append(True, ~same)) if len(rows) else np.zeros(0, np.int64)
        first = np.repeat(starts, np.diff(np.append(starts, len(rows))))
        return cls(rows, codes, begins, gone, first, origin)

    def __len__(self) -> int:
        return len(self.row)


def _value_of(run: Run, chains: _Chains, column: int, at: Int64s) -> tuple[Int64s, Int64s]:
    """The change that has set this column of the row that is there behind each of these changes (-1: none has); and where the search ended."""
    assert run.unchanged is not None
    unsent = run.unchanged[chains.row, column]
    # An unchanged value of a row that comes from another key is in the chain of that.
    passes = unsent & (chains.origin >= 0)
    sets = ~chains.gone & (~unsent | passes)
    places = np.arange(len(chains))
    last = np.maximum.accumulate(np.where(sets, places, -1))
    last = np.where(last >= chains.first, last, places)
    # Where the search goes on: at the last change that has set the column, and from one that passes it on where the other chain ends.
    beyond = np.where(passes, chains.origin, places)[last]
    found = _last_steps(beyond)[at]
    # Where it ended at a change that has set the column, that is it.
    is_set = sets[found] & ~passes[found]
    return np.where(is_set, chains.row[found], -1), found


def _last_steps(step: Int64s) -> Int64s:
    """Where the steps that begin at each place end: at a place from which a step leads nowhere else. There are no circles.

    Each turn doubles the steps that it has taken, so a row that was moved n times in one fold costs n * log(n), and not n * n.
    """
    while ((further := step[step]) != step).any():
        step = further
    return step


@dataclass(frozen=True)
class _Rows:
    """The rows of a fold: versions that began in it, then those that were open before, then keys that have no open version any more.

    `at`: the change behind which each is as it is; `until`: the one that ended it (-1: none has). `n_begun`, `n_closed`: how many there are
    of the first two kinds. `was_open`: of the key that each has, whether the table has an open version.
    """

    at: Int64s
    until: Int64s
    n_begun: int
    n_closed: int
    was_open: Bools

    @classmethod
    def of(cls, chains: _Chains, lsn: Int64s) -> Self:
        """`lsn`: of each change's commit."""
        same = chains.code[1:] == chains.code[:-1]
        # The last change of each commit in each chain, and where the next commit's last one is (-1: there is none).
        ends = chains.row
        if len(chains):
            ends = np.flatnonzero(np.append(~(same & (lsn[1:] == lsn[:-1])), True))
        is_one = chains.code[ends[1:]] == chains.code[ends[:-1]]
        next_ = np.append(np.where(is_one, ends[1:], -1), -1)[: len(ends)]
        begun = ~chains.gone[ends]
        # By chain: its first commit's last change, whether the row was there before, and whether it is there behind it.
        is_first = np.append(True, ~is_one)[: len(ends)]
        is_last = next_ < 0
        heads, tails = ends[is_first], ends[is_last]
        existed = ~chains.begins[chains.first[heads]]
        closed = heads[existed]
        removed = tails[existed & chains.gone[tails]]
        in_chain = np.repeat(existed, np.diff(np.append(np.flatnonzero(is_first), len(ends))))
        was_open = [
            in_chain[begun] & is_last[begun],
            np.zeros(len(closed), np.bool_),
            np.ones(len(removed), np.bool_),
        ]
        return cls(
            np.concatenate([ends[begun], closed, removed]),
            np.concatenate([next_[begun], closed, np.full(len(removed), -1)]),
            int(begun.sum()),
            len(closed),
            np.concatenate(was_open),
        )

    @property
    def is_begun(self) -> Bools:
        """Which are versions that began in the fold."""
        found: Bools = np.arange(len(self.at)) < self.n_begun
        return found

    @property
    def is_removed(self) -> Bools:
        """Which are keys that have no open version any more."""
        found: Bools = np.arange(len(self.at)) >= self.n_begun + self.n_closed
        return found


def _versions(parts: Sequence[_Part], key: Sequence[int]) -> Fold:
    """The fold of changes without a TRUNCATE."""
    run = joined(parts, key)
    check_old_keys(run, key, len(key))
    pool, code, before = key_codes(run, key)
    lsns = np.concatenate([part.commit_lsn for part in parts])
    chains = _Chains.of(run, code, before)
    rows = _Rows.of(chains, lsns[chains.row])
    # Of each key, where it is in the pool.
    everywhere = np.concatenate([code, before])
    place = np.zeros(int(everywhere.max(initial=0)) + 1, np.int64)
    place[everywhere[everywhere >= 0]] = np.flatnonzero(everywhere >= 0)

    columns, unset, source = _values(run, chains, rows, key)
    for k, keys in zip(key, pool, strict=True):
        columns[k] = take(keys, place[chains.code[rows.at]])
    columns += _validity(run, chains, rows, np.concatenate([p.commit_time for p in parts]), lsns)
    own = len(columns) - VALIDITY
    unset[:, own : own + 2] = (~rows.is_begun & ~rows.is_removed)[:, None]
    filled = np.where(unset.any(axis=1), PATCH, ROW)
    state = np.where(rows.is_removed, ABSENT, filled).astype(np.uint8)
    patch = state == PATCH
    where = None
    if patch.any():
        keys_at = np.where(patch, place[source], -1)
        where = [take(keys, keys_at) for keys in pool]
        where.append(pa.nulls(len(state), columns[-1].type))
    version_key = (*key, len(columns) - 1)
    left = unset if patch.any() else None
    return Fold(version_key, False, rows.was_open, state, columns, left, where)


def _values(
    run: Run, chains: _Chains, rows: _Rows, key: Sequence[int]
) -> tuple[list[pa.Array], Bools, Int64s]:
    """The source's columns of the rows; which columns are to be taken from the version that was open before; and the key that this has."""
    width = len(run.columns)
    source = chains.code[rows.at].copy()
    unset = np.zeros((len(rows.at), width), np.bool_)
    columns: list[pa.Array] = []
    is_begun = rows.is_begun
    for c in range(width - VALIDITY):
        picks = np.where(is_begun, chains.row[rows.at], -1)
        if c not in key and run.unchanged is not None and run.unchanged[:, c].any():
            picks[is_begun], found = _value_of(run, chains, c, rows.at[is_begun])
            unknown = np.flatnonzero(picks[is_begun] < 0)
            source[unknown] = chains.code[found[unknown]]
        if c not in key:
            unset[:, c] = (picks < 0) & ~rows.is_removed
        columns.append(take(run.columns[c], picks))
    return columns, unset, source


def _validity(
    run: Run, chains: _Chains, rows: _Rows, times: Int64s, lsns: Int64s
) -> Iterator[pa.Array]:
    """The columns that say when the rows began and ended. `times`, `lsns`: of each change's commit."""
    since = np.where(rows.is_begun, chains.row[rows.at], -1)
    until = np.where(rows.until >= 0, chains.row[rows.until], -1)
    kinds = [column.type for column in run.columns[-VALIDITY:]]
    for picks, values, kind in zip(
        (since, since, until, until), (times, lsns, times, lsns), kinds, strict=True
    ):
        yield take(pa.array(values), picks).cast(kind)


def _is_open(fold: Fold) -> Bools:
    """Which of its rows are open versions."""
    is_null: Bools = pc.is_null(fold.columns[-1]).to_numpy(zero_copy_only=False)
    found: Bools = is_null & (fold.state != ABSENT)
    return found


def _emptied(fold: Fold, at: Deleted, spared: Bools | None = None) -> Fold:
    """The fold, and then a TRUNCATE, which does not end those versions that are `spared`."""
    ends = _is_open(fold)
    if spared is not None:
        ends &= ~spared
    gone = ends & fold.existed
    state = np.where(ends, ABSENT, fold.state).astype(np.uint8)
    left = chosen(replace(fold, state=state), ~ends | gone)
    begun = _numbers(fold.columns[_FROM_LSN])
    # What began in the same transaction was never visible.
    closed = chosen(replace(fold, existed=np.zeros(len(fold), np.bool_)), ends & (begun != at[1]))
    *columns, times, lsns = closed.columns
    ended = [
        pa.array(np.full(len(closed), value)).cast(column.type)
        for column, value in ((times, at[0]), (lsns, at[1]))
    ]
    both = stacked(left, replace(closed, columns=[*columns, *ended]))
    return replace(both, emptied=fold.emptied or at)


def _numbers(column: pa.Array) -> Int64s:
    """The LSNs in the column; -1 for NULL."""
    return np.asarray(pc.fill_null(column, -1)).astype(np.int64)


def compose_history(first: Fold, then: Fold) -> Fold:
    """The fold of `first`'s changes followed by `then`'s. Raises `CorruptError` as `compose`."""
    emptied = first.emptied or then.emptied
    if then.emptied is not None:
        first = _emptied(first, then.emptied, _are_among(first, then))
    then = _without_unseen(first, then)
    return replace(compose(first, then), emptied=emptied)


def _are_among(first: Fold, then: Fold) -> Bools:
    """Which of `first`'s rows `then` has changed before its first TRUNCATE: what it ends otherwise, it says itself."""
    touched = [column.filter(pa.array(then.existed)) for column in then.keys]
    ours, theirs = row_codes([first.keys, touched])
    found: Bools = np.isin(ours, theirs)
    return found


def _without_unseen(first: Fold, then: Fold) -> Fold:
    """`then` without the ends of versions of `first` that its own transaction has begun."""
    if then.source is None or then.unset is None or not len(first):
        return then
    ends = then.unset[:, _FROM_LSN] & (then.state == PATCH)
    if not ends.any():
        return then
    ours, theirs = row_codes([first.keys, then.source])
    place = np.full(int(max(ours.max(initial=-1), theirs.max(initial=-1))) + 1, -1, np.int64)
    place[ours] = np.arange(len(ours))
    origin = np.where(ends, place[theirs], -1)
    begun = _numbers(first.columns[_FROM_LSN])[origin]
    unseen = (origin >= 0) & (begun == _numbers(then.columns[-1])) & (begun >= 0)
    return replace(chosen(then, ~unseen), emptied=then.emptied)
