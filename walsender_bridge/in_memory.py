"""Small files that hot loops write and others read: in memory where the system has a place for that.

On a disk, a file that is being written back, or renamed over, makes its writer wait for milliseconds. Each
installation has a folder of its own below one that only its account may enter. What is there survives no reboot, and
need not. Where there is no such place (`/dev/shm`), the run folder serves.
"""

import contextlib
import hashlib
import os
from pathlib import Path

from walsender_bridge.errors import ConfigError

_MEMORY = Path("/dev/shm")  # noqa: S108  # what is made in it is checked below


def folder(run_dir: Path) -> Path:
    """Where the files of the installation with this run folder are. Nothing is made."""
    if not _MEMORY.is_dir():
        return run_dir
    # Of the account that runs the parts, whoever asks.
    owner = run_dir.stat().st_uid if run_dir.exists() else os.getuid()
    mark = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:20]
    return _MEMORY / f"tuskline-{owner}" / mark


def prepare(run_dir: Path) -> Path:
    """Make the folder. Raises `ConfigError` when another account could have put something there."""
    run_dir.mkdir(parents=True, exist_ok=True)
    made = folder(run_dir)
    made.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in (made, made.parent) if made != run_dir else ():
        its = each.stat()
        if its.st_uid != os.getuid() or its.st_mode & 0o022:
            raise ConfigError(
                "another account may write where safekeepers and proposer tell how they are",
                where=str(each),
                repair="remove it: it is made anew",
            )
    return made


def clear(run_dir: Path, *names: str) -> None:
    """Remove files of these names, and the folder with the last of them."""
    place = folder(run_dir)
    for name in names:
        (place / name).unlink(missing_ok=True)
    if place != run_dir:
        with contextlib.suppress(OSError):
            place.rmdir()
            place.parent.rmdir()
