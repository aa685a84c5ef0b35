"""Leases of readers: `<lake>/_tuskline/readers/<reader>` names the oldest link that a process still needs.

A process that reads a lake holds one record there (`LakeStore.hold`). Housekeeping does not remove that link, any later
link, or anything that these links need. A `Snapshot` is held while the object exists, and for `HOLD` seconds longer, for
the DataFrames that were created from it. A dead reader holds nothing. One whose lock is free is dead if housekeeping sees its
locks (`LakeStore.lock_domain`, which is in the record), else if the record has not changed for `living.DEAD_AFTER` seconds: on many file
systems the locks of another machine are invisible, and a bucket has none. Every living reader rewrites its record all the time.

The record exists, and holds everything, *before* the reader resolves a link. Housekeeping checks the leases before it
removes links, and again before it removes what they need: in either order, one side sees the other.

A lease belongs to the process that made it. A forked child closes the files that it inherits, so they do not outlive
their reader, and has leases of its own from its first read on. A lake that was replaced in its folder (removed and made
again, or another one moved there) gets a new lease with the next read.

Where the reader cannot write, or locks do not work across machines, there is no lease: what it reads may expire
(`TrimmedError`).
"""

import contextlib
import itertools
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spark_consumers.lake.store.lake_store import STATE, FoundRecord, HeldRecord, LakeStore
from spark_consumers.lake.store.living import AT_ONCE, DEAD_AFTER, LAPSE, Living
from walsender_bridge.errors import LakeError, TusklineError, UnavailableError

#: The folder of the leases.
READERS = f"{STATE}/readers"
#: Seconds for which an epoch is held after its `Snapshot` is gone.
HOLD = 3600.0
#: Seconds between two beats, with which what is not needed any more is given up, of a record with a lock, and of one without.
_TICK = 30.0
_BEAT = 10.0
_DIGITS = 20
#: A record's size from the start: a full disk does not end a lease.
_SIZE = 160

_leases: dict[str, "ReaderLease"] = {}
_lock = threading.Lock()


def lease_on(store: LakeStore) -> "ReaderLease | None":
    """This process's lease on the lake in this store; None where it cannot have one."""
    with _lock, contextlib.suppress(OSError, LakeError):
        known = _leases.get(store.location)
        if known is None or known.is_lost():
            _leases[store.location] = ReaderLease(store)
        return _leases[store.location]
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
    """The lease of one process on one lake.

    Raises `OSError` or `LakeError` where it cannot be made, `UnavailableError` if the store does not answer.
    """

    def __init__(self, store: LakeStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._written = 0
        self._beats = 0
        self._domain = store.lock_domain
        self._name = uuid.uuid4().hex
        self._records = itertools.count()
        self._beaten_at = clock()
        self._record = self._hold()
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
                # Until then it holds everything still; the next beat repeats it.
                with contextlib.suppress(UnavailableError):
                    self._refresh()

    def keep(self, reader: object, link: int) -> None:
        """Hold this link for as long as the object is there, and `HOLD` seconds longer."""
        with self._lock:
            key = next(self._keys)
            self._held[key] = link
        # Nothing but an append: it may run in the middle of anything.
        weakref.finalize(reader, _drop, self._dropped, key).atexit = False

    def refresh(self) -> None:
        """Give up what is not needed any more, and show that this reader lives."""
        with self._lock:
            self._refresh()

    @property
    def reader(self) -> str:
        """What the names of its records begin with: one that cannot be relied on any more is followed by another."""
        return self._name

    def is_lost(self) -> bool:
        """Whether its record is not where housekeeping looks: the lake was replaced."""
        return self._record.is_lost()

    def abandon(self) -> None:
        """Leave its record to the parent, in a child that inherited it."""
        self._record.abandon()

    def _refresh(self) -> None:
        while self._dropped:
            key, at = self._dropped.popleft()
            self._ending[key] = at
        now = time.monotonic()
        for key in [key for key, at in self._ending.items() if now - at >= HOLD]:
            del self._ending[key]
            self._held.pop(key, None)
        # Nothing is held by a link that will never be.
        least = 0 if self._resolving else min(self._held.values(), default=10**_DIGITS - 1)
        self._write(least)

    def _write(self, link: int) -> None:
        self._written = link
        if self._store.has_locks:
            self._record.write(self._content())
            return
        began = self._clock()
        if not self._beats_on():
            # It may have been removed already, or a write that failed may still arrive over a later one.
            self._beaten_at = float("-inf")
            self._record = self._hold()
        self._beaten_at = began

    def _beats_on(self) -> bool:
        """Rewrite the record; False if it cannot be relied on any more (`living`)."""
        try:
            self._record.write(self._content())
        except TusklineError:
            return False
        return self._clock() - self._beaten_at < LAPSE

    def _hold(self) -> HeldRecord:
        name = f"{READERS}/{self._name}-{next(self._records)}"
        return self._store.hold(name, self._content(), locked=True)

    def _content(self) -> bytes:
        """The link, what makes each beat's content another one, and who sees the lock."""
        self._beats += 1
        return f"{self._written:0{_DIGITS}d} {self._beats} {self._domain}".ljust(_SIZE).encode()

    def _run(self) -> None:
        while not self.is_lost():
            time.sleep(_TICK if self._store.has_locks else _BEAT)
            with contextlib.suppress(OSError, TusklineError):
                self.refresh()


def _drop(dropped: deque[tuple[int, float]], key: int) -> None:
    dropped.append((key, time.monotonic()))


class Readers:
    """The leases of all readers of a lake, as its housekeeping sees them."""

    def __init__(self, store: LakeStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._living = Living(store, READERS, clock, believed_after=self._believed_after)
        self._store = store

    def held_from(self) -> int | None:
        """The oldest link that a living reader holds; None if none is held. Records of dead readers are removed."""
        contents = [record.content[:_DIGITS] for record in self._living.records()]
        return min((int(c) if c.isdigit() else 0 for c in contents), default=None)

    def names(self) -> set[str]:
        """The living readers (`ReaderLease.reader`)."""
        return {record.name.partition("-")[0] for record in self._living.records()}

    def _believed_after(self, record: FoundRecord) -> float:
        """Seconds of silence after which a free lock is believed. A record that names nobody is of an earlier version."""
        domain = record.content.decode(errors="replace").strip().split(maxsplit=2)[2:]
        return AT_ONCE if domain in ([], [self._store.lock_domain]) else DEAD_AFTER
