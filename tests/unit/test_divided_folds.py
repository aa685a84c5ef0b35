"""A table's partial folds, divided by the digests of its keys: what the parts are composed to is what they are as a whole."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_consumers.fold.keyed import compose, fold
from spark_consumers.fold.multiset import compose_multisets, fold_multiset
from spark_consumers.lake.epoch import removal, stage
from spark_consumers.lake.epoch.stage import Staged, joined
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.data_files import Stage, read_data, read_partial
from spark_consumers.lake.format.table_format import FileInfo
from tests.support.lake.divided_folds import composed_in_parts, located_in_parts
from tests.support.lake.table_on_disk import TableOnDisk
from walsender_bridge.errors import CorruptError, NotSupportedError

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
    parts = composed_in_parts(its, folds, str(tmp_path / "scratch"), PARTS)
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
    found = joined(composed_in_parts(its, folds, str(tmp_path / "scratch"), PARTS))
    assert rows_of(found.rows) == Counter(zip(*(c.to_pylist() for c in whole.rows()), strict=True))
    gone, counts = whole.removals()
    removed = pa.concat_tables([read_data(file.path) for file in found.removals])
    of = dict(zip(removed["c0"].to_pylist(), removed["n"].to_pylist(), strict=True))
    assert of == dict(zip(gone[0].to_pylist(), counts.tolist(), strict=True))
    assert len(removed) == len(counts)
    assert found.added == whole.added


def kept(ids):
    """Updates of these keys that do not send `v`."""
    return [(U, (key, None), None) for key in ids]


def test_unsent_values_are_composed_in_the_part_of_their_key(tmp_path):
    its, ids = target(tmp_path), range(100)
    first = fold([batch([(U, (key, f"v{key}"), None) for key in ids if key % 2], "K")], [0])
    then = fold([batch(kept(ids), "K", unsent=ids)], [0])
    parts = composed_in_parts(its, [first, then], str(tmp_path / "scratch"), PARTS)
    assert len(parts) == PARTS
    assert all(part.patches for part in parts)
    found = joined(parts)
    # What the epoch has set is known; of the others only the table knows the value.
    finished = rows_of(each.rows for each in found.patches)
    assert finished == Counter((key, f"v{key}") for key in ids if key % 2)
    unset = pa.concat_tables([read_data(each.file.path) for each in found.patches])
    assert unset["s0"].to_pylist() == unset["c0"].to_pylist()
    assert sorted(unset["c0"].to_pylist()) == [key for key in ids if not key % 2]


def test_unsent_values_of_several_parts_are_those_of_the_table(tmp_path, monkeypatch):
    its, ids, disk = target(tmp_path), range(100), TableOnDisk(tmp_path / "t")
    rows = fold([batch([(I, (key, f"old{key}"), None) for key in ids], "K")], [0])
    disk.apply(its, joined(composed_in_parts(its, [rows], f"{tmp_path}/scratch1", 1)), "")
    its = replace(its, prefix=f"{tmp_path}/t/data/{Stage(2, 1, 1)}")
    changes = [*kept(range(50)), *((U, (key, f"v{key}"), None) for key in range(50, 90))]
    then = fold([batch(changes, "K", unsent=range(50))], [0])
    scratch = f"{tmp_path}/scratch2"
    staged, located = located_in_parts(its, [then], scratch, PARTS, disk.runs)
    # Each part has found its own: nothing is left to look for.
    assert len(located) == PARTS
    assert sum(len(read_partial(part.found)) for part in located if part.found) == 90
    monkeypatch.setattr(removal, "_found", None)
    disk.apply(its, staged, scratch, located=located)
    new = {key: f"v{key}" if 50 <= key < 90 else f"old{key}" for key in ids}
    found = disk.rows(IN_FILES)
    assert dict(zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True)) == new
    assert len(found) == len(ids)


def test_a_row_that_a_part_removes_and_the_table_lacks_is_damage(tmp_path):
    its, disk = target(tmp_path), TableOnDisk(tmp_path / "t")
    gone = fold([batch([(D, None, (key, None)) for key in range(9)], "K")], [0])
    with pytest.raises(CorruptError, match="found 0"):
        located_in_parts(its, [gone], f"{tmp_path}/scratch", PARTS, disk.runs)


def test_keys_that_unsent_values_moved_between_are_composed_by_one_task(tmp_path):
    its, ids = target(tmp_path), range(50)
    first = fold([batch([(U, (key, f"v{key}"), None) for key in ids], "K")], [0])
    moves = [(U, (key + 100, None), (key, None)) for key in range(5)]
    moved = fold([batch(moves, "K", unsent=range(5))], [0])
    again = fold(
        [batch([(U, (200, None), (100, None)), *kept([101, 30])], "K", unsent=range(3))], [0]
    )
    *parts, linked = composed_in_parts(its, [first, moved, again], str(tmp_path / "scratch"), PARTS)
    assert len(parts) == PARTS
    expected = {200: "v0", **{key + 100: f"v{key}" for key in range(1, 5)}}
    assert rows_of(linked.rows) == Counter(expected.items())
    assert rows_of(joined(parts).rows) == Counter((key, f"v{key}") for key in range(5, 50))
    found = joined([*parts, linked])
    gone = [key for f in found.deletes for key in read_partial(f.path)["id"].to_pylist()]
    assert sorted(gone) == [*ids]
    assert found.added == 0


def test_more_than_an_array_holds_is_an_error_that_names_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "_MOST_BYTES", 1000)
    folds = [fold([batch([(I, (n, "x" * 600), None)], "K")], [0]) for n in range(2)]
    with pytest.raises(NotSupportedError, match=r"a\.public\.t: .* 2 GiB") as caught:
        composed_in_parts(target(tmp_path), folds, str(tmp_path / "scratch"), 1)
    assert caught.value.repair == "tuskline table resync a.public.t"


def test_what_is_staged_of_one_part_is_what_is_staged():
    one = Staged("t", 3, 7, rows=(FileInfo("f", 1, 2),))
    assert joined([one]) is one
