"""One end of a connection of the safekeeper protocol: a non-blocking socket, and the frames in and out of it.

Invariant: memory is bounded. What comes in waits in one buffer that holds the longest frame; a body is handed
out where it lies, so it is only good until the next `receive`. What goes out is kept as views of the caller's
bytes, which the caller bounds.
"""

import itertools
import select
import socket
from collections import deque
from collections.abc import Iterator

from walsender_bridge.errors import ConnectionFailedError
from walsender_bridge.safekeeper.frames import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_WAL_BYTES,
    Header,
    decode_header,
    encode,
)
from walsender_bridge.safekeeper.messages import Message

#: Views that one `sendmsg` takes.
_MOST_VIEWS = 512


class WireEnd:
    """See the module. `fileno` is to be polled for `events`."""

    def __init__(self, connected: socket.socket, where: str) -> None:
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.where = where
        self._socket = connected
        # Small until somebody has said something sensible: a stranger costs 64 KiB.
        self._buffer = bytearray(HEADER_BYTES + MAX_BODY_BYTES)
        self._begin = self._end = 0
        self._out: deque[memoryview] = deque()

    def fileno(self) -> int:
        """The socket."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """What to poll for."""
        return select.EPOLLIN | (select.EPOLLOUT if self._out else 0)

    @property
    def sending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out)

    def trust(self) -> None:
        """The peer has introduced itself: its frames may carry WAL."""
        if len(self._buffer) < HEADER_BYTES + MAX_WAL_BYTES:
            grown = bytearray(2 * MAX_WAL_BYTES + MAX_BODY_BYTES)
            held = self._end - self._begin
            grown[:held] = self._buffer[self._begin : self._end]
            self._buffer, self._begin, self._end = grown, 0, held

    # -- in -----------------------------------------------------------------------------------------

    def receive(self) -> bool:
        """Take what has arrived, as far as there is room; whether there was anything.

        Raises `ConnectionFailedError` when the connection is gone.
        """
        if self._begin:
            held = self._end - self._begin
            self._buffer[:held] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, held
        try:
            with memoryview(self._buffer) as view:
                count = self._socket.recv_into(view[self._end :])
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionFailedError(str(error), where=self.where) from None
        if not count:
            raise ConnectionFailedError("the other end has closed it", where=self.where)
        self._end += count
        return True

    def frames(self) -> Iterator[tuple[Header, memoryview]]:
        """The whole frames that are here, each with what follows its header.

        Raises `MalformedMessageError`, `NotSupportedError`.
        """
        while self._end - self._begin >= HEADER_BYTES:
            header = decode_header(self._buffer, self._begin)
            stop = self._begin + HEADER_BYTES + header.length
            if stop > self._end:
                return
            body = memoryview(self._buffer)[self._begin + HEADER_BYTES : stop]
            self._begin = stop
            yield header, body

    # -- out ----------------------------------------------------------------------------------------

    def send(self, message: Message, wal: list[memoryview] | None = None) -> None:
        """Queue a message, and the WAL behind it; `flush` sends it."""
        self._out.append(memoryview(encode(message)))
        if wal:
            # An empty view would never be sent, and all behind it wait for ever.
            self._out.extend(view for view in wal if view)

    def flush(self) -> None:
        """Send as much as the socket takes. Raises `ConnectionFailedError`."""
        out = self._out
        try:
            while out:
                sent = self._socket.sendmsg(itertools.islice(out, _MOST_VIEWS))
                while sent:
                    first = out[0]
                    if sent < len(first):
                        out[0] = first[sent:]
                        break
                    sent -= len(first)
                    out.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionFailedError(str(error), where=self.where) from None

    def close(self) -> None:
        """Close the socket."""
        self._out.clear()
        self._socket.close()
