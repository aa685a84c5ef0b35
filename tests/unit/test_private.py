"""Data folders are of their account alone, whatever the umask, and whatever they were before."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.log_entries import SCHEMAS, EntryMaker
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime.private_folder import private_file, private_folder


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def loose(root: Path) -> dict[str, str]:
    """What others may read, write or enter, by path."""
    found = [root, *root.rglob("*")]
    return {str(path): oct(mode(path)) for path in found if mode(path) & 0o077}


@pytest.mark.usefixtures("open_umask")
def test_the_log_and_a_log_server_leave_nothing_open_to_others(tmp_path: Path) -> None:
    log_server = ReplicaServer(tmp_path / "log-server", "127.0.0.1:0", segment_bytes=60_000)
    log = RepositoryServer(tmp_path / "log", "127.0.0.1:0", log_servers=[log_server.address])
    log.start()
    try:
        with LogClient(log.address) as client:
            client.create_stream("shop")
            make = EntryMaker()
            with client.open_writer("shop") as writer:
                for _ in range(3):
                    entries = [make.whole(size=30_000)]
                    writer.send(entries, schemas=list(SCHEMAS.values()))
                    assert writer.next_ack(10.0) is not None
                client.barrier({"shop": make.end_lsn}, 20.0)
        assert loose(tmp_path / "log-server") == {}
        assert loose(tmp_path / "log") == {}
    finally:
        log.stop()
        log_server.stop()


def test_an_open_folder_of_ours_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "log-server"
    folder.mkdir()
    folder.chmod(0o755)
    ReplicaServer(folder, "127.0.0.1:0").stop()
    assert mode(folder) == 0o700
    file = tmp_path / "a.log"
    file.write_text("kept")
    file.chmod(0o644)
    private_file(file)
    assert mode(file) == 0o600
    assert file.read_text() == "kept"


def test_a_shared_folder_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    with pytest.raises(ConfigError, match=r"shared.*shared by all accounts \(mode 1777\)"):
        private_folder(folder)
    assert mode(folder) == 0o1777


@pytest.mark.parametrize("others", [0o000, 0o055])
def test_a_folder_of_another_account_is_refused_even_if_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    folder.chmod(0o700 | others)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(ConfigError, match="belongs to another account"):
        private_folder(folder)
    assert mode(folder) == 0o700 | others
