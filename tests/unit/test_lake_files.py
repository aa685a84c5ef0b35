"""Files that a task of Spark writes: whole or not there, whatever becomes of the task and its other attempts."""

import multiprocessing
import os
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64

from spark_consumers.lake.epoch.complete import CompleteTask, run_complete
from spark_consumers.lake.epoch.removal import PatchedRows, Rewrite
from spark_consumers.lake.epoch.stage import Patches
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.checksums import sums_of
from spark_consumers.lake.format.data_files import (
    Stage,
    orphans,
    read_data,
    remove_orphans,
    write_partial,
    write_table,
)
from spark_consumers.lake.index.build import Identity, bitmaps_table
from spark_consumers.lake.index.run_format import DataFile
from spark_consumers.lake.manifest.chain import TableVersion
from walsender_bridge.errors import CorruptError, UnavailableError

TABLE = pa.table({"id": pa.array(range(1000))})
STAGE = Stage(7, 2, 1)


def killed_in_mid_write(path: str) -> None:
    def half(file: object, *_: object, **options: object) -> None:
        del options
        file.write(b"PAR1 and some rows")  # type: ignore[attr-defined]
        file.flush()  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.SIGKILL)

    pq.ParquetWriter = half
    write_table(path, TABLE)


@pytest.mark.parametrize("write", [write_table, write_partial])
def test_37_a_write_that_failed_in_the_middle_can_be_repeated(tmp_path, monkeypatch, write):
    path = tmp_path / "data" / f"{STAGE}.parquet"
    whole = {"write_table": (pq, "ParquetWriter"), "write_partial": (pa.ipc, "new_file")}

    def fail(*arguments: object, **_: object) -> None:
        sink = next(a for a in arguments if hasattr(a, "write"))
        sink.write(b"some")
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(*whole[write.__name__], fail)
        with pytest.raises(OSError, match="Input/output"):
            write(str(path), TABLE)
    assert list(path.parent.iterdir()) == []
    write(str(path), TABLE)
    assert set(path.parent.iterdir()) - {sums_of(path)} == {path}


def test_37_a_task_killed_in_mid_write_is_repeated_and_leaves_garbage_by_name(tmp_path):
    path = tmp_path / "data" / f"{STAGE}.parquet"
    task = multiprocessing.get_context("fork").Process(
        target=killed_in_mid_write, args=(str(path),)
    )
    task.start()
    task.join(60)
    assert task.exitcode == -signal.SIGKILL
    made = write_table(str(path), TABLE)
    assert pq.read_table(path).equals(TABLE)
    assert made.size == path.stat().st_size
    (left,) = set(path.parent.iterdir()) - {path, sums_of(path)}
    # The stage is published, and what is left of its task is garbage all the same.
    assert list(orphans(tmp_path, {7: str(STAGE)}, STAGE.term)) == [left]
    assert list(orphans(tmp_path, {8: ""}, STAGE.term)) == []
    assert set(orphans(tmp_path, {7: "another"}, STAGE.term)) == {left, path}
    path.unlink()
    assert set(orphans(tmp_path, {7: str(STAGE)}, STAGE.term)) == {left, sums_of(path)}


def test_31_a_writer_keeps_the_files_of_a_newer_one_at_a_link_number_of_its_own(tmp_path):
    """Its links were lost and given up while it was suspended, so their numbers are the newer writer's now."""
    older, newer = str(Stage(7, 3, 1)), str(Stage(7, 4, 1))
    of_lake = TableVersion("tables/s/p/t%t1-0a", "iceberg", 1, "", (), (), 0, 0, 1, 1, stage=older)
    folder = tmp_path / of_lake.path / "data"
    for name in (older, newer, str(Stage(7, 2, 1))):
        write_table(str(folder / f"{name}.parquet"), TABLE)
    remove_orphans(tmp_path, {"s.p.t": of_lake}, {7: {"s.p.t": of_lake}}, 3)
    assert {file.name for file in folder.glob("*.parquet")} == {
        f"{name}.parquet" for name in (older, newer)
    }


def test_an_attempt_that_comes_late_leaves_the_file_that_is_in_use(tmp_path):
    path = tmp_path / "data" / f"{STAGE}.parquet"
    first = write_table(str(path), TABLE)
    inode = path.stat().st_ino
    assert write_table(str(path), TABLE) == first
    assert path.stat().st_ino == inode
    assert set(path.parent.iterdir()) == {path, sums_of(path)}


@pytest.mark.parametrize("write", [write_table, write_partial])
def test_a_file_of_the_same_name_with_other_rows_is_an_error(tmp_path, write):
    path = tmp_path / "data" / f"{STAGE}.parquet"
    write(str(path), TABLE)
    there = path.read_bytes()
    with pytest.raises(UnavailableError, match="another file with this name") as found:
        write(str(path), TABLE.slice(1))
    assert found.value.where == str(path)
    assert path.read_bytes() == there
    assert set(path.parent.iterdir()) <= {path, sums_of(path)}


def test_37_files_have_their_names_only_when_they_are_durable(tmp_path, monkeypatch):
    path = tmp_path / "data" / f"{STAGE}.parquet"
    fsync, named = os.fsync, []

    def note(descriptor: int) -> None:
        named.append(path.exists())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_table(str(path), TABLE)
    assert named
    assert not any(named)
    assert Path(path).exists()


def test_33_no_other_rows_are_read_than_were_written(tmp_path):
    """Damage that Parquet does not see: here, a whole file of the same columns."""
    folder = tmp_path / "data"
    prefix = f"{folder}/{STAGE}"
    target = Target("s.p.t", "p.t", prefix, TABLE.schema, TABLE.schema, ("id",), 0, 1)
    made = write_table(f"{folder}/rows.parquet", TABLE)
    rows = DataFile("data/rows.parquet", made.rows, made.size)
    removed = bitmaps_table({rows.name: BitMap64(range(10))})
    rewrite = Rewrite((rows,), write_partial(f"{tmp_path}/removed.arrow", removed))
    places = pa.table({"patch": [0], "file": [0], "position": [7]})
    patches = write_table(f"{tmp_path}/patches.parquet", pa.table({"c0": [1], "u0": [True]}))
    places_file = write_partial(f"{tmp_path}/places.arrow", places)
    patched = PatchedRows((rows,), places_file, Patches(patches, None))
    tasks = [
        CompleteTask(target, 0, rewrite=rewrite),
        CompleteTask(target, 0, patched=patched, patches=patches.path),
    ]
    path = Path(made.path)
    good = path.read_bytes()
    pq.write_table(TABLE.slice(1), path)
    identity = Identity.of(target.key, target.file_schema)
    for read in (
        lambda: read_data(path),
        lambda: identity.of_file(str(path)),
        lambda: run_complete(tasks[0]),
        lambda: run_complete(tasks[1]),
    ):
        with pytest.raises(CorruptError, match=path.name):
            read()
    path.write_bytes(good)
    done = [run_complete(task).rows for task in tasks]
    found = [pq.read_table(file.path)["id"].to_pylist() for files in done for file in files]
    assert found == [list(range(10, 1000)), [7]]
