"""Reads a primary (`resolver.observed.ObservedPrimary`) with one query."""

from typing import Any, Final

from slot_sync.probe.slot_rows import Row, by_name, invalidation, lsn, server, two_phase_at, xid
from slot_sync.resolver.observed import LogicalSlot, ObservedPrimary, PhysicalSlot, Upstream
from slot_sync.session import BoundedSession, ExtensionSession
from walsender_bridge.runtime.closing import Closing

#: Seconds within which a server answers a query that reads only memory and a few small files.
PROBE_SECONDS: Final = 5.0


class PrimaryProbe(Closing):
    """Reads the primary at a DSN. `wants_turn`: each read also tries to take the lock of the active controller."""

    def __init__(self, dsn: str, *, wants_turn: bool = False) -> None:
        self._session = BoundedSession(dsn, seconds=PROBE_SECONDS)
        self._extended = ExtensionSession(self._session)
        self._wants_turn = wants_turn
        self.where = self._session.where
        #: Whether this session held the lock at the last read.
        self.has_turn = False

    def read(self) -> ObservedPrimary:
        """Read the primary. Raises as `BoundedSession.one`."""
        self.has_turn = False
        values = {"turn": self._wants_turn}
        seen = self._extended.one("slot_sync/primary", values, inspected="slot_sync/marked")
        self.has_turn = bool(seen["turn"])
        return primary(seen, has_extension=self._extended.found)

    def close(self) -> None:
        """Close the connection."""
        self._session.close()


def primary(seen: Row, *, has_extension: bool) -> ObservedPrimary:
    """Parse the result of sql/slot_sync/primary.sql."""
    more = by_name(seen["inspected"])
    senders = {row["pid"]: row for row in seen["senders"]}
    physical = [
        _physical(row, more.get(row["slot_name"], {}), senders.get(row["active_pid"], {}))
        for row in seen["physical"]
    ]
    logical = [_logical(row, more.get(row["slot_name"], {})) for row in seen["logical"]]
    return ObservedPrimary(
        **server(seen),
        wal_lsn=lsn(seen["wal_lsn"]) or 0,
        logical_slots=tuple(logical),
        physical_slots=tuple(physical),
        has_extension=has_extension,
        locked_databases=frozenset(int(row["oid"]) for row in seen["databases"] if row["locked"]),
    )


def upstream(seen: Row) -> Upstream:
    """Parse the result of sql/slot_sync/upstream.sql."""
    return Upstream(int(seen["system_id"]), seen["in_recovery"], seen["postmaster_start"])


def _logical(row: Row, inspected: Row) -> LogicalSlot:
    return LogicalSlot(
        name=row["slot_name"],
        plugin=row["plugin"],
        database=row["database"],
        restart_lsn=lsn(row["restart_lsn"]),
        confirmed_flush_lsn=lsn(row["confirmed_flush_lsn"]),
        catalog_xmin=xid(row["catalog_xmin"]),
        two_phase=bool(row.get("two_phase")),
        two_phase_at=two_phase_at(inspected if "two_phase_at" in inspected else row),
        temporary=row["temporary"],
        failover=bool(row.get("failover")),
        active_pid=row["active_pid"],
        wal_status=row.get("wal_status"),
        invalidation=invalidation(row, inspected),
        datoid=int(row["datoid"]),
        incarnation_id=inspected.get("marker"),
    )


def _physical(row: Row, inspected: Row, sender: Row) -> PhysicalSlot:
    values: dict[str, Any] = {
        "backend_start": sender.get("backend_start"),
        "reply_time": sender.get("reply_time"),
        "flush_lsn": lsn(sender.get("flush_lsn")),
    }
    return PhysicalSlot(
        name=row["slot_name"],
        restart_lsn=lsn(row["restart_lsn"]),
        xmin=xid(row["xmin"]),
        catalog_xmin=xid(row["catalog_xmin"]),
        incarnation_id=inspected.get("marker"),
        active_pid=row["active_pid"],
        wal_status=row.get("wal_status"),
        invalidation=invalidation(row, inspected),
        **values,
    )
