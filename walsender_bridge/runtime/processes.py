"""Processes: whether they run, their children and resource usage, and killing a process with its children.

Uses `/proc` where it exists, otherwise `ps` and signals.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

_DEADLINE = 30.0
_HAS_PROC = Path("/proc/self/stat").exists()


class _Mallinfo2(ctypes.Structure):
    """See mallinfo(3): `uordblks` and `hblkhd` are the bytes that are handed out, from arenas and as mappings of their own."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


#: None: without glibc, or before its version 2.33.
_mallinfo2: Final = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _Mallinfo2


def _handed_out(info: Any) -> int:
    return int(info.uordblks + info.hblkhd)


@dataclass(frozen=True, slots=True)
class Stat:
    """Fields of `/proc/PID/stat`: the state's letter, the parent, seconds of CPU, resident bytes."""

    state: str
    parent: int
    cpu_seconds: float
    memory: int

    @property
    def runs(self) -> bool:
        """Whether the process is running rather than a zombie."""
        return self.state not in {"Z", "X"}


def stat(pid: int) -> Stat | None:
    """A process's numbers; None when it is gone, or where there is no `/proc`."""
    try:
        # The name in parentheses may hold anything; what follows it is counted from the third field.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])
    return Stat(
        state=fields[0],
        parent=int(fields[1]),
        cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"),
        memory=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    )


def own_size() -> tuple[int, int]:
    """Bytes that this process uses, and its threads; zeros where there is no `/proc`.

    What glibc has handed out, since memory that it keeps for later takes what is new without the process growing. Elsewhere, memory
    without the files that are mapped into it.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0, 0
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    memory, threads = (int(found.get(name, "0").split()[0]) for name in ("RssAnon", "Threads"))
    return (memory << 10 if _mallinfo2 is None else _handed_out(_mallinfo2())), threads


def stats() -> dict[int, Stat]:
    """The numbers of all processes that run; empty where there is no `/proc`."""
    numbers = (
        [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit()] if _HAS_PROC else []
    )
    found = ((number, stat(number)) for number in numbers)
    return {number: its for number, its in found if its is not None and its.runs}


def memory_of(pid: int, running: Mapping[int, Stat], others: Collection[int]) -> int:
    """Resident bytes of a process and its descendants, such as a driver's JVM; excluding those of `others`."""
    if pid not in running:
        return 0
    below = [n for n, its in running.items() if its.parent == pid and n not in others]
    return running[pid].memory + sum(memory_of(each, running, others) for each in below)


def suspended_of(pid: int, running: Mapping[int, Stat], others: Collection[int]) -> int | None:
    """The first of a process and its descendants that a signal or a debugger has stopped; excluding those of `others`."""
    if pid not in running:
        return None
    if running[pid].state in {"T", "t"}:
        return pid
    below = (n for n, its in running.items() if its.parent == pid and n not in others)
    found = (suspended_of(each, running, others) for each in below)
    return next((each for each in found if each is not None), None)


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    if _HAS_PROC:
        found = stat(pid)
        return found is not None and found.runs
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def children(pid: int) -> list[int]:
    """The living direct children of a process, ascending; none when it is gone."""
    if _HAS_PROC:
        numbers = sorted(int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit())
        found = ((number, stat(number)) for number in numbers)
        return [number for number, its in found if its and its.parent == pid and its.runs]
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    pairs = (line.split() for line in listed.stdout.splitlines())
    return sorted(int(child) for child, parent in pairs if int(parent) == pid)


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    return [pid, *(each for child in children(pid) for each in family(child))]


def command_line(pid: int) -> str:
    """Its arguments, a space between them; empty when it is gone."""
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").replace("\0", " ")
        )
    return ""


def kill_tree(pid: int) -> None:
    """Send SIGKILL to `pid` and its children; return when all of them have ended (or are zombies of another parent).

    PostgreSQL's children each start a session of their own, so they are not in one process group; they are
    found by their parent's pid. The parent is stopped first, so that it starts no more of them meanwhile.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    victims = [*children(pid), pid]
    for each in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    deadline = time.monotonic() + _DEADLINE
    while any(alive(each) for each in victims[:-1]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {victims} are still there after SIGKILL")
        time.sleep(0.005)
