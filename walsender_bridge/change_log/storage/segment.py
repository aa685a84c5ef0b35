"""One segment of a stream: a separate LMDB environment, so that removing it frees its disk space.

    meta       "state": the small record (JSON); "chain": first offsets of the segments before this one;
               "replica": whose it is (`replica_ids`); "next": that of the one behind it, if there is one
    entries    local offset (u64, big-endian) -> entry
    index      end offset of a commit -> its row
    schemas    hash -> schema record
    relations  "schema.table" -> hash of its newest schema

A segment is written while it is the newest, and only read afterwards. It is open while it is in use: `using` opens it,
and `retire` closes it as soon as it has no reader. LMDB trusts its file: an access beyond the end of a file that is too
short, or a head with a page size of 0, kills the process, so both are checked before LMDB opens it (`pages`).
"""

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import lmdb

from walsender_bridge.change_log.replica.disk import (
    DropFrom,
    Effect,
    IndexRow,
    PutDurable,
    PutEntry,
    PutIndex,
    PutSchema,
)
from walsender_bridge.change_log.storage import pages
from walsender_bridge.change_log.storage.records import (
    key_of,
    offset_of,
    pack_row,
    pack_state,
    unpack_row,
    unpack_state,
)
from walsender_bridge.errors import CorruptError, UnavailableError
from walsender_bridge.runtime import disk_full, same_file
from walsender_bridge.runtime.disk_full import NO_ROOM

#: Address space, not disk: a transaction of this size fits into one segment.
_MAP_BYTES = 1 << 40
_MAX_READERS = 1024
#: More than a table of so many readers takes: 64 bytes each, and a header.
_LOCK_FILE_BYTES = _MAX_READERS * 64 + 4096
_DATABASES = (b"meta", b"entries", b"index", b"schemas", b"relations")
_PREFIX = "segment-"
#: In `meta`: the id of the replica.
REPLICA = b"replica"
#: In `meta`: the first offset of the next segment, so that it is known to be missing if it is.
NEXT = b"next"
#: The repair of a folder that is gone.
PUT_BACK: Final = (
    "put the folder back, or mount its disk; if it is lost, restart the log server:"
    " the replica is then synchronized from another one"
)


#: What LMDB says of a file that is not what it wrote. Its other errors are of the moment, not of the file.
DAMAGE = (
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)


#: What it says of the machine, while the file is read.
_OF_THE_MOMENT = (
    lmdb.DiskError,
    lmdb.LockError,
    lmdb.MemoryError,
    lmdb.ReadersFullError,
    lmdb.TlsFullError,
)


#: What it says of a damaged file when it writes. After its other errors, an earlier one may be the cause.
REFUSALS = (lmdb.CorruptedError, lmdb.PageNotFoundError)


#: What it says of a full disk, beside the system's errors that have no class of its own.
_FULL = (lmdb.DiskError, lmdb.MapFullError)


def failed_write(error: lmdb.Error | OSError, what: str, folder: Path) -> UnavailableError:
    """What it means that `what` could not be done, unless the file is damaged."""
    return disk_full.failed(what, error, folder, full=_is_full(error, folder))


def _is_full(error: lmdb.Error | OSError, folder: Path) -> bool:
    if isinstance(error, _FULL) or _number(error) in NO_ROOM:
        return True
    # So LMDB calls a write of which only a part found room.
    return _number(error) == errno.EIO and disk_full.of_folder(folder) is not None


def _number(error: lmdb.Error | OSError) -> int:
    """The number of the system's error; LMDB's own are negative."""
    number: int | None = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
    return number or 0


def refused_read(error: lmdb.Error, file: str) -> CorruptError | UnavailableError:
    """What it means that a segment which is open could not be read."""
    number = _number(error)
    if isinstance(error, _OF_THE_MOMENT) or (number > 0 and number != errno.EINVAL):
        return UnavailableError(
            f"could not read it now: {error}",
            where=file,
            repair="free memory on the log server's machine; the operation is retried",
        )
    return CorruptError(f"it cannot be read: {error}", where=file)


def _may_pass(folder: Path, error: lmdb.Error | OSError) -> UnavailableError:
    if _is_full(error, folder):
        return failed_write(error, "could not open it for writing", folder)
    return UnavailableError(
        f"could not open it now: {error}",
        where=str(folder),
        repair="check for a full disk and for exhausted file descriptors; the operation is retried",
    )


class Segment:
    """See the module. `first_offset`: of the first entry that it may hold; it names the folder."""

    def __init__(self, folder: Path, first_offset: int) -> None:
        self.folder = folder
        self.first_offset = first_offset
        self._lock = threading.Lock()
        self._users = 0
        self._retired: Callable[[], None] | None = None
        self._env: Any = None
        self._databases: dict[bytes, Any] = {}
        #: The data file that is open for writing.
        self._opened: os.stat_result | None = None

    @classmethod
    def at(cls, stream_folder: Path, first_offset: int) -> "Segment":
        """The segment of that first offset."""
        return cls(stream_folder / f"{_PREFIX}{first_offset:020d}", first_offset)

    @staticmethod
    def offset_in_name(name: str) -> int | None:
        """The first offset, from the name of a segment's folder; None: not a segment."""
        digits = name.removeprefix(_PREFIX)
        whole = name.startswith(_PREFIX) and len(digits) == 20 and digits.isdigit()
        return int(digits) if whole else None

    # -- open and close -----------------------------------------------------------------------------

    def open(self, *, write: bool) -> None:
        """Open the environment.

        Raises `CorruptError` for damage, `UnavailableError` for what may pass: no file descriptor left, a folder that was
        moved, or a reader that still holds the environment which a failed write has closed.
        """
        data = self.folder / "data.mdb"
        if not write and not self.folder.parent.exists():
            raise UnavailableError(
                "its stream's folder is missing",
                where=str(self.folder.parent),
                repair="put it back, or mount its disk; the operation is retried",
            )
        if not write and not data.exists():
            raise CorruptError("its data file is missing", where=str(self.folder))
        try:
            if data.exists():
                pages.check_end(data)
            if write:
                self._reserve_lock_file()
            env = lmdb.open(
                str(self.folder),
                map_size=_MAP_BYTES if write else max(data.stat().st_size, 1 << 20),
                readonly=not write,
                mode=0o600,
                # A folder that is missing was taken away.
                create=False,
                # A segment that is only read has no writer to be locked against.
                lock=write,
                max_dbs=len(_DATABASES),
                max_readers=_MAX_READERS,
                meminit=False,
            )
        except DAMAGE as error:
            raise CorruptError(f"it cannot be opened: {error}", where=str(self.folder)) from error
        except (lmdb.Error, OSError) as error:
            raise _may_pass(self.folder, error) from error
        try:
            self._databases = {name: env.open_db(name, create=write) for name in _DATABASES}
        except DAMAGE as error:
            env.close()
            raise CorruptError(f"it cannot be read: {error}", where=str(self.folder)) from error
        except lmdb.Error as error:
            env.close()
            raise _may_pass(self.folder, error) from error
        self._env = env
        self._opened = data.stat() if write else None

    def _reserve_lock_file(self) -> None:
        """Have the disk's room for the table of readers. Raises `OSError`.

        LMDB writes it through a memory map: on a full disk that would end the process with SIGBUS.
        """
        path = self.folder / "lock.mdb"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _LOCK_FILE_BYTES)
        finally:
            os.close(descriptor)

    def check_place(self) -> None:
        """Raise `UnavailableError` if the file that is open for writing is no longer at its path; `OSError`.

        LMDB writes on without an error, into a file that nobody finds after a restart.
        """
        data = self.folder / "data.mdb"
        if self._opened is not None and not same_file.leads_to(data, self._opened):
            raise UnavailableError(
                "the file at this path is not the one that is open: it was removed, moved or replaced, or a disk was"
                " mounted or unmounted there",
                where=str(data),
                repair=PUT_BACK,
            )

    def close(self) -> None:
        """Close the environment now; it has no user."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def retire(self, then: Callable[[], None] | None = None) -> None:
        """Close it when its last user has left, then do that."""
        with self._lock:
            # A pending removal remains pending if the segment is retired once more.
            self._retired = then or self._retired or (lambda: None)
            if not self._users:
                self._leave()

    def remove(self) -> None:
        """Retire it, and give its disk back."""
        self.retire(lambda: shutil.rmtree(self.folder, ignore_errors=True))

    def set_aside(self, name: str) -> None:
        """Remove it, and make its name free at once, although a reader may still have it open."""
        self.folder = self.folder.rename(self.folder.with_name(name))
        self.remove()

    def _leave(self) -> None:
        self.close()
        then, self._retired = self._retired, None
        if then:
            then()

    @contextlib.contextmanager
    def using(self) -> Iterator["Segment"]:
        """Keep it open meanwhile."""
        with self._lock:
            if self._env is None:
                self.open(write=False)
            self._users += 1
        try:
            yield self
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._retired is not None:
                    self._leave()

    @property
    def file(self) -> str:
        """Its data file, for errors."""
        return str(self.folder / "data.mdb")

    @property
    def is_open(self) -> bool:
        """Its environment is open."""
        return self._env is not None

    # -- reading ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self) -> Iterator["SegmentSnapshot"]:
        """A short read transaction."""
        with self.using(), self._env.begin(buffers=True) as transaction:
            yield SegmentSnapshot(self, transaction)

    def database(self, name: bytes) -> Any:
        """One of its databases."""
        return self._databases[name]

    @property
    def used_bytes(self) -> int:
        """Bytes of its file."""
        return (self.folder / "data.mdb").stat().st_size

    # -- writing ------------------------------------------------------------------------------------

    def write(self, effects: list[Effect], step: Callable[[str], None]) -> None:
        """Do all of them in one durable transaction, or none."""
        with self._env.begin(write=True) as transaction:
            for effect in effects:
                step("log-effect")
                self._apply(transaction, effect)
            step("log-before-commit")
        step("log-after-commit")

    def _apply(self, transaction: Any, effect: Effect) -> None:
        entries = self._databases[b"entries"]
        match effect:
            case DropFrom(offset):
                cursor = transaction.cursor(entries)
                found = cursor.set_range(key_of(offset))
                while found:
                    found = cursor.delete()
            case PutEntry(offset, data):
                transaction.put(key_of(offset), data, db=entries, append=True)
            case PutSchema(digest, record, name):
                transaction.put(digest, record, db=self._databases[b"schemas"])
                transaction.put(name.encode(), digest, db=self._databases[b"relations"])
            case PutIndex(row):
                key = key_of(row.context.end)
                transaction.put(key, pack_row(row), db=self._databases[b"index"], append=True)
            case PutDurable(durable):
                transaction.put(b"state", pack_state(durable), db=self._databases[b"meta"])

    def write_replica_id(self, replica_id: str) -> None:
        """Note whose it is, in a segment of an earlier version."""
        with self._env.begin(write=True) as transaction:
            transaction.put(REPLICA, replica_id.encode(), db=self._databases[b"meta"])

    def write_next(self, first_offset: int) -> None:
        """Note that another segment follows."""
        with self._env.begin(write=True) as transaction:
            transaction.put(NEXT, key_of(first_offset), db=self._databases[b"meta"])

    def write_first(self, state: bytes, replica_id: str) -> None:
        """Make this the first segment of a new stream."""
        with self._env.begin(write=True) as transaction:
            transaction.put(REPLICA, replica_id.encode(), db=self._databases[b"meta"])
            transaction.put(b"state", state, db=self._databases[b"meta"])
            transaction.put(b"chain", b"[]", db=self._databases[b"meta"])

    def write_copy(
        self,
        source: "SegmentSnapshot",
        chain: list[int],
        replica_id: str,
        step: Callable[[str], None],
    ) -> None:
        """In one transaction: what a new segment needs of the one before it."""
        with self._env.begin(write=True) as transaction:
            for name in (b"schemas", b"relations"):
                for key, value in source.rows(name):
                    transaction.put(key, value, db=self._databases[name])
            for key, value in source.rows(b"entries", key_of(self.first_offset)):
                transaction.put(key, value, db=self._databases[b"entries"], append=True)
            step("log-roll-copied")
            meta = self._databases[b"meta"]
            transaction.put(REPLICA, replica_id.encode(), db=meta)
            transaction.put(b"state", source.get(b"meta", b"state"), db=meta)
            transaction.put(b"chain", json.dumps(chain).encode(), db=meta)


class SegmentSnapshot:
    """A segment at one moment. What it returns as memory is valid only while it is open."""

    def __init__(self, segment: Segment, transaction: Any) -> None:
        self.segment = segment
        self._transaction = transaction

    def cursor(self, name: bytes) -> Any:
        """A cursor over one database."""
        return self._transaction.cursor(self.segment.database(name))

    def get(self, name: bytes, key: bytes) -> bytes | None:
        """A value, copied."""
        value = self._transaction.get(key, db=self.segment.database(name))
        return None if value is None else bytes(value)

    def rows(self, name: bytes, start: bytes = b"") -> Iterator[tuple[memoryview, memoryview]]:
        """All rows of a database from a key on, not copied."""
        cursor = self.cursor(name)
        if cursor.set_range(start):
            yield from cursor.iternext()

    def bounds(self, name: bytes) -> tuple[int, int] | None:
        """The least and the greatest offset among the keys."""
        cursor = self.cursor(name)
        if not cursor.first():
            return None
        first = offset_of(cursor.key())
        cursor.last()
        return first, offset_of(cursor.key())

    def count(self, name: bytes) -> int:
        """How many rows a database has."""
        number: int = self._transaction.stat(self.segment.database(name))["entries"]
        return number

    def commit_behind(self, offset: int) -> IndexRow | None:
        """The first commit whose end is greater than `offset`."""
        cursor = self.cursor(b"index")
        return self._row(*cursor.item()) if cursor.set_range(key_of(offset + 1)) else None

    def commits_behind(self, offset: int) -> Iterator[IndexRow]:
        """The commits whose ends are greater than `offset`, in order. Raises `CorruptError` for a hole."""
        before: IndexRow | None = None
        for key, value in self.rows(b"index", key_of(offset + 1)):
            row = self._row(key, value)
            if before is not None and row.context.local_offset != before.context.end:
                raise CorruptError(
                    f"the commit that ends at {row.context.end} does not follow {before.context.end}",
                    where=self.segment.file,
                )
            before = row
            yield row

    def _row(self, key: memoryview, value: memoryview) -> IndexRow:
        row = unpack_row(value, self.segment.file)
        if offset_of(key) != row.context.end:
            raise CorruptError(
                f"the commit that ends at {row.context.end} is stored at {offset_of(key)}",
                where=self.segment.file,
            )
        return row

    def last_commit(self) -> IndexRow | None:
        """The last commit of the segment."""
        cursor = self.cursor(b"index")
        return self._row(*cursor.item()) if cursor.last() else None

    def first_commit_where(self, true_from: Callable[[IndexRow], bool]) -> IndexRow | None:
        """The first commit for which `true_from` holds; it holds for all behind that one too."""
        bounds = self.bounds(b"index")
        if bounds is None:
            return None
        low, high = bounds[0] - 1, bounds[1]
        found = None
        while low < high:
            middle = (low + high) // 2
            row = self.commit_behind(middle)
            assert row is not None, "the greatest key is above the middle"
            if true_from(row):
                found, high = row, middle
            else:
                low = row.context.end
        return found


def dense(snapshot: SegmentSnapshot) -> tuple[int, int] | None:
    """First and last entry, if none is missing between them. Raises `CorruptError`."""
    bounds = snapshot.bounds(b"entries")
    if bounds is not None and snapshot.count(b"entries") != bounds[1] - bounds[0] + 1:
        raise CorruptError("entries are missing in it", where=str(snapshot.segment.folder))
    return bounds


def missing_next(snapshot: SegmentSnapshot) -> str:
    """What the newest segment that is there says of one behind it; empty: it is the newest one."""
    offset = snapshot.get(b"meta", NEXT)
    return "" if offset is None else f"the segment starting at {offset_of(offset)} is missing"


def check_newest(snapshot: SegmentSnapshot, stream: str, replica_id: str | None) -> None:
    """The newest segment is this replica's, and has the name of the first entry that is in it.

    `replica_id`: see `StreamStore`. Raises `CorruptError`.
    """
    folder = snapshot.segment.folder
    if replica_id is not None and stream != folder.parent.name:
        raise CorruptError(f"it is a segment of stream {stream}", where=str(folder))
    its = snapshot.get(b"meta", REPLICA)
    if replica_id and its is not None and its != replica_id.encode():
        raise CorruptError("it is a segment of another replica", where=str(folder))
    bounds = snapshot.bounds(b"entries")
    if bounds is not None and bounds[0] != snapshot.segment.first_offset:
        raise CorruptError(f"its first entry is {bounds[0]}: it is another one", where=str(folder))


def check_old(snapshot: SegmentSnapshot, end: int, stream: str, log_id: str) -> None:
    """An older segment holds everything of the stream from its name to the next one's.

    Raises `CorruptError`.
    """
    folder = snapshot.segment.folder
    record = unpack_state(snapshot.get(b"meta", b"state") or b"", folder)
    if record.stream != stream:
        raise CorruptError(f"it is a segment of stream {record.stream}", where=str(folder))
    if record.log_id != log_id:
        raise CorruptError(f"it is a segment of log {record.log_id}", where=str(folder))
    bounds = dense(snapshot)
    first = snapshot.segment.first_offset
    if bounds is None or bounds[0] != first or bounds[1] < end - 1:
        raise CorruptError(
            f"it holds {bounds}, not {(first, end - 1)}", where=str(snapshot.segment.folder)
        )
