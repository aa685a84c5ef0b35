"""The WAL server of one safekeeper: listener, limits, wakeups, and the publication of the readers' needs.

Invariant: memory is bounded by the limits below, whatever clients do, and unauthenticated clients take nothing from
authenticated ones. Slow logins are closed first when there are too many: the oldest one that has sent nothing, or else
the oldest, makes room for the newest, so that many silent connections lock no client out.
"""

import asyncio
import contextlib
import time
from typing import Final

from walsender_bridge.errors import ConfigError, ConnectionFailedError, TusklineError
from walsender_bridge.postgres.protocol.backend import SqlError, SqlErrorReply
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.quorum.protocol.hot_standby_feedback import oldest
from walsender_bridge.quorum.protocol.positions import Positions, Readers
from walsender_bridge.quorum.protocol.shared_page import POLL_SECONDS, PositionReader
from walsender_bridge.quorum.safekeeper.horizon import reserved_lsn
from walsender_bridge.quorum.wal_server.connection import ENDING, ClientConnection
from walsender_bridge.quorum.wal_server.refused_readers import RefusedReaders
from walsender_bridge.quorum.wal_server.scrub import STEP_SECONDS, Scrub
from walsender_bridge.quorum.wal_server.settings import WalServerSettings
from walsender_bridge.quorum.wal_server.slot_file import SlotFile
from walsender_bridge.quorum.wal_server.slots import Slots
from walsender_bridge.quorum.wal_server.status_record import (
    ReaderRecord,
    SlotRecord,
    WalServerStatus,
)
from walsender_bridge.quorum.wal_server.tls import WalServerTls
from walsender_bridge.quorum.wal_server.users import Users
from walsender_bridge.quorum.wal_server.wal_folder import WalFolder
from walsender_bridge.runtime import logs, status_file

#: The most connections that have logged in, and that have not.
MOST_READERS: Final = 64
_MOST_LOGINS: Final = 64
#: Seconds between two status reports.
_STATUS_SECONDS: Final = 1.0
#: Seconds after which a slot that has advanced within its segment is saved anyway.
_SAVE_SECONDS: Final = 30.0
_BACKLOG = 64

_log = logs.logger()


class WalServer:
    """Serves the WAL of one safekeeper. `run` it; it implements `connection.ConnectionHost`."""

    def __init__(self, settings: WalServerSettings) -> None:
        """Read users, slots and certificates. Raises `ConfigError`, `CorruptError`, `NotSupportedError`."""
        loopback = settings.host in {"127.0.0.1", "::1", "localhost"}
        self.tls_required = not loopback if settings.tls_required is None else settings.tls_required
        if self.tls_required and settings.tls is None:
            raise ConfigError(
                "WAL would be served without TLS",
                where=f"{settings.host}:{settings.port}",
                repair="specify a certificate and its key, or listen on 127.0.0.1",
            )
        self.folder = WalFolder(settings.wal_dir)
        self.users = Users(settings.users)
        self.timeout = settings.timeout
        self.tls = None if settings.tls is None else WalServerTls(settings.tls)
        self._settings = settings
        self._file = SlotFile(settings.slots)
        # The segment size is known once there is WAL; until then no slot can have advanced.
        self.slots = Slots.restored(self._file.load(), segment_bytes=1 << 24)
        self._page = PositionReader(settings.positions, self.folder.history)
        self._refused_readers = RefusedReaders()
        self._logins: dict[int, ClientConnection] = {}
        self._readers: dict[int, ClientConnection] = {}
        self._number = 0
        self._saving = asyncio.Lock()
        self._saved_at = time.monotonic()
        self._told: Readers | None = None
        self._faults: dict[str, str | None] = {}
        self._said_at = 0.0

    # -- for connections ------------------------------------------------------------------------------

    def positions(self) -> Positions:
        """The positions now. Raises `SqlErrorReply` 57P03 when there is no WAL yet, `CorruptError`."""
        found = self._now()
        if found is None:
            raise SqlErrorReply("57P03", "the safekeeper holds no WAL yet", fatal=True)
        return found

    def admit(self, connection: ClientConnection) -> None:
        """The client has authenticated. Raises `SqlErrorReply` 53300 when there are too many."""
        self._logins.pop(connection.number, None)
        if len(self._readers) >= MOST_READERS:
            raise SqlErrorReply("53300", "sorry, too many clients already", fatal=True)
        self._readers[connection.number] = connection

    def wants_change(self) -> None:
        """A reader has everything; request a wakeup at the next change of the positions."""
        self._page.arm()

    async def save_slots(self) -> None:
        """Make the slots durable as they are now, and publish them to the hot loop."""
        async with self._saving:
            slots = self.slots.durable()
            # A slow disk keeps no reader waiting.
            await asyncio.to_thread(self._file.save, slots)
            self.slots.saved(slots)
            self._saved_at = time.monotonic()
        self._tell()

    def slot_released(self) -> None:
        """Wake the connections that wait for a slot."""
        self._wake()

    def gone(self, connection: ClientConnection) -> None:
        """The connection has ended."""
        self._logins.pop(connection.number, None)
        self._readers.pop(connection.number, None)
        self.slots.disconnected(connection.number)
        self._wake()

    # -- running ----------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises `ConnectionFailedError` if the port is unavailable."""
        loop = asyncio.get_running_loop()
        settings = self._settings
        try:
            listener = await loop.create_server(
                self._connection, settings.host, settings.port, backlog=_BACKLOG
            )
        except OSError as error:
            raise ConnectionFailedError(
                f"could not listen: {error.strerror}",
                where=f"{settings.host}:{settings.port}",
                repair="choose another port with --listen, or stop the process that uses it",
            ) from None
        loop.add_reader(self._page.fileno(), self._moved)
        tasks = [asyncio.create_task(self._upkeep()), asyncio.create_task(self._scrub())]
        _log.info(
            "serving WAL", listen=f"{settings.host}:{settings.port}", tls=self.tls is not None
        )
        try:
            await stop.wait()
        finally:
            listener.close()
            for task in tasks:
                task.cancel()
            everybody = [*self._logins.values(), *self._readers.values()]
            for connection in everybody:
                connection.end(ENDING)
            for connection in everybody:
                await connection.ended()
            loop.remove_reader(self._page.fileno())
            if self.slots.changed:
                await self.save_slots()
            self._tell()
            self._page.close()

    def _connection(self) -> ClientConnection:
        self._number += 1
        if len(self._logins) >= _MOST_LOGINS:
            waiting = self._logins.values()
            oldest = next((each for each in waiting if each.silent), next(iter(waiting)))
            _log.warning("too many logins at once, closing the oldest")
            oldest.end(SqlError("53300", "too many connections are logging in", fatal=True))
            del self._logins[oldest.number]
        connection = ClientConnection(self, self._number)
        self._logins[connection.number] = connection
        return connection

    def _now(self) -> Positions | None:
        """The positions, from the page that the hot loop has now."""
        if self._page.is_replaced():
            self._take_new_page()
        return self._page.now()

    def _take_new_page(self) -> None:
        """Go over to the page that the hot loop has made in place of one that was removed; not before it has positions."""
        what = "the page of positions was removed, and the new one cannot be read"
        before = self._page
        try:
            page = PositionReader(self._settings.positions, self.folder.history)
        except (OSError, TusklineError) as error:
            self._complain(what, str(error))
            return
        self._complain(what, None)
        try:
            empty = page.now() is None and before.now() is not None
        except TusklineError:
            empty = False  # The positions of the new page are what cannot be read.
        if empty:
            page.close()
            return
        loop = asyncio.get_running_loop()
        if loop.remove_reader(before.fileno()):
            loop.add_reader(page.fileno(), self._moved)
        before.close()
        self._page = page
        if self._told is not None:
            page.publish(self._told)
        # Those who wait have armed the old page.
        self._wake()

    def _moved(self) -> None:
        self._page.drain()
        self._wake()

    def _wake(self) -> None:
        for connection in self._readers.values():
            connection.wake()

    async def _upkeep(self) -> None:
        """Periodic work: deadlines, missed wakeups, changed users, advanced slots."""
        last: Positions | None = None
        while True:
            await asyncio.sleep(POLL_SECONDS)
            now = time.monotonic()
            with contextlib.suppress(TusklineError):
                # An error of the folder is each reader's own; here it only has to be looked at again.
                found = self._now()
                if found is not None and found != last:
                    last = found
                    self.slots.segment_bytes = found.segment_bytes
                    self._wake()
            for connection in [*self._logins.values(), *self._readers.values()]:
                connection.tick(now)
            due = now - self._said_at >= _STATUS_SECONDS
            lost = due and last is not None and self._lose_slots(last)
            await self._keep(now, urgent=bool(lost))
            if due:
                self._said_at = now
                if self._settings.status_file is not None:
                    status_file.write(self._settings.status_file, self.status(last))

    async def _scrub(self) -> None:
        """Find damage in complete segments before readers do, in the background."""
        scrub = Scrub(self.folder)
        while True:
            await asyncio.sleep(STEP_SECONDS)
            try:
                await asyncio.to_thread(scrub.step)
                self._complain("segments cannot be read", None)
            except OSError as error:
                self._complain("segments cannot be read", error.strerror)

    def _lose_slots(self, positions: Positions) -> bool:
        """Find slots whose WAL has been removed; returns whether there were any."""
        lost = self.slots.lose(
            positions.served_lsn,
            lambda lsn: self.folder.holds(lsn, positions.segment_bytes, positions.history),
        )
        for slot in lost:
            _log.error(
                "invalidating obsolete replication slot",
                slot=slot.name,
                restart_lsn=format_lsn(slot.restart_lsn or 0),
                max_slot_wal_keep_size=self._settings.max_slot_wal_keep_size,
            )
        if lost:
            self._wake()
        return bool(lost)

    def status(self, positions: Positions | None = None) -> WalServerStatus:
        """The status at these positions; None: unknown."""
        flush_lsn = positions.flush_lsn if positions else 0
        reserved = reserved_lsn(flush_lsn, self._settings.max_slot_wal_keep_size)
        return WalServerStatus(
            damaged=tuple(sorted(self.folder.damaged)),
            logins=len(self._logins),
            readers=tuple(
                ReaderRecord(
                    address=c.address,
                    user=c.reader[0],
                    application_name=c.reader[1],
                    timeline=c.stream.timeline,
                    sent_lsn=format_lsn(c.stream.sent_lsn),
                    flush_lsn=format_lsn(c.stream.flush_lsn),
                )
                for c in self._readers.values()
                if c.stream is not None
            ),
            slots=tuple(
                SlotRecord(
                    slot=slot.name,
                    restart_lsn=None if slot.restart_lsn is None else format_lsn(slot.restart_lsn),
                    active=active,
                    temporary=slot.temporary,
                    wal_status=slot.wal_status(reserved),
                )
                for slot, active in self.slots.all()
            ),
        )

    async def _keep(self, now: float, *, urgent: bool) -> None:
        try:
            self.users.refresh()
            self._complain("the previous users remain in effect", None)
        except ConfigError as error:
            self._complain("the previous users remain in effect", f"{error.where}: {error.what}")
        due = urgent or self.slots.frees_a_segment or now - self._saved_at > _SAVE_SECONDS
        if self.slots.changed and due:
            try:
                await self.save_slots()
                self._complain("the slots cannot be written", None)
            except OSError as error:
                # They retain more than they need meanwhile; the write is retried.
                self._complain("the slots cannot be written", error.strerror)
        self._tell()

    def _complain(self, what: str, why: str | None) -> None:
        """Log a fault once, however often it occurs; `why` None: it is over."""
        if why is not None and self._faults.get(what) != why:
            _log.error(what, why=why)
        self._faults[what] = why

    def refused(self, connection: ClientConnection, lsn: Lsn) -> None:
        """A reader's WAL is not here: it counts as needed until it is received, or the reader stops retrying."""
        self._refused_readers.refused(connection.reader, lsn, time.monotonic())

    def _tell(self) -> None:
        """Publish what the readers need to the hot loop, if that has changed."""
        streams = [c.stream for c in self._readers.values() if c.stream is not None]
        now = time.monotonic()
        for connection in self._readers.values():
            if connection.stream is not None:
                self._refused_readers.sent(connection.reader, connection.stream.sent_lsn, now)
        pins = [
            pin
            for pin in (self.slots.pin_lsn(), self._refused_readers.pin_lsn(now))
            if pin is not None
        ]
        needs = Readers(
            min(pins, default=None),
            oldest([*(s.feedback for s in streams), *self.slots.feedbacks()]),
            len(streams),
        )
        if needs != self._told:
            self._page.publish(needs)
            self._told = needs
