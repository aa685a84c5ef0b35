"""The fold of tables that keep every version, against a model that applies changes one transaction at a time."""

from functools import reduce
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_consumers.fold import history
from spark_consumers.fold.history import compose_history, fold_history
from spark_consumers.fold.keyed import ABSENT, PATCH
from spark_consumers.fold.serial import fold_from_table, fold_to_table
from tests.unit.test_fold import KEY, Batch, D, I, T, U, batches, histories
from walsender_bridge.errors import CorruptError

VALIDITY = [pa.timestamp("us", "UTC"), pa.int64()] * 2


def timed(parts, transactions):
    """The batches with the columns of versions; `transactions`: of each change the number."""
    ends = [0, *accumulate(len(part.events) for part in parts)]
    for part, first in zip(parts, ends, strict=False):
        count = len(part.events)
        numbers = np.array(transactions[first : first + count], np.int64)
        part.commit_time, part.commit_lsn = numbers, (numbers * 10).astype(np.uint64)
        part.columns = [*part.columns, *(pa.nulls(count, kind) for kind in VALIDITY)]
        if part.old_columns is not None:
            part.old_columns = [*part.old_columns, *(pa.nulls(count, kind) for kind in VALIDITY)]
        if part.unchanged is not None:
            part.unchanged = np.column_stack([part.unchanged, np.zeros((count, 4), np.bool_)])
    return parts


def expected(lake, events, transactions):
    """The lake's versions after these changes: tuples of the values, and when each began and ended."""
    versions = {row for row in lake if row[-1] is not None}
    begun = {row[0]: row for row in lake if row[-1] is None}
    now = {key: row[:4] for key, row in begun.items()}
    for number in sorted(set(transactions)):
        touched = set()
        for (op, new, skipped, old, _), of in zip(events, transactions, strict=True):
            if of != number:
                continue
            if op == T:
                touched |= set(now)
                now = {}
                continue
            before = now.pop(old[0] if old else new[0], None)
            touched |= {row[0] for row in (old, new) if row}
            if op != D:
                now[new[0]] = tuple(before[c] if c in skipped else new[c] for c in range(4))
        at = number, number * 10
        for key in touched:
            if key in begun:
                versions.add((*begun.pop(key)[:6], *at))
            if key in now:
                begun[key] = (*now[key], *at, None, None)
    return versions | set(begun.values())


def applied(lake, result):
    """The lake's versions with a fold applied, as an epoch does it."""
    before = {(row[0], row[-1]): row for row in lake}
    assert len(before) == len(lake)
    assert not result.truncated
    gone = {
        (k, e)
        for k, e in zip(result.columns[0].to_pylist(), result.columns[7].to_pylist(), strict=True)
    }
    assert len(gone) == len(result)
    columns = [
        c.cast(pa.int64()).to_pylist() if i in {4, 6} else c.to_pylist()
        for i, c in enumerate(result.columns)
    ]
    sources = result.source and [c.to_pylist() for c in result.source]
    after, added = dict(before), 0
    for i, existed in enumerate(result.existed):
        key = columns[0][i], columns[7][i]
        assert existed == (key in before) or (not existed and result.emptied and key[1] is None)
        if existed:
            del after[key]
            added -= 1
    if result.emptied:
        rest = [
            row if row[-1] is not None else (*row[:6], *result.emptied) for row in after.values()
        ]
        after = {(row[0], row[-1]): row for row in rest}
    for i, state in enumerate(result.state):
        if state == ABSENT:
            continue
        row = [column[i] for column in columns]
        if state == PATCH:
            assert not result.unset[i, [0, 6, 7]].any()
            there = before[sources[0][i], sources[1][i]]
            row = [there[c] if result.unset[i, c] else row[c] for c in range(8)]
        assert (row[0], row[-1]) not in after
        after[row[0], row[-1]] = tuple(row)
        added += 1
    assert result.added == added
    return set(after.values())


@st.composite
def lakes(draw):
    """A lake with open and closed versions, and changes that can follow from it, in transactions."""
    table, events, _ = draw(histories(size=25))
    lake = {(*row, -5, -50, None, None) for row in table.values()}
    closed = draw(st.sets(st.integers(0, 5)))
    lake |= {(k, "was", None, None, -9, -90, -6, -60) for k in closed}
    starts = draw(st.lists(st.booleans(), min_size=len(events), max_size=len(events)))
    return lake, events, [1 + n for n in accumulate(map(int, starts))]


def written(fold):
    """The fold as another task reads it."""
    return fold_from_table(fold_to_table(fold))


def shown(rows):
    return sorted(map(repr, rows))


@given(lakes(), st.lists(st.integers(0, 100), max_size=4))
@settings(max_examples=300)
def test_a_history_has_each_committed_version_once(case, cuts):
    lake, events, transactions = case
    result = fold_history(timed(batches(events, cuts), transactions), KEY)
    assert shown(applied(lake, result)) == shown(expected(lake, events, transactions))


@given(lakes(), st.lists(st.integers(0, 100), min_size=1, max_size=4))
@settings(max_examples=300)
def test_histories_compose_even_within_a_transaction(case, cuts):
    lake, events, transactions = case
    folds = [written(fold_history([p], KEY)) for p in timed(batches(events, cuts), transactions)]
    after = shown(expected(lake, events, transactions))
    assert shown(applied(lake, reduce(compose_history, folds))) == after
    rest = folds.pop()
    while folds:
        rest = compose_history(folds.pop(), rest)
    assert shown(applied(lake, rest)) == after


def test_changes_that_cannot_follow_are_an_error():
    insert, update = (
        (I, (1, "a", None, None), (), None, None),
        (U, (1, "b", None, None), (), None, None),
    )
    delete = (D, None, (), (1, None, None, None), "K")
    for events in ([insert, insert], [delete, update], [delete, delete]):
        with pytest.raises(CorruptError, match="inconsistent"):
            fold_history(timed([Batch(events)], [1, 2]), KEY)
    first, then = (
        fold_history(timed([Batch([each])], [n]), KEY) for n, each in enumerate((delete, update), 1)
    )
    with pytest.raises(CorruptError, match="inconsistent"):
        compose_history(first, then)


def test_a_clock_that_is_set_back_sets_times_back_and_changes_no_version():
    """Times are those of the commits; which versions there are, and their order, depends on commit order alone."""
    events = [
        (I, (1, "a", None, None), (), None, None),
        (U, (1, "b", None, None), (), None, None),
        (U, (1, "c", None, None), (), None, None),
        (D, None, (), (1, None, None, None), "K"),
    ]
    clock = [30, 50, 20, 40]
    for cuts in ([], [1], [2], [1, 2, 3]):
        parts = timed(batches(events, cuts), [1, 2, 3, 4])
        first = 0
        for part in parts:
            part.commit_time = np.array(clock[first : first + len(part.events)], np.int64)
            first += len(part.events)
        folds = [fold_history([part], KEY) for part in parts]
        versions = sorted(applied(set(), reduce(compose_history, folds)), key=lambda row: row[5])
        # One that ends before it begins is in no answer by time; by LSN each is where it was.
        assert [row[1:2] + row[4:] for row in versions] == [
            ("a", 30, 10, 50, 20),
            ("b", 50, 20, 20, 30),
            ("c", 20, 30, 40, 40),
        ]


class _Turns(np.ndarray):
    """An array that counts how often places are looked up in one."""

    made = 0

    def __getitem__(self, at):
        _Turns.made += isinstance(at, np.ndarray)
        return super().__getitem__(at)


def test_a_row_that_is_moved_many_times_in_one_fold_costs_no_more_than_many_rows(monkeypatch):
    """Its value was never sent: it is that of the version before the first move, however many moves later."""
    count = 20_000
    moves = [(U, (k + 1, "a", None, None), (1,), (k, None, None, None), "K") for k in range(count)]
    steps = history._last_steps
    monkeypatch.setattr(history, "_last_steps", lambda step: steps(step.view(_Turns)))
    monkeypatch.setattr(_Turns, "made", 0)
    result = fold_history(timed([Batch(moves)], [*range(1, count + 1)]), KEY)
    # One column was not sent. Each turn doubles the steps, of which there are as many as moves; the last turn finds no more.
    assert 0 < _Turns.made <= np.log2(count) + 4
    assert len(result) == count + 2
    assert result.source is not None
    patched = result.state == PATCH
    assert set(result.source[0].filter(pa.array(patched)).to_pylist()) == {0}
    assert patched.sum() == count + 1


@given(st.data())
@settings(max_examples=200)
def test_steps_end_where_each_single_one_leads(data):
    count = data.draw(st.integers(1, 30))
    step = np.array([data.draw(st.integers(0, k)) for k in range(count)], np.int64)

    def end(place):
        return place if step[place] == place else end(step[place])

    assert history._last_steps(step).tolist() == [end(k) for k in range(count)]
