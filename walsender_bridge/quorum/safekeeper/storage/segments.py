"""The segment files of a safekeeper's WAL: which there are, new ones, old ones, and the room they take.

    000000010000000000000003            complete: every byte of it is durable
    000000010000000000000004.partial    the current one; zeros, or older WAL, behind what was written
    00000002.history                    a timeline's history, as the server gave it
    spare-1                             zeroed ahead of time, or recycled: a removed segment with its old WAL
    new-segment                         one that is being made; removed at the next start
    segment-copy                        the current one's copy for a new timeline; removed at the next start
    catch-up-segment                    older WAL that is being received (`backfill.py`); removed at the next start

A complete name is given only when all of the segment is durable. Where two timelines have a file of one segment,
the greater holds the WAL: it starts with a copy of the other's, up to where it branched off.

A recycled file holds old WAL of *other* LSNs, so every page header in it is wrong, and a record that was left in
the middle of a page names a predecessor elsewhere (`wire.wal_record`). A segment that was cut off holds WAL of the
*same* LSNs; those are the dangerous ones, so they are removed, never recycled.
"""

import errno
import re
from dataclasses import dataclass

from walsender_bridge.errors import CorruptError, DiskFullError
from walsender_bridge.postgres.protocol.wal_page import parse_segment_name, segment_name
from walsender_bridge.runtime.folder import Disk, File

PARTIAL = ".partial"
_SPARE = re.compile(r"spare-(\d+)")
_MAKING = "new-segment"
_COPYING = "segment-copy"
RECEIVING = "catch-up-segment"
#: Zeros are written in pieces of this size, one between two looks at the network.
PIECE_BYTES = 1 << 20
_ZEROS = bytes(PIECE_BYTES)
#: The errors of a full disk.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """How much room the WAL may take, in bytes.

    `wal_bytes`: of all segment files together (None: no limit). `free_bytes`: what is to stay free on the file
    system, so that the control file can still be written. `spares`: recycled segments that are kept.
    """

    wal_bytes: int | None = None
    free_bytes: int = 64 << 20
    spares: int = 2


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """One segment file: its timeline, its first LSN, and whether all of it is durable."""

    timeline: int
    start: int
    complete: bool
    segment_bytes: int

    @property
    def name(self) -> str:
        """Its file name."""
        name = segment_name(self.timeline, self.start, self.segment_bytes)
        return name if self.complete else name + PARTIAL


class Segments:
    """See the module. `full` says why no WAL that needs a new segment is taken now; empty: it is."""

    def __init__(self, disk: Disk, segment_bytes: int, limits: StorageLimits) -> None:
        self.disk = disk
        self.segment_bytes = segment_bytes
        self.limits = limits
        self.full = ""
        self._files: dict[tuple[int, int], SegmentFile] = {}
        self._spares: list[str] = []
        self._counter = 0
        self._making: File | None = None
        self._made = 0

    def load(self) -> None:
        """See what is there. Raises `CorruptError` for a segment of another size."""
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
                        f"it has {self.disk.size(name)} bytes, not {self.segment_bytes}",
                        where=f"{self.disk}/{name}",
                        repair="let the safekeeper join as a new member; see what happened to its disk",
                    )
                self._add(SegmentFile(*place, not name.endswith(PARTIAL), self.segment_bytes))

    def _add(self, file: SegmentFile) -> None:
        self._files[file.start, file.timeline] = file

    def at(self, start: int) -> SegmentFile | None:
        """The file that holds the WAL of the segment that starts there."""
        found = [file for (first, _), file in self._files.items() if first == start]
        return max(found, key=lambda file: file.timeline, default=None)

    @property
    def starts(self) -> list[int]:
        """Where the segments start that are here, in order."""
        return sorted({start for start, _ in self._files})

    def all(self) -> list[SegmentFile]:
        """Every file, older timelines' too, in the order of the WAL."""
        return [self._files[key] for key in sorted(self._files)]

    @property
    def used_bytes(self) -> int:
        """Bytes of all segment files, spares included."""
        return (len(self._files) + len(self._spares)) * self.segment_bytes

    # -- new ones -----------------------------------------------------------------------------------

    def _check_room(self) -> None:
        limit = self.limits.wal_bytes
        if limit is not None and self.used_bytes + self.segment_bytes > limit:
            raise self._no_room(f"the WAL has {self.used_bytes} bytes, and may have {limit}")
        free = self.disk.free_bytes()
        if free - self.segment_bytes < self.limits.free_bytes:
            raise self._no_room(
                f"{free} bytes are free, and {self.limits.free_bytes} are to stay so"
            )

    def _no_room(self, why: str) -> DiskFullError:
        self.full = why
        return DiskFullError(
            f"no more WAL is taken: {why}",
            where=str(self.disk),
            repair="make room, or raise the limit; see what holds old WAL: a lagging safekeeper, a slot, the archive",
        )

    def prepare(self) -> bool:
        """Make one piece of the next spare; whether there is one. Raises `DiskFullError`."""
        if self._spares:
            return True
        try:
            if self._making is None:
                self._check_room()
                self._making, self._made = self.disk.create(_MAKING), 0
            self._making.write(_ZEROS, self._made)
            self._made += PIECE_BYTES
            if self._made < self.segment_bytes:
                return False
            self._making.sync()
        except OSError as error:
            self._give_up_making()
            if error.errno in NO_ROOM:
                raise self._no_room("the file system is full") from error
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
        """Give back the room that a half made segment takes."""
        if self._making is not None:
            self._making.close()
            self._making = None
            self.disk.remove(_MAKING)

    def take_spare(self) -> str:
        """A file of the right size, which is the caller's to rename. Raises `DiskFullError`."""
        while not self.prepare():
            pass
        return self._spares.pop()

    def take_for_copy(self) -> str:
        """The same, to copy WAL of the current segment into, under a name that the next start removes.

        As a spare it could outlive a crash: WAL that is cut off later would lie in it, at the LSNs of a new segment.
        """
        self.disk.rename(self.take_spare(), _COPYING)
        self.disk.sync()
        return _COPYING

    def adopt(self, spare: str, timeline: int, start: int) -> SegmentFile:
        """Make a spare the current file of a segment, durably."""
        file = SegmentFile(timeline, start, complete=False, segment_bytes=self.segment_bytes)
        self.disk.rename(spare, file.name)
        self.disk.sync()
        self._add(file)
        return file

    def join(self, received: str, timeline: int, start: int) -> SegmentFile:
        """Make a file, which is durable whole, the complete segment that starts there, durably."""
        file = SegmentFile(timeline, start, complete=True, segment_bytes=self.segment_bytes)
        self.disk.rename(received, file.name)
        self.disk.sync()
        self._add(file)
        return file

    def complete(self, file: SegmentFile) -> SegmentFile:
        """All of it is durable: give it its complete name. The name is durable with the next sync."""
        return self._rename(file, complete=True)

    def reopen(self, file: SegmentFile) -> SegmentFile:
        """Make a complete segment a partial one again: it will be cut."""
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
        """Remove it, or keep it as a spare; only WAL that lies below the horizon may be kept so."""
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
        """Remove the spares: the WAL begins anew, perhaps below what a recycled one holds."""
        self._give_up_making()
        for name in self._spares:
            self.disk.remove(name)
        self._spares.clear()

    def wipe(self, file: SegmentFile, lsn: int) -> None:
        """Zero the file from `lsn` to its end, durably. What is zero already is not written."""
        opened = self.disk.open(file.name, durable=False)
        try:
            at = lsn - file.start
            while at < self.segment_bytes:
                length = min(PIECE_BYTES - at % PIECE_BYTES, self.segment_bytes - at)
                if any(self.disk.read(file.name, at, length)):
                    opened.write(_ZEROS[:length], at)
                at += length
            opened.sync()
        finally:
            opened.close()
