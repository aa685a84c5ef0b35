"""The segment files of a safekeeper's WAL: listing, creation, removal, and disk space.

    000000010000000000000003            complete: every byte of it is durable
    000000010000000000000004.partial    the current one; zeros, or older WAL, behind what was written
    00000002.history                    a timeline's history, as the server gave it
    spare-1                             zeroed ahead of time, or recycled: a removed segment with its old WAL
    new-segment                         one that is being created; removed at the next start
    segment-copy                        the current one's copy for a new timeline; removed at the next start
    catch-up-segment                    older WAL that is being received (`backfill.py`); removed at the next start

A complete name is given only when all of the segment is durable. If two timelines have a file of one segment, the
greater one's holds the WAL: it starts with a copy of the other's, up to the switch point.

A recycled file holds old WAL of *other* LSNs, so every page header in it is wrong, and a record in the middle of a page
names a predecessor elsewhere (`wal_record`). A truncated segment holds WAL of the *same* LSNs, which a scan could
mistake for valid, so it is removed, never recycled.
"""

import errno
import re
from dataclasses import dataclass

from walsender_bridge.errors import CorruptError, DiskFullError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.wal_page import parse_segment_name, segment_name
from walsender_bridge.runtime.folder import Disk, File

PARTIAL = ".partial"
_SPARE = re.compile(r"spare-(\d+)")
_MAKING = "new-segment"
_COPYING = "segment-copy"
RECEIVING = "catch-up-segment"
#: Zeros are written in pieces of this size, one between two polls of the network.
PIECE_BYTES = 1 << 20
_ZEROS = bytes(PIECE_BYTES)
#: The errors of a full disk.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Limits of the WAL's disk space, in bytes.

    `wal_bytes`: of all segment files together (None: no limit). `free_bytes`: kept free on the file system, so that the
    control file can still be written. `spares`: the number of recycled segments kept.
    """

    wal_bytes: int | None = None
    free_bytes: int = 64 << 20
    spares: int = 2


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """One segment file: its timeline, its first LSN, and whether all of it is durable."""

    timeline: int
    start: Lsn
    complete: bool
    segment_bytes: int

    @property
    def name(self) -> str:
        """Its file name."""
        name = segment_name(self.timeline, self.start, self.segment_bytes)
        return name if self.complete else name + PARTIAL


class Segments:
    """See the module. `full`: why no WAL that needs a new segment is accepted now; empty: it is."""

    def __init__(self, disk: Disk, segment_bytes: int, limits: StorageLimits) -> None:
        self.disk = disk
        self.segment_bytes = segment_bytes
        self.limits = limits
        self.full = ""
        self._files: dict[tuple[Lsn, int], SegmentFile] = {}
        self._spares: list[str] = []
        self._counter = 0
        self._making: File | None = None
        self._made = 0

    def load(self) -> None:
        """List the files. Raises `CorruptError` for a segment of another size."""
        self._files.clear()
        self._spares.clear()
        for name in sorted(self.disk.names()):
            if name in (_MAKING, _COPYING, RECEIVING):
                self.disk.remove(name)
            elif spare := _SPARE.fullmatch(name):
                self._counter = max(self._counter, int(spare[1]))
                if self.disk.size(name) == self.segment_bytes:
                    self._spares.append(name)
                else:
                    self.disk.remove(name)
            elif place := parse_segment_name(name.removesuffix(PARTIAL), self.segment_bytes):
                if self.disk.size(name) != self.segment_bytes:
                    raise CorruptError(
                        f"segment has {self.disk.size(name)} bytes, not {self.segment_bytes}",
                        where=f"{self.disk}/{name}",
                        repair="rejoin the safekeeper as a new member, and check its disk",
                    )
                self._add(SegmentFile(*place, not name.endswith(PARTIAL), self.segment_bytes))

    def _add(self, file: SegmentFile) -> None:
        self._files[file.start, file.timeline] = file

    def at(self, start: Lsn) -> SegmentFile | None:
        """The file that holds the WAL of the segment that starts there."""
        found = [file for (first, _), file in self._files.items() if first == start]
        return max(found, key=lambda file: file.timeline, default=None)

    @property
    def starts(self) -> list[Lsn]:
        """The start LSNs of the segments, in order."""
        return sorted({start for start, _ in self._files})

    def all(self) -> list[SegmentFile]:
        """All files, including older timelines', in the order of the WAL."""
        return [self._files[key] for key in sorted(self._files)]

    @property
    def used_bytes(self) -> int:
        """Bytes of all segment files, spares included."""
        return (len(self._files) + len(self._spares)) * self.segment_bytes

    # -- new ones -----------------------------------------------------------------------------------

    def _check_space(self) -> None:
        limit = self.limits.wal_bytes
        if limit is not None and self.used_bytes + self.segment_bytes > limit:
            raise self._disk_full(f"it has {self.used_bytes} bytes, and its limit is {limit}")
        free = self.disk.free_bytes()
        if free - self.segment_bytes < self.limits.free_bytes:
            raise self._disk_full(
                f"{free} bytes are free, and {self.limits.free_bytes} must remain free"
            )

    def _disk_full(self, why: str) -> DiskFullError:
        self.full = why
        return DiskFullError(
            f"no space for more WAL: {why}",
            where=str(self.disk),
            repair="free disk space, or raise the limit; check what retains old WAL: a lagging safekeeper, a slot, the archive",
        )

    def prepare(self) -> bool:
        """Write one piece of the next spare; returns whether there is a complete one. Raises `DiskFullError`."""
        if self._spares:
            return True
        try:
            if self._making is None:
                self._check_space()
                self._making, self._made = self.disk.create(_MAKING), 0
            self._making.write(_ZEROS, self._made)
            self._made += PIECE_BYTES
            if self._made < self.segment_bytes:
                return False
            self._making.sync()
        except OSError as error:
            self._give_up_making()
            if error.errno in NO_ROOM:
                raise self._disk_full("the file system is full") from error
            raise
        self._making.close()
        self._making = None
        self._counter += 1
        name = f"spare-{self._counter}"
        self.disk.rename(_MAKING, name)
        self._spares.append(name)
        self.full = ""
        return True

    def _give_up_making(self) -> None:
        """Free the space of an unfinished segment."""
        if self._making is not None:
            self._making.close()
            self._making = None
            self.disk.remove(_MAKING)

    def take_spare(self) -> str:
        """A file of the right size, for the caller to rename. Raises `DiskFullError`."""
        while not self.prepare():
            pass
        return self._spares.pop()

    def take_for_copy(self) -> str:
        """As `take_spare`, to copy WAL of the current segment into, under a name that the next start removes.

        As a spare it could survive a crash: it would hold WAL that is truncated later, at the LSNs of a new segment.
        """
        self.disk.rename(self.take_spare(), _COPYING)
        self.disk.sync()
        return _COPYING

    def adopt(self, spare: str, timeline: int, start: Lsn) -> SegmentFile:
        """Make a spare the current file of a segment, durably."""
        return self._give_name(spare, timeline, start, complete=False)

    def join(self, received: str, timeline: int, start: Lsn) -> SegmentFile:
        """Make a completely durable file the complete segment that starts there, durably."""
        return self._give_name(received, timeline, start, complete=True)

    def _give_name(self, draft: str, timeline: int, start: Lsn, *, complete: bool) -> SegmentFile:
        file = SegmentFile(timeline, start, complete, self.segment_bytes)
        self.disk.rename(draft, file.name)
        self.disk.sync()
        self._add(file)
        return file

    def complete(self, file: SegmentFile) -> SegmentFile:
        """Give a completely durable segment its complete name, which is durable with the next sync."""
        return self._rename(file, complete=True)

    def reopen(self, file: SegmentFile) -> SegmentFile:
        """Make a complete segment a partial one again, to be truncated."""
        return self._rename(file, complete=False)

    def _rename(self, file: SegmentFile, *, complete: bool) -> SegmentFile:
        if file.complete == complete:
            return file
        renamed = SegmentFile(file.timeline, file.start, complete, self.segment_bytes)
        self.disk.rename(file.name, renamed.name)
        self._add(renamed)
        return renamed

    # -- old ones -----------------------------------------------------------------------------------

    def remove(self, file: SegmentFile, *, recycle: bool = False) -> None:
        """Remove it, or recycle it as a spare; only WAL below the horizon may be recycled."""
        del self._files[file.start, file.timeline]
        if recycle and len(self._spares) < self.limits.spares:
            self._counter += 1
            name = f"spare-{self._counter}"
            self.disk.rename(file.name, name)
            self._spares.append(name)
        else:
            self.disk.remove(file.name)
        self.full = ""

    def drop_spares(self) -> None:
        """Remove the spares: a full resync may restart the WAL below what a recycled one holds."""
        self._give_up_making()
        for name in self._spares:
            self.disk.remove(name)
        self._spares.clear()

    def wipe(self, file: SegmentFile, lsn: Lsn) -> None:
        """Zero the file from `lsn` to its end, durably. Zeros are not rewritten."""
        opened = self.disk.open(file.name, durable=False)
        try:
            at = lsn - file.start
            while at < self.segment_bytes:
                length = min(PIECE_BYTES - at % PIECE_BYTES, self.segment_bytes - at)
                piece = self.disk.read(file.name, at, length)
                if piece != _ZEROS[: len(piece)]:
                    opened.write(_ZEROS[:length], at)
                at += length
            opened.sync()
        finally:
            opened.close()
