"""A source's server, queried with the source's own role: diagnosis needs no superuser.

`examine` queries; the functions in `settings` and `tables` evaluate the facts, and know no connection. `quorum` and
`safekeepers` do the same for `examine_quorum`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psycopg

from walsender_bridge.capture import publication
from walsender_bridge.capture import source as capture
from walsender_bridge.capture.gate.core import Rule
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.capture.stream_record import KnownPosition
from walsender_bridge.doctor import (
    gate,
    host_based,
    safekeepers,
    settings,
    stream,
    tables,
    wal_room,
)
from walsender_bridge.doctor import quorum as quorum_settings
from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import AuthenticationError, TusklineError, UntrustedError
from walsender_bridge.own_schema import own_tables
from walsender_bridge.own_schema.login import login_of
from walsender_bridge.own_schema.provisioned import ProvisionedRecord
from walsender_bridge.postgres.client.replication_connection import ReplicationConnection
from walsender_bridge.postgres.protocol.relation_name import relation_name
from walsender_bridge.provisioning import schema_changes
from walsender_bridge.provisioning.init import as_admin, copied, verifier, wanted_tables
from walsender_bridge.provisioning.quorum import ConfiguredQuorum, facts_and_pending, session
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream
from walsender_bridge.quorum.proposer.status_record import ProposerStatus
from walsender_bridge.runtime.sql import load
from walsender_bridge.runtime.tls_files import TlsFiles


def examine(
    source: CaptureSource,
    admin: str | None = None,
    known: Callable[[], KnownPosition | None] = lambda: None,
) -> list[Finding]:
    """All findings about the source; a server that cannot be reached is one finding.

    `admin`: query as an administrator (`provisioning.init`), possibly before the source's role exists. `known` returns the
    position of its stream (`capture.stream_record`).
    """
    where = f"{source.name} ({source.where})"
    try:
        facts, found, untrusted = _ask(source, admin)
    except AuthenticationError as error:
        refused = failed("connection", where, error)
        hint = "if the role does not exist yet, run tuskline doctor --admin user=..., and tuskline init --admin user=..."
        return [
            replace(refused, repair=f"{error.repair}; {hint}" if admin is None else error.repair)
        ]
    except TusklineError as error:
        return [failed("connection", where, error)]
    findings = [Finding("connection", where, f"PostgreSQL {facts['version_text']}")]
    # The slot advances meanwhile: its position is read before that of the log, and the end of the WAL after that.
    position, server = known(), None
    if facts["role"]["there"]:
        tried, server = _walsender(source, where)
        findings += tried
    else:
        findings += host_based.evaluate(facts, where)
    diverged = [*stream.evaluate(facts, position, server, source, where)]
    if any(each.check == stream.CLUSTER for each in diverged):
        # All other findings are about a server that is not the source's.
        return [findings[0], *diverged]
    findings += diverged
    facts["begun"] = position is not None and position.log.begun
    findings += settings.evaluate(facts, source, where)
    findings += tables.evaluate(facts, found, source, where)
    if untrusted is not None:
        # A script that writes to this schema would run another role's code.
        bare = [replace(each, fix="") for each in findings]
        return [*bare, failed("schema", where, untrusted)]
    return findings


def examine_quorum(
    quorum: ConfiguredQuorum,
    addresses: Sequence[str],
    max_laggard_bytes: int,
    status: ProposerStatus | None,
    admin: str | None = None,
    tls: TlsFiles | None = None,
) -> list[Finding]:
    """The findings about the quorum's server, and about the safekeepers at `addresses`, if any. `status`: the proposer's.

    `admin` as for `examine`. `tls`: the certificate that is shown to safekeepers.
    """
    where = f"{quorum.source.name} ({quorum.where})"
    findings = [*safekeepers.proposer(status, where)]
    try:
        with session(quorum, admin) as connection:
            found = facts_and_pending(connection, quorum)
            found |= _of_role(connection, quorum.source, admin)
            if not found.get("there", True):
                rules = {**found, "hba": _rules(connection), "database": ""}
                findings += host_based.evaluate(rules, where, physical=True)
                addresses = ()
        findings += quorum_settings.evaluate(found, quorum, where, max_laggard_bytes)
        if found["in_recovery"] or not addresses:
            return findings
        with PrimaryStream.connect(quorum.source.dsn, application_name="tuskline-doctor") as asked:
            server, primary = asked.server_info(), asked.primary()
    except TusklineError as error:
        return [*findings, failed("quorum", where, error)]
    answers = safekeepers.reach(addresses, server, tls)
    return [*findings, *safekeepers.evaluate(answers, server, primary, where)]


def examine_gate(source: CaptureSource, rule: Rule, admin: str | None = None) -> list[Finding]:
    """The findings about the candidates of its commit gate. `admin` as for `examine`."""
    where = f"{source.name} ({source.where})"
    try:
        with capture.connect(as_admin(source, admin)) as connection:
            names = {"slots": list(rule.candidates)}
            row = connection.execute(load("gate/slots").encode(), names).fetchone()
            assert row is not None
            found = {**row[0], **_of_role(connection, source, admin)}
    except TusklineError as error:
        return [failed(gate.CHECK, where, error)]
    return [*gate.evaluate(found, rule, where)]


def _of_role(
    connection: psycopg.Connection[Any], source: CaptureSource, admin: str | None
) -> dict[str, Any]:
    """The privileges of the source's role, if an administrator is connected."""
    if admin is None:
        return {}
    names = {"role": login_of(source.dsn).user}
    row = connection.execute(load("doctor/role").encode(), names).fetchone()
    assert row is not None
    return dict(row[0])


def failed(check: str, where: str, error: TusklineError) -> Finding:
    """An error as a finding."""
    return Finding(check, where, error.what, Severity.ERROR, repair=error.repair, cause=error.cause)


def _ask(
    source: CaptureSource, admin: str | None
) -> tuple[dict[str, Any], list[dict[str, Any]], UntrustedError | None]:
    """The facts of the server and of the tables, and an error if the schema `tuskline` must not be trusted."""
    login = None if admin is None else login_of(source.dsn)
    with capture.connect(as_admin(source, admin)) as connection:
        role = connection.info.user if login is None else login.user
        names = {"publication": source.publication, "slot": source.slot, "role": role}
        row = connection.execute(load("doctor/server").encode(), names).fetchone()
        assert row is not None
        facts: dict[str, Any] = row[0]
        facts["disk"]["free"] = wal_room.free_bytes(facts["disk"])
        if login is not None and not facts["role"]["there"]:
            facts["role"]["secret"] = verifier(connection, login, scram=True)
        facts["hba"] = _rules(connection)
        facts["publication"] = publication.facts(connection, source)
        own = connection.execute(
            load("provisioning/attach_own").encode(), {"role": role}
        ).fetchone()
        assert own is not None
        rights = ("reachable", "readable", "writable", "recordable", "record_readable")
        facts["own"] = dict(zip(rights, own, strict=True))
        refused = connection.execute(
            load("doctor/published_unidentified").encode(), names
        ).fetchall()
        facts["refused"] = [name for (name,) in refused]
        facts["chosen"] = publication.survey(connection, source)
        tables = copied(facts["chosen"])
        facts["misnamed"] = publication.partitions_named_otherwise(connection, tables)
        unsent = connection.execute(load("doctor/published_unsent").encode(), names).fetchall()
        facts["unsent"] = [
            (relation_name(schema, table), columns) for schema, table, columns in unsent
        ]
        found = wanted_tables(connection, tables, role)
        recording = schema_changes.installed(connection, source.publication)
        facts["records_ddl"] = recording.recorded and recording.published
        facts["ddl_is_current"] = recording.is_current
        facts["other_publication"] = ""
        try:
            own_tables.check(connection, source.dsn)
            if settings.own_slot(facts, source) is not None:
                record = ProvisionedRecord(connection, source.slot, source.dsn)
                facts["other_publication"] = publication.recorded_fault(
                    connection, source, record, facts["publication"]
                )
        except UntrustedError as error:
            return facts, found, error
        return facts, found, None


def _rules(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    """The rules of pg_hba.conf; none if the session may not read them."""
    try:
        return connection.execute(load("doctor/hba").encode()).fetchall()
    except psycopg.errors.InsufficientPrivilege:
        return []


def _walsender(
    source: CaptureSource, where: str
) -> tuple[list[Finding], stream.WalsenderIdentity | None]:
    """Try a replication connection, instead of evaluating pg_hba.conf and REPLICATION. Also returns the server's timelines."""
    try:
        name = f"tuskline-doctor-{source.name}"
        with ReplicationConnection.connect(source.dsn, application_name=name) as walsender:
            identity = walsender.identify()
            found = stream.WalsenderIdentity(identity, walsender.history(identity.timeline))
    except TusklineError as error:
        return [failed("replication connection", where, error)], None
    return [Finding("replication connection", where, "a walsender answers")], found
