"""Whether `tuskline up` runs here: a lock that its process holds for as long as it lives.

The lock is the kernel's (`flock`), so it ends with the process, whatever ends that; the pid written in the
file is right exactly while the lock is held. No other process is ever taken for ours.
"""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from walsender_bridge.errors import DeadlineError, RunningError

_NAME = "up.lock"


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Hold the lock. Raises `RunningError` when another process has it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / _NAME).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunningError(
                f"`tuskline up` runs already, as process {_pid(run_dir)}",
                where=str(run_dir),
                repair="tuskline down",
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def owner(run_dir: Path) -> int | None:
    """The process id of the `up` that runs; None if there is none."""
    try:
        with (run_dir / _NAME).open() as file:
            # Shared: two who ask do not take each other for the owner.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return _pid(run_dir)
    return None


def _pid(run_dir: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((run_dir / _NAME).read_text())
    return 0


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
    if not pid:
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
