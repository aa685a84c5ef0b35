"""The WAL that a proposer holds in memory, copied once into blocks and passed on as views of them.

Blocks rather than the pieces as received: a small commit is a hundred bytes, and an object for each would cost more
memory than the WAL, and time whenever the oldest are released. So `[begin, end)` takes its own bytes and less than two
blocks more.

Invariant: `[begin, end)` is held without a gap. Appended bytes are never overwritten, so a view stays valid after
`release`: a block is freed with the last view of it.
"""

from collections import deque

from walsender_bridge.postgres.protocol.lsn import Lsn

#: A power of two. Blocks start at its multiples.
BLOCK_BYTES = 256 << 10


class WalQueue:
    """See the module. It starts empty at `lsn`."""

    def __init__(self, lsn: Lsn) -> None:
        self.begin = self.end = lsn
        self._first = lsn - lsn % BLOCK_BYTES
        self._blocks: deque[memoryview] = deque()
        #: The last block, whose bytes from `end` on are unused; empty: there is none.
        self._tail = memoryview(b"")

    def append(self, piece: bytes | memoryview) -> None:
        """Append WAL at `end`."""
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

    def release(self, lsn: Lsn) -> None:
        """WAL below `lsn` is no longer needed. Whole blocks are freed."""
        self.begin = max(self.begin, lsn)
        while self._first + BLOCK_BYTES <= self.begin and len(self._blocks) > 1:
            self._blocks.popleft()
            self._first += BLOCK_BYTES

    def holds(self, begin: Lsn, end: Lsn) -> bool:
        """Whether [begin, end) is in the queue. Without a primary, the queue is empty."""
        return self.begin <= begin <= end <= self.end

    def views(self, begin: Lsn, end: Lsn) -> list[memoryview]:
        """The bytes of [begin, end), which must be in the queue."""
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
