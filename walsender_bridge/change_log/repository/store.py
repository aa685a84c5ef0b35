"""The metadata repository on disk: a log of records and a checkpoint, in SQLite.

Each record is durable when `append` returns. A restart reads the checkpoint and applies the records
behind it, which restores the state. A checkpoint is written after every thousand records and deletes the
records before it, in one transaction. The commits, the larger part of the state, are rows of
their own (version -> stream, local range, global range): a checkpoint adds and removes only those that
changed.

Each row has a checksum of its values, since a record with a changed digit is still well-formed. Rows of format 1 have none.

The lock on a file beside it (`.lock`) makes the database one repository's own. SQLite's EXCLUSIVE locking mode would do so
as well, but a backup of a running repository (`repository/backup.py`) could then not read it.
"""

import json
import os
import sqlite3
from contextlib import ExitStack
from pathlib import Path

from walsender_bridge.change_log.repository.core import Record, Repository, record_from_json
from walsender_bridge.change_log.repository.record_store import (
    CHECKPOINT_EVERY,
    FoldedStore,
    crc,
    split_histories,
)
from walsender_bridge.errors import (
    ConfigError,
    CorruptError,
    NotSupportedError,
    UnavailableError,
)
from walsender_bridge.runtime import disk_full, lock_file, same_file, sql
from walsender_bridge.runtime.private_folder import private_file

FORMAT = 2


class RepositoryStore(FoldedStore):
    """See the module. One thread at a time.

    Raises `ConfigError` if another repository has the file, `CorruptError` if it is damaged, `NotSupportedError` if it is
    of a newer format, `UnavailableError` if the disk is full or broken.
    """

    def __init__(self, path: Path, *, checkpoint_every: int = CHECKPOINT_EVERY) -> None:
        super().__init__(str(path), checkpoint_every)
        self._path = path
        # First of all: closing any descriptor of the database would end SQLite's own locks in this process.
        lock = lock_file.lock(Path(f"{path}.lock"), _in_use(path))
        #: What `close` lets go of, the lock last.
        self._held = ExitStack()
        self._held.callback(os.close, lock)
        try:
            self._open_and_load()
        except BaseException:
            self.close()
            raise

    def _open_and_load(self) -> None:
        path = self._path
        try:
            # SQLite's other files get the modes of this one.
            private_file(path)
            self._db = sqlite3.connect(
                path, timeout=1.0, isolation_level=None, check_same_thread=False
            )
            self._held.callback(self._db.close)
            self._open()
            self._state = self._load()
            # SQLite keeps its log for as long as it is open; it has none where the file system does not let it.
            files = (path, Path(f"{path}-wal"))
            self._opened = {each: each.stat() for each in files if each.exists()}
        except (OSError, sqlite3.OperationalError) as error:
            if "locked" in str(error):
                raise _in_use(path) from None
            if isinstance(error, sqlite3.OperationalError) and not _is_of_the_disk(error):
                raise _damaged(path, error) from error
            raise _failed(path, "could not open the repository", error) from error
        except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, error) from error

    def _open(self) -> None:
        # FULL: a record is on disk when its transaction returns, also in WAL mode.
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            self._db.execute(f"PRAGMA {pragma}")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version in {0, 1}:
            making = sql.load(
                "change_log/repository_from_1" if version else "change_log/repository"
            )
            self._db.executescript(f"BEGIN; {making}; PRAGMA user_version = {FORMAT}; COMMIT;")
        elif version != FORMAT:
            self._db.close()
            raise NotSupportedError(
                f"unknown format {version} of the repository (this version supports {FORMAT})",
                where=str(self._path),
                repair="use the version of Tuskline that wrote it, or a newer one",
            )

    def _load(self) -> Repository:
        row = self._db.execute("SELECT number, body, crc FROM checkpoint").fetchone()
        state, self._checkpointed = Repository(), 0
        if row is not None:
            _check("the checkpoint", *row)
            self._checkpointed, record = row[0], json.loads(row[1])
            for name, stream in record["streams"].items():
                rows = self._db.execute(
                    "SELECT stream, version, context, position, crc FROM commits WHERE stream = ?"
                    " ORDER BY version",
                    [name],
                ).fetchall()
                for each in rows:
                    _check(f"commit {each[1]} of stream {name}", *each)
                stream["history"] = [[json.loads(each[2]), json.loads(each[3])] for each in rows]
            state = Repository.from_record(record)
        self._number = self._checkpointed
        for number, body, stored in self._db.execute(
            "SELECT number, body, crc FROM record WHERE number > ? ORDER BY number",
            [self._checkpointed],
        ):
            if number != self._number + 1:
                raise ValueError(f"record {self._number + 1} is missing")
            _check(f"record {number}", number, body, stored)
            state.apply(record_from_json(body))
            self._number = number
        return state

    def append(self, record: Record) -> bool:
        """See `RecordStore`. Raises `UnavailableError`, too, if a file is no longer at its path: SQLite writes on into it."""
        self._check_place()
        return super().append(record)

    def _check_place(self) -> None:
        with disk_full.named(self._path):
            gone = [each for each, its in self._opened.items() if not same_file.leads_to(each, its)]
        if not gone:
            return
        raise UnavailableError(
            "the file at this path is not the one that is open: it was removed, moved or replaced, or a disk was mounted or"
            " unmounted there",
            where=str(gone[0]),
            repair=f"put {self._path.name}* back; if they are lost, stop Tuskline and run `tuskline log rebuild`:"
            " docs/log-lost.md",
        )

    def _keep(self, number: int, body: str) -> None:
        row = (number, body)
        try:
            self._db.execute(
                "INSERT INTO record (number, body, crc) VALUES (?, ?, ?)", [*row, crc(*row)]
            )
        except sqlite3.DatabaseError as error:
            raise _failed(self._path, "could not write the repository", error) from error

    def _is_storage_error(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.DatabaseError)

    def checkpoint(self) -> None:
        """Write the state, and delete the records before it."""
        record, histories = split_histories(self.state)
        with self._db:
            self._db.execute("BEGIN")
            for name, history in histories.items():
                kept = self._db.execute(
                    "SELECT max(version) FROM commits WHERE stream = ?", [name]
                ).fetchone()[0]
                self._db.execute(
                    "DELETE FROM commits WHERE stream = ? AND version < ?", [name, history[0][0][0]]
                )
                rows = [
                    (name, context[0], json.dumps(context), json.dumps(position))
                    for context, position in history
                    if kept is None or context[0] > kept
                ]
                self._db.executemany(
                    "INSERT INTO commits (stream, version, context, position, crc) VALUES (?, ?, ?, ?, ?)",
                    [(*each, crc(*each)) for each in rows],
                )
            row = (self._number, json.dumps(record))
            self._db.execute(
                "INSERT OR REPLACE INTO checkpoint (one, number, body, crc) VALUES (1, ?, ?, ?)",
                [*row, crc(*row)],
            )
            self._db.execute("DELETE FROM record WHERE number <= ?", [self._number])
        self._checkpointed = self._number

    def confirm(self) -> None:
        """See `RecordStore`: the lock admits no other repository."""

    def close(self) -> None:
        """Close the file."""
        self._held.close()


def _in_use(path: Path) -> ConfigError:
    return ConfigError(
        "file is in use by another repository",
        where=str(path),
        repair="stop the other bridge, or give each one its own [log] data_dir",
    )


def _damaged(path: Path, error: Exception) -> CorruptError:
    return CorruptError(
        f"could not read the repository: {error}",
        where=str(path),
        repair=f"stop Tuskline, move {path.name}* away, and run `tuskline log rebuild`: docs/log-lost.md",
    )


def _is_of_the_disk(error: sqlite3.Error) -> bool:
    """Whether the disk, the memory or the file's mode is the cause, and not the file's content."""
    # The extended codes have the primary one in their lowest byte.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in {
        *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN),
        *(sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM),
    }


def _failed(path: Path, what: str, error: OSError | sqlite3.Error) -> UnavailableError:
    """SQLite calls a full disk an I/O error where one of its smaller files meets it."""
    code = getattr(error, "sqlite_errorcode", None)
    number = error.errno if isinstance(error, OSError) else None
    full = code == sqlite3.SQLITE_FULL or number in disk_full.NO_ROOM
    full = full or disk_full.of_folder(path.parent) is not None
    return disk_full.failed(what, error, path, full=full)


def _check(what: str, *row: object) -> None:
    """Raise `ValueError` unless the last value is the checksum of the others, or None."""
    *values, stored = row
    if stored is not None and stored != crc(*values):
        raise ValueError(f"{what} does not match its checksum")
