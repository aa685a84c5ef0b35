"""Where no record goes on: up to which segment a slot may let go of WAL. Pure.

A safekeeper that crashed comes back with its last *whole* record (rule 9), so the WAL from the start of the record
at `restart_lsn` on must stay to be had. Where that record starts, nobody knows without parsing; but the first page of
a segment tells whether a record goes on over its start (`XLP_FIRST_IS_CONTRECORD`, PostgreSQL source,
xlog_internal.h). No record lies across a *clean* start, so the last clean start at or below an LSN is never behind
the start of its record, however long that is.
"""

import struct
from bisect import bisect_right, insort

from walsender_bridge.proposer.wal_queue import WalQueue

_FIRST_IS_CONTRECORD = 0x0001
#: `xlp_magic`, `xlp_info`: in the server's byte order, which is little-endian everywhere that it runs today.
_PAGE_HEAD = struct.Struct("<HH")


class CleanSegments:
    """The starts of segments that the stream has passed and that are clean."""

    def __init__(self, lsn: int, segment_size: int) -> None:
        """The stream begins at `lsn`."""
        self._size = segment_size
        self._next = -(-lsn // segment_size) * segment_size
        self._clean: list[int] = []

    def pass_over(self, queue: WalQueue) -> None:
        """Look at the starts of segments that have come into the queue."""
        while self._next >= queue.begin and self._next + _PAGE_HEAD.size <= queue.end:
            head = b"".join(queue.views(self._next, self._next + _PAGE_HEAD.size))
            _, info = _PAGE_HEAD.unpack(head)
            if not info & _FIRST_IS_CONTRECORD:
                insort(self._clean, self._next)
            self._next += self._size

    def last_at(self, lsn: int) -> int | None:
        """The last clean start at or below `lsn`; None: none was seen, nothing may be let go."""
        found = bisect_right(self._clean, lsn) - 1
        if found < 0:
            return None
        start = self._clean[found]
        # Positions do not fall, so older ones are not asked for again.
        del self._clean[:found]
        return start
