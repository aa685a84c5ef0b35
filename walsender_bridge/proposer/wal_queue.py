"""The WAL that a proposer holds in memory: pieces as they came, handed out as views, never copied.

Invariant: `[begin, end)` is held without a gap. A view that was handed out stays good after its piece was
released: memory goes when the last view of it does.
"""

from bisect import bisect_right
from collections.abc import Sequence


class WalQueue:
    """See the module. It starts empty at `lsn`."""

    def __init__(self, lsn: int) -> None:
        self.begin = self.end = lsn
        self._starts: list[int] = []
        self._pieces: list[memoryview] = []

    def append(self, piece: memoryview) -> None:
        """More WAL, from `end` on."""
        self._starts.append(self.end)
        self._pieces.append(piece)
        self.end += len(piece)

    def release(self, lsn: int) -> None:
        """Nobody asks for what is below `lsn` any more. Whole pieces go."""
        self.begin = max(self.begin, lsn)
        gone = bisect_right(self._starts, lsn) - 1
        if gone > 0:
            del self._starts[:gone], self._pieces[:gone]

    def views(self, begin: int, end: int) -> Sequence[memoryview]:
        """The bytes of [begin, end), which are held."""
        assert self.begin <= begin <= end <= self.end, (self.begin, begin, end, self.end)
        found: list[memoryview] = []
        at = bisect_right(self._starts, begin) - 1
        while begin < end:
            piece, start = self._pieces[at], self._starts[at]
            view = piece[begin - start : end - start]
            found.append(view)
            begin += len(view)
            at += 1
        return found
