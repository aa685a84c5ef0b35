"""The barriers that wait in the metadata repository.

Each occupies a thread of the server and makes the repository tick faster. Both are limited: a disconnected
client is detected within `POLL_SECONDS`, there are at most `MOST_BARRIERS`, and a barrier that waits
longer than `URGENT_SECONDS` no longer shortens the tick.

A barrier without positions settles the streams: once it has returned, nothing is committed that replicas reported before it.
Capture waits for one before it removes entries that they may have reported (`capture.session_setup`). So it waits for each
log server that was asked for its reports before the barrier arrived and has not answered yet, or failed to, which takes
seconds at most: what such an answer shows is committed first. It holds up nothing but itself, so a client that asks for
barriers all the time does not keep others' entries from being committed.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from walsender_bridge.errors import UnavailableError
from walsender_bridge.postgres.protocol.lsn import Lsn

#: Concurrent barriers: far more than there are consumers, far fewer than a process can have threads.
MOST_BARRIERS: Final = 256
#: Seconds between two checks that the client is still connected.
POLL_SECONDS: Final = 1.0
#: Seconds for which a barrier shortens the tick.
URGENT_SECONDS: Final = 10.0


@dataclass(slots=True, eq=False)
class Barrier:
    """`positions`: end LSNs by stream; `since`: when it arrived, in seconds."""

    positions: dict[str, Lsn]
    since: float
    #: The version that was forced for it; 0: its positions are not committed yet.
    version: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Wake the waiting thread."""
        self._over.set()

    def wait(self, seconds: float, gone: Callable[[], bool]) -> None:
        """Wait for `end`, at most this many seconds or until the client has disconnected."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not gone():
            if self._over.wait(min(left, POLL_SECONDS)):
                return


class Barriers:
    """See the module. Its caller has a lock; `Barrier.wait` needs none. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.waiting: list[Barrier] = []
        self._clock = clock

    def add(self, positions: dict[str, Lsn]) -> Barrier:
        """Add a barrier. Raises `UnavailableError` if there are too many."""
        if len(self.waiting) >= MOST_BARRIERS:
            raise UnavailableError(
                f"too many barriers: {len(self.waiting)} are waiting",
                repair="try again later, or stop some of the clients that wait",
            )
        barrier = Barrier(positions, self._clock())
        self.waiting.append(barrier)
        return barrier

    def remove(self, barrier: Barrier) -> None:
        """Remove a barrier that is no longer waited for."""
        self.waiting.remove(barrier)

    def unforced(self) -> list[Barrier]:
        """The barriers whose positions are not committed yet."""
        return [barrier for barrier in self.waiting if not barrier.version]

    def due(self, asked: float | None) -> list[Barrier]:
        """Those of them that may be forced now. `asked`: since when an answer of a log server is awaited; None: there is none."""
        return [
            each
            for each in self.unforced()
            if each.positions or asked is None or each.since < asked
        ]

    def is_urgent(self) -> bool:
        """Whether the next tick is due early."""
        now = self._clock()
        return any(now - barrier.since < URGENT_SECONDS for barrier in self.unforced())

    def published(self, version: int) -> None:
        """End the barriers that are reached by this version, which can now be read."""
        for barrier in self.waiting:
            if 0 < barrier.version <= version:
                barrier.end()

    def stop(self) -> None:
        """End all barriers."""
        for barrier in self.waiting:
            barrier.end()
