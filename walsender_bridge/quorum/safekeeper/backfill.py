"""Catch-up on the safekeeper's side: older WAL is received from the proposer, verified, and joined to the log.

    catch-up-segment     ──durable, checked──▶  000000010000000000000002   ──name durable──▶  begin_lsn lowered
    [at of a segment)                            a segment like any other

**Guarantees.** `begin_lsn` is lowered only to a segment that is completely durable, under its name, and whose WAL has
been scanned: its pages belong to this WAL and to no later timeline than its name says, every record that begins in it
has its checksum and names its predecessor, and the scan continues over the seam to a record of the WAL held before. The
record that begins below the segment cannot be verified until the next segment arrives, as at any log's beginning.
So a crash at any point leaves the old beginning (received WAL is removed at the next start) or the new one.

**No commit waits for it.** A piece is one write and one sync; the scan is done in small parts, when the driver is idle.
No WAL is accepted that would leave less space than the log's own growth needs (`_has_space`).
"""

import struct
from collections.abc import Iterator
from functools import lru_cache

import google_crc32c

from walsender_bridge.errors import CorruptError
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, Lsn, format_lsn
from walsender_bridge.postgres.protocol.wal_page import (
    OVERWRITES,
    PAGE_BYTES,
    align,
    parse_page_header,
    segment_start,
)
from walsender_bridge.postgres.protocol.wal_record import Pages, RecordScan
from walsender_bridge.quorum.safekeeper.storage.segments import NO_ROOM, RECEIVING, Segments
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.folder import Disk, File

#: The least WAL that one part of the check scans: a few milliseconds of small records.
_PART_BYTES = 32 << 10
_WINDOW = 1 << 18
#: Segments that must fit besides: the log keeps growing, and has priority.
_LEFT_FOR_THE_LOG = 3
_PAGE_TIMELINE = struct.Struct("<4xI")

_log = logs.logger()


class BackfillStorage:
    """See the module; used with a `WalStorage`, in the same thread. `why`: the reason of the last rejection."""

    def __init__(self, storage: WalStorage) -> None:
        self._storage = storage
        self._segments: Segments = storage.segments
        self._disk: Disk = storage.segments.disk
        self._size = storage.format.segment_bytes
        self.why = ""
        #: None, until the need is known.
        self._wanted = MAX_LSN
        #: The beginning to which the current segment is to be joined; 0: there is none.
        self._end = 0
        self._at = 0
        self._timeline = 0
        self._sum = 0
        self._file: File | None = None
        self._check: Iterator[None] | None = None

    @property
    def checking(self) -> bool:
        """Whether `check` has something to do."""
        return self._check is not None

    def want(self, lsn: Lsn) -> None:
        """Request that WAL be held from `lsn` on."""
        self._wanted = segment_start(lsn, self._size)

    @property
    def wanted_lsn(self) -> Lsn:
        """The LSN from which WAL should be held; `begin_lsn` of the storage, if none is missing."""
        return min(self._wanted, self._storage.begin_lsn)

    @property
    def next_lsn(self) -> Lsn:
        """The LSN of the next bytes; 0: none are accepted now."""
        storage = self._storage
        begin = storage.begin_lsn
        self._drop_unjoinable()
        if self._wanted >= begin or begin < 2 * self._size or self._check is not None:
            return 0
        # The seam is a record: while none is held, nothing can be joined.
        if not storage.has_records or not (self._end or self._has_space()):
            return 0
        return self._at if self._end else begin - self._size

    def _drop_unjoinable(self) -> None:
        """Drop the current segment if its seam is gone: after a full resync, a truncation, or the removal of WAL."""
        storage = self._storage
        if self._end and (self._end != storage.begin_lsn or not storage.has_records):
            self.drop()

    def _has_space(self) -> bool:
        limits = self._segments.limits
        needed = (1 + _LEFT_FOR_THE_LOG) * self._size
        if limits.wal_bytes is not None and self._segments.used_bytes + needed > limits.wal_bytes:
            return False
        return self._disk.free_bytes() - needed >= limits.free_bytes

    # -- receiving ----------------------------------------------------------------------------------

    def take(self, lsn: Lsn, data: bytes | memoryview, timeline: int) -> None:
        """Add bytes, durably; ignores any but the next ones. Raises `OSError`, except that of a full disk."""
        if not data or lsn != self.next_lsn:
            return
        try:
            if not self._end:
                self._begin(timeline)
            if timeline != self._timeline:
                self._refuse(f"it is on timeline {timeline}, but began on {self._timeline}")
                return
            assert self._file is not None
            start = self._end - self._size
            self._file.write(data, lsn - start)
            self._file.sync()
        except OSError as error:
            self.drop()
            if error.errno not in NO_ROOM:
                raise
            return
        self._sum = google_crc32c.extend(self._sum, bytes(data))
        self._at = lsn + len(data)
        assert self._at <= self._end, "a piece does not cross segments"
        if self._at == self._end:
            self._check = self._scanned()

    def _begin(self, timeline: int) -> None:
        begin = self._storage.begin_lsn
        self._file = self._disk.create(RECEIVING)
        self._end, self._at = begin, begin - self._size
        self._timeline, self._sum = timeline, 0

    def drop(self) -> None:
        """Drop the current segment."""
        if self._file is not None:
            self._file.close()
            self._disk.remove(RECEIVING)
        self._end = self._at = 0
        self._file = self._check = None

    def _refuse(self, why: str) -> None:
        self.why = f"received WAL at {format_lsn(self._end - self._size)} was rejected: {why}"
        _log.error("rejected older WAL", reason=self.why)
        self.drop()

    # -- checking and joining -----------------------------------------------------------------------

    def check(self) -> bool:
        """Do a small part of the check; at its end, join the segment and return True. Raises `OSError`.

        A read error only rejects the segment.
        """
        self._drop_unjoinable()
        if self._check is None:
            return False
        try:
            next(self._check)
            return False
        except StopIteration:
            pass
        except (CorruptError, OSError) as error:
            self._refuse(str(error))
            return False
        self._join()
        return True

    def _scanned(self) -> Iterator[None]:
        """Scan the segment and the seam, in parts. Raises `CorruptError`."""
        storage, end = self._storage, self._end
        following = self._segments.at(end)
        assert following is not None, "the storage holds WAL at its beginning"
        if self._timeline > following.timeline:
            raise CorruptError(f"timeline {self._timeline} before {following.timeline}")
        pages = self._pages()
        start = self._first_record(pages)
        if start is None:
            return  # it lies inside one record, and is checked with the segment in which that begins
        walk, part = (
            RecordScan(pages, start, storage.format, stop=storage.flush_lsn),
            start + _PART_BYTES,
        )
        for record in walk:
            if record.start >= end:
                return
            if record.end >= part:
                part = record.end + _PART_BYTES
                yield
        if not walk.ran_out or walk.end < end:
            raise CorruptError(walk.why)

    def _first_record(self, pages: Pages) -> Lsn | None:
        """The start of the first record in the segment or behind it; None: at or behind the next segment's first page."""
        lsn, left = self._end - self._size, None
        while lsn <= self._end:
            header = parse_page_header(pages(lsn), lsn, self._storage.format)
            given_up = bool(header.info & OVERWRITES)
            if left is not None and header.remaining != left and not given_up:
                raise CorruptError(
                    f"the record at its beginning does not continue at {format_lsn(lsn)}"
                )
            if not header.remaining:
                return lsn
            capacity = PAGE_BYTES - header.size
            if header.remaining <= capacity:
                return align(lsn + header.size + header.remaining)
            left = header.remaining - capacity
            lsn += PAGE_BYTES
        return None

    def _pages(self) -> Pages:
        storage, start, end = self._storage, self._end - self._size, self._end

        @lru_cache(maxsize=2)
        def window(lsn: Lsn) -> bytes:
            return self._disk.read(RECEIVING, lsn - start, _WINDOW)

        def page(lsn: Lsn) -> bytes:
            if lsn >= end:
                return storage.read(lsn, PAGE_BYTES)
            base = segment_start(lsn, _WINDOW)
            data = window(base)[lsn - base : lsn - base + PAGE_BYTES]
            (timeline,) = _PAGE_TIMELINE.unpack_from(data)
            if timeline > self._timeline:
                raise CorruptError(
                    f"the page at {format_lsn(lsn)} is of timeline {timeline}, not {self._timeline}"
                )
            return data

        return page

    def _join(self) -> None:
        """Rename the segment, which is durable since its last piece, then lower the beginning."""
        assert self._file is not None
        self._file.close()
        self._storage.join(RECEIVING, self._timeline, self._sum)
        self._file = self._check = None
        self._end = self._at = 0
        self.why = ""
