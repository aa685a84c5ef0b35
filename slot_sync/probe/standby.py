"""Reads a failover candidate (`resolver.observed.ObservedStandby`) with one query.

Its upstream is queried itself, at the address that the WAL receiver shows and with the primary's DSN otherwise: slot
names alone do not distinguish a primary from another standby or a safekeeper. A safekeeper identifies itself in its
refusal of a database connection.
"""

from dataclasses import replace
from datetime import datetime

from slot_sync.probe.primary import PROBE_SECONDS, upstream
from slot_sync.probe.slot_rows import Row, by_name, invalidation, lsn, server, two_phase_at, xid
from slot_sync.resolver.observed import ObservedStandby, SafekeeperUpstream, SlotCopy, Upstream
from slot_sync.session import BoundedSession, ExtensionSession
from walsender_bridge.errors import TusklineError
from walsender_bridge.postgres.client.hosts import at_address
from walsender_bridge.postgres.protocol.backend import REPLICATION_ONLY
from walsender_bridge.runtime.closing import Closing


class StandbyProbe(Closing):
    """Reads the candidate at `dsn`, and its upstream with the credentials of `primary_dsn`."""

    def __init__(self, dsn: str, primary_dsn: str) -> None:
        self._session = BoundedSession(dsn, seconds=PROBE_SECONDS)
        self._extended = ExtensionSession(self._session)
        self._primary_dsn = primary_dsn
        self._upstream: BoundedSession | None = None
        self._conf_load_time: int | None = None
        self._upstream_at: tuple[str, int] | None = None
        self._known: tuple[object, Upstream | SafekeeperUpstream] | None = None
        self.where = self._session.where

    def read(self) -> ObservedStandby:
        """Read the candidate. Raises as `BoundedSession.one`; an upstream that does not answer is None."""
        seen = self._observe()
        if self._conf_load_time not in {None, seen["conf_load_time"]}:
            # Each session has its own pg_conf_load_time(); a new one has the server's, which all other sessions see too.
            self._session.close()
            seen = self._observe()
        self._conf_load_time = seen["conf_load_time"]
        found = standby(seen, has_extension=seen["extended"])
        receiver = seen["receiver"] or {}
        host, port = receiver.get("sender_host"), receiver.get("sender_port")
        if not host or not port:
            return found
        return replace(
            found, upstream=self._upstream_of(receiver, found.walreceiver_start, (host, port))
        )

    def close(self) -> None:
        """Close the connections."""
        self._session.close()
        if self._upstream is not None:
            self._upstream.close()

    def _observe(self) -> Row:
        found = self._extended.one("slot_sync/standby", {}, inspected="slot_sync/inspected")
        return {**found, "extended": self._extended.found}

    def _upstream_of(
        self, receiver: Row, began: int | None, at: tuple[str, int]
    ) -> Upstream | SafekeeperUpstream | None:
        """The server that the WAL receiver streams from. Queried once per WAL receiver of a primary or a safekeeper.

        A WAL receiver process is one connection, and its walsender a child of the server that was queried: as long as
        that WAL receiver runs the server is the same, and a primary stays one until it ends.
        """
        if began is None:
            return self._ask(at)
        connection = (at, receiver.get("pid"), began)
        if self._known is None or self._known[0] != connection:
            upstream = self._ask(at)
            if upstream is None or (isinstance(upstream, Upstream) and upstream.in_recovery):
                return upstream
            self._known = connection, upstream
        return self._known[1]

    def _ask(self, at: tuple[str, int]) -> Upstream | SafekeeperUpstream | None:
        """The server at that address; None: no answer."""
        if self._upstream is None or self._upstream_at != at:
            if self._upstream is not None:
                self._upstream.close()
            # The DSN may list several hosts; only the server at this address counts.
            dsn = at_address(self._primary_dsn, *at)
            self._upstream, self._upstream_at = BoundedSession(dsn, seconds=PROBE_SECONDS), at
        try:
            return upstream(self._upstream.one("slot_sync/upstream"))
        except TusklineError as error:
            if REPLICATION_ONLY not in error.what:
                return None
            return SafekeeperUpstream(":".join(map(str, at)))


def standby(seen: Row, *, has_extension: bool) -> ObservedStandby:
    """Parse the result of sql/slot_sync/standby.sql."""
    more = by_name(seen["inspected"])
    settings = seen["settings"]
    receiver = seen["receiver"] or {}
    replay, received = lsn(seen["replay_lsn"]) or 0, lsn(seen["flush_lsn"])
    return ObservedStandby(
        **server(seen),
        conf_load_time=seen["conf_load_time"],
        clock=seen["clock"],
        hot_standby_feedback=settings["hot_standby_feedback"] == "on",
        wal_receiver_status_interval=int(settings["wal_receiver_status_interval"]),
        # In version 11 it is in recovery.conf only.
        primary_slot_name=settings.get("primary_slot_name") or receiver.get("slot_name"),
        walreceiver_status=receiver.get("status"),
        walreceiver_slot_name=receiver.get("slot_name"),
        walreceiver_start=seen["receiver_start"],
        upstream=None,
        replay_lsn=replay,
        flush_lsn=max(replay, received or 0),
        replays_archive=received is not None and received < replay,
        # A slot that `inspect` no longer shows has just been dropped.
        slots=tuple(
            _copy(row, more.get(row["slot_name"]))
            for row in seen["slots"]
            if row["slot_name"] in more or not has_extension
        ),
        has_extension=has_extension,
        native_sync=settings.get("sync_replication_slots") == "on",
        slot_wal_segments=_slot_wal_segments(settings),
        segment_bytes=int(settings["wal_segment_size"]),
        idle_timeout=(seen["idle_timeout"] or 0) * 1_000_000,
    )


def _copy(row: Row, inspected: Row | None) -> SlotCopy:
    """Parse one slot. Fields that only the extension shows stay empty without it."""
    own = inspected or {}
    shown = inspected or row
    return SlotCopy(
        name=row["slot_name"],
        plugin=row["plugin"],
        database=row["database"],
        persistency=own.get("persistency") or ("temporary" if row["temporary"] else "persistent"),
        restart_lsn=lsn(shown["restart_lsn"]),
        confirmed_flush_lsn=lsn(shown["confirmed_flush_lsn"]),
        catalog_xmin=xid(shown["catalog_xmin"]),
        effective_catalog_xmin=xid(shown.get("effective_catalog_xmin") or shown["catalog_xmin"]),
        active_pid=shown["active_pid"],
        two_phase=bool(shown.get("two_phase")),
        two_phase_at=two_phase_at(shown),
        synced=bool(shown.get("synced")),
        failover=bool(row.get("failover")),
        invalidation=invalidation(row, own),
        snapshot_present=own.get("snapshot_present"),
        snapshot_complete=own.get("snapshot_complete"),
        foreign_snapshot_after=own.get("foreign_snapshot_after"),
        wal_present=own.get("wal_present"),
        mappings_complete=own.get("mappings_complete"),
        incarnation_id=own.get("marker"),
        inactive_since=_microseconds(row.get("inactive_since")),
        datoid=int(row["datoid"] or 0),
    )


def _microseconds(text: str | None) -> int | None:
    """A JSON timestamp in microseconds since 1970; None for NULL, or where the major version lacks the column."""
    return None if text is None else round(datetime.fromisoformat(text).timestamp() * 1e6)


def _slot_wal_segments(settings: Row) -> int | None:
    """The WAL that checkpoints retain for slots at least; None: no limit.

    Both settings are in MB (13+), and the server rounds each down to whole segments.
    """
    limit = int(settings.get("max_slot_wal_keep_size") or -1)
    if limit < 0:
        return None
    megabytes = max(limit, int(settings.get("wal_keep_size") or 0))
    return megabytes * 1024 * 1024 // int(settings["wal_segment_size"])
