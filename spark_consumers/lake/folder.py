"""Can a lake be written in this folder? Asked before Spark is started, which takes seconds.

A folder that holds something else is refused: a lake's files among a user's own would be taken
for theirs, and the other way round.
"""

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.store.lake_store import FROM_ENVIRONMENT, StoreOptions
from spark_consumers.lake.store.open_store import local_root
from spark_consumers.lake.store.place import Place, is_object
from walsender_bridge.errors import LakeError, TusklineError, UnavailableError

#: Bytes below which nothing is begun: an epoch's files would fill the disk.
ROOM = 64 << 20


def check(lake: str | Path, options: StoreOptions = FROM_ENVIRONMENT) -> int | None:
    """Free bytes where the lake is, or will be; writes a file there and removes it. None for a bucket, which has room.

    Raises `LakeError`: not a folder, holds something else, read-only, full, a name that Spark does not read, a lake that belongs at another path. `NotSupportedError` for a store without conditional writes.
    """
    if is_object(lake):
        _check_bucket(lake, options)
        return None
    root = local_root(lake)
    where = str(root)
    if "#" in where:
        raise LakeError(
            "its path contains a #, and Spark reads the rest as part of a table",
            where=where,
            repair="specify a folder for the lake whose path contains no #",
        )
    if root.exists() and not root.is_dir():
        raise LakeError("is not a folder", where=where, repair="specify a new folder for the lake")
    try:
        if root.is_dir() and not (root / "_tuskline").is_dir() and any(root.iterdir()):
            raise LakeError(
                "is not empty and holds no lake",
                where=where,
                repair="specify a new or empty folder for the lake",
            )
        place = next(each for each in (root, *root.parents) if each.is_dir())
        _probe(place, remove_to=root)
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise _refused(error, where) from None
    if free < ROOM:
        raise _full(where, free)
    chain = open_chain(lake)
    if chain.exists():
        chain.identity()
    return free


def lack_of_room(lake: str | Place) -> LakeError | None:
    """The error, if there is a lake and its disk has less room than is begun with; nothing is written."""
    if is_object(lake):
        return None
    root = local_root(lake)
    try:
        free = shutil.disk_usage(root).free
    except OSError:
        return None
    return _full(str(root), free) if free < ROOM else None


def why(error: Exception, lake: str | Place) -> TusklineError:
    """A failed round's cause as an error with its repair. Spark's tasks and its JVM tell it in words only."""
    if isinstance(error, TusklineError):
        return error
    text = str(error)
    code = error.errno if isinstance(error, OSError) else None
    for number in (errno.ENOSPC, errno.EDQUOT):
        if code == number or os.strerror(number) in text:
            return LakeError(
                f"a disk is full: {os.strerror(number)}",
                where=_place(error, text) or str(lake),
                repair="free disk space; the job retries by itself, and nothing is lost",
            )
    return UnavailableError(
        f"a round failed: {_first_line(text)}",
        where=str(lake),
        repair="the job retries by itself; its log has the whole error",
    )


def _check_bucket(lake: str | Path, options: StoreOptions) -> None:
    chain = open_chain(lake, options)
    if chain.exists():
        chain.identity()
    elif chain.root.is_dir():
        raise LakeError(
            "its prefix contains objects, but no lake",
            where=str(lake),
            repair="specify another prefix for the lake",
        )
    chain.store.check()


def _place(error: Exception, text: str) -> str:
    """The file that could not be written, if the error names one."""
    if isinstance(error, OSError) and error.filename:
        return str(error.filename)
    found = re.search(r"(?:'|\bfile:)(/[^'\s:]+)", text)
    return found[1] if found else ""


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


def _probe(place: Path, remove_to: Path) -> None:
    """Write where the lake's first file will be; a folder that is not there yet is not made."""
    if place != remove_to:
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    file = place / f".tuskline-{os.getpid()}.probe"
    try:
        with file.open("wb") as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            os.fsync(probe.fileno())
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _refused(error: OSError, where: str) -> LakeError:
    match error.errno:
        case errno.EROFS | errno.EACCES | errno.EPERM:
            return LakeError(
                "cannot be written: it is read-only for this user",
                where=where,
                repair="grant this user write permission on the folder, or mount it for writing",
            )
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return _full(where, 0)
    return LakeError(
        f"cannot be used: {error.strerror}",
        where=where,
        repair="specify another folder for the lake",
    )


def _full(where: str, free: int) -> LakeError:
    return LakeError(
        f"the disk is full: {free >> 20} MB are free",
        where=where,
        repair="free disk space, or specify a folder on another disk",
    )
