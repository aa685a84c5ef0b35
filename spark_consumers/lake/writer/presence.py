"""Heartbeats of drivers: `<lake>/_tuskline/drivers/<driver>`, so that one driver waits while another is at work.

Each driver holds a record (`LakeStore.hold`) with its term and a counter that it increments every second. A record whose
driver is known to be dead counts for nothing; one whose counter does not change belongs to a driver that died where
nothing says so, that is suspended, or whose file system's locks do not work across machines (`takeover.DriverWait` decides).
Safety does not depend on this: the term fences a writer.
"""

import contextlib
import json
import os
import threading
import uuid

from spark_consumers.lake.manifest.takeover import Sign
from spark_consumers.lake.store.lake_store import STATE, FoundRecord, HeldRecord, LakeStore
from walsender_bridge.errors import TusklineError

#: The folder of the heartbeats.
DRIVERS = f"{STATE}/drivers"
#: Seconds between two beats.
_BEAT = 1.0
#: A record's size from the start: a full disk does not end a sign of life.
_SIZE = 128


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
            if self._record is not None and self._record.is_lost():
                # The lake was replaced in its folder.
                self._record.close()
                self._record = None
            if self._record is None:
                # Where the file system has no locks, the beats have to do.
                name = f"{DRIVERS}/{self.name}"
                self._record = self._store.hold(name, self._sign(), locked=False)
            else:
                self._record.write(self._sign())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sign of life", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_BEAT):
            with self._lock, contextlib.suppress(OSError, TusklineError):
                if self._record is not None:
                    self._record.write(self._sign())

    def _sign(self) -> bytes:
        self._beat += 1
        record = json.dumps({"term": self._term, "beat": self._beat, "pid": os.getpid()})
        return record.ljust(_SIZE).encode()

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
        """The signs of all other drivers; those of dead ones are removed."""
        found = [record for record in self._store.held(DRIVERS) if record.name != self.name]
        for record in found:
            if record.is_dead:
                self._store.remove(f"{DRIVERS}/{record.name}")
        return {record.name: _sign_in(record) for record in found}


def _sign_in(record: FoundRecord) -> Sign:
    try:
        term = int(json.loads(record.content)["term"])
    except (ValueError, KeyError, TypeError):
        # Read in the middle of a write: it lives.
        term = 2**63
    return Sign(term, record.content, is_dead=record.is_dead)
