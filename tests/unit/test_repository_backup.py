"""A backup of the repository is one state of it, taken while it goes on writing, and can be put back."""

import contextlib
import json
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.waiting import wait_for
from tests.unit.test_repository_store import fill
from walsender_bridge.change_log.repository.backup import backup
from walsender_bridge.change_log.repository.core import TermGiven
from walsender_bridge.change_log.repository.store import RepositoryStore
from walsender_bridge.errors import ConfigError, CorruptError, UnavailableError

CONFIG = """
[log]
data_dir = "log"
[[log_server]]
data_dir = "log-server"
listen = "127.0.0.1:7401"
[[source]]
name = "shop"
dsn = "dbname=shop"
"""


def test_backups_of_a_repository_that_writes_are_states_of_it(tmp_path: Path) -> None:
    """Each is taken by another process, as an operator does."""
    config = tmp_path / "tuskline.toml"
    config.write_text(CONFIG)
    (tmp_path / "log").mkdir()
    store = RepositoryStore(tmp_path / "log" / "repository.sqlite", checkpoint_every=50)
    fill(store, 20)
    #: The state after each record, by its number.
    states, done = {store._number: store.state.to_record()}, threading.Event()

    def write() -> None:
        while not done.is_set():
            store.append(TermGiven("a", store._number))
            states[store._number] = store.state.to_record()

    writer = threading.Thread(target=write)
    writer.start()
    files = [tmp_path / f"backup {number}" for number in range(3)]
    spans = []
    try:
        for file in files:
            before = max(states)
            assert _command(config, file)["version"] == 20
            after = max(states)
            spans.append((before, after + 1))
            wait_for(lambda: max(states) > after + 60, 60, "it goes on writing")  # noqa: B023
    finally:
        done.set()
        writer.join()
        store.close()
    for file, (before, after) in zip(files, spans, strict=True):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        put_back = RepositoryStore(file)
        assert before <= put_back._number <= after
        assert put_back.state.to_record() == states[put_back._number]
        put_back.close()


def _command(config: Path, file: Path) -> dict[str, object]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "walsender_bridge.cli.app", "log", "backup", "--json"),
            *("--config", str(config), str(file)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    made: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return made


def test_a_backup_that_is_put_back_is_the_repository_as_it_was(tmp_path: Path) -> None:
    path, copy = tmp_path / "repository.sqlite", tmp_path / "copy"
    store = RepositoryStore(path, checkpoint_every=7)
    fill(store, 20)
    expected = store.state.to_record()
    made = backup(path, copy)
    assert (made.log_id, made.version, made.streams) == ("log", 20, 2)
    fill(store, 5)
    # Killed: its -wal is left beside the database.
    killed = tmp_path / "killed"
    killed.mkdir()
    for file in tmp_path.glob("repository.sqlite*"):
        shutil.copy(file, killed)
    store.close()
    assert (killed / "repository.sqlite-wal").stat().st_size
    # docs/log-lost.md: all files of the database are moved away, the -wal with them.
    old = tmp_path / "old"
    old.mkdir()
    for file in killed.glob("repository.sqlite*"):
        file.rename(old / file.name)
    shutil.copy(copy, killed / "repository.sqlite")
    again = RepositoryStore(killed / "repository.sqlite", checkpoint_every=7)
    assert again.state.to_record() == expected
    fill(again, 1)
    again.close()


def test_a_stopped_repository_has_a_backup_too(tmp_path: Path) -> None:
    path = tmp_path / "repository.sqlite"
    store = RepositoryStore(path)
    fill(store, 3)
    store.close()
    assert backup(path, tmp_path / "copy").version == 3
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "copy",
        "repository.sqlite",
        "repository.sqlite.lock",
    ]


def test_a_backup_replaces_no_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path, copy = tmp_path / "repository.sqlite", tmp_path / "copies" / "copy"
    with pytest.raises(ConfigError, match="no repository"):
        backup(path, copy)
    store = RepositoryStore(path)
    fill(store, 3)
    with pytest.raises(UnavailableError, match="could not write the backup"):
        backup(path, copy)
    copy.parent.mkdir()
    copy.write_text("another file")
    with pytest.raises(ConfigError, match="file exists"):
        backup(path, copy)
    assert copy.read_text() == "another file"
    assert [*copy.parent.iterdir()] == [copy]
    store.close()


def test_a_damaged_repository_has_no_backup(tmp_path: Path) -> None:
    path = tmp_path / "repository.sqlite"
    store = RepositoryStore(path)
    fill(store, 3)
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE record SET crc = crc + 1 WHERE number = 2")
    db.close()
    with pytest.raises(CorruptError, match="record 2 does not match") as caught:
        backup(path, tmp_path / "copy")
    assert caught.value.where == str(path)
    assert not (tmp_path / "copy").exists()


def test_a_repository_of_an_earlier_version_is_refused_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It locks the whole database as long as it runs."""
    path = tmp_path / "repository.sqlite"
    store = RepositoryStore(path)
    fill(store, 3)
    store.close()
    monkeypatch.setattr("walsender_bridge.change_log.repository.backup._PATIENCE", 0.1)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as earlier:
        for pragma in ("journal_mode = WAL", "locking_mode = EXCLUSIVE"):
            earlier.execute(f"PRAGMA {pragma}")
        earlier.execute("DELETE FROM record WHERE number > 100")
        with pytest.raises(UnavailableError, match="has locked the database"):
            backup(path, tmp_path / "copy")
        # Neither of the two opens what the other has open.
        with pytest.raises(ConfigError, match="another repository"):
            RepositoryStore(path)
    assert not (tmp_path / "copy").exists()
    store = RepositoryStore(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0.1)) as earlier:
        earlier.execute("PRAGMA locking_mode = EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            earlier.execute("DELETE FROM record WHERE number > 100")
    fill(store, 1)
    store.close()


def test_a_repository_whose_lock_file_is_held_is_not_opened(tmp_path: Path) -> None:
    """The lock is the kernel's: it ends with its process, and a copy of the folder has none."""
    path = tmp_path / "r"
    script = (
        "import sys, time; from pathlib import Path\n"
        "from walsender_bridge.change_log.repository.store import RepositoryStore\n"
        "store = RepositoryStore(Path(sys.argv[1])); print('open', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match="another repository"):
            RepositoryStore(path)
    finally:
        holder.kill()
        holder.communicate()
    for number in range(2):
        store = RepositoryStore(path)
        fill(store, 1)
        assert store.state.version == number + 1
        store.close()
