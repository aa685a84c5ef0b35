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
    """All findings about what is published and copied."""
    chosen: Chosen = facts["chosen"]
    unknown = sorted(chosen.unknown)
    if unknown:
        yield Finding(
            "tables",
            where,
            f"no such table: {', '.join(unknown)}",
            ERROR,
            repair="write schema.table as the server spells it",
            cause=Cause.CONFIG,
        )
    named = {table.name for table in chosen.named}
    unsent = [table for table in tables if not table["publishable"]]
    unfit = sorted({t["root"] for t in unsent if t["root"] == _name(t) and t["root"] in named})
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
                fix=fix("fix/identity", table=_name(table)),
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
            fix=fix("fix/identity", table=part),
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
            f"left out of the stream and of the lake: {', '.join(columns)}",
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
    # What is not published yet has no copy that could fail.
    pending = {table.name for table in facts["chosen"].wanted if attached and not table.published}
    lacking = [table for table in tables if not (table["readable"] and table["reachable"])]
    unread = [table for table in lacking if table["root"] not in pending]
    # The script makes the record before it comes to this.
    created = not (attached or publication.may_make(facts, tables))
    for some, harm, severity in (
        (unread, "the copy would fail", ERROR),
        (
            [table for table in lacking if table not in unread],
            "the copy would fail, once it is published",
            WARNING,
        ),
    ):
        if some:
            yield Finding(
                "privileges",
                where,
                f"{role} may not read {', '.join(_name(table) for table in some)}: {harm}",
                severity,
                repair="tuskline init --admin user=..., or GRANT SELECT",
                fix=_grants(facts, some, source.slot, created=created),
                cause=Cause.PRIVILEGE,
                # Once it has run, the others go on.
                prevents=own_slot(facts, source) is None,
            )
    needed = publication.flush_grants(role)
    if attached and not (own["reachable"] and own["writable"] and own["readable"]):
        yield Finding(
            "privileges",
            where,
            f"{role} may not write to {FLUSH_TABLE}: `tuskline flush` would fail",
            ERROR,
            repair="tuskline init --admin user=..., or GRANT UPDATE",
            fix=in_record(facts, publication.granted(needed), *needed),
            cause=Cause.PRIVILEGE,
        )
    elif attached and not own["record_readable"]:
        told = publication.record_grant(role)
        yield Finding(
            "privileges",
            where,
            f"{role} may not read {told.name}: a publication that is dropped and made again is not noticed while capture is down",
            WARNING,
            repair="tuskline init --admin user=..., or GRANT SELECT",
            fix=in_record(facts, publication.granted([told]), told),
        )
    elif not unread:
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
        return block([*statements, *(recorded(made, slot) for made in grants)])
    return in_record(facts, statements, *grants)
