"""Small files that hot loops write and others read: in memory where the system has a place for that.

On a disk, a file that is being written back, or renamed over, makes its writer wait for milliseconds. Each
installation has a folder of its own below one that only its account may enter, and a link to it in its run folder.
The name is drawn: an installation that is made where another one was removed does not find what that one said of
itself. What is there survives no reboot, and need not. Where there is no such place (`/dev/shm`), the run folder has a
folder in the place of the link.
"""

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from walsender_bridge.errors import ConfigError

_MEMORY = Path("/dev/shm")  # noqa: S108  # what is made in it is checked below


def folder(run_dir: Path) -> Path:
    """Where the files of the installation with this run folder are, once it was prepared. Nothing is made.

    The path is part of the link's name: a copy of an installation has links of its own, and the original its files.
    """
    mark = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:20]
    return run_dir / f"memory-{mark}"


def prepare(run_dir: Path) -> Path:
    """Make the folder. Raises `ConfigError` when another account could have put something there."""
    run_dir.mkdir(parents=True, exist_ok=True)
    link = folder(run_dir)
    with contextlib.suppress(FileExistsError):
        if _MEMORY.is_dir():
            link.symlink_to(_MEMORY / f"tuskline-{os.getuid()}" / secrets.token_hex(10))
        else:
            link.mkdir(mode=0o700)
    made = _linked(link)
    made.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in (made, made.parent) if made != link else ():
        its = each.stat()
        if its.st_uid != os.getuid() or its.st_mode & 0o022:
            raise ConfigError(
                "another account may write where safekeepers and proposer tell how they are",
                where=str(each),
                repair="remove it: it is made anew",
            )
    return link


def clear(run_dir: Path, *names: str) -> None:
    """Remove files of these names, and the folder with the last of them. The link is kept: it may be prepared again."""
    link = folder(run_dir)
    for name in names:
        (link / name).unlink(missing_ok=True)
    made = _linked(link)
    with contextlib.suppress(OSError):
        made.rmdir()
        if made != link:
            made.parent.rmdir()


def _linked(link: Path) -> Path:
    """The folder itself, which need not be there (after a reboot)."""
    return link.readlink() if link.is_symlink() else link
