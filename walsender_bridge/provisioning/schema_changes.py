"""Recording of schema changes on a source's server, by an event trigger (sql/ddl/install.sql): `tuskline init --record-ddl`."""

from typing import Any

import psycopg
from psycopg import sql

from walsender_bridge.capture import source as capture
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.errors import PrivilegeError
from walsender_bridge.own_schema.provisioned import ProvisionedObject, ProvisionedRecord
from walsender_bridge.provisioning.init import as_admin
from walsender_bridge.runtime.sql import load

#: The kind under which the event trigger, its function and its table are recorded.
KIND = "event trigger"
_TRIGGER = "tuskline_ddl"
#: What only a superuser may create.
_RIGHTS = (psycopg.errors.InsufficientPrivilege, psycopg.errors.RaiseException)


def record_ddl(source: CaptureSource, admin: str | None = None) -> list[ProvisionedObject]:
    """Have the server record schema changes for this source; what is new. `admin` as for `init`, after which it is called.

    Raises `PrivilegeError` unless the session's role is a superuser, and the schema `tuskline` a superuser's.
    """
    made = ProvisionedObject(KIND, _TRIGGER)
    with capture.connect(as_admin(source, admin)) as connection:
        before, published = installed(connection, source.publication)
        record = ProvisionedRecord(connection, source.slot, source.dsn)
        try:
            with record.held():
                connection.execute(load("ddl/install").encode())
                if not published:
                    publish = sql.SQL(load("ddl/publish"))
                    name = sql.Identifier(source.publication)
                    connection.execute(publish.format(publication=name))
                record.add(made)
        except _RIGHTS as error:
            raise PrivilegeError(
                f"schema changes cannot be recorded: {error.diag.message_primary}",
                where=source.where,
                repair="run tuskline init --record-ddl --admin user=... with a superuser; the schema tuskline has to belong to a superuser",
            ) from None
    return [] if before and published else [made]


def installed(connection: psycopg.Connection[Any], publication: str) -> tuple[bool, bool]:
    """Whether schema changes are recorded, and whether the publication sends the records."""
    names = {"publication": publication}
    row = connection.execute(load("ddl/installed").encode(), names).fetchone()
    assert row is not None
    return bool(row[0]), bool(row[1])
