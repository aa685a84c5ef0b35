"""A safekeeper's connection, as the proposer's driver keeps it."""

import socket
import time
from collections import deque

from walsender_bridge.proposer import effects as e
from walsender_bridge.safekeeper.wire_end import WireEnd

#: Seconds between two tries to connect to a safekeeper; after it refused; and for an answer.
DIAL_SECONDS = 0.5
FAULT_SECONDS = 2.0
CONNECT_SECONDS = 5.0


class Link:
    """One connection, and what was asked of it with `Fetch`, in order.

    `since`: when it was begun, or last said something.
    """

    def __init__(self, end: WireEnd, *, connected: bool) -> None:
        self.end = end
        self.connected = connected
        self.since = time.monotonic()
        self.fetches: deque[e.ReadWal | e.CompareWal] = deque()
        self.fetched = bytearray()


def dial(host: str, port: int) -> Link | None:
    """Begin to connect; `connected` once the socket is writable. None: it was refused at once."""
    dialled = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    dialled.setblocking(False)
    try:
        dialled.connect((host, port))
    except BlockingIOError:
        pass
    except OSError:
        dialled.close()
        return None
    link = Link(WireEnd(dialled, f"{host}:{port}"), connected=False)
    link.end.trust()
    return link
