"""Recovery: finds the beginning and end of a safekeeper's WAL after a crash (guarantees: see `wal.py`)."""

from functools import lru_cache

from walsender_bridge.errors import CorruptError
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.postgres.protocol.wal_page import PAGE_BYTES, WalFormat, segment_start
from walsender_bridge.postgres.protocol.wal_record import Pages, RecordScan, scan_below
from walsender_bridge.quorum.safekeeper.storage import position_file
from walsender_bridge.quorum.safekeeper.storage.position_file import StoragePosition
from walsender_bridge.quorum.safekeeper.storage.segments import PIECE_BYTES, SegmentFile, Segments
from walsender_bridge.runtime.folder import Disk

_WINDOW = 1 << 18


def load(disk: Disk, segments: Segments) -> StoragePosition | None:
    """Load the position file; None: the storage is new. Raises `CorruptError` for WAL without a position file."""
    segments.load()
    position = position_file.load(disk)
    if position is None and segments.starts:
        raise CorruptError(
            "there is WAL, but its position file is missing",
            where=f"{disk}/{position_file.NAME}",
            repair="rejoin the safekeeper as a new member, and check its disk",
        )
    return position


def find_end(
    segments: Segments, wal_format: WalFormat, position: StoragePosition
) -> tuple[Lsn, Lsn]:
    """The beginning and end of the WAL. Raises `CorruptError` when durable WAL is missing."""
    size = wal_format.segment_bytes
    known = position.durable_lsn
    while (file := segments.at(segment_start(known, size))) and file.complete:
        known = file.start + size
    first = segment_start(known, size)
    if known > first and segments.at(first) is None:
        raise CorruptError(
            f"the segment at {format_lsn(known)}, which was durable, is missing",
            where=str(segments.disk),
            repair="rejoin the safekeeper as a new member, and check its disk",
        )
    begin = first
    while begin > position.begin_lsn and segments.at(begin - size):
        begin -= size
    later = first
    while file := segments.at(later):
        _write_again(segments, file, max(known - later, 0))
        later += size
    return begin, _scan(_pages(segments, size), wal_format, begin, known, exact=position.exact)


def _write_again(segments: Segments, file: SegmentFile, offset: int) -> None:
    """Rewrite and sync what was found in a segment from `offset` on, before it is reported. Raises `OSError`.

    A killed process may have left bytes only in the page cache; after a failed write these may count as clean, so that a
    sync alone would succeed without writing them.
    """
    disk = segments.disk
    opened = disk.open(file.name, durable=False)
    try:
        for at in range(offset - offset % PIECE_BYTES, segments.segment_bytes, PIECE_BYTES):
            opened.write(disk.read(file.name, at, PIECE_BYTES), at)
        opened.sync()
    finally:
        opened.close()


def _pages(segments: Segments, size: int) -> Pages:
    @lru_cache(maxsize=4)
    def window(lsn: Lsn) -> bytes:
        start = segment_start(lsn, size)
        file = segments.at(start)
        return b"" if file is None else segments.disk.read(file.name, lsn - start, _WINDOW)

    def page(lsn: Lsn) -> bytes:
        at = lsn % _WINDOW
        return window(lsn - at)[at : at + PAGE_BYTES]

    return page


def _scan(pages: Pages, wal_format: WalFormat, begin: Lsn, known: Lsn, *, exact: bool) -> Lsn:
    """The end of the last complete record, but not less than `known`, nor more if that is exact.

    The scan starts at a record below `known`, so that the first record behind it has to name its predecessor: older WAL in a
    recycled segment never does.
    """
    if known > begin:
        walk = scan_below(pages, known - 1, known, wal_format, oldest=begin)
        if walk is None:
            return known
        if not walk.ran_out:
            raise CorruptError(
                f"WAL below {format_lsn(known)}, which was durable, is damaged: {walk.why}",
                repair="rejoin the safekeeper as a new member, and check its disk",
            )
        start, previous = walk.end, walk.previous
    else:
        start, previous = begin, None
    if exact:
        return known
    walk = RecordScan(pages, start, wal_format, previous=previous)
    for _ in walk:
        pass
    return max(known, walk.end)
