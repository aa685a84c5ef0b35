"""The driver of capture's core: sockets, threads and clocks, but no decisions.

A session consists of a walsender's stream, a writer of the log's stream, and a `core.CaptureState`. It ends when either
side breaks, and the next one starts from the contents of the log; the pause between sessions grows to
`LONGEST_PAUSE`. Errors that a retry cannot resolve are raised out of `Capture.run`.

If the log server acknowledges nothing for `ACK_SECONDS`, the process exits and is restarted, since a call to a hung log
server might never return.
"""

import select
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from walsender_bridge.capture import (
    core,
    invariants,
    publication_watch,
    source,
    stream_record,
)
from walsender_bridge.capture.append_channel import AppendChannel
from walsender_bridge.capture.events import (
    Acknowledged,
    AppendToReplica,
    CaptureTick,
    CopyDataReceived,
    Effect,
    Event,
    Replayed,
    SpoolAppend,
    StandbyStatusUpdate,
)
from walsender_bridge.capture.gate.monitor import GateMonitor, Watch
from walsender_bridge.capture.session_setup import SessionSetup
from walsender_bridge.capture.settings import CaptureSettings
from walsender_bridge.capture.spool.files import SpoolFiles
from walsender_bridge.capture.status import StatusFile, WalEnd
from walsender_bridge.change_log.client import LogClient, ReplicaClient
from walsender_bridge.errors import (
    ConnectionFailedError,
    DeadlineError,
    DiskFullError,
    DivergedError,
    PublicationError,
    SlotInUseError,
    StreamSealedError,
    TusklineError,
    UnavailableError,
    UnsupportedValueError,
)
from walsender_bridge.postgres.client.hosts import same_server
from walsender_bridge.postgres.client.replication_connection import (
    ANSWER_SECONDS,
    ReplicationConnection,
)
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.postgres.protocol.replication import mark_for_failover, status_update
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.waker import Waker

#: Seconds between two sessions: the first pause, which doubles up to the longest.
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
#: Seconds of streaming after which the pause is reset.
GOOD_SESSION = 5.0
#: Seconds for which a slot may be in use by another session: longer than the default wal_sender_timeout.
SLOT_PATIENCE = 90.0
#: The first version whose standbys synchronize slots that have the failover property.
SYNCED_FROM = 170000
#: Seconds without an acknowledgement after which the log server is considered hung.
ACK_SECONDS = 120.0
#: Seconds to let messages gather after a small read. A walsender writes one message at a time; reading
#: each write costs this side twice the CPU that reading a hundred does. An entry waits for
#: `core.ENTRY_SECONDS` anyway.
GATHER_SECONDS = 0.003
#: The same under load: when a large read came just before. Left alone for longer, the kernel collects the
#: walsender's small writes instead of carrying each through TCP by itself; that halves the walsender's CPU
#: (docs/performance.md). What arrives meanwhile fits into the socket's buffers.
LOADED_GATHER_SECONDS = 0.020
#: Messages that make a read large: more data is waiting, and the walsender must not be delayed.
MANY = 500

_RETRIED = (
    ConnectionFailedError,
    UnavailableError,
    DeadlineError,
    SlotInUseError,
    DiskFullError,
)

_log = logs.logger()


class HungLogServerError(TusklineError):
    """A connected log server does not acknowledge appends."""

    cause = UnavailableError.cause


class Capture:
    """Captures one source into its stream, until `stop`."""

    def __init__(self, settings: CaptureSettings, gate: GateMonitor) -> None:
        self._settings = settings
        self._source = settings.source
        self._gate = gate
        #: Whether the last session broke inside a block of a transaction in progress.
        self._broken_in_stream = False
        self._status = StatusFile(settings.status_file, self._source.name, self._source.slot)
        self._stopped = False
        #: The log servers at which the last session failed.
        self._failed: set[str] = set()
        #: Why the last session ended, until another one streams.
        self._error: TusklineError | None = None
        self._checked: invariants.Checked
        self.waker = Waker()

    def stop(self) -> None:
        """Make `run` return soon. Can be called from a signal handler or another thread."""
        self._stopped = True
        self.waker.wake()

    def run(self) -> None:
        """Stream until `stop`. Raises errors that a retry cannot resolve."""
        pause, in_use_since = FIRST_PAUSE, None
        try:
            while not self._stopped:
                began = time.monotonic()
                try:
                    self._session()
                except _RETRIED as error:
                    now = time.monotonic()
                    if not isinstance(error, SlotInUseError):
                        in_use_since = None
                    elif in_use_since is None:
                        in_use_since = now
                    elif now - in_use_since > SLOT_PATIENCE:
                        raise
                    if now - began > GOOD_SESSION or isinstance(error, StreamSealedError):
                        pause = FIRST_PAUSE
                    self._error = error
                    self._status.state("waiting", error)
                    _log.warning(
                        "session ended",
                        source=self._source.name,
                        slot=self._source.slot,
                        error=error.what,
                        where=error.where,
                        repair=error.repair,
                        again=pause,
                    )
                    self._sleep(pause)
                    pause = min(pause * 2, LONGEST_PAUSE)
        except TusklineError as error:
            self._status.state("stopped", error)
            raise
        self._status.state("stopped")

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.waker, select.POLLIN)
        while not self._stopped and (left := deadline - time.monotonic()) > 0:
            poll.poll(left * 1000)
            self.waker.clear()

    # -- one session --------------------------------------------------------------------------------

    def _session(self) -> None:
        own = self._source
        self._status.state("connecting", self._error)
        with ExitStack() as stack:
            connection = stack.enter_context(source.connect(own))
            log = stack.enter_context(LogClient(self._settings.log))
            logged = stream_record.of_log(log, own.name)
            self._status.begin(logged)
            source.check_cluster(connection, own, logged)
            has_history = logged is not None and logged.begun
            published = source.prepare(connection, own, has_history=has_history)
            slot_confirmed = source.slot_position(connection, own)
            # With several hosts in the DSN, stay with the server just checked: each connection could reach another.
            here = replace(own, dsn=same_server(own.dsn, connection))
            name = source.application_name(own)
            walsender = stack.enter_context(
                ReplicationConnection.connect(here.dsn, application_name=name)
            )
            address = log.create_stream(own.name).addresses[0]
            replica = stack.enter_context(ReplicaClient(address))
            joining = SessionSetup(
                own, walsender, log, replica, partial(self._check, connection), self._failed
            )
            joined = joining.join(
                slot_confirmed,
                spool_limit=self._settings.spool_limit,
                max_uncommitted_bytes=self._settings.max_uncommitted_bytes,
            )
            state, writer = joined.state, joined.writer
            handover = AppendChannel(writer, self.waker)
            stack.callback(handover.close)
            watch = stack.enter_context(
                self._gate.watch(here, joined.identity, state.committed_lsn, self.waker.wake)
            )
            if self._gate.failover and walsender.server_version >= SYNCED_FROM:
                walsender.command(mark_for_failover(own.slot), timeout=ANSWER_SECONDS)
            files = SpoolFiles(self._settings.spool, writer.term)
            stack.callback(files.close)
            # Some servers fail to decode a transaction in progress but succeed once it has
            # committed ("could not map filenumber", docs/decisions/capture.md).
            streaming = self._settings.spool_limit > 0 and not self._broken_in_stream
            walsender.start_logical(own.slot, [own.publication], streaming=streaming)
            self._broken_in_stream = False
            files.open()
            tables = stack.enter_context(publication_watch.watched(here, published))
            self._error = None
            self._status.streaming(joined.identity.system_id)
            _log.info(
                "streaming",
                source=own.name,
                slot=own.slot,
                term=writer.term,
                lsn=format_lsn(state.confirmed.lsn),
                in_progress=streaming,
            )
            wal_end = WalEnd(connection, own.where)
            try:
                self._stream(walsender, handover, files, state, wal_end, watch, tables)
            except ConnectionFailedError:
                self._broken_in_stream = len(state.streams) > 0
                raise
            except (PublicationError, DivergedError) as error:
                raise source.cannot_continue(own, error) from None
            except UnsupportedValueError as error:
                if not streaming:
                    raise
                # A transaction in progress may still be rolled back; one that has committed is sent again.
                self._broken_in_stream = True
                raise UnavailableError(error.what, where=error.where, repair=error.repair) from None
            finally:
                self._status.progress(state, wal_end.lsn, watch.status(), behind=False)

    def _check(self, connection: psycopg.Connection[Any]) -> None:
        """Check, while a slot is being created, that capture has not been stopped and that the server responds."""
        if self._stopped:
            raise UnavailableError("capture is stopping", where=self._source.where)
        connection.execute("SELECT 1")

    def _stream(
        self,
        walsender: ReplicationConnection,
        handover: AppendChannel,
        files: SpoolFiles,
        state: core.CaptureState,
        wal_end: WalEnd,
        watch: Watch,
        tables: publication_watch.PublicationPoll,
    ) -> None:
        """Run the poll loop over the walsender's socket and the waker (acknowledgements, the gate, `stop`)."""
        poll = select.poll()
        poll.register(self.waker, select.POLLIN)
        poll.register(walsender, select.POLLIN)
        socket, watched = walsender.fileno(), select.POLLIN
        sent, published_at, loaded = True, 0.0, False
        heard_at = time.monotonic()
        self._checked = invariants.checked(state)
        while not self._stopped:
            wanted = (select.POLLIN if state.reading else 0) | (0 if sent else select.POLLOUT)
            if wanted != watched:
                poll.modify(walsender, wanted)
                watched = wanted
            timeout = 0.0
            if state.replaying is None:
                timeout = max(state.deadline - time.monotonic(), 0.0) * 1000 + 0.5
            ready = dict(poll.poll(timeout))
            now = time.monotonic()
            effects: list[Effect] = []
            payloads: list[bytes] = []
            if self.waker.fileno() in ready:
                self.waker.clear()
                for ack, took in handover.acks():
                    acknowledged = Acknowledged(
                        now,
                        ack.durable_last_end_lsn,
                        ack.committed_end_lsn,
                        ack.confirmed_to,
                        took,
                    )
                    effects += self._step(state, acknowledged)
            if state.reading:
                # Even if poll reports nothing: TLS may have buffered bytes that poll does not see.
                if socket in ready or not ready:
                    payloads = walsender.receive()
                if payloads:
                    effects += self._step(state, CopyDataReceived(now, payloads))
            elif ready.get(socket, 0) & (select.POLLERR | select.POLLHUP):
                raise ConnectionFailedError("the connection broke", where=walsender.where)
            if state.replaying is not None:
                # A transaction that arrives complete in one batch, Stream Start to Stream Commit, is spooled first.
                _perform(effects, walsender, handover, files)
                effects = self._step(state, Replayed(now, files.read(state.replaying)))
            gate = watch.position()
            if now >= state.deadline or not ready or gate != state.gate:
                effects += self._step(state, CaptureTick(now, gate))
            _perform(effects, walsender, handover, files)
            watch.want(state.logged_lsn)
            sent = walsender.flush()
            if (
                payloads
                or not state.reading
                or wal_end.lsn <= max(state.received_lsn, state.idle_lsn)
            ):
                heard_at = now
            if now >= published_at + core.REPORT_SECONDS:
                published_at = now
                wal_end.refresh()
                self._status.progress(
                    state, wal_end.lsn, watch.status(), behind=True, silent=now - heard_at
                )
                self._check_log_server(state, now)
                tables.check()
            if 0 < len(payloads) < MANY:
                time.sleep(LOADED_GATHER_SECONDS if loaded else GATHER_SECONDS)
            if payloads:
                loaded = len(payloads) >= MANY

    def _step(self, state: core.CaptureState, event: Event) -> list[Effect]:
        """Step the core and return its effects. Raises `InvariantError` before any of them is performed."""
        effects = core.step(state, event)
        if not invariants.is_hot(event):
            self._checked = invariants.check_invariants(state, self._checked)
        return effects

    def _check_log_server(self, state: core.CaptureState, now: float) -> None:
        since = state.waiting_since
        if since is not None and now - since > ACK_SECONDS:
            raise HungLogServerError(
                f"no acknowledgement from the log server in {ACK_SECONDS:.0f} s",
                where=f"stream {self._source.name}",
                repair="check the log server and its disk",
            )


def _perform(
    effects: Sequence[Effect],
    walsender: ReplicationConnection,
    handover: AppendChannel,
    files: SpoolFiles,
) -> None:
    for effect in effects:
        if isinstance(effect, AppendToReplica):
            handover.put(effect)
        elif isinstance(effect, SpoolAppend):
            files.append(effect)
        elif isinstance(effect, StandbyStatusUpdate):
            walsender.send(
                status_update(
                    write=effect.write,
                    flush=effect.flush,
                    apply=effect.flush,
                    now_us=time.time_ns() // 1000,
                )
            )
        else:
            files.cut(effect)
