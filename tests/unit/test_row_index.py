"""The row index against a model: where each living row is, whatever was added, removed and merged."""

import random
import struct
from collections import defaultdict
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_consumers.fold.row_codes import row_codes
from spark_consumers.lake.format.data_files import write_table
from spark_consumers.lake.format.puffin import write_vectors
from spark_consumers.lake.index import build, lookup, merge, plan, run_format
from spark_consumers.lake.index.build import Identity, add_files
from spark_consumers.lake.index.digests import Digests, key_digests, row_digests
from spark_consumers.lake.index.liveness import Liveness
from spark_consumers.lake.index.lookup import find
from spark_consumers.lake.index.merge import append, merge_all, merge_some, records_of
from spark_consumers.lake.index.run_format import (
    BLOCK,
    RECORD,
    DataFile,
    IndexDamagedError,
    Run,
    Tables,
    open_runs,
    write_run,
)

# -- digests ----------------------------------------------------------------------------------------

FLOATS = st.sampled_from([None, 0.0, -0.0, 1.5, float("nan"), float("inf")])
COLUMNS: list[tuple[pa.DataType, st.SearchStrategy]] = [
    (pa.int32(), st.one_of(st.none(), st.integers(-3, 3))),
    (pa.int64(), st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))),
    (pa.string(), st.sampled_from([None, "", "a", "ab", "ä"])),
    (pa.float64(), FLOATS),
    (pa.bool_(), st.sampled_from([None, True, False])),
    (pa.list_(pa.string()), st.sampled_from([None, [], ["a"], ["a", None], ["a", "None"]])),
]


@st.composite
def rows_of_some_types(draw):
    kinds = draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=3))
    count = draw(st.integers(1, 12))
    return [pa.array(draw(st.lists(v, min_size=count, max_size=count)), t) for t, v in kinds], draw(
        st.integers(0, count)
    )


def pairs(digests: Digests) -> list[tuple[int, int]]:
    return list(zip(digests.high.tolist(), digests.low.tolist(), strict=True))


@pytest.mark.parametrize("digest", [key_digests, row_digests])
@given(rows_of_some_types())
def test_rows_have_one_digest_if_and_only_if_a_fold_takes_them_for_equal(digest, drawn):
    columns, cut = drawn
    types = [c.type for c in columns]
    whole = pairs(digest(columns, types))
    # Whatever else is hashed with them, and wherever an array begins.
    parts = pairs(digest([c.slice(0, cut) for c in columns], types))
    parts += pairs(digest([c.slice(cut) for c in columns], types))
    assert parts == whole
    (codes,) = row_codes([columns])
    by_code = defaultdict(set)
    for code, found in zip(codes.tolist(), whole, strict=True):
        by_code[code].add(found)
    assert all(len(found) == 1 for found in by_code.values())
    assert len(set(whole)) == len(by_code)


def test_a_small_key_has_the_digest_of_its_wider_type_and_digests_are_spread_evenly():
    small = key_digests([pa.array(range(10_000), pa.int16())], [pa.int32()])
    assert pairs(small) == pairs(key_digests([pa.array(range(10_000), pa.int32())], [pa.int32()]))
    upper = (small.high >> np.uint64(60)).astype(int)
    assert np.bincount(upper, minlength=16).min() > 500
    assert len(set(pairs(small))) == 10_000


def test_a_row_keeps_its_digest_when_its_table_gets_a_column():
    before = [pa.array([1, 2]), pa.array(["a", None])]
    after = [*before, pa.nulls(2, pa.int32())]
    types = [c.type for c in after]
    assert pairs(row_digests(before, types[:2])) == pairs(row_digests(after, types))


def test_digests_stay_what_they_are_since_runs_keep_them():
    key = key_digests([pa.array([1], pa.int64())], [pa.int64()])
    text = key_digests([pa.array(["a"])], [pa.string()])
    assert pairs(key) == [(14473517354436383551, 12110375836913770985)]
    hashed = blake2b(b"\0\0\x01\0\0\0a", digest_size=16).digest()
    assert pairs(text) == [(int.from_bytes(hashed[:8], "big"), int.from_bytes(hashed[8:], "big"))]


def framed(number, value, kind):
    if value is None:
        return b""
    if kind == pa.bool_():
        raw = bytes([value])
    elif pa.types.is_nested(kind):
        raw = repr(value).encode()
    elif kind == pa.string():
        raw = value.encode()
    else:
        raw = pa.array([value], kind).buffers()[1].to_pybytes()
    return struct.pack("<HI", number, len(raw)) + raw


@given(rows_of_some_types())
def test_a_row_is_hashed_as_its_values_with_the_numbers_of_their_columns(drawn):
    columns, _ = drawn
    types = [column.type for column in columns]
    rows = zip(*(column.to_pylist() for column in columns), strict=True)
    wanted = [
        blake2b(b"".join(framed(i, v, types[i]) for i, v in enumerate(row)), digest_size=16)
        for row in rows
    ]
    assert pairs(row_digests(columns, types)) == [
        struct.unpack(">QQ", each.digest()) for each in wanted
    ]


# -- runs -------------------------------------------------------------------------------------------


def a_run(folder: Path, count: int, name: str = "index/a.run", seed: int = 1) -> Run:
    digests = key_digests([pa.array(range(count), pa.int64())], [pa.int64()])
    records = merge.in_order(records_of(digests, 0))
    return write_run(str(folder), name, [records], Tables((DataFile("data/a.parquet", count, 10),)))


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_every_row_of_a_run_is_found_and_no_other(tmp_path, count):
    a_run(tmp_path, count)
    with open_runs(str(tmp_path), ["index/a.run"]) as runs:
        liveness = Liveness(tmp_path, [r.tables for r in runs])
        wanted = key_digests([pa.array(range(-5, count + 5), pa.int64())], [pa.int64()])
        found = find(runs, liveness, wanted, np.ones(len(wanted), np.int64))
        assert dict(zip(found.wanted.tolist(), found.positions.tolist(), strict=True)) == {
            row + 5: row for row in range(count)
        }


def test_a_lookup_reads_the_blocks_that_it_needs(tmp_path):
    a_run(tmp_path, 100 * BLOCK)
    with open_runs(str(tmp_path), ["index/a.run"]) as (run,):
        read: list[int] = []

        def noted(offset: int, length: int) -> bytes:
            read.append(length)
            return run.read(offset, length)

        counted = run_format.RunReader(
            run.where, noted, run.count, run.tables, run.fences, run.sums
        )
        liveness = Liveness(tmp_path, [run.tables])
        wanted = key_digests([pa.array([7, 1234, 50_000], pa.int64())], [pa.int64()])
        assert len(find([counted], liveness, wanted, np.ones(3, np.int64))) == 3
        assert sum(read) <= 3 * BLOCK * RECORD.itemsize


def test_no_damaged_run_is_read(tmp_path):
    a_run(tmp_path, 2 * BLOCK + 5)
    path = tmp_path / "index" / "a.run"
    good = path.read_bytes()

    def read() -> None:
        with open_runs(str(tmp_path), ["index/a.run"]) as (run,):
            run.between(0, None)

    read()
    choose = random.Random(7)
    places = [*range(12), *range(len(good) - 30, len(good)), *choose.sample(range(len(good)), 200)]
    for place in places:
        damaged = bytearray(good)
        damaged[place] ^= 1 << choose.randrange(8)
        for content in (bytes(damaged), good[:place]):
            path.write_bytes(content)
            with pytest.raises(IndexDamagedError, match=r"a\.run"):
                read()
    path.unlink()
    with pytest.raises(IndexDamagedError, match="missing"):
        read()


def test_runs_stay_few_and_a_row_is_written_again_a_logarithm_of_times():
    weights: list[int] = []
    written = 0
    for _ in range(10_000):
        count = plan.merged(weights, 10)
        made = 10 + sum(weights[len(weights) - count :])
        weights[len(weights) - count :] = [made]
        written += made
        assert all(a >= 2 * b for a, b in pairwise(weights))
    assert len(weights) <= 14
    assert written <= 24 * sum(weights)


def test_runs_of_one_size_are_merged_until_each_is_twice_the_next():
    assert plan.unmerged([100, 40, 10], 1) is None
    assert plan.unmerged([100, 100, 100], 101) is None
    weights, merges, written = [10] * 64, 0, 0
    while (place := plan.unmerged(weights, 1)) is not None:
        begin, end = place
        weights[begin:end] = [sum(weights[begin:end])]
        written += weights[begin]
        merges += 1
    assert all(a >= 2 * b for a, b in pairwise(weights))
    assert sum(weights) == 640
    assert written <= 7 * 640


# -- a table of several epochs ----------------------------------------------------------------------


class Table:
    """A table's files, vectors and runs, as epochs write them, and a model of which rows are where."""

    def __init__(self, folder: Path, *, bag: bool) -> None:
        self.folder, self.bag = folder, bag
        self.runs: tuple[Run, ...] = ()
        self.epoch = 0
        self.alive: dict[int, set[tuple[str, int]]] = defaultdict(set)
        self.removed: dict[str, BitMap64] = {}
        self.rows: dict[str, int] = {}

    def digests(self, keys: list[int]) -> Digests:
        columns = [pa.array(keys, pa.int64())]
        make = row_digests if self.bag else key_digests
        return make(columns, [pa.int64()])

    def find(self, wanted: dict[int, int]) -> dict[int, list[tuple[str, int]]]:
        keys = list(wanted)
        with open_runs(str(self.folder), [run.name for run in self.runs]) as readers:
            liveness = Liveness(self.folder, [reader.tables for reader in readers])
            counts = np.array([wanted[key] for key in keys], np.int64)
            found = find(readers, liveness, self.digests(keys), counts)
            places: dict[int, list[tuple[str, int]]] = {key: [] for key in keys}
            for at, file, position in zip(
                found.wanted.tolist(), found.files.tolist(), found.positions.tolist(), strict=True
            ):
                places[keys[at]].append((liveness.files[file].name, position))
            return places

    def apply(self, remove: dict[int, int], add: list[int]) -> None:
        self.epoch += 1
        places = self.find(remove)
        touched: dict[str, BitMap64] = {}
        for key, found in places.items():
            assert len(set(found)) == len(found) == min(remove[key], len(self.alive[key]))
            assert set(found) <= self.alive[key]
            self.alive[key] -= set(found)
            for name, position in found:
                known = self.removed.get(name, BitMap64())
                touched[name] = touched.get(name, known) | BitMap64([position])
        self.removed |= touched
        gone = {name for name in touched if len(touched[name]) == self.rows[name]}
        vectors = {name: v.copy() for name, v in touched.items() if name not in gone}
        made = write_vectors(str(self.folder), f"{self.epoch}", vectors)
        files: tuple[DataFile, ...] = ()
        if add:
            name = f"data/{self.epoch}.parquet"
            files, self.rows[name] = (DataFile(name, len(add), 9),), len(add)
            for position, key in enumerate(add):
                self.alive[key].add((name, position))
        tables = Tables(files, tuple(made), frozenset(gone))
        records = records_of(self.digests(add), 0)
        self.runs = append(str(self.folder), self.runs, f"index/{self.epoch}.run", records, tables)

    def compact(self) -> None:
        """Put all rows into one file, as a maintainer does: its run is added without being merged."""
        self.epoch += 1
        places = sorted((place, key) for key, found in self.alive.items() for place in found)
        old = frozenset(name for (name, _), _ in places)
        name, keys = f"data/{self.epoch}.parquet", [key for _, key in places]
        self.rows[name] = len(keys)
        for key in self.alive:
            self.alive[key] = set()
        for position, key in enumerate(keys):
            self.alive[key].add((name, position))
        tables = Tables((DataFile(name, len(keys), 9),) if keys else (), (), old)
        records = records_of(self.digests(keys), 0)
        made = append(str(self.folder), (), f"index/{self.epoch}.run", records, tables)
        self.runs = (*self.runs, *made)

    def merge(self, begin: int, end: int) -> None:
        """Merge some neighbours among the runs."""
        self.epoch += 1
        names = [run.name for run in self.runs]
        made = merge_some(str(self.folder), names, begin, end, f"index/{self.epoch}.run")
        self.runs = (*self.runs[:begin], made, *self.runs[end:])

    def check(self) -> None:
        everything = {key: len(places) + 1 for key, places in self.alive.items()}
        found = self.find(everything)
        assert {k: set(v) for k, v in found.items()} == dict(self.alive)


@pytest.mark.parametrize("bag", [False, True], ids=["keyed", "bag"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_index_finds_what_is_in_the_table(tmp_path_factory, bag, data):
    table = Table(tmp_path_factory.mktemp("table"), bag=bag)
    keys = st.integers(0, 40 if not bag else 5)
    for _ in range(data.draw(st.integers(1, 12))):
        if bag:
            remove = data.draw(st.dictionaries(keys, st.integers(1, 4), max_size=5))
            add = data.draw(st.lists(keys, max_size=12))
        else:
            there = {key for key, places in table.alive.items() if places}
            remove = dict.fromkeys(data.draw(st.sets(keys, max_size=20)), 1)
            free = [key for key in range(60) if key not in there - remove.keys()]
            add = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=30))
        table.apply(remove, add)
        table.check()
        if data.draw(st.integers(0, 3)) == 0:
            table.compact()
            table.check()
        if len(table.runs) > 1 and data.draw(st.booleans()):
            begin = data.draw(st.integers(0, len(table.runs) - 2))
            table.merge(begin, data.draw(st.integers(begin + 2, len(table.runs))))
            table.check()
    # Each compaction adds a run, and a few epochs may leave them: the maintainer's merges make them few.
    while (place := plan.unmerged([run.weight for run in table.runs], 1)) is not None:
        table.merge(*place)
        table.check()
    assert len(table.runs) <= 8


def test_many_equal_rows_are_found_and_merged_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(lookup, "_AT_ONCE", 2)
    monkeypatch.setattr(merge, "_AT_ONCE", 2)
    table = Table(tmp_path, bag=True)
    table.apply({}, [1] * (5 * BLOCK) + list(range(10, 3000)))
    table.apply({1: 4 * BLOCK, 500: 1}, [1] * BLOCK + list(range(5000, 9000)))
    table.check()
    assert sum(run.weight for run in table.runs) < 2 * BLOCK + 2990 + 4000 + 10


def test_what_is_dead_leaves_with_the_next_merge_and_takes_its_file_along(tmp_path):
    table = Table(tmp_path, bag=False)
    table.apply({}, list(range(1000)))
    for _ in range(5):
        table.apply(dict.fromkeys(range(1000), 1), list(range(1000)))
    table.check()
    with open_runs(str(tmp_path), [run.name for run in table.runs]) as readers:
        assert sum(reader.count for reader in readers) == 1000
        assert [f.name for r in readers for f in r.tables.files] == ["data/6.parquet"]
        assert not any(r.tables.vectors or r.tables.gone for r in readers)


def test_runs_of_a_copy_become_one(tmp_path):
    parts = []
    for number in range(5):
        keys = pa.array(range(number * 1000, number * 1000 + 1000), pa.int64())
        records = merge.in_order(records_of(key_digests([keys], [keys.type]), 0))
        file = DataFile(f"data/{number}.parquet", 1000, 1)
        parts.append(write_run(str(tmp_path), f"index/{number}.run", [records], Tables((file,))))
    whole = merge_all(str(tmp_path), [run.name for run in parts], "index/all.run", Tables())
    with open_runs(str(tmp_path), [whole.name]) as (run,):
        assert run.count == 5000
        liveness = Liveness(tmp_path, [run.tables])
        wanted = key_digests([pa.array(range(5000), pa.int64())], [pa.int64()])
        found = find([run], liveness, wanted, np.ones(5000, np.int64))
        names = [liveness.files[f].name for f in found.files.tolist()]
        assert names == [f"data/{k // 1000}.parquet" for k in found.wanted.tolist()]
        assert (found.positions == found.wanted % 1000).all()


# -- more rows than are sorted at once --------------------------------------------------------------


def indexed(folder: Path, key: pa.Schema) -> tuple[Run, ...]:
    """The index after three epochs: some data files each, and the first file goes with the last."""
    runs: tuple[Run, ...] = ()
    for number in range(3):
        files = []
        for file in range(5):
            ids = pa.table({"id": [number * 1000 + file * 100 + i for i in range(40)]}, schema=key)
            files.append(write_table(f"{folder}/data/{number}-{file}.parquet", ids))
        gone = ["data/0-0.parquet"] if number == 2 else []
        identity = Identity.of(("id",), key)
        runs = add_files(str(folder), runs, f"index/{number}.run", identity, files, (), gone)
    return runs


def test_more_rows_than_are_sorted_at_once_are_found_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = pa.schema([("id", pa.int64())])
    places = []
    for name, most in (("whole", 1000), ("parts", 90)):
        monkeypatch.setattr(build, "_SORTED_ROWS", most)
        runs = indexed(tmp_path / name, key)
        ids = pa.array(range(3000), pa.int64())
        with open_runs(str(tmp_path / name), [run.name for run in runs]) as readers:
            liveness = Liveness(str(tmp_path / name), [run.tables for run in readers])
            wanted = key_digests([ids], [pa.int64()])
            found = find(readers, liveness, wanted, np.ones(len(ids), np.int64))
            files = [liveness.files[n].name for n in found.files.tolist()]
        places.append(set(zip(found.wanted.tolist(), files, found.positions.tolist(), strict=True)))
        # What was sorted in parts is gone.
        there = {
            p.name for p in (tmp_path / name / "index").iterdir() if not p.name.startswith(".")
        }
        assert {f"index/{file}" for file in there} >= {run.name for run in runs}
        assert len(there) <= 3
    assert places[0] == places[1]
    assert len(places[0]) == 3 * 200 - 40


@pytest.mark.parametrize("most", [1000, 90], ids=["whole", "in parts"])
def test_a_run_of_its_own_says_what_other_runs_lose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    key = pa.schema([("id", pa.int64())])
    runs = indexed(tmp_path, key)
    monkeypatch.setattr(build, "_SORTED_ROWS", most)
    ids = pa.table({"id": list(range(5000, 5100))}, schema=key)
    made = write_table(f"{tmp_path}/data/compacted.parquet", ids)
    lost = ["data/1-0.parquet", "data/1-3.parquet"]
    removed = write_vectors(str(tmp_path), "1-removed", {"data/1-1.parquet": BitMap64([3, 7])})
    identity = Identity.of(("id",), key)
    # As an offer's run is written: beside the table's, which go on meanwhile.
    own = add_files(str(tmp_path), (), "index/own.run", identity, [made], removed, lost)
    with open_runs(str(tmp_path), [run.name for run in (*runs, *own)]) as readers:
        liveness = Liveness(str(tmp_path), [run.tables for run in readers])
    assert {file.name for file in liveness.current()}.isdisjoint(lost)
    assert len(liveness.current()) == 15 - 1 - 2 + 1
    assert sorted(liveness.removed("data/1-1.parquet")) == [3, 7]
