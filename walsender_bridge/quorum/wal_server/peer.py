"""One client's socket on asyncio: packets in, bytes out, and one event to wait for.

Invariant: a client can delay only itself. Everything here waits on one event, which is set by input, by space in the
output buffer, by new positions, by a deadline, and by the end of the connection. Unread input is bounded (reading stops),
and so is unsent output (writing stops at once). A packet that has begun must be complete in time.
"""

import asyncio
import time
from typing import Final

from walsender_bridge.postgres.protocol.backend import SqlErrorReply
from walsender_bridge.postgres.protocol.frontend import MESSAGE_LIMIT, FrontendParser, Packet

#: Seconds for a login, for the rest of a packet that has begun, and for the last output to be taken.
LOGIN_SECONDS: Final = 10.0
_PACKET_SECONDS = 30.0
_FAREWELL_SECONDS = 5.0
#: Unread bytes from a client at which reading from its socket pauses.
_INPUT_LIMIT = 4 * MESSAGE_LIMIT


class GoneError(Exception):
    """The client has closed the connection."""


class ClientSocket(asyncio.Protocol):
    """A client's socket. `deadline` (monotonic seconds): when the event is set by time alone.

    `writable`: whether the client has taken all output.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.deadline = time.monotonic() + LOGIN_SECONDS
        self.parser = FrontendParser()
        self.event = asyncio.Event()
        self.writable = True
        self.address = ""
        self._lost = False
        self._reading = True

    # -- callbacks of asyncio and the server ----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the socket is connected."""
        assert isinstance(transport, asyncio.Transport)
        self.use(transport)
        name = transport.get_extra_info("peername")
        self.address = f"{name[0]}:{name[1]}" if name else ""

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes have arrived."""
        self.parser.feed(data)
        if self._reading and self.parser.buffered > _INPUT_LIMIT:
            self._reading = False
            self.transport.pause_reading()
        self.event.set()

    def pause_writing(self) -> None:
        """asyncio: the output buffer is full."""
        self.writable = False

    def resume_writing(self) -> None:
        """asyncio: the output buffer is empty again."""
        self.writable = True
        self.event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection is closed."""
        del exc
        self._lost = True
        self.event.set()

    def wake(self) -> None:
        """The positions have changed."""
        self.event.set()

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now >= self.deadline:
            self.event.set()

    # -- packets and bytes --------------------------------------------------------------------------

    def use(self, transport: asyncio.Transport) -> None:
        """Use this transport from now on: the socket's, or TLS over it."""
        self.transport = transport
        # The least that each accepts as "nothing": asyncio's TLS transport pauses at its limit, not above it.
        encrypted = transport.get_extra_info("ssl_object") is not None
        transport.set_write_buffer_limits(high=1 if encrypted else 0)

    def write(self, data: bytes | memoryview) -> None:
        """Send it. The buffer may be reused once there is `writable`."""
        if data and not self._lost:
            self.transport.write(data)

    def next_packet(self) -> Packet | None:
        """The next packet, if it has arrived. Raises `MalformedMessageError`."""
        packet = self.parser.next()
        if not self._reading and self.parser.buffered <= _INPUT_LIMIT and not self._lost:
            self._reading = True
            self.transport.resume_reading()
        return packet

    async def packet(self) -> Packet:
        """The next packet. A client that does not complete it in time is disconnected."""
        given = self.deadline
        while (packet := self.next_packet()) is None:
            self.check_alive()
            now = time.monotonic()
            if now >= self.deadline:
                raise SqlErrorReply("08006", "canceling: no complete message in time", fatal=True)
            if self.parser.buffered and given == float("inf") and self.deadline == given:
                self.deadline = now + _PACKET_SECONDS
            self.event.clear()
            await self.woken()
        self.deadline = given
        return packet

    async def woken(self) -> None:
        """Wait for a change of any kind. The event was cleared before the state was checked."""
        if self.event.is_set():
            # Waiting would return at once, without yielding to other connections.
            await asyncio.sleep(0)
        else:
            await self.event.wait()
        self.check_alive()

    async def drained(self) -> None:
        """Yield; then wait until the client has taken the output, so that answers do not pile up."""
        await asyncio.sleep(0)
        self.check_alive()
        given = self.deadline
        self.deadline = min(given, time.monotonic() + _PACKET_SECONDS)
        while not self.writable:
            self.event.clear()
            if time.monotonic() >= self.deadline:
                raise GoneError
            await self.woken()
        self.deadline = given

    def check_alive(self) -> None:
        """Raises `GoneError` when the connection is closed."""
        if self._lost or self.transport.is_closing():
            raise GoneError

    def close(self) -> None:
        """Close; a client that does not take the last output in time is disconnected."""
        transport = self.transport
        if not self._lost:
            transport.close()
            asyncio.get_running_loop().call_later(_FAREWELL_SECONDS, transport.abort)
