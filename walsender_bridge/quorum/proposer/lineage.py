"""Whether a server may continue from the end of the quorum's log, and the history entries of its WAL from there.

Invariant: the log up to VCL and the server's own history agree on every timeline and its switch point. A server that was
promoted below VCL lacks WAL that may be committed, and one whose timeline the log has left lacks the rest: both are
refused. A server that was promoted above VCL is accepted; the WAL between is proposed on the old timeline, so the new
election epoch gets an entry for each timeline.
"""

from itertools import pairwise

from walsender_bridge.errors import DivergedError
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition, format_lsn
from walsender_bridge.quorum.proposer.effects import Lineage
from walsender_bridge.quorum.protocol.history import History, HistoryEntry


def of_log(log: History, vcl: Lsn) -> Lineage:
    """The timelines of the log itself up to `vcl`: a failover continues them, whichever server has the WAL."""
    entries = log.counted(vcl)
    switches = [
        WalPosition(before.timeline, after.start_lsn)
        for before, after in pairwise(entries)
        if before.timeline != after.timeline
    ]
    return Lineage(entries[-1].timeline if entries else 0, tuple(switches))


def successors(log: History, vcl: Lsn, term: int, lineage: Lineage) -> tuple[HistoryEntry, ...]:
    """The history entries of election epoch `term`, which starts at `vcl`, for a server of this lineage.

    `vcl` ends at a complete record (rule 9), as a promotion does. Raises `DivergedError`.
    """
    left = dict(lineage.switches)
    entries = log.counted(vcl)
    start = entries[-1].timeline if entries else lineage.timeline_at(vcl)
    if start != lineage.timeline and start not in left:
        raise DivergedError(
            f"the safekeepers are on timeline {start}, this server is on {lineage.timeline}",
            repair="attach the server that was promoted; run pg_rewind on this one",
        )
    for before, after in pairwise(entries):
        if before.timeline != after.timeline and left.get(before.timeline) != after.start_lsn:
            raise DivergedError(
                f"the safekeepers left timeline {before.timeline} at "
                f"{format_lsn(after.start_lsn)}, this server did not",
                repair="attach the server that was promoted, or rebuild this one from a backup of it",
            )
    if start in left and left[start] < vcl:
        raise DivergedError(
            f"this server left timeline {start} at {format_lsn(left[start])}, and the safekeepers "
            f"hold WAL up to {format_lsn(vcl)}",
            repair="promote a server that has replayed that far (docs/failover.md)",
        )
    result = [HistoryEntry(term, vcl, start)]
    following = [switch.timeline for switch in lineage.switches] + [lineage.timeline]
    for switch in lineage.switches:
        if switch.timeline >= start and switch.lsn >= vcl:
            successor = following[following.index(switch.timeline) + 1]
            result.append(HistoryEntry(term, switch.lsn, successor))
    return tuple(result)
