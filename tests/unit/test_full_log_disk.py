"""A full disk under the run folder: what only tells how a part is ends nothing, and the disk is named."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from spark_consumers.lake.manifest.chain import Chain
from spark_consumers.lake.status import write_status
from spark_consumers.lake.store.local_store import LocalStore
from tests.support.small_disk import fill, mounted
from walsender_bridge.capture.gate.core import Decided, GateDecision
from walsender_bridge.capture.gate.record import GateRecord
from walsender_bridge.capture.status import StatusFile
from walsender_bridge.change_log.replica import damaged_segments
from walsender_bridge.config import load_config
from walsender_bridge.errors import Cause, CorruptError, DiskFullError, UnavailableError
from walsender_bridge.observability.observation import Observer
from walsender_bridge.runtime import disk_full, pid_file

CONFIG = """
[log]
data_dir = "disk"
listen = "127.0.0.1:1"
[[log_server]]
data_dir = "log-server"
listen = "127.0.0.1:2"
[[source]]
name = "shop"
dsn = "host=127.0.0.1 port=1"
"""


@pytest.fixture
def disk(tmp_path):
    """A full one; its ballast is `ballast`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, "-o", "size=2m,mode=0700"):
        (folder / "run").mkdir()
        fill(folder / "ballast")
        yield folder


def test_a_capture_that_cannot_tell_how_it_is_goes_on_and_tells_later(disk, capfd):
    path = disk / "run" / "capture.json"
    status = StatusFile(path, "shop", "tuskline_shop")
    status.state("connecting")
    status.state("streaming")
    assert not path.exists()
    assert list(path.parent.iterdir()) == []
    # Where logs go is decided by whichever command this process has run before.
    assert "".join(capfd.readouterr()).count("No space left on device") == 1
    (disk / "ballast").unlink()
    status.state("waiting", DiskFullError("the disk is full"))
    told = json.loads(path.read_text())
    assert (told["source"], told["state"], told["pid"]) == ("shop", "waiting", os.getpid())
    assert told["error"]["code"] == "DISK_FULL"


def test_a_lake_that_cannot_tell_how_far_it_is_goes_on(disk):
    chain = Chain(LocalStore(disk))
    head: Any = SimpleNamespace(term=1, epoch=1)
    (disk / "_tuskline").mkdir()
    write_status(chain, head, {})
    assert list((disk / "_tuskline").iterdir()) == []
    (disk / "ballast").unlink()
    write_status(chain, head, {})
    assert (disk / "_tuskline" / "status.json").exists()


def test_the_first_up_on_a_full_disk_is_refused_with_its_place(disk):
    with pytest.raises(DiskFullError, match="is full") as refused, pid_file.held(disk / "run"):
        pass
    assert refused.value.where == str(disk / "run" / "up.pid")
    assert "free disk space" in refused.value.repair
    assert pid_file.owner(disk / "run") is None
    (disk / "ballast").unlink()
    with pid_file.held(disk / "run"):
        assert pid_file.owner(disk / "run") == os.getpid()
    # It has its room from then on.
    fill(disk / "ballast")
    with pid_file.held(disk / "run"):
        assert pid_file.owner(disk / "run") == os.getpid()


def test_a_pid_that_is_shorter_than_the_last_is_read_alone(tmp_path):
    (tmp_path / "up.pid").write_text("123456789012\n")
    with pid_file.held(tmp_path):
        assert pid_file.owner(tmp_path) == os.getpid()


@pytest.mark.parametrize("flag", [[], ["--background"]])
def test_up_ends_by_the_cause_and_without_a_traceback(tmp_path, disk, flag):
    (tmp_path / "tuskline.toml").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "walsender_bridge.cli.app", "up", *flag],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == Cause.DISK_FULL, done.stderr
    assert "Traceback" not in done.stderr
    assert "the disk is full" in done.stderr
    assert str(disk) in done.stderr
    assert "free disk space" in done.stderr


def test_status_names_the_disk(tmp_path, disk):
    (tmp_path / "tuskline.toml").write_text(CONFIG)
    with Observer(load_config(tmp_path / "tuskline.toml")) as observer:
        found = [word for word in observer.observe().problems if word.startswith("disk: ")]
        assert len(found) == 1
        assert found[0].startswith(
            f"disk: the disk is full: 0 bytes are free ({disk}); free disk space"
        )
        (disk / "ballast").unlink()
        assert "disk" not in observer.observe().errors


def test_damage_is_kept_aside_though_there_is_no_room_for_the_reason(disk):
    segment = disk / "run" / "1"
    segment.mkdir()
    told = damaged_segments.keep_aside(segment, CorruptError("a checksum is wrong", where="here"))
    assert "a checksum is wrong; renamed to 1.corrupt-1" in told.what
    assert (
        damaged_segments.damage(disk / "run" / "1.corrupt-1")
        == "segment 1.corrupt-1 was damaged and has been renamed"
    )


def test_a_decision_of_the_gate_that_finds_no_room_waits_for_it(disk):
    record = GateRecord(disk / "gate" / "shop.jsonl")
    decided = Decided(GateDecision.DEGRADED, "standby_a", 1, 0x10, "it is away")
    with pytest.raises(DiskFullError) as refused:
        record.add(decided)
    assert str(disk) in refused.value.where
    assert record.standings == {}
    (disk / "ballast").unlink()
    record.add(decided)
    assert list(record.standings) == ["standby_a"]


def test_a_disk_that_fails_is_not_called_full():
    error = disk_full.of(OSError(5, "Input/output error"), "/srv/log")
    assert isinstance(error, UnavailableError)
    assert (error.what, error.where) == ("cannot be written: Input/output error", "/srv/log")
