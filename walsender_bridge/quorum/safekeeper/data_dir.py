"""A safekeeper's data directory: whose it is, and that one process alone uses it.

    control/   what is promised          slots      of the WAL server
    wal/       segments                  users      who may read, unless the configuration names another file
    lock       held while it is used     archived/  what is in the archive

Invariant: two safekeepers never write one directory. The lock is the kernel's and ends with its process, and whoever
holds it asks before each promise whether its path still leads to it (`Holding`): a disk that is mounted late, or a folder
that is put back, lays another safekeeper's directory at that path. A
directory without `control/` that holds anything else is somebody else's, and nothing is made in it. Beside
`control/` a stranger's file is left alone: a note or a log in it must not keep a quorum from coming back.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from walsender_bridge.errors import ConfigError, RunningError, TusklineError, UnavailableError
from walsender_bridge.quorum.safekeeper import control_file
from walsender_bridge.quorum.safekeeper.effects import ControlState
from walsender_bridge.runtime.folder import FolderDisk

CONTROL, WAL, LOCK, SLOTS, USERS, ARCHIVED = (
    "control",
    "wal",
    "lock",
    "slots",
    "users",
    "archived",
)
_OURS = {CONTROL, WAL, LOCK, SLOTS, USERS, ARCHIVED}
#: Seconds for one before it, whose supervisor was killed, to be gone.
LOCK_SECONDS = 5.0


def check(data_dir: Path) -> ControlState | None:
    """What is promised there; None: it is new. Nothing is written.

    Raises `ConfigError` for a directory that is none of a safekeeper's, `UnavailableError` for one that cannot be read
    now, `CorruptError`, `NotSupportedError`.
    """
    try:
        found = {path.name for path in data_dir.iterdir()}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(error, data_dir) from None
    try:
        return _promised(data_dir, found)
    except OSError as error:
        raise _unreadable(error, data_dir) from None


def _unreadable(error: OSError, data_dir: Path) -> TusklineError:
    where = str(error.filename or data_dir)
    if isinstance(error, NotADirectoryError):
        return ConfigError(
            f"it cannot be read: {error.strerror}",
            where=where,
            repair="give the safekeeper a directory of its own, new or empty",
        )
    # Too few descriptors, a disk that hangs or is not mounted, even a right: each may pass, and votes are not lost by it.
    return UnavailableError(
        f"it cannot be read: {error.strerror}",
        where=where,
        repair="give this user the directory; it is tried again. If its disk is broken, give the safekeeper an empty one,"
        " and replace it (docs/quorum-lost.md)",
    )


def _promised(data_dir: Path, found: set[str]) -> ControlState | None:
    """As `check`, of a directory that holds `found`. Raises `OSError` too."""
    # Files that are made anew lie beside their final names for a moment.
    foreign = {name for name in found if name.split(".")[0] not in _OURS}
    if foreign and CONTROL not in found:
        raise ConfigError(
            f"it is not a safekeeper's: it holds {min(foreign)}",
            where=str(data_dir),
            repair="give the safekeeper a directory of its own, new or empty",
        )
    if CONTROL not in found:
        if WAL in found and any((data_dir / WAL).iterdir()):
            raise ConfigError(
                "there is WAL, and nothing says what was promised about it",
                where=str(data_dir),
                repair="give the safekeeper an empty directory; it joins as a new member",
            )
        return None
    read = control_file.read(FolderDisk(data_dir / CONTROL))
    return None if read is None else read[1]


class Holding:
    """That this process has the directory at a path, by the lock file that it holds open as `descriptor`."""

    def __init__(self, data_dir: Path, descriptor: int) -> None:
        self._data_dir = data_dir
        self._descriptor = descriptor

    def check(self) -> None:
        """Raises `UnavailableError` when there is another one at that path now, or none; `OSError`."""
        try:
            there = (self._data_dir / LOCK).stat()
        except (FileNotFoundError, NotADirectoryError):
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self._descriptor)):
            raise UnavailableError(
                "it is not the directory that this process has begun with: it was moved or replaced, or a disk was"
                " mounted or unmounted there",
                where=str(self._data_dir),
                repair="put back the one that is missing; the safekeeper starts again with what is there",
            )


@contextmanager
def held(data_dir: Path, seconds: float = LOCK_SECONDS) -> Iterator[Holding]:
    """Use it, alone. Raises `RunningError` when another process still does after `seconds`, and as `check`."""
    check(data_dir)
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    with (data_dir / LOCK).open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunningError(
                        "another safekeeper runs in it",
                        where=str(data_dir),
                        repair="end that one, or give this one a directory of its own",
                    ) from None
                time.sleep(0.05)
        yield Holding(data_dir, lock.fileno())
