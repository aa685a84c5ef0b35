"""CPU seconds and memory of processes, as the kernel counts them (`/proc`)."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system seconds of one process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICK


def child_name(pid: int) -> str:
    """The name of a part's child process (`walsender_bridge.runtime.child_process`), its only argument."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").rpartition("\0")[2]
    except OSError:
        return ""


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found, at = [pid], 0
    while at < len(found):
        for task in Path(f"/proc/{found[at]}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
        at += 1
    return found


def tree_cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and its live descendants."""
    return sum(map(cpu_seconds, tree(pid)))


def proportional_mb(pid: int) -> float:
    """Memory of one process in MB, what it shares divided by who shares it; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


@contextmanager
def peak_memory(pid: int) -> Iterator[Callable[[], float]]:
    """Watch the memory of a process and its descendants, twice a second. Gives what returns the most so far, in MB."""
    stop, most = threading.Event(), [0.0]

    def watch() -> None:
        while True:
            most[0] = max(most[0], sum(map(proportional_mb, tree(pid))))
            if stop.wait(0.5):
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: most[0]
    finally:
        stop.set()
        thread.join()


def wait_cpu_seconds(process: "subprocess.Popen[bytes]") -> float:
    """Wait for the process to end. Returns the user and system seconds of it and of the children that it waited for."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime
