"""The WAL that a proposer holds in memory, copied once into blocks and handed out as views of them.

Blocks rather than the pieces as they came: a small commit is a hundred bytes, and an object for each would cost more
memory than the WAL, and time whenever the oldest are let go. So `[begin, end)` takes its own bytes and less than two
blocks more.

Invariant: `[begin, end)` is held without a gap. Bytes that were appended are never written again, so a view that was
handed out stays good after `release`: a block goes when the last view of it does.
"""

from collections import deque

#: A power of two. Blocks start at its multiples.
BLOCK_BYTES = 256 << 10


class WalQueue:
    """See the module. It starts empty at `lsn`."""

    def __init__(self, lsn: int) -> None:
        self.begin = self.end = lsn
        self._first = lsn - lsn % BLOCK_BYTES
        self._blocks: deque[memoryview] = deque()
        #: The last block, whose bytes from `end` on are free; empty: there is none.
        self._tail = memoryview(b"")

    def append(self, piece: bytes | memoryview) -> None:
        """More WAL, from `end` on."""
        length = len(piece)
        at = self.end % BLOCK_BYTES
        if at and at + length <= BLOCK_BYTES and self._tail:
            self._tail[at : at + length] = piece
            self.end += length
            return
        taken = 0
        while taken < length:
            at = self.end % BLOCK_BYTES
            if not at or not self._tail:
                self._tail = memoryview(bytearray(BLOCK_BYTES))
                self._blocks.append(self._tail)
            part = min(length - taken, BLOCK_BYTES - at)
            self._tail[at : at + part] = piece[taken : taken + part]
            taken += part
            self.end += part

    def release(self, lsn: int) -> None:
        """Nobody asks for what is below `lsn` any more. Whole blocks go."""
        self.begin = max(self.begin, lsn)
        while self._first + BLOCK_BYTES <= self.begin and len(self._blocks) > 1:
            self._blocks.popleft()
            self._first += BLOCK_BYTES

    def holds(self, begin: int, end: int) -> bool:
        """Whether [begin, end) is here. Before there is a primary, nothing is."""
        return self.begin <= begin <= end <= self.end

    def views(self, begin: int, end: int) -> list[memoryview]:
        """The bytes of [begin, end), which are held."""
        assert self.holds(begin, end), (self.begin, begin, end, self.end)
        number, at = divmod(begin - self._first, BLOCK_BYTES)
        length = end - begin
        if 0 < length <= BLOCK_BYTES - at:
            return [self._blocks[number][at : at + length]]
        found: list[memoryview] = []
        while length:
            view = self._blocks[number][at : at + length]
            found.append(view)
            length -= len(view)
            number, at = number + 1, 0
        return found
