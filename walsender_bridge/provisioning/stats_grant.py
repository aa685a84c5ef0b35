"""The right to see what other people's sessions do: a membership in pg_read_all_stats, which has no lesser form.

Two parts need it: the quorum reads what its proposer reports, the commit gate what streams from a candidate's slot
(`sql/quorum/facts.sql`, `sql/gate/slots.sql`). Invariant: the membership is given once, each part that was in need of it
then has a record of its own (`own_schema.provisioned`), and it goes with the last of those. One that was there before has no record,
and stays.
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
    """Let the source's role see what streams from the candidates of its gate; what was made for that.

    The database has been attached (`init`). Without an administrator nothing is done, and `doctor` says so.
    """
    with capture.connect(as_admin(source, admin)) as connection:
        record = ProvisionedRecord(connection, source.slot, source.dsn)
        before = record.own() if record.readable else []
        grant_stats(connection, record, login_of(source.dsn).user)
        return [made for made in record.own() if made not in before] if record.readable else []


def grant_stats(connection: Connection, record: ProvisionedRecord, role: str) -> None:
    """Give `role` what it lacks, if this connection is an administrator's, and record for what."""
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
    """Take it back, unless another part has it by a record of its own; `record` is to be forgotten after this.

    Only from the source's own role: whoever may write the record cannot have it taken from others. By the rights of the
    connection, since the record's owner may be that role. Raises `PrivilegeError`.
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
            f"role {record.user} may not take back the {made}",
            where=source.where,
            repair="tuskline detach --admin user=postgres, or another superuser",
        ) from None
