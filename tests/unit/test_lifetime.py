"""The lock by which `up` is known ends with its process, and names no other."""

import os
import subprocess
import sys

import pytest

from walsender_bridge import lifetime
from walsender_bridge.errors import DeadlineError, RunningError

HOLD = """
import pathlib, signal, sys
from walsender_bridge import lifetime
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with lifetime.held(pathlib.Path(sys.argv[1])):
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
    assert lifetime.owner(tmp_path) is None
    assert lifetime.end(tmp_path, 1.0) is None
    lifetime.refuse_while_running(tmp_path)


def test_one_at_a_time_and_its_pid_is_told(tmp_path, holder):
    assert lifetime.owner(tmp_path) == holder.pid
    with pytest.raises(RunningError, match=f"process {holder.pid}"), lifetime.held(tmp_path):
        pass
    with pytest.raises(RunningError):
        lifetime.refuse_while_running(tmp_path)
    assert lifetime.owner(tmp_path) == holder.pid
    assert lifetime.end(tmp_path, 20.0) == holder.pid
    assert lifetime.owner(tmp_path) is None


def test_a_killed_one_leaves_a_pid_that_nobody_believes(tmp_path, holder):
    holder.kill()
    holder.wait()
    # Its number may be another's by now: here, it is ours.
    (tmp_path / "up.pid").write_text(f"{os.getpid()}\n")
    assert lifetime.owner(tmp_path) is None
    assert lifetime.end(tmp_path, 1.0) is None
    with lifetime.held(tmp_path):
        assert lifetime.owner(tmp_path) == os.getpid()


@pytest.mark.parametrize("holder", ["deaf"], indirect=True)
def test_one_that_does_not_end_is_told(tmp_path, holder):
    with pytest.raises(DeadlineError, match=str(holder.pid)):
        lifetime.end(tmp_path, 0.3)
    assert lifetime.owner(tmp_path) == holder.pid
