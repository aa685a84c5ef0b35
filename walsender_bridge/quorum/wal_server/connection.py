"""One client's session: login, commands, and the stream of WAL.

Errors are sent in the client's own protocol; the log has a line for each refusal, which contains nothing that the client
sent but its name. Timeouts and flow control are in `peer.py`.
"""

import asyncio
import os
import secrets
import ssl
import time
from typing import Protocol

from walsender_bridge.errors import CorruptError, MalformedMessageError
from walsender_bridge.postgres.protocol import backend, replication_command
from walsender_bridge.postgres.protocol.backend import SqlError, SqlErrorReply
from walsender_bridge.postgres.protocol.frontend import Message, text_of
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.postgres.protocol.replication_command import (
    CreateSlot,
    DropSlot,
    IdentifySystem,
    ReadSlot,
    Show,
    StartReplication,
    TimelineHistory,
    Unsupported,
)
from walsender_bridge.quorum.protocol.positions import Positions
from walsender_bridge.quorum.wal_server import answers
from walsender_bridge.quorum.wal_server.login import LoginExchange, LoginStep, Then
from walsender_bridge.quorum.wal_server.peer import ClientSocket, GoneError
from walsender_bridge.quorum.wal_server.slots import Slots, WalServerSlot
from walsender_bridge.quorum.wal_server.stream import (
    Finish,
    ReaderStream,
    SendRange,
    WaitForPositions,
    Write,
)
from walsender_bridge.quorum.wal_server.tls import WalServerTls
from walsender_bridge.quorum.wal_server.users import Users
from walsender_bridge.quorum.wal_server.wal_folder import REMOVED, WalCursor, WalFolder
from walsender_bridge.runtime import logs

#: Bytes of WAL in one message. Larger ones cost memory for each reader and save little CPU.
CHUNK = 256 << 10
_SMALL = 16 << 10
#: The error that clients get at shutdown.
ENDING = SqlError("57P01", "terminating connection: the server is shutting down", fatal=True)

_log = logs.logger()


class ConnectionHost(Protocol):
    """What a connection needs of its server."""

    folder: WalFolder
    slots: Slots
    users: Users
    tls: WalServerTls | None
    tls_required: bool
    timeout: float

    def positions(self) -> Positions:
        """The current positions. Raises `SqlErrorReply` 57P03 when there is no WAL yet."""

    def admit(self, connection: "ClientConnection") -> None:
        """The client has authenticated. Raises `SqlErrorReply` 53300 when there are too many."""

    def wants_change(self) -> None:
        """A reader has everything; it needs a wakeup at the next change of the positions."""

    async def save_slots(self) -> None:
        """Make the slots durable as they are now."""

    def refused(self, connection: "ClientConnection", lsn: Lsn) -> None:
        """A reader was refused: its WAL is not here."""

    def slot_released(self) -> None:
        """A slot is free again: wake the connections that wait for one."""

    def gone(self, connection: "ClientConnection") -> None:
        """The connection has ended."""


class ClientConnection(ClientSocket):
    """A client. `number` identifies it in slots and errors."""

    def __init__(self, server: ConnectionHost, number: int) -> None:
        super().__init__()
        self.number = number
        self.stream: ReaderStream | None = None
        self._server = server
        self._buffer = bytearray()
        self._tls = None if server.tls is None else server.tls.current()
        self._login = LoginExchange(
            server.users.verifier,
            None if self._tls is None else self._tls.certificate,
            tls_required=server.tls_required,
        )
        self._task: asyncio.Task[None] | None = None
        self._last_word = ENDING
        self._unwanted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the socket is connected."""
        super().connection_made(transport)
        self._task = asyncio.get_running_loop().create_task(self._run())
        # Not at the end of the task: one that is canceled before its first step never gets there.
        self._task.add_done_callback(self._over)
        if self._unwanted:
            self._task.cancel()

    @property
    def silent(self) -> bool:
        """Whether the client has not sent a startup packet yet."""
        return self._login.step is LoginStep.START

    @property
    def reader(self) -> tuple[str, str]:
        """Its user and application name, which identify it across reconnections; authenticated once it has logged in."""
        return self._login.user, self._login.application

    def end(self, error: SqlError) -> None:
        """End the connection, at any stage; `error` is its last message."""
        self._last_word, self._unwanted = error, True
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until the connection has ended."""
        if self._task is not None:
            await asyncio.wait([self._task])

    # -- the session ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            if await self._log_in():
                await self._serve()
        except GoneError:
            pass
        except SqlErrorReply as reply:
            self._refuse(reply.error)
        except MalformedMessageError as error:
            self._refuse(SqlError("08P01", error.what, fatal=True))
        except (ssl.SSLError, ConnectionError, TimeoutError) as error:
            _log.info("could not establish TLS", peer=self.address, why=_reason(error))
        except CorruptError as error:
            _log.error("could not serve WAL", **error.to_wire())
            self._refuse(SqlError("XX001", error.what, fatal=True))
        except OSError as error:
            _log.error("could not read WAL", why=os.strerror(error.errno or 0))
            self._refuse(SqlError("58030", "could not read the WAL", fatal=True))

    def _over(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self.write(backend.error(self._last_word))
        elif (error := task.exception()) is not None:
            _log.error("internal error in the WAL server", peer=self.address, exc_info=error)
        self._server.gone(self)
        self.close()

    async def _log_in(self) -> bool:
        """Whether the client may proceed to commands."""
        loop = asyncio.get_running_loop()
        while self._login.step is not LoginStep.DONE:
            packet = await self.packet()
            reply = self._login.take(packet, more=self.parser.buffered > 0)
            self.write(reply.data)
            if reply.then is Then.END:
                return False
            if reply.then is Then.START_TLS:
                assert self._tls is not None
                left = max(0.1, self.deadline - time.monotonic())
                secured = await loop.start_tls(
                    self.transport,
                    self,
                    self._tls.context,
                    server_side=True,
                    ssl_handshake_timeout=left,
                )
                if secured is None:
                    raise GoneError
                self.use(secured)
        self._server.admit(self)
        positions = self._server.positions()
        self.write(
            backend.AUTHENTICATION_OK
            + backend.parameters(answers.status_parameters(positions))
            + backend.key_data(os.getpid(), secrets.randbits(32))
            + backend.READY
        )
        _log.info(
            "reader connected",
            peer=self.address,
            user=self._login.user,
            application=self._login.application,
            tls=self._login.encrypted,
        )
        return True

    async def _serve(self) -> None:
        """Serve commands, one after another, until the client terminates."""
        self.deadline = float("inf")
        while True:
            await self.drained()
            match await self.packet():
                case Message("X"):
                    return
                case Message("Q", body):
                    try:
                        await self._command(text_of(body))
                    except SqlErrorReply as reply:
                        if reply.error.fatal:
                            raise
                        self.write(backend.error(reply.error) + backend.READY)
                case Message("d" | "c" | "f"):
                    pass  # sent by a client before it received the error of its stream
                case _:
                    raise SqlErrorReply(
                        "08P01",
                        "extended query protocol not supported in a replication connection",
                        fatal=True,
                    )

    async def _command(self, text: str) -> None:
        command = replication_command.parse(text)
        positions, slots = self._server.positions(), self._server.slots
        match command:
            case None:
                answer = backend.message(b"I")
            case IdentifySystem():
                answer = answers.identify_system(positions)
            case Show(name):
                answer = answers.show(name, positions)
            case TimelineHistory(timeline):
                history = self._server.folder.history_text(timeline)
                answer = answers.timeline_history(timeline, history)
            case ReadSlot(name):
                answer = answers.read_slot(slots.find(name), positions.history)
            case CreateSlot(name, temporary, reserve):
                slot = WalServerSlot(
                    name, positions.served_lsn if reserve else None, temporary=temporary
                )
                slots.create(slot, self.number)
                if not temporary:
                    try:
                        await self._save_slots()
                    except SqlErrorReply:
                        slots.drop(name, self.number)
                        raise
                answer = answers.created_slot(slot)
            case DropSlot(name, wait):
                while wait and slots.in_use(name, self.number):
                    self.event.clear()
                    await self.woken()
                if slots.drop(name, self.number):
                    await self._save_slots()
                answer = backend.complete("DROP_REPLICATION_SLOT")
            case StartReplication():
                await self._start_replication(command, positions)
                return
            case Unsupported(what):
                raise SqlErrorReply("0A000", f"a safekeeper cannot execute {what}")
        self.write(answer + backend.READY)

    async def _save_slots(self) -> None:
        try:
            await self._server.save_slots()
        except OSError as error:
            raise SqlErrorReply(
                "58030", "could not write the replication slots", detail=error.strerror or ""
            ) from None

    async def _start_replication(self, command: StartReplication, positions: Positions) -> None:
        slots, now = self._server.slots, time.monotonic()
        stream = ReaderStream(
            positions, command.lsn, command.timeline, now=now, timeout=self._server.timeout
        )
        if command.slot is not None:
            slots.acquire(command.slot, self.number)
        try:
            if not stream.opens:
                self.write(stream.result(positions))
                return
            self.write(backend.COPY_BOTH)
            stream.check_start(positions)
            self.stream = stream
            _log.info(
                "streaming",
                peer=self.address,
                application=self._login.application,
                lsn=format_lsn(command.lsn),
                timeline=stream.timeline,
                slot=command.slot,
            )
            await self._send_wal(stream, command.slot, positions.segment_bytes)
        except SqlErrorReply as reply:
            if reply.error.code == REMOVED:
                self._server.refused(self, stream.sent_lsn)
            raise
        finally:
            self.stream = None
            self.deadline = float("inf")
            if command.slot is not None:
                slots.release(command.slot)
                self._server.slot_released()

    async def _send_wal(self, stream: ReaderStream, slot: str | None, segment_bytes: int) -> None:
        cursor = WalCursor(self._server.folder, segment_bytes)
        try:
            while True:
                self.event.clear()
                self._take_messages(stream, slot)
                now = time.monotonic()
                if not self.writable:
                    # Wait until it has taken its output; its messages are processed meanwhile.
                    stream.check_heard(now)
                    self.deadline = now + 1.0
                    await self.woken()
                    continue
                positions = self._server.positions()
                match stream.next(positions, now, _now_us()):
                    case Finish(data):
                        self.write(data)
                        return
                    case Write(data):
                        self.write(data)
                        continue
                    case SendRange(begin, end):
                        if self._send(cursor, stream, begin, end):
                            # Yield: a reader that takes everything at once would occupy the loop.
                            await asyncio.sleep(0)
                            continue
                        self.deadline = now  # the positions have just gone back; poll again soon
                    case WaitForPositions(until):
                        self.deadline = until
                        self._server.wants_change()
                        if self._server.positions() is not positions:
                            self.event.set()  # they changed before the wakeup was requested
                await self.woken()
        finally:
            cursor.close()

    def _take_messages(self, stream: ReaderStream, slot: str | None) -> None:
        while (packet := self.next_packet()) is not None:
            assert isinstance(packet, Message)
            if stream.received(packet.kind, packet.body, time.monotonic()):
                raise GoneError
            if slot is not None:
                self._server.slots.confirm(slot, stream.flush_lsn)
                self._server.slots.heed(slot, stream.feedback)
        if slot is not None:
            self._server.slots.check(slot, fatal=True)
        self.check_alive()

    def _send(self, cursor: WalCursor, stream: ReaderStream, begin: Lsn, end: Lsn) -> bool:
        """Send a chunk of the range; False if the positions went back while it was read."""
        size = min(CHUNK, end - begin)
        if len(self._buffer) < backend.XLOG_HEADER + size:
            # A reader that is never far behind needs a small one.
            self._buffer = bytearray(backend.XLOG_HEADER + min(CHUNK, max(2 * size, _SMALL)))
        view = memoryview(self._buffer)
        history = self._server.positions().history
        got = cursor.read_into(view[backend.XLOG_HEADER :], begin, size, stream.timeline, history)
        after = self._server.positions()
        if begin + got > after.served_lsn or after.history != history:
            return False
        backend.put_xlog_header(self._buffer, got, begin, end, _now_us())
        stream.sent(begin + got)
        # The buffer is reused only when the transport has released it: its limit is 0.
        self.write(view[: backend.XLOG_HEADER + got])
        return True

    def _refuse(self, error: SqlError) -> None:
        _log.info(
            "client refused",
            peer=self.address,
            user=self._login.user,
            code=error.code,
            why=error.text,
        )
        self.write(backend.error(error))


def _now_us() -> int:
    return time.time_ns() // 1000


def _reason(error: BaseException) -> str:
    """OpenSSL's reason for the failure of TLS, which contains nothing that the client sent."""
    return str(getattr(error, "reason", None) or type(error).__name__)
