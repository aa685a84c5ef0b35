"""`<lake>/catalog.db`: the tables of Iceberg's SQL catalog in SQLite, as PyIceberg and Iceberg's JdbcCatalog read them.

All entries of an epoch change in one transaction, so no reader of the catalog sees two epochs. The journal is SQLite's
own, not a write-ahead log: that needs a reader who may write to the folder.
"""

import errno
import os
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path

from spark_consumers.lake.catalog.entries import (
    CATALOG,
    TABLE,
    CatalogChanges,
    Entry,
    Name,
    changes,
)
from walsender_bridge.runtime import fail_point, logs

#: Seconds to wait for another process's lock: epochs wait, too.
_WAIT = 0.2
#: The columns of both tables, as Iceberg's libraries create them (schema V1).
_TABLES = """
CREATE TABLE IF NOT EXISTS iceberg_tables (
  catalog_name VARCHAR(255) NOT NULL,
  table_namespace VARCHAR(255) NOT NULL,
  table_name VARCHAR(255) NOT NULL,
  metadata_location VARCHAR(1000),
  previous_metadata_location VARCHAR(1000),
  iceberg_type VARCHAR(5),
  PRIMARY KEY (catalog_name, table_namespace, table_name)
)
"""
_PROPERTIES = """
CREATE TABLE IF NOT EXISTS iceberg_namespace_properties (
  catalog_name VARCHAR(255) NOT NULL,
  namespace VARCHAR(255) NOT NULL,
  property_key VARCHAR(255) NOT NULL,
  property_value VARCHAR(1000) NOT NULL,
  PRIMARY KEY (catalog_name, namespace, property_key)
)
"""
_NEEDED = frozenset(
    [
        "catalog_name",
        "table_namespace",
        "table_name",
        "metadata_location",
        "previous_metadata_location",
    ]
)
#: The column that is missing in files of earlier libraries (schema V0).
_ADDED = "iceberg_type"
_ENTRIES = (
    "SELECT rowid, table_namespace, table_name, metadata_location, iceberg_type"
    " FROM iceberg_tables WHERE catalog_name = ?"
)
#: What is not of a catalog that another program is just making, a table at a time.
_OTHERS = (
    "SELECT 1 FROM sqlite_master"
    " WHERE type = 'table' AND name NOT IN ('iceberg_tables', 'iceberg_namespace_properties') LIMIT 1"
)
_INSERT = (
    "INSERT INTO iceberg_tables (catalog_name, table_namespace, table_name,"
    " metadata_location, previous_metadata_location, iceberg_type) VALUES (?, ?, ?, ?, ?, ?)"
)
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
#: What SQLite keeps beside a file, and applies to it: it goes with the file.
_BESIDE = ("-journal", "-wal", "-shm")

log = logs.logger()


class _UnusableError(Exception):
    """The file is no catalog, or is damaged: why."""


class CatalogFile:
    """The file of one lake. The caller ensures that no other driver writes it."""

    def __init__(self, root: Path) -> None:
        self.path = root / "catalog.db"

    def follow(self, wanted: Mapping[Name, str | None]) -> bool:
        """Set the catalog's entries (`catalog.changes`); returns whether anything was written.

        A file that is damaged, or no catalog, is renamed, and a new one created. Raises `sqlite3.Error` and `OSError`
        (locked, read-only, disk full); the catalog is unchanged then.
        """
        try:
            return self._follow(wanted)
        except _UnusableError as error:
            kept = self._keep_damaged()
            log.warning("catalog recreated", reason=str(error), kept=str(kept))
            return self._follow(wanted)

    def _follow(self, wanted: Mapping[Name, str | None]) -> bool:
        _check_file(self.path)
        with self._opened() as connection:
            known = _columns(connection)
            if known >= {*_NEEDED, _ADDED} and not _found(connection, wanted):
                return False
            # From here on nobody else writes; what they wrote in between is seen.
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                if not known:
                    connection.execute(_TABLES)
                    connection.execute(_PROPERTIES)
                elif _ADDED not in known:
                    connection.execute(f"ALTER TABLE iceberg_tables ADD COLUMN {_ADDED} VARCHAR(5)")
                _apply(connection, _found(connection, wanted))
                fail_point.hit("catalog-written")
        return True

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(
                sqlite3.connect(self.path, timeout=_WAIT, isolation_level=None)
            ) as connection:
                connection.text_factory = _text
                (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
                if found != "ok":
                    raise _UnusableError(found)
                # Somebody may have chosen a write-ahead log, and may be using it just now.
                with suppress(sqlite3.OperationalError):
                    connection.execute("PRAGMA journal_mode = DELETE")
                yield connection
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
                raise _UnusableError(str(error)) from None
            raise

    def _keep_damaged(self) -> Path:
        kept = next(
            path
            for number in count(1)
            if not os.path.lexists(path := self.path.with_name(f"{self.path.name}.{number}.bad"))
        )
        # The file last: what is beside one that is not there counts for nothing.
        for suffix in (*_BESIDE, ""):
            beside = Path(f"{self.path}{suffix}")
            if os.path.lexists(beside):
                beside.rename(f"{kept}{suffix}")
        return kept


def _check_file(path: Path) -> None:
    """The path may be a link, also to a file that does not exist yet, but not a circular one."""
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _UnusableError("it is a circular link") from None
    if not is_file:
        raise _UnusableError("it is not a file")


def _columns(connection: sqlite3.Connection) -> frozenset[str]:
    """Those of the table of entries; none in an empty file."""
    found = frozenset(row[1] for row in connection.execute("PRAGMA table_info(iceberg_tables)"))
    if not found and connection.execute(_OTHERS).fetchone():
        raise _UnusableError("it is another database")
    if found and not found >= _NEEDED:
        raise _UnusableError(f"iceberg_tables lacks {', '.join(sorted(_NEEDED - found))}")
    return found


def _found(connection: sqlite3.Connection, wanted: Mapping[Name, str | None]) -> CatalogChanges:
    rows = connection.execute(_ENTRIES, (CATALOG,)).fetchall()
    there = [Entry(row, Name(space, table), at, kind) for row, space, table, at, kind in rows]
    return changes(there, wanted)


def _apply(connection: sqlite3.Connection, found: CatalogChanges) -> None:
    connection.executemany(
        "DELETE FROM iceberg_tables WHERE rowid = ?", [(row,) for row in found.delete]
    )
    connection.executemany(
        _INSERT,
        [(CATALOG, *name, location, before, TABLE) for name, location, before in found.insert],
    )


def _text(value: bytes) -> str:
    """What others wrote need not be UTF-8."""
    return value.decode(errors="replace")
