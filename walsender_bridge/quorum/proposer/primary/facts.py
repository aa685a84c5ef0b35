"""The primary as a proposer needs it: its identity, and the slot that keeps its WAL.

A permanent physical slot that no connection uses keeps the WAL that a safekeeper still lacks. (The streaming connection
has no slot: a slot there would follow the reported position, and release what laggards need.)
"""

import os
from typing import Self

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from walsender_bridge.errors import (
    ConnectionFailedError,
    SlotError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.client.dsn import parameters
from walsender_bridge.postgres.client.replication_connection import (
    ANSWER_SECONDS,
    ReplicationConnection,
    describe,
    pinned_conninfo,
)
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.postgres.protocol.refusals import server_error
from walsender_bridge.postgres.protocol.replication import quote_slot, start_physical
from walsender_bridge.quorum.proposer.effects import Lineage, Primary
from walsender_bridge.quorum.protocol.messages import ServerInfo
from walsender_bridge.runtime.closing import Closing
from walsender_bridge.runtime.sql import load

#: For each command: VACUUM FULL of a catalog holds its lock until the quorum has its COMMIT.
_LOCK_OPTION = "-c lock_timeout=5s"
#: How often a slot is created that a checkpoint invalidates at once.
_RESERVATIONS = 3
_UNITS = {"": 1, "B": 1, "kB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


class PrimaryStream(ReplicationConnection):
    """A connection that can stream physical WAL."""

    @classmethod
    def connect(
        cls, dsn: str, *, application_name: str = "tuskline", replication: str = "database"
    ) -> Self:
        """See `ReplicationConnection.connect`. Has run IDENTIFY_SYSTEM: before 15 a standby streams only after it.

        No command waits longer for a lock than `_LOCK_OPTION` allows. Raises `UnavailableError` when the server runs, but a
        lock keeps sessions of the database from starting.
        """
        asked = f"{parameters(dsn).get('options') or ''} {_LOCK_OPTION}".strip()
        try:
            connection = super().connect(
                make_conninfo(dsn, options=asked),
                application_name=application_name,
                replication=replication,
            )
        except ConnectionFailedError as error:
            if replication != "database" or "timeout expired" not in error.what:
                raise
            if not _runs(dsn, application_name):
                raise
            raise UnavailableError(
                "the server runs, but no session of this database can start: most likely, one of its catalogs is locked",
                where=error.where,
                repair="the connection is retried; in another database, such as template1, SELECT l.pid, a.query FROM pg_locks"
                " AS l JOIN pg_stat_activity AS a USING (pid) WHERE l.mode = 'AccessExclusiveLock' names the holder,"
                " and SELECT pg_cancel_backend(pid) ends a VACUUM FULL or LOCK that waits for the quorum itself",
            ) from None
        try:
            connection.identify()
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def plain(self) -> bool:
        """Whether the protocol is sent unencrypted: no TLS, no GSSAPI."""
        return not self._pgconn.ssl_in_use and not self._pgconn.used_gssapi

    @property
    def pgconn(self) -> pq.abc.PGconn:
        """The libpq connection, for its next owner."""
        return self._pgconn

    def dup(self) -> int:
        """A descriptor of its own for the socket."""
        return os.dup(self._pgconn.socket)

    def server_info(self) -> ServerInfo:
        """The server's identity."""
        identity = self.identify()
        ((text,),) = self.command("SHOW wal_segment_size", timeout=ANSWER_SECONDS)
        digits = (text or "").rstrip("BkMG")
        size = int(digits) * _UNITS[(text or "")[len(digits) :]]
        return ServerInfo(identity.system_id, self.server_version // 10000, size)

    def primary(self) -> Primary:
        """Its timelines and flush position."""
        identity = self.identify()
        history = self.history(identity.timeline)
        return Primary(Lineage(identity.timeline, history.ancestors), identity.flush_lsn)

    def hold_wal(self, slot: str) -> Lsn:
        """Create the slot that keeps WAL, unless it exists; returns the LSN of the oldest WAL kept.

        An invalidated slot keeps nothing, and is replaced: the comparison shows whether the WAL that it kept is still needed
        (`StopReason.REMOVED`). Raises `SlotError` for a foreign slot of that name, and what `command` raises.

        WAL that is flushed after this returns is kept, so read positions afterwards. A checkpoint that began earlier may not
        know the slot, and removes WAL below its redo pointer only; the slot was reserved there, or, by minor versions without
        a lock between the two, at the previous one. Then that checkpoint invalidates it, often before it is read here.
        """
        asked = load("quorum/wal_slot").strip().rstrip(";").replace("%(slot)s", f"'{slot}'")
        rows = self.command(asked, timeout=ANSWER_SECONDS)
        for _ in range(_RESERVATIONS):
            lost = bool(rows) and rows[0][0] == "physical" and rows[0][3] == "lost"
            if rows and not lost:
                break
            if lost:
                self.command(f"DROP_REPLICATION_SLOT {quote_slot(slot)}", timeout=ANSWER_SECONDS)
            self.command(
                f"CREATE_REPLICATION_SLOT {quote_slot(slot)} PHYSICAL RESERVE_WAL",
                timeout=ANSWER_SECONDS,
            )
            rows = self.command(asked, timeout=ANSWER_SECONDS)
        ((kind, restart, active, _),) = rows
        if kind != "physical" or active == "t" or restart is None:
            raise SlotError(
                f"slot {slot!r} is not an idle physical slot that keeps WAL",
                where=self.where,
                repair="drop it, or choose another name for the safekeepers' slot",
            )
        return int(restart)

    def start_physical(self, lsn: Lsn, timeline: int) -> None:
        """Start streaming the WAL of `timeline` from `lsn`, and wait for the answer.

        Afterwards only `receive`, `send` and `flush` may be used; data that arrived with the answer does not make the socket
        readable.
        """
        self._ask(start_physical(lsn, timeline), ANSWER_SECONDS, copies=True)


def _runs(dsn: str, application_name: str) -> bool:
    """Whether the server accepts a walsender without a database, which reads no catalogs of one."""
    try:
        with ReplicationConnection.connect(
            dsn, application_name=application_name, replication="true"
        ) as physical:
            physical.identify()
    except TusklineError:
        # It does not, or pg_hba.conf or max_wal_senders excludes this kind of connection.
        return False
    return True


class WalSlot(Closing):
    """Advances the slot that keeps WAL, over one connection. Blocks: it runs in the blocking executor."""

    def __init__(self, dsn: str, slot: str) -> None:
        self._dsn = dsn
        self._slot = slot
        self._connection: psycopg.Connection | None = None

    def advance(self, lsn: Lsn) -> Lsn:
        """Release the WAL below `lsn`; returns `lsn`. Raises the server's error, as `server_error` converts it."""
        try:
            if self._connection is None or self._connection.broken:
                conninfo = pinned_conninfo(self._dsn, application_name="tuskline-wal-slot")
                self._connection = BoundedConnection.connect(conninfo, autocommit=True)
            self._connection.execute(
                load("quorum/wal_slot_advance").encode(),
                {"slot": self._slot, "lsn": format_lsn(lsn)},
            )
        except psycopg.Error as error:
            self.close()
            if error.sqlstate is None:
                raise ConnectionFailedError(str(error), where=describe(self._dsn)) from None
            raise server_error(error.sqlstate, str(error), describe(self._dsn)) from None
        return lsn

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
