"""Which tables' Delta logs are behind, for `status` and `doctor`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from spark_consumers.lake.delta_log.record import Behind, DeltaRecord

#: Tables that a sentence names.
_NAMED: Final = 5
#: What to do about them.
REPAIR: Final = (
    "read these by Iceberg meanwhile; docs/delta.md says what each table that cannot be one needs"
)


def summary(seen: "DeltaRecord | None") -> dict[str, Any] | None:
    """As plain values; None if the lake has no Delta logs."""
    return None if seen is None else asdict(seen)


def line(record: dict[str, Any]) -> str:
    """The summary, in a line."""
    behind = record["behind"]
    text = f"{record['tables'] - len(behind)} of {record['tables']} tables at their newest epoch"
    return f"{text}; behind: {', '.join(sorted(behind))}" if behind else text


def trouble(seen: "DeltaRecord | None") -> str:
    """Which logs are behind and why, as a sentence; empty if none is."""
    if seen is None or not seen.behind:
        return ""
    names = sorted(seen.behind)
    told = "; ".join(f"{name} {_how(seen.behind[name])}" for name in names[:_NAMED])
    more = f"; and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return f"Delta logs do not show the newest epoch of {len(names)} tables: {told}{more}"


def _how(table: "Behind") -> str:
    shown = "shows none" if table.shown is None else f"shows epoch {table.shown}"
    return f"{shown} of {table.newest}, because {table.reason}"
