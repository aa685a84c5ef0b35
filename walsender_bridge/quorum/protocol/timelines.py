"""The epoch history of a log in PostgreSQL's terms: timelines and their switch points. Pure."""

from walsender_bridge.postgres.protocol import replication
from walsender_bridge.postgres.protocol.lsn import WalPosition, format_lsn
from walsender_bridge.quorum.protocol.history import History


def server_history(history: History) -> replication.ServerTimelines:
    """The newest timeline, and those before it that the log still knows of."""
    switches: list[WalPosition] = []
    timeline = 0
    for entry in history.entries:
        if timeline and entry.timeline != timeline:
            switches.append(WalPosition(timeline, entry.start_lsn))
        timeline = entry.timeline
    return replication.ServerTimelines(timeline, tuple(switches))


def history_file(
    history: History, ancestors: tuple[WalPosition, ...] = ()
) -> tuple[int, bytes] | None:
    """(newest timeline, contents of its `.history` file); None for timeline 1, which has none.

    `ancestors`: the server's earlier timelines, further back than the log reaches; those of another lineage do not count.
    Lines as the server writes them: `timeline TAB switch point TAB reason` (PostgreSQL source, timeline.c).
    """
    if not history:
        return None
    found = server_history(history)
    before = tuple(each for each in ancestors if each.timeline < found.timeline)
    known = before if before[len(before) - len(found.ancestors) :] == found.ancestors else ()
    known = known or found.ancestors
    if not known:
        return None
    lines = [f"{left.timeline}\t{format_lsn(left.lsn)}\tpromotion\n" for left in known]
    return found.timeline, "".join(lines).encode()


def says_more(one: bytes, other: bytes) -> bool:
    """Whether a `.history` file is the other one with earlier timelines prepended."""
    return one.endswith(b"\n" + other)
