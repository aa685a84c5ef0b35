"""The log server's Flight service: the replicas in one data directory.

    DoPut   append/<stream>/<term>   batches of entries and schemas; one acknowledgement for each
            sync/<stream>            entries and commits of another log server (synchronizer.py)
    DoGet   `ReadRequest`; one batch of entries, with `ReadAnswer`
    actions report commit create learn cut_tail seal synchronize trim stream_status schema relations plan version_at
            cut_before transactions replicas commits

A call holds no lock and no transaction while it waits for its peer, so a reader or writer that stalls
blocks no other. Streams do not wait for each other.
"""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from pyarrow import flight

from walsender_bridge.change_log import actions, protocol
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.actions import Empty, Handler, unhex
from walsender_bridge.change_log.authorization import APPEND, READ, SYNC
from walsender_bridge.change_log.calls import Call, Calls
from walsender_bridge.change_log.connection import connect
from walsender_bridge.change_log.listener import Listener, Service
from walsender_bridge.change_log.protocol import (
    CommitContext,
    ReplicaReport,
    ReplicaStatus,
)
from walsender_bridge.change_log.replica import commit_rows, fatal_segments, synchronizer
from walsender_bridge.change_log.replica import identity as log_server_identity
from walsender_bridge.change_log.replica.disk import RecoveryOutcome
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.replica.replica_ids import ReplicaIds
from walsender_bridge.change_log.replica.settings import SEGMENT_BYTES
from walsender_bridge.change_log.replica.sync_throttle import Throttle
from walsender_bridge.change_log.storage.segment import Segment
from walsender_bridge.change_log.storage.store import WIPING, StoredEntry
from walsender_bridge.errors import (
    ConfigError,
    MalformedMessageError,
    TusklineError,
    UnavailableError,
    UnknownStreamError,
)
from walsender_bridge.runtime import lock_file, logs, same_file
from walsender_bridge.runtime.certificate_holder import Role
from walsender_bridge.runtime.durable import sync_folder
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.private_folder import private_folder
from walsender_bridge.runtime.stream_name import check_stream
from walsender_bridge.runtime.tls_files import TlsBytes, TlsFiles

#: Seconds for calls in progress when the service stops.
_GRACE = 2.0
#: A term in the path of an append: it must fit into the reports that contain it later.
_TERM = re.compile(r"[0-9]{1,19}")

_log = logs.logger()


class DataDirectory:
    """A log server's folder: its identity, a lock, and a folder for each stream.

    A file (`running`) is there from before the first stream is opened until all are closed. `crashed`: it was there before.
    `create`: see `ReplicaServer`.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        self.streams = path / "streams"
        if create:
            log_server_identity.prepare(path)
        elif not log_server_identity.exists(path):
            raise log_server_identity.lost(path)
        private_folder(path)
        private_folder(self.streams)
        taken = ConfigError(
            "data directory is in use by another log server",
            where=str(path),
            repair="stop that log server, or give each one its own [[log_server]] data_dir",
        )
        self._lock = lock_file.lock(path / "lock", taken)
        self._locked = os.fstat(self._lock)
        self.log_server_id = log_server_identity.load(path)
        self.replica_ids = ReplicaIds(path, self.log_server_id)
        self._running = path / "running"
        self.crashed = self._running.exists()
        # On a full disk it may serve all the same: then only a supervisor knows that it crashed.
        with contextlib.suppress(OSError):
            self._running.touch(mode=0o600)
            sync_folder(path)

    def stream_names(self) -> list[str]:
        """The streams on disk; an interrupted creation leaves nothing, an interrupted wipe a stream."""
        return sorted(
            folder.name
            for folder in self.streams.iterdir()
            if any(
                p.name == WIPING or Segment.offset_in_name(p.name.split(".")[0]) is not None
                for p in folder.iterdir()
            )
        )

    def check(self) -> None:
        """Raise `UnavailableError` if another directory, or none, is at the path now."""
        # An error of the moment says nothing; the next write meets it.
        with contextlib.suppress(OSError):
            if not same_file.leads_to(self.path / "lock", self._locked):
                raise UnavailableError(
                    "the directory is not the one that this log server has locked: it was removed, moved or replaced, or a"
                    " disk was mounted or unmounted there",
                    where=str(self.path),
                    repair="put the original directory back; the log server restarts with its contents",
                )

    def close(self) -> None:
        """Release the lock; all streams are closed."""
        with contextlib.suppress(OSError):
            self._running.unlink()
        os.close(self._lock)


class ReplicaServer:
    """Hosts the replicas in `data_dir`, and listens on `listen` (`host:port`, port 0: any).

    It serves as soon as it is created. `segment_bytes`: see `StreamStore`. `after`: the signal that killed its predecessor,
    possibly because of a damaged segment (`fatal_segments`). `create`: whether a missing directory is created; where one is
    already running, it has been lost. `tls`: its certificate; None: no TLS, so `listen` has to be on
    loopback. Raises `ConfigError` if the directory or the port is in use, `UnavailableError` if the directory is missing, and the
    errors of `identity.load`.
    """

    def __init__(
        self,
        data_dir: Path,
        listen: str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        after: signal.Signals | None = None,
        tls: TlsFiles | None = None,
        create: bool = True,
    ) -> None:
        self._tls = tls
        self._directory = DataDirectory(data_dir, create=create)
        if after in fatal_segments.SIGNALS:
            _log.warning("checking all segments in a child process", after=after.name)
            fatal_segments.keep_fatal_aside(self._directory.streams)
        elif self._directory.crashed:
            fatal_segments.keep_newest_aside(self._directory.streams)
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._replicas: dict[str, HostedReplica] = {}
        self._stopped = threading.Event()
        self.throttle = Throttle()
        for name in self._directory.stream_names():
            replica = self._host(name)
            replica.recover()
            self._replicas[name] = replica
            outcome, reason = replica.outcome
            level = _log.error if outcome == RecoveryOutcome.INVALID else _log.info
            level("replica opened", stream=name, outcome=str(outcome), reason=reason)
        ids = {name: replica.replica_id for name, replica in self._replicas.items()}
        self._directory.replica_ids.know(ids)
        self.address = listen
        try:
            self._listener = Listener(partial(_ReplicaService, self), listen, tls, Role.LOG_SERVER)
        except ConfigError:
            self._close()
            raise
        self.address = self._listener.address
        _log.info("log server listening", address=self.address, streams=len(self._replicas))

    @property
    def log_server_id(self) -> str:
        """The log server's id, kept in its data directory."""
        return self._directory.log_server_id

    def check_directory(self) -> None:
        """Raise `UnavailableError` if its data directory is gone, or another one: what it holds will not be found again."""
        self._directory.check()

    def serve(self) -> None:
        """Wait until `stop` is called."""
        self._stopped.wait()

    def stop(self) -> None:
        """Stop the service; acknowledged entries are on disk."""
        self._close()
        # Flight waits for calls in progress without a limit, and an append may stay open indefinitely.
        self._listener.stop(_GRACE)
        self._stopped.set()

    def _close(self) -> None:
        with self._lock:
            for replica in self._replicas.values():
                replica.close()
            self._directory.close()

    def _host(self, stream: str) -> HostedReplica:
        return HostedReplica(
            self._directory.streams / stream,
            segment_bytes=self._segment_bytes,
            replica_id=self._directory.replica_ids.of(stream),
        )

    def replica(self, stream: str) -> HostedReplica:
        """The replica of a stream. Raises `UnknownStreamError`."""
        replica = self._replicas.get(stream)
        if replica is None:
            raise UnknownStreamError(
                f"stream {stream!r:.60} does not exist on this log server",
                where=self.address,
                repair="run `tuskline log status` for a list of streams",
            )
        return replica

    def _holding(self, stream: str, end: int) -> HostedReplica:
        """The replica of a stream, which is committed up to `end`. Raises `UnknownStreamError`, `BehindError`."""
        replica = self.replica(stream)
        replica.check_holds(end)
        return replica

    def read(self, request: m.ReadRequest) -> tuple[pa.RecordBatch, m.ReadAnswer]:
        """The first batch of the entries [from, to); it is empty where none of its entries is wanted."""
        replica = self.replica(request.stream)
        entries, after = replica.read(request.from_offset, request.to_offset, request.relations)
        batch = _batch(entries)
        crc = protocol.places_crc(request.stream, batch, after)
        return batch, m.ReadAnswer(replica.log_id, after, crc)

    # -- actions ------------------------------------------------------------------------------------

    def create(self, request: m.CreateRequest) -> ReplicaStatus:
        """Create a replica of a stream of this log, unless it exists."""
        stream, log_id = check_stream(request.stream), request.log_id
        self._directory.check()
        with self._lock:
            if self._stopped.is_set():
                raise UnavailableError("log server is shutting down", where=self.address)
            if stream not in self._replicas:
                replica = self._host(stream)
                replica.create(stream, log_id)
                self._directory.replica_ids.know({stream: replica.replica_id})
                self._replicas[stream] = replica
        status = self.replica(stream).status()
        if status.log_id != log_id:
            raise ConfigError(
                f"stream {stream} on this log server belongs to log {status.log_id}, not {log_id}",
                where=self.address,
                repair="give each log its own log servers; if this log's repository was lost, and another one was started in"
                " its place, stop that one, remove it, and run `tuskline log rebuild`: docs/log-lost.md",
            )
        return status

    def report(self) -> m.ReportAnswer:
        """The reports of all replicas that are not LEARNING. Raises as `check_directory`."""
        self._directory.check()
        with self._lock:
            streams = list(self._replicas)
        return m.ReportAnswer(self.log_server_id, self._reports(streams))

    def _reports(self, streams: Iterable[str]) -> tuple[ReplicaReport, ...]:
        reports = (self.replica(stream).report(self.log_server_id) for stream in streams)
        return tuple(report for report in reports if report is not None)

    def commit(self, request: m.CommitRequest) -> m.CommitAnswer:
        """Apply commits for several streams, in order, and return their reports. A failure does not affect other streams."""
        refused = {}
        for stream, commits in request.commits.items():
            try:
                _check_versions(each.context for each in commits)
                self.replica(stream).commit(commits, request.now)
            except TusklineError as error:
                refused[stream] = ErrorRecord.of(error)
        reports = self._reports(s for s in request.commits if s in self._replicas)
        return m.CommitAnswer(reports, refused)

    def seal(self, request: m.SealRequest) -> ReplicaStatus:
        """See `Replica.seal`."""
        replica = self.replica(request.stream)
        if request.term > protocol.MAX_COUNT:
            raise MalformedMessageError(
                f"no seal has term {request.term}", where=f"stream {request.stream}"
            )
        return replica.seal(request.end, request.term, request.version)

    def joined(self, request: m.JoinedRequest) -> Empty:
        """See `Replica.joined`."""
        self.replica(request.stream).joined(request.replaced_by)
        return Empty()

    def synchronize(self, request: m.SynchronizeRequest) -> ReplicaStatus:
        """Synchronize the replica of another log server with this one, and return its status."""
        return synchronizer.synchronize(
            self.replica(request.stream),
            self.log_server_id,
            partial(connect, request.address, self._tls, streams=[request.stream]),
            request.address,
            self.throttle if request.throttled else None,
        )

    def learn(self, request: m.CreateRequest) -> Empty:
        """Host a replica that is to be synchronized, unless there is one of this stream."""
        stream = check_stream(request.stream)
        self._directory.check()
        with self._lock:
            if self._stopped.is_set():
                raise UnavailableError("log server is shutting down", where=self.address)
            if stream not in self._replicas:
                replica = self._host(stream)
                replica.learn(request.log_id)
                self._directory.replica_ids.know({stream: replica.replica_id})
                self._replicas[stream] = replica
        return Empty()

    def trim(self, request: m.TrimRequest) -> m.TrimAnswer:
        """See `HostedReplica.trim`."""
        return m.TrimAnswer(self.replica(request.stream).trim(request.up_to, request.version))

    def trim_point(self, request: m.TrimPointRequest) -> m.TrimPointAnswer:
        """See `HostedReplica.trim_point`."""
        replica = self.replica(request.stream)
        found = replica.trim_point(request.up_to, request.before_time, request.now)
        return m.TrimPointAnswer(found)

    def stream_status(self, request: m.StreamRequest) -> ReplicaStatus:
        """The status of a replica that takes part. Raises what prevents that."""
        replica = self.replica(request.stream)
        replica.check()
        return replica.status()

    def schemas(self, request: m.SchemaRequest) -> m.SchemaAnswer:
        """See `ReplicaClient.schemas`."""
        replica = self._holding(request.stream, request.holds)
        found = replica.schemas([unhex(each) for each in request.hashes])
        return m.SchemaAnswer({digest.hex(): record.hex() for digest, record in found.items()})

    def relations(self, request: m.RelationsRequest) -> m.RelationsAnswer:
        """See `ReplicaClient.relations`."""
        found = self._holding(request.stream, request.holds).newest_schemas()
        return m.RelationsAnswer(tuple(record.hex() for record in found))

    def plan(self, request: m.PlanRequest) -> m.PlanAnswer:
        """See `ReplicaClient.plan`."""
        cuts = self._holding(request.stream, request.holds).plan(
            request.after_offset, request.up_to_version, request.max_bytes, request.max_versions
        )
        return m.PlanAnswer(tuple(cuts))

    def transactions(self, request: m.TransactionsRequest) -> m.TransactionsAnswer:
        """See `ReplicaClient.list_transactions_after`."""
        found = self._holding(request.stream, request.holds).transactions_after(
            request.timeline, request.lsn, request.limit
        )
        return m.TransactionsAnswer(tuple(found))

    def version_at(self, request: m.VersionAtRequest) -> m.CutAnswer:
        """See `ReplicaClient.version_at`."""
        replica = self._holding(request.stream, request.holds)
        return m.CutAnswer(replica.version_at(request.commit_time))

    def cut_before(self, request: m.CutBeforeRequest) -> m.CutAnswer:
        """See `ReplicaClient.cut_before`."""
        replica = self._holding(request.stream, request.holds)
        return m.CutAnswer(replica.cut_before(request.version))

    def describe(self) -> m.ReplicasAnswer:
        """All replicas, whatever their states."""
        with self._lock:
            replicas = [self._replicas[name] for name in sorted(self._replicas)]
        return m.ReplicasAnswer(self.log_server_id, tuple(each.description() for each in replicas))

    def commits(self, request: m.CommitsRequest) -> m.CommitsAnswer:
        """See `OperatorReplica.commits`."""
        limit = min(request.limit, commit_rows.MAX_ROWS)
        rows = self.replica(request.stream).commits(request.after_offset, limit)
        return m.CommitsAnswer(tuple(map(commit_rows.values, rows)))

    def handlers(self) -> dict[str, Handler]:
        """The actions by name."""
        replica = self.replica
        return actions.by_name(
            m.REPORT.handled_by(lambda _: self.report()),
            m.COMMIT.handled_by(self.commit),
            m.CREATE.handled_by(self.create),
            m.CUT_TAIL.handled_by(lambda r: replica(r.stream).cut_tail(r.term, r.end)),
            m.SEAL.handled_by(self.seal),
            m.JOINED.handled_by(self.joined),
            m.LEARN.handled_by(self.learn),
            m.SYNCHRONIZE.handled_by(self.synchronize),
            m.TRIM_POINT.handled_by(self.trim_point),
            m.TRIM.handled_by(self.trim),
            m.STREAM_STATUS.handled_by(self.stream_status),
            m.SCHEMA.handled_by(self.schemas),
            m.RELATIONS.handled_by(self.relations),
            m.PLAN.handled_by(self.plan),
            m.VERSION_AT.handled_by(self.version_at),
            m.CUT_BEFORE.handled_by(self.cut_before),
            m.TRANSACTIONS.handled_by(self.transactions),
            m.REPLICAS.handled_by(lambda _: self.describe()),
            m.COMMITS.handled_by(self.commits),
        )


class _ReplicaService(Service):
    """The Flight service: translates between Flight's calls and the handlers."""

    def __init__(
        self, server: ReplicaServer, listen: str, tls: TlsBytes | None, calls: Calls
    ) -> None:
        self._server = server
        super().__init__(server.handlers(), listen, tls, calls)

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.GeneratorStream:
        """Read a batch of committed entries."""
        with actions.faults():
            answer = _Answer(self.begin(context))
            answer.call.took(len(ticket.ticket))
            self.allow(context, READ, None)
            request = actions.decode_request(m.ReadRequest, ticket.ticket)
            self.allow(context, READ, [request.stream])
            answer.call.answer()
            batch, about = self._server.read(request)
            answer.call.sends(batch.nbytes)
            answer.chunk = batch, actions.encode(about)
            return flight.GeneratorStream(protocol.READ_SCHEMA, answer)

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        """Append entries, or take those of another log server, until the peer ends the call."""
        with self.call(context) as call:
            path = [part.decode(errors="replace") for part in descriptor.path or ()]
            self.allow(context, path[0] if path else APPEND, None)
            if len(path) == 2 and path[0] == SYNC:
                stream = check_stream(path[1])
                self.allow(context, SYNC, [stream])
                with call.appending(stream):
                    synchronizer.serve(stream, reader, writer, self._server.replica, call.took)
                return
            if len(path) != 3 or path[0] != APPEND or not _TERM.fullmatch(path[2]):
                raise MalformedMessageError("the path of an append must be append/<stream>/<term>")
            self.allow(context, APPEND, [path[1]])
            replica = self._server.replica(path[1])
            with call.appending(path[1]):
                _append(replica, int(path[2]), reader, writer, call, self._server.throttle)


class _Answer:
    """The answer of a DoGet. Its call ends when Flight has sent it and forgets it, or when it failed before."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.chunk: tuple[pa.RecordBatch, bytes] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[pa.RecordBatch, bytes]:
        chunk, self.chunk = self.chunk, None
        if chunk is None:
            raise StopIteration
        return chunk

    def __del__(self) -> None:
        self.call.end()


def _append(
    replica: HostedReplica,
    term: int,
    reader: flight.MetadataRecordBatchReader,
    writer: flight.FlightMetadataWriter,
    call: Call,
    throttle: Throttle,
) -> None:
    """Append the batches of a writer until it ends the call."""
    _check_term(replica, term)
    session, status = replica.open_writer(term)
    if reader.schema != protocol.APPEND_SCHEMA:
        raise MalformedMessageError("an append must have the columns kind and data")
    writer.write(actions.encode(status))
    for chunk in reader:
        began = time.monotonic()
        batch, about = chunk.data, chunk.app_metadata
        call.took(synchronizer.message_bytes(chunk))
        _check_append(batch)
        if batch.nbytes > protocol.MAX_BATCH_BYTES or about is None:
            raise MalformedMessageError(
                f"batch of {batch.nbytes} bytes exceeds the limit or has no metadata"
            )
        request = actions.decode_request(m.AppendRequest, memoryview(about))
        kinds = batch.column(0).to_pylist()
        data = batch.column(1).to_pylist()
        ack = replica.append(
            session,
            [d for k, d in zip(kinds, data, strict=True) if k == protocol.KIND_ENTRY],
            [d for k, d in zip(kinds, data, strict=True) if k == protocol.KIND_SCHEMA],
            request.confirm_to,
            request.gate_lsn,
            request.system_id,
        )
        writer.write(actions.encode(ack))
        throttle.appended(began, time.monotonic())


def _check_term(replica: HostedReplica, term: int) -> None:
    """Raise `MalformedMessageError` for a writer's term that no later one could follow.

    A seal's term has no such bound: it comes from the repository, and has to get above whatever a writer has claimed.
    """
    status = replica.status()
    if term > status.term + protocol.TERMS_AHEAD:
        raise MalformedMessageError(
            f"term {term} is too far beyond the last one, {status.term}",
            where=f"stream {status.stream}",
            repair="ask the repository for a term",
        )


def _check_versions(contexts: Iterable[CommitContext]) -> None:
    """Raise `MalformedMessageError` for a commit that no later one could follow."""
    for context in contexts:
        if max(context.version, context.end, context.global_end) > protocol.MAX_COUNT:
            raise MalformedMessageError(f"version {context.version} or its offsets are too large")


def _check_append(batch: pa.RecordBatch) -> None:
    """Raise `MalformedMessageError` for a batch that is not what it says: offsets beyond its data would end the process."""
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise MalformedMessageError(f"malformed batch in an append: {error}"[:300]) from None
    if any(column.null_count for column in batch.columns):
        raise MalformedMessageError("an append must not have null values")
    if not {*batch.column(0).to_pylist()} <= {protocol.KIND_ENTRY, protocol.KIND_SCHEMA}:
        raise MalformedMessageError("an append has a row of an unknown kind")


def _batch(entries: list[StoredEntry]) -> pa.RecordBatch:
    offsets, versions, places, data = zip(*entries, strict=True) if entries else ((),) * 4
    return pa.record_batch(
        [
            protocol.int_array(offsets, pa.uint64(), np.uint64),
            protocol.int_array(versions, pa.uint64(), np.uint64),
            protocol.int_array(places, pa.uint64(), np.uint64),
            protocol.binary_array(data),
        ],
        schema=protocol.READ_SCHEMA,
    )
