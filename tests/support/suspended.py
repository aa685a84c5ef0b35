"""Suspending a process, as a machine that hangs does it."""

import os
import signal
from pathlib import Path

from tests.support.waiting import wait_for


def suspend(pid: int) -> None:
    """SIGSTOP, and wait until it has stopped: on a busy machine its threads may do a little more meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: is_suspended(pid), 60, f"{pid} has stopped")


def is_suspended(pid: int) -> bool:
    """Whether all threads of the process are suspended."""
    return all(_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir())


def _stopped(task: Path) -> bool:
    # The command's name, in brackets, may have brackets of its own.
    return (task / "stat").read_text().rpartition(") ")[2].startswith("T")
