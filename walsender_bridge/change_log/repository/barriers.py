"""Barriers that wait in the metadata repository.

Each occupies a thread of the server, and makes the repository tick faster. So neither lasts longer than a client waits
for it: a client that has gone is noticed within `POLL_SECONDS`, there are at most `MOST_BARRIERS`, and one that waits
longer than `URGENT_SECONDS` leaves the tick as it is.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from walsender_bridge.errors import UnavailableError

#: Barriers at once: far more than there are consumers, far fewer than a process can have threads.
MOST_BARRIERS: Final = 256
#: Seconds between two looks whether the client is still there.
POLL_SECONDS: Final = 1.0
#: Seconds for which a barrier makes the tick short.
URGENT_SECONDS: Final = 10.0


@dataclass(slots=True, eq=False)
class Barrier:
    """`positions`: end LSNs by stream; `since`: when it came, in seconds."""

    positions: dict[str, int]
    since: float
    #: The version that was forced for it; 0: its positions are not committed yet.
    version: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Wake the one that waits."""
        self._over.set()

    def wait(self, seconds: float, gone: Callable[[], bool]) -> None:
        """Until `end`, for at most so many seconds, or until its client is gone."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not gone():
            if self._over.wait(min(left, POLL_SECONDS)):
                return


class Barriers:
    """See the module. Its caller has a lock; `Barrier.wait` needs none. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.waiting: list[Barrier] = []
        self._clock = clock

    def add(self, positions: dict[str, int]) -> Barrier:
        """One more. Raises `UnavailableError` when there are too many."""
        if len(self.waiting) >= MOST_BARRIERS:
            raise UnavailableError(
                f"{len(self.waiting)} barriers wait already",
                repair="try again when some have been reached, or end the clients that wait for them",
            )
        barrier = Barrier(positions, self._clock())
        self.waiting.append(barrier)
        return barrier

    def remove(self, barrier: Barrier) -> None:
        """Nobody waits for it any more."""
        self.waiting.remove(barrier)

    def unforced(self) -> list[Barrier]:
        """Those whose positions are not committed yet."""
        return [barrier for barrier in self.waiting if not barrier.version]

    def is_urgent(self) -> bool:
        """Whether the next tick is to come soon."""
        now = self._clock()
        return any(now - barrier.since < URGENT_SECONDS for barrier in self.unforced())

    def published(self, version: int) -> None:
        """This version can be read: end the barriers that it reaches."""
        for barrier in self.waiting:
            if 0 < barrier.version <= version:
                barrier.end()

    def stop(self) -> None:
        """End all of them."""
        for barrier in self.waiting:
            barrier.end()
