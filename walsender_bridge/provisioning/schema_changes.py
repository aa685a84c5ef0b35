"""Recording of schema changes on a source's server, by an event trigger (sql/ddl/install.sql): `tuskline init --record-ddl`."""

from typing import Any, NamedTuple

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
#: What encloses the function's text in install.sql.
_QUOTE = "$function$"
#: What only a superuser may create.
_RIGHTS = (psycopg.errors.InsufficientPrivilege, psycopg.errors.RaiseException)


class Installed(NamedTuple):
    """What a server has of the recording of schema changes."""

    #: An event trigger records them.
    recorded: bool
    #: The publication sends the records.
    published: bool
    #: No other version's function is there, whether the event trigger calls it or not.
    is_current: bool


def record_ddl(source: CaptureSource, admin: str | None = None) -> list[ProvisionedObject]:
    """Have the server record schema changes for this source; what is new or replaced. `admin` as for `init`, after which it is called.

    Raises `PrivilegeError` unless the session's role is a superuser, and the schema `tuskline` a superuser's.
    """
    made = ProvisionedObject(KIND, _TRIGGER)
    with capture.connect(as_admin(source, admin)) as connection:
        before = installed(connection, source.publication)
        record = ProvisionedRecord(connection, source.slot, source.dsn)
        try:
            with record.held():
                connection.execute(load("ddl/install").encode())
                if not before.published:
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
    return [] if all(before) else [made]


def installed(connection: psycopg.Connection[Any], publication: str) -> Installed:
    """What the server has of it; anyone may read that."""
    names = {"publication": publication, "body": load("ddl/install").split(_QUOTE)[1]}
    row = connection.execute(load("ddl/installed").encode(), names).fetchone()
    assert row is not None
    return Installed(*row)
