"""The tables that were compared with their sources and brought level, for `status`. Pure."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from walsender_bridge.runtime.times import iso_time

if TYPE_CHECKING:
    from spark_consumers.lake.comparison.leveled import Leveled


def summary(seen: "Mapping[str, Leveled]") -> dict[str, Any] | None:
    """As plain values; None if no source was reattached yet."""
    if not seen:
        return None
    level = [each.counts for each in seen.values() if not each.copied]
    return {
        "ended_at": iso_time(max(each.at for each in seen.values())),
        "tables": len(level),
        "chunks": sum(counts.chunks for counts in level),
        "different_chunks": sum(counts.different_chunks for counts in level),
        "rows": sum(counts.rows for counts in level),
        "added": sum(counts.added for counts in level),
        "removed": sum(counts.removed for counts in level),
        "copied": {name: each.copied for name, each in sorted(seen.items()) if each.copied},
    }


def line(record: Mapping[str, Any]) -> str:
    """The summary, in a line."""
    text = (
        f"tables brought level: {record['tables']}; {record['added']} rows added and {record['removed']} removed, of {record['rows']} that were"
        f" compared; {record['different_chunks']} of {record['chunks']} chunks differed"
    )
    if record["copied"]:
        text += f"; copied instead: {', '.join(record['copied'])}"
    return f"{text}; {record['ended_at']}"
