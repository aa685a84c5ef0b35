"""A source's server, asked with the source's own role: no superuser is needed to hear what is wrong.

`examine` asks; the functions in `settings` and `tables` judge what it heard, and know no connection. So do `quorum` and
`safekeepers` what `examine_quorum` heard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from walsender_bridge.attach import own_tables
from walsender_bridge.attach.init import wanted_tables
from walsender_bridge.attach.quorum import Quorum, facts, session
from walsender_bridge.capture import source as capture
from walsender_bridge.capture.gate import Rule
from walsender_bridge.capture.source import Source
from walsender_bridge.doctor import gate, safekeepers, settings, tables, wal_room
from walsender_bridge.doctor import quorum as quorum_settings
from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import TusklineError, UntrustedError
from walsender_bridge.proposer.primary import PrimaryStream
from walsender_bridge.sql import load
from walsender_bridge.wire.connection import ReplicationConnection
from walsender_bridge.wire.relation_name import relation_name


def examine(source: Source) -> list[Finding]:
    """Everything there is to say about the source; a server that cannot be reached is one finding."""
    where = f"{source.name} ({source.where})"
    try:
        facts, found, untrusted = _ask(source)
    except TusklineError as error:
        return [failed("connection", where, error)]
    findings = [Finding("connection", where, f"PostgreSQL {facts['version_text']}")]
    findings += _walsender(source, where)
    findings += settings.judge(facts, source, where)
    findings += tables.judge(facts, found, source, where)
    if untrusted is not None:
        # A script that writes to what is there would run it.
        bare = [replace(each, fix="") for each in findings]
        return [*bare, failed("schema", where, untrusted)]
    return findings


def examine_quorum(
    quorum: Quorum,
    addresses: Sequence[str],
    max_laggard_bytes: int,
    told: Mapping[str, Any],
) -> list[Finding]:
    """The server as the quorum's, and the safekeepers at `addresses`, if any. `told`: the proposer's status, or nothing."""
    where = f"{quorum.source.name} ({quorum.where})"
    findings = [*safekeepers.proposer(told, where)]
    try:
        with session(quorum) as connection:
            found = facts(connection, quorum)
        findings += quorum_settings.judge(found, quorum, where, max_laggard_bytes)
        if found["in_recovery"] or not addresses:
            return findings
        with PrimaryStream.connect(quorum.source.dsn, application_name="tuskline-doctor") as asked:
            server, primary = asked.server_info(), asked.primary()
    except TusklineError as error:
        return [*findings, failed("quorum", where, error)]
    answers = safekeepers.reach(addresses, server)
    return [*findings, *safekeepers.judge(answers, server, primary, where)]


def examine_gate(source: Source, rule: Rule) -> list[Finding]:
    """Whether the candidates of its commit gate can be waited for."""
    where = f"{source.name} ({source.where})"
    try:
        with capture.connect(source) as connection:
            names = {"slots": list(rule.candidates)}
            row = connection.execute(load("gate_slots").encode(), names).fetchone()
            assert row is not None
    except TusklineError as error:
        return [failed(gate.CHECK, where, error)]
    return [*gate.judge(row[0], rule, where)]


def failed(check: str, where: str, error: TusklineError) -> Finding:
    """The finding that an error is."""
    return Finding(check, where, error.what, Severity.ERROR, repair=error.repair, cause=error.cause)


def _ask(
    source: Source,
) -> tuple[dict[str, Any], list[dict[str, Any]], UntrustedError | None]:
    """What the server says of itself and of the tables, and whose schema `tuskline` is, where that must not be used."""
    names = {"publication": source.publication, "slot": source.slot}
    with capture.connect(source) as connection:
        row = connection.execute(load("doctor_server").encode(), names).fetchone()
        assert row is not None
        facts: dict[str, Any] = row[0]
        facts["disk"]["free"] = wal_room.free_bytes(facts["disk"])
        role = facts["role"]["name"]
        own = connection.execute(load("attach_own").encode(), {"role": role}).fetchone()
        assert own is not None
        facts["own"] = dict(zip(("reachable", "readable", "writable"), own, strict=True))
        refused = connection.execute(load("published_unidentified").encode(), names).fetchall()
        facts["refused"] = [name for (name,) in refused]
        facts["misnamed"] = capture.partitions_named_otherwise(connection, source.tables)
        unsent = connection.execute(load("published_unsent").encode(), names).fetchall()
        facts["unsent"] = [
            (relation_name(schema, table), columns) for schema, table, columns in unsent
        ]
        try:
            own_tables.check(connection, source.dsn)
        except UntrustedError as error:
            return facts, wanted_tables(connection, source.tables, role), error
        return facts, wanted_tables(connection, source.tables, role), None


def _walsender(source: Source, where: str) -> list[Finding]:
    """Whether the role is let in to replicate: pg_hba.conf and REPLICATION, tried and not guessed."""
    try:
        name = f"tuskline-doctor-{source.name}"
        with ReplicationConnection.connect(source.dsn, application_name=name) as walsender:
            walsender.identify()
    except TusklineError as error:
        return [failed("replication connection", where, error)]
    return [Finding("replication connection", where, "a walsender answers")]
