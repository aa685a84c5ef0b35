"""A proposer's connection to a safekeeper, as the driver keeps it, and which ones are closed.

The leader keeps its connection, whatever the others do. Any other may be a foreign process's or the next proposer's: so the
oldest makes room for the newest, first among those that have not greeted, and none may be silent for long.
"""

import errno
import select
import socket
from collections.abc import Iterator, Mapping

from walsender_bridge.errors import ConfigError, UnavailableError
from walsender_bridge.quorum.protocol.message_socket import WireEnd

#: The most connections; one writes, the others belong to old or new proposers, or foreign processes.
MOST_CONNECTIONS = 32
#: Seconds within which a connection must have sent its greeting.
GREETING_SECONDS = 10.0
#: Seconds of silence allowed after the greeting, except to the leader.
IDLE_SECONDS = 60.0


class SafekeeperConnection:
    """A connection, as the driver sees it.

    `since`: time of the connection; `heard`: time of the last message; `greeted`: it has sent its greeting;
    `closing`: it is closed once its output is sent; `polled`: the events polled for.
    """

    def __init__(self, end: WireEnd, now: float) -> None:
        self.end = end
        self.since = self.heard = now
        self.greeted = False
        self.closing = False
        self.polled = int(select.EPOLLIN)


def listen(host: str, port: int) -> socket.socket:
    """A non-blocking socket that listens for proposers. Raises `UnavailableError` (not now), `ConfigError`."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        # Another program's connection may use the port for now, and an address may not exist yet.
        passes = error.errno in {errno.EADDRINUSE, errno.EADDRNOTAVAIL}
        raise (UnavailableError if passes else ConfigError)(
            f"cannot listen: {error}", where=f"{host}:{port}", repair="choose a free port"
        ) from None
    listener.setblocking(False)
    return listener


def connection_to_close(
    connections: Mapping[int, SafekeeperConnection], owner: int | None
) -> int | None:
    """The connection to close when another one arrives; None: there is room. They are in the order of arrival."""
    if len(connections) < MOST_CONNECTIONS:
        return None
    others = [number for number in connections if number != owner]
    return next((number for number in others if not connections[number].greeted), others[0])


def overdue(
    connections: Mapping[int, SafekeeperConnection], owner: int | None, now: float
) -> Iterator[int]:
    """The connections that have timed out."""
    for number, connection in connections.items():
        if not connection.greeted:
            # Bytes that form no greeting do not count.
            late = now - connection.since > GREETING_SECONDS
        else:
            late = number != owner and now - connection.heard > IDLE_SECONDS
        if late:
            yield number
