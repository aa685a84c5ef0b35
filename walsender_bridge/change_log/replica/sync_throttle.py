"""The throttle of a log server's synchronizations: they take turns, and all share the rests that `sync_pace.py` finds in its appends.

A turn ends when its batch has been sent, or after `TURN` seconds: its destination may hang, and others go on. Without turns, all
that wait for the same rest would send at its end, so an append would meet as many batches at once.
"""

import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import Final, TypeVar

from walsender_bridge.change_log.replica.sync_pace import SyncPace

#: Seconds after which another synchronization goes on beside a batch that is still being sent.
TURN: Final = 1.0
#: Appends that are remembered until the next batch has ended.
_KEPT = 1000
_T = TypeVar("_T")


class Throttle:
    """See the module. One for each log server."""

    def __init__(self) -> None:
        self.pace = SyncPace()
        self._appends: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._changed = threading.Condition()
        #: When the next batch may be sent, of whichever synchronization.
        self._free_at = 0.0
        #: When each batch began that is being sent.
        self._sending: list[float] = []

    def appended(self, began: float, ended: float) -> None:
        """Note an append, in monotonic seconds."""
        self._appends.append((began, ended))

    def paced(self, batches: Iterator[_T]) -> Generator[_T]:
        """The batches, each of which has been sent when the next one is asked for."""
        while True:
            began = self._turn()
            try:
                batch = next(batches, None)
                if batch is None:
                    return
                yield batch
                # No lock is held while a destination takes its time.
                self._sent(began, time.monotonic())
            finally:
                with self._changed:
                    self._sending.remove(began)
                    self._changed.notify_all()

    def _turn(self) -> float:
        """Wait for a turn, and return when it began."""
        while True:
            with self._changed:
                now = time.monotonic()
                busy = max(self._sending, default=-TURN) + TURN - now
                rest = self._free_at - now
                if busy <= 0 and rest <= 0:
                    self._sending.append(now)
                    return now
                if busy > rest:
                    self._changed.wait(busy)
                    continue
            time.sleep(rest)

    def _sent(self, began: float, ended: float) -> None:
        with self._changed:
            found = []
            while self._appends:
                found.append(self._appends.popleft())
            rest = self.pace.rest(began, ended, found, min(self._sending, default=began))
            self._free_at = max(self._free_at, ended) + rest
