"""Converts errors of a disk, which is full or cannot be written, to errors with their place."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from walsender_bridge.errors import DiskFullError, TusklineError, UnavailableError

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Free bytes below which the small files of a running part may fail to be written.
_ROOM: Final = 1 << 20
_FREE: Final = "free disk space there; nothing is lost"
_LOOK: Final = "see whether the disk works, and whether this user may write there"


def of(error: OSError, where: Path | str = "") -> TusklineError:
    """Convert an `OSError`. `where`: the place, for errors without a file name."""
    place = str(error.filename or where)
    words = error.strerror or str(error)
    if error.errno in NO_ROOM:
        return DiskFullError(
            f"the disk is full: {words}",
            where=place,
            repair=_FREE,
        )
    return UnavailableError(
        f"cannot be written: {words}",
        where=place,
        repair=_LOOK,
    )


def failed(what: str, error: Exception, where: Path, *, full: bool) -> UnavailableError:
    """What it means that `what` could not be done there, by this error of a library. `full`: whether the disk is."""
    repair = _LOOK
    if full:
        what, repair = f"the disk is full: {what}", _FREE
    return UnavailableError(f"{what}: {error}", where=str(where), repair=repair)


@contextlib.contextmanager
def named(where: Path | str) -> Iterator[None]:
    """Raise an `OSError` of the block as converted by `of`."""
    try:
        yield
    except OSError as error:
        raise of(error, where) from None


def of_folder(folder: Path) -> DiskFullError | None:
    """The error if the folder's disk is full; None otherwise, or if the folder does not exist."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return None
    if free >= _ROOM:
        return None
    return DiskFullError(
        f"the disk is full: {free} bytes are free",
        where=os.fspath(folder),
        repair="free disk space there; waiting parts continue by themselves",
    )
