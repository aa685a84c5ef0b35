"""A source's publication: created or adopted, and kept in line with the source's `tables` (`table_patterns`).

A publication created by Tuskline is marked by its comment. Matching tables are added to it as they become publishable, and a
table that loses its replica identity is removed, since the server refuses its UPDATEs; `init` also removes tables that `tables`
no longer match. A publication created by someone else is never reduced: only tables that `tables` name or match are added.
Adding a table requires ownership of the table and of the publication: without it nothing is added, and `status` and `doctor`
name the table.

Publishing a table locks it until COMMIT; so it is evaluated again under the lock, where nothing can change it any more.
Where the server would keep omitting a table that is published while a transaction that has written to it runs
(`misses_running_writers`), a stronger lock excludes writers, so that no such transaction exists.

Each change of a slot is looked up in the publication as of that change. While no publication of that name exists, the server
refuses to decode (before 18), or omits the changes and only warns (18 and later). So a slot continues with the publication that
it started with, identified by OID, and never with another one of the same name (`publication_mismatch`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from walsender_bridge.errors import ConfigError, PrivilegeError, PublicationError
from walsender_bridge.own_schema.provisioned import ProvisionedObject, ProvisionedRecord
from walsender_bridge.postgres.protocol.relation_name import relation_name, split_relation
from walsender_bridge.postgres.table_patterns import CatalogTable, Choice, Chosen, choose
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.sql import load

if TYPE_CHECKING:
    from walsender_bridge.capture.source import CaptureSource

#: The table that a flush writes to; it is published with the others.
FLUSH_TABLE: Final = "tuskline.flush"
#: The first version that publishes partitions through their root.
VIA_ROOT_VERSION: Final = 130000
#: The first minor release of each major that distributes catalog invalidations to transactions in progress.
_TELLS_RUNNING: Final = {13: 130021, 14: 140018, 15: 150013, 16: 160009, 17: 170005}
#: Names listed in an error.
_SHOWN: Final = 10

Connection = psycopg.Connection[Any]

_log = logs.logger()


def facts(connection: Connection, source: "CaptureSource") -> dict[str, Any] | None:
    """The publication as sql/publication/source.sql describes it, or None if it does not exist."""
    names = {"publication": source.publication}
    rows = _rows(connection, "publication/source", names)
    return dict(rows[0][0]) if rows else None


def survey(connection: Connection, source: "CaptureSource") -> Chosen:
    """The tables that the source's `tables` currently match in its database."""
    choice = Choice.of(source.tables)
    names = choice.named
    wanted = {
        "schemas": [schema for schema, _ in names],
        "tables": [table for _, table in names],
        "publication": source.publication,
    }
    rows = _rows(connection, "publication/tables", wanted)
    misnamed: dict[str, list[str]] = {}
    for _, root, quoted in partitions_named_otherwise(connection, None):
        misnamed.setdefault(root, []).append(quoted)
    tables = [_found(row) for row in rows]
    tables = [replace(each, misnamed=tuple(misnamed.get(each.name, ()))) for each in tables]
    return choose(choice, tables, connection.info.server_version // 10_000)


def _rows(connection: Connection, text: str, names: dict[str, Any]) -> list[tuple[Any, ...]]:
    with connection.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(load(text).encode(), names).fetchall()


def _found(row: Sequence[Any]) -> CatalogTable:
    values: Any = (tuple(each) if isinstance(each, list) else each for each in row)
    return CatalogTable(*values)


def is_kept(found: dict[str, Any], choice: Choice) -> bool:
    """Whether matching tables are added to this publication as they become publishable."""
    return choice.follows and not found["puballtables"] and (found["ours"] or not choice.is_default)


# -- the publication that the slot started with ---------------------------------------------------------


def publication_mismatch(
    name: str, oid: int | None, recorded: int | None, *, began: bool, now_called: str | None = None
) -> str:
    """Why an existing slot cannot continue with its publication; empty if it can.

    `oid`: of the current publication of this name, None if there is none. `recorded`: of the one that the slot started with,
    None if unknown. `began`: whether the slot is known to have had one. `now_called`: the recorded one's new name.
    """
    if recorded in {None, oid} and (oid is not None or not began):
        return ""
    if now_called is not None:
        fate = f"renamed to {now_called!r}"
    else:
        fate = "dropped" if oid is None else "dropped and recreated"
    return f"publication {name!r} was {fate}: changes committed in between are missing"


def reattach(source: "CaptureSource") -> str:
    """The repair of a stream that cannot continue."""
    return f"tuskline reattach {source.name}"


def missing_publication(source: "CaptureSource", error: PublicationError) -> PublicationError:
    """The error of a server that lacks the publication for changes that it has to send."""
    if error.repair == reattach(source):
        return error
    what = f"the server cannot send changes that were committed while publication {source.publication!r} did not exist: {error.what}"
    return PublicationError(what, where=source.where, repair=reattach(source))


def recorded_fault(
    connection: Connection,
    source: "CaptureSource",
    record: ProvisionedRecord,
    found: dict[str, Any] | None,
) -> str:
    """`publication_mismatch` of the source's existing slot, as far as the record is readable. `found`: `facts`."""
    name = source.publication
    recorded = record.publication_oid(name)
    began = recorded is not None or (
        record.readable and ProvisionedObject("publication", name) in record.own()
    )
    oid = None if found is None else found["oid"]
    return publication_mismatch(
        name, oid, recorded, began=began, now_called=_called(connection, recorded)
    )


def check_same(connection: Connection, source: "CaptureSource", oid: int) -> None:
    """Raise `PublicationError` unless the source's publication still has this OID."""
    found = facts(connection, source)
    now = None if found is None else found["oid"]
    called = _called(connection, oid)
    why = publication_mismatch(source.publication, now, oid, began=True, now_called=called)
    if why:
        raise PublicationError(why, where=source.where, repair=reattach(source))


def _called(connection: Connection, oid: int | None) -> str | None:
    rows = _rows(connection, "publication/name", {"oid": oid})
    return str(rows[0][0]) if rows else None


# -- at init and at the start of each session -----------------------------------------------------------


def create_or_adopt(
    connection: Connection,
    source: "CaptureSource",
    record: ProvisionedRecord,
    *,
    has_slot: bool = False,
    has_history: bool = False,
) -> int:
    """Create the publication, or add the tables named one by one to an existing one; record and return its OID.

    `has_slot`: there is a slot, which must continue with the publication that it started with. `has_history`: the log has
    changes of it, so it had one. Raises `PublicationError`, `ConfigError`, `PrivilegeError`.
    """
    connection.execute(load("publication/lock_timeout").encode())
    found = facts(connection, source)
    if has_slot:
        why = recorded_fault(connection, source, record, found)
        if not why and found is None and has_history:
            why = publication_mismatch(source.publication, None, None, began=True)
        if why:
            raise PublicationError(why, where=source.where, repair=reattach(source))
    if found is None:
        _make(connection, source)
        record.add(ProvisionedObject("publication", source.publication))
        found = facts(connection, source)
        assert found is not None
    else:
        _adopt(connection, source, record, found)
    oid = int(found["oid"])
    record.keep_publication_oid(source.publication, oid)
    return oid


def _adopt(
    connection: Connection,
    source: "CaptureSource",
    record: ProvisionedRecord,
    found: dict[str, Any],
) -> None:
    missing = [op for op in ("insert", "update", "delete", "truncate") if not found[f"pub{op}"]]
    if missing:
        raise PublicationError(
            f"publication {source.publication!r} does not publish {', '.join(missing)}",
            where=source.where,
            repair=sql.SQL(load("fix/operations"))
            .format(publication=sql.Identifier(source.publication))
            .as_string()
            .strip(),
        )
    names = {"publication": source.publication}
    rows = _rows(connection, "publication/published", names)
    has_flush = FLUSH_TABLE in {relation_name(*row) for row in rows}
    chosen = survey(connection, source)
    absent = [table for table in chosen.named if not table.published]
    _check_named(connection, source, chosen, absent)
    added = [*(each.name for each in absent), *([] if has_flush else [FLUSH_TABLE])]
    if added:
        _publish(connection, "publication/add", source, added)
        _check_again(connection, source, absent, ())
    for name in added:
        record.add(ProvisionedObject("published", name, grantee=source.publication))


def _make(connection: Connection, source: "CaptureSource") -> None:
    chosen = survey(connection, source)
    _check_named(connection, source, chosen, chosen.named)
    _check_owned(connection, source, chosen.fit)
    named = [*(table.name for table in chosen.named), FLUSH_TABLE]
    _publish(connection, "publication/create", source, named, [t.name for t in chosen.fit])
    # Check again: another table may have taken a name before the table was published, which locks it until COMMIT.
    _check_again(connection, source, chosen.named, chosen.fit)
    _publish(connection, "publication/comment", source)
    if connection.info.server_version >= VIA_ROOT_VERSION:
        _publish(connection, "publication/via_root", source)


def add_matching(
    connection: Connection, source: "CaptureSource", record: ProvisionedRecord
) -> None:
    """Add all publishable tables that `tables` match, in the caller's transaction. Raises `PrivilegeError`."""
    found = facts(connection, source)
    if found is None or not is_kept(found, Choice.of(source.tables)):
        return
    fit = [table for table in survey(connection, source).fit if not table.published]
    if not fit:
        return
    _check_owned(connection, source, fit)
    connection.execute(load("publication/lock_timeout").encode())
    _publish(connection, "publication/add", source, (), [table.name for table in fit])
    _check_again(connection, source, (), fit)
    for table in fit:
        record.add(ProvisionedObject("published", table.name, grantee=source.publication))


def withdraw(connection: Connection, source: "CaptureSource") -> list[str]:
    """Remove from our own publication the tables that `tables` do not match, or whose UPDATEs the server refuses.

    Returns the tables removed.
    """
    found = facts(connection, source)
    if found is None or not found["ours"] or found["puballtables"]:
        return []
    chosen = survey(connection, source)
    names = sorted({table.name for table in (*chosen.unmeant, *chosen.harmed)})
    if names:
        with connection.transaction():
            connection.execute(load("publication/lock_timeout").encode())
            _publish(connection, "publication/remove", source, (), names)
    return names


# -- while capture runs ---------------------------------------------------------------------------------


def follow(connection: Connection, source: "CaptureSource") -> list[str]:
    """Add tables that have become publishable and remove those that lost their replica identity, as the role's rights allow.

    Tables are changed one by one: one that another session has locked is left for the next poll. Returns the names of the
    tables that could not be added.
    """
    found = facts(connection, source)
    if found is None or not found["owned"] or not is_kept(found, Choice.of(source.tables)):
        return []
    chosen = survey(connection, source)
    left = [
        table.name
        for table in chosen.fit
        if not table.published and table.owned
        if not _change(connection, source, table, "publication/add", records=not found["ours"])
    ]
    for table in chosen.harmed if found["ours"] else ():
        _change(connection, source, table, "publication/remove")
    return left


def _change(
    connection: Connection,
    source: "CaptureSource",
    table: CatalogTable,
    text: str,
    *,
    records: bool = False,
) -> bool:
    """Add or remove one table; return whether it is now as it should be."""
    try:
        with connection.transaction():
            connection.execute(load("publication/lock_timeout").encode())
            _publish(connection, text, source, (), [table.name])
            if text == "publication/add":
                _check_again(connection, source, (), [table])
            if records:
                record = ProvisionedRecord(connection, source.slot, source.dsn)
                record.add(ProvisionedObject("published", table.name, grantee=source.publication))
    except psycopg.errors.DuplicateObject:
        return True  # capture and `flush` may both add it
    except (
        PublicationError,
        psycopg.errors.LockNotAvailable,
        psycopg.errors.UndefinedTable,
    ) as error:
        _log.warning(
            "publication not changed", source=source.name, table=table.name, error=str(error)
        )
        return False
    _log.info("publication changed", source=source.name, table=table.name, by=text)
    return True


def misses_running_writers(version: int) -> bool:
    """Whether a server of this version may omit all changes of a table that was published while a transaction wrote to it.

    A transaction that began earlier is decoded with the catalog as of its start. Servers without the fix of May 2025
    (11 and 12 never received it) cache the result, that the table is not published, for the transactions that follow.
    """
    major = version // 10_000
    return version < _TELLS_RUNNING.get(major, 0) or major < min(_TELLS_RUNNING)


# -- checks ---------------------------------------------------------------------------------------------


def _check_named(
    connection: Connection, source: "CaptureSource", chosen: Chosen, tables: Iterable[CatalogTable]
) -> None:
    """Raise for a named table that does not exist, or whose publication would break an application."""
    tables = list(tables)
    if chosen.unknown:
        raise ConfigError(
            f"table does not exist: {', '.join(chosen.unknown)}",
            where=source.where,
            repair="write schema.table exactly as in the catalog",
        )
    unfit = [table.name for table in tables if table.kind not in {"r", "p"} or not table.logged]
    if unfit:
        raise PublicationError(
            f"not an ordinary, logged table: {', '.join(unfit)}",
            where=source.where,
            repair="remove it from `tables`",
        )
    bare = sorted({name for table in tables for name in (*table.bare, *table.children)})
    if bare:
        raise PublicationError(
            f"no replica identity: {', '.join(bare)}; once these tables are published, the server would refuse their "
            "UPDATEs and DELETEs",
            where=source.where,
            repair="; ".join(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in bare),
        )
    generated = sorted({column for table in tables for column in table.generated})
    if generated:
        raise PublicationError(
            f"replica identity contains generated columns, which are not sent: {', '.join(generated)}; PostgreSQL 18 and "
            "later would refuse UPDATEs and DELETEs once the tables are published",
            where=source.where,
            repair="give the table a primary key without them, and REPLICA IDENTITY DEFAULT",
        )
    _check_partitions(connection, source, [table.name for table in tables])


def _check_partitions(
    connection: Connection, source: "CaptureSource", tables: Sequence[str]
) -> None:
    """Raise `PublicationError` for partitions whose updates would not identify a row of their root."""
    found = partitions_named_otherwise(connection, tables)
    if found:
        raise PublicationError(
            f"replica identity differs from that of the partition root: {', '.join(name for name, *_ in found)}",
            where=source.where,
            repair="; ".join(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for *_, name in found),
        )


def _check_owned(
    connection: Connection, source: "CaptureSource", tables: Iterable[CatalogTable]
) -> None:
    foreign = [table.name for table in tables if not table.owned]
    if foreign:
        more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
        raise PrivilegeError(
            f"role {connection.info.user} does not own {', '.join(foreign[:_SHOWN])}{more}",
            where=source.where,
            repair="have the owner of the tables and of the publication add them",
        )


def _check_again(
    connection: Connection,
    source: "CaptureSource",
    named: Iterable[CatalogTable],
    fit: Iterable[CatalogTable],
) -> None:
    """Raise unless these tables, which are now locked, may still be published."""
    chosen = survey(connection, source)
    again = {table.name for table in named}
    _check_named(connection, source, chosen, [t for t in chosen.named if t.name in again])
    changed = {table.name for table in fit} - {table.name for table in chosen.fit}
    if changed:
        raise PublicationError(
            f"table changed while it was being published: {', '.join(sorted(changed))}",
            where=source.where,
            repair="try again",
        )


def partitions_named_otherwise(
    connection: Connection, tables: Sequence[str] | None
) -> list[tuple[str, str, str]]:
    """Partitions whose replica identity differs from that of the root they would be published through.

    Of these tables, or of all (None). Returns (root, partition, partition quoted for SQL). Before 13 no partition is
    published through its root.
    """
    if connection.info.server_version < VIA_ROOT_VERSION:
        return []
    named = [split_relation(name) for name in tables or ()]
    wanted = {
        "schemas": [schema for schema, _ in named],
        "tables": [name for _, name in named],
        "all": tables is None,
    }
    rows = _rows(connection, "publication/partition_identities", wanted)
    return [(relation_name(*row[:2]), relation_name(*row[2:4]), row[4]) for row in rows]


def _publish(
    connection: Connection,
    text: str,
    source: "CaptureSource",
    tables: Sequence[str] = (),
    alone: Sequence[str] = (),
) -> None:
    """`alone`: without the tables that inherit from them, each of which is evaluated by itself."""
    names: list[sql.Composable] = [sql.Identifier(*split_relation(name)) for name in tables]
    only: list[sql.Composable] = [sql.Identifier(*split_relation(name)) for name in alone]
    whole, only = [*names, *only], [sql.SQL("ONLY {}").format(name) for name in only]
    version = connection.info.server_version
    if text == "publication/add" and misses_running_writers(version):
        # Includes the partitions that are published through their root.
        locked = whole if version >= VIA_ROOT_VERSION else [*names, *only]
        connection.execute(
            sql.SQL(load("publication/lock_writers")).format(tables=sql.SQL(", ").join(locked))
        )
    connection.execute(
        sql.SQL(load(text)).format(
            publication=sql.Identifier(source.publication),
            tables=sql.SQL(", ").join([*names, *only]),
        )
    )
