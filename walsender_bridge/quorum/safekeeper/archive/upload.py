"""Upload of complete, committed segments and timeline histories to an archive, any URL that fsspec supports.

Each file is in the archive once, under PostgreSQL's own name, so a `restore_command` is a plain copy. It is written
under a temporary name of this uploader and renamed, read back and compared by length and CRC-32C, and only then counted.
A file that already exists is compared instead of written: the other safekeepers archive the same bytes, and so did
this one before a crash. A file with other content is never overwritten; it is another cluster's, or a lost history, and
an operator has to act. Only a timeline's history that lacks the earliest timelines is replaced by one that has them.

Only complete segments that end at or below `commit_lsn` are uploaded: uncommitted WAL may still be truncated.
`archived_lsn` holds back the removal horizon (`horizon.horizon`); it is recorded in a file of its own, which may be
lost: then the archive itself is checked.

`archived_lsn` retains at most `max_slot_wal_keep_size` of WAL. For WAL that was removed while the archive was down,
the archive is checked, since another safekeeper may have put it there; ranges that it lacks are recorded
(`archived_file.Archived.missing`) and checked again until they are there, so no gap goes unreported.

Invariant: all WAL that counts as archived is in one archive. Before anything is written, the archive must have the
recorded mark (`mark.py`), or the newest segment that counts. So an unmounted disk is never used as the archive.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import fsspec
import google_crc32c
from fsspec.implementations.local import LocalFileSystem

from walsender_bridge.errors import CorruptError, DivergedError, UnavailableError
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition, format_lsn
from walsender_bridge.postgres.protocol.replication import ServerTimelines, parse_history
from walsender_bridge.postgres.protocol.wal_page import (
    history_name,
    parse_segment_name,
    segment_name,
)
from walsender_bridge.quorum.protocol.timelines import says_more
from walsender_bridge.quorum.safekeeper.archive import archived_file
from walsender_bridge.quorum.safekeeper.archive import mark as archive_mark
from walsender_bridge.quorum.safekeeper.archive.archived_file import Archived
from walsender_bridge.quorum.safekeeper.storage import checksums as segment_sums
from walsender_bridge.quorum.safekeeper.storage.segments import PARTIAL, PIECE_BYTES
from walsender_bridge.runtime.folder import Disk

#: A history has a line for each failover of the cluster.
_LARGEST_HISTORY = 1 << 20


class Archive:
    """See the module. `archived_lsn`: up to here every segment is in the archive.

    `url`: a folder, such as `s3://bucket/wal` or `file:///mnt/archive`. `node`: the uploader, a part of the names of
    unfinished files. `began_lsn`: there never was any WAL below it. `options` go to fsspec. `wal` is the folder of the
    segments, which is only read: complete and committed WAL does not change, so this may run in a process of its own.
    `disk` keeps the record of what is archived.
    """

    def __init__(
        self,
        disk: Disk,
        wal: Disk,
        segment_bytes: int,
        url: str,
        *,
        node: str,
        began_lsn: Lsn = 0,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._disk = disk
        self._wal = wal
        self._segment_bytes = segment_bytes
        self._url = url
        self._node = node
        self._files, self._folder = fsspec.core.url_to_fs(url, **(options or {}))
        self._archived = archived_file.load(disk, url, mine=True)
        if not self._archived.mark and 0 < self._archived.lsn == began_lsn:
            # Earlier versions also recorded where archiving began.
            self._archived = replace(self._archived, mark=archive_mark.NOTHING)

    @property
    def archived_lsn(self) -> Lsn:
        """See the module."""
        return self._archived.lsn

    @property
    def missing(self) -> tuple[tuple[Lsn, Lsn], ...]:
        """[begin, end) of WAL below `archived_lsn` that is not in the archive."""
        return self._archived.missing

    def step(self, commit_lsn: Lsn) -> bool:
        """Archive the next segment and, before it, its timeline's history; returns whether there was one.

        `commit_lsn`: of the quorum. Raises `UnavailableError` (the archive cannot be reached or written: retry),
        `DivergedError` (it has other content under that name), and `CorruptError` (the local file is damaged).
        """
        self._close_gap()
        found = self._next(commit_lsn)
        if found is None:
            return False
        timeline, start = found
        name = segment_name(timeline, start, self._segment_bytes)
        mark = self._marked()
        try:
            histories = {history_name(each) for each in range(2, timeline + 1)}
            for each in [*sorted(histories & self._wal.names()), name]:
                self._put(each)
        except OSError as error:
            raise UnavailableError(
                f"could not archive the segment at {format_lsn(start)}: {error}",
                where=self._url,
                repair="check that the archive is reachable and has free space; old WAL is kept until then, up to "
                "max_slot_wal_keep_size",
            ) from error
        self._remember(replace(self._archived, lsn=start + self._segment_bytes, mark=mark))
        return True

    def _marked(self) -> str:
        """The id of the archive, verified to be the one that has the archived WAL; a new one is created, and marked.

        Raises `UnavailableError` for another one, such as the mount point of an unmounted disk.
        """
        try:
            found = archive_mark.read(self._files, self._folder)
            known = self._archived.mark
            if found and found == known:
                return found
            if self.archived_lsn and known != archive_mark.NOTHING and not self._has_newest():
                raise UnavailableError(
                    f"this is not the archive that has the WAL up to {format_lsn(self.archived_lsn)}: it has neither its"
                    f" mark ({archive_mark.NAME}) nor the last segment",
                    where=self._url,
                    repair="mount its disk, or correct [safekeepers] archive; if its files were removed on purpose,"
                    f" remove {self._disk}/{archived_file.NAME}: archiving then begins with the oldest WAL here",
                )
            if not found:
                self._files.makedirs(self._folder, exist_ok=True)
                found = archive_mark.make(self._files, self._folder)
        except OSError as error:
            raise self._out_of_reach(error) from error
        return found

    def _has_newest(self) -> bool:
        """Whether the last archived segment is there; for an earlier version's archive any file suffices."""
        if not self._archived.mark:
            with contextlib.suppress(FileNotFoundError):
                return bool(self._files.ls(self._folder, detail=False))
            return False
        last = self.archived_lsn - self._segment_bytes
        timeline = _timeline_at(self.archived_lsn - 1, self._history())
        name = segment_name(timeline, last, self._segment_bytes)
        return bool(self._files.exists(f"{self._folder}/{name}"))

    def _out_of_reach(self, error: OSError) -> UnavailableError:
        return UnavailableError(
            f"could not read the archive: {error}",
            where=self._url,
            repair="check that the archive is reachable",
        )

    def _close_gap(self) -> None:
        """Check the archive for WAL that is no longer here and was not archived from here.

        The gap ends at the oldest segment that is here at the first poll, complete or not.
        """
        names = {name.removesuffix(PARTIAL) for name in self._wal.names()}
        starts = [place.lsn for each in names if (place := self._place(each))]
        oldest = min((at for at in starts if at >= self.archived_lsn), default=0)
        if not self.archived_lsn and oldest:
            self._remember(Archived(oldest, mark=archive_mark.NOTHING))
        if self.archived_lsn < oldest:
            self._marked()
            gap = self._absent([(self.archived_lsn, oldest)])
            self._remember(replace(self._archived, lsn=oldest, missing=(*self.missing, *gap)))

    def rescan(self) -> None:
        """Verify the archive, and check it again for missing WAL. Raises `UnavailableError`."""
        if self.archived_lsn:
            self._marked()
        missing = self._absent(self.missing)
        if missing != self.missing:
            self._remember(replace(self._archived, missing=missing))

    def _remember(self, archived: Archived) -> None:
        archived_file.save(self._disk, self._url, archived)
        self._archived = archived

    def _absent(self, ranges: Iterable[tuple[Lsn, Lsn]]) -> tuple[tuple[Lsn, Lsn], ...]:
        """The segments in these ranges that are not in the archive. Raises `UnavailableError`."""
        size = self._segment_bytes
        starts = [at for begin, end in ranges for at in range(begin, end, size)]
        if not starts:
            return ()
        history = self._history()
        try:
            self._files.invalidate_cache()
            there = {path.rsplit("/", 1)[-1] for path in self._files.ls(self._folder, detail=False)}
        except OSError as error:
            raise self._out_of_reach(error) from error
        found: list[tuple[Lsn, Lsn]] = []
        for at in starts:
            if segment_name(_timeline_at(at + size - 1, history), at, size) in there:
                continue
            if found and found[-1][1] == at:
                found[-1] = found[-1][0], at + size
            else:
                found.append((at, at + size))
        return tuple(found)

    def _history(self) -> ServerTimelines:
        """The history of the newest timeline here."""
        names = self._wal.names()
        newest = max((place.timeline for each in names if (place := self._place(each))), default=1)
        name = history_name(newest)
        text = self._wal.read(name, 0, _LARGEST_HISTORY) if name in names else b""
        return parse_history(newest, text.decode(errors="replace"))

    def _place(self, name: str) -> WalPosition | None:
        return parse_segment_name(name, self._segment_bytes)

    def _next(self, commit_lsn: Lsn) -> WalPosition | None:
        """The start of the oldest segment that is complete, committed, and not archived; the newest timeline's, if two have it."""
        complete = [self._place(name) for name in self._wal.names()]
        waiting = [place for place in complete if place and place.lsn >= self.archived_lsn]
        start = min((place.lsn for place in waiting), default=commit_lsn)
        if start + self._segment_bytes > commit_lsn:
            return None
        return max(place for place in waiting if place.lsn == start)

    def _pieces(self, name: str) -> Iterator[bytes]:
        at = 0
        while piece := self._wal.read(name, at, PIECE_BYTES):
            yield piece
            at += len(piece)

    def _put(self, name: str) -> None:
        """Write the file to the archive, or verify that it is there."""
        expected = _summary(self._pieces(name))
        received = segment_sums.read(self._wal).get(name, expected[1])
        if received != expected[1]:
            self._check_held(name)
            raise CorruptError(
                f"the segment is damaged: its CRC is {expected[1]:08X}, but was {received:08X} when it was received",
                where=f"{self._wal}/{name}",
                repair="rejoin the safekeeper as a new member, and check its disk",
            )
        target = f"{self._folder}/{name}"
        if not self._files.exists(target) or self._knows_less(name, target):
            unfinished = f"{target}.{self._node}.tmp"
            try:
                with self._files.open(unfinished, "wb") as upload:
                    for piece in self._pieces(name):
                        upload.write(piece)
            except OSError:
                # It takes space there, and another safekeeper may archive the segment first.
                with contextlib.suppress(OSError):
                    self._files.rm_file(unfinished)
                raise
            self._check_held(name)
            self._files.mv(unfinished, target)
        if isinstance(self._files, LocalFileSystem):
            # Local WAL is removed afterwards, so the file must be on the archive's disk, and not in a cache.
            for path in (target, self._folder):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        with self._files.open(target, "rb") as stored:
            found = _summary(iter(lambda: stored.read(PIECE_BYTES), b""))
        if found != expected and not self._knows_more(name, target):
            self._check_held(name)
            raise DivergedError(
                f"the archive's {name} has other content: {found[0]} bytes, CRC {found[1]:08X},"
                f" instead of {expected[0]}, {expected[1]:08X}",
                where=self._url,
                repair="find out what wrote it; give each cluster its own archive, and move the wrong file away",
            )

    def _knows_less(self, name: str, target: str) -> bool:
        """Whether the archive's history of a timeline does not reach as far back as the local one."""
        return _is_history(name) and says_more(self._text(name), self._stored(target))

    def _knows_more(self, name: str, target: str) -> bool:
        """Whether the archive's history of a timeline reaches further back than the local one."""
        return _is_history(name) and says_more(self._stored(target), self._text(name))

    def _text(self, name: str) -> bytes:
        return self._wal.read(name, 0, _LARGEST_HISTORY)

    def _stored(self, target: str) -> bytes:
        with self._files.open(target, "rb") as stored:
            return bytes(stored.read(_LARGEST_HISTORY))

    def _check_held(self, name: str) -> None:
        """Verify that the file that was read still has its name: the hot loop renames a file before it overwrites it."""
        if name not in self._wal.names():
            raise FileNotFoundError(f"{name} was removed while it was read")


def _is_history(name: str) -> bool:
    return name.endswith(".history")


def _timeline_at(lsn: Lsn, history: ServerTimelines) -> int:
    return next((left.timeline for left in history.ancestors if lsn < left.lsn), history.timeline)


def _summary(pieces: Iterator[bytes]) -> tuple[int, int]:
    """Length and CRC-32C."""
    length, crc = 0, 0
    for piece in pieces:
        length += len(piece)
        crc = google_crc32c.extend(crc, piece)
    return length, crc
