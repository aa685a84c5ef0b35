"""A lake is opened where it belongs: a copy and a lake that was moved are refused by name, and harm no other one."""

import json
import shutil
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from spark_consumers import read
from spark_consumers.lake import folder
from spark_consumers.lake.flush import flush
from spark_consumers.lake.format import checksums
from spark_consumers.lake.manifest.chain import Chain, open_chain
from spark_consumers.lake.store.local_store import LocalStore
from spark_consumers.lake.verify import verify
from walsender_bridge.errors import CorruptError, LakeError

RECORD = "_tuskline/root.json"


def made(root: Path, *, earlier: bool) -> Path:
    """A lake with a table; of an earlier version, it has no record of its path."""
    open_chain(root).initialise("log", "iceberg")
    table = root / "tables/shop/public/t%t1-0a"
    (table / "metadata").mkdir(parents=True)
    (table / "metadata/v1.metadata.json").write_text(json.dumps({"location": str(table)}))
    (table.parent / "t").symlink_to(table.name)
    if earlier:
        (root / RECORD).unlink()
    return root


@pytest.fixture(params=[False, True], ids=["recorded", "of an earlier version"])
def lake(tmp_path: Path, request: Any) -> Path:
    return made(tmp_path / "lake", earlier=request.param)


def refused_everywhere(there: Path, home: Path) -> None:
    for opened in (
        lambda: open_chain(there).initialise("log", "iceberg"),
        lambda: verify(open_chain(there), lambda *_: None),
        lambda: read(cast("Any", Mock()), there),
        lambda: flush(str(there), "127.0.0.1:1", []),
        lambda: folder.check(there),
    ):
        with pytest.raises(LakeError, match=f"this lake belongs at {home}:") as found:
            opened()
        assert f"make {home} a symbolic link" in found.value.repair


def test_a_copy_of_a_lake_is_refused_by_name(lake: Path, tmp_path: Path) -> None:
    there = tmp_path / "copy"
    shutil.copytree(lake, there, symlinks=True)
    refused_everywhere(there, lake)
    assert (there / RECORD).exists() == (lake / RECORD).exists()


def test_a_lake_that_was_moved_is_refused_until_a_way_out_is_taken(
    lake: Path, tmp_path: Path
) -> None:
    there = tmp_path / "moved"
    lake.rename(there)
    refused_everywhere(there, lake)
    lake.symlink_to(there)
    for path in (lake, there):
        chain = open_chain(path)
        assert chain.identity()["log_id"] == "log"
        assert chain.root == lake
    lake.unlink()
    there.rename(lake)
    assert open_chain(lake).initialise("log", "iceberg")


def test_a_copy_that_is_restored_to_its_path_is_opened(lake: Path, tmp_path: Path) -> None:
    there = tmp_path / "copy"
    shutil.copytree(lake, there, symlinks=True)
    shutil.rmtree(lake)
    there.rename(lake)
    assert open_chain(lake).initialise("log", "iceberg")


def test_a_lake_of_an_earlier_version_gets_its_path_from_its_tables(tmp_path: Path) -> None:
    lake, name = made(tmp_path / "lake", earlier=True), tmp_path / "name"
    name.symlink_to(lake)
    chain = open_chain(name)
    assert chain.root == lake
    chain.initialise("log", "iceberg")
    assert json.loads((lake / RECORD).read_text())["root"] == str(lake)


def test_a_lake_that_was_made_meanwhile_by_another_name_is_not_written(tmp_path: Path) -> None:
    lake, name = tmp_path / "lake", tmp_path / "name"
    lake.mkdir()
    name.symlink_to(lake)
    late = open_chain(name)
    open_chain(lake).initialise("log", "iceberg")
    with pytest.raises(LakeError, match=f"was created meanwhile at {lake}"):
        late.initialise("log", "iceberg")


def test_a_damaged_record_is_named_and_can_be_removed(lake: Path) -> None:
    open_chain(lake).initialise("log", "iceberg")
    (lake / RECORD).write_text("{")
    with pytest.raises(CorruptError, match="not JSON") as found:
        open_chain(lake).identity()
    assert found.value.where == str(lake / RECORD)
    (lake / RECORD).unlink()
    assert Chain(LocalStore(lake)).identity()["log_id"] == "log"


def test_only_files_of_the_table_itself_are_removed(tmp_path: Path) -> None:
    table, name = tmp_path / "lake/tables/s/p/t", tmp_path / "name"
    name.symlink_to(tmp_path / "lake")
    own = [table / "data/a.parquet", table / "metadata/a.avro"]
    others = [tmp_path / "other/data/a.parquet", table.with_name("u") / "data/a.parquet"]
    for file in (*own, *others):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("rows")
        checksums.seal(file)
    renamed = name / own[0].relative_to(tmp_path / "lake")
    assert [checksums.remove_of(table, file) for file in (renamed, own[1], *others)] == [
        *(True, True),
        *(False, False),
    ]
    assert not any(file.exists() or checksums.sums_of(file).exists() for file in own)
    assert all(file.exists() and checksums.sums_of(file).exists() for file in others)
    beside = table / "data/../../u/data/a.parquet"
    assert not checksums.remove_of(table, beside)
