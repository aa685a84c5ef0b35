"""The stats grant: membership of pg_read_all_stats, the least privilege that shows the activity of other sessions.

Two parts need it: the quorum reads the position that its proposer reports, the commit gate the walsender of a candidate's slot
(`sql/quorum/facts.sql`, `sql/gate/slots.sql`). Invariant: the membership is granted once, each part that needed it
has a record of its own (`own_schema.provisioned`), and it is revoked with the last record. A membership that existed before has
no record, and is kept.
"""

from contextlib import suppress
from typing import Any

import psycopg
from psycopg import sql

from walsender_bridge.capture import source as capture
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.errors import PrivilegeError
from walsender_bridge.own_schema.login import login_of
from walsender_bridge.own_schema.provisioned import ProvisionedObject, ProvisionedRecord
from walsender_bridge.provisioning.init import as_admin
from walsender_bridge.runtime.sql import load

#: The kind of its record.
KIND = "member"

Connection = psycopg.Connection[Any]


def attach_gate(source: CaptureSource, admin: str | None = None) -> list[ProvisionedObject]:
    """Let the source's role see the walsenders of its gate's candidates; return the objects created.

    The database has been attached (`init`). Without an administrator nothing is done, and `doctor` reports it.
    """
    with capture.connect(as_admin(source, admin)) as connection:
        record = ProvisionedRecord(connection, source.slot, source.dsn)
        before = record.own() if record.readable else []
        grant_stats(connection, record, login_of(source.dsn).user)
        return [made for made in record.own() if made not in before] if record.readable else []


def grant_stats(connection: Connection, record: ProvisionedRecord, role: str) -> None:
    """Grant the membership to `role` if it lacks it and this connection is an administrator's, and record the purpose."""
    row = connection.execute(load("provisioning/role_sees").encode(), {"role": role}).fetchone()
    made = ProvisionedObject(KIND, role)
    if row is None:
        return
    sees, is_own, may_give = row
    if is_own or not may_give or (sees and not record.recorded_elsewhere(made)):
        return
    with connection.transaction():
        record.add(made)
        if not sees:
            connection.execute(
                sql.SQL(load("provisioning/roles_stats")).format(role=sql.Identifier(role))
            )


def take_grant(
    connection: Connection,
    source: CaptureSource,
    record: ProvisionedRecord,
    made: ProvisionedObject,
) -> None:
    """Revoke the membership unless another part has a record of it; the caller then forgets `record`.

    It is revoked from the source's own role only, so that a forged record cannot affect other roles; and with the rights of
    the connection, since the record's owner may be that role. Raises `PrivilegeError`.
    """
    if made.name != login_of(source.dsn).user or record.recorded_elsewhere(made):
        return
    try:
        with suppress(psycopg.errors.UndefinedObject), connection.transaction():
            connection.execute(
                sql.SQL(load("provisioning/revoke_stats")).format(role=sql.Identifier(made.name))
            )
    except psycopg.errors.InsufficientPrivilege:
        raise PrivilegeError(
            f"role {record.user} is not allowed to revoke the {made}",
            where=source.where,
            repair="run tuskline detach --admin user=postgres, or with another superuser",
        ) from None
