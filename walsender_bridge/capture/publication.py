"""A source's publication: made or adopted, and kept to what the source's `tables` mean (`table_patterns`).

One that Tuskline has made says so in its comment. To that, tables are added as they come to fit, and one that loses its
replica identity is taken out, since the server refuses its UPDATEs; `init` takes out what `tables` do not mean any more, too.
One that somebody else has made sends what it sends: only what `tables` name or match is added to it. Adding a table takes
the rights of its owner and of the publication's: a role without them adds nothing, and `status` and `doctor` name the table.

A table is locked by publishing it, until the commit; so it is judged once more then, and nothing can change that before.
Where the server would go on leaving out a table that is published while a transaction that has written to it runs
(`misses_running_writers`), the lock keeps writers away as well: there are none then.

A slot's changes are looked up in the publication as it was at each of them. While there was none of that name, the server
refuses to decode them (before 18), or leaves them out and only warns (from 18 on). So a slot goes on with the publication that
it began with, by its OID, and never with another one that has taken its name (`publication_mismatch`).
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

#: The table that a flush writes to; published with the others.
FLUSH_TABLE: Final = "tuskline.flush"
#: The first version that publishes partitions through their root.
VIA_ROOT_VERSION: Final = 130000
#: The first minor release of a major that tells transactions in progress of what others commit to the catalog.
_TELLS_RUNNING: Final = {13: 130021, 14: 140018, 15: 150013, 16: 160009, 17: 170005}
#: So many names are in an error.
_SHOWN: Final = 10

Connection = psycopg.Connection[Any]

_log = logs.logger(__name__)


def facts(connection: Connection, source: "CaptureSource") -> dict[str, Any] | None:
    """The publication as sql/publication/source.sql describes it; None: there is none."""
    names = {"publication": source.publication}
    rows = _rows(connection, "publication/source", names)
    return dict(rows[0][0]) if rows else None


def survey(connection: Connection, source: "CaptureSource") -> Chosen:
    """What the source's `tables` mean in its database now."""
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
    """Whether tables are added to this publication as they come to fit."""
    return choice.follows and not found["puballtables"] and (found["ours"] or not choice.is_default)


# -- is it the one that the slot began with? ------------------------------------------------------------


def publication_mismatch(
    name: str, oid: int | None, recorded: int | None, *, began: bool, now_called: str | None = None
) -> str:
    """Why a slot that is there cannot go on with its publication; empty: it can.

    `oid`: of the publication of this name now, None: there is none. `recorded`: of the one that the slot began with, None: not
    known. `began`: whether the slot surely had one. `now_called`: another name that the recorded one has now.
    """
    if recorded in {None, oid} and (oid is not None or not began):
        return ""
    if now_called is not None:
        fate = f"renamed to {now_called!r}"
    else:
        fate = "dropped" if oid is None else "dropped and made again"
    return f"publication {name!r} was {fate}: what was committed meanwhile is missing"


def reattach(source: "CaptureSource") -> str:
    """The repair of a stream that cannot go on."""
    return f"tuskline reattach {source.name}"


def missing_publication(source: "CaptureSource", error: PublicationError) -> PublicationError:
    """The error of a server that misses a publication for changes which it was to send."""
    if error.repair == reattach(source):
        return error
    what = f"publication {source.publication!r} was not there when changes were committed, which the server cannot send: {error.what}"
    return PublicationError(what, where=source.where, repair=reattach(source))


def recorded_fault(
    connection: Connection,
    source: "CaptureSource",
    record: ProvisionedRecord,
    found: dict[str, Any] | None,
) -> str:
    """`publication_mismatch` of the source's slot, which is there, as far as the record can be read. `found`: `facts`."""
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
    """Raise `PublicationError` unless the source's publication still is the one with this OID."""
    found = facts(connection, source)
    now = None if found is None else found["oid"]
    called = _called(connection, oid)
    why = publication_mismatch(source.publication, now, oid, began=True, now_called=called)
    if why:
        raise PublicationError(why, where=source.where, repair=reattach(source))


def _called(connection: Connection, oid: int | None) -> str | None:
    rows = _rows(connection, "publication/name", {"oid": oid})
    return str(rows[0][0]) if rows else None


# -- what init and each session of capture do -----------------------------------------------------------


def create_or_adopt(
    connection: Connection,
    source: "CaptureSource",
    record: ProvisionedRecord,
    *,
    has_slot: bool = False,
    has_history: bool = False,
) -> int:
    """Make the publication, or add to one that is there what `tables` name one by one; its OID, which is recorded.

    `has_slot`: there is a slot, which has to go on with the publication that it began with. `has_history`: and a log of its
    changes, so it had one. Raises `PublicationError`, `ConfigError`, `PrivilegeError`.
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
            f"publication {source.publication!r} leaves out {', '.join(missing)}",
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
    # Once more: another table may have taken a name before it was published, which locks it until the commit.
    _check_again(connection, source, chosen.named, chosen.fit)
    _publish(connection, "publication/comment", source)
    if connection.info.server_version >= VIA_ROOT_VERSION:
        _publish(connection, "publication/via_root", source)


def add_matching(
    connection: Connection, source: "CaptureSource", record: ProvisionedRecord
) -> None:
    """Add all that `tables` match and that fits, in the transaction of the caller. Raises `PrivilegeError`."""
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
    """Take out of a publication of ours what `tables` do not mean, or the server refuses UPDATEs of; which tables."""
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


# -- what goes on while capture runs --------------------------------------------------------------------


def follow(connection: Connection, source: "CaptureSource") -> list[str]:
    """Add what has come to fit, and take out what has lost its replica identity, as far as the role may.

    One by one: a table that somebody else has locked is left for the next time. Returns the names of those to be added
    that were left.
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
    """Whether the table is as it should be now."""
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
    """Whether a server of this version may leave out all changes of a table that was published while somebody wrote to it.

    A transaction that had begun before is decoded with the catalog of its beginning. Servers without the repair of May 2025
    (11 and 12 never had it) keep what they have found there, that the table is not published, for those that follow.
    """
    major = version // 10_000
    return version < _TELLS_RUNNING.get(major, 0) or major < min(_TELLS_RUNNING)


# -- checks ---------------------------------------------------------------------------------------------


def _check_named(
    connection: Connection, source: "CaptureSource", chosen: Chosen, tables: Iterable[CatalogTable]
) -> None:
    """Raise for a table that is named and is not there, or whose publishing would break an application."""
    tables = list(tables)
    if chosen.unknown:
        raise ConfigError(
            f"no such table: {', '.join(chosen.unknown)}",
            where=source.where,
            repair="write schema.table as the server spells it",
        )
    unfit = [table.name for table in tables if table.kind not in {"r", "p"} or not table.logged]
    if unfit:
        raise PublicationError(
            f"not an ordinary, logged table: {', '.join(unfit)}",
            where=source.where,
            repair="leave it out of `tables`",
        )
    bare = sorted({name for table in tables for name in (*table.bare, *table.children)})
    if bare:
        raise PublicationError(
            f"without a replica identity: {', '.join(bare)}; once published, their UPDATEs and "
            "DELETEs would be refused",
            where=source.where,
            repair="; ".join(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in bare),
        )
    generated = sorted({column for table in tables for column in table.generated})
    if generated:
        raise PublicationError(
            f"generated columns, which are not sent, in a replica identity: {', '.join(generated)}; from PostgreSQL 18 on "
            "UPDATEs and DELETEs would be refused once they are published",
            where=source.where,
            repair="give the table a primary key without them, and REPLICA IDENTITY DEFAULT",
        )
    _check_partitions(connection, source, [table.name for table in tables])


def _check_partitions(
    connection: Connection, source: "CaptureSource", tables: Sequence[str]
) -> None:
    """Raise `PublicationError` for partitions by whose updates no row of their table would be found."""
    found = partitions_named_otherwise(connection, tables)
    if found:
        raise PublicationError(
            f"another replica identity than the table that it is published through: {', '.join(name for name, *_ in found)}",
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
            repair="an owner of the tables and of the publication adds them",
        )


def _check_again(
    connection: Connection,
    source: "CaptureSource",
    named: Iterable[CatalogTable],
    fit: Iterable[CatalogTable],
) -> None:
    """Raise unless these tables may still be published; they are locked by now."""
    chosen = survey(connection, source)
    again = {table.name for table in named}
    _check_named(connection, source, chosen, [t for t in chosen.named if t.name in again])
    changed = {table.name for table in fit} - {table.name for table in chosen.fit}
    if changed:
        raise PublicationError(
            f"changed while it was published: {', '.join(sorted(changed))}",
            where=source.where,
            repair="do it again",
        )


def partitions_named_otherwise(
    connection: Connection, tables: Sequence[str] | None
) -> list[tuple[str, str, str]]:
    """Partitions, and the tables whose rows they would name by other columns if published through them.

    Of these tables, or of all (None); third, the partition as SQL writes it. Before 13 nothing is published so.
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
    """`alone`: without the tables that inherit from them, each of which is judged by itself."""
    names: list[sql.Composable] = [sql.Identifier(*split_relation(name)) for name in tables]
    only: list[sql.Composable] = [sql.Identifier(*split_relation(name)) for name in alone]
    whole, only = [*names, *only], [sql.SQL("ONLY {}").format(name) for name in only]
    version = connection.info.server_version
    if text == "publication/add" and misses_running_writers(version):
        # Partitions, too, that are published through their root.
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
