"""Doctor names the change log's files that are damaged, without touching them."""

import sqlite3
from pathlib import Path

from tests.unit.test_repository_store import fill
from walsender_bridge.change_log.replica import identity as log_server_identity
from walsender_bridge.change_log.repository.store import RepositoryStore
from walsender_bridge.doctor import log
from walsender_bridge.errors import Cause


def test_a_damaged_log_server_json_is_named_with_its_repair(tmp_path: Path) -> None:
    well, ill = tmp_path / "well", tmp_path / "ill"
    for folder in (well, ill):
        folder.mkdir()
        log_server_identity.make(folder)
    path = ill / "log-server.json"
    path.write_bytes(path.read_bytes()[:-20])
    (found,) = log.log_servers([well, ill, tmp_path / "elsewhere"])
    assert (found.where, found.cause) == (str(path), Cause.CORRUPT)
    assert "tuskline status" in found.repair


def test_a_damaged_repository_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "repository.sqlite"
    assert list(log.repository(path)) == []
    store = RepositoryStore(path)
    fill(store, 3)
    # One that runs, with a -wal.
    assert list(log.repository(path)) == []
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE record SET crc = crc + 1 WHERE number = 2")
    db.close()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    (found,) = log.repository(path)
    assert (found.where, found.cause) == (str(path), Cause.CORRUPT)
    assert "record 2 does not match its checksum" in found.what
    assert "docs/log-lost.md" in found.repair
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
