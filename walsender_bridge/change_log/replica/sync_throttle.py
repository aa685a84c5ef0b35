"""The throttle of a log server's synchronizations: all share the rests that `sync_pace.py` finds in its appends."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TypeVar

from walsender_bridge.change_log.replica.sync_pace import SyncPace

#: Appends that are remembered until the next batch has ended.
_KEPT = 1000
_T = TypeVar("_T")


class Throttle:
    """See the module. One for each log server."""

    def __init__(self) -> None:
        self.pace = SyncPace()
        self._appends: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        #: When the next batch may be sent, of whichever synchronization.
        self._free_at = 0.0

    def appended(self, began: float, ended: float) -> None:
        """Note an append, in monotonic seconds."""
        self._appends.append((began, ended))

    def paced(self, batches: Iterator[_T]) -> Iterator[_T]:
        """The batches, each of which has been sent when the next one is asked for."""
        while True:
            while (wait := self._free_at - time.monotonic()) > 0:
                time.sleep(wait)
            began = time.monotonic()
            batch = next(batches, None)
            if batch is None:
                return
            yield batch
            # No lock is held while a destination takes its time: it may hang, and others go on.
            self._sent(began, time.monotonic())

    def _sent(self, began: float, ended: float) -> None:
        with self._lock:
            found = []
            while self._appends:
                found.append(self._appends.popleft())
            self._free_at = max(self._free_at, ended) + self.pace.rest(began, ended, found)
