"""A table's partial folds, divided by the digests of its keys: what the parts are composed to is what they are as a whole."""

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_consumers.fold.keyed import compose, fold
from spark_consumers.fold.multiset import compose_multisets, fold_multiset
from spark_consumers.lake.epoch.stage import (
    Staged,
    composing_of,
    divided,
    is_divisible,
    joined,
    run_compose,
)
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.data_files import Stage, read_data, read_partial, write_partials
from spark_consumers.lake.format.table_format import FileInfo

I, U, D, T = b"IUDT"  # noqa: E741  # the letters that pgoutput uses
#: The table's smallint is an integer in its data files.
COLUMNS = pa.schema([("id", pa.int16()), ("v", pa.string())])
IN_FILES = pa.schema([("id", pa.int32()), ("v", pa.string())])
RANGES, PARTS = 4, 3


def target(folder, key=("id",)):
    prefix = f"{folder}/t/data/{Stage(1, 1, 1)}"
    return Target("a.public.t", "public.t", prefix, COLUMNS, IN_FILES, key, 0, 1)


def batch(events, kind, unsent=()):
    """Changes (op, new row, old row) as the decoder has them; `kind`: of old rows. `unsent`: the changes without a `v`."""
    none = (None, None)

    def columns(rows):
        return [
            pa.array([(row or none)[n] for row in rows], field.type)
            for n, field in enumerate(COLUMNS)
        ]

    unchanged = np.zeros((len(events), 2), np.bool_)
    unchanged[list(unsent), 1] = True
    return SimpleNamespace(
        ops=np.array([op for op, _, _ in events], np.uint8),
        columns=columns([new for _, new, _ in events]),
        unchanged=unchanged if len(unsent) else None,
        old_columns=columns([old for _, _, old in events]),
        old_kind=np.array([0 if old is None else ord(kind) for _, _, old in events], np.uint8),
    )


def history(drawn, table, count):
    """So many changes of a table (key -> value), which is changed."""
    for _ in range(count):
        at, free = drawn.choice([*table, -1]), drawn.randrange(1000)
        if at < 0 or (drawn.random() < 0.4 and free not in table):
            if free not in table:
                table[free] = f"v{drawn.random()}"
                yield I, (free, table[free]), None
        elif drawn.random() < 0.3:
            del table[at]
            yield D, None, (at, None)
        elif free not in table and drawn.random() < 0.5:
            table[free] = f"moved {table.pop(at)}"
            yield U, (free, table[free]), (at, None)
        else:
            table[at] = f"v{drawn.random()}"
            yield U, (at, table[at]), None


def composed_in_parts(its, folds, scratch):
    """The folds as partials in parts, and what the tasks for the parts have staged."""
    staged = []
    for number, folded in enumerate(folds):
        path = write_partials(f"{scratch}/{number}.arrow", divided(its, folded, PARTS))
        staged.append(Staged(its.name, number, 5, partial=path, parts=PARTS))
    return [run_compose(task) for task in composing_of(its, staged, scratch)]


def rows_of(files):
    tables = [pq.read_table(file.path) for file in files]
    return Counter((row["id"], row["v"]) for table in tables for row in table.to_pylist())


@pytest.mark.parametrize("truncated", [False, True])
def test_parts_of_a_table_with_a_key_are_composed_as_the_whole(tmp_path, seed, truncated):
    drawn = random.Random(seed)
    table = {key: f"v{key}" for key in range(100)}
    folds = []
    for number in range(RANGES):
        events = [*history(drawn, table, 300)]
        if truncated and number == 2:
            table.clear()
            events = [*events, (T, None, None), *history(drawn, table, 50)]
        folds.append(fold([batch(events, "K")], [0]))
    whole = folds[0]
    for then in folds[1:]:
        whole = compose(whole, then)
    its = target(tmp_path)
    assert all(is_divisible(its, folded) for folded in folds)
    parts = composed_in_parts(its, folds, str(tmp_path / "scratch"))
    found = joined(parts)
    assert len(parts) == PARTS
    assert all(part.rows for part in parts)
    assert rows_of(found.rows) == Counter(zip(*(c.to_pylist() for c in whole.rows()), strict=True))
    gone = [key for f in found.deletes for key in read_partial(f.path)["id"].to_pylist()]
    assert Counter(gone) == Counter(whole.deletes()[0].to_pylist())
    assert (found.added, found.truncated) == (whole.added, truncated)
    assert found.changes == 5 * RANGES


def test_parts_of_a_table_without_a_key_are_composed_as_the_whole(tmp_path, seed):
    drawn = random.Random(seed)
    folds = []
    for _ in range(RANGES):
        rows = [(drawn.randrange(40), None) for _ in range(200)]
        ops = [drawn.choice([I, D]) for _ in rows]
        events = [
            (op, row if op == I else None, None if op == I else row)
            for op, row in zip(ops, rows, strict=True)
        ]
        folds.append(fold_multiset([batch(events, "O")]))
    whole = folds[0]
    for then in folds[1:]:
        whole = compose_multisets(whole, then)
    its = target(tmp_path, key=())
    found = joined(composed_in_parts(its, folds, str(tmp_path / "scratch")))
    assert rows_of(found.rows) == Counter(zip(*(c.to_pylist() for c in whole.rows()), strict=True))
    gone, counts = whole.removals()
    removed = pa.concat_tables([read_data(file.path) for file in found.removals])
    of = dict(zip(removed["c0"].to_pylist(), removed["n"].to_pylist(), strict=True))
    assert of == dict(zip(gone[0].to_pylist(), counts.tolist(), strict=True))
    assert len(removed) == len(counts)
    assert found.added == whole.added


def test_a_fold_with_values_of_other_rows_is_not_divided(tmp_path):
    """An unsent value may be in the row of another key, which is in another part."""
    events = [(U, (1, None), None), (U, (2, "v"), None)]
    folded = fold([batch(events, "K", unsent=[0])], [0])
    assert not is_divisible(target(tmp_path), folded)


def test_what_is_staged_of_one_part_is_what_is_staged():
    one = Staged("t", 3, 7, rows=(FileInfo("f", 1, 2),))
    assert joined([one]) is one
