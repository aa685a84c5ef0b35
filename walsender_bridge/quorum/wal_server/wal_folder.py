"""A safekeeper's WAL folder, read while its hot loop writes it.

Files have PostgreSQL's own names; the segment that is being written has the suffix `.partial`, and a timeline
above 1 has its `.history` file. Nothing here writes.

Invariant: bytes are returned only if they were the WAL at that LSN when they were read. The hot loop may rename an old
segment and overwrite it with new WAL, and it zeroes WAL that no quorum ever had. So a chunk is valid only if its file
still has its name *after* it was read (a recycled one is renamed before it is overwritten), and if the caller finds the
positions still beyond the chunk (they are published before WAL is zeroed). The rest of a segment, behind the position,
may hold anything: old WAL or a tail without a quorum. It is never requested.

The segment of a switch point belongs to both timelines, and as in PostgreSQL the newer one's file begins with a copy of
the older one's bytes: it is preferred, since the older one may never have been complete.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from walsender_bridge.errors import CorruptError
from walsender_bridge.postgres.protocol.backend import SqlErrorReply
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, Lsn, WalPosition
from walsender_bridge.postgres.protocol.replication import ServerTimelines, parse_history
from walsender_bridge.postgres.protocol.wal_page import history_name, segment_name, segment_start

PARTIAL = ".partial"
#: The SQLSTATE of WAL that has been removed (`undefined_file`).
REMOVED = "58P01"
#: A history has a line for each failover of the cluster.
_LARGEST_HISTORY = 1 << 20


class WalFolder:
    """The folder at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Segments whose bytes differ from those received (`scrub`).
        self.damaged: set[str] = set()

    def history_text(self, timeline: int) -> bytes:
        """The `.history` file of a timeline. Raises `SqlErrorReply` 58P01 if there is none."""
        name = history_name(timeline)
        try:
            with (self.path / name).open("rb") as file:
                return file.read(_LARGEST_HISTORY)
        except FileNotFoundError:
            raise SqlErrorReply(
                "58P01", f'could not open file "pg_wal/{name}": No such file or directory'
            ) from None

    def history(self, timeline: int) -> ServerTimelines:
        """The history of the safekeeper's own timeline. Raises `CorruptError` if its file is missing or damaged."""
        if timeline == 1:
            return ServerTimelines(1)
        try:
            return parse_history(timeline, self.history_text(timeline).decode(errors="replace"))
        except SqlErrorReply:
            raise CorruptError(
                f"the history of timeline {timeline} is missing",
                where=str(self.path / history_name(timeline)),
                repair="copy it from another safekeeper, or from the primary's pg_wal",
            ) from None

    def holds(self, lsn: Lsn, segment_bytes: int, history: ServerTimelines) -> bool:
        """Whether the segment that a reader at `lsn`, of written WAL, would get exists."""
        # Twice: a segment may lose its suffix between two checks.
        return any(
            (self.path / (name + suffix)).exists()
            for _ in range(2)
            for name, _ in _names(lsn, segment_bytes, history)
            for suffix in ("", PARTIAL)
        )


class WalCursor:
    """Reads WAL of one folder for one reader; keeps the segment open that it reads."""

    def __init__(self, folder: WalFolder, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._descriptor = -1
        self._file = 0  # the inode of the open file
        self._paths: list[Path] = []
        self._key: tuple[int, ServerTimelines] | None = None
        self._until = 0  # the end of the WAL that may be read from it

    def read_into(
        self, buffer: memoryview, lsn: Lsn, size: int, timeline: int, history: ServerTimelines
    ) -> int:
        """Read up to `size` bytes of `timeline`'s WAL at `lsn`; returns how many. A chunk ends with its segment.

        `timeline` is in `history`. Raises `SqlErrorReply` 58P01 when the WAL has been removed.
        """
        key = (lsn // self._segment_bytes, history)
        damaged = bool(self._paths) and self._paths[0].name in self._folder.damaged
        if damaged or self._key != key or lsn >= self._until:
            self._open(lsn, timeline, history)
            self._key = key
        offset = lsn % self._segment_bytes
        size = min(size, self._until - lsn)
        got = os.preadv(self._descriptor, [buffer[:size]], offset)
        if not got or not self._still_there():
            raise self._removed(lsn, timeline)
        return got

    def close(self) -> None:
        """Close the segment."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._key = None

    def _open(self, lsn: Lsn, timeline: int, history: ServerTimelines) -> None:
        self.close()
        # Twice: a segment may become complete, and lose its suffix, between two checks.
        for _ in range(2):
            for name, until in _names(lsn, self._segment_bytes, history):
                if name in self._folder.damaged:
                    raise CorruptError(
                        f"WAL segment {name} is damaged", where=str(self._folder.path / name)
                    )
                paths = [self._folder.path / (name + suffix) for suffix in ("", PARTIAL)]
                for path in paths:
                    try:
                        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    except FileNotFoundError:
                        continue
                    self._file = os.fstat(self._descriptor).st_ino
                    self._paths, self._until = paths, until
                    return
        raise self._removed(lsn, timeline)

    def _still_there(self) -> bool:
        # The name with the suffix first: a segment that becomes complete between the two checks has the other one by then.
        for path in reversed(self._paths):
            try:
                if path.stat().st_ino == self._file:
                    return True
            except FileNotFoundError:
                continue
        return False

    def _removed(self, lsn: Lsn, timeline: int) -> SqlErrorReply:
        name = segment_name(timeline, lsn, self._segment_bytes)
        return SqlErrorReply(REMOVED, f"requested WAL segment {name} has already been removed")


def _names(lsn: Lsn, size: int, history: ServerTimelines) -> Iterator[tuple[str, Lsn]]:
    """The files that may hold the byte at `lsn`, the preferred one first, and the end up to which each may be read."""
    end = segment_start(lsn, size) + size
    began = 0
    found: list[tuple[str, Lsn]] = []
    for timeline, left in (*history.ancestors, WalPosition(history.timeline, MAX_LSN)):
        # A timeline that began behind this segment has no file for it, and one that was left before the
        # byte was written has other bytes there.
        if began < end and lsn < left:
            found.append((segment_name(timeline, lsn, size), min(end, left)))
        began = left
    yield from reversed(found)
