"""A safekeeper's data directory: whose it is, and that one process alone uses it.

    control/   what is promised          slots      of the WAL server
    wal/       segments                  users      who may read, unless the configuration names another file
    lock       held while it is used     archived/  what is in the archive

Invariant: two safekeepers never write one directory. The lock is the kernel's and ends with its process. A
directory without `control/` that holds anything else is somebody else's, and nothing is made in it. Beside
`control/` a stranger's file is left alone: a note or a log in it must not keep a quorum from coming back.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from walsender_bridge.errors import ConfigError, RunningError
from walsender_bridge.safekeeper import control_file
from walsender_bridge.safekeeper.disk import FolderDisk
from walsender_bridge.safekeeper.effects import ControlState

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

    Raises `ConfigError` for a directory that is none of a safekeeper's, `CorruptError`, `NotSupportedError`.
    """
    if not data_dir.exists():
        return None
    try:
        found = {path.name for path in data_dir.iterdir()}
    except OSError as error:
        raise ConfigError(
            f"it cannot be read: {error.strerror}",
            where=str(data_dir),
            repair="give the safekeeper a directory of its own",
        ) from None
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


@contextmanager
def held(data_dir: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
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
        yield
