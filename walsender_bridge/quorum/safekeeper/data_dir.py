"""A safekeeper's data directory: its owner, and its exclusive use by one process.

    control/   what is promised          slots      of the WAL server
    wal/       segments                  users      readers, unless the configuration names another file
    lock       held while it is used     archived/  what is in the archive

Invariant: two safekeepers never write one directory. The lock is the kernel's and ends with its process, which checks
before each promise that the path still leads to the locked directory (`Holding`): a disk that is mounted late, or a
folder that is moved back, puts another safekeeper's directory at that path. A directory without `control/` that holds
anything else is foreign, and nothing is created in it. Unknown files beside `control/` are ignored: a note or a log must
not keep a quorum from coming back.
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
from walsender_bridge.runtime import same_file
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
#: Seconds to wait for the end of a previous process whose supervisor was killed.
LOCK_SECONDS = 5.0


def check(data_dir: Path) -> ControlState | None:
    """The control state there; None: the directory is new. Nothing is written.

    Raises `ConfigError` for a foreign directory, `UnavailableError` for one that is unreadable for now, `CorruptError`,
    `NotSupportedError`.
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
            repair="give the safekeeper its own directory, new or empty",
        )
    # Too few descriptors, a disk that hangs or is not mounted, even permissions: all may be temporary, and no vote is lost.
    return UnavailableError(
        f"it cannot be read: {error.strerror}",
        where=where,
        repair="make this user the owner of the directory; the operation is retried. If its disk is broken, give the"
        " safekeeper an empty one, and replace it (docs/quorum-lost.md)",
    )


def _promised(data_dir: Path, found: set[str]) -> ControlState | None:
    """As `check`, of a directory that holds `found`. Raises `OSError` too."""
    # Files that are being replaced exist beside their final names for a moment.
    foreign = {name for name in found if name.split(".")[0] not in _OURS}
    if foreign and CONTROL not in found:
        raise ConfigError(
            f"not a safekeeper's data directory: it holds {min(foreign)}",
            where=str(data_dir),
            repair="give the safekeeper its own directory, new or empty",
        )
    if CONTROL not in found:
        if WAL in found and any((data_dir / WAL).iterdir()):
            raise ConfigError(
                "the directory has WAL, but no control file",
                where=str(data_dir),
                repair="give the safekeeper an empty directory, and let it rejoin as a new member",
            )
        return None
    read = control_file.read(FolderDisk(data_dir / CONTROL))
    return None if read is None else read[1]


class Holding:
    """The lock on the directory at a path, held by this process through the open `descriptor` of the lock file."""

    def __init__(self, data_dir: Path, descriptor: int) -> None:
        self._data_dir = data_dir
        self._descriptor = descriptor

    def check(self) -> None:
        """Raises `UnavailableError` when another directory, or none, is at that path now; `OSError`."""
        if not same_file.leads_to(self._data_dir / LOCK, os.fstat(self._descriptor)):
            raise UnavailableError(
                "the directory is not the one that this process has locked: it was moved or replaced, or a disk was"
                " mounted or unmounted there",
                where=str(self._data_dir),
                repair="put the original directory back; the safekeeper restarts with its contents",
            )


@contextmanager
def held(data_dir: Path, seconds: float = LOCK_SECONDS) -> Iterator[Holding]:
    """Lock it. Raises `RunningError` when another process still holds the lock after `seconds`, and as `check`."""
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
                        "another safekeeper uses this data directory",
                        where=str(data_dir),
                        repair="stop that one, or give this one its own directory",
                    ) from None
                time.sleep(0.05)
        yield Holding(data_dir, lock.fileno())
