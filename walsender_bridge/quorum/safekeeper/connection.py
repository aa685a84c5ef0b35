"""A proposer's connection to a safekeeper, as the driver keeps it, and which of them have to go.

The leader keeps its connection, whatever the others do. Any other may be a stranger's, or the next
proposer's, which nobody can tell: so the oldest makes room for the newest, and none may be silent for long.
"""

import errno
import select
import socket
from collections.abc import Iterator, Mapping

from walsender_bridge.errors import ConfigError, UnavailableError
from walsender_bridge.quorum.protocol.message_socket import WireEnd

#: Connections of proposers at once; one writes, the others are old ones, new ones and strangers.
MOST_CONNECTIONS = 32
#: Seconds that a stranger may take to say who it is.
GREETING_SECONDS = 10.0
#: Seconds that one that has greeted may say nothing, unless it is the leader.
IDLE_SECONDS = 60.0


class SafekeeperConnection:
    """One of them, and what the driver does with it.

    `since`: when it was made; `heard`: when something came last; `greeted`: it has said who it is;
    `closing`: once all is sent; `polled`: for what.
    """

    def __init__(self, end: WireEnd, now: float) -> None:
        self.end = end
        self.since = self.heard = now
        self.greeted = False
        self.closing = False
        self.polled = int(select.EPOLLIN)


def listen(host: str, port: int) -> socket.socket:
    """A socket on which proposers are heard, which does not block. Raises `UnavailableError` (not now), `ConfigError`."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        # Another program's connection may have the port for now, and an address may not be there yet.
        passes = error.errno in {errno.EADDRINUSE, errno.EADDRNOTAVAIL}
        raise (UnavailableError if passes else ConfigError)(
            f"cannot listen: {error}", where=f"{host}:{port}", repair="choose a free port"
        ) from None
    listener.setblocking(False)
    return listener


def makes_room(connections: Mapping[int, SafekeeperConnection], owner: int | None) -> int | None:
    """The one that goes when another comes; None: there is room. They are in the order in which they came."""
    if len(connections) < MOST_CONNECTIONS:
        return None
    return next(number for number in connections if number != owner)


def overdue(
    connections: Mapping[int, SafekeeperConnection], owner: int | None, now: float
) -> Iterator[int]:
    """Those that have had their time."""
    for number, connection in connections.items():
        if not connection.greeted:
            # Bytes that make no greeting do not count.
            late = now - connection.since > GREETING_SECONDS
        else:
            late = number != owner and now - connection.heard > IDLE_SECONDS
        if late:
            yield number
