"""The cache of reproducible files: Spark's jars, copies of server binaries, fresh clusters.

Everything below `folder()` may be deleted while nothing runs, and is recreated when needed. Several
processes share it, so files are prepared under another name and renamed into place, under `exclusive`.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def folder() -> Path:
    """The cache's root: `TUSKLINE_CACHE`, else `tuskline` in the user's cache folder (XDG_CACHE_HOME)."""
    own = os.environ.get("TUSKLINE_CACHE")
    if own:
        return Path(own).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tuskline"


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Hold the lock beside `target` while it is created, so that of two processes one creates it and one waits.

    The lock is the kernel's (`flock`): it ends with its process, so a crash leaves no stale lock.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
