"""Pages and segments of PostgreSQL's write-ahead log: their headers, names and arithmetic. No I/O.

The WAL is one row of bytes, counted by LSN. It is cut into pages of 8192 bytes, each with a header, and into
segment files, whose first page has the longer header. A page header repeats the page's own LSN, so a page of
a recycled segment that holds older WAL is known by it; and it says how much of a record that began earlier
lies at its start (`xlp_rem_len`), so the first record that begins on a page is found without what precedes it.

Source: PostgreSQL, `src/include/access/xlog_internal.h`; documentation, 28.6 "WAL Internals". Integers are in the
server's own byte order, which is little-endian on every platform that is supported here.
"""

import re
import struct
from dataclasses import dataclass

from walsender_bridge.errors import CorruptError, NotSupportedError, UsageError
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition, format_lsn

PAGE_BYTES = 8192
SHORT_HEADER = 24
LONG_HEADER = 40
#: A record starts at a multiple of this many bytes, and so does what follows it.
ALIGNMENT = 8

#: Bits of `xlp_info`.
CONTINUES = 0x0001  # the page begins with the rest of a record
LONG = 0x0002
REMOVABLE = 0x0004
OVERWRITES = 0x0008  # the record that should continue here was abandoned; another begins instead
_KNOWN_BITS = CONTINUES | LONG | REMOVABLE | OVERWRITES

#: `xlp_magic`, which PostgreSQL changes with the format of its WAL.
MAGIC = {
    11: 0xD098,
    12: 0xD101,
    13: 0xD106,
    14: 0xD10D,
    15: 0xD110,
    16: 0xD113,
    17: 0xD116,
    18: 0xD118,
}
_MAJOR = {magic: major for major, magic in MAGIC.items()}

_SHORT = struct.Struct("<HHIQI4x")
_LONG = struct.Struct("<HHIQI4xQII")
_SEGMENT_NAME = re.compile(r"([0-9A-F]{8})([0-9A-F]{8})([0-9A-F]{8})")
_SMALLEST_SEGMENT, _LARGEST_SEGMENT = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class WalFormat:
    """The identity of a WAL: the values required in the first page of each of its segments.

    `major` is PostgreSQL's, `system_id` the cluster's, `segment_bytes` its `wal_segment_size`.
    """

    major: int
    system_id: int
    segment_bytes: int

    def __post_init__(self) -> None:
        if self.major not in MAGIC:
            raise NotSupportedError(
                f"the WAL of PostgreSQL {self.major} is not known",
                repair=f"known are {min(MAGIC)} to {max(MAGIC)}; use a newer version of Tuskline",
            )
        check_segment_bytes(self.segment_bytes)

    @property
    def magic(self) -> int:
        """`xlp_magic` of every page."""
        return MAGIC[self.major]


@dataclass(frozen=True, slots=True)
class PageHeader:
    """A page's header. `lsn`: of the page's first byte, which is the header's.

    `remaining`: `xlp_rem_len`, bytes of the record that continues here, from this page on. The last two stand on a
    segment's first page only.
    """

    major: int
    info: int
    timeline: int
    lsn: Lsn
    remaining: int
    system_id: int | None = None
    segment_bytes: int | None = None

    @property
    def size(self) -> int:
        """Bytes of the header."""
        return LONG_HEADER if self.info & LONG else SHORT_HEADER


def check_segment_bytes(size: int) -> None:
    """A power of two from 1 MiB to 1 GiB, as `initdb --wal-segsize` takes it; otherwise `NotSupportedError`."""
    if not _SMALLEST_SEGMENT <= size <= _LARGEST_SEGMENT or size & (size - 1):
        raise NotSupportedError(
            f"{size} bytes is no size of a WAL segment",
            repair="PostgreSQL has powers of two from 1 MiB to 1 GiB",
        )


def align(lsn: Lsn) -> Lsn:
    """The first position at or behind `lsn` where a record may start."""
    return -(-lsn // ALIGNMENT) * ALIGNMENT


def page_start(lsn: Lsn) -> Lsn:
    """The LSN of the page in which the byte at `lsn` lies."""
    return lsn - lsn % PAGE_BYTES


def header_size(page_lsn: Lsn, segment_bytes: int) -> int:
    """Bytes of the header that the page at this LSN has."""
    return SHORT_HEADER if page_lsn % segment_bytes else LONG_HEADER


def parse_page_header(data: bytes | memoryview, lsn: Lsn, expected: WalFormat) -> PageHeader:
    """The header at the start of `data`, the page at `lsn`, checked against what it has to be.

    Raises `CorruptError` for a page that is not this one, or not of this WAL.
    """
    size = header_size(lsn, expected.segment_bytes)
    where = f"WAL page {format_lsn(lsn)}"
    if len(data) < size:
        raise CorruptError(f"truncated page header of {len(data)} bytes", where=where)
    magic, info, timeline, page_lsn, remaining = _SHORT.unpack_from(data)
    if magic != expected.magic:
        raise CorruptError(f"its magic is {magic:04X}, not {expected.magic:04X}", where=where)
    if info & ~_KNOWN_BITS or bool(info & LONG) != (size == LONG_HEADER):
        raise CorruptError(f"its flags are {info:04X}", where=where)
    if page_lsn != lsn:
        raise CorruptError(f"it says that it is {format_lsn(page_lsn)}", where=where)
    if timeline == 0 or bool(info & CONTINUES) != bool(remaining):
        raise CorruptError(f"timeline {timeline}, {remaining} bytes to continue", where=where)
    if size == SHORT_HEADER:
        return PageHeader(expected.major, info, timeline, lsn, remaining)
    *_, system_id, segment_bytes, page_bytes = _LONG.unpack_from(data)
    if page_bytes != PAGE_BYTES or segment_bytes != expected.segment_bytes:
        raise CorruptError(f"segments of {segment_bytes}, pages of {page_bytes}", where=where)
    if system_id != expected.system_id:
        raise CorruptError(f"it is of system {system_id}, not {expected.system_id}", where=where)
    return PageHeader(expected.major, info, timeline, lsn, remaining, system_id, segment_bytes)


def identify(first_page: bytes | memoryview) -> PageHeader:
    """Parse the header of a segment's first page without prior knowledge of the WAL.

    Raises `CorruptError` when it is none, `NotSupportedError` for a version of PostgreSQL or a build that is
    not known.
    """
    if len(first_page) < LONG_HEADER:
        raise CorruptError(f"{len(first_page)} bytes are no first page of a WAL segment")
    magic, info, timeline, lsn, remaining, system_id, segment_bytes, page_bytes = _LONG.unpack_from(
        first_page
    )
    if magic not in _MAJOR or not info & LONG:
        swapped = int.from_bytes(magic.to_bytes(2, "little"), "big")
        if swapped in _MAJOR:
            raise NotSupportedError(f"it is the WAL of a big-endian PostgreSQL {_MAJOR[swapped]}")
        raise CorruptError(f"magic {magic:04X} and flags {info:04X} begin no WAL segment")
    if page_bytes != PAGE_BYTES:
        raise NotSupportedError(
            f"its pages have {page_bytes} bytes",
            repair=f"only the usual build of PostgreSQL is supported, with {PAGE_BYTES}",
        )
    check_segment_bytes(segment_bytes)
    if lsn % segment_bytes:
        raise CorruptError(f"{format_lsn(lsn)} is not where a segment begins")
    return PageHeader(_MAJOR[magic], info, timeline, lsn, remaining, system_id, segment_bytes)


# -- segments ------------------------------------------------------------------------------------------------


def segment_start(lsn: Lsn, segment_bytes: int) -> Lsn:
    """The LSN of the segment in which the byte at `lsn` lies."""
    return lsn - lsn % segment_bytes


def segment_name(timeline: int, lsn: Lsn, segment_bytes: int) -> str:
    """The file name of the segment in which the byte at `lsn` lies."""
    number = lsn // segment_bytes
    per_id = (1 << 32) // segment_bytes
    return f"{timeline:08X}{number // per_id:08X}{number % per_id:08X}"


def parse_segment_name(name: str, segment_bytes: int) -> WalPosition | None:
    """The timeline and first LSN, from a segment's name; None: not a segment's name."""
    match = _SEGMENT_NAME.fullmatch(name)
    if match is None:
        return None
    timeline, high, low = (int(part, 16) for part in match.groups())
    lsn = (high << 32) + low * segment_bytes
    return WalPosition(timeline, lsn) if timeline and low < (1 << 32) // segment_bytes else None


def history_name(timeline: int) -> str:
    """The file name of a timeline's history."""
    if timeline < 1:
        raise UsageError(f"there is no timeline {timeline}")
    return f"{timeline:08X}.history"
