"""Checks a source before streaming: server, publication, slot, and whether its history is the log's.

The publication is created before the slot, since pgoutput looks it up as of each change. Existing objects are
adopted if they are suitable, and never reduced. `evaluate` decides, without I/O, whether the slot continues the
log. A session starts only if

- the server is of the cluster that the log was written from (its system identifier);
- the slot is confirmed to no more than the log's `confirmed_to`: nothing was skipped;
- the server's timelines contain `confirmed_to` and the end of the log, and its WAL reaches both: the server
  has the log's transactions too.

The cluster is compared first: on another cluster the publication and the slot are missing as well, and must not be created.

Otherwise the stream has diverged. Nothing is skipped or repaired here. `evaluate` cannot detect a copy of
the cluster that continued independently past the log's end; `overlap.py` does, from the transactions sent again.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
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
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition, format_lsn, parse_lsn
from walsender_bridge.postgres.protocol.refusals import connection_error, server_error
from walsender_bridge.postgres.protocol.replication import ServerTimelines, SystemIdentity
from walsender_bridge.runtime.sql import load

#: Oldest server that pgoutput and this code are tested with: its version number.
OLDEST_VERSION = 110000


@dataclass(frozen=True, slots=True)
class CaptureSource:
    """A database to capture. `tables`: see `table_patterns`; empty means all publishable tables."""

    name: str
    dsn: str = field(repr=False)
    slot: str
    publication: str
    tables: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """`host:port/database`, for messages."""
        return describe(self.dsn)


def application_name(source: CaptureSource) -> str:
    """The application_name of capture's streaming session, truncated as the server truncates it."""
    return f"tuskline-capture-{source.name}"[:63]


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The position of a log stream: its last transaction, and the LSN up to which the slot may have been confirmed.

    `system_id`: of the cluster that it is written from; None if the log has not recorded it yet.
    """

    timeline: int
    last_end_lsn: Lsn
    confirmed_to: WalPosition | None
    system_id: int | None = None

    @property
    def begun(self) -> bool:
        """Whether the stream has a history that a slot must continue."""
        return self.confirmed_to is not None or self.last_end_lsn > 0


@dataclass(frozen=True, slots=True)
class Fork:
    """Why a slot does not continue a log, and the point of the log after which the histories differ.

    `former`: the server is on an older timeline than the log, like a former primary that has come back.
    """

    reason: str
    timeline: int
    lsn: Lsn
    former: bool = False

    def repair(self, restart: str) -> str:
        """What to do. `restart`: to continue from this server."""
        if self.former:
            return (
                "stop this former primary, or correct the DSN, and capture continues from the new primary;"
                f" to give up that one's changes, {restart}"
            )
        return restart


def evaluate(
    log: LogPosition, slot_confirmed: Lsn | None, identity: SystemIdentity, history: ServerTimelines
) -> Fork | None:
    """None if the slot continues the log; `slot_confirmed` is None when there is no such slot."""
    if log.system_id not in {None, identity.system_id}:
        return Fork(_other_cluster(log.system_id, identity.system_id), log.timeline, 0)
    if log.confirmed_to is None:
        if log.last_end_lsn:
            reason = "the log has transactions but no confirmed position of the slot"
            return Fork(reason, log.timeline, 0)
        return None
    timeline, confirmed = log.confirmed_to
    for own_timeline, lsn in (log.confirmed_to, WalPosition(log.timeline, log.last_end_lsn)):
        if lsn and not history.contains(own_timeline, lsn):
            end, where = history.end_of(own_timeline) or 0, format_lsn(lsn)
            return Fork(
                f"the log reaches {where} on timeline {own_timeline}, which the server left at {format_lsn(end)}"
                if end
                else f"the log reaches {where} on timeline {own_timeline}, which the server was never on",
                own_timeline,
                end,
                former=own_timeline > identity.timeline,
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
            f"{format_lsn(confirmed)}: the slot was recreated or moved, and transactions committed in between "
            "would be missing",
            timeline,
            confirmed,
        )
    return None


def _other_cluster(logged: int | None, found: int) -> str:
    return (
        f"the log was written from the cluster with system identifier {logged}, but the server's is {found}: it is another "
        "cluster, or the same one after pg_upgrade or a restore from a dump"
    )


def gone(log: LogPosition) -> str:
    """The message for a slot that no longer exists."""
    confirmed = log.confirmed_to
    return "the slot is gone" + (
        f"; the log was confirmed to {format_lsn(confirmed.lsn)}" if confirmed else ""
    )


#: Explanations of the server's invalidation reasons (17 and later).
_INVALIDATED: Final = {
    "wal_level_insufficient": "wal_level was below logical",
    "idle_timeout": "it was idle for longer than idle_replication_slot_timeout",
    "rows_removed": "the server has removed catalog rows that the slot needs",
}


def lost(slot: Mapping[str, Any]) -> str:
    """Why the slot was invalidated; empty if it was not. `slot`: a row of sql/capture/source_slot.sql."""
    reason = slot.get("invalidation_reason")
    removed = slot.get("wal_status") == "lost" or slot["confirmed_flush_lsn"] is None
    if slot["plugin"] != "pgoutput" or not (reason or removed):
        return ""
    return _INVALIDATED.get(reason or "", "the server has removed WAL that the slot needs")


# -- queries to the server --------------------------------------------------------------------------


@contextmanager
def connect(source: CaptureSource) -> Iterator[psycopg.Connection[Any]]:
    """Open an ordinary connection for checks; failures are raised as Tuskline's errors.

    No call on it blocks longer than `ANSWER_SECONDS` (`DeadlineError`).
    """
    try:
        conninfo = pinned_conninfo(source.dsn, application_name=f"tuskline-{source.name}")
        # Closed explicitly rather than as a context manager: that would end a transaction while a query of
        # `status.WalEnd` may be in progress.
        with closing(BoundedConnection.connect(conninfo, autocommit=True)) as connection:
            # A transaction must see objects as they are once it has locked them, whatever default_transaction_isolation is.
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
    """Raise `DivergedError` if the server is of another cluster than the log, as far as that is known."""
    if log is None or log.system_id is None:
        return
    (found,) = _row(connection, "postgres/system_id")
    if int(found) != log.system_id:
        raise other_cluster(source, log.system_id, int(found))


def cannot_continue(
    source: CaptureSource, error: PublicationError | DivergedError
) -> PublicationError | DivergedError:
    """Return an error of the stream with its source and repair added."""
    if isinstance(error, PublicationError):
        return publication.missing_publication(source, error)
    return DivergedError(
        error.what,
        where=f"{source.where}, slot {source.slot}",
        repair="nothing was skipped; correct the DSN to name the server that the log was written from, or, to continue from "
        f"this server, run {publication.reattach(source)} --force",
    )


def other_cluster(source: CaptureSource, logged: int, found: int) -> DivergedError:
    """The error for a server of another cluster than the log's. Both are system identifiers."""
    return DivergedError(
        f"stream {source.name} has diverged: {_other_cluster(logged, found)}",
        where=source.where,
        repair=f"correct the DSN, or, to continue from this server, run {publication.reattach(source)}",
    )


def check_slot_kept(
    connection: psycopg.Connection[Any], source: CaptureSource, log: LogPosition | None
) -> None:
    """Raise `SlotError` if the stream has a history and the slot that must continue it is gone or invalidated."""
    if log is None or not log.begun:
        return
    slot = _find_slot(connection, source)
    why = gone(log) if slot is None else lost(slot)
    if why:
        raise SlotError(
            f"{why}: changes committed since then are missing",
            where=f"{source.where}, slot {source.slot}",
            repair=publication.reattach(source),
        )


def prepare(
    connection: psycopg.Connection[Any], source: CaptureSource, *, has_history: bool = False
) -> int | None:
    """Check the server, create or adopt the publication and the flush table; return the publication's OID.

    `has_history`: the log's stream has a history. If its slot is gone or invalidated, nothing is created and None is returned.
    Raises `ServerSettingError`, `NotSupportedError`, `PublicationError`, `ConfigError` (no such table), `PrivilegeError`.
    """
    version = connection.info.server_version
    if version < OLDEST_VERSION:
        raise NotSupportedError(
            f"unsupported server version {version // 10000}",
            where=source.where,
            repair="use PostgreSQL 11 or later",
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
            "the server is a standby",
            where=source.where,
            repair="change the DSN to name the primary",
        )
    slot = _find_slot(connection, source)
    if has_history and (slot is None or lost(slot)):
        return None
    with connection.transaction():
        own_tables.check(connection, source.dsn)
        if not has_tables:
            connection.execute(load("flush/send").encode())
            # Check again: another session may have created them first.
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
            # Recorded before it exists: a crash in between leaves a surplus record, not a surplus slot.
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
    """Whether a slot of the source's name exists in this database, usable or not."""
    slot = _find_slot(connection, source)
    return slot is not None and slot["database"] == connection.info.dbname


def _in_use(
    connection: psycopg.Connection[Any], source: CaptureSource, pid: int, where: str
) -> SlotInUseError:
    """The error for a slot that this process of the server uses: for a capture of this source, or for another consumer."""
    query = "SELECT application_name, host(client_addr) FROM pg_stat_activity WHERE pid = %s"
    name, host = connection.execute(query, (pid,)).fetchone() or ("", None)
    if name != application_name(source):
        return SlotInUseError(
            f"the slot is in use by process {pid}",
            where=where,
            repair="stop the other consumer; each stream needs its own slot",
        )
    return SlotInUseError(
        f"the slot is in use by process {pid}, the walsender of a capture of this source"
        + (f" at {host}" if host else ""),
        where=where,
        repair="wait: of a bridge that was cut off or replaced, the server ends that session after wal_sender_timeout;"
        " if a bridge still runs there, stop one of the two",
    )


def slot_position(connection: psycopg.Connection[Any], source: CaptureSource) -> Lsn | None:
    """The slot's `confirmed_flush_lsn`, or None if there is no slot.

    Raises `SlotError` if capture cannot use the slot, `LostSlotError` if it was invalidated, `SlotInUseError` if it is
    in use.
    """
    slot = _find_slot(connection, source)
    if slot is None:
        return None
    database = connection.info.dbname
    where = f"{source.where}, slot {source.slot}"
    if slot["plugin"] != "pgoutput" or slot["database"] != database or slot["temporary"]:
        raise SlotError(
            f"not a permanent pgoutput slot of database {database}",
            where=where,
            repair="choose another slot name",
        )
    if slot.get("two_phase"):
        raise SlotError(
            "the slot decodes prepared transactions at PREPARE (two_phase)",
            where=where,
            repair="choose another slot name and let Tuskline create the slot",
        )
    why = lost(slot)
    if why:
        raise LostSlotError(
            f"the slot is lost: {why}",
            where=where,
            repair=publication.reattach(source),
        )
    if slot["active"]:
        raise _in_use(connection, source, slot["active_pid"], where)
    return parse_lsn(slot["confirmed_flush_lsn"])
