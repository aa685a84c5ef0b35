"""One end of a connection of the safekeeper protocol: a non-blocking socket, and the frames in and out of it.

Invariant: memory is bounded. Input waits in one buffer that holds the longest frame; a body is a view of that buffer,
valid until the next `receive`. Output is kept as views of the caller's bytes; a caller whose answers are not read checks
`crowded`, and takes no more frames until they are sent.

TCP detects a peer that has vanished (its machine, or the network) within half a minute.
"""

import itertools
import select
import socket
from collections import deque
from collections.abc import Iterator

from walsender_bridge.errors import ConnectionFailedError, MalformedMessageError
from walsender_bridge.quorum.protocol.frames import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_WAL_BYTES,
    Header,
    decode_header,
    encode,
)
from walsender_bridge.quorum.protocol.messages import Message

#: Views that one `sendmsg` takes.
_MOST_VIEWS = 512
#: Unsent bytes from which on no more input is taken from the peer.
_CROWDED_BYTES = 4 << 20
#: TCP keepalive: idle seconds, seconds between probes, number of probes; and the timeout of unacknowledged data.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 25_000),
)


class WireEnd:
    """See the module. Poll `fileno` for `events`."""

    #: Bytes of the buffer beside the longest frame.
    slack = 0

    def __init__(self, connected: socket.socket, where: str) -> None:
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in _KEEPALIVE:
                connected.setsockopt(socket.IPPROTO_TCP, option, seconds)
        self.where = where
        self._socket = connected
        # Small until the peer has sent a valid greeting: an unknown peer costs 64 KiB.
        self._grow(HEADER_BYTES + MAX_BODY_BYTES + self.slack)
        self._begin = self._end = 0
        self._out: deque[memoryview | bytes] = deque()
        self._out_bytes = 0

    def _grow(self, size: int) -> None:
        self._buffer = bytearray(size)
        self._view = memoryview(self._buffer)

    def fileno(self) -> int:
        """The socket."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """The events to poll for."""
        if not self.sending:
            return select.EPOLLIN
        return select.EPOLLOUT if self.crowded() else select.EPOLLIN | select.EPOLLOUT

    @property
    def sending(self) -> bool:
        """Whether there is unsent output."""
        return bool(self._out)

    def crowded(self) -> bool:
        """Whether there is so much unsent output that no more input should be taken."""
        return self._out_bytes >= _CROWDED_BYTES

    def trust(self) -> None:
        """The peer has greeted: its frames may carry WAL."""
        if len(self._buffer) < HEADER_BYTES + MAX_WAL_BYTES + self.slack:
            held = bytes(self._view[self._begin : self._end])
            self._grow(2 * MAX_WAL_BYTES + MAX_BODY_BYTES + self.slack)
            self._buffer[: len(held)] = held
            self._begin, self._end = 0, len(held)

    # -- in -----------------------------------------------------------------------------------------

    def receive(self) -> bool:
        """Read what has arrived, as far as the buffer allows; returns whether there was anything.

        Raises `ConnectionFailedError` when the connection is closed.
        """
        if self._begin == self._end:
            self._begin = self._end = 0
        elif len(self._buffer) - self._begin < HEADER_BYTES + MAX_WAL_BYTES + self.slack:
            held = self._end - self._begin
            self._buffer[:held] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, held
        if len(self._buffer) - self._end <= self.slack // 2:
            return False  # full of frames that were not taken yet
        try:
            count = self._take(self._view[self._end :])
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionFailedError(str(error), where=self.where) from None
        if not count:
            raise ConnectionFailedError("the peer closed the connection", where=self.where)
        self._end += count
        return True

    def _take(self, room: memoryview) -> int:
        """Read into `room`; 0: the peer closed. Raises `OSError`; `BlockingIOError`: nothing has arrived."""
        return self._socket.recv_into(room)

    def frames(self) -> Iterator[tuple[Header, memoryview]]:
        """The complete frames that have arrived, each with its body.

        Raises `MalformedMessageError`, `NotSupportedError`.
        """
        while self._end - self._begin >= HEADER_BYTES:
            header = decode_header(self._buffer, self._begin)
            start = self._begin + HEADER_BYTES
            stop = start + header.length
            if HEADER_BYTES + header.length > len(self._buffer) - self.slack:
                raise MalformedMessageError("WAL before a greeting", where=self.where)
            if stop > self._end:
                return
            self._begin = stop
            yield header, self._view[start:stop]

    # -- out ----------------------------------------------------------------------------------------

    def send(self, message: Message, wal: list[memoryview] | None = None) -> None:
        """Queue a message, followed by WAL; `flush` sends it."""
        self.send_frame(encode(message), wal)

    def send_frame(self, frame: bytes, wal: list[memoryview] | None = None) -> None:
        """As `send`, for an encoded message."""
        self._out.append(frame)
        self._out_bytes += len(frame)
        if wal:
            # An empty view would never be sent, and block everything behind it.
            views = [view for view in wal if view]
            self._out.extend(views)
            self._out_bytes += sum(map(len, views))

    def flush(self) -> None:
        """Send as much as the socket takes. Raises `ConnectionFailedError`."""
        try:
            self._send_out()
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionFailedError(str(error), where=self.where) from None

    def _send_out(self) -> None:
        """Raises `OSError`; `BlockingIOError`: the socket takes no more now."""
        out = self._out
        while out:
            if len(out) == 1:
                sent = self._socket.send(out[0])
            else:
                sent = self._socket.sendmsg(itertools.islice(out, _MOST_VIEWS))
            if sent == self._out_bytes:
                out.clear()
                self._out_bytes = 0
                return
            self._out_bytes -= sent
            while sent:
                first = out[0]
                if sent < len(first):
                    out[0] = memoryview(first)[sent:]
                    break
                sent -= len(first)
                out.popleft()

    def close(self) -> None:
        """Close the socket."""
        self._out.clear()
        self._out_bytes = 0
        self._socket.close()
