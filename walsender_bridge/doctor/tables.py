"""Judgement on a source's publication and tables, from the facts of sql/attach_tables.sql."""

from collections.abc import Iterator, Sequence
from typing import Any

from walsender_bridge.capture.source import FLUSH_TABLE, Source
from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.doctor.fixes import fix
from walsender_bridge.doctor.settings import Facts, own_slot
from walsender_bridge.errors import Cause
from walsender_bridge.sql import load
from walsender_bridge.wire.relation_name import relation_name

OK, WARNING, ERROR = Severity.OK, Severity.WARNING, Severity.ERROR
Table = dict[str, Any]


def judge(facts: Facts, tables: Sequence[Table], source: Source, where: str) -> Iterator[Finding]:
    """All findings about what is published and copied."""
    roots = {table["root"] for table in tables}
    unknown = sorted(set(source.tables) - roots)
    if unknown:
        yield Finding(
            "tables",
            where,
            f"no such table: {', '.join(unknown)}",
            ERROR,
            repair="write schema.table as the server spells it",
            cause=Cause.CONFIG,
        )
    unsent = [table for table in tables if not table["publishable"]]
    unfit = sorted({t["root"] for t in unsent if t["root"] == _name(t) and source.tables})
    if unfit:
        yield Finding(
            "tables",
            where,
            f"not an ordinary, logged table: {', '.join(unfit)}",
            ERROR,
            repair="leave it out of `tables`",
            cause=Cause.PUBLICATION,
        )
    for table in unsent:
        if table["root"] != _name(table):
            yield _unlogged(table, where)
    if not unknown and not unfit:
        yield Finding("tables", where, f"{len(roots)} tables")
    good = [table for table in tables if table["publishable"]]
    yield from _identity(facts, good, where)
    yield from _keys(facts, where)
    yield from _security(facts, good, where)
    yield from _generated(facts, good, where)
    yield from _publication(facts, good, source, where)
    yield from _privileges(facts, good, where)


def _unlogged(table: Table, where: str) -> Finding:
    is_foreign = table["kind"] == "f"
    return Finding(
        "tables",
        where,
        f"{_name(table)}, a partition of {table['root']}, is {'a foreign table' if is_foreign else 'unlogged'}: changes of"
        " its rows are not in the WAL",
        ERROR,
        repair=f"ALTER TABLE ... DETACH PARTITION {table['quoted']}"
        if is_foreign
        else f"ALTER TABLE {table['quoted']} SET LOGGED",
        cause=Cause.PUBLICATION,
    )


def _name(table: Table) -> str:
    return str(table["full_name"])


def _identity(facts: Facts, tables: Sequence[Table], where: str) -> Iterator[Finding]:
    for table in tables:
        if not table["identified"]:
            published = table["quoted"] in facts["refused"]
            harm = (
                "the server refuses its UPDATEs and DELETEs, for it is published"
                if published
                else "once it is published, its UPDATEs and DELETEs are refused"
            )
            yield Finding(
                "replica identity",
                where,
                f"{_name(table)} has no replica identity: {harm}",
                ERROR,
                repair=f"ALTER TABLE {table['quoted']} REPLICA IDENTITY FULL, or give it a primary key",
                fix=fix("fix_identity", table=_name(table)),
                cause=Cause.PUBLICATION,
                prevents=not published,
            )
    if all(table["identified"] for table in tables):
        yield Finding("replica identity", where, "every table has one")


def _keys(facts: Facts, where: str) -> Iterator[Finding]:
    """What would name rows in the lake by another key than theirs."""
    via_root = facts["publication"] is None or facts["publication"].get("pubviaroot")
    for part, root, quoted in facts["misnamed"] if via_root else ():
        yield Finding(
            "replica identity",
            where,
            f"{part} has another replica identity than {root}, through which it is published: its updates and deletes "
            "would not say which row of it they are of",
            ERROR,
            repair=f"ALTER TABLE {quoted} REPLICA IDENTITY FULL",
            fix=fix("fix_identity", table=part),
            cause=Cause.PUBLICATION,
        )
    for name, columns in facts["unsent"]:
        yield Finding(
            "publication",
            where,
            f"{name} is published without a part of its key: {', '.join(columns)}",
            ERROR,
            repair="ALTER PUBLICATION ... SET TABLE, without a column list or with the whole key in it",
            cause=Cause.PUBLICATION,
        )


def _security(facts: Facts, tables: Sequence[Table], where: str) -> Iterator[Finding]:
    hidden = [_name(table) for table in tables if table["hidden"]]
    role = facts["role"]["name"]
    if hidden:
        yield Finding(
            "row security",
            where,
            f"policies may hide rows from {role} in {', '.join(hidden)}: the copy would fail",
            ERROR,
            repair=f"ALTER ROLE {role} BYPASSRLS",
            fix=fix("fix_bypass", role=role),
            cause=Cause.PRIVILEGE,
        )
    else:
        yield Finding("row security", where, "hides nothing")


def _generated(facts: Facts, tables: Sequence[Table], where: str) -> Iterator[Finding]:
    sent = (facts["publication"] or {}).get("pubgencols") == "s"
    columns = [f"{_name(table)}.{column}" for table in tables for column in table["generated"]]
    if columns and not sent:
        repair = "compute them in Spark"
        if facts["version"] >= 180_000:
            repair += ", or set publish_generated_columns = stored in the publication"
        yield Finding(
            "generated columns",
            where,
            f"left out of the stream and of the lake: {', '.join(columns)}",
            WARNING,
            repair=repair,
        )
    else:
        yield Finding("generated columns", where, "sent" if columns else "none")


def _publication(
    facts: Facts, tables: Sequence[Table], source: Source, where: str
) -> Iterator[Finding]:
    found, name = facts["publication"], source.publication
    if found is None:
        slot = own_slot(facts, source)
        if slot is not None:
            yield Finding(
                "publication",
                where,
                f"{name} is gone, and its slot is there: no change can be decoded without it",
                ERROR,
                repair="make it again; changes since it went are refused, and the source starts over",
                fix=_create(facts, tables, source),
                cause=Cause.PUBLICATION,
            )
        elif _may_make(facts, tables, source):
            yield Finding(
                "publication", where, f"{name} is not there yet", repair="`tuskline init` makes it"
            )
        else:
            yield Finding(
                "publication",
                where,
                f"{name} is not there, and {facts['role']['name']} may not make it",
                ERROR,
                repair="tuskline init --admin user=...",
                fix=_create(facts, tables, source),
                cause=Cause.PRIVILEGE,
            )
        return
    left_out = [op for op in ("insert", "update", "delete", "truncate") if not found[f"pub{op}"]]
    if left_out:
        yield Finding(
            "publication",
            where,
            f"{name} leaves out {', '.join(left_out)}",
            ERROR,
            repair="publish all four",
            fix=fix("fix_operations", publication=name),
            cause=Cause.PUBLICATION,
        )
    wanted = {*source.tables, FLUSH_TABLE} if source.tables else {FLUSH_TABLE}
    absent = sorted(wanted - {relation_name(*names) for names in facts["published"]})
    if absent:
        yield Finding(
            "publication",
            where,
            f"{name} lacks {', '.join(absent)}",
            WARNING,
            repair="`tuskline init` adds them",
            fix=fix("publication_add", publication=name, tables=absent),
        )
    if not left_out and not absent:
        yield Finding("publication", where, f"{name} has {len(facts['published'])} tables")


def _may_make(facts: Facts, tables: Sequence[Table], source: Source) -> bool:
    if facts["role"]["superuser"]:
        return True
    owns = all(table["owned"] for table in tables if table["root"] == _name(table))
    return bool(facts["may_create"] and source.tables and owns)


def _create(facts: Facts, tables: Sequence[Table], source: Source) -> str:
    """The statements that init would run, the record included: in one transaction, which ends with the guard's error."""
    texts = ["BEGIN;", "SET LOCAL search_path = pg_catalog, pg_temp;"]
    texts += [load(text).strip() for text in ("flush", "fix_guard", "flush_row")]
    if source.tables:
        names = [name for name in source.tables if any(t["root"] == name for t in tables)]
        texts.append(
            fix(
                "publication_create",
                publication=source.publication,
                tables=[*names, FLUSH_TABLE],
            )
        )
    else:
        texts.append(fix("publication_create_all", publication=source.publication))
    if facts["version"] >= 130_000:
        texts.append(fix("publication_via_root", publication=source.publication))
    texts.append(fix("fix_record", slot_value=source.slot, publication_value=source.publication))
    texts.append("COMMIT;")
    return "\n".join(texts)


def _privileges(facts: Facts, tables: Sequence[Table], where: str) -> Iterator[Finding]:
    role, own = facts["role"]["name"], facts["own"]
    grants = [
        fix("roles_schema", name=schema, role=role)
        for schema in sorted({table["schema"] for table in tables if not table["reachable"]})
    ]
    unread = [_name(table) for table in tables if not (table["readable"] and table["reachable"])]
    grants += [
        fix("roles_table", relation=_name(table), role=role)
        for table in tables
        if not table["readable"]
    ]
    if unread:
        yield Finding(
            "privileges",
            where,
            f"{role} may not read {', '.join(unread)}: the copy would fail",
            ERROR,
            repair="tuskline init --admin user=..., or GRANT SELECT",
            fix="\n".join(grants),
            cause=Cause.PRIVILEGE,
        )
    attached = facts["publication"] is not None
    if attached and not (own["reachable"] and own["writable"] and own["readable"]):
        yield Finding(
            "privileges",
            where,
            f"{role} may not write to {FLUSH_TABLE}: `tuskline flush` would fail",
            ERROR,
            repair="tuskline init --admin user=..., or GRANT UPDATE",
            fix="\n".join(
                [
                    fix("roles_schema", name="tuskline", role=role),
                    fix("roles_table", relation=FLUSH_TABLE, role=role),
                    fix("roles_flush", relation=FLUSH_TABLE, role=role),
                ]
            ),
            cause=Cause.PRIVILEGE,
        )
    elif not unread:
        yield Finding("privileges", where, f"{role} may read every table")
