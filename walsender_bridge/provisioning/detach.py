"""`tuskline detach`: take back what the record says was made, and nothing that was there before.

The slot goes first, because no transaction takes it back: a detach that was cut off is run again. All goes in
one transaction. What all sources of a database share goes with the last of them.
"""

import time
from typing import Any

import psycopg
from psycopg import sql

from walsender_bridge.capture import publication
from walsender_bridge.capture import source as capture
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.errors import ConfigError, PrivilegeError, SlotInUseError
from walsender_bridge.own_schema.provisioned import (
    PROVISIONED_TABLE,
    ProvisionedObject,
    ProvisionedRecord,
)
from walsender_bridge.provisioning import stats_grant
from walsender_bridge.provisioning.init import as_admin, identifier
from walsender_bridge.runtime.sql import load

#: Seconds in which a walsender notices that its client has gone.
_SLOT_SECONDS = 5.0


def detach(source: CaptureSource, admin: str | None = None) -> list[ProvisionedObject]:
    """Take back what was made for `source`; what was taken back.

    `admin` as for `init`. Raises `SlotInUseError` while somebody streams from the slot, `PrivilegeError`
    when another role has made these things, or when something of others depends on them.
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
                repair="remove what depends on it (another source's role: detach that source first), "
                "then detach again",
            ) from None
        return found


def left_behind(source: CaptureSource, admin: str | None = None) -> list[str]:
    """What goes on under the source's names, in words: it was there before, or the record of it is lost. `admin` as for `init`."""
    why = (
        f"by the record ({PROVISIONED_TABLE}) it was not made by Tuskline. If nobody else uses it:"
    )
    found = []
    with capture.connect(as_admin(source, admin)) as connection:
        if capture.has_slot(connection, source):
            drop = f"SELECT pg_drop_replication_slot('{source.slot}')"
            found.append(f"slot {source.slot} is still there, and WAL is kept for it: {why} {drop}")
        if publication.facts(connection, source) is not None:
            name = sql.Identifier(source.publication).as_string(None)
            found.append(f"publication {name} is still there: {why} DROP PUBLICATION {name}")
    return [f"{source.where}: {each}" for each in found]


def _act_as_owner(
    connection: psycopg.Connection[Any], record: ProvisionedRecord, source: CaptureSource
) -> None:
    """See `record`: nobody may have more taken back than they could take back themselves."""
    if record.owner == record.user:
        return
    assert record.owner is not None
    try:
        connection.execute(
            sql.SQL(load("provisioning/set_role")).format(role=sql.Identifier(record.owner))
        )
    except psycopg.errors.InsufficientPrivilege:
        raise PrivilegeError(
            f"role {record.owner} has attached this database",
            where=source.where,
            repair=f"tuskline detach --admin user={record.owner}",
        ) from None


def drop_slot(connection: psycopg.Connection[Any], source: CaptureSource) -> None:
    """Drop the source's slot if it is there. Raises `SlotInUseError` if somebody streams from it for long."""
    deadline = time.monotonic() + _SLOT_SECONDS
    while True:
        try:
            with connection.transaction():
                connection.execute(load("provisioning/slot_drop").encode(), {"slot": source.slot})
        except psycopg.errors.ObjectInUse as error:
            if time.monotonic() > deadline:
                raise SlotInUseError(
                    str(error.diag.message_primary),
                    where=f"{source.where}, slot {source.slot}",
                    repair="tuskline down, or stop whoever else streams from it",
                ) from None
            time.sleep(0.1)
        else:
            return


def _take_back_shared(
    connection: psycopg.Connection[Any], record: ProvisionedRecord
) -> list[ProvisionedObject]:
    shared = record.shared()
    grants = [made for made in shared if made.privilege]
    for made in grants:
        _take_back(connection, made)
    connection.execute(load("own_schema/provisioned_drop").encode())
    for made in shared:
        if made not in grants:
            _take_back(connection, made)
    return shared


def _take_back(connection: psycopg.Connection[Any], made: ProvisionedObject) -> None:
    """Undo one thing, unless somebody else has undone it."""
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
            # The slot is gone already, and so is the role's sight.
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
    """The record may hold anything; a privilege is one of these words."""
    if made.privilege not in {"CONNECT", "USAGE", "SELECT", "UPDATE"}:
        raise ConfigError(
            f"the record names a privilege {made.privilege!r} that was never granted",
            where="tuskline.provisioned",
            repair="correct that row",
        )
    return made.privilege
