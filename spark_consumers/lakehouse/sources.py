"""The databases that a lake is of, and what is asked of them beside copies. Needs no Spark."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import structlog

from walsender_bridge.errors import DeadlineError, UnavailableError
from walsender_bridge.sql import load
from walsender_bridge.wire.bounded import BoundedConnection
from walsender_bridge.wire.relation_name import relation_name

#: Tables of this schema are ours: they mark moments in the log, and are no part of the lake.
OWN_SCHEMA = "tuskline"

log = structlog.get_logger()


@dataclass(frozen=True)
class Source:
    """A database that is captured: its stream, a DSN to copy from, and the publication that names tables."""

    stream: str
    dsn: str = field(repr=False)
    publication: str


def published(source: Source) -> set[str]:
    """The publication's tables, `schema.table`, without our own. Raises `UnavailableError`, `DeadlineError`."""
    with _connected(source) as connection:
        rows = connection.execute(
            load("source_published"), {"publication": source.publication}
        ).fetchall()
    return {relation_name(schema, name) for schema, name in rows if schema != OWN_SCHEMA}


def columns_now(source: Source, relation_id: int) -> dict[str, tuple[int, int, bool]]:
    """A table's columns in the catalog, as `schema_change.not_plain` wants them. Raises as `published` does."""
    with _connected(source) as connection:
        rows = connection.execute(load("table_columns"), {"table": relation_id}).fetchall()
    return {name: (kind, typmod, filled) for name, kind, typmod, filled in rows}


@contextmanager
def _connected(source: Source) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    try:
        with BoundedConnection.open(source.dsn) as connection:
            yield connection
    except psycopg.Error as error:
        raise UnavailableError(
            str(error).strip() or type(error).__name__,
            where=source.stream,
            repair="see that the server accepts connections",
        ) from None


def mark(source: Source) -> None:
    """Commit something: on an idle server no cut would ever pass a copy's LSN, and no epoch would come."""
    try:
        with _connected(source) as connection:
            connection.execute(load("flush_write"))
    except (UnavailableError, DeadlineError) as error:
        # Then the tables are shown with the next commit of somebody else.
        log.warning("no mark in the log", stream=source.stream, error=error.what)
