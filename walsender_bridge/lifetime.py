"""Whether `tuskline up` runs here: locks that its process holds for as long as it lives.

They are the kernel's (`flock`), so they end with the process, whatever ends that. Of two that start, one gets
`up.lock`. It writes its pid into `up.pid` and locks that file then: so while that lock is held, the pid in the
file is its holder's, and no other process is ever taken for ours.
"""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from walsender_bridge import disk_trouble
from walsender_bridge.errors import DeadlineError, RunningError

_MUTEX, _PID = "up.lock", "up.pid"
#: Digits of a pid in its file, with spaces before it.
_WIDTH = 20


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Hold the lock. Raises `RunningError` when another process has it, and what `disk_trouble` names."""
    mutex_file, pid_file = run_dir / _MUTEX, run_dir / _PID
    with disk_trouble.named(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        mutex = mutex_file.open("a")
    with mutex:
        try:
            fcntl.flock(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunningError(
                f"`tuskline up` runs already, as process {owner(run_dir)}",
                where=str(run_dir),
                repair="tuskline down",
            ) from None
        # Written over what is there: a disk that is full since has room for it.
        with disk_trouble.named(pid_file):
            descriptor = os.open(pid_file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with disk_trouble.named(pid_file):
                os.write(descriptor, f"{os.getpid():>{_WIDTH}}\n".encode())
                os.ftruncate(descriptor, _WIDTH + 1)
            # Waits for those who are looking just now.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def owner(run_dir: Path) -> int | None:
    """The process id of the `up` that runs; None if there is none."""
    try:
        with (run_dir / _PID).open() as file:
            try:
                # Shared: two who ask do not take each other for the owner.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read())
    except FileNotFoundError:
        return None
    return None


def refuse_while_up(run_dir: Path) -> None:
    """Raise `RunningError` while `up` runs."""
    pid = owner(run_dir)
    if pid is not None:
        raise RunningError(
            f"`tuskline up` runs, as process {pid}",
            where=str(run_dir),
            repair="tuskline down",
        )


def end(run_dir: Path, timeout: float) -> int | None:
    """Tell `up` to end, and wait until it has; its process id, None if it did not run.

    Raises `DeadlineError` after `timeout` seconds.
    """
    pid = owner(run_dir)
    if pid is None:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while owner(run_dir) == pid:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"process {pid} has not ended in {timeout:g} s",
                where=str(run_dir),
                repair="it ends its parts first; see its log",
            )
        time.sleep(0.05)
    return pid
