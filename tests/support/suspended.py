"""Suspending a process, as a machine that hangs does it."""

import os
import signal
from pathlib import Path

from tests.support.waiting import wait_for


def suspend(pid: int) -> None:
    """SIGSTOP, and wait until it has stopped: on a busy machine its threads may do a little more meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_for(lambda: all(_stopped(task) for task in tasks.iterdir()), 60, f"{pid} has stopped")


def _stopped(task: Path) -> bool:
    # The command's name, in brackets, may have brackets of its own.
    return (task / "stat").read_text().rpartition(") ")[2].startswith("T")
