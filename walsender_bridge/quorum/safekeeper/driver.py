"""Runs a safekeeper's core: its disk, its connections and its clock; it makes no decisions.

One thread and one epoll: everything that has arrived from the proposer is read, written, synced once, and acknowledged
once (group commit). Readers are served by a process of their own (`wal_server/`), which learns each new position from a
page of shared memory.

Invariant: the effects of an event are performed in order, each to its end, before the next event. A violated invariant of
the core ends the process before any effect of that event, and nothing is written on the way out. A disk error ends the
process, except a full disk: WAL that does not fit is dropped and the proposer disconnected, to come back; a promise that
does not fit is retried, and everything else waits for it.
"""

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from walsender_bridge.errors import (
    AuthenticationError,
    ConnectionFailedError,
    DiskFullError,
    InvariantError,
    MalformedMessageError,
    NotSupportedError,
    PrivilegeError,
    UnavailableError,
)
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition, format_lsn
from walsender_bridge.postgres.protocol.wal_page import WalFormat
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.frames import decode
from walsender_bridge.quorum.protocol.history import History
from walsender_bridge.quorum.protocol.positions import Readers
from walsender_bridge.quorum.protocol.timelines import history_file
from walsender_bridge.quorum.protocol.tls_wire import TlsWireEnd, wire
from walsender_bridge.quorum.safekeeper import (
    authorization,
    control_file,
    data_dir,
    invariants,
    status,
)
from walsender_bridge.quorum.safekeeper import effects as e
from walsender_bridge.quorum.safekeeper.archive import archived_file
from walsender_bridge.quorum.safekeeper.backfill import BackfillStorage
from walsender_bridge.quorum.safekeeper.connection import (
    SafekeeperConnection,
    connection_to_close,
    listen,
    overdue,
)
from walsender_bridge.quorum.safekeeper.core import Safekeeper
from walsender_bridge.quorum.safekeeper.disk_full_retry import retry_until_space
from walsender_bridge.quorum.safekeeper.horizon import horizon, reserved_lsn
from walsender_bridge.quorum.safekeeper.lending import Lending
from walsender_bridge.quorum.safekeeper.reader_page import ReaderPage
from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings
from walsender_bridge.quorum.safekeeper.status import Tell, WriteTimes, tell_nobody
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage
from walsender_bridge.runtime import fail_point, listening, logs, peer_account
from walsender_bridge.runtime.folder import FolderDisk
from walsender_bridge.runtime.gc_control import Sweeper
from walsender_bridge.runtime.tls_context import TlsContext
from walsender_bridge.runtime.waker import Waker

#: Seconds between two writes of the lazy LSNs, and between two polls of readers and old WAL.
PERSIST_SECONDS = 1.0

#: What a peer does that costs it its connection, and nobody anything else.
_ENDS_CONNECTION = (
    AuthenticationError,
    ConnectionFailedError,
    MalformedMessageError,
    NotSupportedError,
)

#: The reason for ending the connection of a peer that has broken no rule.
_DROPPED: Final = "an authority was removed from ca.pem"

_log = logs.logger()


class SafekeeperDriver:
    """See the module. It listens from its construction on; `port` is the one assigned.

    Raises `ConfigError`, `UnavailableError` (port), `CorruptError`, `NotSupportedError` (data directory), `OSError`.
    """

    def __init__(
        self,
        settings: SafekeeperSettings,
        *,
        tell: Tell = tell_nobody,
        still_held: Callable[[], None] = lambda: None,
    ) -> None:
        """`tell` is called with the status once a second (`status.record`).

        `still_held` is called before each promise; it raises when `data_dir` is no longer the directory that was locked.
        """
        self._settings = settings
        self._tell = tell
        self._still_held = still_held
        listening.check_strangers(f"{settings.host}:{settings.port}", tls=settings.tls is not None)
        self._tls = None if settings.tls is None else TlsContext(settings.tls, server=True)
        self._refused_accounts: set[str] = set()
        self._control_disk = FolderDisk(settings.data_dir / "control")
        self._wal_disk = FolderDisk(settings.data_dir / "wal")
        control = control_file.load(self._control_disk, self._wal_disk)
        if control is None:
            still_held()
            control = e.ControlState(int.from_bytes(os.urandom(16), "big"))
            control_file.save(self._control_disk, control)
        self._positions = ReaderPage(settings.positions)
        # Opening truncates what a crash left of the last record; readers must be disconnected by then.
        self._positions.tell(control, 0, 0)
        self._storage: WalStorage | None = None
        flush_lsn = 0
        self._backfill: BackfillStorage | None = None
        self._lending: Lending | None = None
        #: The beginning of the WAL when the disk was last full: WAL removed then is not requested again.
        self._gave_way = 0
        if control.server.system_id:
            self._storage = self._open_storage(control)
            flush_lsn = self._storage.flush_lsn
        self.core = Safekeeper(control, flush_lsn)
        self._checked = invariants.checked(self.core)
        self._connections: dict[int, SafekeeperConnection] = {}
        self._numbers: dict[int, int] = {}
        #: Connections with frames that were not taken, since their peers do not read the answers.
        self._stalled: set[int] = set()
        self._next = 0
        self._hand = memoryview(b"")
        self._stopped = False
        #: Why no WAL is accepted; empty: it is.
        self._full = ""
        self._persist_at = 0.0
        self._sweeper = Sweeper()
        self._writes = WriteTimes()
        self._removed = 0
        self._poll = select.epoll()
        self._listener = listen(settings.host, settings.port)
        self.port: int = self._listener.getsockname()[1]
        self._poll.register(self._listener, select.EPOLLIN)
        self._waker = Waker()
        self._poll.register(self._waker.fileno(), select.EPOLLIN)
        self._publish(min(self.core.commit_lsn, self.core.flush_lsn))
        _log.info(
            "safekeeper listening",
            address=f"{settings.host}:{self.port}",
            safekeeper=f"{control.safekeeper:032x}",
            flush=format_lsn(flush_lsn),
        )

    def _open_storage(self, control: e.ControlState) -> WalStorage:
        server = control.server
        storage = WalStorage(
            self._wal_disk,
            WalFormat(server.major, server.system_id, server.segment_size),
            self._settings.limits,
        )
        storage.open()
        self._backfill, self._lending = BackfillStorage(storage), Lending(storage)
        return storage

    def stop(self) -> None:
        """End `run` soon. May be called from a signal handler."""
        self._stopped = True
        self._waker.wake()

    def run(self) -> None:
        """Serve until `stop`.

        Raises `OSError` when the disk fails, `UnavailableError` (`still_held`, too), `InvariantError`.
        """
        keep = True
        try:
            while not self._stopped:
                self._turn()
        except InvariantError:
            keep = False
            raise
        finally:
            self._close(keep=keep)

    def _close(self, *, keep: bool = True) -> None:
        """`keep`: write what is pending; the state in memory is valid."""
        for number in list(self._connections):
            self._drop(number)
        self._listener.close()
        try:
            if keep:
                # Nothing is written into a directory that was replaced.
                self._still_held()
                if self._storage is not None:
                    self._storage.close()
                self._handle(e.PersistDue())
        finally:
            self._positions.close()
            self._poll.close()
            self._waker.close()

    # -- the loop -----------------------------------------------------------------------------------

    def _turn(self) -> None:
        now = time.monotonic()
        resumed = [n for n in self._stalled if not self._waits(n)]
        busy = bool(resumed) or (self._backfill is not None and self._backfill.checking)
        busy = busy or (self._lending is not None and self._lending.busy(self._crowded))
        ready = self._poll.poll(0 if busy else max(self._persist_at - now, 0.0))
        now = time.monotonic()
        for again in resumed:
            self._stalled.discard(again)
            self._serve(again, 0)
        for descriptor, events in ready:
            if descriptor == self._listener.fileno():
                self._accept(now)
            elif descriptor == self._waker.fileno():
                self._waker.clear()
            elif (number := self._numbers.get(descriptor)) is not None:
                self._serve(number, events)
        self._handle(e.Drained())
        self._lend()
        if now >= self._persist_at:
            self._persist_at = now + PERSIST_SECONDS
            self._upkeep(now)
        self._flush_all()
        if not ready and self._storage is not None and self._storage.prepare():
            self._check_catch_up()

    def _accept(self, now: float) -> None:
        try:
            connected, address = self._listener.accept()
        except OSError:
            return  # it was closed again, or no descriptors are left
        if self._tls is None and not self._admits(connected):
            connected.close()
            return
        if (oldest := connection_to_close(self._connections, self.core.owner)) is not None:
            _log.info("too many connections", ended=self._connections[oldest].end.where)
            self._gone(oldest)
        self._next += 1
        end = wire(connected, f"{address[0]}:{address[1]}", self._tls)
        self._connections[self._next] = SafekeeperConnection(end, now)
        self._numbers[end.fileno()] = self._next
        self._poll.register(end, select.EPOLLIN)

    def _admits(self, connected: socket.socket) -> bool:
        """Whether the peer of a connection without TLS is of an account that is answered; the log names each other one once."""
        try:
            peer_account.check(connected)
        except UnavailableError:
            return False
        except PrivilegeError as error:
            if error.what not in self._refused_accounts:
                self._refused_accounts.add(error.what)
                _log.warning("connection refused", reason=error.what, repair=error.repair)
            return False
        return True

    def _serve(self, number: int, events: int) -> None:
        connection = self._connections[number]
        end = connection.end
        try:
            if events & select.EPOLLOUT:
                end.flush()
            if connection.closing:
                if events & (select.EPOLLHUP | select.EPOLLERR):
                    self._gone(number)
                return
            # A peer that does not read its answers is not read either; earlier input is still buffered.
            if not self._waits(number):
                if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    end.receive()
                    connection.heard = time.monotonic()
                for header, body in end.frames():
                    self._hand = body if header.carries_wal else memoryview(b"")
                    message = decode(header, b"" if header.carries_wal else body)
                    if not isinstance(message, m.ToSafekeeper):
                        raise ConnectionFailedError(
                            "received a safekeeper's message", where=end.where
                        )
                    if isinstance(end, TlsWireEnd):
                        authorization.check(end.holder, message)
                    self._handle(e.MessageReceived(number, message))
                    if number not in self._connections or connection.closing:
                        return
                    if isinstance(message, m.ProposerGreeting):
                        connection.greeted = True
                        end.trust()
                    if self._waits(number):
                        self._stalled.add(number)
                        return
        except PrivilegeError as error:
            _log.warning("message refused", peer=end.where, reason=error.what)
            end.send(m.Refused(m.Refusal.NOT_ALLOWED, m.NodeId(), error.what))
            connection.closing = True
            self._handle(e.Closed(number))
        except _ENDS_CONNECTION as error:
            _log.info("connection ended", peer=end.where, reason=error.what)
            self._gone(number)

    def _gone(self, number: int) -> None:
        """The connection broke, or violated the protocol."""
        if number in self._connections:
            self._drop(number)
            self._handle(e.Closed(number))

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number)
        if self._lending is not None:
            self._lending.forget(number)
        self._stalled.discard(number)
        descriptor = connection.end.fileno()
        self._numbers.pop(descriptor, None)
        self._poll.unregister(descriptor)
        connection.end.close()

    def _flush_all(self) -> None:
        for number, connection in list(self._connections.items()):
            end = connection.end
            try:
                end.flush()
            except ConnectionFailedError:
                self._gone(number)
                continue
            if connection.closing and not end.sending:
                self._drop(number)
            elif end.events != connection.polled:
                connection.polled = end.events
                self._poll.modify(end, connection.polled)

    def _upkeep(self, now: float) -> None:
        self._still_held()
        for number in list(overdue(self._connections, self.core.owner, now)):
            self._gone(number)
        for number, connection in list(self._connections.items()):
            if isinstance(connection.end, TlsWireEnd) and connection.end.is_outdated:
                _log.info("connection ended", peer=connection.end.where, reason=_DROPPED)
                self._gone(number)
        self._handle(e.PersistDue())
        self._sweeper.tick(now)
        self._say()
        readers = self._positions.readers()
        if readers is None or self._storage is None:
            return
        if readers.feedback != self.core.feedback:
            self._handle(e.ReadersMoved(readers.feedback))
        archived = self._archived()
        keep = self._horizon(readers, None if archived is None else archived.lsn)
        if self.core.taken and keep > self._storage.begin_lsn:
            storage = self._storage
            self._do(lambda: self._remove_below(storage, keep))
        if self._full:
            self._gave_way = self._storage.begin_lsn
        if self._backfill is not None and self.core.taken and self.core.restart_lsn:
            # Other safekeepers archive the older WAL.
            self._backfill.want(max(self._horizon(readers, None), self._gave_way))

    def _horizon(self, readers: Readers, archived_lsn: Lsn | None) -> Lsn:
        return horizon(
            restart_lsn=self.core.restart_lsn,
            commit_lsn=self.core.commit_lsn,
            flush_lsn=self.core.flush_lsn,
            slots=[] if readers.pin_lsn is None else [readers.pin_lsn],
            archived_lsn=archived_lsn,
            keep_bytes=self._settings.keep_bytes,
            max_slot_wal_keep_size=self._settings.max_slot_wal_keep_size,
            full=bool(self._full),
        )

    def _archived(self) -> archived_file.Archived | None:
        url, archived = self._settings.archive, self._settings.data_dir / data_dir.ARCHIVED
        return None if url is None else archived_file.load(FolderDisk(archived), url)

    def _remove_below(self, storage: WalStorage, keep: Lsn) -> None:
        self._removed += storage.remove_below(keep)

    def _say(self, full: str = "") -> None:
        """Report the status."""
        settings = self._settings
        self._tell(
            status.record(
                self.core,
                self._storage,
                self._backfill,
                self._lending,
                self._writes,
                address=f"{settings.host}:{self.port}",
                proposers=len(self._connections),
                removed=self._removed,
                readers=self._positions.readers(),
                archived=self._archived(),
                reserved=reserved_lsn(self.core.flush_lsn, settings.max_slot_wal_keep_size),
                full=full or self._full or (self._storage.segments.full if self._storage else ""),
            )
        )

    # -- events and effects -------------------------------------------------------------------------

    def _handle(self, event: e.Event) -> None:
        events = deque([event])
        while events:
            answers: list[e.Event] = []
            event = events.popleft()
            effects = self.core.step(event)
            # The control file holds a safekeeper's promises, so nothing reaches it unchecked, not even from a hot step.
            if not invariants.is_hot(event) or any(
                type(each) is e.PersistControl for each in effects
            ):
                self._checked = invariants.check_invariants(self.core, self._checked)
            for effect in effects:
                if fail_point.ARMED:
                    fail_point.hit(f"safekeeper-{type(effect).__name__}")
                answer = self._perform(effect)
                if answer is not None:
                    answers.append(answer)
            events.extendleft(reversed(answers))

    def _perform(self, effect: e.Effect) -> e.Event | None:
        match effect:
            case e.SendMessage(conn, message):
                if (connection := self._connections.get(conn)) is not None:
                    connection.end.send(message)
                    # At once: a commit may wait for it, but for nothing else in this turn. Broken connections are found at its end.
                    with contextlib.suppress(ConnectionFailedError):
                        connection.end.flush()
            case e.WriteWal(lsn, length, timeline):
                assert length == len(self._hand)
                return self._unless_full(lambda: self._held.write(lsn, self._hand, timeline))
            case e.SyncWal():
                began = time.perf_counter()
                refused = self._unless_full(self._held.flush)
                self._writes.add(time.perf_counter() - began)
                return refused or e.WalSynced(self._held.flush_lsn)
            case e.ServeReaders(lsn):
                self._publish(lsn)
            case e.PersistControl(state):
                self._persist(state)
            case e.KeepTimelines(history, ancestors):
                self._save_history(history, ancestors)
            case e.AlignWal(flush_lsn, commit_lsn):
                storage = self._held
                return e.WalAligned(
                    storage.align(flush_lsn), storage.align(commit_lsn), storage.begin_lsn
                )
            case e.TruncateWal(lsn):
                self._held.truncate(lsn)
            case e.ResetWal(lsn):
                self._held.reset(lsn)
            case e.SendWal():
                if self._lending is not None:
                    self._lending.ask(effect)
            case e.SendHeld(conn, term):
                self._tell_held(conn, term)
            case e.TakeCatchUpWal(conn, term, begin_lsn, timeline):
                if self._backfill is not None:
                    self._backfill.take(begin_lsn, self._hand, timeline)
                self._tell_held(conn, term)
            case e.Close(conn):
                if (connection := self._connections.get(conn)) is not None:
                    connection.closing = True
        return None

    @property
    def _held(self) -> WalStorage:
        assert self._storage is not None, "a vote came first"
        return self._storage

    def _unless_full(self, act: Callable[[], object]) -> e.DiskFull | None:
        """Write or sync WAL, as far as there is space."""
        storage = self._held
        try:
            act()
        except DiskFullError as error:
            storage.drop_unflushed()
            if not self._full:
                _log.error("disk full, no WAL is accepted", reason=error.what, repair=error.repair)
            self._full = error.what
            return e.DiskFull(storage.flush_lsn, error.what)
        if self._full and not storage.segments.full:
            self._full = ""
            _log.info("disk has free space again")
        return None

    def _do(self, act: Callable[[], object]) -> None:
        retry_until_space(act, self._wait_for_space, self._still_held)

    def _wait_for_space(self, why: str) -> bool:
        """For `retry_until_space`: removes spare segments first."""
        if self._storage is not None:
            self._storage.segments.drop_spares()
        self._say(why)
        return not self._stopped

    def _persist(self, state: e.ControlState) -> None:
        self._do(lambda: control_file.save(self._control_disk, state))
        if self._storage is None and state.server.system_id:
            self._storage = self._open_storage(state)
        self._save_history(state.history)

    def _save_history(self, history: History, ancestors: tuple[WalPosition, ...] = ()) -> None:
        found, storage = history_file(history, ancestors), self._storage
        if found is not None and storage is not None:
            self._do(lambda: storage.save_history(*found))

    def _publish(self, lsn: Lsn) -> None:
        if self._storage is not None:
            self._positions.tell(self.core.control, self._storage.flush_lsn, lsn)

    def _tell_held(self, conn: int, term: int) -> None:
        connection, backfill = self._connections.get(conn), self._backfill
        if connection is not None and backfill is not None:
            begin_lsn = self._held.begin_lsn
            connection.end.send(m.Held(term, begin_lsn, backfill.wanted_lsn, backfill.next_lsn))

    def _check_catch_up(self) -> None:
        if self._backfill is not None and self._backfill.check():
            _log.info("joined older WAL", begin=format_lsn(self._held.begin_lsn))

    def _lend(self) -> None:
        """Send requested WAL, as far as it is verified."""
        if self._lending is not None:
            term = self.core.control.node_id.term
            for conn, message, data in self._lending.step(term, self._crowded):
                self._connections[conn].end.send(message, [memoryview(data)])

    def _crowded(self, number: int) -> bool:
        return self._connections[number].end.crowded()

    def _waits(self, number: int) -> bool:
        """Whether its input is not read for now: it does not read its answers, or has many pending."""
        full = self._lending is not None and self._lending.is_full(number)
        return full or self._crowded(number)
