"""Evaluates a source's publication: what it has, what it lacks, and what it must not have. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from walsender_bridge.capture.publication import FLUSH_TABLE, is_kept, reattach
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.doctor.finding import Finding, Severity, counted
from walsender_bridge.doctor.settings import Facts, own_slot
from walsender_bridge.errors import Cause
from walsender_bridge.own_schema.provisioned import PROVISIONED_TABLE, ProvisionedObject
from walsender_bridge.postgres.protocol.relation_name import relation_name
from walsender_bridge.postgres.table_patterns import Choice, Chosen
from walsender_bridge.provisioning.fixes import block, comment, fix, publish, recorded
from walsender_bridge.runtime.sql import load

OK, WARNING, ERROR = Severity.OK, Severity.WARNING, Severity.ERROR
CHECK = "publication"
Table = dict[str, Any]


def left_out(chosen: Chosen, where: str) -> Iterator[Finding]:
    """The tables that a pattern or the default selects, and that are not published; entries that match nothing."""
    for entry in chosen.idle:
        yield Finding(
            "tables",
            where,
            f"the entry {entry!r} of `tables` matches no table that could be published",
            WARNING,
            repair="correct or remove it; partitions are matched by the name of their partitioned table",
        )
    for each in chosen.left_out:
        if each.table.published:
            # Another check reports the consequence.
            continue
        yield Finding(
            "tables left out",
            where,
            f"{each.table.name} {each.reason}",
            WARNING,
            repair=f"{each.repair}{f', {each.cost}' if each.cost else ''}; or exclude it in `tables`",
            # A repair with a cost is for the operator to decide, not for the script.
            fix=comment(f"{each.repair};"),
        )


def evaluate(
    facts: Facts, tables: Sequence[Table], source: CaptureSource, where: str
) -> Iterator[Finding]:
    """All findings about the publication. `tables`: rows of sql/provisioning/attach_tables.sql."""
    found = facts["publication"]
    if facts["other_publication"]:
        yield _dropped(facts["other_publication"], source, where)
    if found is None:
        yield from _absent(facts, tables, source, where)
        return
    chosen: Chosen = facts["chosen"]
    choice, name = Choice.of(source.tables), source.publication
    left = [op for op in ("insert", "update", "delete", "truncate") if not found[f"pub{op}"]]
    if left:
        yield Finding(
            CHECK,
            where,
            f"{name} does not publish {', '.join(left)}",
            ERROR,
            repair="publish insert, update, delete and truncate",
            fix=fix("fix/operations", publication=name),
            cause=Cause.PUBLICATION,
        )
    yield from _of_others(found, choice, source, where)
    sent = {relation_name(*names) for names in facts["published"]}
    named = [table.name for table in chosen.named if not table.published]
    named += [] if FLUSH_TABLE in sent else [FLUSH_TABLE]
    fit = [t.name for t in chosen.fit if not t.published] if is_kept(found, choice) else []
    if named or fit:
        yield Finding(
            CHECK,
            where,
            f"{name} lacks {', '.join([*named, *fit])}",
            WARNING,
            repair="run tuskline init, with --admin if the role may not add them",
            fix=publish(facts["version"], name, named, fit),
        )
    if found["ours"] and chosen.unmeant:
        yield Finding(
            CHECK,
            where,
            f"{name} has {', '.join(t.name for t in chosen.unmeant)}, which `tables` does not select",
            WARNING,
            repair="run tuskline init to remove them from it, or add them to `tables`",
        )
    if not left and not named and not fit:
        yield Finding(CHECK, where, f"{name} has {counted(len(facts['published']), 'table')}")
    yield _schema_changes(facts, where)


def _schema_changes(facts: Facts, where: str) -> Finding:
    """Whether the server records schema changes: it works without, at the cost of copies."""
    what = (
        "recorded: columns that are added, dropped, renamed or widened are followed without a copy"
    )
    if not facts["ddl_is_current"]:
        return Finding(
            "schema changes",
            where,
            "the function tuskline.record_ddl is not this version's; an earlier one can run code of other roles as its owner, a superuser",
            WARNING,
            repair="run tuskline init --record-ddl again, with --admin naming a superuser",
        )
    if not facts["records_ddl"]:
        what = (
            "not recorded: the log does not show which column was dropped or renamed, so most schema changes cause another copy"
            " of their table; `tuskline init --record-ddl` has an event trigger record them (docs/tables.md)"
        )
    return Finding("schema changes", where, what)


def _of_others(
    found: Facts, choice: Choice, source: CaptureSource, where: str
) -> Iterator[Finding]:
    """A publication that Tuskline does not maintain stays as it is, and may publish too much."""
    kinds = {"all tables": found["puballtables"], "whole schemas": found["schemas"]}
    whole = [kind for kind, is_so in kinds.items() if is_so]
    if whole:
        yield Finding(
            CHECK,
            where,
            f"{source.publication} was not created by this version, and publishes {' and '.join(whole)}: the server"
            " refuses UPDATEs and DELETEs of a table that is created there without a replica identity",
            WARNING,
            repair="move to a publication of Tuskline's own (docs/tables.md, Which tables)",
        )
    elif choice.is_default and not found["ours"]:
        yield Finding(
            CHECK,
            where,
            f"{source.publication} was not created by Tuskline, which adds only tables that `tables` names",
        )


def _dropped(why: str, source: CaptureSource, where: str) -> Finding:
    """No SQL: a publication that is created again by hand is not the one that the slot started with."""
    return Finding(
        CHECK,
        where,
        why,
        ERROR,
        repair=reattach(source),
        cause=Cause.PUBLICATION,
        # The log is needed for the repair, and other sources continue.
        prevents=False,
    )


def _absent(
    facts: Facts, tables: Sequence[Table], source: CaptureSource, where: str
) -> Iterator[Finding]:
    name = source.publication
    if own_slot(facts, source) is not None:
        if not facts["other_publication"]:
            what = f"{name} does not exist, but its slot does: no change can be decoded without the publication"
            yield _dropped(what, source, where)
        return
    if may_create(facts, tables):
        yield Finding(CHECK, where, f"{name} does not exist yet", repair="run tuskline init")
        return
    yield Finding(
        CHECK,
        where,
        f"{name} does not exist, and {facts['role']['name']} may not create it",
        ERROR,
        repair="run tuskline init --admin user=...",
        fix=_create(facts, source),
        cause=Cause.PRIVILEGE,
    )


def may_create(facts: Facts, tables: Sequence[Table]) -> bool:
    """Whether the source's role may create a publication of the selected tables."""
    if facts["role"]["superuser"]:
        return True
    wanted = {table.name for table in facts["chosen"].wanted}
    owns = all(table["owned"] for table in tables if table["full_name"] in wanted)
    return bool(facts["may_create"] and owns)


def _create(facts: Facts, source: CaptureSource) -> str:
    """The statements that `init --admin` would run, including the record, in one transaction.

    Without the role and its SELECT privileges: those are findings of their own.
    """
    chosen: Chosen = facts["chosen"]
    role, name = facts["role"]["name"], source.publication
    texts = [load("flush/send").strip(), fix("fix/guard"), load("flush/row").strip()]
    texts.append(load("flush/functions").strip())
    named = [*(table.name for table in chosen.named), FLUSH_TABLE]
    fit = [table.name for table in chosen.fit]
    texts.append(fix("publication/create", publication=name, tables=named, alone=fit))
    texts.append(fix("publication/comment", publication=name))
    if facts["version"] >= 130_000:
        texts.append(fix("publication/via_root", publication=name))
    created = [
        ProvisionedObject("schema", "tuskline"),
        ProvisionedObject("publication", name),
        ProvisionedObject("slot", source.slot),
    ]
    if not facts["role"]["there"]:
        created.append(ProvisionedObject("role", role))
    if not facts["role"]["connect"]:
        created.append(ProvisionedObject("database", facts["database"], "CONNECT", role))
    if not facts["role"]["superuser"]:
        created += flush_grants(role)
        texts += granted(flush_grants(role))
    texts += [recorded(each, source.slot) for each in created]
    return block([*texts, fix("fix/publication_oid", slot_value=source.slot, name_value=name)])


def flush_grants(role: str) -> list[ProvisionedObject]:
    """The privileges that the role needs in the schema `tuskline`."""
    return [
        ProvisionedObject("schema", "tuskline", "USAGE", role),
        ProvisionedObject("table", FLUSH_TABLE, "SELECT", role),
        ProvisionedObject("table", FLUSH_TABLE, "UPDATE", role),
        record_grant(role),
    ]


def record_grant(role: str) -> ProvisionedObject:
    """The privilege to read which publication the slot started with."""
    return ProvisionedObject("table", PROVISIONED_TABLE, "SELECT", role)


def granted(grants: Sequence[ProvisionedObject]) -> list[str]:
    """The statements that grant these."""
    found = []
    for grant in grants:
        text = (
            "provisioning/roles_flush"
            if grant.privilege == "UPDATE"
            else f"provisioning/roles_{grant.kind}"
        )
        key = "relation" if grant.kind == "table" else "name"
        found.append(fix(text, role=grant.grantee, **{key: grant.name}))
    return found
