"""Evaluates a primary and its failover candidates as hosts of logical slots, from the facts of sql/doctor/slots.sql.

No error here prevents `up` from starting: without copies, everything continues as long as the primary lives, and `slots
status` shows which copy is not ready.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import psycopg

from walsender_bridge.doctor import upstream, wal_room
from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import Cause, ConnectionFailedError, TusklineError
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.client.replication_connection import describe, pinned_conninfo
from walsender_bridge.postgres.protocol.refusals import connection_error, server_error
from walsender_bridge.provisioning.fixes import fix
from walsender_bridge.runtime.sql import load

OK, WARNING, ERROR = Severity.OK, Severity.WARNING, Severity.ERROR
Facts = dict[str, Any]

#: The first minor of a major in which advancing a slot does not release catalog rows too early (notes of 17.5).
FIXED_IN: Final = {13: 21, 14: 18, 15: 13, 16: 9, 17: 5}
#: The first major that synchronizes slots by itself.
NATIVE: Final = 17
#: Free slots needed in addition to the copies: a rename temporarily uses one.
_RENAME: Final = 1


def ask(dsn: str) -> Facts:
    """The facts of the server. Raises `ConnectionFailedError` and similar errors."""
    where = describe(dsn)
    try:
        conninfo = pinned_conninfo(dsn, application_name="tuskline-doctor")
        with BoundedConnection.connect(conninfo, autocommit=True) as connection:
            row = connection.execute(load("doctor/slots").encode()).fetchone()
    except psycopg.Error as error:
        if error.sqlstate is None:
            raise connection_error(str(error), where) from None
        raise server_error(error.sqlstate, str(error.diag.message_primary), where) from None
    if row is None:
        raise ConnectionFailedError("the server returned no row", where=where)
    found: Facts = row[0]
    found["disk"]["free"] = wal_room.free_bytes(found["disk"])
    return found


def examine(primary_dsn: str, candidates: dict[str, tuple[str, str]]) -> Iterator[Finding]:
    """All findings about the primary and each candidate (`name: (dsn, physical slot)`).

    All are queried in parallel: several that hang take no longer than one.
    """
    servers = [primary_dsn, *(dsn for dsn, _ in candidates.values())]
    with ThreadPoolExecutor(max_workers=len(servers)) as threads:
        answer, *others = threads.map(_answer, servers)
    where = f"slots ({describe(primary_dsn)})"
    primary: Facts | None = None
    if isinstance(answer, TusklineError):
        yield _failed(where, answer)
    else:
        primary = answer
        yield from evaluate_primary(primary, {slot for _, slot in candidates.values()}, where)
    for (name, (dsn, slot)), standby in zip(candidates.items(), others, strict=True):
        where = f"candidate {name} ({describe(dsn)})"
        if isinstance(standby, TusklineError):
            yield _failed(where, standby)
        else:
            yield from evaluate_standby(standby, primary, slot, where)
            if standby["in_recovery"]:
                found = upstream.ask(primary_dsn, standby)
                system = None if primary is None else primary["system_id"]
                yield from upstream.evaluate(standby, found, slot, system, where)


def _answer(dsn: str) -> Facts | TusklineError:
    """The facts of the server, or the error."""
    try:
        return ask(dsn)
    except TusklineError as error:
        return error


def evaluate_primary(facts: Facts, physical: set[str], where: str) -> Iterator[Finding]:
    """All findings about the primary. `physical`: the slots that the candidates stream from."""
    yield from _version(facts, where)
    yield from _wal_level(facts, where)
    yield from _role(facts, where, replication=False)
    yield from _extension(facts, where, facts["database"])
    if facts["in_recovery"]:
        yield _error("primary", where, "the server is a standby", "set [slots] dsn to the primary")
        return
    yield from _idle(facts["settings"], where, standby=False)
    yield from _disk(facts, where)
    slots = {slot["slot_name"]: slot for slot in facts["slots"]}
    for name in sorted(physical):
        slot = slots.get(name)
        if slot is None or slot["slot_type"] != "physical":
            yield _error(
                "physical slot",
                where,
                f"physical slot {name} does not exist",
                f"run SELECT pg_create_physical_replication_slot('{name}', true)",
                cause=Cause.SLOT,
                fix_sql=fix("fix/physical_slot", slot_value=name),
            )
        elif slot.get("wal_status") == "lost":
            yield _error(
                "physical slot",
                where,
                f"{name} is lost: its standby may lack WAL",
                "drop it, create it again, and check that the standby streams",
                cause=Cause.SLOT,
            )
        elif not slot["active"]:
            yield Finding(
                "physical slot",
                where,
                f"{name} is not active: its standby is down, or uses another slot",
                WARNING,
                repair=f"set primary_slot_name = '{name}' on the standby, and start it",
            )
        else:
            yield Finding("physical slot", where, f"{name} is in use")


def evaluate_standby(
    facts: Facts, primary: Facts | None, slot: str, where: str
) -> Iterator[Finding]:
    """All findings about a candidate that streams from the physical slot `slot`. `primary`: None if it did not answer."""
    settings = facts["settings"]
    yield from _version(facts, where)
    if not facts["in_recovery"]:
        yield Finding(
            "standby",
            where,
            "the server is not a standby: it was promoted, or never was one",
            WARNING,
            repair="remove it from the candidates of [slots], or set [slots] dsn to it",
        )
        return
    if primary is not None and primary["system_id"] != facts["system_id"]:
        yield _error(
            "standby",
            where,
            "it belongs to another cluster than the primary",
            "configure a standby of that primary, created with pg_basebackup",
        )
    yield from _wal_level(facts, where)
    yield from _feedback(settings, where)
    yield from _slot_name(facts, slot, where)
    yield from _room(facts, primary, where)
    yield from _plugins(settings, primary, where)
    yield from _idle(settings, where, standby=True)
    yield from _disk(facts, where)
    yield from _role(facts, where, replication=True)
    # Needed even if PostgreSQL synchronizes the slots: it shows the evidence for the proof.
    yield from _extension(facts, where, primary["database"] if primary is not None else "")
    if settings.get("sync_replication_slots") == "on":
        yield from _native(facts, where)


def _error(
    check: str,
    where: str,
    what: str,
    repair: str,
    *,
    cause: Cause = Cause.SERVER_SETTING,
    fix_sql: str = "",
) -> Finding:
    return Finding(
        check, where, what, ERROR, repair=repair, cause=cause, fix=fix_sql, prevents=False
    )


def _failed(where: str, error: TusklineError) -> Finding:
    return _error("connection", where, error.what, error.repair, cause=error.cause)


def _version(facts: Facts, where: str) -> Iterator[Finding]:
    major, minor = divmod(facts["version"], 10_000)
    text = facts["version_text"]
    if major < 13:
        yield Finding(
            "minor version",
            where,
            f"{text}: advancing a slot may release catalog rows too early, and no minor of {major} fixes that",
            WARNING,
            repair="upgrade to a newer major",
        )
    elif minor < FIXED_IN.get(major, 0):
        yield Finding(
            "minor version",
            where,
            f"{text}: advancing a slot may release catalog rows too early",
            WARNING,
            repair=f"install {major}.{FIXED_IN[major]} or later",
        )
    else:
        yield Finding("version", where, f"PostgreSQL {text}")


def _wal_level(facts: Facts, where: str) -> Iterator[Finding]:
    level = facts["settings"]["wal_level"]
    if level == "logical":
        yield Finding("wal_level", where, "logical")
    else:
        yield _error(
            "wal_level",
            where,
            f"wal_level is {level}, but logical slots require logical",
            "set wal_level = logical on the primary and on every candidate, and restart them",
        )


def _feedback(settings: Facts, where: str) -> Iterator[Finding]:
    if settings["hot_standby_feedback"] != "on":
        yield _error(
            "hot_standby_feedback",
            where,
            "off: the primary may remove catalog rows that copies need",
            "set hot_standby_feedback = on and reload",
        )
    elif int(settings["wal_receiver_status_interval"]) == 0:
        yield _error(
            "hot_standby_feedback",
            where,
            "wal_receiver_status_interval is 0: the standby sends no feedback to the primary",
            "set wal_receiver_status_interval = 1s and reload",
        )
    else:
        yield Finding("hot_standby_feedback", where, "on")


def _slot_name(facts: Facts, slot: str, where: str) -> Iterator[Finding]:
    name = facts["settings"].get("primary_slot_name") or facts["receiver_slot"]
    if not name:
        yield _error(
            "primary_slot_name",
            where,
            "empty: while the standby is down, the primary does not retain what its copies need",
            f"set primary_slot_name = '{slot}' and reload",
        )
    elif name != slot:
        yield _error(
            "primary_slot_name",
            where,
            f"it streams from slot {name}, but [slots] names {slot}",
            f"set primary_slot_name = '{slot}' there, or slot = \"{name}\" here",
            cause=Cause.CONFIG,
        )
    else:
        yield Finding("primary_slot_name", where, name)


def _to_keep(primary: Facts | None) -> list[Facts]:
    """The primary's slots that have copies; none if it did not answer."""
    slots = primary["slots"] if primary is not None else []
    return [s for s in slots if s["slot_type"] == "logical" and not s["temporary"]]


def _room(facts: Facts, primary: Facts | None, where: str) -> Iterator[Finding]:
    limit = int(facts["settings"]["max_replication_slots"])
    used = {slot["slot_name"] for slot in facts["slots"]}
    needed = {s["slot_name"] for s in _to_keep(primary)}
    wanted = len(used | needed) + _RENAME
    if wanted > limit:
        yield _error(
            "max_replication_slots",
            where,
            f"{limit} are too few for {len(needed)} copies, {len(used - needed)} other slots, and a temporary one",
            f"set max_replication_slots = {wanted} or more and restart the standby",
        )
    else:
        yield Finding(
            "max_replication_slots", where, f"{limit - wanted + _RENAME} of {limit} are free"
        )


def _idle(settings: Facts, where: str, *, standby: bool) -> Iterator[Finding]:
    """Whether idle slots are invalidated (18), and thus every copy before a promotion."""
    seconds = int(settings.get("idle_replication_slot_timeout") or 0)
    if not seconds:
        return
    what, repair = (
        (
            "a copy that is idle for that long is invalidated by the next checkpoint or a promotion",
            "set it to 0 here and reload, or keep the controller running, which uses each copy often enough",
        )
        if standby
        else (
            "a candidate that is down for that long loses its physical slot, and a client its logical slot",
            "set it to 0 and reload, or to more than the longest absence",
        )
    )
    yield Finding(
        "idle_replication_slot_timeout", where, f"{seconds} s: {what}", WARNING, repair=repair
    )


def _disk(facts: Facts, where: str) -> Iterator[Finding]:
    limit = facts["settings"].get("max_slot_wal_keep_size")
    yield from wal_room.evaluate(None if limit is None else int(limit), facts["disk"], where)


def _plugins(settings: Facts, primary: Facts | None, where: str) -> Iterator[Finding]:
    """Whether the standby allows the plugin of each copy: the minor releases of 2026 have a list of plugins."""
    text = settings.get("output_plugin_libraries")
    if text is None or primary is None:
        return
    listed = {name.strip().strip('"') for name in text.split(",")}
    used = {s["plugin"] for s in _to_keep(primary)}
    if missing := sorted(used - listed):
        yield _error(
            "output_plugin_libraries",
            where,
            f"it does not list {', '.join(missing)}, which slots of the primary use: they cannot be copied",
            f"set output_plugin_libraries = '{', '.join(sorted(listed - {''} | used))}' and reload",
        )
    else:
        yield Finding("output_plugin_libraries", where, text)


def _role(facts: Facts, where: str, *, replication: bool) -> Iterator[Finding]:
    role = facts["role"]
    name = role["name"]
    if role["superuser"]:
        yield Finding("role", where, f"{name} is a superuser")
        return
    if replication and not role["replication"]:
        yield _error(
            "role",
            where,
            f"{name} may not advance slots",
            f"ALTER ROLE {name} REPLICATION, on the primary",
            cause=Cause.PRIVILEGE,
            fix_sql=fix("fix/replication", role=name),
        )
    if not role["sees"]:
        yield _error(
            "role",
            where,
            f"{name} may not see walsenders and WAL receivers",
            f"GRANT pg_read_all_stats TO {name}, on the primary",
            cause=Cause.PRIVILEGE,
            fix_sql=fix("provisioning/roles_stats", role=name),
        )


def _extension(facts: Facts, where: str, connected: str) -> Iterator[Finding]:
    """`connected`: the database of the primary in which the script of `--fix-sql` would run."""
    found = facts["extension"]
    database = facts["database"]
    if facts.get("extension_stranger") is not None:
        yield _error(
            "extension",
            where,
            f"in database {database}, the schema tuskline_slots or a function in it belongs to role "
            f"{facts['extension_stranger']}, which is not a superuser: its functions are not called",
            "run DROP SCHEMA tuskline_slots CASCADE and CREATE EXTENSION tuskline as a superuser on the primary",
        )
    elif found is None:
        there = facts["available"] is not None
        yield _error(
            "extension",
            where,
            f"the extension tuskline is not installed in database {database}",
            "run CREATE EXTENSION tuskline there, on the primary"
            if there
            else "build and install it, then run CREATE EXTENSION tuskline: docs/extension.md",
            fix_sql=fix("fix/extension") if there and database == connected else "",
        )
    elif not found["usable"]:
        yield _error(
            "extension",
            where,
            f"{facts['role']['name']} may not call the extension tuskline",
            f"GRANT tuskline_slots TO {facts['role']['name']}, on the primary",
            cause=Cause.PRIVILEGE,
            fix_sql=fix("fix/extension_user", role=facts["role"]["name"]),
        )
    elif found["version"] and facts["available"] and found["version"] != facts["available"]:
        yield Finding(
            "extension",
            where,
            f"the database has tuskline {found['version']}, but {facts['available']} is available",
            WARNING,
            repair="ALTER EXTENSION tuskline UPDATE, on the primary",
            fix=fix("fix/extension_update") if database == connected else "",
        )
    else:
        yield Finding("extension", where, f"tuskline {found['version'] or 'from its script'}")


def _native(facts: Facts, where: str) -> Iterator[Finding]:
    """PostgreSQL's own slot synchronization, which connects to a database of the primary (17 and later)."""
    if facts["conninfo_dbname"] is False:
        yield _error(
            "primary_conninfo",
            where,
            "sync_replication_slots is on, but primary_conninfo has no dbname",
            "add dbname=... to primary_conninfo, and reload",
        )
    else:
        known = "has a dbname" if facts["conninfo_dbname"] else "is not visible to this role"
        yield Finding("sync_replication_slots", where, f"on; primary_conninfo {known}")
