"""Streams physical WAL from a walsender, over the timelines of its server, without blocking.

On a connection without TLS the socket is read directly, with one `recv_into` and no copy of the WAL; libpq would copy
each message twice. libpq has logged in and is idle from then on: its buffer is empty, since an answer ends with
ReadyForQuery. With TLS (or GSSAPI) only libpq can read the bytes, so it does.

A server that was promoted still sends the timelines before its own, each up to its switch point; then it names the next
timeline and its start. So `pieces` continue across the switch (PostgreSQL docs, 53.4, START_REPLICATION).

Invariant: the pieces follow each other without a gap from the requested LSN; anything else is a
`MalformedMessageError`. Memory is one buffer.
"""

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Protocol

from walsender_bridge.errors import ConnectionFailedError, MalformedMessageError, TusklineError
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition, format_lsn, parse_lsn
from walsender_bridge.postgres.protocol.refusals import server_error
from walsender_bridge.postgres.protocol.replication import (
    KEEPALIVE,
    XLOG_DATA,
    XLOG_HEADER_SIZE,
    parse_keepalive,
    start_physical,
)
from walsender_bridge.quorum.proposer.primary.copy_both import LibpqCopy
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream
from walsender_bridge.runtime.closing import Closing

#: A walsender sends at most 128 KiB of WAL at once (PostgreSQL source, walsender.c, MAX_SEND_SIZE).
_MOST_MESSAGE = 256 << 10
_BUFFER_BYTES = 2 * _MOST_MESSAGE
_FRAME = struct.Struct(">BI")
_START_LSN = struct.Struct(">Q")
_COPY_DATA, _COPY_DONE, _COPY_BOTH = ord("d"), ord("c"), ord("W")
_READY, _ERROR, _ROW, _COMPLETE = ord("Z"), ord("E"), ord("D"), ord("C")


class CopyBothStream(Protocol):
    """A connection in CopyBoth mode, or on its way into it."""

    def fileno(self) -> int:
        """The socket."""

    def start(self, command: str) -> None:
        """Send the command that leads into CopyBoth mode."""

    def payloads(self) -> Iterator[memoryview]:
        """The CopyData payloads that have arrived, each valid until the next one is taken; never waits."""

    def next_timeline(self) -> WalPosition | None:
        """Where the next timeline starts, once the copy has ended with it and a new one may be started."""

    def send(self, payload: bytes) -> None:
        """Send one CopyData payload now, as far as the socket takes it."""

    def flush(self) -> bool:
        """Send the rest; returns whether everything is sent."""

    def close(self) -> None:
        """Close the connection."""


class SocketCopy:
    """A `CopyBothStream` over a plain socket."""

    def __init__(self, connection: PrimaryStream) -> None:
        """The connection, idle, is this object's from now on."""
        self._connection = connection
        self._where = connection.where
        self._socket = socket.socket(fileno=connection.dup())
        self._socket.setblocking(False)
        if self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._out = b""
        self._copying = False
        self._row: WalPosition | None = None
        self._next: WalPosition | None = None

    def fileno(self) -> int:
        """See `CopyBothStream`."""
        return self._socket.fileno()

    def start(self, command: str) -> None:
        """See `CopyBothStream`."""
        text = command.encode() + b"\0"
        self._row = self._next = None
        self._send(b"Q" + (4 + len(text)).to_bytes(4, "big") + text)

    def payloads(self) -> Iterator[memoryview]:
        """See `CopyBothStream`. Raises the server's error, `ConnectionFailedError`, `MalformedMessageError`."""
        self._receive()
        view, buffer = self._view, self._buffer
        while self._end - self._begin >= 5:
            begin = self._begin
            kind, length = _FRAME.unpack_from(buffer, begin)
            if not 4 <= length <= _MOST_MESSAGE:
                raise MalformedMessageError(f"a message of {length} bytes", where=self._where)
            stop = begin + 1 + length
            if stop > self._end:
                return
            self._begin = stop
            if kind == _COPY_DATA and self._copying and length > 4:
                yield view[begin + 5 : stop]
            else:
                self._other(kind, view[begin + 5 : stop])

    def _receive(self) -> None:
        if self._begin == self._end:
            self._begin = self._end = 0
        elif _BUFFER_BYTES - self._begin < _MOST_MESSAGE:
            held = self._end - self._begin
            self._buffer[:held] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, held
        try:
            count = self._socket.recv_into(self._view[self._end :])
        except BlockingIOError:
            return
        except OSError as error:
            raise self._broken(str(error)) from None
        if not count:
            raise self._broken("the server closed the connection")
        self._end += count

    def _other(self, kind: int, body: memoryview) -> None:
        """Handles all messages but WAL: the copy begins, ends with the timeline, or the server reports an error."""
        if kind == _COPY_BOTH:
            self._copying = True
        elif kind == _COPY_DONE:
            self._copying = False
            self._send(b"c\0\0\0\4")
        elif kind == _ERROR:
            fields = {part[:1]: part[1:] for part in bytes(body).split(b"\0")}
            code = fields.get(b"C", b"").decode("utf-8", "replace")
            text = fields.get(b"M", b"").decode("utf-8", "replace")
            raise server_error(code, text, self._where)
        elif kind == _ROW:
            self._row = _switch(_columns(body), self._where)
        elif kind == _READY:
            if self._row is None:
                raise self._broken("the server ended the stream")
            self._next = self._row
        elif kind == _COMPLETE and self._copying:
            raise self._broken("the server ended the stream")
        elif kind == _COPY_DATA:
            raise MalformedMessageError("unrequested WAL", where=self._where)

    def next_timeline(self) -> WalPosition | None:
        """See `CopyBothStream`."""
        return self._next

    def send(self, payload: bytes) -> None:
        """See `CopyBothStream`. Raises `ConnectionFailedError`."""
        if self._copying:
            self._send(b"d" + (4 + len(payload)).to_bytes(4, "big") + payload)

    def _send(self, message: bytes) -> None:
        if self._out:
            # While the server does not read, only whole messages are queued, and few: later ones repeat the newest position.
            if len(self._out) < _MOST_MESSAGE:
                self._out += message
            self.flush()
            return
        self._out = message
        self.flush()

    def flush(self) -> bool:
        """See `CopyBothStream`. Raises `ConnectionFailedError`."""
        if self._out:
            try:
                sent = self._socket.send(self._out)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._broken(str(error)) from None
            self._out = self._out[sent:]
        return not self._out

    def _broken(self, text: str) -> ConnectionFailedError:
        return ConnectionFailedError(f"the connection broke: {text}", where=self._where)

    def close(self) -> None:
        """See `CopyBothStream`."""
        self._socket.close()
        self._connection.close()


def _columns(row: memoryview) -> list[bytes]:
    """The values of a DataRow."""
    found, at = [], 2
    with contextlib.suppress(struct.error):
        for _ in range(int.from_bytes(row[:2], "big")):
            (length,) = struct.unpack_from(">i", row, at)
            found.append(bytes(row[at + 4 : at + 4 + max(length, 0)]))
            at += 4 + max(length, 0)
    return found


def _switch(row: list[bytes], where: str) -> WalPosition:
    """The start of the successor of a timeline that has ended."""
    try:
        timeline, lsn = (column.decode("ascii") for column in row)
        return WalPosition(int(timeline), parse_lsn(lsn))
    except (ValueError, TusklineError):
        raise MalformedMessageError("not the end of a timeline", where=where) from None


class WalStream(Closing):
    """See the module."""

    def __init__(self, connection: PrimaryStream, lsn: Lsn, timeline: int, last: int) -> None:
        """Requests the WAL of `timeline` from `lsn` on, without waiting. The connection must be idle.

        It continues over the timelines up to `last`, and no further: a standby that is promoted continues with WAL that does
        not belong to the term that reads it. Takes ownership of the connection. Raises `ConnectionFailedError`.
        """
        self._copy: CopyBothStream = (
            SocketCopy(connection) if connection.plain else LibpqCopy(connection)
        )
        self.where = connection.where
        #: Where the next piece begins.
        self.lsn = lsn
        self.timeline = timeline
        self._last = last
        #: The server has requested a reply.
        self.asked = False
        self._copy.start(start_physical(lsn, timeline))

    def fileno(self) -> int:
        """The socket, to be polled for reading, and for writing after an incomplete `flush`."""
        return self._copy.fileno()

    def pieces(self) -> Iterator[memoryview]:
        """The WAL that has arrived; each piece is valid until the next one is taken. Never waits.

        Raises the server's error, `ConnectionFailedError`, `MalformedMessageError`.
        """
        for payload in self._copy.payloads():
            kind = payload[0]
            if kind == XLOG_DATA and len(payload) >= XLOG_HEADER_SIZE:
                if _START_LSN.unpack_from(payload, 1)[0] != self.lsn:
                    raise MalformedMessageError("WAL out of order", where=self.where)
                self.lsn += len(payload) - XLOG_HEADER_SIZE
                yield payload[XLOG_HEADER_SIZE:]
            elif kind == KEEPALIVE:
                self.asked |= parse_keepalive(bytes(payload)).reply_requested
            else:
                raise MalformedMessageError("not a walsender's message", where=self.where)
        following = self._copy.next_timeline()
        if following is not None:
            self._go_on(following)

    def _go_on(self, start: WalPosition) -> None:
        if start.timeline > self._last:
            raise ConnectionFailedError(
                f"the server has left timeline {self._last} at {format_lsn(start.lsn)}: it was promoted",
                where=self.where,
            )
        if start.lsn != self.lsn or start.timeline <= self.timeline:
            raise MalformedMessageError(
                f"timeline {self.timeline} ended at {format_lsn(self.lsn)}, and {start.timeline} continues at "
                f"{format_lsn(start.lsn)}",
                where=self.where,
            )
        self.timeline = start.timeline
        self._copy.start(start_physical(start.lsn, start.timeline))

    def send(self, payload: bytes) -> None:
        """Send a message to the server at once. Raises `ConnectionFailedError`."""
        self._copy.send(payload)

    def flush(self) -> bool:
        """Send the rest; returns whether everything is sent. Raises `ConnectionFailedError`."""
        return self._copy.flush()

    def close(self) -> None:
        """Close the connection."""
        self._copy.close()
