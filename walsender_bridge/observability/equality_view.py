"""The last result of `tuskline verify`, for `status`, `/metrics` and `doctor`."""

from typing import TYPE_CHECKING, Any, Final

from walsender_bridge.runtime.times import iso_time

if TYPE_CHECKING:
    from spark_consumers.lake.equality.record import EqualityRecord

#: Tables that a sentence names.
_NAMED: Final = 5


def summary(seen: "EqualityRecord | None") -> dict[str, Any] | None:
    """As plain values; None if the lake was never compared with its sources."""
    if seen is None:
        return None
    from spark_consumers.lake.equality.record import DIFFERENT, EQUAL, NOT_COMPARED

    results = seen.results
    tables = results.values()
    return {
        "began_at": iso_time(seen.began_at),
        "ended_at": iso_time(seen.ended_at) if seen.ended_at else None,
        "sample": seen.sample,
        "tables": len(tables),
        "equal": sum(table.state == EQUAL for table in tables),
        "different": different(seen),
        "not_compared": sorted(n for n, t in results.items() if t.state == NOT_COMPARED),
        "rows": sum(table.rows for table in tables),
        "chunks": sum(table.chunks for table in tables),
        "chunks_done": sum(len(table.done) for table in tables),
        "different_chunks": sum(table.different_chunks for table in tables),
        "cut_epoch": max((table.epoch for table in tables), default=0) or None,
        "result": DIFFERENT if different(seen) else "ended" if seen.ended_at else "not finished",
    }


def different(seen: "EqualityRecord | None") -> list[str]:
    """The tables in which differences were found."""
    return sorted(n for n, t in seen.results.items() if t.different_chunks) if seen else []


def line(record: dict[str, Any]) -> str:
    """The summary, in a line."""
    text = (
        f"{record['equal']} of {record['tables']} tables equal, {len(record['different'])} different,"
        f" {len(record['not_compared'])} not compared; {record['rows']} rows in {record['chunks_done']} of {record['chunks']} chunks"
    )
    return f"{text}; {record['ended_at'] or 'not finished'}"


def trouble(seen: "EqualityRecord | None") -> str:
    """What is to be done about differences, as a sentence; empty without any."""
    names = different(seen)
    if not names:
        return ""
    shown = ", ".join(names[:_NAMED]) + (" and others" if len(names) > _NAMED else "")
    return f"tuskline verify found differences between the source and the lake in {shown}"


#: What to do about them.
REPAIR: Final = "report them, then copy the tables again (tuskline table resync) and verify again"
