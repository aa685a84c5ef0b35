"""A backup of the metadata repository's database, which may be in use: `tuskline log backup`.

SQLite's online backup reads one state of the database while the repository goes on writing. It is read by its file, not
through the repository: a stopped repository has a backup as well, and no client can have a service write files.
"""

import contextlib
import os
import sqlite3
import tempfile
from dataclasses import dataclass
from pathlib import Path

from walsender_bridge.change_log.repository.store import RepositoryStore
from walsender_bridge.errors import ConfigError, CorruptError, UnavailableError
from walsender_bridge.runtime.durable import sync_folder
from walsender_bridge.runtime.private_folder import private_file

#: Seconds to wait for another process that has locked the whole database.
_PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class Backup:
    """What a backup contains. `version`: the newest one that it has issued."""

    file: str
    log_id: str
    version: int
    streams: int


def backup(source: Path, target: Path) -> Backup:
    """Copy the database, verify the copy's checksums, then give it its name; durable on return.

    Raises `ConfigError` if there is no database, or `target` exists; `CorruptError` if the database is damaged;
    `UnavailableError` if it cannot be read, or the copy cannot be written.
    """
    if not source.exists():
        raise ConfigError(
            "there is no repository",
            where=str(source),
            repair="run the command on the repository's machine, with the configuration that it runs with",
        )
    try:
        # Beside the target, as it is renamed.
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            draft = Path(folder) / target.name
            _copy(source, draft)
            made = _verified(draft, source, target)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            # A link, since a rename would replace a file of that name.
            os.link(draft, target)
    except FileExistsError:
        raise ConfigError(
            "file exists", where=str(target), repair="name a new file, or remove that one"
        ) from None
    except (OSError, sqlite3.OperationalError) as error:
        raise UnavailableError(
            f"could not write the backup: {error}",
            where=str(target),
            repair="check that the folder exists and has free space",
        ) from error
    sync_folder(target.parent)
    return made


def _copy(source: Path, draft: Path) -> None:
    private_file(draft)
    try:
        with (
            contextlib.closing(
                sqlite3.connect(source, timeout=_PATIENCE, isolation_level=None)
            ) as database,
            contextlib.closing(sqlite3.connect(draft)) as copy,
        ):
            # One read transaction, or each write of the repository would begin the copy again; and it is opened here,
            # since `backup` itself tries for ever while the database is locked.
            database.execute("BEGIN")
            database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            database.backup(copy)
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise
        raise UnavailableError(
            "another program has locked the database",
            where=str(source),
            repair="a bridge of an earlier version locks it as long as it runs: restart the bridge; then try again",
        ) from None
    except sqlite3.DatabaseError as error:
        raise CorruptError(f"could not read the repository: {error}", where=str(source)) from error


def _verified(draft: Path, source: Path, target: Path) -> Backup:
    """Fold the copy, which reads every row and its checksum."""
    try:
        store = RepositoryStore(draft)
    except CorruptError as error:
        raise CorruptError(error.what, where=str(source), repair=error.repair) from error
    except UnavailableError as error:
        what = f"could not verify the backup: {error.what}"
        raise UnavailableError(what, where=str(target), repair=error.repair) from error
    try:
        state = store.state
        return Backup(
            file=str(target),
            log_id=state.log_id,
            version=state.version,
            streams=len(state.streams),
        )
    finally:
        store.close()
