"""Rows of pg_replication_slots and of the extension's `inspect` as they come in JSON, for both sides alike."""

from collections.abc import Mapping
from typing import Any

from walsender_bridge.wire.lsn import parse_lsn

Row = Mapping[str, Any]


def lsn(text: str | None) -> int | None:
    """A position; None for NULL."""
    return None if text is None else parse_lsn(text)


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


def by_name(rows: list[Row]) -> dict[str, Row]:
    """What `inspect` said, by slot."""
    return {row["slot_name"]: row for row in rows}
