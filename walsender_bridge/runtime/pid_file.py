"""Pid files: whether `tuskline up`, or a single part, is running in a folder, by locks held for the life of its process.

The locks are the kernel's (`flock`), so they end with the process, however it ends. Of two processes that start, one gets
`up.lock`. It writes its pid into `up.pid` and then locks that file: while that lock is held, the pid in the
file is its holder's, the file's mtime is its start time, and no other process is mistaken for it. The parts
`log-server run`, `bridge run` and `lake run` use `log_server.lock` and so on in the same way.
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
from walsender_bridge.runtime import disk_full
from walsender_bridge.runtime.times import iso_time

#: The commands of parts that are not named for them.
_COMMANDS = {"up": "up", "maintain": "lake maintain"}
#: Width of a pid in its file, padded with spaces.
_WIDTH = 20


@contextmanager
def held(run_dir: Path, part: str = "up") -> Iterator[None]:
    """Hold the lock. Raises `RunningError` if another process holds it, and the errors of `disk_full`."""
    mutex_file, pid_file = run_dir / f"{part}.lock", _pid_file(run_dir, part)
    with disk_full.named(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        mutex = mutex_file.open("a")
    with mutex:
        try:
            fcntl.flock(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _running(run_dir, part, owner(run_dir, part)) from None
        except OSError as error:
            # A file system without locks.
            raise disk_full.of(error, mutex_file) from None
        # Overwritten in place, which works on a full disk, too.
        with disk_full.named(pid_file):
            descriptor = os.open(pid_file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with disk_full.named(pid_file):
                os.write(descriptor, f"{os.getpid():>{_WIDTH}}\n".encode())
                os.ftruncate(descriptor, _WIDTH + 1)
            # Waits for processes that are checking the lock right now.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _pid_file(run_dir: Path, part: str) -> Path:
    return run_dir / f"{part}.pid"


def _running(run_dir: Path, part: str, pid: int | None) -> RunningError:
    """The error. The pid is unknown (None) while the holder is writing it."""
    command = f"tuskline {_COMMANDS.get(part, f'{part} run')}"
    since = None
    with contextlib.suppress(OSError):
        since = iso_time(_pid_file(run_dir, part).stat().st_mtime)
    holder = f", as process {pid} since {since}" if pid is not None else ""
    alone = f"end process {pid}" if pid is not None else "end that process"
    return RunningError(
        f"`{command}` is already running{holder}",
        where=str(run_dir),
        repair="tuskline down"
        if part == "up"
        else f"tuskline down, or {alone} if `up` does not run it",
    )


def owner(run_dir: Path, part: str = "up") -> int | None:
    """The process id of the running `up` or part; None if it is not running."""
    try:
        with _pid_file(run_dir, part).open() as file:
            try:
                # A shared lock: two processes that check do not mistake each other for the owner.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None


def refuse_while_running(run_dir: Path, part: str = "up", *, seconds: float = 0.0) -> None:
    """Raise `RunningError` if `up`, or the part, is running. `seconds`: grace period for one whose supervisor was killed."""
    deadline = time.monotonic() + seconds
    while (pid := owner(run_dir, part)) is not None:
        if time.monotonic() >= deadline:
            raise _running(run_dir, part, pid)
        time.sleep(0.05)


def wait_for_lock(file: Path, seconds: float) -> None:
    """Return once no process holds a lock on this file, or after `seconds`."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(OSError), file.open() as lock:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                return


def end(run_dir: Path, timeout: float) -> int | None:
    """Stop `up` and wait until it has ended; return its process id, or None if it was not running.

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
                repair="it stops its parts first; see its log",
            )
        time.sleep(0.05)
    return pid
