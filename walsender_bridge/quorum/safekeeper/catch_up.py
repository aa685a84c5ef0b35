"""WAL below a safekeeper's end: answers to the leader's reads of it, and to the older WAL that it sends. Pure.

After a full resync a log lacks WAL that the others keep for readers. The leader reads it from one of them and sends it,
segment by segment, downward (`proposer/catch_up/core.py`). Both have adopted this term's history, so their logs are equal
up to the end of the shorter one; and the WAL below the beginning of a log is committed.
"""

from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.wal_page import segment_start
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.safekeeper.effects import (
    ControlState,
    Effect,
    SendHeld,
    SendWal,
    TakeCatchUpWal,
)


def answer(
    conn: int, message: m.Fetch | m.CatchUpWal, control: ControlState, flush_lsn: Lsn
) -> list[Effect]:
    """The effects of a message of the leader; none: it is refused."""
    begin = message.begin_lsn
    if isinstance(message, m.CatchUpWal):
        known = _may_be(control, message)
        return [TakeCatchUpWal(conn, message.term, begin, message.timeline)] if known else []
    if not message.end_lsn:
        return [SendHeld(conn, message.term)]
    held = bool(control.history) and message.end_lsn <= flush_lsn
    if not held or not 0 <= message.end_lsn - begin <= m.MAX_FETCH_BYTES:
        return []
    return [SendWal(conn, message.term, begin, message.end_lsn)]


def _may_be(control: ControlState, wal: m.CatchUpWal) -> bool:
    """Whether that segment can be on that timeline. Below the history's beginning only a bound is known."""
    history, size = control.history, control.server.segment_size
    if not history or history.latest_election_epoch != control.node_id.term:
        return False
    last = segment_start(wal.begin_lsn, size) + size - 1
    if wal.begin_lsn + wal.length - 1 > last:
        return False
    first = history.entries[0]
    if last < first.start_lsn:
        return 0 < wal.timeline <= first.timeline
    return wal.timeline == history.timeline_at(last)
