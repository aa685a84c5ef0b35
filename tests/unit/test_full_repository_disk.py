"""A full disk under the repository: named wherever it is met, nothing is lost, and it goes on when there is room."""

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.small_disk import fill, mounted
from walsender_bridge.change_log.repository.backup import backup
from walsender_bridge.change_log.repository.core import Created, LogServerSeen
from walsender_bridge.change_log.repository.store import RepositoryStore
from walsender_bridge.errors import CorruptError, UnavailableError

FULL = "the disk is full: could not"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, "-o", "size=1m"):
        yield folder


def seen(store: RepositoryStore) -> set[str]:
    return set(store.state.log_servers)


def test_a_repository_is_opened_and_written_again_when_its_disk_has_room(disk: Path) -> None:
    file, ballast = disk / "repository.sqlite", disk / "ballast"
    fill(ballast)
    with pytest.raises(UnavailableError, match=FULL):
        RepositoryStore(file)
    ballast.unlink()
    store = RepositoryStore(file)
    store.append(Created("log"))
    store.close()
    fill(ballast)
    with pytest.raises(UnavailableError, match=FULL):
        RepositoryStore(file)
    os.truncate(ballast, ballast.stat().st_size - 200_000)
    store = RepositoryStore(file)
    kept: set[str] = set()
    with pytest.raises(UnavailableError, match=FULL) as caught:  # noqa: PT012
        while True:
            name = f"server-{len(kept)}"
            store.append(LogServerSeen(name, name))
            kept.add(name)
    assert caught.value.where == str(file)
    assert seen(store) == kept
    ballast.unlink()
    store.append(LogServerSeen("last", "last"))
    store.close()
    again = RepositoryStore(file)
    assert seen(again) == kept | {"last"}
    again.close()


def test_a_backup_onto_a_full_disk_leaves_nothing_there(disk: Path, tmp_path: Path) -> None:
    file = tmp_path / "repository.sqlite"
    store = RepositoryStore(file)
    store.append(Created("log"))
    ballast = disk / "ballast"
    for room in (0, 4096, 16_384, 32_768):
        fill(ballast)
        os.truncate(ballast, ballast.stat().st_size - room)
        with pytest.raises(UnavailableError) as caught:
            backup(file, disk / "copy.sqlite")
        assert caught.value.where == str(disk / "copy.sqlite")
        assert [path.name for path in disk.iterdir()] == ["ballast"]
    ballast.unlink()
    backup(file, disk / "copy.sqlite")
    store.close()
    copy = RepositoryStore(disk / "copy.sqlite")
    assert copy.state.log_id == "log"
    copy.close()


def test_another_programs_database_is_damage_and_no_full_disk(tmp_path: Path) -> None:
    file = tmp_path / "repository.sqlite"
    with sqlite3.connect(file) as other:
        other.execute("PRAGMA user_version = 2")
        other.execute("CREATE TABLE something (a)")
    other.close()
    with pytest.raises(CorruptError, match="could not read the repository: no such table"):
        RepositoryStore(file)
