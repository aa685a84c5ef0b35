"""Where records begin: the segment up to which a slot may release WAL. Pure.

A safekeeper that crashed comes back with its last *complete* record (rule 9), so the WAL from the start of the record at
`restart_lsn` on must remain available. The start of that record is unknown without parsing; but the first page of a
segment has the length of the rest of a record that continues there (`xlp_rem_len`, PostgreSQL source, xlog_internal.h).
After that rest, every record begins behind the segment's start: so the last segment whose rest ends at or below an LSN
is never behind the start of the record there, however long the record is.

Almost every segment begins inside a record: waiting for one that does not could take thousands of segments.
"""

import struct
from bisect import bisect_right

from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.wal_page import CONTINUES, LONG_HEADER, PAGE_BYTES
from walsender_bridge.quorum.proposer.wal_queue import WalQueue

#: `xlp_magic`, `xlp_info`, `xlp_tli`, `xlp_pageaddr`, `xlp_rem_len`: in the server's byte order, which is
#: little-endian everywhere that it runs today.
_PAGE_HEAD = struct.Struct("<HHIQI")


class CleanSegments:
    """The segment starts that the stream has passed, and the end of the rest of a record at each."""

    def __init__(self, lsn: Lsn, segment_size: int) -> None:
        """The stream begins at `lsn`."""
        self._size = segment_size
        self._next = -(-lsn // segment_size) * segment_size
        self._starts: list[Lsn] = []
        self._ends: list[Lsn] = []

    def pass_over(self, queue: WalQueue) -> None:
        """Examine the segment starts that have arrived in the queue."""
        while self._next >= queue.begin and self._next + _PAGE_HEAD.size <= queue.end:
            head = b"".join(queue.views(self._next, self._next + _PAGE_HEAD.size))
            _, info, _, _, rest = _PAGE_HEAD.unpack(head)
            end = self._next + (bytes_on_pages(rest) if info & CONTINUES else 0)
            self._starts.append(self._next)
            # One record may span several starts.
            self._ends.append(max(end, self._ends[-1] if self._ends else 0))
            self._next += self._size

    def last_at(self, lsn: Lsn) -> Lsn | None:
        """The last start below which no record at `lsn` begins; None: none has passed, and nothing may be released."""
        found = bisect_right(self._ends, lsn) - 1
        if found < 0:
            return None
        start = self._starts[found]
        # Positions never fall, so older starts are not needed again.
        del self._starts[:found], self._ends[:found]
        return start


def bytes_on_pages(rest: int) -> int:
    """The most bytes that `rest` bytes of a record take from the start of a segment on, page headers included."""
    pages = rest // (PAGE_BYTES - LONG_HEADER) + 1
    return rest + pages * LONG_HEADER
