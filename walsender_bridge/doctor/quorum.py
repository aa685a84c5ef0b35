"""Evaluates a server whose commits are to wait for safekeepers, from the facts of sql/quorum/facts.sql.

What lets a commit return without the quorum, or hang forever, is an error. Only one error prevents `up` from starting: a
minor version that breaks the quorum's guarantee. A server that waits for the proposer needs one in all other cases.
"""

from collections.abc import Iterator
from typing import Any, Final

from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import Cause
from walsender_bridge.postgres.standby_names import StandbyNames
from walsender_bridge.provisioning.fixes import fix
from walsender_bridge.provisioning.quorum import SETTING, ConfiguredQuorum, crowded, will_change

OK, WARNING, ERROR = Severity.OK, Severity.WARNING, Severity.ERROR
Facts = dict[str, Any]

#: The first minor of a major that never writes a part of a record again on the same timeline (11.14's release notes).
FIXED_IN: Final = {11: 14, 12: 9, 13: 5, 14: 1}
#: Walsenders of the proposer: the stream, and one for older WAL. An ordinary session advances the slot.
SENDERS: Final = 2
_MEGABYTE: Final = 1 << 20


def evaluate(
    facts: Facts, quorum: ConfiguredQuorum, where: str, max_laggard_bytes: int
) -> Iterator[Finding]:
    """All findings about the server as the quorum's."""
    yield from _version(facts, where)
    yield from _names(facts, quorum, where)
    yield from _proposers(facts, quorum, where)
    yield from _synchronous_commit(facts, where)
    yield from _room(facts, where)
    yield from _retention(facts, where, max_laggard_bytes)
    yield from _slot(facts, quorum, where)
    yield from _role(facts, where)


def _error(check: str, where: str, what: str, repair: str, fix_sql: str = "") -> Finding:
    return Finding(check, where, what, ERROR, repair=repair, fix=fix_sql, prevents=False)


def _version(facts: Facts, where: str) -> Iterator[Finding]:
    major, minor = divmod(facts["version"], 10_000)
    if minor < FIXED_IN.get(major, 0):
        yield Finding(
            "minor version",
            where,
            f"{facts['version_text']} may write a part of a record again on the same timeline after a crash: "
            "safekeepers could then have other bytes than the server",
            ERROR,
            repair=f"install {major}.{FIXED_IN[major]} or later",
            cause=Cause.NOT_SUPPORTED,
        )


def _names(facts: Facts, quorum: ConfiguredQuorum, where: str) -> Iterator[Finding]:
    names, text = StandbyNames.parse(facts["names"]), facts["names"]
    wanted = names.joined_by(quorum.name)
    if will_change(facts):
        yield _error(
            SETTING,
            where,
            f"{SETTING} is {text!r}, and becomes {facts['names_after_reload']!r} with the server's next reload or restart",
            "tuskline quorum require, or tuskline quorum release: either makes both the same",
        )
        return
    if names.needs(quorum.name) and not names.alone(quorum.name):
        yield Finding(
            SETTING,
            where,
            f"{SETTING} is {text!r}: commits wait for {quorum.name} while it is attached; while it is not, several "
            "walsenders of another name can satisfy the setting instead",
            WARNING,
            repair=f"list only {quorum.name} there, or give each standby its own application_name",
        )
        return
    if names.needs(quorum.name) and wanted is not None and wanted != names:
        yield Finding(
            SETTING,
            where,
            f"{SETTING} is {text!r}: when another proposer takes over, commits wait for the walsender of the previous one,"
            " up to wal_sender_timeout if a network partition has cut it off",
            WARNING,
            repair="run tuskline quorum require",
            fix=fix("fix/keep_size", name=SETTING, value=str(wanted)),
        )
        return
    if names.needs(quorum.name):
        yield Finding(SETTING, where, f"commits wait for {quorum.name}")
        return
    if wanted is None or names.names_it(quorum.name):
        others = [name for name in names.names if name not in {"*", quorum.name}]
        safe = StandbyNames.all_of(quorum.name, *others)
        yield _error(
            SETTING,
            where,
            f"{SETTING} is {text!r}: other standbys can acknowledge instead of {quorum.name}, and COMMIT returns "
            "without a quorum",
            f"name every standby that has to acknowledge, the quorum first, without *: {safe}",
            fix("fix/keep_size", name=SETTING, value=str(safe)),
        )
        return
    yield Finding(
        SETTING,
        where,
        f"commits do not wait for the quorum ({SETTING} is {text!r})",
        WARNING,
        repair="run tuskline up, then tuskline quorum require",
        fix=fix("fix/keep_size", name=SETTING, value=str(wanted)) if facts["senders"] else "",
    )


def _proposers(facts: Facts, quorum: ConfiguredQuorum, where: str) -> Iterator[Finding]:
    waits = StandbyNames.parse(facts["names"]).names_it(quorum.name)
    if waits and (several := crowded(facts)):
        yield _error(
            "standbys",
            where,
            several,
            "give each standby its own application_name; the walsender of a broken connection ends after wal_sender_timeout",
        )
    if facts["senders"] > 1:
        yield _error(
            "proposer",
            where,
            f"{facts['senders']} standbys have the application_name {quorum.name}: each can acknowledge for the quorum",
            f"only the proposer may use the application_name {quorum.name}: stop the others",
        )
    elif waits and not facts["senders"]:
        yield _error(
            "proposer",
            where,
            f"commits hang: they wait for {quorum.name}, and no proposer is attached",
            "run tuskline up, or tuskline quorum release (docs/quorum-lost.md)",
        )
    elif facts["senders"]:
        waiting = f", {facts['waiting']} commits wait" if facts["waiting"] else ""
        yield Finding("proposer", where, f"{quorum.name} is attached{waiting}")
    else:
        yield Finding("proposer", where, f"{quorum.name} is not attached", repair="run tuskline up")


def _synchronous_commit(facts: Facts, where: str) -> Iterator[Finding]:
    places = [("", "", facts["commit"])]
    places += [
        (each["role"] or "", each["database"] or "", each["value"])
        for each in facts["commit_elsewhere"]
    ]
    safe = True
    for role, database, value in places:
        place = " ".join(
            filter(None, (f"of role {role}" if role else "", f"in {database}" if database else ""))
        )
        repair = _on(role, database)
        if value == "remote_apply":
            safe = False
            yield _error(
                "synchronous_commit",
                where,
                f"synchronous_commit {place} is remote_apply".replace("  ", " ")
                + ": safekeepers replay nothing, so every such commit hangs",
                "set it to on",
                repair,
            )
        elif value in {"off", "local"}:
            safe = False
            what = f"synchronous_commit {place} is {value}".replace("  ", " ")
            what += ": such commits return without a quorum"
            if place:
                yield Finding("synchronous_commit", where, what, WARNING, repair="set it to on")
            else:
                yield _error("synchronous_commit", where, what, "set it to on", repair)
    if safe:
        yield Finding("synchronous_commit", where, str(facts["commit"]))


def _on(role: str, database: str) -> str:
    if role and database:
        return fix("fix/commit_both", role=role, database=database)
    if role:
        return fix("fix/commit_role", role=role)
    if database:
        return fix("fix/commit_database", database=database)
    return fix("fix/keep_size", name="synchronous_commit", value="on")


def _room(facts: Facts, where: str) -> Iterator[Finding]:
    """The quorum's needs, in addition to those of capture, which `settings` evaluates."""
    settings = facts["settings"]
    needs = {
        "max_wal_senders": (SENDERS - min(facts["senders"], SENDERS), facts["senders_used"]),
        "max_replication_slots": (int(facts["slot"] is None), facts["slots_used"]),
    }
    for name, (missing, used) in needs.items():
        limit = int(settings[name])
        free = limit - used
        if free < missing:
            yield Finding(
                name,
                where,
                f"{max(free, 0)} of {limit} are free; the quorum needs {missing} more",
                ERROR,
                repair=f"raise {name} to {limit + missing - free} and restart the server",
                fix=fix("fix/number", name=name, value=limit + missing - free),
                prevents=False,
            )


def _retention(facts: Facts, where: str, max_laggard_bytes: int) -> Iterator[Finding]:
    keep = int(facts["settings"].get("max_slot_wal_keep_size", -1))
    if 0 <= keep * _MEGABYTE < max_laggard_bytes:
        yield Finding(
            "max_slot_wal_keep_size",
            where,
            f"{keep} MB: a safekeeper that is down is sent no more WAL than that, but [safekeepers] "
            f"max_laggard_bytes promises {max_laggard_bytes // _MEGABYTE} MB",
            WARNING,
            repair="raise it, or lower max_laggard_bytes",
        )


def _slot(facts: Facts, quorum: ConfiguredQuorum, where: str) -> Iterator[Finding]:
    slot = facts["slot"]
    if slot is None:
        yield Finding("safekeepers' slot", where, f"{quorum.slot} does not exist yet")
        return
    lost = slot.get("wal_status") == "lost" or slot.get("invalidation_reason")
    if slot["slot_type"] != "physical" or slot["active"]:
        what = f"{quorum.slot} is not an idle physical slot"
    elif lost:
        what = f"{quorum.slot} is lost: the server keeps no WAL for safekeepers that lag"
    else:
        yield Finding("safekeepers' slot", where, f"{quorum.slot} keeps WAL")
        return
    yield Finding(
        "safekeepers' slot",
        where,
        what,
        ERROR,
        repair=_replacement(facts) if lost else "choose another name: [safekeepers] slot",
        cause=Cause.SLOT,
        prevents=False,
    )


def _replacement(facts: Facts) -> str:
    """The repair of a lost slot: the WAL that the safekeepers lack has to be on the server still."""
    quorum_lsn, flush_lsn = facts.get("quorum_lsn"), facts.get("flush_lsn")
    if quorum_lsn is not None and flush_lsn is not None and quorum_lsn >= flush_lsn:
        return "restart the proposer, which replaces the slot; a majority of the safekeepers has all WAL"
    return (
        "start the safekeepers that are away, and the proposer, which replaces the slot; it reports if WAL that a majority"
        " lacks has been removed (docs/quorum-lost.md)"
    )


def _role(facts: Facts, where: str) -> Iterator[Finding]:
    role = facts["role"]["name"]
    if not facts["may_see"]:
        yield Finding(
            "quorum privileges",
            where,
            f"{role} may not see the proposer's reports and the waiting commits, which `tuskline wait --quorum` and "
            "`tuskline status` need",
            WARNING,
            repair=f"run tuskline init --admin user=..., or GRANT pg_read_all_stats TO {role}",
            fix=fix("provisioning/roles_stats", role=role),
            cause=Cause.PRIVILEGE,
        )
    if not facts["may_advance"]:
        yield Finding(
            "quorum privileges",
            where,
            f"{role} may not execute pg_replication_slot_advance: the server would keep WAL for safekeepers forever",
            ERROR,
            repair="GRANT EXECUTE on that function to the role",
            fix=fix("provisioning/roles_advance", role=role),
            cause=Cause.PRIVILEGE,
            prevents=False,
        )
    if facts["may_see"] and facts["may_advance"]:
        yield Finding(
            "quorum privileges", where, f"{role} has the privileges that the quorum needs"
        )
