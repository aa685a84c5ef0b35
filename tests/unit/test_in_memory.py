"""Memory that is full: it is named, and keeps nothing from running that can run without it."""

import time

import pytest

from tests.support import statuses
from tests.support.child import run_child
from tests.support.small_disk import fill, mounted
from walsender_bridge.config import load_config
from walsender_bridge.errors import Cause
from walsender_bridge.observability import quorum_view
from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings
from walsender_bridge.runtime import shared_files, status_file

CONFIG = """
[log]
data_dir = "log"
[[log_server]]
data_dir = "log-server"
listen = "127.0.0.1:7401"
[safekeepers]
local = 3
[[source]]
name = "shop"
dsn = "host=127.0.0.1"
"""


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A small one, with a megabyte in it."""
    place = tmp_path / "shm"
    place.mkdir()
    monkeypatch.setattr(shared_files, "_MEMORY", place)
    with mounted(place, "-o", "size=1m"):
        yield place


def test_full_memory_is_named_and_not_taken_for_a_lost_quorum(tmp_path, memory, monkeypatch):
    (tmp_path / "tuskline.toml").write_text(CONFIG)
    settings = load_config(tmp_path / "tuskline.toml")
    shared_files.prepare(settings.run_dir)
    told = statuses.session()
    status_file.write(settings.proposer_status, told)
    seen = quorum_view.observe(settings)
    assert seen is not None
    assert (seen.memory_full, seen.quorum) == ("", True)
    fill(memory / "ballast")
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    # It goes on, and finds no room to say so.
    status_file.write(settings.proposer_status, told)
    seen = quorum_view.observe(settings)
    assert seen is not None
    assert len(seen.problems) == 2
    assert seen.problems[0].startswith(f"{memory} is full: 0 bytes are free")
    assert "free space" in seen.problems[0]
    assert seen.problems[1] == "it is unknown whether a quorum follows the proposer"
    (memory / "ballast").unlink()
    status_file.write(settings.proposer_status, told)
    seen = quorum_view.observe(settings)
    assert seen is not None
    assert (seen.memory_full, seen.quorum) == ("", True)


def test_what_is_new_goes_into_the_run_folder_while_memory_is_full(tmp_path, memory):
    before = shared_files.prepare(tmp_path / "before")
    fill(memory / "ballast")
    made = shared_files.prepare(tmp_path / "run")
    assert made.resolve().parent == tmp_path / "run"
    # Who writes there already is not parted from its readers.
    assert shared_files.prepare(tmp_path / "before") == before
    assert before.resolve().parent == memory
    # What has ended and left nothing there begins again where there is room.
    shared_files.clear(tmp_path / "before")
    assert shared_files.prepare(tmp_path / "before").resolve().parent == tmp_path / "before"


def test_a_safekeeper_without_room_for_its_page_says_so(tmp_path, memory):
    (memory / "folder").mkdir()
    fill(memory / "ballast")
    page = memory / "folder" / "positions"
    settings = SafekeeperSettings(tmp_path / "data", "127.0.0.1", 0, page)
    done = run_child("walsender_bridge.quorum.safekeeper", settings)
    assert done.returncode == Cause.DISK_FULL, done
    assert str(page) in done.stderr
