"""Nothing of a running installation is open to other accounts, though its umask is 000: one that has everything, and parts alone."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.attached import CLI
from tests.support.parts_config import configuration
from tests.support.quorum_stack import insert, load_server
from tests.support.quorum_up import hosting, up
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.config import load_config
from walsender_bridge.runtime import shared_files


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def reached(folder: Path) -> Iterator[str]:
    """What others may read, write or enter below a folder that they may enter."""
    for path in sorted(folder.iterdir()):
        its = path.stat() if path.is_symlink() else path.lstat()
        if its.st_mode & 0o077:
            yield f"{path} {stat.filemode(its.st_mode)}"
        if stat.S_ISDIR(its.st_mode) and its.st_mode & 0o055:
            yield from reached(path)


def loose(directory: Path, *allowed: str) -> list[str]:
    """Of an installation, except what tests or its user have written there."""
    roots = {str(directory / name) for name in allowed}
    return [each for each in reached(directory) if each.split()[0] not in roots]


def test_a_whole_installation_leaves_nothing_open_to_others(
    tmp_path: Path, make_server: MakeServer
) -> None:
    server = load_server(make_server, fsync="off")
    archive = tmp_path / "archive"
    with hosting(tmp_path, server, 3, archive=str(archive)) as tuskline:
        up(tuskline)
        insert(server, 1)
        wait_for(archive.is_dir, 30, "the archive is there")
        copy = tmp_path / "copy.sqlite"
        done = subprocess.run(
            [*CLI, "log", "backup", str(copy), "--config", str(tuskline.config)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert loose(tmp_path, "tuskline.toml", "up.log") == []
        memory = shared_files.folder(tuskline.run_dir)
        assert memory.stat().st_mode & 0o077 == 0
        assert [*memory.iterdir()]


@pytest.mark.parametrize("part", ["log-server", "bridge"])
def test_a_part_alone_leaves_nothing_open_to_others(tmp_path: Path, part: str) -> None:
    config = configuration(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-m", "walsender_bridge.cli.app", part, "run", "--config", str(config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        run_dir = load_config(config).run_dir
        wait_for((run_dir / f"{part}.json").exists, 30, "it shows its states")
        assert loose(tmp_path, config.name) == []
    finally:
        process.terminate()
        process.wait(30)
