"""Rows of pg_replication_slots and of the extension's `inspect` as they come in JSON, for both sides alike."""

from collections.abc import Mapping
from typing import Any

from walsender_bridge.postgres.protocol.lsn import Lsn, parse_lsn

Row = Mapping[str, Any]


def lsn(text: str | None) -> Lsn | None:
    """A position; None for NULL."""
    return None if text is None else parse_lsn(text)


def two_phase_at(row: Row) -> Lsn | None:
    """Where two_phase of a slot began, of what shows it (the extension, or the view from 18 on); None: it is off.

    0: it was switched on with ALTER_REPLICATION_SLOT (18), which leaves it empty; then whatever is prepared is sent at
    its PREPARE. None too for a slot that has two_phase, if the row does not show where it began.
    """
    if not row.get("two_phase") or "two_phase_at" not in row:
        return None
    return lsn(row["two_phase_at"]) or 0


def xid(text: str | None) -> int | None:
    """A transaction; None for NULL."""
    return None if text is None else int(text)


def invalidation(shown: Row, inspected: Row) -> str | None:
    """Why the slot can no longer be used, in the words of 18; None: it can."""
    reason = inspected.get("invalidation") or shown.get("invalidation_reason")
    if reason is not None:
        return str(reason)
    if shown.get("wal_status") == "lost":
        return "wal_removed"
    return "rows_removed" if shown.get("conflicting") else None


def server(seen: Row) -> dict[str, Any]:
    """The fields that `ObservedPrimary` and `ObservedStandby` have in common."""
    return {
        "system_id": int(seen["system_id"]),
        "timeline": seen["timeline"],
        "in_recovery": seen["in_recovery"],
        "postmaster_start": seen["postmaster_start"],
        "version": seen["version"],
        "wal_level": seen["wal_level"],
        # The xmin of each database's row, by oid.
        "databases": {int(row["oid"]): int(row["xmin"]) for row in seen["databases"]},
    }


def by_name(rows: list[Row]) -> dict[str, Row]:
    """The rows of `inspect`, by slot."""
    return {row["slot_name"]: row for row in rows}
