"""The metadata repository on disk: a log of records and a checkpoint, in SQLite.

Each record is durable when `append` returns. A restart reads the checkpoint and applies the records
behind it, which restores the state. A checkpoint is written after every thousand records and deletes the
records before it, in one transaction. The commits, the larger part of the state, are rows of
their own (version -> stream, local range, global range): a checkpoint adds and removes only those that
changed.

If a record violates an invariant of the state, neither this record nor any later one is written.

Each row has a checksum of its values, since a record with a changed digit is still well-formed. Rows of format 1 have none.
"""

import json
import sqlite3
from pathlib import Path

import google_crc32c

from walsender_bridge.change_log.repository.core import (
    Record,
    Repository,
    record_from_json,
    record_to_json,
)
from walsender_bridge.change_log.repository.invariants import Checked, check_invariants, checked
from walsender_bridge.change_log.repository.stream_faults import REPAIR
from walsender_bridge.errors import (
    ConfigError,
    CorruptError,
    InvariantError,
    NotSupportedError,
    UnavailableError,
)
from walsender_bridge.runtime import logs, sql
from walsender_bridge.runtime.private_folder import private_file

FORMAT = 2
CHECKPOINT_EVERY = 1000

_log = logs.logger()


class RepositoryStore:
    """See the module. One thread at a time.

    Raises `CorruptError` if the file is damaged, `NotSupportedError` if it is of a newer format.
    """

    def __init__(self, path: Path, *, checkpoint_every: int = CHECKPOINT_EVERY) -> None:
        self._path = path
        self._checkpoint_every = checkpoint_every
        #: The error because of which nothing is written any more.
        self._stopped: InvariantError | None = None
        try:
            # SQLite's other files get the modes of this one.
            private_file(path)
            self._db = sqlite3.connect(
                path, timeout=1.0, isolation_level=None, check_same_thread=False
            )
            self._open()
            self._state: Repository | None = self._load()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            raise ConfigError(
                "file is in use by another repository",
                where=str(path),
                repair="stop the other bridge, or give each one its own [log] data_dir",
            ) from None
        except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
            raise CorruptError(
                f"could not read the repository: {error}",
                where=str(path),
                repair=REPAIR,
            ) from error

    def _open(self) -> None:
        # FULL: a record is on disk when its transaction returns, also in WAL mode.
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "locking_mode = EXCLUSIVE"):
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
        for number, body, crc in self._db.execute(
            "SELECT number, body, crc FROM record WHERE number > ? ORDER BY number",
            [self._checkpointed],
        ):
            if number != self._number + 1:
                raise ValueError(f"record {self._number + 1} is missing")
            _check(f"record {number}", number, body, crc)
            state.apply(record_from_json(body))
            self._number = number
        return state

    @property
    def state(self) -> Repository:
        """The state after all stored records; loaded from disk if necessary."""
        if self._state is None:
            self._state = self._load()
        return self._state

    def append(self, record: Record) -> bool:
        """Apply a record to `state`, and store it durably if it changed anything.

        Raises `UnavailableError` if it cannot be stored, `InvariantError` now and for each later record; `state` is then
        that on disk.
        """
        if self._stopped is not None:
            raise self._stopped.with_traceback(None)
        state = self.state
        before = checked(state)
        # The state is ahead of the disk until the record is stored: if that fails, it is reloaded at its next use.
        self._state = None
        changed = state.apply(record)
        if changed:
            self._check(state, before)
            self._keep(record)
        self._state = state
        if changed and self._number - self._checkpointed >= self._checkpoint_every:
            # The record is already durable; a failed checkpoint is retried with the next record.
            try:
                self.checkpoint()
            except sqlite3.DatabaseError as error:
                _log.warning("checkpoint failed", error=str(error), where=str(self._path))
        return changed

    def _check(self, state: Repository, before: Checked) -> None:
        try:
            check_invariants(state, before)
        except InvariantError as error:
            self._stopped = error
            raise

    def _keep(self, record: Record) -> None:
        row = (self._number + 1, record_to_json(record))
        try:
            self._db.execute(
                "INSERT INTO record (number, body, crc) VALUES (?, ?, ?)", [*row, _crc(*row)]
            )
        except sqlite3.DatabaseError as error:
            raise UnavailableError(
                f"could not write the repository: {error}",
                where=str(self._path),
                repair="check for a full disk",
            ) from error
        self._number += 1

    def reload(self) -> None:
        """Reload `state` from disk now."""
        self._state = self._load()

    def checkpoint(self) -> None:
        """Write the state, and delete the records before it."""
        record = self.state.to_record()
        histories = {name: stream.pop("history") for name, stream in record["streams"].items()}
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
                    [(*each, _crc(*each)) for each in rows],
                )
            row = (self._number, json.dumps(record))
            self._db.execute(
                "INSERT OR REPLACE INTO checkpoint (one, number, body, crc) VALUES (1, ?, ?, ?)",
                [*row, _crc(*row)],
            )
            self._db.execute("DELETE FROM record WHERE number <= ?", [self._number])
        self._checkpointed = self._number

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _crc(*values: object) -> int:
    return int(google_crc32c.value("\n".join(map(str, values)).encode()))


def _check(what: str, *row: object) -> None:
    """Raise `ValueError` unless the last value is the checksum of the others, or None."""
    *values, crc = row
    if crc is not None and crc != _crc(*values):
        raise ValueError(f"{what} does not match its checksum")
