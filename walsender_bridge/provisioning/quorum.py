"""Configures a server for a quorum of safekeepers: commits wait for the proposer, and a slot keeps WAL for laggards.

Invariant: a session that changes what commits wait for never waits itself (`session`), so all of this works while
commits hang. The previous `synchronous_standby_names` is recorded (`own_schema.provisioned`) before it is changed, and `detach`
restores exactly that; other standbys that were required remain required.

Commits are never made to wait for an absent proposer: they wait only once the proposer has reported that a
quorum has a commit made a moment ago (`wait_for_quorum`).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from walsender_bridge.capture import source as capture
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.errors import (
    DeadlineError,
    PrivilegeError,
    ServerSettingError,
    SlotError,
    UsageError,
)
from walsender_bridge.own_schema.login import login_of
from walsender_bridge.own_schema.provisioned import QUORUM, ProvisionedObject, ProvisionedRecord
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.postgres.standby_names import StandbyNames
from walsender_bridge.provisioning import stats_grant
from walsender_bridge.provisioning.init import as_admin
from walsender_bridge.provisioning.release_record import ReleaseDecision
from walsender_bridge.provisioning.slots import drop_unused
from walsender_bridge.runtime.sql import load

SETTING: Final = "synchronous_standby_names"
#: Kinds of the record.
_NAMES, _SLOT = "setting", "physical slot"
#: Seconds within which a server reloads its configuration.
_RELOAD_SECONDS: Final = 10.0

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class ConfiguredQuorum:
    """`source`: a database of the server. `name`: the proposer's application_name. `slot`: see `proposer.primary`."""

    source: CaptureSource
    name: str
    slot: str

    @property
    def where(self) -> str:
        """`host:port/database`, for messages."""
        return self.source.where


@contextmanager
def session(quorum: ConfiguredQuorum, admin: str | None = None) -> Iterator[Connection]:
    """A connection whose commits wait for no standby. `admin` as for `init`; raises the errors of `capture.source.connect`."""
    with capture.connect(as_admin(quorum.source, admin)) as connection:
        connection.execute(load("quorum/session").encode())
        yield connection


def facts(connection: Connection, quorum: ConfiguredQuorum) -> dict[str, Any]:
    """The server's answer to sql/quorum/facts.sql."""
    names = {"slot": quorum.slot, "name": quorum.name}
    with connection.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(load("quorum/facts").encode(), names).fetchone()
    assert row is not None
    found: dict[str, Any] = row[0]
    return found


def facts_and_pending(connection: Connection, quorum: ConfiguredQuorum) -> dict[str, Any]:
    """`facts`, and `names_after_reload`, None where only a superuser may see it.

    The server reads its configuration files for that: not for what is polled.
    """
    found = facts(connection, quorum)
    found["names_after_reload"] = None
    if found["role"]["superuser"]:
        row = connection.execute(
            load("provisioning/setting_after_reload").encode(), {"name": SETTING}
        ).fetchone()
        found["names_after_reload"] = "" if row is None else row[0]
    return found


def will_change(found: dict[str, Any]) -> bool:
    """Whether a reload or restart would change what commits wait for: an ALTER SYSTEM that no reload has followed.

    `found` is from `facts_and_pending`.

    A command that was killed between the two leaves it so. A value of the server's command line overrides the files:
    then it is no pending change, but `set_names` could not change it either.
    """
    pending = found["names_after_reload"]
    if pending is None or found["names_source"] == "command line":
        return False
    return StandbyNames.parse(pending) != StandbyNames.parse(found["names"])


def decision(
    connection: Connection,
    quorum: ConfiguredQuorum,
    action: Literal["release", "require", "forget"],
) -> ReleaseDecision:
    """A decision with the current positions, for `release_record`."""
    found = facts(connection, quorum)
    return ReleaseDecision(
        action,
        quorum.where,
        found["role"]["name"],
        _text(found["flush_lsn"]),
        _text(found["quorum_lsn"]),
        found["waiting"],
        found["names"],
    )


def _text(lsn: Lsn | None) -> str | None:
    return None if lsn is None else format_lsn(lsn)


# -- attach and detach ----------------------------------------------------------------------------------


def attach_quorum(quorum: ConfiguredQuorum, admin: str | None = None) -> list[ProvisionedObject]:
    """Create the slot, grant the source's role access to the statistics, and make commits wait if the quorum answers.

    Not beside other standbys, which is an operator's decision (`require_quorum`). Returns the objects created. The database
    has been attached (`init`). Raises the errors of `require_quorum`, and `SlotError`.
    """
    with session(quorum, admin) as connection:
        record = _record(connection, quorum)
        before = record.own()
        check(facts(connection, quorum), quorum)
        _make_slot(connection, quorum, record)
        stats_grant.grant_stats(connection, record, login_of(quorum.source.dsn).user)
        found = facts(connection, quorum)
        if found["senders"] and not _others(found, quorum):
            require_quorum(connection, quorum)
        return [made for made in record.own() if made not in before]


def detach_quorum(quorum: ConfiguredQuorum, admin: str | None = None) -> list[ProvisionedObject]:
    """Remove the recorded objects and return them. Raises `SlotInUseError`, `PrivilegeError`."""
    with session(quorum, admin) as connection:
        record = ProvisionedRecord(connection, quorum.slot, quorum.source.dsn)
        found = record.own() if record.readable else []
        if any(made.kind == _NAMES for made in found):
            may_set(connection, quorum)
        for made in found:
            if made.kind == _NAMES and made.name == SETTING:
                _put_back(connection, quorum, record, made)
        for made in found:
            if made.kind == _SLOT and made.name == quorum.slot:
                drop_unused(
                    connection, "provisioning/physical_slot_drop", quorum.slot, quorum.where
                )
            elif made.kind == stats_grant.KIND:
                stats_grant.take_grant(connection, quorum.source, record, made)
        if found:
            record.forget()
        return found


def _record(connection: Connection, quorum: ConfiguredQuorum) -> ProvisionedRecord:
    record = ProvisionedRecord(connection, quorum.slot, quorum.source.dsn)
    if record.owner is None:
        raise ServerSettingError(
            "this database is not attached", where=quorum.where, repair="tuskline init"
        )
    return record


def _make_slot(connection: Connection, quorum: ConfiguredQuorum, record: ProvisionedRecord) -> None:
    """Create the slot as the proposer would. A slot with our prefix is ours, whether init or the proposer created it."""
    slot = facts(connection, quorum)["slot"]
    if slot is not None and (slot["slot_type"] != "physical" or slot["active"]):
        raise SlotError(
            f"slot {quorum.slot!r} is not an unused physical slot",
            where=quorum.where,
            repair="choose another name for [safekeepers] slot",
        )
    if slot is None or quorum.slot.startswith("tuskline_"):
        record.add(ProvisionedObject(_SLOT, quorum.slot))
    if slot is None:
        connection.execute(
            load("provisioning/physical_slot_create").encode(), {"slot": quorum.slot}
        )


# -- what commits wait for ------------------------------------------------------------------------------


def check(found: dict[str, Any], quorum: ConfiguredQuorum) -> None:
    """Raise `ServerSettingError` for a server on which commits would not wait for the proposer, or would wait for ever."""
    apply = [each for each in found["commit_elsewhere"] if each["value"] == "remote_apply"]
    if found["commit"] == "remote_apply" or apply:
        raise ServerSettingError(
            "synchronous_commit = remote_apply waits for a standby that replays WAL, which safekeepers do not: "
            "every commit would hang",
            where=quorum.where,
            repair="set it to on; `tuskline doctor` names the place, and --fix-sql prints the statement",
        )
    if found["commit"] in {"off", "local"}:
        raise ServerSettingError(
            f"synchronous_commit is {found['commit']}: commits wait for no standby",
            where=quorum.where,
            repair="set synchronous_commit = on",
        )


def crowded(found: dict[str, Any]) -> str:
    """Other standbys that can acknowledge in the quorum's place because they have several walsenders; empty if none."""
    names = [
        f"{each['walsenders']} walsenders are named {each['name']!r}" for each in found["crowded"]
    ]
    if not names:
        return ""
    return f"{', '.join(names)}: without the proposer they can acknowledge in the quorum's place"


def _others(found: dict[str, Any], quorum: ConfiguredQuorum) -> list[str]:
    """The standbys beside the proposer that commits wait for."""
    names = StandbyNames.parse(found["names"]).names
    return [each for each in names if each.lower() != quorum.name.lower()]


def _check_others(found: dict[str, Any], quorum: ConfiguredQuorum, *, beside: bool) -> None:
    """Raise `ServerSettingError` if other standbys can acknowledge in the quorum's place, unless that is accepted."""
    others = _others(found, quorum)
    if others and not beside:
        raise ServerSettingError(
            f"{SETTING} names {', '.join(others)} beside the quorum: while no proposer is attached, two walsenders of "
            "one of these names let COMMIT return without a quorum",
            where=quorum.where,
            repair=f"remove them from {SETTING}, since a quorum needs no other standby; or accept this with "
            "--beside-standbys, and give each standby its own application_name",
        )
    if several := crowded(found):
        raise ServerSettingError(
            several,
            where=quorum.where,
            repair="give each standby its own application_name (cluster_name, or primary_conninfo); a walsender whose "
            "connection was interrupted ends after wal_sender_timeout",
        )


def require_quorum(
    connection: Connection, quorum: ConfiguredQuorum, *, timeout: float = 30.0, beside: bool = False
) -> bool:
    """Make commits wait for the proposer; return whether anything was changed. `connection` is from `session`.

    `beside`: even if other standbys are required, with the risk described in `standby_names.py`.
    First a quorum has to answer within `timeout` seconds (0: this check is skipped, and commits may hang at once).
    Raises `ServerSettingError`, `DeadlineError` (no quorum answered: nothing is changed) and `PrivilegeError`.
    """
    found = facts_and_pending(connection, quorum)
    check(found, quorum)
    now = StandbyNames.parse(found["names"])
    wanted = now.joined_by(quorum.name)
    if wanted is not None:
        _check_others(found, quorum, beside=beside)
    else:
        raise ServerSettingError(
            f"{SETTING} is {found['names']!r}: other standbys can acknowledge in the quorum's place",
            where=quorum.where,
            repair="require every standby in the list, for example "
            f"{StandbyNames.all_of(quorum.name, *now.names)}",
        )
    if wanted == now and not will_change(found):
        return False
    record = _record(connection, quorum)
    may_set(connection, quorum)
    if timeout:
        wait_for_quorum(connection, quorum, timeout)
    if not any(made.kind == _NAMES for made in record.own()):
        row = connection.execute(
            load("provisioning/system_value").encode(), {"name": SETTING}
        ).fetchone()
        record.add(ProvisionedObject(_NAMES, SETTING, grantee="" if row is None else f"={row[0]}"))
    set_names(connection, quorum, str(wanted))
    return True


def record_id(connection: Connection, quorum: ConfiguredQuorum, quorum_id: int) -> None:
    """Record on the server the id of the quorum that has its commits, unless one is recorded (`proposer.quorum_id_record`)."""
    record = ProvisionedRecord(connection, quorum.slot, quorum.source.dsn)
    if record.readable and not record.quorum_ids():
        record.add(ProvisionedObject(QUORUM, f"{quorum_id:032x}"))


def forget_id(connection: Connection, quorum: ConfiguredQuorum) -> None:
    """Remove the id, so that new safekeepers can form a quorum. Raises `UsageError`, `PrivilegeError`.

    Refused while commits wait for the quorum: they would hang until another one is formed.
    """
    found = facts(connection, quorum)
    if StandbyNames.parse(found["names"]).names_it(quorum.name):
        raise UsageError(
            f"commits wait for the quorum: {SETTING} is {found['names']!r}",
            where=quorum.where,
            repair="tuskline quorum release",
        )
    record = ProvisionedRecord(connection, quorum.slot, quorum.source.dsn)
    if not record.readable:
        return
    try:
        record.forget_quorum()
    except psycopg.errors.InsufficientPrivilege as error:
        raise PrivilegeError(
            str(error.diag.message_primary), where=quorum.where, repair="add --admin user=..."
        ) from None


def release_quorum(connection: Connection, quorum: ConfiguredQuorum) -> bool:
    """Make commits no longer wait for the proposer, which lets hanging ones return; return whether anything was changed.

    `connection` is from `session`. The record of the previous setting is kept for `detach`.
    """
    found = facts_and_pending(connection, quorum)
    now = StandbyNames.parse(found["names"])
    left = now.left_by(quorum.name)
    if left == now and not will_change(found):
        return False
    may_set(connection, quorum)
    set_names(connection, quorum, str(left))
    return True


def set_names(connection: Connection, quorum: ConfiguredQuorum, value: str | None) -> None:
    """Run ALTER SYSTEM and wait until it takes effect. None: RESET, after which the proposer must no longer be named.

    Raises `ServerSettingError` when something else (the command line, an HA manager) overrides it.
    """
    if value is None:
        _system(connection, "provisioning/system_reset", name=sql.Identifier(SETTING))
    else:
        _system(
            connection,
            "provisioning/system_set",
            name=sql.Identifier(SETTING),
            value=sql.Literal(value),
        )
    connection.execute(load("provisioning/reload_conf").encode())
    deadline = time.monotonic() + _RELOAD_SECONDS
    while True:
        row = connection.execute(
            load("provisioning/setting_now").encode(), {"name": SETTING}
        ).fetchone()
        assert row is not None
        held = StandbyNames.parse(row[0])
        if not held.names_it(quorum.name) if value is None else held == StandbyNames.parse(value):
            return
        if time.monotonic() > deadline:
            raise ServerSettingError(
                f"{SETTING} was set to {value or ''!r} by ALTER SYSTEM, and stays {row[0]!r} "
                f"(its source: {row[1]})",
                where=quorum.where,
                repair="change it at its source: the server's command line, or the HA manager's configuration",
            )
        time.sleep(0.05)


def _put_back(
    connection: Connection,
    quorum: ConfiguredQuorum,
    record: ProvisionedRecord,
    made: ProvisionedObject,
) -> None:
    """Restore the previous value of ALTER SYSTEM. A value set by another session since then is kept."""
    row = connection.execute(
        load("provisioning/system_value").encode(), {"name": SETTING}
    ).fetchone()
    if row is None:
        return
    now = StandbyNames.parse(row[0])
    before = made.grantee[1:] if made.grantee else None
    same = now == StandbyNames.parse(before or "")
    if not (now.names_it(quorum.name) or same):
        return
    # A role without superuser rights could have written anything into the record.
    trusted = connection.execute(
        load("provisioning/role_superuser").encode(), {"role": record.owner}
    ).fetchone()
    if trusted == (True,) or before is None:
        set_names(connection, quorum, before)
    else:
        set_names(connection, quorum, str(now.left_by(quorum.name)))


def _system(connection: Connection, text: str, **names: sql.Composable) -> None:
    connection.execute(sql.SQL(load(text)).format(**names))


def may_set(connection: Connection, quorum: ConfiguredQuorum) -> None:
    """Raise `PrivilegeError` if this role may not change what commits wait for."""
    role = facts(connection, quorum)["role"]
    if not role["superuser"]:
        raise PrivilegeError(
            f"role {role['name']} is not allowed to use ALTER SYSTEM",
            where=quorum.where,
            repair="add --admin user=... with a superuser",
        )


def wait_for_quorum(connection: Connection, quorum: ConfiguredQuorum, timeout: float) -> None:
    """Commit, and wait until the proposer has reported to this server that a quorum has that commit.

    Raises `DeadlineError` after `timeout` seconds.
    """
    connection.execute(load("quorum/mark").encode())
    wanted = facts(connection, quorum)["flush_lsn"]
    deadline = time.monotonic() + timeout
    while True:
        found = facts(connection, quorum)
        if (found["quorum_lsn"] or 0) >= wanted:
            return
        if time.monotonic() > deadline:
            why = "has not reported a quorum for them" if found["senders"] else "is not running"
            raise DeadlineError(
                f"commits would hang: the proposer {why} ({timeout:g} s)",
                where=quorum.where,
                repair="run tuskline up; `tuskline status` shows what the quorum lacks",
            )
        time.sleep(0.05)
