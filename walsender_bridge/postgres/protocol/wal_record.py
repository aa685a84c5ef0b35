"""Records of PostgreSQL's write-ahead log: scan them over pages, and find the end of the last complete one. No I/O.

Every function reads through a `Pages`: a callable that gives the page at an LSN, as much of it as there is.
A record counts when all of its bytes are there, each page that it crosses is the right page, its CRC-32C is
right, and (where the record before it is known) it names that one as its predecessor. The last is what tells
a record of this WAL from one that a recycled segment still holds: its bytes may be whole, but it lay elsewhere,
and so did its predecessor.

Where a record ends is PostgreSQL's `EndRecPtr`: aligned to 8 bytes, and at the end of a page the boundary
itself, not the first byte behind the next page's header. A segment switch (`XLOG_SWITCH`) ends at the end of its
segment where that is known to be there (`stop`), else at the end of its own bytes. What lies between is padding, and
nothing in it can be checked: it is zeros as a rule, but a server that crashed before it wrote them continues in the next
segment all the same, and from then on sends what its recycled file held.

Bounded: a scan reads each page once; one record has at most `LARGEST_RECORD` bytes, which are never joined.

Source: PostgreSQL, `src/include/access/xlogrecord.h`, `src/backend/access/transam/xlogreader.c`.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import google_crc32c

from walsender_bridge.errors import CorruptError
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.postgres.protocol.wal_page import (
    CONTINUES,
    OVERWRITES,
    PAGE_BYTES,
    PageHeader,
    WalFormat,
    align,
    header_size,
    page_start,
    parse_page_header,
    segment_start,
)

#: `page(lsn)`: the page at this LSN, up to where the WAL ends; empty where there is none. It may raise.
Pages = Callable[[Lsn], bytes | memoryview]

RECORD_HEADER = 24
#: PostgreSQL's reader cannot allocate more (`MaxAllocSize`), so it never writes more.
LARGEST_RECORD = 0x3FFFFFFF

_HEADER = struct.Struct("<IIQBB2xI")
_LENGTH = struct.Struct("<I")
#: The part of the header that its CRC covers, which comes last in it.
_COVERED = 20
_RM_XLOG, _SWITCH, _INFO_MASK = 0, 0x40, 0xF0


@dataclass(frozen=True, slots=True)
class WalRecord:
    """One whole record: `start` and `end` as LSNs, `length` its own bytes, `previous` the start of the one before.

    `resource_manager` and `info` say what it is (`rmgrlist.h`).
    """

    start: Lsn
    end: Lsn
    length: int
    xid: int
    previous: Lsn
    resource_manager: int
    info: int

    @property
    def is_switch(self) -> bool:
        """Whether it ends its segment early."""
        return self.resource_manager == _RM_XLOG and self.info & _INFO_MASK == _SWITCH


class _Stop(Exception):
    """Here is no further record: the message says why."""


class _RanOut(_Stop):
    """The bytes that are there end before the record does."""


class _Overwritten(Exception):
    """The record was given up by the server; the next begins on the page at `lsn`."""

    def __init__(self, lsn: Lsn) -> None:
        super().__init__(lsn)
        self.lsn = lsn


class RecordScan:
    """The records from `start` on, where one begins (a page boundary stands for the byte behind its header).

    Iterate over it; when it is exhausted, `end` is where the last whole record ended (`start`, if there was
    none), `why` says what stood there instead of another, and `ran_out` whether that was merely too few bytes.
    `stop`: the end of the available WAL, at which the scan stops; without it the scan determines
    the end itself, and so never passes a segment switch. `previous`: the start of the record before `start`,
    if known.
    """

    def __init__(
        self,
        pages: Pages,
        start: Lsn,
        expected: WalFormat,
        *,
        stop: Lsn | None = None,
        previous: Lsn | None = None,
    ) -> None:
        self.end = start
        self.previous = previous
        self.why = ""
        self.ran_out = False
        self._pages = pages
        self._expected = expected
        self._stop = stop
        self._timeline = 0
        self._page_lsn = -1
        self._page: bytes | memoryview = b""
        self._header: PageHeader

    def __iter__(self) -> Iterator[WalRecord]:
        position = self.end
        while True:
            try:
                record = self._record(position)
            except _Overwritten as found:
                position = found.lsn
                continue
            except (_Stop, CorruptError) as error:
                self.why = str(error)
                self.ran_out = isinstance(error, _RanOut)
                return
            self.previous = record.start
            self.end = position = record.end
            yield record
            if record.is_switch and position % self._expected.segment_bytes:
                self.why, self.ran_out = "the segment's padding is not whole", True
                return

    def _load(self, lsn: Lsn) -> None:
        """Make the page at `lsn` the current one."""
        if lsn == self._page_lsn:
            return
        if self._stop is not None and lsn >= self._stop:
            raise _RanOut(f"the WAL ends at {format_lsn(self._stop)}")
        data = self._pages(lsn)
        if self._stop is not None and lsn + len(data) > self._stop:
            data = data[: self._stop - lsn]
        if len(data) < header_size(lsn, self._expected.segment_bytes):
            raise _RanOut(f"the WAL ends on the page at {format_lsn(lsn)}")
        header = parse_page_header(data, lsn, self._expected)
        if header.timeline < self._timeline:
            raise CorruptError(
                f"timeline {header.timeline} after {self._timeline}",
                where=f"WAL page {format_lsn(lsn)}",
            )
        self._timeline = header.timeline
        self._page_lsn, self._page, self._header = lsn, data, header

    def _record(self, position: Lsn) -> WalRecord:
        """The whole record that starts at this position."""
        page_lsn = page_start(position)
        self._load(page_lsn)
        offset = position - page_lsn
        if offset == 0:
            if self._header.info & CONTINUES:
                raise _Stop(f"{format_lsn(position)} lies inside a record")
            offset = self._header.size
        start = page_lsn + offset
        if len(self._page) < offset + _LENGTH.size:
            raise _RanOut(f"no record begins at {format_lsn(start)}")
        length: int = _LENGTH.unpack_from(self._page, offset)[0]
        if not RECORD_HEADER <= length <= LARGEST_RECORD:
            raise _Stop(f"no record begins at {format_lsn(start)}: its length is {length}")
        head, crc, end = self._read(start, offset, length)
        if self._stop is not None and end > self._stop:
            raise _RanOut(f"the padding of the record at {format_lsn(start)} is not whole")
        _, xid, previous, info, resource_manager, expected_crc = _HEADER.unpack(head)
        if previous >= start or (self.previous is not None and previous != self.previous):
            raise _Stop(f"the record at {format_lsn(start)} follows {format_lsn(previous)}")
        if google_crc32c.extend(crc, head[:_COVERED]) != expected_crc:
            raise _Stop(f"the record at {format_lsn(start)} has another checksum")
        record = WalRecord(start, end, length, xid, previous, resource_manager, info)
        if record.is_switch:
            segment = self._expected.segment_bytes
            boundary = segment_start(start, segment) + segment
            if self._stop is not None and boundary <= self._stop:
                return WalRecord(start, boundary, length, xid, previous, resource_manager, info)
        return record

    def _read(self, start: Lsn, offset: int, length: int) -> tuple[bytes, int, Lsn]:
        """The record's header, the CRC of what follows it, and its end."""
        page = self._page
        if offset + length <= len(page):
            head = bytes(page[offset : offset + RECORD_HEADER])
            crc = google_crc32c.value(bytes(page[offset + RECORD_HEADER : offset + length]))
            return head, crc, align(start + length)
        head, crc, remaining = b"", 0, length
        while True:
            piece = bytes(self._page[offset : offset + remaining])
            remaining -= len(piece)
            missing = RECORD_HEADER - len(head)
            if missing > 0:
                head += piece[:missing]
                piece = piece[missing:]
            crc = google_crc32c.extend(crc, piece)
            if remaining == 0:
                return head, crc, align(self._page_lsn + offset + length)
            if len(self._page) < PAGE_BYTES:
                raise _RanOut(f"the record at {format_lsn(start)} is not whole")
            self._load(self._page_lsn + PAGE_BYTES)
            if self._header.info & OVERWRITES:
                raise _Overwritten(self._page_lsn)
            if self._header.remaining != remaining:
                raise _Stop(
                    f"the record at {format_lsn(start)} does not continue at {format_lsn(self._page_lsn)}"
                )
            offset, length = self._header.size, remaining


def record_start_before(
    pages: Pages, position: Lsn, expected: WalFormat, *, oldest: Lsn
) -> Lsn | None:
    """The last position at or below `position` that a page header names as the start of a record.

    Looks back from page to page, at most as far as one record reaches, and not below `oldest`, the page boundary
    where the WAL that is held begins; None: all of it up to `position` is the rest of one record. A page that is not
    one of this WAL may be the padding of a segment switch, which a scan from further back skips, or damage, at
    which it stops. Raises `CorruptError` if no position further back can decide this.
    """
    page_lsn = page_start(max(position - 1, oldest))
    lowest = max(oldest, page_lsn - 2 * LARGEST_RECORD)
    foreign: CorruptError | None = None
    while page_lsn >= lowest:
        size = header_size(page_lsn, expected.segment_bytes)
        if page_lsn + size <= position or page_lsn == position == oldest:
            try:
                header = parse_page_header(pages(page_lsn), page_lsn, expected)
            except CorruptError as error:
                foreign = foreign or error
            else:
                if not header.info & CONTINUES:
                    return page_lsn
                end = align(page_lsn + size + header.remaining)
                if end <= min(position, page_lsn + PAGE_BYTES):
                    return end
        page_lsn -= PAGE_BYTES
    if foreign is not None:
        raise foreign
    return None


def scan_below(
    pages: Pages, position: Lsn, stop: Lsn, expected: WalFormat, *, oldest: Lsn
) -> RecordScan | None:
    """An exhausted scan from a record at or below `position` to `stop`; None if no record starts there.

    A page header gives the end of a record. After a segment switch no record starts there, so the scan is retried from
    further back, which skips the padding. Raises the errors of `record_start_before`.
    """
    scan = None
    while (start := record_start_before(pages, position, expected, oldest=oldest)) is not None:
        scan = RecordScan(pages, start, expected, stop=stop)
        for _ in scan:
            pass
        if scan.ran_out or scan.end > start or start <= oldest:
            break
        position = page_start(start - 1)
    return scan


def aligned(pages: Pages, position: Lsn, expected: WalFormat, *, oldest: Lsn) -> Lsn:
    """The end of the last whole record at or below `position`, or `oldest` when none ends between them.

    The WAL from `oldest` to `position` has been received whole. A few pages are read, more only below a long
    record. Raises `CorruptError` when a page or a record there is not what was received.
    """
    if position <= oldest:
        return position
    scan = scan_below(pages, position, position, expected, oldest=oldest)
    if scan is None:
        return oldest
    if not scan.ran_out:
        raise CorruptError(scan.why, where=f"WAL below {format_lsn(position)}")
    return scan.end
