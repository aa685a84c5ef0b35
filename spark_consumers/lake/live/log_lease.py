"""A reader's lease on the log: what is behind the epochs that its live reads began with is not trimmed.

A process has one lease for each log, of the oldest of these epochs, which is renewed with each live read. It ends by itself: nobody
needs the right to end another's lease.
"""

import itertools
import os
import threading
import uuid
from typing import Final

from walsender_bridge.change_log.client import LogClient

#: Seconds for which the log keeps what the last live read of a process needs.
SECONDS: Final = 3600.0

_leases: dict[tuple[int, str, str], "LogLease"] = {}
_lock = threading.Lock()


def lease_on(log: str, consumer: str) -> "LogLease":
    """This process's lease on the log at this address, as a consumer whose name begins like this."""
    with _lock:
        # A forked child has leases of its own.
        return _leases.setdefault((os.getpid(), log, consumer), LogLease(consumer))


class LogLease:
    """The lease of one process. Raises the log's errors."""

    def __init__(self, consumer: str) -> None:
        self._name = f"{consumer}-{uuid.uuid4().hex[:12]}"
        self._lock = threading.Lock()
        self._keys = itertools.count()
        #: The epochs that are needed, by a number for each read.
        self._held: dict[int, int] = {}

    def hold(self, client: LogClient, epoch: int) -> int:
        """Hold what is behind this epoch, until `release` gets the number that is returned."""
        # A call at a time: one that comes late would move the lease past what another read needs.
        with self._lock:
            key = next(self._keys)
            client.register_consumer(self._name, min([epoch, *self._held.values()]), SECONDS)
            self._held[key] = epoch
            return key

    def release(self, key: int) -> None:
        """Nothing is needed any more for the read with this number; the lease moves with the next one."""
        # Without the lock: it may run in the middle of anything, when a snapshot is collected.
        self._held.pop(key, None)
