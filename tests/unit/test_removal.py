"""What an epoch removes from a table's files, by the functions of the executors: vectors, files that go, files rewritten."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyroaring import BitMap64

from spark_consumers.lake.epoch import removal
from spark_consumers.lake.epoch.complete import Completed, moved
from spark_consumers.lake.epoch.removal import RemovalTask, Rewrite, run_removal
from spark_consumers.lake.epoch.stage import Patches, Staged
from spark_consumers.lake.epoch.table_changes import Moved, changed_files, changes_tasks
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.data_files import Stage, write_data, write_partial, write_table
from spark_consumers.lake.format.table_format import ROW_ID, FileInfo, ScanFile
from spark_consumers.lake.index.build import bitmaps_table
from spark_consumers.lake.index.run_format import DataFile
from tests.support.lake.table_on_disk import TableOnDisk
from walsender_bridge.errors import CorruptError

COLUMNS = pa.schema([("k", pa.int32()), ("v", pa.string())])
MORE = 100


class Epochs:
    """Epochs of one table, keyed or a multiset, `hidden`: that an earlier version copied; its rows are those of a model."""

    def __init__(self, folder: Path, *, keyed: bool = True, hidden: bool = False) -> None:
        self.folder, self.keyed, self.hidden = folder, keyed, hidden
        self.disk = TableOnDisk(folder / "t")
        self.schema = COLUMNS.append(pa.field(ROW_ID, pa.string())) if hidden else COLUMNS
        self.number = 0
        self.copy_on_write = False

    def target(self) -> Target:
        prefix = f"{self.folder}/t/data/{Stage(self.number, 1, 1)}"
        key = ("k",) if self.keyed else ()
        made = Target("shop.public.t", "public.t", prefix, COLUMNS, self.schema, key, 0, 1)
        return replace(made, copy_on_write=self.copy_on_write)

    def staged(self, add=(), remove=(), patch=None, counts=None) -> Staged:
        self.number += 1
        target = self.target()
        scratch = self.folder / f"scratch-{self.number}"
        rows: tuple[FileInfo, ...] = ()
        if add:
            columns = [pa.array([k for k, _ in add], pa.int32()), pa.array([v for _, v in add])]
            if self.hidden:
                columns.append(pa.array([f"{self.number}-{i}" for i in range(len(add))]))
            where = f"{scratch}/rows.parquet" if patch else f"{target.prefix}.parquet"
            made = write_data(where, columns, self.schema)
            assert made is not None
            rows = (made,)
        deletes: tuple[FileInfo, ...] = ()
        removals: tuple[FileInfo, ...] = ()
        patches: tuple[Patches, ...] = ()
        if counts:
            gone: dict[str, Any] = {"c0": pa.array([k for k, _ in counts], pa.int32())}
            gone |= {"c1": pa.array([v for _, v in counts]), "n": pa.array(counts.values())}
            removals = (write_table(f"{scratch}/removals.parquet", pa.table(gone)),)
        elif remove:
            keys = pa.table({"k": pa.array(remove, pa.int32())})
            path = write_partial(f"{scratch}/deletes.arrow", keys)
            deletes = (FileInfo(path, len(remove), 0),)
        if patch:
            # From the row of one key to another key, the value unsent.
            fields: dict[str, Any] = {"s0": pa.array(patch.keys(), pa.int32())}
            fields |= {"c0": pa.array(patch.values())}
            fields |= {"c1": pa.nulls(len(patch), pa.string()), "u0": [False] * len(patch)}
            fields |= {"u1": [True] * len(patch)}
            made_of = write_table(f"{scratch}/patches.parquet", pa.table(fields))
            patches, rows = (Patches(made_of, *rows or (None,)),), ()
        return Staged("t", 0, 1, None, rows, deletes, patches, removals)

    def apply(self, *, small_files=MORE, **changes) -> list[Completed]:
        staged = self.staged(**changes)
        scratch = str(self.folder / f"scratch-{self.number}")
        return self.disk.apply(self.target(), staged, scratch, small_files=small_files)

    def scanned(self) -> list[ScanFile]:
        """Its data files, as a scan of its snapshot finds them."""
        return [
            ScanFile(file.path, file.size, file.rows, self.disk.vectors.get(name))
            for name, file in self.disk.files.items()
        ]

    def rows(self) -> list[tuple[int, str]]:
        table = self.disk.rows(self.schema)
        return sorted(zip(table["k"].to_pylist(), table["v"].to_pylist(), strict=True))


def test_a_removed_key_is_gone_and_comes_back_elsewhere(tmp_path):
    table = Epochs(tmp_path)
    table.apply(add=[(k, f"v{k}") for k in range(10)])
    table.apply(add=[(3, "new"), (20, "x")], remove=[3, 4])
    table.apply(add=[(4, "again")], remove=[3])
    expected = [(k, f"v{k}") for k in range(10) if k not in {3, 4}]
    assert table.rows() == sorted([*expected, (20, "x"), (4, "again")])
    assert {v.file: v.rows for v in table.disk.vectors.values()} == {
        f"data/{Stage(1, 1, 1)}.parquet": 2,
        f"data/{Stage(2, 1, 1)}.parquet": 1,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"remove": [1, 99]},
        {"remove": [1, 2]},
        {"remove": [1], "patch": {1: 1, 5: 5}},
        {"remove": [1, 99], "patch": {99: 99}},
    ],
    ids=["never there", "removed before", "a patch of another row", "a patch of no row"],
)
def test_a_removal_without_its_row_is_damage(tmp_path, changes):
    table = Epochs(tmp_path)
    table.apply(add=[(k, "v") for k in range(9)])
    table.apply(remove=[2])
    before = table.rows()
    with pytest.raises(
        CorruptError, match="expected 2 rows in the table before the epoch, found 1"
    ):
        table.apply(**changes)
    assert table.rows() == before


@pytest.mark.parametrize("hidden", [False, True])
def test_equal_rows_go_one_by_one_and_no_more_than_there_are(tmp_path, hidden):
    table = Epochs(tmp_path, keyed=False, hidden=hidden)
    table.apply(add=[(1, "a")] * 3 + [(1, "b"), (2, "c")] + [(9, "z")] * 20)
    table.apply(add=[(1, "a")], counts={(1, "a"): 2})
    rest = [(1, "b"), (2, "c")] + [(9, "z")] * 20
    assert table.rows() == sorted([(1, "a")] * 2 + rest)
    with pytest.raises(
        CorruptError, match="expected 3 rows in the table before the epoch, found 2"
    ):
        table.apply(counts={(1, "a"): 3})
    table.apply(counts={(1, "a"): 2, (2, "c"): 1})
    assert table.rows() == [(1, "b")] + [(9, "z")] * 20
    table.apply(add=[(1, "d")])
    table.apply(add=[(1, "e")], counts={(1, "b"): 1}, small_files=1)
    assert any("rewritten" in name for name in table.disk.files)
    assert table.rows() == [(1, "d"), (1, "e")] + [(9, "z")] * 20


def test_a_patch_takes_what_was_not_sent_from_the_row_before(tmp_path):
    table = Epochs(tmp_path)
    table.apply(add=[(k, f"v{k}") for k in range(20)])
    table.apply(add=[(1, "w")], remove=[1])
    # 1 to 50, 2 to 1, 3 stays; with a whole row in the same epoch.
    table.apply(add=[(60, "x")], remove=[1, 2, 3], patch={1: 50, 2: 1, 3: 3})
    expected = [(k, f"v{k}") for k in range(20) if k not in {1, 2}]
    assert table.rows() == sorted([*expected, (50, "w"), (1, "v2"), (60, "x")])
    table.apply(remove=[1, 50])
    assert table.rows() == sorted([*expected, (60, "x")])


def test_a_file_without_living_rows_goes_with_its_vector(tmp_path):
    table = Epochs(tmp_path)
    table.apply(add=[(1, "a"), (2, "b")])
    table.apply(add=[(k, "c") for k in range(10, 20)], remove=[1])
    assert len(table.disk.vectors) == 1
    table.apply(remove=[2])
    assert list(table.disk.files) == [f"data/{Stage(2, 1, 1)}.parquet"]
    assert not table.disk.vectors
    table.apply(remove=list(range(10, 20)))
    assert not table.disk.files
    table.apply(add=[(1, "a")])
    assert table.rows() == [(1, "a")]


@pytest.mark.parametrize("keyed", [True, False])
def test_a_table_that_is_copied_on_write_has_no_vector(tmp_path, keyed):
    table = Epochs(tmp_path, keyed=keyed)
    rows = [(k, f"v{k}") for k in range(10)]

    def removal(*keys):
        return {"remove": list(keys)} if keyed else {"counts": {(k, f"v{k}"): 1 for k in keys}}

    table.apply(add=rows[:5])
    table.apply(add=rows[5:], **removal(3))
    assert len(table.disk.vectors) == 1
    table.copy_on_write = True
    # The vectors that were there go with the next epoch, whatever it removes.
    table.apply(**removal(7))
    assert not table.disk.vectors
    table.apply(add=[(20, "x")], **removal(8))
    table.apply(add=[(21, "x")])
    assert not table.disk.vectors
    left = [row for row in rows if row[0] not in {3, 7, 8}]
    assert table.rows() == [*left, (20, "x"), (21, "x")]
    table.copy_on_write = False
    table.apply(**removal(0))
    assert len(table.disk.vectors) == 1
    assert table.rows() == [*left[1:], (20, "x"), (21, "x")]


def test_many_small_files_become_one(tmp_path):
    table = Epochs(tmp_path)
    rows: dict[int, str] = {}
    for number in range(12):
        new = dict.fromkeys(range(number * 3, number * 3 + 6), f"{number}")
        table.apply(add=list(new.items()), remove=[k for k in new if k in rows], small_files=4)
        rows |= new
        assert table.rows() == sorted(rows.items())
        assert len(table.disk.files) <= 6
    assert any("rewritten" in name for name in table.disk.files)


def test_a_large_file_that_is_half_dead_is_rewritten(tmp_path, monkeypatch):
    monkeypatch.setattr(removal, "SMALL", 0)
    table = Epochs(tmp_path)
    table.apply(add=[(k, "a") for k in range(100)])
    table.apply(add=[(k, "b") for k in range(100, 150)])
    table.apply(remove=list(range(50)))
    assert len(table.disk.files) == 2
    assert len(table.disk.vectors) == 1
    table.apply(remove=[50, 120])
    assert sorted(f.rows for f in table.disk.files.values()) == [49, 50]
    assert [v.rows for v in table.disk.vectors.values()] == [1]
    table.apply(remove=[80, 100])
    assert len(table.rows()) == 96


@pytest.mark.parametrize("copied", [False, True], ids=["small files", "copied on write"])
@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "bag"])
def test_moved_rows_are_not_among_the_changes_of_a_write(tmp_path, keyed, copied):
    """What the tasks read is the difference, whatever is rewritten; and each changed row once, unless a row takes its own place."""
    table = Epochs(tmp_path, keyed=keyed)
    table.copy_on_write = copied
    table.apply(add=[(k, f"v{k}") for k in range(40)])
    rewritten = 0
    for number in range(10):
        before, was = table.scanned(), Counter(table.rows())
        gone = sorted(was)[number::9]
        patch = {gone[0][0]: 200 + number} if keyed and number % 2 else None
        new = [(100 + 10 * number + n, f"w{number}") for n in range(number % 4)]
        what = {"remove": [k for k, _ in gone]} if keyed else {"counts": dict.fromkeys(gone, 1)}
        done = table.apply(add=new, patch=patch, small_files=2, **what)
        moves = [each.moved for each in done if each.moved]
        rewritten += len(moves)
        found = changed_files(before, table.scanned(), moves)
        read: Counter[tuple[int, str]] = Counter()
        for task in changes_tasks(str(tmp_path / "t"), found, COLUMNS, "sign"):
            for batch in task.run():
                for k, v, sign in zip(*(c.to_pylist() for c in batch.columns), strict=True):
                    read[k, v] += sign
        now = Counter(table.rows())
        assert {row: n for row, n in read.items() if n} == {
            row: now[row] - was[row] for row in now | was if now[row] != was[row]
        }
        assert sum(file.rows for file in found) == len(gone) + len(new) + bool(patch)
    assert rewritten > 1


def test_rows_that_a_rewrite_changes_are_not_moved(tmp_path):
    """A TRUNCATE of a table that keeps deleted rows marks those that it rewrites."""
    path = write_partial(f"{tmp_path}/removed.arrow", bitmaps_table({"data/a": BitMap64([1])}))
    rewrite = Rewrite((DataFile("data/a", 3, 1),), path)
    made = (FileInfo(f"{tmp_path}/data/b", 2, 1),)
    assert moved(rewrite, made) == Moved({"data/a": 1}, path, ("data/b",))
    assert moved(replace(rewrite, emptied=(1, 2)), made) is None


def test_a_damaged_index_is_told_and_nothing_is_removed(tmp_path):
    table = Epochs(tmp_path)
    table.apply(add=[(k, "a") for k in range(10)])
    run = tmp_path / "t" / table.disk.runs[0].name
    good = run.read_bytes()
    run.write_bytes(good[:20] + b"x" + good[21:])
    staged = table.staged(remove=[1])
    task = RemovalTask(table.target(), staged, table.disk.runs, str(tmp_path), MORE)
    found = run_removal(task)
    assert "checksum mismatch" in found.damage
    assert not found.vectors
    assert not list((tmp_path / "t" / "data").glob("*.puffin"))


def test_37_a_task_that_runs_twice_makes_the_same_files(tmp_path):
    table = Epochs(tmp_path)
    table.apply(add=[(k, "a") for k in range(10)])
    staged = table.staged(add=[(1, "b")], remove=[1, 5])
    task = RemovalTask(table.target(), staged, table.disk.runs, str(tmp_path), MORE)
    assert run_removal(task) == run_removal(task)
