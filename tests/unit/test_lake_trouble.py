"""Why a lake does not go on: from a round's error, from the job's word, or from its disk."""

import errno
import json
import os
import shutil
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest

from spark_consumers.lake import folder
from walsender_bridge.cli import flush
from walsender_bridge.cli.flush import PartsHere
from walsender_bridge.errors import Cause, LakeError, TusklineError, UnsupportedValueError
from walsender_bridge.observability import lake_status
from walsender_bridge.runtime import json_model, pid_file
from walsender_bridge.runtime.supervisor import ChildState, SupervisorStates

FULL = os.strerror(errno.ENOSPC)
SPARK = (
    "An error occurred while calling o55.collectToPython.\n: org.apache.spark.SparkException: Job aborted: "
    f"OSError: [Errno 28] {FULL}: '/srv/lake/tables/shop/one.parquet'\n\tat java.base/..."
)


@pytest.mark.parametrize(
    ("error", "what", "where"),
    [
        (OSError(errno.ENOSPC, FULL, "/srv/lake/_tuskline/x"), FULL, "/srv/lake/_tuskline/x"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "Disk quota exceeded", "/srv/lake"),
        (RuntimeError(SPARK), FULL, "/srv/lake/tables/shop/one.parquet"),
        (RuntimeError(f"java.io.IOException: {FULL}"), FULL, "/srv/lake"),
    ],
)
def test_a_full_disk_is_named_with_its_place_whoever_says_so(error, what, where):
    found = folder.why(error, "/srv/lake")
    assert found.cause == Cause.LAKE
    assert what in found.what
    assert found.where == where
    assert "free disk space" in found.repair


def test_other_failures_keep_their_words():
    unrepresentable = UnsupportedValueError("NaN", where="public.docs.price", repair="set it aside")
    assert folder.why(unrepresentable, "/srv/lake") is unrepresentable
    assert folder.why(ValueError("first\nsecond"), "/srv/lake").what == "a round failed: first"


def test_the_job_s_word_counts_while_it_lives(tmp_path):
    run_dir, lake = tmp_path / "run", str(tmp_path)
    assert lake_status.problem(run_dir, lake) is None
    lake_status.write(run_dir, LakeError("a disk is full", where="there", repair="free disk space"))
    found = lake_status.problem(run_dir, lake)
    assert isinstance(found, LakeError)
    assert (found.what, found.where, found.repair) == ("a disk is full", "there", "free disk space")
    lake_status.write(run_dir, None)
    assert lake_status.problem(run_dir, lake) is None
    # What one said that has died since is said no more, but for one that could not start a moment ago.
    with subprocess.Popen(["true"]) as gone:
        pass
    path = run_dir / "lake.status.json"
    record = {"pid": gone.pid, "updated_at": 0.0, "error": LakeError("old").to_wire()}
    path.write_text(json.dumps(record))
    assert lake_status.problem(run_dir, lake) is None
    path.write_text(json.dumps({**record, "updated_at": time.time()}))
    assert lake_status.problem(run_dir, lake) is not None
    path.write_text("half a rec")
    assert lake_status.problem(run_dir, lake) is None


def test_a_job_that_lives_and_says_nothing_any_more_hangs(tmp_path):
    run_dir, lake = tmp_path / "run", str(tmp_path)
    lake_status.write(run_dir, None)
    path = run_dir / "lake.status.json"
    record = json.loads(path.read_text())
    silent = record["updated_at"] - lake_status.HUNG_SECONDS - 1
    path.write_text(json.dumps({**record, "updated_at": silent}))
    found = lake_status.problem(run_dir, lake)
    assert found is not None
    assert found.cause == Cause.UNAVAILABLE
    assert "has not progressed for 30" in found.what
    assert str(os.getpid()) in found.where
    # A round over a large backlog takes longer, and its tasks end meanwhile.
    assert lake_status.problem(run_dir, lake, time.time() - 100) is None
    assert lake_status.problem(run_dir, lake, silent) is not None
    # What one wrote that has ended is no sign of anything.
    with subprocess.Popen(["true"]) as gone:
        pass
    path.write_text(json.dumps({**record, "updated_at": silent, "pid": gone.pid}))
    assert lake_status.problem(run_dir, lake) is None


def told(run_dir, lake) -> TusklineError:
    found = lake_status.problem(run_dir, lake)
    assert found is not None
    return found


def test_a_job_that_was_started_again_is_told_until_its_first_round(tmp_path):
    run_dir, lake = tmp_path / "run", str(tmp_path)
    with subprocess.Popen(["true"]) as gone:
        pass
    with pid_file.held(run_dir, "lake"):
        assert told(run_dir, lake).cause == Cause.UNAVAILABLE
        # The one that was killed was well, or had an error that nothing has mended since.
        for error in (None, LakeError("old").to_wire()):
            record = {"pid": gone.pid, "updated_at": 0.0, "error": error}
            (run_dir / "lake.status.json").write_text(json.dumps(record))
            found = told(run_dir, lake)
            assert "has started, and has not finished a round yet" in found.what
            assert ("the previous job reported: old" in found.what) == (error is not None)
            assert found.where == f"process {os.getpid()}"
        lake_status.write(run_dir, None)
        assert lake_status.problem(run_dir, lake) is None
    assert lake_status.problem(run_dir, lake) is None


def test_the_lake_that_up_has_just_started_again_is_told_before_it_has_its_lock(tmp_path):
    run_dir, lake = tmp_path / "run", str(tmp_path)
    with pid_file.held(run_dir):
        lake_status.write(run_dir, None)
        for pid in (os.getppid(), os.getpid()):
            states = SupervisorStates(1, {"lake": ChildState(pid, "running")})
            (run_dir / "up.json").write_bytes(json_model.encode(states))
            if pid == os.getppid():
                assert told(run_dir, lake).where == f"process {pid}"
        assert lake_status.problem(run_dir, lake) is None


def test_a_disk_without_room_is_told_without_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=folder.ROOM - 1))
    found = lake_status.problem(tmp_path / "run", str(tmp_path))
    assert found is not None
    assert "the disk is full: 63 MB are free" in found.what
    assert found.where == str(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=folder.ROOM))
    assert lake_status.problem(tmp_path / "run", str(tmp_path)) is None


def test_flush_does_not_end_with_what_failed_before_it_and_was_mended(tmp_path, monkeypatch):
    lake_status.write(tmp_path, LakeError("a disk is full", where="/srv/lake"))
    settings: Any = SimpleNamespace(run_dir=tmp_path, source=[])
    parts = PartsHere(settings)
    assert parts.hopeless() is None
    # The job's next attempt, with a wall clock of this flush's time.
    lake_status.write(tmp_path, LakeError("a disk is full", where="/srv/lake/tables"))
    error = parts.hopeless()
    assert error is not None
    assert error.where == "/srv/lake/tables"
    # A job that lives and makes no attempt: its last word counts in the end.
    later = PartsHere(settings)
    assert later.hopeless() is None
    monkeypatch.setattr(flush, "_NEXT_WORD_SECONDS", 0.0)
    assert later.hopeless() is not None
