"""A range of WAL from whoever has a walsender: a server, a standby, a safekeeper's WAL server."""

import select
import time

from walsender_bridge.errors import DeadlineError, MalformedMessageError
from walsender_bridge.proposer.primary import PrimaryStream
from walsender_bridge.wire.replication import XLOG_DATA, XLOG_HEADER_SIZE, parse_xlog_header

#: Seconds that it may take to arrive.
_SECONDS = 30.0


def read_range(stream: PrimaryStream, begin: int, end: int, timeline: int) -> bytes:
    """The WAL of [begin, end) on `timeline`; the connection is of no use afterwards.

    Raises `DeadlineError`, `MalformedMessageError`, and what the server answers.
    """
    stream.start_physical(begin, timeline)
    deadline = time.monotonic() + _SECONDS
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    held = bytearray()
    while len(held) < end - begin:
        for payload in stream.receive():
            if payload[0] == XLOG_DATA:
                if parse_xlog_header(payload).start_lsn != begin + len(held):
                    raise MalformedMessageError("WAL out of order", where=stream.where)
                held += payload[XLOG_HEADER_SIZE:]
        if len(held) < end - begin and not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise DeadlineError("its WAL does not arrive", where=stream.where)
    return bytes(held[: end - begin])
