"""Reads a range of WAL from a walsender: a primary's, a standby's, or a safekeeper's WAL server."""

import select
import time
from collections.abc import Callable

from walsender_bridge.errors import DeadlineError, MalformedMessageError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.replication import (
    XLOG_DATA,
    XLOG_HEADER_SIZE,
    parse_xlog_header,
)
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream

#: Timeout of the whole range, in seconds.
_SECONDS = 30.0
#: Seconds between two calls of `check`.
_CHECK_SECONDS = 0.2


def read_range(
    stream: PrimaryStream, begin: Lsn, end: Lsn, timeline: int, check: Callable[[], None]
) -> bytes:
    """The WAL of [begin, end) on `timeline`; the connection cannot be used afterwards.

    `check` raises when waiting has become pointless. Raises `DeadlineError`, `MalformedMessageError`, the server's errors,
    and what `check` raises.
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
        if len(held) < end - begin and not poll.poll(_CHECK_SECONDS * 1000):
            check()
            if time.monotonic() > deadline:
                raise DeadlineError("timed out waiting for WAL", where=stream.where)
    return bytes(held[: end - begin])
