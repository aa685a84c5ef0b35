"""The fold of tables that keep deleted rows, against a model that applies changes one row at a time."""

from functools import reduce
from itertools import accumulate

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_consumers.fold.kept import compose_kept, fold_kept
from spark_consumers.fold.keyed import PATCH, Fold
from spark_consumers.fold.serial import fold_from_table, fold_to_table
from tests.unit.test_fold import KEY, Batch, D, I, T, batches, histories

MARKS = [pa.timestamp("us", "UTC"), pa.int64()]


def timed(parts):
    """The batches with the marks' columns; each change is a transaction of its own, at its number."""
    ends = [0, *accumulate(len(part.events) for part in parts)]
    for part, first in zip(parts, ends, strict=False):
        count = len(part.events)
        numbers = np.arange(first, first + count) + 1
        part.commit_time, part.commit_lsn = numbers, (numbers * 10).astype(np.uint64)
        part.columns = [*part.columns, *(pa.nulls(count, kind) for kind in MARKS)]
        if part.old_columns is not None:
            part.old_columns = [*part.old_columns, *(pa.nulls(count, kind) for kind in MARKS)]
        if part.unchanged is not None:
            part.unchanged = np.column_stack([part.unchanged, np.zeros((count, 2), np.bool_)])
    return parts


def expected(lake, events):
    """The lake's rows, by key, each with its marks, after these changes."""
    rows = dict(lake)
    for number, (op, new, skipped, old, _) in enumerate(events, 1):
        marks = (number, number * 10)
        if op == T:
            rows = {k: row if row[-1] else (*row[:-2], *marks) for k, row in rows.items()}
        elif op == D:
            key = (old[0],)
            rows[key] = (*rows[key][:-2], *marks)
        elif op == I:
            rows[new[0],] = (*new, None, None)
        else:
            key = (old[0],) if old else (new[0],)
            before = rows[key]
            values = tuple(before[c] if c in skipped else new[c] for c in range(4))
            if key != (new[0],):
                rows[key] = (*before[:-2], *marks)
            rows[new[0],] = (*values, None, None)
    return rows


def applied(lake, result):
    """The lake's rows with a fold applied, as an epoch does it."""
    assert not result.truncated
    assert result.existed.all()
    before = dict(lake)
    if result.emptied:
        before = {k: r if r[-1] else (*r[:-2], *result.emptied) for k, r in before.items()}
    columns = [
        c.cast(pa.int64()).to_pylist() if i == 4 else c.to_pylist()
        for i, c in enumerate(result.columns)
    ]
    after = dict(before)
    for i in range(len(result)):
        row = [column[i] for column in columns]
        if result.state[i] == PATCH:
            assert not result.unset[i, 4:].any()
            there = before[(result.source[0][i].as_py(),)]
            row = [there[c] if result.unset[i, c] else row[c] for c in range(6)]
        after[row[0],] = tuple(row)
    return after


@st.composite
def kept_histories(draw):
    """A lake with living and deleted rows, and changes that can follow from it."""
    table, events, _ = draw(histories(size=25))
    free = [k for k in range(6) if (k,) not in table]
    gone = draw(st.sets(st.sampled_from(free))) if free else set()
    lake = {key: (*row, None, None) for key, row in table.items()}
    lake |= {(k,): (k, "gone", None, None, -5, 5) for k in gone}
    return lake, events


def written(fold):
    """The fold as another task reads it."""
    found = fold_from_table(fold_to_table(fold))
    assert isinstance(found, Fold)
    return found


def shown(rows):
    return {key: repr(row) for key, row in rows.items()}


@given(kept_histories(), st.lists(st.integers(0, 100), max_size=4))
@settings(max_examples=300)
def test_deleted_rows_stay_with_their_last_values_and_marks(history, cuts):
    lake, events = history
    result = fold_kept(timed(batches(events, cuts)), KEY)
    assert shown(applied(lake, result)) == shown(expected(lake, events))


@given(kept_histories(), st.lists(st.integers(0, 100), min_size=1, max_size=4))
@settings(max_examples=300)
def test_folds_of_kept_rows_compose(history, cuts):
    lake, events = history
    folds = [written(fold_kept([part], KEY)) for part in timed(batches(events, cuts))]
    after = expected(lake, events)
    assert shown(applied(lake, reduce(compose_kept, folds))) == shown(after)
    rest = folds.pop()
    while folds:
        rest = compose_kept(folds.pop(), rest)
    assert shown(applied(lake, rest)) == shown(after)


def test_a_row_that_comes_and_goes_within_an_epoch_is_kept():
    row = (1, "a", None, 0.5)
    parts = timed([Batch([(I, row, (), None, None), (D, None, (), (1, None, None, None), "K")])])
    assert applied({}, fold_kept(parts, KEY)) == {(1,): (*row, 2, 20)}
