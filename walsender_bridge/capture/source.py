"""The source as capture needs it: publication, slot, and a history that is the log's own.

The publication is there before the slot, since pgoutput looks it up as of each change. What exists is
adopted if it fits, and never made smaller. `evaluate` decides, without I/O, whether the slot continues the
log; its rules are the only ones by which a session may start:

- the server is of the cluster that the log was written from (its system identifier);
- the slot is confirmed to no more than the log's `confirmed_to`: nothing was skipped;
- the server's timelines contain `confirmed_to` and the end of the log, and its WAL reaches both: what
  the log holds happened there too.

The cluster is compared before anything else is looked at: on another one the rest is missing as well, and must not be made.

Otherwise the stream has diverged. Nothing is skipped or repaired here. What `evaluate` cannot see, a copy of
the cluster that ran on by itself past the log's end, shows in what it sends again: `overlap.py`.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from walsender_bridge.capture import publication
from walsender_bridge.errors import (
    DivergedError,
    LostSlotError,
    NotSupportedError,
    PublicationError,
    ServerSettingError,
    SlotError,
    SlotInUseError,
)
from walsender_bridge.own_schema import own_tables
from walsender_bridge.own_schema.provisioned import ProvisionedObject, ProvisionedRecord
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.client.replication_connection import describe, pinned_conninfo
from walsender_bridge.postgres.protocol.lsn import format_lsn, parse_lsn
from walsender_bridge.postgres.protocol.refusals import connection_error, server_error
from walsender_bridge.postgres.protocol.replication import ServerTimelines, SystemIdentity
from walsender_bridge.runtime.sql import load

#: Oldest server that pgoutput and this code are tested with: its version number.
OLDEST_VERSION = 110000


@dataclass(frozen=True, slots=True)
class CaptureSource:
    """A database to capture. `tables`: see `table_patterns`; none means all that can be published."""

    name: str
    dsn: str
    slot: str
    publication: str
    tables: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """`host:port/database`, for messages."""
        return describe(self.dsn)


def application_name(source: CaptureSource) -> str:
    """Of the session in which capture streams, as the server shows it: cut to what it keeps."""
    return f"tuskline-capture-{source.name}"[:63]


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Where a log stream stands: its last transaction, and what it let the slot be confirmed to.

    `system_id`: of the cluster that it is written from; None: a log that does not know it yet.
    """

    timeline: int
    last_end_lsn: int
    confirmed_to: tuple[int, int] | None
    system_id: int | None = None

    @property
    def begun(self) -> bool:
        """Whether the stream has a history, which a slot has to continue."""
        return self.confirmed_to is not None or self.last_end_lsn > 0


@dataclass(frozen=True, slots=True)
class Fork:
    """Why a slot does not continue a log, and after which point of it the histories differ."""

    reason: str
    timeline: int
    lsn: int


def evaluate(
    log: LogPosition, slot_confirmed: int | None, identity: SystemIdentity, history: ServerTimelines
) -> Fork | None:
    """None if the slot continues the log; `slot_confirmed` is None when there is no such slot."""
    if log.system_id not in {None, identity.system_id}:
        return Fork(_other_cluster(log.system_id, identity.system_id), log.timeline, 0)
    if log.confirmed_to is None:
        if log.last_end_lsn:
            reason = "the log holds transactions, but not what the slot was confirmed to"
            return Fork(reason, log.timeline, 0)
        return None
    timeline, confirmed = log.confirmed_to
    for own_timeline, lsn in (log.confirmed_to, (log.timeline, log.last_end_lsn)):
        if lsn and not history.contains(own_timeline, lsn):
            end = history.end_of(own_timeline) or 0
            return Fork(
                f"the log reaches {format_lsn(lsn)} on timeline {own_timeline}, which the server "
                + (f"left at {format_lsn(end)}" if end else "never was on"),
                own_timeline,
                end,
            )
    reached = max(confirmed, log.last_end_lsn)
    if identity.flush_lsn < reached:
        return Fork(
            f"the server's WAL ends at {format_lsn(identity.flush_lsn)}, before the log's position "
            f"{format_lsn(reached)}: it was restored or replaced",
            log.timeline or timeline,
            identity.flush_lsn,
        )
    if slot_confirmed is None:
        return Fork(gone(log), timeline, confirmed)
    if slot_confirmed > confirmed:
        return Fork(
            f"the slot starts at {format_lsn(slot_confirmed)}, the log was confirmed to "
            f"{format_lsn(confirmed)}: the slot was made anew or moved, and what committed between "
            "them would be missing",
            timeline,
            confirmed,
        )
    return None


def _other_cluster(logged: int | None, found: int) -> str:
    return (
        f"the log was written from the cluster with system identifier {logged}, and the server's is {found}: another cluster, "
        "or this one after pg_upgrade or a restore from a dump"
    )


def gone(log: LogPosition) -> str:
    """What to say of a slot that is not there."""
    confirmed = log.confirmed_to
    return "the slot is gone" + (
        f"; the log was confirmed to {format_lsn(confirmed[1])}" if confirmed else ""
    )


#: What has made a slot useless, as the server calls it (17 and later), in words.
_INVALIDATED: Final = {
    "wal_level_insufficient": "wal_level was below logical",
    "idle_timeout": "nobody read from it for longer than idle_replication_slot_timeout",
    "rows_removed": "the server has removed rows of its catalogs that it needs",
}


def lost(slot: Mapping[str, Any]) -> str:
    """Why the server can send nothing from this slot any more; empty: it can. `slot`: as sql/capture/source_slot.sql has it."""
    reason = slot.get("invalidation_reason")
    removed = slot.get("wal_status") == "lost" or slot["confirmed_flush_lsn"] is None
    if slot["plugin"] != "pgoutput" or not (reason or removed):
        return ""
    return _INVALIDATED.get(reason or "", "the server has removed WAL that it needs")


# -- what talks to the server -----------------------------------------------------------------------


@contextmanager
def connect(source: CaptureSource) -> Iterator[psycopg.Connection[Any]]:
    """An ordinary connection for checks; its failures are raised as Tuskline's errors.

    No call on it waits longer than `ANSWER_SECONDS` (`DeadlineError`).
    """
    try:
        conninfo = pinned_conninfo(source.dsn, application_name=f"tuskline-{source.name}")
        # Closed, not left as a context: that would end a transaction, and a question of `status.WalEnd`
        # may be under way.
        with closing(BoundedConnection.connect(conninfo, autocommit=True)) as connection:
            # What a transaction has locked it has to see as it is then, whatever the database's default is.
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            yield connection
    except psycopg.Error as error:
        if error.sqlstate is None:
            raise connection_error(str(error), source.where) from None
        text = error.diag.message_primary or str(error)
        raise server_error(error.sqlstate, text, source.where) from None


def check_cluster(
    connection: psycopg.Connection[Any], source: CaptureSource, log: LogPosition | None
) -> None:
    """Raise `DivergedError` on another cluster than the one that the log was written from, if that is known."""
    if log is None or log.system_id is None:
        return
    (found,) = _row(connection, "postgres/system_id")
    if int(found) != log.system_id:
        raise other_cluster(source, log.system_id, int(found))


def cannot_continue(
    source: CaptureSource, error: PublicationError | DivergedError
) -> PublicationError | DivergedError:
    """An error of what was streamed, with the source that it is about, and its repair."""
    if isinstance(error, PublicationError):
        return publication.missing_publication(source, error)
    return DivergedError(
        error.what,
        where=f"{source.where}, slot {source.slot}",
        repair="nothing was skipped; name the server that the log was written from in the DSN, or, if the stream is to go on from "
        f"this server: {publication.reattach(source)} --force",
    )


def other_cluster(source: CaptureSource, logged: int, found: int) -> DivergedError:
    """The error of a server of another cluster than the log's; both by their system identifiers."""
    return DivergedError(
        f"stream {source.name} has diverged: {_other_cluster(logged, found)}",
        where=source.where,
        repair=f"correct the DSN, or, if the stream is to go on from this server: {publication.reattach(source)}",
    )


def check_slot_kept(
    connection: psycopg.Connection[Any], source: CaptureSource, log: LogPosition | None
) -> None:
    """Raise `SlotError` if the stream has a history, and the slot that has to continue it is gone, or was invalidated."""
    if log is None or not log.begun:
        return
    slot = _find_slot(connection, source)
    why = gone(log) if slot is None else lost(slot)
    if why:
        raise SlotError(
            f"{why}: what was committed since is missing",
            where=f"{source.where}, slot {source.slot}",
            repair=publication.reattach(source),
        )


def prepare(
    connection: psycopg.Connection[Any], source: CaptureSource, *, has_history: bool = False
) -> int | None:
    """Check the server, make or adopt the publication and the flush table; the publication's OID.

    `has_history`: the log's stream has a history. Then nothing is made where the slot is gone or was invalidated, and no OID known.
    Raises `ServerSettingError`, `NotSupportedError`, `PublicationError`, `ConfigError` (no such table), `PrivilegeError`.
    """
    version = connection.info.server_version
    if version < OLDEST_VERSION:
        raise NotSupportedError(
            f"the server's version is {version // 10000}",
            where=source.where,
            repair="PostgreSQL 11 or later is needed",
        )
    wal_level, in_recovery, has_schema, has_tables = _row(connection, "capture/source_facts")
    if wal_level != "logical":
        raise ServerSettingError(
            f"wal_level is {wal_level}",
            where=source.where,
            repair="set wal_level = logical and restart the server",
        )
    if in_recovery:
        raise NotSupportedError(
            "the server is a standby", where=source.where, repair="name the primary in the DSN"
        )
    slot = _find_slot(connection, source)
    if has_history and (slot is None or lost(slot)):
        return None
    with connection.transaction():
        own_tables.check(connection, source.dsn)
        if not has_tables:
            connection.execute(load("flush/send").encode())
            # Once more: somebody may have made them first.
            own_tables.check(connection, source.dsn)
            connection.execute(load("flush/row").encode())
        record = ProvisionedRecord(connection, source.slot, source.dsn)
        if not has_schema:
            record.add(ProvisionedObject("schema", "tuskline"))
        kept = slot is not None and not lost(slot)
        oid = publication.create_or_adopt(
            connection, source, record, has_slot=kept, has_history=has_history
        )
        if slot is None:
            # Before it is there: a crash in between leaves a record too many, not a slot too many.
            record.add(ProvisionedObject("slot", source.slot))
    return oid


def _row(connection: psycopg.Connection[Any], text: str) -> tuple[Any, ...]:
    row = connection.execute(load(text).encode()).fetchone()
    assert row is not None, text
    return tuple(row)


def _find_slot(connection: psycopg.Connection[Any], source: CaptureSource) -> dict[str, Any] | None:
    row = connection.execute(load("capture/source_slot").encode(), {"slot": source.slot}).fetchone()
    return None if row is None else dict(row[0])


def has_slot(connection: psycopg.Connection[Any], source: CaptureSource) -> bool:
    """Whether there is a slot of the source's name for this database, of whatever use it is."""
    slot = _find_slot(connection, source)
    return slot is not None and slot["database"] == connection.info.dbname


def slot_position(connection: psycopg.Connection[Any], source: CaptureSource) -> int | None:
    """What the slot is confirmed to (an LSN), or None when there is none.

    Raises `SlotError` if the slot is not one that capture can use, `LostSlotError` if it is of no use any more,
    `SlotInUseError` if it is in use.
    """
    slot = _find_slot(connection, source)
    if slot is None:
        return None
    database = connection.info.dbname
    where = f"{source.where}, slot {source.slot}"
    if slot["plugin"] != "pgoutput" or slot["database"] != database or slot["temporary"]:
        raise SlotError(
            f"not a lasting pgoutput slot of database {database}",
            where=where,
            repair="choose another slot name",
        )
    if slot.get("two_phase"):
        raise SlotError(
            "the slot sends prepared transactions at PREPARE",
            where=where,
            repair="choose another slot name, and let Tuskline create the slot",
        )
    why = lost(slot)
    if why:
        raise LostSlotError(
            f"the slot is lost: {why}",
            where=where,
            repair=publication.reattach(source),
        )
    if slot["active"]:
        raise SlotInUseError(
            f"the slot is in use by process {slot['active_pid']}",
            where=where,
            repair="stop the other consumer; each stream needs its own slot",
        )
    return parse_lsn(slot["confirmed_flush_lsn"])
