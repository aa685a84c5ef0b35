"""The SQL printed with findings: texts of `sql/` with names filled in and quoted. Nothing is executed.

A DBA runs it with psql, and any role that can create a table chooses names in it. So every name is quoted, and
one with characters that a terminal, an editor or psql could interpret is written by its code points
(`U&"..."`, SQL syntax of the standard and of all supported majors).
"""

from collections.abc import Iterable, Sequence
from typing import Final

from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from walsender_bridge.capture.publication import misses_running_writers
from walsender_bridge.own_schema.provisioned import OF_ONE_SOURCE, ProvisionedObject
from walsender_bridge.postgres.protocol.relation_name import split_relation
from walsender_bridge.runtime.printable import printable
from walsender_bridge.runtime.sql import load

#: Settings of a DSN that are its role's.
_OF_THE_ROLE: Final = frozenset({"user", "password", "passfile", "application_name", "options"})


def fix(text: str, *, alone: Sequence[str] = (), **names: str | int | list[str] | None) -> str:
    """The statements of `sql/<text>.sql` with names filled in: `a.b` is a table, a list several of them.

    `alone`: tables to add to `tables` without those that inherit from them.
    """
    filled = {key: _composed(key, value) for key, value in names.items()}
    if alone:
        single = [_checked(f"ONLY {relation(name)}") for name in alone]
        filled["tables"] = sql.SQL(", ").join(
            [*([filled["tables"]] if names["tables"] else []), *single]
        )
    return sql.SQL(load(text)).format(**filled).as_string(None).strip()


def publish(
    version: int, publication: str, tables: Sequence[str], alone: Sequence[str] = ()
) -> str:
    """The SQL that adds tables to a publication on a server of this version, excluding writers where necessary.

    `alone`: see `fix`.
    """
    if misses_running_writers(version):
        locked = [*tables, *alone]
        return fix(
            "publication/add_alone",
            publication=publication,
            tables=[*tables],
            alone=alone,
            locked=locked,
        )
    return fix("publication/add", publication=publication, tables=[*tables], alone=alone)


def comment(text: str) -> str:
    """A one-line comment, whatever the text contains."""
    return f"-- {printable(text)}"


def connect(dsn: str) -> str:
    r"""Psql's `\connect` to a server as the user who runs the script: without the DSN's user and password."""
    known = {key: str(value) for key, value in conninfo_to_dict(dsn).items() if value is not None}
    if "service" not in known and known.get("user"):
        known.setdefault("dbname", known["user"])
    text = make_conninfo("", **{k: v for k, v in known.items() if k not in _OF_THE_ROLE})
    # Between quotes psql takes backslashes as C does; what is not printable has no place in a line.
    escaped = text.replace("\\", "\\\\").replace("'", "''")
    # A server that only defaults or a service name must not be overruled by the last connection's.
    reuse = "on" if {"host", "hostaddr"} & set(known) else "off"
    return f"\\connect -reuse-previous={reuse} '{printable(escaped)}'"


def quoted(name: str) -> str:
    """One name as an identifier of SQL, in printable characters."""
    if name.isprintable():
        return sql.Identifier(name).as_string(None)
    return 'U&"' + _code_points(name).replace('"', '""') + '"'


def relation(name: str) -> str:
    """A table, by `relation_name`'s text, as SQL writes it."""
    return ".".join(quoted(part) for part in split_relation(name))


def block(statements: Iterable[str]) -> str:
    """Wrap statements in one transaction, which fails if another role's code could run with the session's rights."""
    begun = ["BEGIN;", "SET LOCAL search_path = pg_catalog, pg_temp;", fix("fix/guard")]
    return "\n".join([*begun, *statements, "COMMIT;"])


def recorded(made: ProvisionedObject, slot: str) -> str:
    """The SQL that records an object, so that `tuskline detach` removes it; `slot`: of the source."""
    return fix(
        "fix/provisioned",
        slot_value=slot if made.kind in OF_ONE_SOURCE else "",
        kind_value=made.kind,
        name_value=made.name,
        privilege_value=made.privilege,
        grantee_value=made.grantee,
    )


def _composed(key: str, value: str | int | list[str] | None) -> sql.Composable:
    if value is None or isinstance(value, int):
        return sql.Literal(value)
    if key.endswith("value") or key == "password":
        return _literal(value) if isinstance(value, str) else sql.Literal(value)
    if isinstance(value, list):
        return sql.SQL(", ").join(_checked(relation(name)) for name in value)
    return _checked(relation(value) if key in {"relation", "table"} else quoted(value))


def _literal(value: str) -> sql.Composable:
    if value.isprintable():
        return sql.Literal(value)
    return _checked("U&'" + _code_points(value).replace("'", "''") + "'")


def _code_points(text: str) -> str:
    r"""Backslash and what is not printable as `\XXXX` or `\+XXXXXX`."""
    return "".join(
        each
        if each.isprintable() and each != "\\"
        else f"\\{ord(each):04X}"
        if ord(each) < 0x10000
        else f"\\+{ord(each):06X}"
        for each in text
    )


def _checked(quoted_text: str) -> sql.SQL:
    return sql.SQL(quoted_text)
