"""Epochs of a table whose layout changes: its rows are those of a model, and every file's rows are of the file's partition."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_consumers.lake.epoch.stage import Staged
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.arranged_files import write_arranged
from spark_consumers.lake.format.data_files import Stage, write_partial
from spark_consumers.lake.format.table_format import FileInfo, ScanFile
from spark_consumers.lake.index.build import Identity
from spark_consumers.lake.index.build import build as build_index
from spark_consumers.lake.index.run_format import open_runs
from spark_consumers.lake.layout.arrangement import PLAIN, Arrangement, Field, parsed, parts
from tests.support.lake.table_on_disk import TableOnDisk
from walsender_bridge.postgres.table_layout import SortField

COLUMNS = pa.schema([("k", pa.int32()), ("v", pa.string()), ("at", pa.timestamp("us"))])
#: By their specs' numbers.
ARRANGEMENTS = [
    PLAIN,
    Arrangement(spec=1, fields=(Field(1000, "v", "identity"),)),
    Arrangement(
        spec=2,
        fields=(Field(1001, "k", "bucket", 3), Field(1002, "at", "day")),
        order=1,
        sort=(SortField("v", descending=True),),
    ),
    Arrangement(order=2, sort=(SortField("at"), SortField("k"))),
]
#: The rows by their keys.
Model = dict[int, tuple[str | None, int | None]]
_DAY = 86_400_000_000
EPOCHS = st.lists(
    st.tuples(
        st.sampled_from(ARRANGEMENTS),
        st.sampled_from(["vectors", "positions", "copied"]),
        st.integers(0, 3),
        # Keys, each with its new row, or None for the row to go.
        st.dictionaries(
            st.integers(0, 9),
            st.none()
            | st.tuples(
                st.none() | st.sampled_from(["a", "b", ""]),
                st.none() | st.integers(-2, 2).map(lambda day: day * _DAY - 1),
            ),
            min_size=1,
        ),
    ),
    max_size=6,
)


def target_of(folder: Path, number: int, arrangement: Arrangement, how: str) -> Target:
    prefix = f"{folder}/t/data/{Stage(number, 1, 1)}"
    made = Target("shop.public.t", "public.t", prefix, COLUMNS, COLUMNS, ("k",), 0, 1)
    copied, positions = how == "copied", how == "positions"
    return replace(made, arrangement=arrangement, copy_on_write=copied, by_position=positions)


def staged_of(target: Target, scratch: str, model, changes) -> Staged:
    added = {k: row for k, row in changes.items() if row is not None}
    gone = [k for k in changes if k in model]
    columns = [
        pa.array(added, pa.int32()),
        pa.array([v for v, _ in added.values()], pa.string()),
        pa.array([at for _, at in added.values()], pa.int64()).cast(pa.timestamp("us")),
    ]
    files = write_arranged(f"{target.prefix}.parquet", columns, COLUMNS, target.arrangement)
    deletes: tuple[FileInfo, ...] = ()
    if gone:
        keys = pa.table({"k": pa.array(gone, pa.int32())})
        deletes = (FileInfo(write_partial(f"{scratch}/deletes.arrow", keys), len(gone), 0),)
    return Staged(target.name, 0, 0, rows=files, deletes=deletes)


@settings(max_examples=15, deadline=None)
@given(EPOCHS)
def test_rows_are_those_of_the_model_and_files_of_their_partitions(epochs):
    with TemporaryDirectory() as folder:
        disk = TableOnDisk(Path(folder, "t"))
        model: Model = {}
        for number, (arrangement, how, small, changes) in enumerate(epochs):
            target = target_of(Path(folder), number, arrangement, how)
            scratch = f"{folder}/scratch-{number}"
            before = set(disk.files)
            disk.apply(
                target, staged_of(target, scratch, model, changes), scratch, small_files=small
            )
            model = {k: row for k, row in {**model, **changes}.items() if row is not None}
            assert_is(disk, model)
            for file in (disk.files[name] for name in disk.files.keys() - before):
                assert parsed(file.partition)[0] == arrangement.spec
                assert file.order == arrangement.order
            if how == "copied":
                assert not disk.vectors
            assert_index_can_be_built_again(disk)


def assert_is(disk: TableOnDisk, model) -> None:
    rows = disk.rows(COLUMNS)
    found = zip(*(rows.column(i).to_pylist() for i in range(2)), strict=True)
    moments = rows.column("at").cast(pa.int64()).to_pylist()
    assert {k: (v, at) for (k, v), at in zip(found, moments, strict=True)} == model
    for file in disk.files.values():
        spec, _ = parsed(file.partition)
        made = next(a for a in ARRANGEMENTS if a.spec == spec)
        table = pq.read_table(file.path)
        columns = [table.column(name).combine_chunks() for name in COLUMNS.names]
        ((partition, _),) = parts(columns, COLUMNS.names, made)
        assert partition == file.partition
    for vector in disk.vectors.values():
        assert vector.partition == disk.files[vector.file].partition


def assert_index_can_be_built_again(disk: TableOnDisk) -> None:
    """An index of all files knows the partitions that the epochs' own index knows."""
    files = [
        ScanFile(f.path, f.size, f.rows, disk.vectors.get(name), partition=f.partition)
        for name, f in disk.files.items()
    ]
    known: dict[str, str] = {}
    with open_runs(str(disk.folder), [run.name for run in disk.runs]) as runs:
        for run in runs:
            known |= {f.name: f.partition for f in run.tables.files}
    assert {name: known[name] for name in disk.files} == {f.name: f.partition for f in files}
    whole = build_index(
        lambda function, work: [function(each) for each in work],
        str(disk.folder),
        Identity.of(("k",), COLUMNS),
        ("k",),
        files,
        name=f"again-{len(list(disk.folder.glob('index/again-*')))}",
        scratch=f"{disk.folder}/index/.part",
    )
    for part in disk.folder.glob("index/.part*"):
        part.unlink()
    with open_runs(str(disk.folder), [run.name for run in whole.runs]) as runs:
        again = [file for run in runs for file in run.tables.files]
    assert {f.name: f.partition for f in again} == {f.name: f.partition for f in files}


def test_small_files_become_one_within_their_partition_only(tmp_path):
    disk = TableOnDisk(tmp_path / "t")
    model: Model = {}

    def files_after(number, changes, small):
        target, before = target_of(tmp_path, number, ARRANGEMENTS[1], "vectors"), set(disk.files)
        scratch = str(tmp_path / f"scratch-{number}")
        disk.apply(target, staged_of(target, scratch, model, changes), scratch, small_files=small)
        model.update(changes)
        kept = len(before & disk.files.keys())
        return kept, sorted(file.partition for file in disk.files.values())

    a, b, none = '1:{"1000":"a"}', '1:{"1000":"b"}', "1:{}"
    assert files_after(1, {1: ("a", 0), 2: ("b", 0), 3: (None, 0)}, 1) == (0, sorted([a, b, none]))
    assert files_after(2, {4: ("a", 0), 5: (None, 1)}, 2) == (3, sorted([a, a, b, none, none]))
    # Those that are many are so before the epoch's own come.
    assert files_after(3, {6: ("b", 0)}, 1) == (1, sorted([a, b, b, none]))
    assert_is(disk, model)
