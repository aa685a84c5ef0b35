"""The mark of an archive: a small file in its folder by which it is told from another folder at the same URL.

A disk that is not mounted leaves an empty folder at its place. What was archived into that would be hidden as soon as the
disk is back, and missing in the archive, though nobody keeps that WAL any more. `{"format": 1, "archive": ID}`: the id is
random, so that a mark which somebody makes there meanwhile is another one.
"""

import contextlib
import errno
import json
import uuid
from typing import Any, Final

from fsspec import AbstractFileSystem

NAME: Final = "tuskline-archive"
FORMAT: Final = 1
#: Instead of an id: nothing was put into an archive yet.
NOTHING: Final = "nothing"


def read(files: AbstractFileSystem, folder: str) -> str:
    """The archive's id; empty: there is no mark, or none that was written whole. Raises `OSError`."""
    try:
        record: Any = json.loads(files.cat_file(f"{folder}/{NAME}"))
    except (FileNotFoundError, ValueError):
        return ""
    found = record.get("archive") if isinstance(record, dict) else None
    return found if isinstance(found, str) else ""


def make(files: AbstractFileSystem, folder: str) -> str:
    """Mark a folder that has no mark which can be read; its id. Raises `OSError`.

    Of several that do so at once, the last one's mark stays. The others have put segments there, and take it over.
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
        raise OSError(errno.EIO, "the archive's mark cannot be read back", path)
    return found
