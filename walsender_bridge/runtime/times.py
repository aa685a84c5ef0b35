"""Times as people and programs read them: ISO 8601, UTC. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def iso_time(seconds: float | None) -> str | None:
    """`2026-01-31T12:00:00.123Z` for seconds since the Unix epoch; None stays, and so does a time that never was (0)."""
    if not seconds:
        return None
    moment = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return moment.replace("+00:00", "Z")


def with_iso_times(record: Mapping[str, Any], *names: str, unit: float = 1.0) -> dict[str, Any]:
    """The record with these of its times, numbers of `unit` seconds, as `iso_time` writes them; those it lacks stay away."""
    times = {name: record[name] for name in names if name in record}
    return {**record, **{n: None if t is None else iso_time(t * unit) for n, t in times.items()}}


def iso_time_of_microseconds(time: int) -> str | None:
    """As `iso_time`. A time beyond the year 9999, which a client may give a transaction, is shown as that number."""
    try:
        return iso_time(time / 1e6)
    except (ValueError, OverflowError, OSError):
        return f"{time} us"
