"""The channel between the safekeeper's hot loop and its WAL server: one page of shared memory, one FIFO.

They are separate processes, so that a reader never makes a commit wait. The hot loop writes `Positions` at every change,
without a system call; the server writes `Readers`.

Invariant: whenever either process dies, the other one reads a complete record. Each record has two places, written in
turn, with a generation and a CRC32C over all of it: while one is being written the other is valid. A reader takes the
newest valid one, so nothing depends on the order in which a processor makes stores visible.

Waking: the server sets a flag when it has nothing left to send; the hot loop checks it after each record and writes one
byte into a FIFO. A wakeup may be lost to a race, so the server also polls every `POLL_SECONDS`. The flag spares the hot
loop a system call for each commit that no reader waits for.

The server's record holds back the removal of WAL, which survives the server with its slots, and VACUUM on the primary,
which does not: readers end with their server. The server's lock on the page, which ends with its process, shows whether
it runs.

The files may be removed while they are in use (`shared_files`). Both ends then continue with the page that they have,
which only they can reach. The hot loop makes another one (`PositionWriter.is_removed`) and writes its positions there
before it does anything else to its WAL; the server keeps to the old page until the new one has positions
(`PositionReader.is_replaced`). So a hot loop that began since is never read by what its predecessor said.

The files (`PATH` and `PATH.wake`) belong into memory (`/dev/shm`, `/run`): on a disk, a page that is being
written back makes the hot loop wait. What a file from an earlier life says is still true: a `flush_lsn` was
durable, a `commit_lsn` committed.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

import google_crc32c

from walsender_bridge.errors import CorruptError, DiskFullError
from walsender_bridge.postgres.protocol.replication import ServerTimelines
from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback
from walsender_bridge.quorum.protocol.positions import NO_FEEDBACK, Positions, Readers
from walsender_bridge.runtime import shared_files
from walsender_bridge.runtime.closing import Closing

#: Seconds after which the server polls the positions without a wakeup.
POLL_SECONDS: Final = 0.25

_SIZE = 4096
#: Attempts to read a page that is being written all the time; a record is written in microseconds.
_TRIES = 20
_MAGIC = b"tuskline pos 001"
_POSITIONS = struct.Struct("<QQQQIII")
_READERS = struct.Struct("<QQIIIIIB")
_CRC = struct.Struct("<I")
_POSITIONS_AT, _READERS_AT, _FLAG_AT = (128, 256), (512, 640), 1024


class _Page(Closing):
    """The shared page, created by the process that starts first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Open as long as the page is: the server's lock is on it, and the file may have no name any more.
        self._file = _open(path)
        try:
            self._map = _mapped(self._file, path)
            try:
                self._begin()
            except BaseException:
                self._map.close()
                raise
        except BaseException:
            os.close(self._file)
            raise
        self._generation = 0
        self._read: dict[tuple[int, int], tuple[int, ...]] = {}

    def _begin(self) -> None:
        path = self._path
        found = self._map[: len(_MAGIC)]
        if found.strip(b"\0") and found != _MAGIC:
            raise CorruptError(
                "not a page of a safekeeper's positions, or one of another version",
                where=str(path),
                repair="stop the safekeeper and its WAL server, remove the file, start them",
            )
        self._map[: len(_MAGIC)] = _MAGIC
        wake = path.with_name(path.name + ".wake")
        with contextlib.suppress(FileExistsError):
            os.mkfifo(wake, 0o600)
        # Both ends in each process: opening never waits, and writing never meets a closed pipe.
        self._pipe = os.open(wake, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._made = [(str(path), _identity(self._file)), (str(wake), _identity(self._pipe))]

    def _standing(self) -> list[bool | None]:
        """Of the page and its pipe: whether what is under its name is what is open here; None: nothing is there.

        What cannot be found out is taken to be as it was.
        """
        found: list[bool | None] = []
        for path, identity in self._made:
            try:
                its = os.stat(path)  # noqa: PTH116  # asked for at each look, and `Path.stat` takes twice as long
                found.append((its.st_dev, its.st_ino) == identity)
            except FileNotFoundError:
                found.append(None)
            except OSError:
                found.append(True)
        return found

    def read(self, places: tuple[int, int], kind: struct.Struct) -> tuple[int, ...] | None:
        """The newest valid record: its generation and fields; None if there never was one. It never goes back."""
        last = self._read.get(places)
        for _ in range(_TRIES):
            whole = (self._whole(place, kind) for place in places)
            best = max((each for each in whole if each is not None), default=None)
            if best is not None and (last is None or best[0] >= last[0]):
                self._read[places] = best
                return best
            # A fast writer may overwrite each place while it is read; then it is read again.
        return last

    def _whole(self, place: int, kind: struct.Struct) -> tuple[int, ...] | None:
        """The record at `place`, if there is a valid one."""
        raw = self._map[place : place + kind.size + _CRC.size]
        if google_crc32c.value(raw[: kind.size]) != _CRC.unpack_from(raw, kind.size)[0]:
            return None
        fields = kind.unpack_from(raw)
        return fields if fields[0] else None

    def write(self, places: tuple[int, int], kind: struct.Struct, *fields: int) -> None:
        """Write a record to the place that is not current."""
        if not self._generation:
            standing = self.read(places, kind)
            self._generation = standing[0] if standing else 0
        self._generation += 1
        raw = kind.pack(self._generation, *fields)
        place = places[self._generation % 2]
        self._map[place : place + kind.size + _CRC.size] = raw + _CRC.pack(google_crc32c.value(raw))

    def close(self) -> None:
        """Give the page back; it stands as it is."""
        if not self._map.closed:
            self._map.close()
            os.close(self._pipe)
            os.close(self._file)


def _identity(descriptor: int) -> tuple[int, int]:
    its = os.fstat(descriptor)
    return its.st_dev, its.st_ino


def _open(path: Path) -> int:
    """The file, made if it is not there, and so is its folder."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        if not shared_files.restore(path):
            raise
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _mapped(descriptor: int, path: Path) -> mmap.mmap:
    try:
        if os.fstat(descriptor).st_size != _SIZE:
            os.ftruncate(descriptor, _SIZE)
        # On a full disk, writing to a page that has no block yet would end the process (SIGBUS).
        os.posix_fallocate(descriptor, 0, _SIZE)
        return mmap.mmap(descriptor, _SIZE)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise DiskFullError(
            f"could not allocate the page of positions: {error.strerror}",
            where=str(path.resolve()),
            repair="free disk space there; the operation is retried",
        ) from None


class PositionWriter(_Page):
    """The hot loop's end."""

    def publish(self, positions: Positions) -> None:
        """Publish the positions. Both LSNs are durable, and so is the timeline's `.history` file.

        Before WAL is zeroed or replaced, positions that exclude it are published: a reader checks them again after reading.
        """
        self.write(
            _POSITIONS_AT,
            _POSITIONS,
            positions.system_id,
            positions.flush_lsn,
            positions.commit_lsn,
            positions.timeline,
            positions.segment_bytes,
            positions.major,
        )
        if self._map[_FLAG_AT]:
            self._map[_FLAG_AT] = 0
            with contextlib.suppress(BlockingIOError):
                os.write(self._pipe, b"!")

    def readers(self) -> Readers | None:
        """What the readers need; None until the server has run once: until then no WAL may be removed."""
        found = self.read(_READERS_AT, _READERS)
        if found is None:
            return None
        _, pin, xmin, xmin_epoch, catalog_xmin, catalog_epoch, count, pinned = found
        pin_lsn = pin if pinned else None
        if not self._is_served():
            return Readers(pin_lsn, NO_FEEDBACK, 0)
        feedback = HotStandbyFeedback(xmin, xmin_epoch, catalog_xmin, catalog_epoch)
        return Readers(pin_lsn, feedback, count)

    def _is_served(self) -> bool:
        """Whether the server lives: it holds its lock as long as it does."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False

    def is_removed(self) -> bool:
        """Whether a server that begins would not find this page: then open it again, which makes it."""
        return self._standing() != [True, True]


class PositionReader(_Page):
    """The server's end. `history_of` reads the history of a timeline (errors: its own)."""

    def __init__(self, path: Path, history_of: Callable[[int], ServerTimelines]) -> None:
        super().__init__(path)
        # Shared, and waited for: the hot loop looks whether it is held, for a moment.
        fcntl.flock(self._file, fcntl.LOCK_SH)
        self._history_of = history_of
        self._history = ServerTimelines(0)
        self._seen: tuple[int, Positions] | None = None

    def now(self) -> Positions | None:
        """The positions; None as long as the safekeeper has no WAL. Costs microseconds."""
        found = self.read(_POSITIONS_AT, _POSITIONS)
        if found is None:
            return None
        generation, system_id, flush, commit, timeline, segment_bytes, major = found
        if self._seen is not None and self._seen[0] == generation:
            return self._seen[1]
        if timeline != self._history.timeline:
            self._history = self._history_of(timeline)
        positions = Positions(system_id, major, segment_bytes, self._history, flush, commit)
        self._seen = generation, positions
        return positions

    def is_replaced(self) -> bool:
        """Whether the hot loop has made another page, or pipe: then open it, and use it once it has positions."""
        return False in self._standing()

    def arm(self) -> None:
        """Request a wakeup at the next change. Check `now` once more before waiting."""
        self._map[_FLAG_AT] = 1

    def fileno(self) -> int:
        """Readable after a change; then call `drain`."""
        return self._pipe

    def drain(self) -> None:
        """Consume the wakeup bytes."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe, 4096)

    def publish(self, readers: Readers) -> None:
        """Publish what the readers need."""
        feedback = readers.feedback
        self.write(
            _READERS_AT,
            _READERS,
            readers.pin_lsn or 0,
            feedback.xmin,
            feedback.xmin_epoch,
            feedback.catalog_xmin,
            feedback.catalog_xmin_epoch,
            readers.count,
            readers.pin_lsn is not None,
        )
