"""A clock for leases and retention: it follows the wall clock, but never jumps with it.

Leases and retention periods outlast their process, so the monotonic clock alone cannot measure them; and a wall clock
that is set, or a virtual machine that was suspended for a week, must not end all of them at once. This clock
continues from the time that was recorded last. It is never slower than the monotonic clock and at most `CATCH_UP`
times as fast, so what is kept for a period is kept for at least half of it while the process runs: long enough to be
renewed.
"""

import time
from collections.abc import Callable

#: How fast the clock goes at most, by the monotonic clock, while it is behind the wall clock.
CATCH_UP = 2.0
#: Seconds by which the wall clock may leave the monotonic one between two looks and is not said to have jumped.
_TOLERANCE = 60.0


class SteadyClock:
    """Seconds since the Unix epoch, for ages and leases. `since`: what was recorded last; 0: nothing was.

    `jumped` is called with the seconds by which the wall clock has been set.
    """

    def __init__(
        self,
        since: float = 0.0,
        *,
        wall: Callable[[], float] | None = None,
        monotonic: Callable[[], float] | None = None,
        jumped: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._wall = wall or _wall
        self._monotonic = monotonic or time.monotonic
        self._jumped = jumped
        self._wall_at, self._looked_at = self._wall(), self._monotonic()
        self._now = since or self._wall_at

    def now(self) -> float:
        """The time; never less than before."""
        wall, looked_at = self._wall(), self._monotonic()
        passed = looked_at - self._looked_at
        leap = wall - self._wall_at - passed
        if abs(leap) > _TOLERANCE:
            self._jumped(leap)
        self._wall_at, self._looked_at = wall, looked_at
        self._now += min(max(wall - self._now, passed), CATCH_UP * passed)
        return self._now


def _wall() -> float:
    return time.time()
