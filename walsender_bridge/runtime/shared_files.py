"""Small files that hot loops write and others read: in memory where the system has a place for that.

On a disk, a file that is being written back, or renamed over, makes its writer wait for milliseconds. Each
installation has a folder of its own that only its account may enter, and a link to it in its run folder. The name is
random: no other account can create it beforehand, and an installation that replaces a removed one does not find the
files of that one. Nothing there survives a reboot, or needs to. Where there is no such place (`/dev/shm`), or it is full
when the folder is made, the run folder has a folder instead of the link.

Others may remove the folder while it is in use: systemd-logind does when its user logs out (`RemoveIPC=yes`), and a part
that ends (`clear`). So who writes a file there makes the folder again (`restore`), and never ends for want of it.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from walsender_bridge.runtime.private_folder import is_ours

_MEMORY = Path("/dev/shm")  # noqa: S108  # what is made in it is checked below

#: Bytes free below which the next file may find no room: each is of a few kilobytes.
_ROOM = 256 << 10


def folder(run_dir: Path) -> Path:
    """Where the files of the installation with this run folder are, once it was prepared. Nothing is made.

    The path is part of the link's name: a copy of an installation has links of its own, and the original its files.
    """
    mark = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:20]
    return run_dir / f"memory-{mark}"


def prepare(run_dir: Path) -> Path:
    """Make the folder, where it is not there as it should be: after a reboot, or when another account has taken its name."""
    run_dir.mkdir(parents=True, exist_ok=True)
    return _prepared(run_dir)


def restore(path: Path) -> bool:
    """Make the folder of this file again, if it is one of an installation's folders in memory. Raises `OSError`.

    A run folder that was removed with it stays so: the installation was removed.
    """
    run_dir = path.parent.parent
    if path.parent.name != folder(run_dir).name or not run_dir.is_dir():
        return False
    return _prepared(run_dir).is_dir()


def _prepared(run_dir: Path) -> Path:
    link = folder(run_dir)
    with _alone(run_dir):
        if link.is_symlink() and _make(link.readlink()):
            return link
        if link.is_dir() and not link.is_symlink():
            return link
        made = _MEMORY / f"tuskline-{secrets.token_hex(10)}"
        link.unlink(missing_ok=True)
        if _make(made):
            link.symlink_to(made)
        else:
            link.mkdir(mode=0o700)
    return link


def _make(path: Path) -> bool:
    """Make the folder where there is room, unless this account has it already; whether it is there for nobody else to write."""
    with contextlib.suppress(OSError):
        if os.path.lexists(path) or shutil.disk_usage(path.parent).free >= _ROOM:
            path.mkdir(mode=0o700)
    try:
        its = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(its.st_mode) and is_ours(its, 0o022)


@contextlib.contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """Two parts that prepare the folder at once get the same one."""
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def full(run_dir: Path) -> str:
    """Where there is too little room for the files, and how much; empty: there is enough, or nobody has prepared it."""
    link = folder(run_dir)
    place = _linked(link).parent
    if not os.path.lexists(link):
        return ""
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return ""
    return f"{place} is full: {free} bytes are free" if free < _ROOM else ""


def clear(run_dir: Path, *names: str) -> None:
    """Remove files of these names, and the folder with the last of them. The link is kept: it may be prepared again."""
    link = folder(run_dir)
    for name in names:
        (link / name).unlink(missing_ok=True)
    made = _linked(link)
    with contextlib.suppress(OSError):
        made.rmdir()


def _linked(link: Path) -> Path:
    """The folder itself, which need not be there (after a reboot)."""
    return link.readlink() if link.is_symlink() else link
