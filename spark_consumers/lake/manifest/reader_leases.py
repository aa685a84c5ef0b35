"""Leases of readers: `<lake>/_tuskline/readers/<reader>` names the oldest link that a process still needs.

A process that reads a lake has one file there, under a kernel lock for as long as it runs. Housekeeping does not
remove that link, any later link, or anything that these links need. A `Snapshot` is held while the object exists, and
for `HOLD` seconds longer, for the DataFrames that were created from it. A file whose lock is free belongs to a dead
reader.

The file exists, and holds everything, *before* the reader resolves a link. Housekeeping checks the leases before it
removes links, and again before it removes what they need: in either order, one side sees the other.

A lease belongs to the process that made it. A forked child closes the files that it inherits, so they do not outlive
their reader, and has leases of its own from its first read on. A lake that was replaced in its folder (removed and made
again, or another one moved there) gets a new lease with the next read.

Where the reader cannot write, or locks do not work across machines, there is no lease: what it reads may expire
(`TrimmedError`).
"""

import contextlib
import fcntl
import itertools
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_consumers.lake.manifest.exclusive import names

#: Seconds for which an epoch is held after its `Snapshot` is gone.
HOLD = 3600.0
#: How often what is not needed any more is given up, in seconds.
_TICK = 30.0
_DIGITS = 20

_leases: dict[Path, "ReaderLease"] = {}
_lock = threading.Lock()


def lease_on(root: Path) -> "ReaderLease | None":
    """This process's lease on the lake at `root`; None where it cannot have one."""
    with _lock, contextlib.suppress(OSError):
        known = _leases.get(root)
        if known is None or known.is_lost():
            _leases[root] = ReaderLease(root / "_tuskline" / "readers")
        return _leases[root]
    return None


def _forked() -> None:
    """In a forked child: what was inherited is the parent's."""
    global _lock  # noqa: PLW0603  # another thread of the parent may have held it
    _lock = threading.Lock()
    for lease in _leases.values():
        lease.abandon()
    _leases.clear()


os.register_at_fork(after_in_child=_forked)


class ReaderLease:
    """The lease of one process on one lake. Raises `OSError` where it cannot be made."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        name = uuid.uuid4().hex
        draft = folder / f".{name}"
        self._path = folder / name
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._written = -1
            self._write(0)
            draft.rename(self._path)
        except OSError:
            draft.unlink(missing_ok=True)
            os.close(self._file)
            raise
        self._lock = threading.Lock()
        self._resolving = 0
        #: Links by a number for each object, and when those were dropped whose object is gone.
        self._keys = itertools.count()
        self._held: dict[int, int] = {}
        self._dropped: deque[tuple[int, float]] = deque()
        self._ending: dict[int, float] = {}
        threading.Thread(target=self._run, name="reader lease", daemon=True).start()

    @contextmanager
    def resolving(self) -> Iterator[None]:
        """Hold everything, until it is known what is to be held (`keep`)."""
        with self._lock:
            self._resolving += 1
            self._write(0)
        try:
            yield
        finally:
            with self._lock:
                self._resolving -= 1
                self._refresh()

    def keep(self, reader: object, link: int) -> None:
        """Hold this link for as long as the object is there, and `HOLD` seconds longer."""
        with self._lock:
            key = next(self._keys)
            self._held[key] = link
        # Nothing but an append: it may run in the middle of anything.
        weakref.finalize(reader, _drop, self._dropped, key).atexit = False

    def refresh(self) -> None:
        """Give up what is not needed any more."""
        with self._lock:
            self._refresh()

    def is_lost(self) -> bool:
        """Whether its file is not where housekeeping looks: the lake was replaced."""
        return not names(self._path, self._file)

    def abandon(self) -> None:
        """Close its file, in a child that inherited it: the lock is free when the parent ends."""
        os.close(self._file)
        self._file = -1

    def _refresh(self) -> None:
        while self._dropped:
            key, at = self._dropped.popleft()
            self._ending[key] = at
        now = time.monotonic()
        for key in [key for key, at in self._ending.items() if now - at >= HOLD]:
            del self._ending[key]
            self._held.pop(key, None)
        if not self._resolving:
            # Nothing is held by a link that will never be.
            self._write(min(self._held.values(), default=10**_DIGITS - 1))

    def _write(self, link: int) -> None:
        if link != self._written:
            os.pwrite(self._file, f"{link:0{_DIGITS}d}".encode(), 0)
            self._written = link

    def _run(self) -> None:
        while not self.is_lost():
            time.sleep(_TICK)
            self.refresh()


def _drop(dropped: deque[tuple[int, float]], key: int) -> None:
    dropped.append((key, time.monotonic()))


def held_from(state: Path) -> int | None:
    """The oldest link that a living reader holds; None if none is held. Files of dead readers are removed."""
    oldest: int | None = None
    with contextlib.suppress(FileNotFoundError):
        for path in (state / "readers").iterdir():
            if path.name.startswith("."):
                continue
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    content = file.read(_DIGITS)
                    link = int(content) if content.isdigit() else 0
                    oldest = link if oldest is None else min(oldest, link)
                else:
                    path.unlink(missing_ok=True)
    return oldest
