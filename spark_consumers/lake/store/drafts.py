"""Drafts of small files in `_tuskline` that a crash has left: files without a name yet, which nothing else removes.

A file that is created whole (a request, a sign of life, a reader's lease) is written under a name that begins with a dot,
and gets its own name then. Who is killed in between leaves the draft.

What is removed cannot be given its name any more: its maker, who locks it from its creation on, is dead. Where there is
no lock (on such a file system, in the moment before it is taken, and for files that only tell how things are), `GRACE`
seconds between two checks of the same file must suffice: a creator that was suspended for so long fails, and retries.
"""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

#: Seconds between the first sight of a draft and its removal.
GRACE = 600.0
#: Folders, and how the names of drafts in them end.
_DRAFTS = (("", ".tmp"), ("requests", ".tmp"), ("drivers", ""), ("readers", ""))


class Drafts:
    """The drafts below `state`, a lake's `_tuskline`. `clock` counts seconds."""

    def __init__(self, state: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock
        #: When each was seen first, by its path and inode.
        self._seen: dict[tuple[Path, int], float] = {}

    def sweep(self) -> int:
        """Remove those whose time is over; how many."""
        now, before, removed = self._clock(), self._seen, 0
        self._seen = {}
        for path in self._drafts():
            with contextlib.suppress(OSError):
                key = path, path.stat().st_ino
                since = before.get(key, now)
                if now - since >= GRACE and _is_abandoned(path):
                    path.unlink(missing_ok=True)
                    removed += 1
                else:
                    self._seen[key] = since
        return removed

    def _drafts(self) -> Iterator[Path]:
        for folder, end in _DRAFTS:
            with contextlib.suppress(OSError):
                for path in (self._state / folder).iterdir():
                    if path.name.startswith(".") and path.name.endswith(end) and path.is_file():
                        yield path


def _is_abandoned(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
