"""`tuskline init`: create the objects that a source needs on its server, and record them (`own_schema.provisioned`).

Existing objects are adopted as they are, so running it again only adds tables that `tables` match since.
But what a stream with a history lacks is not recreated here: a new slot would silently skip the changes committed in between.
Either the source's own role creates everything that it can, or an administrator does (`admin`), who also creates the source's
role and grants it exactly what capture and the initial copy need, table by table.

Server settings and tables are never changed: a deficiency is an error, with the SQL that repairs it.
"""

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from walsender_bridge.capture import publication
from walsender_bridge.capture import source as capture
from walsender_bridge.capture.publication import FLUSH_TABLE
from walsender_bridge.capture.source import CaptureSource, LogPosition
from walsender_bridge.errors import ConfigError, PrivilegeError, SlotInUseError, UntrustedError
from walsender_bridge.own_schema.login import LoginRole, login_of
from walsender_bridge.own_schema.provisioned import (
    PROVISIONED_TABLE,
    ProvisionedObject,
    ProvisionedRecord,
)
from walsender_bridge.postgres.client.dsn import parameters
from walsender_bridge.postgres.client.replication_connection import ReplicationConnection
from walsender_bridge.postgres.protocol.relation_name import relation_name, split_relation
from walsender_bridge.postgres.table_patterns import Chosen
from walsender_bridge.runtime.sql import load

#: Seconds that the server may wait for running transactions before it creates the slot.
SLOT_SECONDS = 60.0
_FLUSH = split_relation(FLUSH_TABLE)


def init(
    source: CaptureSource, admin: str | None = None, log: LogPosition | None = None
) -> list[ProvisionedObject]:
    """Create the objects that `source` lacks on its server; return them in the order of creation.

    `admin`: the parameters in which an administrator's connection string differs from the source's
    (`user=postgres`). `log`: the position of the source's stream, if known: nothing is created on another
    cluster (`DivergedError`), or if the slot is gone or was invalidated (`SlotError`). Raises the errors of
    `capture.source.prepare`, `SlotError`, `PrivilegeError`, and `DeadlineError` when running transactions delay the creation
    of the slot for too long.
    """
    maker = as_admin(source, admin)
    try:
        with capture.connect(maker) as connection:
            capture.check_cluster(connection, source, log)
            capture.check_slot_kept(connection, source, log)
            before = _recorded(connection, source)
            capture.prepare(connection, source)
            with connection.transaction():
                record = ProvisionedRecord(connection, source.slot, source.dsn)
                publication.add_matching(connection, source, record)
            if admin is not None:
                _prepare_role(connection, source)
            _make_functions(connection, source)
            slot = (
                [ProvisionedObject("slot", source.slot)] if _make_slot(connection, source) else []
            )
            found = [made for made in _recorded(connection, source) if made not in before]
            # The row may be left from an earlier slot, or the record may not be readable for this role.
            return found + [made for made in slot if made not in found]
    except UntrustedError:
        raise
    except PrivilegeError as error:
        raise PrivilegeError(
            error.what,
            where=error.where,
            repair="run tuskline init --admin user=..., or have an administrator run the output of "
            "`tuskline doctor --fix-sql`",
        ) from None


def _make_functions(connection: psycopg.Connection[Any], source: CaptureSource) -> None:
    """Create or upgrade the functions of sql/flush/functions.sql, as the owner of the schema's tables.

    They have the owner's privileges, and read its tables: with another owner, its tables could run code with these privileges.
    """
    record = ProvisionedRecord(connection, source.slot, source.dsn)
    with record.held():
        if record.owner != record.user:
            row = connection.execute(
                load("flush/may_act").encode(), {"role": record.owner}
            ).fetchone()
            if record.owner is None or row is None or not row[0]:
                return
            act = sql.SQL(load("provisioning/set_role")).format(role=sql.Identifier(record.owner))
            connection.execute(act)
        connection.execute(load("flush/functions").encode())
        channel = f"tuskline_{secrets.token_hex(16)}"
        connection.execute(load("flush/channel_make"), {"name": channel})


def withdraw(source: CaptureSource, admin: str | None = None) -> list[str]:
    """Remove from our own publication the tables that `tables` no longer match; return their names. `admin` as for `init`."""
    with capture.connect(as_admin(source, admin)) as connection:
        return publication.withdraw(connection, source)


def as_admin(source: CaptureSource, admin: str | None) -> CaptureSource:
    """The source with an administrator's connection string. Raises `ConfigError` if libpq cannot parse it."""
    if admin is None:
        return source
    try:
        own, over = parameters(source.dsn), parameters(admin)
    except ConfigError as error:
        raise ConfigError(error.what, where=source.name, repair=error.repair) from None
    if "user" in over or "service" in over:
        # The source role's password is not valid for another user.
        own.pop("password", None)
    return replace(source, dsn=make_conninfo("", **{**own, **over}))


def _recorded(
    connection: psycopg.Connection[Any], source: CaptureSource
) -> list[ProvisionedObject]:
    record = ProvisionedRecord(connection, source.slot, source.dsn)
    return [*record.own(), *record.shared()] if record.readable else []


# -- the role -------------------------------------------------------------------------------------------


def _prepare_role(connection: psycopg.Connection[Any], source: CaptureSource) -> None:
    """Create the source's role if it does not exist, and grant the privileges that it lacks."""
    login = login_of(source.dsn)
    if login.user == connection.info.user:
        return
    record = ProvisionedRecord(connection, source.slot, source.dsn)
    with connection.transaction():
        found = connection.execute(
            load("provisioning/attach_role").encode(), {"role": login.user}
        ).fetchone()
        if found is None:
            connection.execute(
                sql.SQL(load("provisioning/roles")).format(
                    role=sql.Identifier(login.user),
                    password=sql.Literal(verifier(connection, login)),
                )
            )
            record.add(ProvisionedObject("role", login.user))
        elif not (found[0] and found[1]):
            raise PrivilegeError(
                f"role {login.user} lacks LOGIN or REPLICATION",
                where=source.where,
                repair=f"run ALTER ROLE {login.user} LOGIN REPLICATION, or name a new role in the DSN",
            )
        for made in _missing_grants(connection, source, login.user):
            text = (
                "provisioning/roles_flush"
                if made.privilege == "UPDATE"
                else f"provisioning/roles_{made.kind}"
            )
            key = "relation" if made.kind == "table" else "name"
            connection.execute(
                sql.SQL(load(text)).format(
                    role=sql.Identifier(made.grantee), **{key: identifier(made)}
                )
            )
            record.add(made)


def verifier(
    connection: psycopg.Connection[Any], login: LoginRole, *, scram: bool = False
) -> str | None:
    """The password's verifier as the server stores it, so that the server's log does not show the password.

    `scram`: even where the server would store an MD5 hash, which suffices to log in.
    """
    if not login.password:
        return None
    algorithm = b"scram-sha-256" if scram else None
    digest = connection.pgconn.encrypt_password(
        login.password.encode(), login.user.encode(), algorithm
    )
    return digest.decode()


def _missing_grants(
    connection: psycopg.Connection[Any], source: CaptureSource, role: str
) -> Iterator[ProvisionedObject]:
    """The grants that the role lacks, each once."""
    names = {"role": role}
    row = connection.execute(load("provisioning/attach_role").encode(), names).fetchone()
    if row is not None and not row[2]:
        yield ProvisionedObject("database", connection.info.dbname, "CONNECT", role)
    row = connection.execute(load("provisioning/attach_own").encode(), names).fetchone()
    assert row is not None
    reachable, readable, writable, _, record_readable = row
    if not reachable:
        yield ProvisionedObject("schema", _FLUSH[0], "USAGE", role)
    if not readable:
        yield ProvisionedObject("table", FLUSH_TABLE, "SELECT", role)
    if not writable:
        yield ProvisionedObject("table", FLUSH_TABLE, "UPDATE", role)
    if not record_readable:
        # To read which publication its slot started with.
        yield ProvisionedObject("table", PROVISIONED_TABLE, "SELECT", role)
    schemas: set[str] = set()
    tables = copied(publication.survey(connection, source))
    for table in wanted_tables(connection, tables, role):
        if not table["reachable"] and table["schema"] not in schemas:
            schemas.add(table["schema"])
            yield ProvisionedObject("schema", table["schema"], "USAGE", role)
        if not table["readable"]:
            yield ProvisionedObject("table", table["full_name"], "SELECT", role)


def copied(chosen: Chosen) -> list[str]:
    """The tables that the role must be able to read: those matched, and others that are published."""
    return [table.name for table in (*chosen.wanted, *chosen.others)]


def wanted_tables(
    connection: psycopg.Connection[Any], tables: Iterable[str], role: str
) -> list[dict[str, Any]]:
    """These tables and their partitions, as sql/provisioning/attach_tables.sql describes them.

    `full_name` is the table's, `root` that of the named table it belongs to, both as `relation_name` writes them.
    """
    named = [split_relation(name) for name in tables]
    wanted = {"schemas": [s for s, _ in named], "tables": [t for _, t in named], "role": role}
    with connection.cursor(row_factory=dict_row) as cursor:
        found = cursor.execute(load("provisioning/attach_tables").encode(), wanted).fetchall()
    for table in found:
        table["root"] = relation_name(table.pop("root_schema"), table.pop("root_name"))
        table["full_name"] = relation_name(table["schema"], table["name"])
    return found


def identifier(made: ProvisionedObject) -> sql.Identifier:
    """The object's name, quoted."""
    tables = made.kind in {"table", "published"}
    return sql.Identifier(*(split_relation(made.name) if tables else (made.name,)))


# -- the slot -------------------------------------------------------------------------------------------


def _make_slot(connection: psycopg.Connection[Any], source: CaptureSource) -> bool:
    """Create the slot unless it exists, as the source's role, which will stream from it; return whether it was created."""
    try:
        if capture.slot_position(connection, source) is not None:
            return False
    except SlotInUseError:
        # Capture is already running.
        return False
    with _walsender(source) as walsender:
        walsender.create_slot(source.slot, timeout=SLOT_SECONDS)
    return True


@contextmanager
def _walsender(source: CaptureSource) -> Iterator[ReplicationConnection]:
    name = f"tuskline-init-{source.name}"
    with ReplicationConnection.connect(source.dsn, application_name=name) as walsender:
        yield walsender
