"""How much of the log a reader takes at once, as the commits at which it may end. Pure."""

from collections.abc import Iterable

from walsender_bridge.change_log.protocol import MAX_PLAN, CutPoint
from walsender_bridge.change_log.replica.disk import IndexRow


def cut_point(row: IndexRow) -> CutPoint:
    """Convert a commit to a cut."""
    at = row.position
    return CutPoint(row.context.version, at.end_offset, at.bytes_total, at.end_lsn, at.commit_time)


def planned(
    rows: Iterable[IndexRow], up_to_version: int, max_bytes: int | None, max_versions: int | None
) -> list[CutPoint]:
    """See `ReplicaClient.plan`. `rows`: the commits behind an offset, in order; no more are taken than are needed."""
    cuts: list[CutPoint] = []
    most = min(max_versions or MAX_PLAN, MAX_PLAN)
    base: int | None = None
    for row in rows:
        total = row.position.bytes_total
        base = total - row.size if base is None else base
        too_big = max_bytes is not None and cuts and total - base > max_bytes
        if row.context.version > up_to_version or len(cuts) == most or too_big:
            break
        cuts.append(cut_point(row))
    return cuts
