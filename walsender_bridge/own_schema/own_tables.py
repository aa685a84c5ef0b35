"""Checks that a session can safely use the schema `tuskline` and its tables, and keeps them unchanged while it does.

A trigger, default, policy or rule that a table's owner adds runs with the rights of the session that uses the table, and
any role with the right to create schemas in the database could have created these first. Invariant: a session uses them only if

- the session trusts their owners anyway (itself, superusers; sql/own_schema/owners.sql), or
- they belong to the source's own role, which may attach by itself, and are used by a superuser; they are then verified to be
  exactly as created by sql/flush/send.sql, which runs no code, and are locked against redefinition, and the schema against
  renaming, from before the check until the end of the transaction that uses them.

An administrator without superuser rights cannot lock the schema's name, so the second rule does not apply to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import psycopg
from psycopg import sql

from walsender_bridge.errors import UntrustedError
from walsender_bridge.own_schema.login import login_of
from walsender_bridge.postgres.client.replication_connection import describe
from walsender_bridge.runtime.sql import load

SCHEMA = "tuskline"
_DROP = f"DROP SCHEMA {SCHEMA} CASCADE"


@dataclass(frozen=True, slots=True)
class Owned:
    """A row of sql/own_schema/owners.sql: `name` (of the schema, or a table) is `owner`'s, for a session of the role `user`."""

    name: str
    owner: str
    trusted: bool
    by_superuser: bool
    user: str


def check(connection: psycopg.Connection[Any], dsn: str) -> None:
    """Raise `UntrustedError` unless the session can safely use the schema until the end of the current transaction.

    `dsn` is the source's own, whichever role has connected. The schema does not exist before the first `init`.
    """
    before = _owned(connection)
    if all(each.trusted for each in before):
        return
    role = login_of(dsn).user
    _refuse_strangers(before, role, describe(dsn))
    connection.execute(load("own_schema/hold").encode())
    tables = [sql.Identifier(*each.name.split(".")) for each in before if "." in each.name]
    if tables:
        lock = sql.SQL(load("own_schema/lock")).format(tables=sql.SQL(", ").join(tables))
        connection.execute(lock)
    held = _owned(connection)
    _refuse_strangers(held, role, describe(dsn))
    rows = connection.execute(load("own_schema/unlike").encode()).fetchall()
    found = [text for (text,) in rows]
    if [each.name for each in held] != [each.name for each in before]:
        found.append("they are being replaced")
    if found:
        raise UntrustedError(
            f"objects of role {role} in schema {SCHEMA} could run code with the rights of {held[0].user}: {', '.join(found)}",
            where=describe(dsn),
            repair=f"remove them as role {role}; or run {_DROP}, which runs no code, and drop by hand what tuskline.provisioned listed",
        )


def _owned(connection: psycopg.Connection[Any]) -> list[Owned]:
    return [Owned(*row) for row in connection.execute(load("own_schema/owners").encode())]


def _refuse_strangers(owned: Sequence[Owned], role: str, where: str) -> None:
    for each in owned:
        if not (each.trusted or (each.by_superuser and each.owner == role)):
            _refuse(each, where)


def _refuse(owned: Owned, where: str) -> NoReturn:
    raise UntrustedError(
        f"{owned.name} belongs to role {owned.owner}, whose code would run with the rights of {owned.user}",
        where=where,
        repair=f"if that role attached a source of this database, run `tuskline detach` as that role; if not, {_DROP} as a "
        "superuser, which runs no code; then `tuskline init --admin user=...` with a superuser",
    )
