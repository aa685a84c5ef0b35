"""Where a copy comes from, and whether the log's changes continue it. Pure.

A copy holds what was committed below an LSN of one timeline of one cluster. After a failover the same LSN of
the next timeline is another history: what the copy has beyond the fork was never committed there, and what was
committed there below the copy's LSN is not in the copy. So

- a copy comes from the log's cluster, from the log's timeline or a later one, and not from a server behind the log;
- it is published when the log has passed its LSN on its own timeline: then the changes that follow continue it;
- when the log moves to a later timeline before that, the copy is discarded. The fork may lie beyond its LSN, but then
  little is lost: the copy was not published yet.

The log shows its readers only what the commit gate has let through, so a copy is published when the gate has passed
its LSN.
"""

from dataclasses import dataclass
from enum import Enum, auto

from spark_consumers.lake.manifest.table_version import TableVersion
from walsender_bridge.change_log.client import StreamCut
from walsender_bridge.errors import DivergedError, UnavailableError
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn


class Joins(Enum):
    """Whether the changes behind a cut of the log continue a copy."""

    NOW = auto()
    LATER = auto()
    NEVER = auto()


def joins(copy: TableVersion, timeline: int, lsn: Lsn) -> Joins:
    """Whether the changes behind this cut (timeline and end LSN of its last transaction) continue the copy."""
    if timeline > copy.timeline:
        return Joins.NEVER
    has_come = not copy.is_partial and lsn >= copy.start_lsn
    return Joins.NOW if timeline == copy.timeline and has_come else Joins.LATER


@dataclass(frozen=True, slots=True)
class Origin:
    """The server that a copy is read from, and the LSN of its snapshot."""

    system_id: int
    timeline: int
    lsn: Lsn


def check(origin: Origin, stream: str, system_id: int | None, cut: StreamCut) -> None:
    """See that a copy from there can join the log, which was at `cut` before the snapshot was made.

    `system_id`: the cluster that the log is of, if it is known. Raises `DivergedError` for another cluster,
    `UnavailableError` for a server that the log has left behind, or that is behind the log.
    """
    if system_id is not None and origin.system_id != system_id:
        raise DivergedError(
            f"its server has system identifier {origin.system_id}, but the log has {system_id}",
            where=stream,
            repair="correct the source's DSN",
        )
    if origin.timeline < cut.timeline:
        raise UnavailableError(
            f"its server is on timeline {origin.timeline}, but the log is on timeline {cut.timeline}",
            where=stream,
            repair="point the source's DSN at the new primary",
        )
    if origin.timeline == cut.timeline and origin.lsn < cut.last_end_lsn:
        raise UnavailableError(
            f"its server is at {format_lsn(origin.lsn)}, behind the log's {format_lsn(cut.last_end_lsn)}",
            where=stream,
            repair="point the source's DSN at the primary (target_session_attrs=read-write)",
        )
