"""The WAL of a safekeeper on disk: writing, syncing, truncation, reading, and recovery after a crash.

**Guarantees.** (1) `flush_lsn` is never beyond the durable WAL. (2) Behind it the current segment holds nothing that a
scan could take for WAL: zeros, or WAL of other LSNs in a recycled file. So after any crash the scan ends in WAL written
since, and never in WAL truncated earlier. (3) A segment with a complete name is completely durable, and one whose end was
reported has that name, durably: after a segment switch nothing else shows that the padding arrived.

**Writing.** Bytes are gathered in one page-aligned buffer (`buffer`, `advance`: a receiver reads straight into it) and
`flush` is one durable write per segment touched. It rewrites the last incomplete block and pads with
zeros to the next; a torn write leaves every byte of that block old or new, and the old ones are the same.

**The end after a crash** is the end of the last complete record, or `durable_lsn` of the position file if that is
greater. Safekeepers hold ranges of bytes, and an acknowledgement may end inside a record; which bytes of an unfinished
record were acknowledged, and which of them a torn write left incomplete, is unknown without a second write for each
acknowledgement. So the unfinished record is dropped and sent again: recovery never finds less than
`aligned(acknowledged)`, which is all that votes count and all that commits wait for (rule 9). After an orderly stop the
end is exact, to the byte.

**Truncation** first records its position (`position_file`), removes later segments, zeroes the rest of this one, syncs,
and then records its completion; a crash on the way is completed at the next start, before anything is read. The caller
writes the epoch history afterwards (rule 3).

The driver calls from one thread. `OSError` from a write leaves the storage `failed`: only a restart can determine what
the disk then holds.
"""

import contextlib
import mmap
from collections.abc import Callable

import google_crc32c

from walsender_bridge.errors import DiskFullError, TrimmedError, UnavailableError
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.postgres.protocol.wal_page import (
    PAGE_BYTES,
    WalFormat,
    header_size,
    history_name,
    segment_start,
)
from walsender_bridge.postgres.protocol.wal_record import aligned, record_start_before
from walsender_bridge.quorum.protocol.timelines import says_more
from walsender_bridge.quorum.safekeeper.storage import position_file
from walsender_bridge.quorum.safekeeper.storage import recovery as wal_recovery
from walsender_bridge.quorum.safekeeper.storage.checksums import SegmentSums
from walsender_bridge.quorum.safekeeper.storage.position_file import StoragePosition
from walsender_bridge.quorum.safekeeper.storage.segments import (
    PIECE_BYTES,
    SegmentFile,
    Segments,
    StorageLimits,
)
from walsender_bridge.runtime import record_file
from walsender_bridge.runtime.folder import BLOCK_BYTES, Disk, File

_BUFFER_BYTES = 1 << 20


class WalStorage:
    """See the module. It needs a folder of its own; `open` it before anything else, `close` it for an orderly stop.

    `flush_lsn`: the durable end; `begin_lsn`: the oldest WAL held; both 0 until the first `reset`. `write_lsn`: the end of
    the WAL written. `timeline`: of the last write, 0 before the first.
    """

    def __init__(
        self, disk: Disk, wal_format: WalFormat, limits: StorageLimits | None = None
    ) -> None:
        self.format = wal_format
        self.segments = Segments(disk, wal_format.segment_bytes, limits or StorageLimits())
        self.flush_lsn = 0
        self.begin_lsn = 0
        self.timeline = 0
        self.failed = ""
        self.sums = SegmentSums(disk)
        #: Checksum of the current segment, up to `flush_lsn`.
        self._sum = 0
        self._disk = disk
        self._size = wal_format.segment_bytes
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
        # The buffer holds [_base, _base + _fill); _base is the start of a block.
        self._base = 0
        self._fill = 0
        self._current: SegmentFile | None = None
        self._file: File | None = None
        # The log holds only the rest of one record, whose end cannot be determined from the disk.
        self._headless = True

    # -- start and stop -----------------------------------------------------------------------------

    def open(self) -> None:
        """Recover the WAL on disk. Raises `CorruptError`, `NotSupportedError`, `OSError`."""
        found = wal_recovery.load(self._disk, self.segments)
        if found is None:
            return
        if found.cutting:
            self.segments.drop_spares()
            self._cut(found.begin_lsn, found.durable_lsn)
        self.begin_lsn, self.flush_lsn = wal_recovery.find_end(self.segments, self.format, found)
        for file in self.segments.all():
            if file.start + self._size <= self.flush_lsn and file == self.segments.at(file.start):
                self.segments.complete(file)
        self._cut(self.begin_lsn, self.flush_lsn)
        self._mark(self.flush_lsn)
        self._resume()

    def close(self) -> None:
        """Write the buffer, as far as there is space, and record the exact end. Raises `OSError`."""
        if self.flush_lsn and not self.failed:
            with contextlib.suppress(DiskFullError):
                self.flush()
            self._mark(self.flush_lsn, exact=True)
        self._close_file()

    def _mark(self, lsn: Lsn, *, cutting: bool = False, exact: bool = False) -> None:
        position_file.save(self._disk, StoragePosition(self.begin_lsn, lsn, cutting, exact))

    def _resume(self) -> None:
        """Prepare for writing behind `flush_lsn`."""
        self._close_file()
        self._base = self.flush_lsn - self.flush_lsn % BLOCK_BYTES
        self._fill = self.flush_lsn - self._base
        start = segment_start(self.flush_lsn, self._size)
        file = self.segments.at(start)
        before = file or self.segments.at(start - self._size)
        self.timeline = before.timeline if before else 0
        if file is not None and self._fill:
            tail = self._disk.read(file.name, self._base - start, self._fill)
            self._buffer[: self._fill] = tail
        self._sum = 0
        for at in range(start, self.flush_lsn if file else start, PIECE_BYTES):
            piece = self.read(at, min(PIECE_BYTES, self.flush_lsn - at))
            self._sum = google_crc32c.extend(self._sum, piece)
        self._headless = not self._record_known()

    @property
    def has_records(self) -> bool:
        """Whether it holds the beginning of a record, rather than only the rest of one."""
        return not self._headless

    def _record_known(self) -> bool:
        """Whether a scan could begin at a record below `flush_lsn`."""
        if self.flush_lsn <= self.begin_lsn + header_size(self.begin_lsn, self._size):
            return False
        oldest, end = self.begin_lsn, self.flush_lsn - 1
        return record_start_before(self.pages(), end, self.format, oldest=oldest) is not None

    # -- writing ------------------------------------------------------------------------------------

    @property
    def write_lsn(self) -> Lsn:
        """The position of the next byte."""
        return self._base + self._fill

    def buffer(self, timeline: int) -> memoryview:
        """A buffer for the bytes from `write_lsn` on, of this timeline; then call `advance`. Never empty.

        Raises `DiskFullError`, `UnavailableError`, `OSError` when buffered WAL has to be written first.
        """
        if timeline != self.timeline or self._fill == _BUFFER_BYTES:
            self.flush()
            self._switch(timeline)
        return self._buffer[self._fill :]

    def advance(self, length: int) -> None:
        """So many bytes were put into `buffer`."""
        self._fill += length
        assert self._fill <= _BUFFER_BYTES

    def write(self, lsn: Lsn, data: bytes | memoryview, timeline: int) -> None:
        """Write WAL bytes; they are durable after the next `flush`.

        Raises as `buffer`, in which case some, counted by `write_lsn`, may have been taken.
        """
        assert lsn == self.write_lsn >= self.begin_lsn > 0, "WAL is written where it ends"
        taken = 0
        while taken < len(data):
            space = self.buffer(timeline)
            length = min(len(space), len(data) - taken)
            space[:length] = data[taken : taken + length]
            self._fill += length
            taken += length

    def drop_unflushed(self) -> None:
        """Drop written WAL that is not durable."""
        self._fill = self.flush_lsn - self._base

    def flush(self) -> Lsn:
        """Make all written WAL durable; returns the durable end, which may be acknowledged.

        Raises `DiskFullError` (nothing is lost: call it again once there is space), `UnavailableError` after an earlier failure,
        and `OSError`.
        """
        if self.failed:
            raise UnavailableError(
                f"could not write WAL: {self.failed}",
                where=str(self._disk),
                repair="check the disk, and restart the safekeeper",
            )
        if self.flush_lsn == self._base + self._fill:
            return self.flush_lsn
        try:
            try:
                while self.flush_lsn < self._base + self._fill:
                    self._write_piece()
            finally:
                self._sync_names()
            if self._headless:
                self._mark(self.flush_lsn)
                self._headless = not self._record_known()
        except OSError as error:
            self.failed = str(error)
            raise
        return self.flush_lsn

    def _write_piece(self) -> None:
        """Write the buffered bytes of one segment."""
        start = segment_start(self._base, self._size)
        if self._current is None or self._current.start != start:
            self._enter(start)
        assert self._file is not None
        assert self._current is not None
        length = min(self._fill, start + self._size - self._base)
        top = -(-length // BLOCK_BYTES) * BLOCK_BYTES
        if top > length:
            self._buffer[length:top] = bytes(top - length)
        self._file.write(self._buffer[:top], self._base - start)
        new = self._buffer[self.flush_lsn - self._base : length]
        self._sum = google_crc32c.extend(self._sum, bytes(new))
        self.flush_lsn = self._base + length
        whole = length - length % BLOCK_BYTES
        if whole:
            rest = self._fill - whole
            self._buffer[:rest] = self._buffer[whole : self._fill]
            self._base += whole
            self._fill = rest
        if self.flush_lsn == start + self._size:
            self._close_file(complete=True)

    def _sync_names(self) -> None:
        """Sync the complete name of a segment at whose end `flush_lsn` is (otherwise the next one's sync does)."""
        if self.flush_lsn % self._size == 0:
            self._disk.sync()

    def _enter(self, start: Lsn) -> None:
        """Make the segment that starts there the current one."""
        self._close_file()
        file = self.segments.at(start)
        if file is None:
            file = self.segments.adopt(self.segments.take_spare(), self.timeline, start)
        self._file = self._disk.open(file.name, durable=True)
        self._current = file

    def _close_file(self, *, complete: bool = False) -> None:
        if self._file is not None:
            self._file.close()
        if complete and self._current is not None:
            self.sums.add(self.segments.complete(self._current).name, self._sum)
            self._sum = 0
        self._file = self._current = None

    def _switch(self, timeline: int) -> None:
        """Continue on another timeline: its segment starts with a copy of the current one's bytes."""
        if timeline == self.timeline:
            return
        start = segment_start(self.flush_lsn, self._size)
        file = self.segments.at(start)
        if file is not None and file.timeline != timeline:
            self._close_file()
            copy = self.segments.take_for_copy()
            try:
                self._copy(file, copy, self.flush_lsn - start)
                self.segments.adopt(copy, timeline, start)
                for other in self.segments.all():
                    if other.start == start and other.timeline > timeline:
                        self.segments.remove(other)
                self._disk.sync()
            except OSError as error:
                self.failed = str(error)
                raise
        self.timeline = timeline

    def _copy(self, file: SegmentFile, to: str, length: int) -> None:
        target = self._disk.open(to, durable=False)
        try:
            for at in range(0, length, PIECE_BYTES):
                piece = self._disk.read(file.name, at, min(PIECE_BYTES, length - at))
                target.write(piece, at)
            target.sync()
        finally:
            target.close()

    def prepare(self) -> bool:
        """Do a small part (at most 1 MiB) of creating the next segment ahead of time; returns whether nothing is left to do.

        Called when the driver is idle. A full disk is reported in `segments.full`; writes fail when they need the segment.
        """
        if not self.flush_lsn or self.flush_lsn % self._size < self._size // 2:
            return True
        try:
            return self.segments.prepare()
        except DiskFullError:
            return True

    # -- truncation and removal ---------------------------------------------------------------------

    def truncate(self, lsn: Lsn) -> None:
        """Drop the WAL from `lsn` on, on every timeline, so that no scan finds it again. Raises `OSError`."""
        assert self.begin_lsn <= lsn <= self.write_lsn
        self._mark(lsn, cutting=True)
        self._cut(self.begin_lsn, lsn)
        self.flush_lsn = lsn
        self._mark(lsn)
        self._resume()

    def reset(self, lsn: Lsn) -> None:
        """Drop all WAL, and begin at `lsn`, the start of a segment. Raises `OSError`."""
        assert lsn % self._size == 0 < lsn
        self.begin_lsn = self.flush_lsn = lsn
        self._mark(lsn, cutting=True)
        self.segments.drop_spares()
        self._cut(lsn, lsn)
        self._mark(lsn)
        self._resume()

    def _cut(self, begin: Lsn, lsn: Lsn) -> None:
        """Remove everything below `begin`, and at or behind `lsn`."""
        self._close_file()
        files = self.segments.all()
        whole = {f.name for f in files if f.complete and f.start + self._size <= lsn}
        self.sums.keep(whole)
        for file in reversed(self.segments.all()):
            if file.start >= lsn or file.start + self._size <= begin:
                self.segments.remove(file)
            elif file.start + self._size > lsn:
                self.segments.wipe(self.segments.reopen(file), lsn)
        self._disk.sync()

    def remove_below(self, horizon: Lsn) -> int:
        """Remove, or recycle, segments entirely below the record at `horizon`; returns how many. Raises `OSError`.

        The caller passes the minimum of everything that still needs WAL (`horizon.horizon`).
        """
        keep = segment_start(self.align(min(horizon, self.flush_lsn)), self._size)
        old = [file for file in self.segments.all() if file.start < keep]
        if old:
            # The recorded position must not be in removed WAL; what a crash leaves over is removed at the next start.
            self.begin_lsn = max(self.begin_lsn, keep)
            self._mark(self.flush_lsn)
            for file in old:
                self.segments.remove(file, recycle=file.complete)
            self._disk.sync()
        return len(old)

    def join(self, received: str, timeline: int, crc: int) -> None:
        """Let the WAL begin a segment earlier, with a completely durable file; `crc` is its checksum. Raises `OSError`.

        Its name is durable before the beginning is lowered: a crash in between leaves a file below the beginning, which the next
        start removes.
        """
        begin = self.begin_lsn - self._size
        file = self.segments.join(received, timeline, begin)
        self.begin_lsn = begin
        self._mark(self.flush_lsn)
        self.sums.add(file.name, crc)

    # -- reading ------------------------------------------------------------------------------------

    def read(self, lsn: Lsn, length: int) -> bytes:
        """Durable WAL bytes from `lsn` on, of one segment, at most `length`; empty at `flush_lsn`.

        Raises `TrimmedError` below `begin_lsn`.
        """
        if lsn >= self.flush_lsn:
            return b""
        start = segment_start(lsn, self._size)
        file = self.segments.at(start)
        if lsn < self.begin_lsn or file is None:
            raise TrimmedError(
                f"WAL at {format_lsn(lsn)} has been removed; the oldest is at {format_lsn(self.begin_lsn)}",
                where=str(self._disk),
            )
        stop = min(lsn + length, self.flush_lsn, start + self._size)
        return self._disk.read(file.name, lsn - start, stop - lsn)

    def pages(self) -> Callable[[Lsn], bytes]:
        """The durable WAL page by page, for `wal_record`."""
        return lambda lsn: self.read(lsn, PAGE_BYTES)

    def align(self, lsn: Lsn) -> Lsn:
        """The end of the last complete record at or below `lsn` and `flush_lsn`. Raises `CorruptError`."""
        return aligned(self.pages(), min(lsn, self.flush_lsn), self.format, oldest=self.begin_lsn)

    # -- timeline histories -------------------------------------------------------------------------

    def save_history(self, timeline: int, content: bytes) -> None:
        """Write a timeline's history file, durably, unless the existing one reaches further back. Raises `OSError`."""
        held = self.history(timeline)
        if held is None or not (held == content or says_more(held, content)):
            record_file.replace(self._disk, history_name(timeline), content)

    def history(self, timeline: int) -> bytes | None:
        """The contents of a timeline's history file, if it exists."""
        name = history_name(timeline)
        if name not in self._disk.names():
            return None
        return self._disk.read(name, 0, self._disk.size(name))
