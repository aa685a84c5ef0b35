"""The change that a flush, or a copy on an idle server, writes: one that every capture is sure to see.

The table's triggers run with the rights of the session. So it is written only if its owner, and the schema's, are ones whose
code this session would run anyway (sql/own_schema/owners.sql); nobody else can put something in its place then.
"""

from typing import Any

import psycopg
from psycopg import sql

from walsender_bridge.errors import PublicationError, UntrustedError
from walsender_bridge.postgres.protocol.relation_name import relation_name
from walsender_bridge.runtime.sql import load

TABLE = "tuskline.flush"


def check_published(connection: psycopg.Connection[Any], publication: str, where: str) -> None:
    """Raise `PublicationError` where the change would not be sent."""
    names = {"publication": publication}
    rows = connection.execute(load("publication/published").encode(), names).fetchall()
    if TABLE not in {relation_name(*row) for row in rows}:
        raise not_published(publication, where)


def not_published(publication: str, where: str) -> PublicationError:
    """Whoever waits for the change would wait for that of somebody else."""
    return PublicationError(
        f"publication {publication} does not publish {TABLE}, which marks positions in the log",
        where=where,
        repair="run tuskline init, which adds it; with --admin user=... if the role lacks the privilege",
    )


def without_updates(publication: str, where: str) -> PublicationError:
    """The table is published, and its UPDATEs are not sent."""
    statement = sql.SQL(load("fix/operations")).format(publication=sql.Identifier(publication))
    return PublicationError(
        f"publication {publication} does not publish UPDATEs, one of which marks a position in the log",
        where=where,
        repair=f"as its owner: {statement.as_string().strip()} Tables that lack changes are copied again then",
    )


def check_owners(connection: psycopg.Connection[Any], where: str) -> None:
    """Raise `UntrustedError` where code in the schema would run with the rights of this session."""
    _owners(connection, where)


def write(connection: psycopg.Connection[Any], where: str) -> None:
    """Commit the change, on a connection in autocommit. Raises `UntrustedError`, and psycopg's errors."""
    if TABLE not in _owners(connection, where):
        raise psycopg.errors.UndefinedTable(f"relation {TABLE} does not exist")
    connection.execute(load("flush/write").encode())


def _owners(connection: psycopg.Connection[Any], where: str) -> set[str]:
    """What of the schema exists, and belongs to roles that are trusted."""
    rows = connection.execute(load("own_schema/owners").encode()).fetchall()
    for name, owner, trusted, _, user in rows:
        if not trusted:
            raise UntrustedError(
                f"{name} belongs to role {owner}, whose code would run there with the privileges of {user}",
                where=where,
                repair="check the schema with `tuskline doctor`",
            )
    return {name for name, *_ in rows}
