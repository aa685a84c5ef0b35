"""The service of the metadata repository: polls the log servers, issues versions, sends commits, trims.

One thread ticks: it collects the reports of all log servers, performs one durable step of the core, and sends the commits,
whose answers contain new reports. A log server that does not answer is skipped in a tick, and is sent what it
missed once it is back: the commits to send follow from its report alone. While a barrier is new, the
tick is short (`barriers.py`).

Actions: status create_stream writer_term barrier register_consumer drop_consumer raise_version describe trim_stream.
They change the state under one lock, which a waiting barrier does not hold.
"""

import contextlib
import math
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from pyarrow import flight

from walsender_bridge.change_log import actions, log_server_messages
from walsender_bridge.change_log import repository_messages as m
from walsender_bridge.change_log.actions import Empty, Handler
from walsender_bridge.change_log.authorization import check_consumer, has_all_leases
from walsender_bridge.change_log.calls import Call, Calls
from walsender_bridge.change_log.listener import Listener, Service
from walsender_bridge.change_log.protocol import (
    MAX_COUNT,
    VERSIONS_AHEAD,
    ReplicaReport,
    StreamCut,
)
from walsender_bridge.change_log.repository import operator_trim, status
from walsender_bridge.change_log.repository.barriers import Barrier, Barriers
from walsender_bridge.change_log.repository.core import (
    LONGEST_LEASE,
    ConsumerDropped,
    ConsumerSeen,
    Created,
    LogServerSeen,
    Record,
    Repository,
    RepositoryTick,
    StreamCreated,
    StreamState,
    TermGiven,
    TrimDecided,
    VersionRaised,
)
from walsender_bridge.change_log.repository.log_server_link import LogServerLink, LogServers
from walsender_bridge.change_log.repository.membership import OBSERVED_SECONDS, ReplicationPolicy
from walsender_bridge.change_log.repository.record_store import RecordStore
from walsender_bridge.change_log.repository.replication import Replication
from walsender_bridge.change_log.repository.store import RepositoryStore
from walsender_bridge.change_log.repository.stream_faults import StreamFaults
from walsender_bridge.errors import (
    Cause,
    ConfigError,
    DeadlineError,
    InvariantError,
    MalformedMessageError,
    NotLeaderError,
    TusklineError,
    UnavailableError,
    UnknownStreamError,
    UsageError,
)
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.certificate_holder import Role
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.private_folder import private_folder
from walsender_bridge.runtime.steady_clock import SteadyClock
from walsender_bridge.runtime.stream_name import check_stream
from walsender_bridge.runtime.tls_files import PLAIN, TLS, TlsBytes, TlsFiles

#: Seconds of a tick while a barrier waits.
_HASTE = 0.01
_LONGEST_BARRIER = 86_400.0
#: Consumers in all, and of one holder of a certificate that may only have its own.
_MOST_CONSUMERS = 10_000
_MOST_OF_HOLDER = 100

_log = logs.logger()


class RepositoryServer:
    """The repository in `data_dir`, listening on `listen` (`host:port`, port 0: any) once started.

    `log_servers`: their addresses. `retention`: seconds that entries are kept without a lease, counted from
    when the log received them (not from their COMMIT: a log that is catching up must not trim at once).
    `tick`: seconds between two steps. `replication`: one replica if None. `store`: instead of the SQLite database in
    `data_dir`; closed by `stop`. `tls`: its certificate, also for the log servers; None: no TLS, so `listen` has to be on
    loopback.
    Raises `ConfigError`, `CorruptError`, `NotSupportedError`.
    """

    def __init__(
        self,
        data_dir: Path,
        listen: str,
        *,
        log_servers: Sequence[str],
        retention: float = 86_400.0,
        tick: float = 0.1,
        replication: ReplicationPolicy | None = None,
        store: RecordStore | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        private_folder(data_dir)
        self._listen = listen
        self._tls = tls
        self._retention = retention
        self._tick = tick
        self._changed = threading.Condition()
        self._stopping = False
        self.barriers = Barriers()
        #: The last valid report of each member, by stream and log server.
        self._reports: dict[tuple[str, str], ReplicaReport] = {}
        #: The last report of each replica, accepted or not.
        self._shown: dict[tuple[str, str], ReplicaReport] = {}
        self._noted = StreamFaults(1 if replication is None else replication.min_replicas)
        self._faults: dict[str, TusklineError] = {}
        self._trim_at = 0.0
        #: When enough log servers answered for a stream last, or this process was found to have been suspended since.
        self._reached_at = time.monotonic()
        #: When that was looked at last.
        self._looked_at = self._reached_at
        #: What the last step failed with; empty: it succeeded.
        self._failure = ""
        self._store: RecordStore = store or RepositoryStore(data_dir / "repository.sqlite")
        if not self._state.log_id:
            self._store.append(Created(str(uuid.uuid4())))
        self._clock = SteadyClock(self._state.since, jumped=_jumped)
        self._log_servers = LogServers(log_servers, tls)
        self._replication = Replication(
            replication or ReplicationPolicy(),
            self._log_servers,
            self._changed,
            lambda: self._state,
            self._record,
            lambda: int(self._clock.now() * 1e6),
            self._reporting,
            self._next_seal,
        )
        self._thread = threading.Thread(target=self._run, name="repository", daemon=True)
        self._listener: Listener | None = None
        self.address = f"{PLAIN if tls is None else TLS}{listen}"

    @property
    def _state(self) -> Repository:
        # The store belongs to one thread at a time: its state is unavailable while another thread appends.
        with self._changed:
            return self._store.state

    # -- start and stop -----------------------------------------------------------------------------

    def start(self) -> None:
        """Contact the log servers, then listen and tick. Raises `ConfigError`."""
        self._step()
        try:
            self._listener = Listener(
                partial(_RepositoryService, self), self._listen, self._tls, Role.REPOSITORY
            )
        except ConfigError:
            self._store.close()
            raise
        self.address = self._listener.address
        self._thread.start()
        self._replication.start()
        _log.info("repository listening", address=self.address, version=self._state.version)

    def stop(self) -> None:
        """Stop the service; waiting barriers are ended with an error."""
        with self._changed:
            self._stopping = True
            self.barriers.stop()
            self._changed.notify_all()
        self._replication.stop()
        if self._listener is not None:
            self._listener.stop()
            self._thread.join()
        self._log_servers.close()
        self._store.close()

    # -- the tick -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            started = time.monotonic()
            try:
                self._step()
                self._failure = ""
            except NotLeaderError:
                return  # whoever started it stops it
            except Exception as error:
                # Without this thread nothing is ever committed again: continue from the disk after any error.
                self._log_failure(error)
                self._reload()
                self._failed(error)
                if isinstance(error, InvariantError):
                    return  # no later step can be written either; the state can still be queried
            with self._changed:
                pause = _HASTE if self.barriers.is_urgent() else self._tick
                left = started + pause - time.monotonic()
                if left > 0 and not self._stopping:
                    # An arriving barrier ends the pause early.
                    self._changed.wait(left)
                if self._stopping:
                    return

    def _log_failure(self, error: Exception) -> None:
        """One line for each cause, as steps fail several times a second; with a traceback if it may be a fault of ours."""
        failure = f"{type(error).__name__}: {error}"
        if failure == self._failure:
            return
        self._failure = failure
        outside = isinstance(error, TusklineError | OSError | sqlite3.OperationalError)
        report = _log.error if outside else _log.exception
        report("repository step failed", error=str(error))

    def _reload(self) -> None:
        with self._changed:
            try:
                self._store.reload()
            except UnavailableError:
                pass  # a store that is not on this machine: its state is read at the next use
            except Exception as error:
                _log.exception("could not read the repository", error=str(error))
                # Exit rather than keep a service that only appears to run: the supervisor restarts it.
                os._exit(Cause.CORRUPT)

    def _failed(self, error: Exception) -> None:
        """Note a fault of every stream: nothing is committed until a step succeeds."""
        if not isinstance(error, TusklineError):
            error = UnavailableError(f"repository step failed: {error}", where=self.address)
        # Without its state, every call is answered with the reason for that.
        with self._changed, contextlib.suppress(UnavailableError):
            self._faults = dict.fromkeys(self._state.streams, error)

    def is_cut_off(self) -> bool:
        """Whether fewer log servers than a stream needs have answered, for as long as one may be silent.

        To be asked every second or so: what is not looked at was a suspension, in which none could answer.
        """
        now = time.monotonic()
        suspended = max(0.0, now - self._looked_at - OBSERVED_SECONDS)
        self._reached_at = min(now, self._reached_at + suspended)
        self._looked_at = now
        return now - self._reached_at > self._replication.policy.silence

    def _step(self) -> None:
        reports = self._log_servers.ask(within=max(self._tick, 1.0))
        if len(self._log_servers.answering()) >= self._replication.policy.min_replicas:
            self._reached_at = time.monotonic()
        with self._changed:
            self._met()
            barriers = self.barriers.due(self._log_servers.asked_since())
            positions = tuple(barrier.positions for barrier in barriers)
            forced = self._state.forced_version
            counted = self._note(reports)
            issue = self._noted.refusal(self._state.streams, self._log_servers) is None
            now = self._clock.now()
            self._record(RepositoryTick(now, tuple(reports), positions, issue))
            if self._state.forced_version > forced:
                for barrier in barriers:
                    if self._state.satisfied(barrier.positions):
                        barrier.version = self._state.forced_version
            due = self._log_servers.due(counted, self._state.streams)
        taken = self._log_servers.send(due, now)
        with self._changed:
            if taken:
                self._record(RepositoryTick(self._clock.now(), tuple(taken), issue=False))
                self._note(taken)
            state = self._state
            self._faults = self._noted.faults(state.streams, self._log_servers, state.log_servers)
            self.barriers.published(self._state.published)
        self._trim()

    def _record(self, record: Record) -> bool:
        return self._store.append(record)

    def confirm(self) -> None:
        """Raise `NotLeaderError` unless what has been read from the state is still right."""
        self._store.confirm()

    def _met(self) -> None:
        for log_server in self._log_servers.with_own_id():
            if self._state.log_servers.get(log_server.log_server_id) != log_server.address:
                self._record(LogServerSeen(log_server.log_server_id, log_server.address))

    def _note(self, reports: Sequence[ReplicaReport]) -> list[ReplicaReport]:
        """Record the reports, and return those that are accepted."""
        for report in reports:
            known = self._state.streams.get(report.stream)
            if known is not None and report.replica in known.replicas:
                self._shown[report.stream, report.replica] = report
        counted = self._noted.note(self._state.evaluate(reports))
        self._reports.update(((report.stream, report.replica), report) for report in counted)
        return counted

    def _reporting(self) -> set[tuple[str, str]]:
        """The streams and log servers whose last report was valid, and whose replica takes commits."""
        return {
            (stream, link.log_server_id)
            for link in self._log_servers.with_own_id()
            for stream in link.reported
            if stream not in link.refused and self._noted.is_valid(link.log_server_id, stream)
        }

    def _trim(self) -> None:
        """Periodically trim entries that are older than the retention and not needed by a consumer."""
        if time.monotonic() < self._trim_at:
            return
        self._trim_at = time.monotonic() + min(5.0, max(0.2, self._retention / 4))
        with self._changed:
            members = {name: stream.members for name, stream in self._state.streams.items()}
        for name, replicas in members.items():
            for log_server in self._log_servers.answering():
                if log_server.log_server_id in replicas:
                    self._trim_replica(name, log_server)

    def _trim_replica(self, name: str, log_server: LogServerLink) -> None:
        with self._changed:
            # The call before this one may have taken seconds, in which a lease was granted.
            now = self._clock.now()
            limit = self._state.trim_limit(name, now)
        before_time = int((now - self._retention) * 1e6)
        if limit <= 1 or before_time <= 0:
            return
        try:
            asked = log_server_messages.TrimPointRequest(name, limit, before_time, int(now * 1e6))
            point = log_server.call(log_server_messages.TRIM_POINT, asked).up_to
            log_server.call(log_server_messages.TRIM, self._decided(name, point))
        except NotLeaderError:
            raise
        except TusklineError as error:
            _log.warning("trim failed", stream=name, error=error.what)

    def _decided(self, name: str, up_to: int) -> log_server_messages.TrimRequest:
        """The trim that may be sent, at most up to there, since it is recorded. Raises `DivergedError` if a replica is ahead."""
        with self._changed:
            if older := self._noted.older():
                raise older
            now = self._clock.now()
            up_to = min(up_to, self._state.trim_limit(name, now))
            self._record(TrimDecided(name, up_to, now))
            version = self._state.version
        self.confirm()
        return log_server_messages.TrimRequest(name, up_to, version)

    # -- actions ------------------------------------------------------------------------------------

    def _stream(self, name: str) -> StreamState:
        stream = self._state.streams.get(name)
        if stream is None:
            raise UnknownStreamError(
                f"stream {name!r:.60} does not exist in this log",
                where=self.address,
                repair=f"existing streams: {', '.join(sorted(self._state.streams)) or 'none'}",
            )
        return stream

    def _cut(self, name: str) -> StreamCut:
        stream = self._stream(name)
        commit = stream.at(self._state.published)
        assert commit is not None, "history reaches down to what is published"
        reports = [self._reports.get((name, member)) for member in stream.members]
        return StreamCut(
            stream=name,
            addresses=self._addresses(stream),
            end_offset=commit.position.end_offset,
            global_end=commit.context.global_end,
            last_end_lsn=commit.position.end_lsn,
            last_commit_time=commit.position.commit_time,
            timeline=commit.position.timeline,
            low_offset=stream.low_offset(each for each in reports if each is not None),
            bytes_total=commit.position.bytes_total,
            history_start=commit.position.history_start,
        )

    def _addresses(self, stream: StreamState) -> tuple[str, ...]:
        """The addresses of the replicas in sync: first of the log servers that answer, then of the others."""
        answering = {log_server.log_server_id for log_server in self._log_servers.answering()}
        known = [name for name in stream.members if name in self._state.log_servers]
        in_order = sorted(known, key=lambda name: name not in answering)
        return tuple(self._state.log_servers[name] for name in in_order)

    def status(self) -> m.StatusAnswer:
        """See `LogStatus`."""
        with self._changed:
            return m.StatusAnswer(
                log_id=self._state.log_id,
                version=self._state.published,
                forced_version=min(self._state.forced_version, self._state.published),
                streams={name: self._cut(name) for name in sorted(self._state.streams)},
                faults={name: ErrorRecord.of(fault) for name, fault in self._faults.items()},
            )

    def describe(self) -> m.DescribeAnswer:
        """See `OperatorLog.describe`."""
        with self._changed:
            return status.describe(
                self._state,
                self._faults,
                self._replication.failures,
                self._log_servers,
                self._clock.now(),
                self._retention,
            )

    def trim_stream(self, request: m.TrimStreamRequest) -> m.TrimStreamAnswer:
        """See `OperatorLog.trim_stream`."""

        def decided() -> operator_trim.TrimOrder:
            with self._changed:
                self._stream(request.stream)
                order = operator_trim.decide(self._state, request, self._clock.now())
            self.confirm()
            return order

        return operator_trim.perform(decided, self._decided, self._log_servers.answering())

    def create_stream(self, request: m.CreateStreamRequest) -> StreamCut:
        """Create a stream on the log server that has the fewest, unless it exists."""
        name = check_stream(request.stream)
        with self._changed:
            if name not in self._state.streams:
                self._met()
                known = self._log_servers.with_own_id()
                if not known:
                    raise UnavailableError(
                        "no log server answers",
                        where=", ".join(k.address for k in self._log_servers),
                        repair="check that `tuskline log-server run` is running",
                    )
                known = sorted(known, key=lambda k: self._streams_on(k.log_server_id))
                least = self._replication.policy.min_replicas
                if len(known) < least:
                    raise UnavailableError(
                        f"{len(known)} log servers answer, and a stream needs {least} replicas",
                        where=", ".join(k.address for k in known),
                        repair="check that the other log servers are running",
                    )
                chosen = known[: self._replication.policy.replicas]
                self._record(StreamCreated(name, tuple(k.log_server_id for k in chosen)))
            stream = self._stream(name)
            log_id = self._state.log_id
        # A stream with commits exists on its log servers, or has been lost there: it is not created again.
        failures: list[TusklineError] = []
        if not stream.last.context.version:
            creation = log_server_messages.CreateRequest(name, log_id)
            for log_server in self._log_servers:
                if log_server.log_server_id in stream.members:
                    try:
                        log_server.call(log_server_messages.CREATE, creation)
                    except TusklineError as error:
                        failures.append(error)
        # The next writer goes on without those that have failed.
        if len(stream.members) - len(failures) < self._replication.policy.least(stream):
            raise failures[0]
        with self._changed:
            return self._cut(name)

    def _streams_on(self, log_server_id: str) -> int:
        return sum(log_server_id in stream.replicas for stream in self._state.streams.values())

    def writer_term(self, request: m.WriterTermRequest) -> m.WriterTermAnswer:
        """Issue a term above every one issued before or known to a replica."""
        name = request.stream
        with self._changed:
            stream = self._stream(name)
            if not stream.needs_seal:
                term, members = self._next_term(name), stream.members
                self._record(TermGiven(name, term))
                return self._writer_term(term, members)
        return self._writer_term(*self._replication.writer_term(name, request.failed))

    def _next_term(self, name: str, synchronized: Sequence[int] = ()) -> int:
        return self._state.next_term(name, self._shown.values(), synchronized)

    def _next_seal(self, name: str, synchronized: Sequence[int]) -> int:
        """The term of the next seal. Raises `DivergedError` if a replica is ahead: its streams may belong to another repository."""
        if older := self._noted.older():
            raise older
        return self._next_term(name, synchronized)

    def _writer_term(self, term: int, members: Sequence[str]) -> m.WriterTermAnswer:
        known = self._state.log_servers
        return m.WriterTermAnswer(term, tuple(known[each] for each in members))

    def barrier(
        self, request: m.BarrierRequest, gone: Callable[[], bool] = lambda: False
    ) -> m.BarrierAnswer:
        """See `LogClient.barrier`. `gone`: whether the client has disconnected."""
        if math.isnan(request.timeout):
            raise MalformedMessageError("timeout is not a number of seconds")
        with self._changed:
            for name in request.positions:
                self._stream(name)
            if self._stopping:
                raise UnavailableError("repository is shutting down", where=self.address)
            barrier = self.barriers.add(dict(request.positions))
            # It cuts the pause between two ticks short.
            self._changed.notify_all()
        try:
            barrier.wait(min(request.timeout, _LONGEST_BARRIER), gone)
        finally:
            with self._changed:
                self.barriers.remove(barrier)
        with self._changed:
            if 0 < barrier.version <= self._state.published:
                return m.BarrierAnswer(barrier.version)
            raise self._unmet(barrier)

    def _unmet(self, barrier: Barrier) -> TusklineError:
        if self._stopping:
            return UnavailableError("repository is shutting down", where=self.address)
        missing = [
            name
            for name, lsn in barrier.positions.items()
            if self._state.streams[name].last.position.end_lsn < lsn
        ]
        waits = f"streams {', '.join(missing)} are behind" if missing else "a log server is behind"
        names = barrier.positions or self._faults
        fault = next((self._faults[name] for name in names if name in self._faults), None)
        if fault is not None:
            return DeadlineError(
                f"the barrier was not reached in time: {fault.what}",
                where=fault.where,
                repair=fault.repair,
            )
        return DeadlineError(
            f"the barrier was not reached in time: {waits}",
            where=self.address,
            repair="check that capture and the log server run (`tuskline log status`), or increase the timeout",
        )

    def register_consumer(self, request: m.RegisterConsumerRequest, holder: str = "") -> Empty:
        """See `LogClient.register_consumer`. `holder`: whose names begin with it, and who may have few; empty: all names."""
        name, version, lease = request.name, request.version, request.lease_seconds
        if not 0 < len(name) <= 200:
            raise MalformedMessageError("a consumer must have a name of 1 to 200 characters")
        if any(0xD800 <= ord(each) < 0xE000 for each in name):
            # JSON can contain half a character, which no output could encode.
            raise MalformedMessageError("a consumer's name is not valid text")
        if not 0 < lease <= LONGEST_LEASE:
            raise UsageError(
                f"a lease of {lease} s is not between 0 and {LONGEST_LEASE:.0f}",
                where=name,
                repair="ask for a shorter lease; to keep entries for longer, set [log] retention",
            )
        with self._changed:
            if version is not None and version > self._state.version:
                raise UsageError(
                    f"version {version} was never issued; the newest is {self._state.version}",
                    where=self.address,
                    repair="check that this is the log that the lake was created from",
                )
            now = self._clock.now()
            if name not in self._state.consumers:
                self._make_room(f"{holder}-" if holder else "", now)
            # The lease's end means something to the next repository only from a recorded time on.
            self._record(RepositoryTick(now, (), issue=False))
            self._record(ConsumerSeen(name, version, now + lease))
        return Empty()

    def _make_room(self, prefix: str, now: float) -> None:
        """Forget the consumer whose lease ended first if there are too many of this prefix. Raises `UsageError`."""
        found = {k: c.until for k, c in self._state.consumers.items() if k.startswith(prefix)}
        if len(found) < (_MOST_OF_HOLDER if prefix else _MOST_CONSUMERS):
            return
        oldest = min(found, key=lambda each: found[each])
        if found[oldest] > now:
            raise UsageError(
                f"too many consumers: {len(found)} have a lease",
                where=self.address,
                repair="use the same name for the same consumer, or shorter leases",
            )
        self._record(ConsumerDropped(oldest))

    def drop_consumer(self, request: m.DropConsumerRequest) -> Empty:
        """See `LogClient.drop_consumer`."""
        with self._changed:
            self._record(ConsumerDropped(request.name))
        return Empty()

    def raise_version(self, request: m.RaiseVersionRequest) -> Empty:
        """See `LogClient.raise_version`."""
        version = request.version
        with self._changed:
            refusal = self._noted.refusal(self._state.streams, self._log_servers)
            if refusal is not None:
                raise refusal
            last = self._state.version
            if version > min(last + VERSIONS_AHEAD, MAX_COUNT):
                raise UsageError(
                    f"version {version} is too far beyond the newest one, {last}",
                    where=self.address,
                    repair="check the version that the lake has published",
                )
            if self._store.append(VersionRaised(version)):
                _log.warning("skipped versions that a reader has seen", version=version)
        return Empty()


def _jumped(seconds: float) -> None:
    _log.warning(
        "the system clock was set; leases and retention follow the steady clock",
        seconds=round(seconds),
    )


class _RepositoryService(Service):
    """The Flight service: translates between Flight's calls and the handlers."""

    def __init__(
        self, server: RepositoryServer, listen: str, tls: TlsBytes | None, calls: Calls
    ) -> None:
        self._server = server
        handlers = actions.by_name(
            m.STATUS.handled_by(lambda _: server.status()),
            m.CREATE_STREAM.handled_by(server.create_stream),
            m.WRITER_TERM.handled_by(server.writer_term),
            m.BARRIER.handled_by(server.barrier),
            m.REGISTER_CONSUMER.handled_by(server.register_consumer),
            m.DROP_CONSUMER.handled_by(server.drop_consumer),
            m.RAISE_VERSION.handled_by(server.raise_version),
            m.DESCRIBE.handled_by(lambda _: server.describe()),
            m.TRIM_STREAM.handled_by(server.trim_stream),
        )
        super().__init__(handlers, listen, tls, calls)

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        """One action."""
        answer: list[bytes] = super().do_action(context, action)
        with actions.faults():
            self._server.confirm()
        return answer

    def handlers(self, context: flight.ServerCallContext, call: Call) -> Mapping[str, Handler]:
        """The handlers of the actions, for a call."""
        barrier = m.BARRIER.handled_by(partial(self._barrier, context, call))
        lease = m.REGISTER_CONSUMER.handled_by(partial(self._register_consumer, context))
        return {**self._handlers, **actions.by_name(barrier, lease)}

    def _barrier(
        self, context: flight.ServerCallContext, call: Call, request: m.BarrierRequest
    ) -> m.BarrierAnswer:
        with call.waiting():
            return self._server.barrier(request, gone=context.is_cancelled)

    def _register_consumer(
        self, context: flight.ServerCallContext, request: m.RegisterConsumerRequest
    ) -> Empty:
        holder = self.holder(context)
        if holder is None or has_all_leases(holder):
            return self._server.register_consumer(request)
        check_consumer(holder, request.name)
        return self._server.register_consumer(request, holder.name)
