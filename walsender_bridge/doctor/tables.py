"""Evaluates a source's tables, from the facts of sql/provisioning/attach_tables.sql."""

from collections.abc import Iterator, Sequence
from typing import Any

from walsender_bridge.capture.publication import FLUSH_TABLE
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.doctor import publication
from walsender_bridge.doctor.finding import Finding, Severity, counted
from walsender_bridge.doctor.settings import Facts, in_record, own_slot
from walsender_bridge.errors import Cause
from walsender_bridge.own_schema.provisioned import ProvisionedObject
from walsender_bridge.postgres.table_patterns import Chosen
from walsender_bridge.provisioning.fixes import block, fix, recorded

OK, WARNING, ERROR = Severity.OK, Severity.WARNING, Severity.ERROR
Table = dict[str, Any]


def evaluate(
    facts: Facts, tables: Sequence[Table], source: CaptureSource, where: str
) -> Iterator[Finding]:
    """All findings about the tables that are published and copied."""
    chosen: Chosen = facts["chosen"]
    unknown = sorted(chosen.unknown)
    if unknown:
        yield Finding(
            "tables",
            where,
            f"table does not exist: {', '.join(unknown)}",
            ERROR,
            repair="write schema.table as the server spells it",
            cause=Cause.CONFIG,
        )
    named = {table.name for table in chosen.named}
    unsent = [table for table in tables if not table["publishable"]]
    unsupported = sorted(
        {t["root"] for t in unsent if t["root"] == _name(t) and t["root"] in named}
    )
    if unsupported:
        yield Finding(
            "tables",
            where,
            f"not an ordinary, logged table: {', '.join(unsupported)}",
            ERROR,
            repair="remove it from `tables`",
            cause=Cause.PUBLICATION,
        )
    for table in unsent:
        if table["root"] != _name(table):
            yield _unlogged(table, where)
    if not unknown and not unsupported:
        yield Finding("tables", where, counted(len(chosen.wanted), "table"))
    yield from publication.left_out(chosen, where)
    good = [table for table in tables if table["publishable"]]
    yield from _identity(facts, good, where)
    yield from _keys(facts, where)
    yield from _security(facts, good, where)
    yield from _generated(facts, good, where)
    yield from publication.evaluate(facts, good, source, where)
    yield from _privileges(facts, good, source, where)


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
            effect = (
                "it is published, so the server refuses its UPDATEs and DELETEs"
                if published
                else "once it is published, the server refuses its UPDATEs and DELETEs"
            )
            yield Finding(
                "replica identity",
                where,
                f"{_name(table)} has no replica identity: {effect}",
                ERROR,
                repair=f"ALTER TABLE {table['quoted']} REPLICA IDENTITY FULL, or give it a primary key",
                fix=fix("fix/identity", table=_name(table)),
                cause=Cause.PUBLICATION,
                prevents=not published,
            )
    if all(table["identified"] for table in tables):
        yield Finding("replica identity", where, "every table has one")


def _keys(facts: Facts, where: str) -> Iterator[Finding]:
    """Tables whose changes would identify rows in the lake by a wrong key."""
    via_root = facts["publication"] is None or facts["publication"].get("pubviaroot")
    for part, root, quoted in facts["misnamed"] if via_root else ():
        yield Finding(
            "replica identity",
            where,
            f"{part} has another replica identity than {root}, through which it is published: its UPDATEs and DELETEs "
            "would not identify the row",
            ERROR,
            repair=f"ALTER TABLE {quoted} REPLICA IDENTITY FULL",
            fix=fix("fix/identity", table=part),
            cause=Cause.PUBLICATION,
        )
    for name, columns in facts["unsent"]:
        yield Finding(
            "publication",
            where,
            f"{name} is published without these columns of its key: {', '.join(columns)}",
            ERROR,
            repair="run ALTER PUBLICATION ... SET TABLE, without a column list or with all columns of the key",
            cause=Cause.PUBLICATION,
        )


def _security(facts: Facts, tables: Sequence[Table], where: str) -> Iterator[Finding]:
    hidden = [_name(table) for table in tables if table["hidden"]]
    role = facts["role"]["name"]
    if hidden:
        yield Finding(
            "row security",
            where,
            f"row-level security may hide rows of {', '.join(hidden)} from {role}: the copy would fail",
            ERROR,
            repair=f"ALTER ROLE {role} BYPASSRLS",
            fix=fix("fix/bypass", role=role),
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
            f"not sent, and so not in the lake: {', '.join(columns)}",
            WARNING,
            repair=repair,
        )
    else:
        yield Finding("generated columns", where, "sent" if columns else "none")


def _privileges(
    facts: Facts, tables: Sequence[Table], source: CaptureSource, where: str
) -> Iterator[Finding]:
    role, own = facts["role"]["name"], facts["own"]
    attached = facts["publication"] is not None
    # A table that is not published yet has no copy that could fail.
    pending = {table.name for table in facts["chosen"].wanted if attached and not table.published}
    unreadable = [table for table in tables if not (table["readable"] and table["reachable"])]
    failing = [table for table in unreadable if table["root"] not in pending]
    # The script creates the record before this statement.
    created = not (attached or publication.may_create(facts, tables))
    for some, effect, severity in (
        (failing, "the copy would fail", ERROR),
        (
            [table for table in unreadable if table not in failing],
            "the copy would fail, once it is published",
            WARNING,
        ),
    ):
        if some:
            yield Finding(
                "privileges",
                where,
                f"{role} may not read {', '.join(_name(table) for table in some)}: {effect}",
                severity,
                repair="run tuskline init --admin user=..., or GRANT SELECT",
                fix=_grants(facts, some, source.slot, created=created),
                cause=Cause.PRIVILEGE,
                # Once capture has started, the other tables continue.
                prevents=own_slot(facts, source) is None,
            )
    needed = publication.flush_grants(role)
    if attached and not (own["reachable"] and own["writable"] and own["readable"]):
        yield Finding(
            "privileges",
            where,
            f"{role} may not write to {FLUSH_TABLE}: `tuskline flush` would fail",
            ERROR,
            repair="run tuskline init --admin user=..., or GRANT UPDATE",
            fix=in_record(facts, publication.granted(needed), *needed),
            cause=Cause.PRIVILEGE,
        )
    elif attached and not own["record_readable"]:
        grant = publication.record_grant(role)
        yield Finding(
            "privileges",
            where,
            f"{role} may not read {grant.name}: a publication that is dropped and created again while capture is down goes undetected",
            WARNING,
            repair="run tuskline init --admin user=..., or GRANT SELECT",
            fix=in_record(facts, publication.granted([grant]), grant),
        )
    elif not failing:
        yield Finding("privileges", where, f"{role} may read every table")


def _grants(facts: Facts, tables: Sequence[Table], slot: str, *, created: bool) -> str:
    role = facts["role"]["name"]
    schemas = sorted({table["schema"] for table in tables if not table["reachable"]})
    grants = [ProvisionedObject("schema", schema, "USAGE", role) for schema in schemas]
    grants += [
        ProvisionedObject("table", _name(table), "SELECT", role)
        for table in tables
        if not table["readable"]
    ]
    statements = publication.granted(grants)
    if created:
        return block([*statements, *(recorded(grant, slot) for grant in grants)])
    return in_record(facts, statements, *grants)
