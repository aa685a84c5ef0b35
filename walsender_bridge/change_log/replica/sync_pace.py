"""How long a synchronization rests after each batch, so that appends to the same log server hardly notice it. Pure.

A batch reads the source's disk and takes its processor, so appends that meet one may wait for it. How much of the time may be spent
on batches is found by measuring: appends that met no batch say what is usual, and of all appends, one in a hundred may take more
than `SLOW` times the 99th percentile of these. While more of them do, the share of the batches is halved; while fewer do, it grows.

Two bounds hold whatever is measured. A rest is never shorter than its batch, so at least half of the disk's time is left to others,
also if nothing is appended, or the disk is slow. And it is never longer than the batch and `LONGEST` seconds: a replica that is being
synchronized comes closer also beside a writer that never pauses.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

#: An append is slow that takes so many times what is usual.
SLOW: Final = 1.5
#: The part of appends that may be slow.
ALLOWED: Final = 0.01
#: The part of the time that batches take.
MOST: Final = 1 / 2
LEAST: Final = 1 / 16
#: Seconds that a rest may be longer than its batch.
LONGEST: Final = 2.0
#: Appends from which something is concluded, and those that are remembered.
_ENOUGH: Final = 100
_KEPT: Final = 500


class SyncPace:
    """See the module. One for each log server."""

    def __init__(self) -> None:
        self.share = MOST
        #: When the last batch ended.
        self._before = 0.0
        #: Seconds of appends that met no batch.
        self._usual: deque[float] = deque(maxlen=_KEPT)
        #: Whether each of the last appends was slow.
        self._slow: deque[bool] = deque(maxlen=_KEPT)

    def rest(
        self,
        began: float,
        ended: float,
        appends: Iterable[tuple[float, float]],
        sending: float | None = None,
    ) -> float:
        """The seconds to rest after a batch.

        `appends`: beginning and end of each append that ended since the batch before. `sending`: when the first batch began of
        those that are still being sent, if any. All times are monotonic seconds.
        """
        first = began if sending is None else min(began, sending)
        usual = self._percentile()
        for start, end in appends:
            # It may have begun during the batch before, and ended in the rest behind it; or during one that still goes on.
            if self._before <= start and end <= first:
                self._usual.append(end - start)
            if usual is not None:
                self._slow.append(end - start > SLOW * usual)
        self._before = max(self._before, ended)
        self._adjust()
        took = ended - began
        return min(took * (1 / self.share - 1), took + LONGEST)

    def _percentile(self) -> float | None:
        if len(self._usual) < _ENOUGH:
            return None
        return sorted(self._usual)[int(len(self._usual) * (1 - ALLOWED))]

    def _adjust(self) -> None:
        if len(self._slow) < _ENOUGH:
            return
        slow = sum(self._slow) / len(self._slow)
        if slow > ALLOWED:
            self.share = max(LEAST, self.share / 2)
        elif slow < ALLOWED / 2:
            self.share = min(MOST, self.share * 1.25)
        else:
            return
        self._slow.clear()
