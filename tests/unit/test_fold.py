"""Folding, against a model that applies changes one row at a time."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_consumers.fold.keyed import ABSENT, PATCH, ROW, compose, fold
from spark_consumers.fold.multiset import compose_multisets, fold_multiset
from spark_consumers.fold.row_codes import row_codes
from walsender_bridge.errors import CorruptError

I, U, D, T = b"IUDT"  # noqa: E741  # the letters that pgoutput uses
TYPES = [pa.int64(), pa.string(), pa.string(), pa.float64()]
KEY = [0]


@dataclass
class Batch:
    """Rows of (op, new values, columns not sent, old values, kind of old tuple) as the decoder gives them."""

    events: list[Any]
    types: list[pa.DataType] = field(default_factory=lambda: TYPES)

    def __post_init__(self):
        width = len(self.types)
        none = (None,) * width
        self.ops = np.array([e[0] for e in self.events], np.uint8)
        news = [e[1] or none for e in self.events]
        olds = [e[3] or none for e in self.events]
        self.old_kind = np.array([ord(e[4]) if e[4] else 0 for e in self.events], np.uint8)
        self.columns = [pa.array([r[c] for r in news], t) for c, t in enumerate(self.types)]
        self.old_columns: list[pa.Array] | None = None
        if self.old_kind.any():
            self.old_columns = [pa.array([r[c] for r in olds], t) for c, t in enumerate(self.types)]
        mask = np.array([[c in e[2] for c in range(width)] for e in self.events], np.bool_)
        self.unchanged = mask if mask.any() else None


def batches(events, cuts, types=TYPES):
    """The events in batches, cut at `cuts`."""
    edges = sorted({0, len(events), *(c % (len(events) + 1) for c in cuts)})
    return [Batch(events[a:b], types) for a, b in pairwise(edges) if b > a]


def apply(table, result):
    """`table` (key -> row) with a fold applied, by the meaning that `Fold` states."""
    before = {} if result.truncated else dict(table)
    after = dict(before)
    columns = [c.to_pylist() for c in result.columns]
    sources = None if result.source is None else [s.to_pylist() for s in result.source]
    keys = [tuple(columns[k][i] for k in result.key) for i in range(len(result))]
    for i, key in enumerate(keys):
        assert bool(result.existed[i]) == (key in before)
        after.pop(key, None)
    for i, key in enumerate(keys):
        if result.state[i] == ABSENT:
            continue
        row = [c[i] for c in columns]
        if result.state[i] == PATCH:
            assert sources is not None
            there = before[tuple(s[i] for s in sources)]
            assert result.unset[i].any()
            row = [there[c] if result.unset[i, c] else row[c] for c in range(len(row))]
        assert key not in after
        after[key] = tuple(row)
    assert len(after) - len(before) == result.added
    return after


TEXTS = st.sampled_from([None, "", "a", "ä", "long" * 3])
FLOATS = st.sampled_from([None, 0.0, -0.0, 1.5])


@st.composite
def histories(draw, *, size=40, identity=None):
    """A table, changes that can follow from it, and the table after them."""
    identity = identity or draw(st.sampled_from("dfi"))
    keys = st.integers(0, 5)
    values = st.tuples(TEXTS, TEXTS, FLOATS)
    table = {(k,): (k, *v) for k, v in draw(st.dictionaries(keys, values, max_size=6)).items()}
    events: list[Any] = []
    now = dict(table)
    for _ in range(draw(st.integers(1, size))):
        kind = draw(st.sampled_from("IIUUUUMMDT" if draw(st.booleans()) else "IUUMD"))
        free = [k for k in range(6) if (k,) not in now]
        if kind == "T":
            now.clear()
            events.append((T, None, (), None, None))
        elif kind == "I" and free:
            key = draw(st.sampled_from(free))
            row = (key, *draw(values))
            now[key,] = row
            events.append((I, row, (), None, None))
        elif kind in "UMD" and now:
            (key,) = draw(st.sampled_from(sorted(now)))
            old = now.pop((key,))
            shown = old if identity == "f" else (key, None, None, None)
            tag = "O" if identity == "f" else "K"
            if kind == "D":
                events.append((D, None, (), shown, tag))
                continue
            target = draw(st.sampled_from([*free, key])) if kind == "M" else key
            row = (target, *draw(values))
            kept = draw(st.sets(st.sampled_from([1, 2, 3])))
            row = tuple(old[c] if c in kept else row[c] for c in range(4))
            now[target,] = row
            # With the whole old row at hand the decoder leaves nothing unchanged.
            skipped = () if identity == "f" else kept
            sent = tuple(None if c in skipped else row[c] for c in range(4))
            told = identity == "f" or target != key
            events.append((U, sent, skipped, shown if told else None, tag if told else None))
    return table, events or [(T, None, (), None, None)], now if events else {}


def exact(table):
    return {k: repr(v) for k, v in table.items()}


@given(histories(), st.lists(st.integers(0, 100), max_size=4))
@settings(max_examples=200)
def test_a_fold_applied_is_the_changes_one_after_another(history, cuts):
    table, events, expected = history
    result = fold(batches(events, cuts), KEY)
    assert exact(apply(table, result)) == exact(expected)


@given(histories(), st.lists(st.integers(0, 100), min_size=1, max_size=4))
@settings(max_examples=200)
def test_folds_compose(history, cuts):
    table, events, expected = history
    folds = [fold([batch], KEY) for batch in batches(events, cuts)]
    for order in (_from_the_left, _from_the_right):
        assert exact(apply(table, order(folds))) == exact(expected)


def _from_the_left(folds):
    result, *rest = folds
    for each in rest:
        result = compose(result, each)
    return result


def _from_the_right(folds):
    *rest, result = folds
    for each in reversed(rest):
        result = compose(each, result)
    return result


def test_29_what_one_update_set_stands_when_the_next_leaves_it_alone():
    events = [
        (U, (1, "set by the first", "x", 1.0), (), None, None),
        (U, (1, None, "y", 2.0), (1,), None, None),
    ]
    result = fold([Batch(events)], KEY)
    assert result.state.tolist() == [ROW]
    assert [c.to_pylist()[0] for c in result.columns] == [1, "set by the first", "y", 2.0]


def test_29_what_nobody_set_is_taken_from_the_table():
    events = [
        (U, (1, None, "y", None), (1, 3), None, None),
        (U, (1, None, None, 2.0), (1, 2), None, None),
    ]
    for result in (
        fold([Batch(events)], KEY),
        compose(fold([Batch(events[:1])], KEY), fold([Batch(events[1:])], KEY)),
    ):
        assert result.state.tolist() == [PATCH]
        assert result.unset is not None
        assert result.unset.tolist() == [[False, True, False, False]]
        assert apply({(1,): (1, "kept", "old", 0.0)}, result) == {(1,): (1, "kept", "y", 2.0)}


def test_two_keys_swapped_through_a_third_keep_their_own_unsent_values():
    def move(old, new):
        return (U, (new, None, "s", 0.0), (1,), (old, None, None, None), "K")

    result = fold([Batch([move(1, 9), move(2, 1), move(9, 2)])], KEY)
    table = {(1,): (1, "one", "", 0.0), (2,): (2, "two", "", 0.0)}
    assert apply(table, result) == {(1,): (1, "two", "s", 0.0), (2,): (2, "one", "s", 0.0)}


def test_a_key_kept_out_of_line_is_read_from_the_old_tuple():
    types = [pa.string(), pa.int64()]
    events = [(U, (None, 5), (0,), ("long key", None), "K")]
    result = fold([Batch(events, types)], [0])
    assert [c.to_pylist() for c in result.columns] == [["long key"], [5]]
    assert result.state.tolist() == [ROW]


@pytest.mark.parametrize(
    "events",
    [
        [(I, (1, "", "", 0.0), (), None, None), (I, (1, "", "", 0.0), (), None, None)],
        [(D, None, (), (1, None, None, None), "K"), (U, (1, "", "", 0.0), (), None, None)],
        [(T, None, (), None, None), (U, (1, "", "", 0.0), (), None, None)],
        [(T, None, (), None, None), (D, None, (), (1, None, None, None), "K")],
    ],
)
def test_changes_that_cannot_follow_are_refused(events):
    with pytest.raises(CorruptError, match="changes are inconsistent"):
        fold([Batch(events)], KEY)
    with pytest.raises(CorruptError, match="changes are inconsistent"):
        compose(fold([Batch(events[:1])], KEY), fold([Batch(events[1:])], KEY))


@pytest.mark.parametrize("batches", [[0], [0, 1]])
@pytest.mark.parametrize("op", [U, D])
def test_a_row_that_is_named_by_other_columns_than_the_key_is_refused(op, batches):
    """As a partition does whose replica identity is another index than its table's."""
    new = None if op == D else (7, "b", None, 1.0)
    named = (op, new, (), (None, "a", None, None), "K")
    insert = (I, (1, "z", None, 1.0), (), None, None)
    events = [insert, named]
    with pytest.raises(CorruptError, match="columns other than the table's key"):
        fold([Batch(events)] if batches == [0] else [Batch(events[:1]), Batch(events[1:])], KEY)


def test_a_key_whose_value_does_not_fit_is_named_by_its_text():
    """In wide rows the text stands beside the value, and one of the two is there."""
    types = [pa.int64(), pa.string(), pa.string(), pa.string()]
    for old in ((1, None, None, None), (None, None, "-infinity", None)):
        event = (U, (None, "x", "infinity", None), (), old, "K")
        assert fold([Batch([event], types)], (0, 2), key_columns=1).added == 0
    nothing = (U, (1, "x", None, None), (), (None,) * 4, "K")
    with pytest.raises(CorruptError, match="columns other"):
        fold([Batch([nothing], types)], (0, 2), key_columns=1)


def test_keys_of_several_columns_and_every_type_are_told_apart():
    types: list[pa.DataType] = [
        pa.decimal128(10, 2),
        pa.binary(),
        pa.float64(),
        pa.list_(pa.int32()),
    ]
    rows: list[list[Any]] = [
        [None, b"", 0.0, [1, None]],
        [None, b"", -0.0, [1, None]],
        [None, None, 0.0, [1]],
        [None, b"", float("nan"), None],
    ]
    columns = [pa.array([r[c] for r in rows], t) for c, t in enumerate(types)]
    first, again = row_codes([columns, [c.take(pa.array([3, 1])) for c in columns]])
    assert len(set(first.tolist())) == 4
    assert again.tolist() == [first[3], first[1]]


# Bags


BAG_TYPES = [pa.int64(), pa.string(), pa.list_(pa.int64())]
BAG_ROWS = st.tuples(
    st.integers(0, 1), st.sampled_from([None, "a"]), st.sampled_from([None, [1], [None]])
)


@st.composite
def bag_histories(draw):
    start = draw(st.lists(BAG_ROWS, max_size=5))
    events: list[Any] = []
    now = list(start)
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from("IIIUUDDT"))
        event: tuple[Any, ...]
        if kind == "T":
            now, event = [], (T, None, (), None, None)
        elif kind == "I":
            row = draw(BAG_ROWS)
            now.append(row)
            event = (I, row, (), None, None)
        elif not now:
            continue
        else:
            old = now.pop(draw(st.integers(0, len(now) - 1)))
            row = draw(BAG_ROWS) if kind == "U" else None
            if row:
                now.append(row)
            event = (U if row else D, row, (), old, "O")
        events.append(event)
    return start, events or [(T, None, (), None, None)], now if events else []


def apply_bag(start, result):
    after = Counter() if result.truncated else Counter(map(repr, start))
    for row in zip(*(c.to_pylist() for c in result.rows()), strict=True):
        after[repr(row)] += 1
    gone, counts = result.removals()
    for row, n in zip(
        zip(*(c.to_pylist() for c in gone), strict=True), counts.tolist(), strict=True
    ):
        after[repr(row)] -= n
        assert after[repr(row)] >= 0
    return +after


@given(bag_histories(), st.lists(st.integers(0, 100), max_size=3))
@settings(max_examples=300)
def test_bags_fold_and_compose(history, cuts):
    start, events, expected = history
    parts = batches(events, cuts, BAG_TYPES)
    composed, *rest = [fold_multiset([part]) for part in parts]
    for each in rest:
        composed = compose_multisets(composed, each)
    for result in (fold_multiset(parts), composed):
        assert apply_bag(start, result) == Counter(map(repr, expected))


def test_30_of_three_equal_rows_one_goes():
    row = (1, "a", [1])
    result = fold_multiset([Batch([(D, None, (), row, "O")], BAG_TYPES)])
    assert apply_bag([row] * 3, result) == Counter({repr(row): 2})


def test_an_update_of_a_bag_without_its_old_row_is_refused():
    with pytest.raises(CorruptError, match="REPLICA IDENTITY FULL"):
        fold_multiset([Batch([(U, (1, "a", None), (), None, None)], BAG_TYPES)])
