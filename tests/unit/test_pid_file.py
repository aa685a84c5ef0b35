"""The lock by which `up` is known ends with its process, and names no other."""

import os
import subprocess
import sys

import pytest

from walsender_bridge.errors import DeadlineError, RunningError
from walsender_bridge.runtime import pid_file

HOLD = """
import pathlib, signal, sys
from walsender_bridge.runtime import pid_file
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with pid_file.held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path, request):
    words = [request.param] if hasattr(request, "param") else []
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_nobody_runs(tmp_path):
    assert pid_file.owner(tmp_path) is None
    assert pid_file.end(tmp_path, 1.0) is None
    pid_file.refuse_while_running(tmp_path)


def test_one_at_a_time_and_its_pid_is_told(tmp_path, holder):
    assert pid_file.owner(tmp_path) == holder.pid
    with pytest.raises(RunningError, match=f"process {holder.pid}"), pid_file.held(tmp_path):
        pass
    with pytest.raises(RunningError):
        pid_file.refuse_while_running(tmp_path)
    assert pid_file.owner(tmp_path) == holder.pid
    assert pid_file.end(tmp_path, 20.0) == holder.pid
    assert pid_file.owner(tmp_path) is None


def test_a_killed_one_leaves_a_pid_that_nobody_believes(tmp_path, holder):
    holder.kill()
    holder.wait()
    # Its number may be another's by now: here, it is ours.
    (tmp_path / "up.pid").write_text(f"{os.getpid()}\n")
    assert pid_file.owner(tmp_path) is None
    assert pid_file.end(tmp_path, 1.0) is None
    with pid_file.held(tmp_path):
        assert pid_file.owner(tmp_path) == os.getpid()


@pytest.mark.parametrize("holder", ["deaf"], indirect=True)
def test_one_that_does_not_end_is_told(tmp_path, holder):
    with pytest.raises(DeadlineError, match=str(holder.pid)):
        pid_file.end(tmp_path, 0.3)
    assert pid_file.owner(tmp_path) == holder.pid
