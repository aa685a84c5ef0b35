"""The databases that a lake is of, and what is asked of them beside copies. Needs no Spark."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg import sql

from spark_consumers.lake.tables.shape import Publication, Shape
from spark_consumers.snapshot import flush_mark
from walsender_bridge.errors import TusklineError, UnavailableError
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.refusals import connection_error, server_error
from walsender_bridge.postgres.protocol.relation_name import relation_name
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.sql import load

#: Tables of this schema are ours: they mark moments in the log, and are no part of the lake.
OWN_SCHEMA = "tuskline"
#: The first version that publishes schemas.
_SCHEMAS = 150000
_NO_SCHEMAS = "SELECT NULL::oid AS oid, NULL::oid AS pnpubid, NULL::oid AS pnnspid"
#: The versions of those rows.
_SCHEMA_VERSIONS = "SELECT concat(n.ctid, n.xmin) FROM pg_publication_namespace AS n"
_NO_SCHEMA_VERSIONS = "SELECT NULL::text"

log = logs.logger()


@dataclass(frozen=True)
class Source:
    """A database that is captured: its stream, a DSN to copy from, and the publication that names tables."""

    stream: str
    dsn: str = field(repr=False)
    publication: str


def read_publication(source: Source, known: Collection[int] = ()) -> Publication:
    """Read what is published now. `known`: OIDs of partitions, see `Publication`.

    Raises the errors of `connection_error`, `UnavailableError` and `DeadlineError`.
    """
    with _connected(source) as connection:
        # The size of a locked new partition is not available, and a backend that waits for it would outlive this query.
        connection.execute(load("lake/lock_timeout").encode())
        return shapes(connection, source.publication, known)


@dataclass(frozen=True, slots=True)
class Reading:
    """A publication as it was read, and what it depends on: the versions of catalog rows, and the partitions that were known.

    `versions` is None if it depends on more.
    """

    publication: Publication
    versions: bytes | None
    known: frozenset[int]


def read_again(source: Source, known: Collection[int], last: Reading | None) -> Reading:
    """As `read_publication`, where nothing has changed in the catalogs since `last` at a fraction of its cost.

    The versions are of the same snapshot as the shapes, but for what the server's function says that lists a publication's
    tables: it sees what was committed meanwhile. A table that it lists because of a row that the snapshot does not have,
    and which may be gone again, has no members. What it leaves out because of such a row has another version afterwards.
    """
    with _connected(source) as connection:
        connection.execute(load("lake/lock_timeout").encode())
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        versions, lsn = catalog_versions(connection)
        known = frozenset(known)
        if (
            last is not None
            and versions is not None
            and (last.versions, last.known) == (versions, known)
        ):
            return replace(last, publication=replace(last.publication, lsn=lsn))
        found = shapes(connection, source.publication, known)
    if found.empty or not all(shape.members for shape in found.shapes.values()):
        versions = None
    return Reading(found, versions, known)


def catalog_versions(
    connection: psycopg.Connection[tuple[Any, ...]],
) -> tuple[bytes | None, Lsn]:
    """A digest of the versions of all catalog rows that `shapes` depends on, None if that is not all; and an LSN as `Publication` has it."""
    versions = _SCHEMA_VERSIONS
    if connection.info.server_version < _SCHEMAS:
        versions = _NO_SCHEMA_VERSIONS
    query = sql.SQL(load("lake/catalog_versions")).format(schemas=sql.SQL(versions))
    row = connection.execute(query).fetchone()
    assert row is not None
    digest, is_filtered, lsn = row
    return (None if is_filtered else bytes(digest)), lsn


def shapes(
    connection: psycopg.Connection[tuple[Any, ...]], publication: str, known: Collection[int] = ()
) -> Publication:
    """A publication's tables in the connection's snapshot; one without tables has none."""
    schemas = "SELECT * FROM pg_publication_namespace"
    if connection.info.server_version < _SCHEMAS:
        schemas = _NO_SCHEMAS
    query = sql.SQL(load("lake/shapes")).format(schemas=sql.SQL(schemas))
    names = {"publication": publication, "known": list(known)}
    # The estimated cost is above `jit_above_cost`, and compiling takes fifty times as long as the query.
    connection.execute("SET jit = off")
    rows = connection.execute(query, names).fetchall()
    found = {
        relation_name(schema, name): Shape.from_json(record)
        for schema, name, record, *_ in rows
        if schema != OWN_SCHEMA
    }
    empty = frozenset(oid for *_, oids, _ in rows for oid in oids)
    marks = [record for *names, record, _, _ in rows if relation_name(*names) == flush_mark.TABLE]
    sends = all("update" in mark["operations"] for mark in marks)
    return Publication(
        found, empty, min((int(lsn) for *_, lsn in rows), default=0), bool(marks), sends
    )


def columns_now(source: Source, relation_id: int) -> dict[str, tuple[int, int, bool]]:
    """A table's columns in the catalog, for `schema_change.not_plain`. Raises as `read_publication`."""
    with _connected(source) as connection:
        rows = connection.execute(load("lake/table_columns"), {"table": relation_id}).fetchall()
    return {name: (kind, typmod, filled) for name, kind, typmod, filled in rows}


@contextmanager
def _connected(source: Source) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    try:
        with BoundedConnection.open(source.dsn) as connection:
            yield connection
    except psycopg.errors.LockNotAvailable as error:
        text = error.diag.message_primary or str(error)
        raise server_error(error.sqlstate or "", text, source.stream) from None
    except psycopg.Error as error:
        if error.sqlstate is None:
            raise connection_error(str(error), source.stream) from None
        raise UnavailableError(
            str(error).strip() or type(error).__name__,
            where=source.stream,
            repair="check that the server accepts connections",
        ) from None


def mark(source: Source) -> None:
    """Commit something: on an idle server no cut would ever pass a copy's LSN, and no epoch would come."""
    try:
        with _connected(source) as connection:
            flush_mark.check_published(connection, source.publication, source.stream)
            flush_mark.write(connection, source.stream)
    except TusklineError as error:
        # Then the tables are shown with the next commit of any client.
        log.warning("could not write a mark to the log", stream=source.stream, error=error.what)
