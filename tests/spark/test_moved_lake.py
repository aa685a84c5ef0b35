"""A lake is opened at its own path, under whatever name: a copy of it, and its original, lose nothing."""

import contextlib
import shutil
from pathlib import Path

import pytest

from spark_consumers import read
from spark_consumers.lake.manifest import home
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.verify import verify
from tests.support.lake_check import assert_equal
from walsender_bridge.errors import LakeError


def files(lake: Path) -> set[str]:
    """What tables are made of."""
    return {str(file) for file in (lake / "tables").rglob("*") if not file.is_symlink()}


def epochs(pipeline, count):
    """Publish so many epochs, with housekeeping after each."""
    house = pipeline.lakehouse(retention_seconds=0.01)
    for _ in range(count):
        pipeline.database.execute("UPDATE docs SET n = n + 1", "UPDATE pairs SET tags = '{5}'")
        pipeline.flush(house)
    house.close()


def test_a_driver_on_a_copy_of_a_lake_removes_nothing_of_the_original(pipeline, database):
    pipeline.flush()
    pipeline.house.close()
    lake, copy = pipeline.lake, pipeline.folder / "copy"
    shutil.copytree(lake, copy, symlinks=True)
    before = files(lake)
    pipeline.lake = copy
    with contextlib.suppress(LakeError):
        epochs(pipeline, 3)
    assert before - files(lake) == set()
    for opened in (
        lambda: pipeline.flush(pipeline.lakehouse()),
        lambda: read(pipeline.spark, copy),
    ):
        with pytest.raises(LakeError, match=f"belongs at {lake}:"):
            opened()
    assert verify(open_chain(lake), lambda *_: None).errors == []


@pytest.mark.long
def test_a_driver_removes_files_of_its_own_lake_only_even_if_it_is_not_refused(
    pipeline, database, monkeypatch
):
    pipeline.flush()
    pipeline.house.close()
    lake, copy = pipeline.lake, pipeline.folder / "copy"
    shutil.copytree(lake, copy, symlinks=True)
    before = files(lake)
    monkeypatch.setattr(home, "check", lambda _: None)
    monkeypatch.setattr(home, "record", lambda _: None)
    pipeline.lake = copy
    epochs(pipeline, 4)
    assert before - files(lake) == set()
    assert verify(open_chain(lake), lambda *_: None).errors == []


@pytest.mark.long
def test_a_lake_that_is_opened_by_another_name_keeps_all_that_it_needs(pipeline, database):
    """Each table is swept of what earlier terms left, which is known by name."""
    pipeline.flush()
    pipeline.house.close()
    lake = pipeline.lake
    pipeline.lake = pipeline.folder / "name"
    pipeline.lake.symlink_to(lake)
    epochs(pipeline, 8)
    assert verify(open_chain(lake), lambda *_: None).errors == []
    assert_equal(database.dsn, read(pipeline.spark, lake))


def test_31_tables_go_on_when_only_the_chain_is_restored_from_a_backup(pipeline, database):
    """The backup's own record of the newest link is right, so nothing else says that links are lost."""
    pipeline.flush()
    pipeline.house.close()
    shutil.copytree(pipeline.lake / "_tuskline", pipeline.folder / "backup")
    house = pipeline.lakehouse()
    database.execute(
        "INSERT INTO docs SELECT g, 'lost', 'b', g, 0 FROM generate_series(101, 110) g"
    )
    pipeline.flush(house)
    house.close()
    term = pipeline.head().term
    database.execute("INSERT INTO docs SELECT g, 'new', 'b', g, 0 FROM generate_series(201, 225) g")
    shutil.rmtree(pipeline.lake / "_tuskline")
    (pipeline.folder / "backup").rename(pipeline.lake / "_tuskline")
    pipeline.house = pipeline.lakehouse()
    assert_equal(database.dsn, pipeline.flush())
    assert pipeline.head().term == term + 1
    assert verify(open_chain(pipeline.lake), lambda *_: None).errors == []
