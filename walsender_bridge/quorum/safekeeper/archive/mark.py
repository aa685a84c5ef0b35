"""The mark of an archive: a small file that distinguishes it from another folder at the same URL.

A disk that is not mounted leaves an empty folder in its place. WAL archived into that would be hidden once the disk is
back, and missing from the archive, although no safekeeper keeps it any longer. `{"format": 1, "archive": ID}`: the id is
random, so a mark that is created there meanwhile is another one.
"""

import contextlib
import errno
import json
import uuid
from typing import Any, Final

from fsspec import AbstractFileSystem

NAME: Final = "tuskline-archive"
FORMAT: Final = 1
#: Instead of an id: nothing was archived yet.
NOTHING: Final = "nothing"


def read(files: AbstractFileSystem, folder: str) -> str:
    """The archive's id; empty: there is no mark, or an incomplete one. Raises `OSError`."""
    try:
        record: Any = json.loads(files.cat_file(f"{folder}/{NAME}"))
    except (FileNotFoundError, ValueError):
        return ""
    found = record.get("archive") if isinstance(record, dict) else None
    return found if isinstance(found, str) else ""


def make(files: AbstractFileSystem, folder: str) -> str:
    """Mark a folder that has no readable mark; returns its id. Raises `OSError`.

    If several archivers do so at once, the last mark stays. The others have archived segments there, and adopt it.
    """
    path = f"{folder}/{NAME}"
    draft = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        files.pipe_file(draft, json.dumps({"format": FORMAT, "archive": uuid.uuid4().hex}).encode())
        files.mv(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            files.rm_file(draft)
        raise
    found = read(files, folder)
    if not found:
        raise OSError(errno.EIO, "could not read back the archive's mark", path)
    return found
