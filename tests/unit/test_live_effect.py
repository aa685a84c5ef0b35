"""The effect of a live read's folds: applied to the table, it gives what the changes give one after another."""

import random
from collections import Counter
from dataclasses import replace
from functools import reduce
from typing import Any

import pyarrow as pa
import pytest

from spark_consumers.fold.keyed import compose, fold
from spark_consumers.fold.multiset import fold_multiset
from spark_consumers.fold.serial import fold_to_table
from spark_consumers.lake.epoch import divided
from spark_consumers.lake.epoch.stage import RangeTask
from spark_consumers.lake.live.effect import ADDED, GONE, PATCHED, effect, has_patches
from spark_consumers.lake.live.tail import (
    FOLD,
    Found,
    _packed,
    effect_tasks,
    fold_tasks,
    in_batches,
)
from tests.unit.test_divided_folds import D, I, T, U, batch, history, target
from walsender_bridge.errors import TrimmedError

RANGES = 4


def unsent_history(drawn, table, count):
    """As `history`, with updates that leave the value alone: the events, and which of them lack it."""
    events: list[Any] = []
    unsent: list[int] = []
    held = dict(table)
    for op, new, old in history(drawn, table, count):
        value = None if new is None else new[1]
        if op == U and drawn.random() < 0.5:
            value = held[new[0] if old is None else old[0]]
            table[new[0]] = value
            unsent.append(len(events))
            events.append((U, (new[0], None), old))
        else:
            events.append((op, new, old))
        if old is not None:
            del held[old[0]]
        if new is not None:
            held[new[0]] = value
    return events, unsent


def applied(table, rows):
    """The table (key -> value) with an effect, of which no row contradicts it."""
    rows = rows.to_pylist()
    for row in rows:
        if row["kind"] == GONE:
            del table[row["g0"]]
    before = dict(table)
    for row in rows:
        if row["kind"] == PATCHED:
            del table[row["g0"]]
    for row in rows:
        if row["kind"] == PATCHED:
            assert row["c0"] not in table
            table[row["c0"]] = before[row["g0"]] if row["u1"] else row["c1"]
        elif row["kind"] == ADDED:
            assert row["c0"] not in table
            table[row["c0"]] = row["c1"]
    return table


def test_24_the_effect_on_a_table_with_a_key_is_that_of_its_changes(tmp_path, seed):
    drawn, its = random.Random(seed), target(tmp_path)
    patched = 0
    for _ in range(20):
        before = {key: f"v{key}" for key in range(30)}
        after = dict(before)
        folds = []
        for _ in range(RANGES):
            events, unsent = unsent_history(drawn, after, 30)
            folds.append(fold([batch(events, "K", unsent)], [0]))
        whole = reduce(compose, folds)
        patched += has_patches(whole)
        assert applied(before, effect(its, whole)) == after
    assert patched > 5


def test_30_the_effect_on_a_table_without_a_key_is_that_of_its_changes(tmp_path, seed):
    drawn, its = random.Random(seed), target(tmp_path, key=())
    before = Counter({(n % 5, "same"): 3 for n in range(5)})
    after = before.copy()
    events: list[Any] = []
    for _ in range(200):
        row = drawn.choice([*after.elements()])
        if drawn.random() < 0.5:
            events.append((I, row, None))
            after[row] += 1
        else:
            events.append((D, None, row))
            after[row] -= 1
            after = +after
    rows = effect(its, fold_multiset([batch(events, "O")])).to_pylist()
    found = before + Counter((r["c0"], r["c1"]) for r in rows if r["kind"] == ADDED)
    gone = [r for r in rows if r["kind"] == GONE]
    found.subtract(Counter({(r["c0"], r["c1"]): r["n"] for r in gone}))
    assert min(found.values()) >= 0
    assert +found == after
    assert len({r["i"] for r in gone}) == len(gone)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("truncated", [False, True])
def test_24_folds_sent_and_in_files_are_composed_in_order(tmp_path, seed, parts, truncated):
    drawn, its = random.Random(seed), target(tmp_path)
    before = {key: f"v{key}" for key in range(100)}
    after, found = dict(before), []
    for number in range(RANGES):
        events, unsent = unsent_history(drawn, after, 100)
        if truncated and number == 2:
            after.clear()
            events = [*events, (T, None, None), *history(drawn, after, 50)]
        folded = fold([batch(events, "K", unsent)], [0])
        one = Found(FOLD, its.name, number, parts, folded.truncated, size=1)
        if parts == 1:
            found.append(replace(one, content=_packed(fold_to_table(folded))))
            continue
        path, linked = divided.write(f"{tmp_path}/{number}", its, folded, parts)
        found.append(replace(one, path=path, linked=linked or ""))
    assert parts == 1 or any(one.linked for one in found), "unsent values move from key to key"
    drawn.shuffle(found)
    tasks = effect_tasks(its, found)
    assert len(tasks) == (1 if parts == 1 else parts + 1)
    table = {} if truncated else before
    for task in tasks:
        table = applied(table, pa.Table.from_batches(task.run()))
    assert table == after


@pytest.mark.parametrize("ranges", [1, 8, 9, 1000])
def test_what_all_ranges_send_to_the_driver_is_bounded(ranges):
    work = [RangeTask("shop", (), 0, 1, n, "", "", (), frozenset()) for n in range(ranges)]
    assert 0 < sum(task.sent for task in fold_tasks(work)) <= 64 << 20


def test_a_fold_whose_file_was_removed_is_named(tmp_path):
    its = target(tmp_path)
    for parts in (1, 2):
        one = Found(FOLD, its.name, 0, parts, path=str(tmp_path / "gone.arrow"))
        for task in effect_tasks(its, [one]):
            with pytest.raises(TrimmedError, match=r"gone.arrow: a file of this live read was"):
                task.run()


@pytest.mark.parametrize(("rows", "value"), [(0, 0), (200_000, 1), (1_000, 100_000)])
def test_rows_are_given_to_spark_in_batches_of_some_megabytes(rows, value):
    table = pa.table({"n": range(rows), "value": pa.array(["x" * value] * rows, pa.string())})
    batches = in_batches(table)
    assert pa.Table.from_batches(batches, table.schema) == table
    assert max((len(batch) for batch in batches), default=0) <= 1 << 16
    assert max((batch.nbytes for batch in batches), default=0) <= 17 << 20
