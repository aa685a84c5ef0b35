"""Upload of complete, committed segments and timeline histories to an archive, any URL that fsspec knows.

Each file is in the archive once, under PostgreSQL's own name, so a `restore_command` is a plain copy. It is written
under a name of this uploader's own and moved, read back and compared by length and CRC-32C, and only then counted.
A file that is there already is compared instead of written: the other safekeepers archive the same bytes, and so did
this one before a crash. Another content under that name is never overwritten; it is another cluster's, or a lost
history, and somebody has to look.

Only whole segments that end at or below `commit_lsn` are taken: what is not committed may still be cut off.
`archived_lsn` holds the removal horizon (`horizon.horizon`); it is remembered in a file of its own, which may be
lost: then the archive itself says what it has.
"""

import os
from collections.abc import Iterator
from typing import Any

import fsspec
import google_crc32c
from fsspec.implementations.local import LocalFileSystem

from walsender_bridge.errors import CorruptError, DivergedError, UnavailableError
from walsender_bridge.safekeeper import archived_file, segment_sums
from walsender_bridge.safekeeper.disk import Disk
from walsender_bridge.safekeeper.segments import PIECE_BYTES
from walsender_bridge.wire.lsn import format_lsn
from walsender_bridge.wire.wal_page import history_name, parse_segment_name, segment_name


class Archive:
    """See the module. `archived_lsn`: up to here every segment is in the archive.

    `url`: a folder, such as `s3://bucket/wal` or `file:///mnt/archive`. `node`: who uploads, a part of the names
    of unfinished files. `options` go to fsspec. `wal` is the folder of the segments, which is only read: what is
    complete and committed does not change, so this may run in a process of its own. `disk` keeps what was archived.
    """

    def __init__(
        self,
        disk: Disk,
        wal: Disk,
        segment_bytes: int,
        url: str,
        *,
        node: str,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._disk = disk
        self._wal = wal
        self._segment_bytes = segment_bytes
        self._url = url
        self._node = node
        self._files, self._folder = fsspec.core.url_to_fs(url, **(options or {}))
        self.archived_lsn = archived_file.load(disk, url, mine=True)

    def step(self, commit_lsn: int) -> bool:
        """Archive the next segment and, before it, its timeline's history; whether there was one.

        `commit_lsn`: of the quorum. Raises `UnavailableError` (the archive cannot be reached or written: try again)
        `DivergedError` (it holds something else under that name), and `CorruptError` (what is here is damaged).
        """
        found = self._next(commit_lsn)
        if found is None:
            return False
        timeline, start = found
        name = segment_name(timeline, start, self._segment_bytes)
        try:
            self._files.makedirs(self._folder, exist_ok=True)
            histories = {history_name(each) for each in range(2, timeline + 1)}
            for each in [*sorted(histories & self._wal.names()), name]:
                self._put(each)
        except OSError as error:
            raise UnavailableError(
                f"the segment at {format_lsn(start)} cannot be archived: {error}",
                where=self._url,
                repair="see that the archive can be reached and has room; old WAL is kept until then",
            ) from error
        self.archived_lsn = start + self._segment_bytes
        archived_file.save(self._disk, self._url, self.archived_lsn)
        return True

    def _next(self, commit_lsn: int) -> tuple[int, int] | None:
        """Timeline and start of the oldest segment that is complete, committed, and not archived."""
        complete = [parse_segment_name(name, self._segment_bytes) for name in self._wal.names()]
        waiting = [place for place in complete if place and place[1] >= self.archived_lsn]
        start = min((start for _, start in waiting), default=commit_lsn)
        if start + self._segment_bytes > commit_lsn:
            return None
        return max(timeline for timeline, first in waiting if first == start), start

    def _pieces(self, name: str) -> Iterator[bytes]:
        at = 0
        while piece := self._wal.read(name, at, PIECE_BYTES):
            yield piece
            at += len(piece)

    def _put(self, name: str) -> None:
        """Have this file in the archive, whichever way."""
        expected = _summary(self._pieces(name))
        received = segment_sums.read(self._wal).get(name, expected[1])
        if received != expected[1]:
            raise CorruptError(
                f"the segment is damaged: its CRC is {expected[1]:08X}, and {received:08X} when it was received",
                where=f"{self._wal}/{name}",
                repair="let the safekeeper join as a new member; see what happened to its disk",
            )
        target = f"{self._folder}/{name}"
        if not self._files.exists(target):
            unfinished = f"{target}.{self._node}.tmp"
            with self._files.open(unfinished, "wb") as upload:
                for piece in self._pieces(name):
                    upload.write(piece)
            self._files.mv(unfinished, target)
        if isinstance(self._files, LocalFileSystem):
            # Old WAL is removed once it is here: it has to be on that disk, and not in a cache.
            for path in (target, self._folder):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        with self._files.open(target, "rb") as stored:
            found = _summary(iter(lambda: stored.read(PIECE_BYTES), b""))
        if found != expected:
            raise DivergedError(
                f"the archive's {name} is another file: {found[0]} bytes, CRC {found[1]:08X},"
                f" and not {expected[0]}, {expected[1]:08X}",
                where=self._url,
                repair="see whose it is; give every cluster an archive of its own, and move a wrong file away",
            )


def _summary(pieces: Iterator[bytes]) -> tuple[int, int]:
    """Length and CRC-32C."""
    length, crc = 0, 0
    for piece in pieces:
        length += len(piece)
        crc = google_crc32c.extend(crc, piece)
    return length, crc
