"""The epoch history of a log, told as PostgreSQL tells it: timelines, and where each was left. Pure."""

from walsender_bridge.safekeeper.history import History
from walsender_bridge.wire import replication
from walsender_bridge.wire.lsn import format_lsn


def server_history(history: History) -> replication.History:
    """The newest timeline, and those before it that the log still knows of."""
    switches: list[tuple[int, int]] = []
    timeline = 0
    for entry in history.entries:
        if timeline and entry.timeline != timeline:
            switches.append((timeline, entry.start_lsn))
        timeline = entry.timeline
    return replication.History(timeline, tuple(switches))


def history_file(history: History) -> tuple[int, bytes] | None:
    """(newest timeline, contents of its `.history` file); None for timeline 1, which has none.

    Lines as the server writes them: `timeline TAB LSN where it was left TAB reason` (PostgreSQL source,
    timeline.c).
    """
    if not history:
        return None
    found = server_history(history)
    if not found.ancestors:
        return None
    lines = [f"{timeline}\t{format_lsn(left)}\tpromotion\n" for timeline, left in found.ancestors]
    return found.timeline, "".join(lines).encode()
