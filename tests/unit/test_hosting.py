"""What keeps one hosted safekeeper, or the lake, from running keeps nothing else from running."""

import errno
import os
from pathlib import Path

import pytest

from walsender_bridge.cli import children
from walsender_bridge.cli import up as run
from walsender_bridge.config import load_config
from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import Cause, PublicationError
from walsender_bridge.quorum.safekeeper import control_file, hosting
from walsender_bridge.quorum.safekeeper.effects import ControlState
from walsender_bridge.runtime import shared_files
from walsender_bridge.runtime.folder import FolderDisk

CONFIG = """
[log]
data_dir = "log"
[[log_server]]
data_dir = "log-server"
listen = "127.0.0.1:7401"
[safekeepers]
local = 5
[lake]
uri = "lake"
[[source]]
name = "shop"
dsn = "host=127.0.0.1"
"""


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_files, "_MEMORY", tmp_path / "shm")
    (tmp_path / "tuskline.toml").write_text(CONFIG)
    return load_config(tmp_path / "tuskline.toml")


def damage(log_server: Path) -> tuple[Path, Path]:
    """The second one's control file has a flipped bit, the third one's directory is somebody else's, the fourth a file."""
    for name in ("safekeeper", "safekeeper-2"):
        (log_server / name / "control").mkdir(parents=True)
        control_file.save(FolderDisk(log_server / name / "control"), ControlState(safekeeper=1))
    control = log_server / "safekeeper-2" / "control" / "control"
    content = bytearray(control.read_bytes())
    content[-6] ^= 1
    control.write_bytes(content)
    foreign = log_server / "safekeeper-3"
    foreign.mkdir()
    (foreign / "PG_VERSION").touch()
    (log_server / "safekeeper-4").touch()
    return control, foreign


def test_a_safekeeper_that_cannot_use_its_directory_stops_no_other(settings, tmp_path):
    control, foreign = damage(tmp_path / "log-server")
    section = settings.safekeepers
    places = hosting.hosted(section, tmp_path / "log-server", settings.run_dir)
    refused = hosting.prepare(places, section, settings.run_dir)
    assert {number: error.cause for number, error in refused.items()} == {
        2: Cause.CORRUPT,
        3: Cause.CONFIG,
        4: Cause.CONFIG,
    }
    assert refused[2].where == str(control)
    assert "PG_VERSION" in refused[3].what
    assert "Not a directory" in refused[4].what
    assert [path.name for path in foreign.iterdir()] == ["PG_VERSION"]
    # The hot loop of each says why it ends; nothing else touches its directory.
    names = {child.name for child in children.safekeepers(places, section, refused)}
    assert names == {each.name for each in places} | {"wal-server-1", "wal-server-5"}


def test_a_directory_that_cannot_be_made_stops_no_other(settings, tmp_path):
    (tmp_path / "log-server").mkdir()
    # A link to a disk that is not mounted.
    (tmp_path / "log-server" / "safekeeper-2").symlink_to(tmp_path / "gone" / "safekeeper-2")
    section = settings.safekeepers
    places = hosting.hosted(section, tmp_path / "log-server", settings.run_dir)
    refused = hosting.prepare(places, section, settings.run_dir)
    assert list(refused) == [2]
    assert "could not create the data directory" in refused[2].what
    # Once the disk is mounted the hot loop finds it, and what stands beside it is there, too.
    names = {child.name for child in children.safekeepers(places, section, refused)}
    assert {
        f"{name}-{each.number}" for name in ("safekeeper", "wal-server") for each in places
    } == names
    assert (tmp_path / "log-server" / "safekeeper-3" / "users").exists()


def test_a_directory_that_cannot_be_read_now_ends_nothing_for_good(settings, tmp_path, monkeypatch):
    """A disk that hangs, or descriptors that ran out, took every safekeeper of a machine away until somebody came."""
    damage(tmp_path / "log-server")
    section = settings.safekeepers
    places = hosting.hosted(section, tmp_path / "log-server", settings.run_dir)
    for number in (errno.EIO, errno.ENFILE, errno.EACCES, errno.ESTALE):
        as_before = FolderDisk.names

        def failing(disk: FolderDisk, number: int = number) -> set[str]:
            raise OSError(number, os.strerror(number), str(disk))

        with monkeypatch.context() as patch:
            patch.setattr(FolderDisk, "names", failing)
            refused = hosting.prepare(places, section, settings.run_dir)
        assert FolderDisk.names is as_before
        assert refused[1].cause is Cause.UNAVAILABLE
        assert refused[1].cause not in hosting.FINAL
        # All its processes are started, and started again until the disk answers.
        names = {child.name for child in children.safekeepers(places, section, refused)}
        assert {"safekeeper-1", "wal-server-1"} <= names


def test_up_starts_what_a_commit_may_wait_for(settings, tmp_path, monkeypatch, capfd):
    damage(tmp_path / "log-server")
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / "report.csv").touch()
    missing = Finding(
        "publication", "shop", "is missing", Severity.ERROR, cause=Cause.PUBLICATION, repair="init"
    )
    monkeypatch.setattr(run, "of_source", lambda _: [missing])
    monkeypatch.setattr(run, "of_quorum", lambda *_, **__: [])
    with pytest.raises(PublicationError):
        run.preflight(settings)
    said = capfd.readouterr().err
    for word in ("holds no lake", "control file is damaged", "PG_VERSION", "Not a directory"):
        assert word in said
    # Since there has been a quorum, COMMIT may wait for it.
    settings.quorum_id_file.parent.mkdir(parents=True, exist_ok=True)
    settings.quorum_id_file.touch()
    run.preflight(settings)
    assert "is missing" in capfd.readouterr().err
