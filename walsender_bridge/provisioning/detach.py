"""`tuskline detach`: remove the objects in the record, and nothing that existed before.

The slot is dropped first, because that cannot be rolled back: an interrupted detach is run again. Everything else is removed
in one transaction. Objects shared by all sources of a database are removed with the last source.
"""

from typing import Any

import psycopg
from psycopg import sql

from walsender_bridge.capture import publication
from walsender_bridge.capture import source as capture
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.errors import ConfigError, PrivilegeError
from walsender_bridge.own_schema.provisioned import (
    PROVISIONED_TABLE,
    ProvisionedObject,
    ProvisionedRecord,
)
from walsender_bridge.provisioning import schema_changes, stats_grant
from walsender_bridge.provisioning.init import as_admin, identifier
from walsender_bridge.provisioning.slots import drop_unused
from walsender_bridge.runtime.sql import load


def detach(source: CaptureSource, admin: str | None = None) -> list[ProvisionedObject]:
    """Remove the objects provisioned for `source`; return the objects removed.

    `admin` as for `init`. Raises `SlotInUseError` while a client streams from the slot, `PrivilegeError`
    when the objects belong to another role, or when other objects depend on them.
    """
    with capture.connect(as_admin(source, admin)) as connection:
        record = ProvisionedRecord(connection, source.slot, source.dsn)
        if record.owner is None:
            return []
        found = record.own() if record.readable else []
        for made in found:
            if made.kind == stats_grant.KIND:
                stats_grant.take_grant(connection, source, record, made)
        try:
            with record.held():
                _act_as_owner(connection, record, source)
                found = record.own()
                if any(made.kind == "slot" for made in found):
                    drop_slot(connection, source)
                for made in found:
                    _take_back(connection, made)
                record.forget()
                if record.is_last():
                    found += _take_back_shared(connection, record)
        except psycopg.errors.DependentObjectsStillExist as error:
            raise PrivilegeError(
                f"{error.diag.message_primary}: {error.diag.message_detail}",
                where=source.where,
                repair="remove the dependent objects (for another source's role: detach that source first), "
                "then detach again",
            ) from None
        return found


def left_behind(source: CaptureSource, admin: str | None = None) -> list[str]:
    """Describe objects that still exist under the source's names: older ones, or ones whose record is lost. `admin` as for `init`."""
    why = f"according to {PROVISIONED_TABLE} it was not created by Tuskline. If it is not used elsewhere:"
    found = []
    with capture.connect(as_admin(source, admin)) as connection:
        if capture.has_slot(connection, source):
            drop = f"SELECT pg_drop_replication_slot('{source.slot}')"
            found.append(f"slot {source.slot} still exists and retains WAL: {why} {drop}")
        if publication.facts(connection, source) is not None:
            name = sql.Identifier(source.publication).as_string(None)
            found.append(f"publication {name} still exists: {why} DROP PUBLICATION {name}")
    return [f"{source.where}: {each}" for each in found]


def _act_as_owner(
    connection: psycopg.Connection[Any], record: ProvisionedRecord, source: CaptureSource
) -> None:
    """Become the record's owner, so that the record cannot be used to remove objects that its owner could not."""
    if record.owner == record.user:
        return
    assert record.owner is not None
    try:
        connection.execute(
            sql.SQL(load("provisioning/set_role")).format(role=sql.Identifier(record.owner))
        )
    except psycopg.errors.InsufficientPrivilege:
        raise PrivilegeError(
            f"this database was attached by role {record.owner}",
            where=source.where,
            repair=f"run tuskline detach --admin user={record.owner}",
        ) from None


def drop_slot(connection: psycopg.Connection[Any], source: CaptureSource) -> None:
    """Drop the source's slot if it exists. Raises `SlotInUseError` if a client keeps streaming from it."""
    drop_unused(connection, "provisioning/slot_drop", source.slot, source.where)


def _take_back_shared(
    connection: psycopg.Connection[Any], record: ProvisionedRecord
) -> list[ProvisionedObject]:
    shared = record.shared()
    grants = [made for made in shared if made.privilege]
    for made in grants:
        _take_back(connection, made)
    if any(made.kind == schema_changes.KIND for made in shared):
        connection.execute(load("ddl/remove").encode())
    connection.execute(load("flush/drop").encode())
    connection.execute(load("own_schema/provisioned_drop").encode())
    for made in shared:
        if made not in grants:
            _take_back(connection, made)
    return shared


def _take_back(connection: psycopg.Connection[Any], made: ProvisionedObject) -> None:
    """Remove an object unless it has been removed already."""
    if made.privilege:
        _run(
            connection,
            f"provisioning/revoke_{made.kind}",
            privilege=sql.SQL(_checked_privilege(made)),
            name=identifier(made),
            role=sql.Identifier(made.grantee),
        )
        return
    match made.kind:
        case "publication":
            _run(connection, "publication/drop", publication=sql.Identifier(made.name))
        case "published":
            _run(
                connection,
                "publication/remove",
                publication=sql.Identifier(made.grantee),
                tables=identifier(made),
            )
        case "schema":
            _run(connection, "provisioning/schema_drop")
        case "role":
            _run(connection, "provisioning/role_drop", role=sql.Identifier(made.name))
        case _:
            # The slot has been dropped already, and the stats grant revoked.
            pass


def _run(connection: psycopg.Connection[Any], text: str, **names: sql.Composable) -> None:
    try:
        with connection.transaction():
            connection.execute(sql.SQL(load(text)).format(**names))
    except (
        psycopg.errors.UndefinedObject,
        psycopg.errors.UndefinedTable,
        psycopg.errors.InvalidSchemaName,
    ):
        return


def _checked_privilege(made: ProvisionedObject) -> Any:
    """The record may contain anything; accept only privileges that Tuskline grants."""
    if made.privilege not in {"CONNECT", "USAGE", "SELECT", "UPDATE"}:
        raise ConfigError(
            f"the record lists privilege {made.privilege!r}, which Tuskline never grants",
            where="tuskline.provisioned",
            repair="correct that row",
        )
    return made.privilege
