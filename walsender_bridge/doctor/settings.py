"""Evaluates a server's settings, role and slots, from the facts of sql/doctor/server.sql."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from walsender_bridge.capture.publication import reattach
from walsender_bridge.capture.source import OLDEST_VERSION, CaptureSource, lost
from walsender_bridge.doctor import wal_room
from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.doctor.unsafe_versions import faults_of
from walsender_bridge.errors import Cause
from walsender_bridge.own_schema.provisioned import ProvisionedObject
from walsender_bridge.provisioning.fixes import block, comment, fix, recorded

#: The newest major that this version is tested with.
NEWEST_MAJOR: Final = 18
#: Bytes of WAL below which `max_slot_wal_keep_size` loses the slot after a short pause of the bridge.
SMALL_KEEP: Final = 1 << 30
#: Seconds of age at which an open transaction is reported: a slot is not created before it ends.
OLD_TRANSACTION: Final = 60

_MEGABYTE: Final = 1 << 20
_SECONDS: Final = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86_400}

OK, WARNING, ERROR = Severity.OK, Severity.WARNING, Severity.ERROR
Facts = dict[str, Any]


def evaluate(facts: Facts, source: CaptureSource, where: str) -> Iterator[Finding]:
    """All findings about the server itself."""
    yield from _version(facts, where)
    yield from _wal_level(facts, where)
    yield from _room(facts, source, where)
    yield from _role(facts, where)
    yield from _encoding(facts, where)
    yield from _retention(facts, where)
    yield from _transactions(facts, source, where)
    yield from _slots(facts, source, where)


def own_slot(facts: Facts, source: CaptureSource) -> Facts | None:
    """The source's slot as the server shows it."""
    return next((slot for slot in facts["slots"] if slot["slot_name"] == source.slot), None)


def _setting(facts: Facts, name: str) -> int | None:
    row = facts["settings"].get(name)
    return None if row is None else int(row["value"])


def _version(facts: Facts, where: str) -> Iterator[Finding]:
    number, text = facts["version"], facts["version_text"]
    major = number // 10_000
    if number < OLDEST_VERSION:
        yield Finding(
            "version",
            where,
            f"PostgreSQL {text} is not supported",
            ERROR,
            repair="upgrade to PostgreSQL 11 or later",
            cause=Cause.NOT_SUPPORTED,
        )
    elif major > NEWEST_MAJOR:
        yield Finding(
            "version",
            where,
            f"PostgreSQL {text} is newer than the versions that this version was tested with",
            WARNING,
        )
    else:
        yield Finding("version", where, f"PostgreSQL {text}")
    for reason in faults_of(number):
        yield Finding(
            "minor version", where, f"{text}: {reason}", WARNING, repair="install the newest minor"
        )
    if facts["in_recovery"]:
        yield Finding(
            "primary",
            where,
            "the server is a standby",
            ERROR,
            repair="name the primary in the DSN",
            cause=Cause.NOT_SUPPORTED,
        )


def _wal_level(facts: Facts, where: str) -> Iterator[Finding]:
    level = facts["settings"]["wal_level"]["value"]
    if level == "logical":
        yield Finding("wal_level", where, "logical")
    else:
        yield Finding(
            "wal_level",
            where,
            f"wal_level is {level}",
            ERROR,
            repair="set wal_level = logical and restart the server",
            fix=fix("fix/wal_level"),
        )


def _room(facts: Facts, source: CaptureSource, where: str) -> Iterator[Finding]:
    """Capture needs a slot and a walsender permanently; a copy of tables needs one of each while it runs."""
    slot = own_slot(facts, source)
    lasting = {
        "max_replication_slots": (slot is None, facts["slots_used"]),
        "max_wal_senders": (slot is None or not slot["active"], facts["senders_used"]),
    }
    for name, (missing, used) in lasting.items():
        limit = _setting(facts, name) or 0
        free, needed = limit - used, missing + 1
        if free >= needed:
            yield Finding(name, where, f"{free} of {limit} are free")
            continue
        wanted = limit + needed - free
        yield Finding(
            name,
            where,
            f"{max(free, 0)} of {limit} are free, but {needed} are needed: "
            + ("one for capture, " if missing else "")
            + "one while tables are copied",
            ERROR if free < missing else WARNING,
            repair=f"raise {name} to {wanted} and restart the server",
            fix=fix("fix/number", name=name, value=wanted),
        )


def _role(facts: Facts, where: str) -> Iterator[Finding]:
    role = facts["role"]
    if not role["there"]:
        yield _no_role(facts, where)
    elif role["superuser"]:
        yield Finding(
            "role",
            where,
            f"{role['name']} is a superuser",
            WARNING,
            repair="name a dedicated role in the DSN, and run tuskline init --admin "
            f"user={role['name']}, which creates it with the necessary privileges",
        )
    elif role["replication"] and role["login"]:
        yield Finding("role", where, f"{role['name']} may replicate")
    else:
        yield Finding(
            "role",
            where,
            f"{role['name']} may not {'replicate' if role['login'] else 'log in'}",
            ERROR,
            repair=f"ALTER ROLE {role['name']} LOGIN REPLICATION",
            fix=fix("fix/role", role=role["name"]),
            cause=Cause.PRIVILEGE,
        )
    if not role["connect"]:
        connect = ProvisionedObject("database", facts["database"], "CONNECT", role["name"])
        yield Finding(
            "privileges",
            where,
            f"{role['name']} may not connect to database {facts['database']}",
            ERROR,
            repair="run tuskline init --admin user=..., or GRANT CONNECT",
            fix=in_record(
                facts,
                [fix("provisioning/roles_database", name=connect.name, role=role["name"])],
                connect,
            ),
            cause=Cause.PRIVILEGE,
        )


def _no_role(facts: Facts, where: str) -> Finding:
    role = facts["role"]
    statement = fix("provisioning/roles", role=role["name"], password=role["secret"])
    if role["secret"] is None:
        statement += "\n" + comment(
            f"The DSN has no password for it; set one in psql: \\password {role['name']}"
        )
    return Finding(
        "role",
        where,
        f"role {role['name']} does not exist yet",
        ERROR,
        repair="run tuskline init --admin user=..., which creates it",
        fix=in_record(facts, [statement], ProvisionedObject("role", role["name"])),
        cause=Cause.PRIVILEGE,
    )


def in_record(
    facts: Facts, statements: Sequence[str], *created: ProvisionedObject, slot: str = ""
) -> str:
    """The statements, and the record of what they create, if there is a record that a superuser may write to."""
    if not facts["own"]["recordable"]:
        return "\n".join(statements)
    return block([*statements, *(recorded(each, slot) for each in created)])


def _encoding(facts: Facts, where: str) -> Iterator[Finding]:
    encoding = facts["encoding"]
    if encoding == "SQL_ASCII":
        yield Finding(
            "encoding",
            where,
            "the database encoding is SQL_ASCII: the server converts nothing, and text that is not UTF-8 "
            "stops the lake's job with an error that names the row",
            WARNING,
            repair="make sure that every client writes UTF-8, or move to a database with encoding UTF8",
        )
    else:
        converted = "" if encoding == "UTF8" else ", which the server converts to UTF8"
        yield Finding("encoding", where, f"{encoding}{converted}")


def _retention(facts: Facts, where: str) -> Iterator[Finding]:
    """Whether the server loses a slot whose bridge is down (13 and later; by idle time, 18 and later)."""
    keep = _setting(facts, "max_slot_wal_keep_size")
    if keep is None:
        yield Finding(
            "max_slot_wal_keep_size",
            where,
            "this version has no limit for the WAL that a slot retains",
            WARNING,
            repair="watch the server's disk while the bridge is down",
        )
    elif keep < 0:
        yield Finding(
            "max_slot_wal_keep_size",
            where,
            "no limit: while the bridge is down, the server keeps all WAL until its disk is full",
            WARNING,
            repair="set it to the amount that the server's disk can spare",
        )
    elif keep * _MEGABYTE < SMALL_KEEP:
        yield Finding(
            "max_slot_wal_keep_size",
            where,
            f"{keep} MB: a bridge that is down while the server writes more WAL than that loses its slot, and "
            "`tuskline reattach` has to compare or copy all tables",
            WARNING,
            repair="set it to the amount that the server's disk can spare",
            fix=fix("fix/keep_size", name="max_slot_wal_keep_size", value="16GB"),
        )
    else:
        yield Finding("max_slot_wal_keep_size", where, f"{keep} MB")
    yield from wal_room.evaluate(keep, facts["disk"], where)
    idle = facts["settings"].get("idle_replication_slot_timeout")
    if idle is not None and int(idle["value"]) > 0:
        seconds = int(idle["value"]) * _SECONDS[idle["unit"]]
        yield Finding(
            "idle_replication_slot_timeout",
            where,
            f"a bridge that is down for {seconds:.0f} s loses its slot, and `tuskline reattach` has to compare or copy all tables",
            WARNING,
            repair="set it to 0, or to more than the longest time that the bridge may be down",
            fix=fix("fix/keep_size", name="idle_replication_slot_timeout", value="0"),
        )
    elif idle is not None:
        yield Finding("idle_replication_slot_timeout", where, "off")


def _transactions(facts: Facts, source: CaptureSource, where: str) -> Iterator[Finding]:
    prepared, oldest = facts["prepared"], facts["oldest_seconds"] or 0
    waits = own_slot(facts, source) is None
    effect = "the slot is not created before they end" if waits else "they hold back WAL"
    if prepared:
        names = ", ".join(repr(gid) for gid in prepared[:5])
        yield Finding(
            "prepared transactions",
            where,
            f"{len(prepared)} are pending ({names}): {effect}",
            WARNING,
            repair="finish abandoned ones with COMMIT PREPARED or ROLLBACK PREPARED",
        )
    else:
        yield Finding("prepared transactions", where, "none pending")
    if waits and oldest > OLD_TRANSACTION:
        yield Finding(
            "open transactions",
            where,
            f"the oldest has run for {oldest} s: the slot is not created before it ends",
            WARNING,
            repair="end it, or wait",
        )


def _slots(facts: Facts, source: CaptureSource, where: str) -> Iterator[Finding]:
    own = own_slot(facts, source)
    if own is None and not facts["begun"]:
        yield Finding(
            "slot",
            where,
            f"{source.slot} does not exist yet",
            repair="run tuskline init",
        )
    for slot in facts["slots"]:
        yield _slot(facts, slot, source, where)


def _slot(facts: Facts, slot: Facts, source: CaptureSource, where: str) -> Finding:
    name, status = slot["slot_name"], slot.get("wal_status")
    own = name == source.slot
    bad = ERROR if own else WARNING
    if own and (
        slot["plugin"] != "pgoutput"
        or slot["database"] != facts["database"]
        or slot["temporary"]
        or slot.get("two_phase")
    ):
        return Finding(
            "slot",
            where,
            f"{name} is not a permanent pgoutput slot of database {facts['database']} without two_phase "
            f"(its plugin: {slot['plugin']}, database: {slot['database']})",
            ERROR,
            repair="choose another slot name",
            cause=Cause.SLOT,
        )
    why = lost(slot)
    if why:
        return Finding(
            "slot",
            where,
            f"{name} is lost: {why}",
            bad,
            repair=reattach(source) if own else "drop it if no client needs it",
            cause=Cause.SLOT,
            # The log is needed for the repair, and other sources continue.
            prevents=False,
        )
    held = (facts["held_bytes"] or {}).get(name, 0)
    retains = f"{name} retains {held / _MEGABYTE:.1f} MB of WAL"
    if status == "unreserved":
        return Finding(
            "slot",
            where,
            f"{retains}, more than max_slot_wal_keep_size: the next checkpoint may invalidate it",
            bad,
            repair="start its consumer now, or raise max_slot_wal_keep_size",
            cause=Cause.SLOT,
        )
    if not slot["active"] and not own and held > SMALL_KEEP:
        return Finding("slot", where, f"{retains}, and no client reads from it", WARNING)
    return Finding("slot", where, f"{retains}{', in use' if slot['active'] else ''}")
