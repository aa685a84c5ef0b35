"""Times as people and programs read them: ISO 8601, UTC. Pure."""

from datetime import UTC, datetime


def iso_time(seconds: float | None) -> str | None:
    """`2026-01-31T12:00:00.123Z` for seconds since the Unix epoch; None stays, and so does a time that never was (0)."""
    if not seconds:
        return None
    moment = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return moment.replace("+00:00", "Z")
