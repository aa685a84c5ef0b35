"""Ends a process and its children at one blow.

PostgreSQL's children each open a session of their own, so a process group does not hold them; they are
found by their parent's number. The parent is stopped first: it makes no more of them while they are read.
"""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

_DEADLINE = 30.0


def children(pid: int) -> list[int]:
    """The process ids whose parent is `pid`."""
    found: list[int] = []
    if Path("/proc/self/stat").exists():
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    # The name in parentheses may hold anything; the parent is the second word after it.
                    words = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(words[1]) == pid:
                        found.append(int(entry.name))
        return found
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    pairs = (line.split() for line in listed.stdout.splitlines())
    return [int(child) for child, parent in pairs if int(parent) == pid]


def kill_tree(pid: int) -> None:
    """SIGKILL to `pid` and its children; returns when all of them are gone (or only a parent's to reap)."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    family = [*children(pid), pid]
    for each in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    deadline = time.monotonic() + _DEADLINE
    while any(alive(each) for each in family[:-1]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {family} are still there after SIGKILL")
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return False
    except ProcessLookupError:
        return False
    else:
        return state not in "ZX"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
