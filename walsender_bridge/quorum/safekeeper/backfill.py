"""Older WAL that a safekeeper lacks, brought by its proposer: received, checked, and joined to what is held.

    catch-up-segment     ──durable, checked──▶  000000010000000000000002   ──name durable──▶  begin_lsn lowered
    [at of a segment)                            a segment like any other

**What holds.** `begin_lsn` is lowered only to a segment that is durable whole, under its name, and whose WAL has been
walked: its pages are of this WAL and of no later timeline than its name says, every record that begins in it has its
checksum and names its predecessor, and the walk goes on over the seam to a record of the WAL that was held before. Of
the record that began below the segment nothing can be said until the next segment comes, as for any log's beginning.
So a crash at any point leaves the old beginning (what was received is removed at the next start) or the new one.

**Nobody waits for it.** A piece is one write and one sync; the walk is done in small parts, in the driver's idle
moments. Nothing is taken where less would be left than the log's own growth needs (`has_room`).
"""

import struct
from collections.abc import Iterator
from functools import lru_cache

import google_crc32c
import structlog

from walsender_bridge.errors import CorruptError
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, format_lsn
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
from walsender_bridge.runtime.folder import Disk, File

#: WAL that one part of the check passes over, at least: a few milliseconds of small records.
_PART_BYTES = 32 << 10
_WINDOW = 1 << 18
#: Segments that must fit besides: the log goes on to grow, and what it needs comes first.
_LEFT_FOR_THE_LOG = 3
_PAGE_TIMELINE = struct.Struct("<4xI")

_log = structlog.get_logger(__name__)


class BackfillStorage:
    """See the module; beside a `WalStorage`, in the same thread. `why`: what was wrong with the last that was received."""

    def __init__(self, storage: WalStorage) -> None:
        self._storage = storage
        self._segments: Segments = storage.segments
        self._disk: Disk = storage.segments.disk
        self._size = storage.format.segment_bytes
        self.why = ""
        #: Nothing, until it is known what is needed.
        self._wanted = MAX_LSN
        #: The beginning that the segment at hand is to be joined to; 0: none is at hand.
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

    def want(self, lsn: int) -> None:
        """Let WAL from `lsn` on be held here."""
        self._wanted = segment_start(lsn, self._size)

    @property
    def wanted_lsn(self) -> int:
        """From where on WAL is to be held; `begin_lsn` of the storage, if none is lacking."""
        return min(self._wanted, self._storage.begin_lsn)

    @property
    def next_lsn(self) -> int:
        """Where the next bytes go; 0: none are taken now."""
        storage = self._storage
        begin = storage.begin_lsn
        self._look()
        if self._wanted >= begin or begin < 2 * self._size or self._check is not None:
            return 0
        # The seam is a record: as long as none is held, nothing can be joined.
        if not storage.has_records or not (self._end or self._has_room()):
            return 0
        return self._at if self._end else begin - self._size

    def _look(self) -> None:
        """Drop what is at hand, if there is nothing to join it to: the log began anew, was cut, or let go of WAL."""
        storage = self._storage
        if self._end and (self._end != storage.begin_lsn or not storage.has_records):
            self.drop()

    def _has_room(self) -> bool:
        limits = self._segments.limits
        needed = (1 + _LEFT_FOR_THE_LOG) * self._size
        if limits.wal_bytes is not None and self._segments.used_bytes + needed > limits.wal_bytes:
            return False
        return self._disk.free_bytes() - needed >= limits.free_bytes

    # -- receiving ----------------------------------------------------------------------------------

    def take(self, lsn: int, data: bytes | memoryview, timeline: int) -> None:
        """Take bytes, durably; others than the next ones are passed over. Raises `OSError`, but not that of a full disk."""
        if not data or lsn != self.next_lsn:
            return
        try:
            if not self._end:
                self._begin(timeline)
            if timeline != self._timeline:
                self._refuse(f"it is of timeline {timeline}, and began on {self._timeline}")
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
        assert self._at <= self._end, "a segment comes in pieces of its own"
        if self._at == self._end:
            self._check = self._scanned()

    def _begin(self, timeline: int) -> None:
        begin = self._storage.begin_lsn
        self._file = self._disk.create(RECEIVING)
        self._end, self._at = begin, begin - self._size
        self._timeline, self._sum = timeline, 0

    def drop(self) -> None:
        """Forget what is at hand."""
        if self._file is not None:
            self._file.close()
            self._disk.remove(RECEIVING)
        self._end = self._at = 0
        self._file = self._check = None

    def _refuse(self, why: str) -> None:
        self.why = (
            f"WAL from {format_lsn(self._end - self._size)} on was brought and not taken: {why}"
        )
        _log.error("older WAL is not taken", reason=self.why)
        self.drop()

    # -- checking and joining -----------------------------------------------------------------------

    def check(self) -> bool:
        """Do a small part of the check, and join the segment at its end; whether it was joined. Raises `OSError`.

        While it only reads, an error of the disk is a reason not to take the segment.
        """
        self._look()
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
        """The walk over the segment and the seam, in parts. Raises `CorruptError`."""
        storage, end = self._storage, self._end
        following = self._segments.at(end)
        assert following is not None, "the storage holds WAL at its beginning"
        if self._timeline > following.timeline:
            raise CorruptError(f"timeline {self._timeline} before {following.timeline}")
        pages = self._pages()
        start = self._first_record(pages)
        if start is None:
            return  # all of it is the inside of one record: the segment that begins it is checked with this one
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

    def _first_record(self, pages: Pages) -> int | None:
        """Where the first record begins in the segment or behind it; None: at or behind the next segment's first page."""
        lsn, left = self._end - self._size, None
        while lsn <= self._end:
            header = parse_page_header(pages(lsn), lsn, self._storage.format)
            given_up = bool(header.info & OVERWRITES)
            if left is not None and header.remaining != left and not given_up:
                raise CorruptError(
                    f"the record at its beginning does not go on at {format_lsn(lsn)}"
                )
            if not header.remaining:
                return lsn
            room = PAGE_BYTES - header.size
            if header.remaining <= room:
                return align(lsn + header.size + header.remaining)
            left = header.remaining - room
            lsn += PAGE_BYTES
        return None

    def _pages(self) -> Pages:
        storage, start, end = self._storage, self._end - self._size, self._end

        @lru_cache(maxsize=2)
        def window(lsn: int) -> bytes:
            return self._disk.read(RECEIVING, lsn - start, _WINDOW)

        def page(lsn: int) -> bytes:
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
        """Durable since its last piece: the name, then the beginning."""
        assert self._file is not None
        self._file.close()
        self._storage.join(RECEIVING, self._timeline, self._sum)
        self._file = self._check = None
        self._end = self._at = 0
        self.why = ""
