"""Heartbeats of drivers: `<lake>/_tuskline/drivers/<driver>`, so that one driver waits while another is at work.

Each driver holds a record (`LakeStore.hold`) with its term and a counter that it increments every second. A record whose
driver is known to be dead counts for nothing; one whose counter does not change belongs to a driver that died where
nothing says so, or that is suspended (`takeover.DriverWait` decides). A free lock is a proof of death among processes that
see one another's locks (`LakeStore.lock_domain`, which is in the record); on many file systems those of another machine are
invisible. Safety does not depend on this: the term fences a writer.

A driver's sign may be removed while it lives, other than a reader's lease: it makes the sign again with its next beat. So what
`DriverWait` does not wait for is removed before each takeover, and the claims of lower terms after it. Otherwise, in a
bucket, the signs of drivers that die again and again before their housekeeping knows the dead ones would pile up, each of them
one more request of every look.
"""

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection
from itertools import islice

from spark_consumers.lake.manifest.takeover import UNLOCKED_LEASE, Sign, overtaken_signs
from spark_consumers.lake.store.lake_store import STATE, FoundRecord, HeldRecord, LakeStore
from spark_consumers.lake.store.living import AT_ONCE, Living
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime import logs

#: The folder of the heartbeats.
DRIVERS = f"{STATE}/drivers"
#: Seconds between two beats.
_BEAT = 1.0
#: A record's size from the start: a full disk does not end a sign of life.
_SIZE = 256
#: Signs that are removed at a time, at most: a takeover waits meanwhile.
_MOST = 100

log = logs.logger()


class Presence:
    """One driver's heartbeat, and those of the others."""

    def __init__(self, store: LakeStore) -> None:
        self._store = store
        self.name = uuid.uuid4().hex
        self._term = 0
        self._beat = 0
        self._record: HeldRecord | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self, term: int) -> None:
        """Show that this driver writes under `term`, or tries to take over under it; 0: neither.

        Raises `OSError` or `TusklineError` if no sign can be made; the next claim tries again.
        """
        with self._lock:
            self._term = term
            self._show()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sign of life", daemon=True)
                self._thread.start()

    def _show(self) -> None:
        """Beat. One that is not there any more is made again: the lake was replaced in its folder, or somebody has removed it."""
        if self._record is not None and self._record.is_lost():
            self._record.close()
            self._record = None
        if self._record is not None:
            self._record.write(self._sign())
            return
        # Where the file system has no locks, the beats have to do.
        self._record = self._store.hold(f"{DRIVERS}/{self.name}", self._sign(), locked=False)

    def _run(self) -> None:
        while not self._stop.wait(_BEAT):
            with self._lock, contextlib.suppress(OSError, TusklineError):
                self._show()

    def _sign(self) -> bytes:
        self._beat += 1
        numbers = {"term": self._term, "beat": self._beat, "pid": os.getpid()}
        record = {**numbers, "locks": self._store.lock_domain}
        return json.dumps(record).ljust(_SIZE).encode()

    def close(self) -> None:
        """Take the sign away: another driver need not wait."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._record is not None:
            with contextlib.suppress(TusklineError):
                self._record.close()
            self._record = None

    def others(self) -> dict[str, Sign]:
        """The signs of all other drivers; those of drivers that are known to be dead are removed."""
        found = [record for record in self._store.held(DRIVERS) if record.name != self.name]
        signs = {record.name: sign_in(record, self._store.lock_domain) for record in found}
        for name, sign in signs.items():
            if sign.is_dead:
                self._store.remove(f"{DRIVERS}/{name}")
        return signs

    def forget(self, names: Collection[str]) -> None:
        """Remove the signs of drivers that are not waited for; the rest, if there are many, with the next takeover."""
        with contextlib.suppress(OSError, TusklineError):
            for name in islice(sorted(names), _MOST):
                self._store.remove(f"{DRIVERS}/{name}")
                log.info("sign of life removed", driver=name)

    def forget_overtaken(self, term: int) -> None:
        """Remove the signs of drivers that a published link of `term` has overtaken; see `forget`."""
        with contextlib.suppress(OSError, TusklineError):
            self.forget(overtaken_signs(term, self.others()))


def living(store: LakeStore, clock: Callable[[], float] = time.monotonic) -> Living:
    """The signs as housekeeping sees them: a free lock is a proof of death, or, of another machine, not before a few beats are missed."""

    def believed_after(record: FoundRecord) -> float:
        return AT_ONCE if sign_in(record, store.lock_domain).is_dead else UNLOCKED_LEASE

    return Living(store, DRIVERS, clock, believed_after=believed_after)


def sign_in(record: FoundRecord, lock_domain: str) -> Sign:
    """The sign of life in this record, as it is seen by a process of that domain."""
    try:
        content = json.loads(record.content)
        term, locks = int(content["term"]), content.get("locks")
    except (ValueError, KeyError, TypeError, AttributeError):
        # Read in the middle of a write: it lives.
        term, locks = 2**63, None
    free = record.is_dead
    return Sign(term, record.content, is_dead=free and locks == lock_domain, is_unlocked=free)
