"""Adds a table to an attached source: to its publication, and readable by its role."""

from dataclasses import replace

from psycopg import sql

from walsender_bridge.capture import source as capture
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.errors import PrivilegeError, PublicationError, UntrustedError
from walsender_bridge.own_schema.provisioned import ProvisionedObject
from walsender_bridge.postgres.protocol.relation_name import split_relation
from walsender_bridge.postgres.table_patterns import entry_for
from walsender_bridge.provisioning.fixes import publish
from walsender_bridge.provisioning.init import as_admin, init, wanted_tables
from walsender_bridge.runtime.sql import load


def add_table(
    source: CaptureSource, table: str, admin: str | None = None
) -> list[ProvisionedObject]:
    """Publish `schema.table`, and grant the source's role SELECT if an administrator acts; return the objects created.

    Raises `PublicationError` (there is no publication yet, or the table cannot be published), `ConfigError` (no
    such table), and `PrivilegeError` with the SQL that another role has to run.
    """
    with capture.connect(as_admin(source, admin)) as connection:
        version = connection.info.server_version
        names = {"publication": source.publication}
        if connection.execute(load("publication/source").encode(), names).fetchone() is None:
            raise PublicationError(
                f"publication {source.publication!r} does not exist",
                where=source.where,
                repair="run tuskline init",
            )
    try:
        made = init(replace(source, tables=(entry_for(*split_relation(table)),)), admin)
    except UntrustedError:
        raise
    except PrivilegeError as error:
        statement = publish(version, source.publication, [table]).replace("\n", " ")
        raise PrivilegeError(
            error.what,
            where=error.where,
            repair=f"tuskline table add {table} --admin user=..., or as the owner of both: "
            + statement,
        ) from None
    _check_readable(source, table)
    return made


def _check_readable(source: CaptureSource, table: str) -> None:
    """Raise `PrivilegeError` if the source's own role could not copy the table."""
    with capture.connect(source) as connection:
        role = connection.info.user
        missing = []
        for part in wanted_tables(connection, (table,), role):
            user = sql.Identifier(role).as_string()
            if not part["reachable"]:
                schema = sql.Identifier(part["schema"]).as_string()
                missing.append(f"GRANT USAGE ON SCHEMA {schema} TO {user};")
            if not part["readable"]:
                missing.append(f"GRANT SELECT ON TABLE {part['quoted']} TO {user};")
    if missing:
        raise PrivilegeError(
            f"{table} is published, but role {role} is not allowed to read it",
            where=source.where,
            repair=" ".join(dict.fromkeys(missing)),
        )
