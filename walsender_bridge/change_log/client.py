"""The client of the change log: of its repository (`LogClient`) and of a replica (`ReplicaClient`).

Safe on a Spark executor: it needs pyarrow, numpy, zstandard and google-crc32c only, and every object is
used by the process that created it. All methods raise the errors of `walsender_bridge.errors`, whichever
side they come from: `UnavailableError` when a service does not answer (it may be restarting: try
again), `TrimmedError`, `FencedError`, `UnknownStreamError`, `InvalidReplicaError` and so on. Timeouts
are in seconds, times in microseconds since the Unix epoch; offsets are local, and ends exclusive.
"""

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import flight

from walsender_bridge.change_log import actions, protocol
from walsender_bridge.change_log import log_server_messages as of_log_server
from walsender_bridge.change_log import repository_messages as of_repository
from walsender_bridge.change_log.actions import Action, Empty, unhex
from walsender_bridge.change_log.connection import Connection, connect
from walsender_bridge.change_log.entry import (
    EntryHeader,
    EntryKind,
    check,
    read_header,
    read_payload,
    schema_hash,
    split_messages,
    split_schema_record,
    verify,
)
from walsender_bridge.change_log.protocol import (
    Ack,
    CutPoint,
    LogStatus,
    ReplicaStatus,
    StreamCut,
)
from walsender_bridge.errors import CorruptError, TusklineError, UnavailableError
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, Lsn, WalPosition
from walsender_bridge.runtime.closing import Closing
from walsender_bridge.runtime.tls_files import TlsFiles

__all__ = [
    "Ack",
    "AppendWriter",
    "CutPoint",
    "EntryHeader",
    "EntryKind",
    "LogClient",
    "LogEntry",
    "LogStatus",
    "ReplicaClient",
    "ReplicaStatus",
    "StreamCut",
    "TlsFiles",
    "check",
    "read_header",
    "read_payload",
    "split_messages",
    "split_schema_record",
    "verify",
]

#: Seconds allowed for a barrier's answer beyond the barrier's own timeout.
_GRACE = 5.0
#: Seconds allowed for closing an append.
_CLOSING = 0.8

_R = TypeVar("_R")
_A = TypeVar("_A")


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A committed entry: its offsets, the version that committed it, and its bytes."""

    offset: int
    version: int
    global_offset: int
    data: bytes | memoryview


class _Client(Closing):
    """A connection to one service; `address` like `grpc://127.0.0.1:7400`.

    A service with TLS asks for a certificate: `tls`, or the paths of its files in the address,
    `grpc+tls://db-1:7400?ca=FILE&certificate=FILE&key=FILE`. `address` of the client is without them.
    """

    def __init__(self, address: str, *, timeout: float = 10.0, tls: TlsFiles | None = None) -> None:
        self.timeout = timeout
        self._connection = Connection(address, tls)
        self.address = self._connection.address

    def _call(self, action: Action[_R, _A], request: _R, *, within: float | None = None) -> _A:
        within = self.timeout if within is None else within
        return actions.call(self._connection.client, self.address, action, request, within)

    def _reachable(self, cut: StreamCut) -> StreamCut:
        """The cut, whose replica is reached with the certificate of this client."""
        return replace(cut, address=self._connection.with_files(cut.address))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class LogClient(_Client):
    """The metadata repository: versions, streams, barriers, consumers."""

    def status(self) -> LogStatus:
        """The newest version that can be read completely, and where it cuts each stream."""
        found = self._call(of_repository.STATUS, Empty())
        return LogStatus(
            log_id=found.log_id,
            version=found.version,
            forced_version=found.forced_version,
            streams={name: self._reachable(cut) for name, cut in found.streams.items()},
            faults={name: fault.error() for name, fault in found.faults.items()},
        )

    def create_stream(self, stream: str) -> StreamCut:
        """Create the stream unless it exists. Raises `ConfigError` for an invalid name."""
        request = of_repository.CreateStreamRequest(stream)
        return self._reachable(self._call(of_repository.CREATE_STREAM, request))

    def writer_term(self, stream: str) -> int:
        """Obtain a term for a new writer of the stream, greater than any issued before."""
        request = of_repository.WriterTermRequest(stream)
        return self._call(of_repository.WRITER_TERM, request).term

    def barrier(self, positions: Mapping[str, Lsn], timeout: float) -> int:
        """Wait until each stream is committed up to its position (an end LSN), then force a version.

        Returns that version once it can be read. Concurrent barriers share one version. Raises
        `DeadlineError` after `timeout`.
        """
        request = of_repository.BarrierRequest(dict(positions), timeout)
        return self._call(of_repository.BARRIER, request, within=timeout + _GRACE).version

    def register_consumer(self, name: str, version: int | None, lease_seconds: float) -> None:
        """Prevent trimming above the version that this consumer has published, until the lease ends.

        `version`: the last one published; None: none yet, so everything is retained. A further call
        before the lease ends renews it.
        """
        request = of_repository.RegisterConsumerRequest(name, version, lease_seconds)
        self._call(of_repository.REGISTER_CONSUMER, request)

    def drop_consumer(self, name: str) -> None:
        """End the consumer's lease now."""
        self._call(of_repository.DROP_CONSUMER, of_repository.DropConsumerRequest(name))

    def raise_version(self, version: int) -> None:
        """Skip the versions up to this one, so that every later commit gets a greater one."""
        self._call(of_repository.RAISE_VERSION, of_repository.RaiseVersionRequest(version))


class ReplicaClient(_Client):
    """A log server's replicas: append, read, plan."""

    def stream_status(self, stream: str) -> ReplicaStatus:
        """The status of this log server's replica of the stream."""
        return self._call(of_log_server.STREAM_STATUS, of_log_server.StreamRequest(stream))

    def cut_tail(self, stream: str, term: int, end: int) -> None:
        """Remove the uncommitted entries, at or above the local offset `end`, where the last commit ends.

        To be called by the writer of this term after it has ensured that no commit is in transit; the writer must then be
        opened again.
        """
        self._call(of_log_server.CUT_TAIL, of_log_server.CutTailRequest(stream, term, end))

    def open_writer(self, stream: str, term: int) -> "AppendWriter":
        """Become the stream's writer: older terms are fenced, an unfinished transaction is cut off.

        Raises `FencedError` if there is a newer writer.
        """
        return AppendWriter(self.address, stream, term, self.timeout, self._connection.tls)

    def read(
        self,
        stream: str,
        from_offset: int,
        to_offset: int,
        relations: Sequence[str] | None = None,
    ) -> Iterator[LogEntry]:
        """The committed entries [from, to), in order. Raises `TrimmedError` below the low watermark.

        With `relations` ("schema.table") the log server omits entries that contain none of them, unless
        a transaction begins in the entry and does not end there; offsets then have gaps. The offsets and versions are
        checked here, the entries' bytes by the decoder (`check`, `verify`). Raises `CorruptError`.
        """
        names = None if relations is None else tuple(relations)
        ticket = actions.encode(of_log_server.ReadRequest(stream, from_offset, to_offset, names))
        with actions.at(self.address):
            reader = self._connection.client.do_get(flight.Ticket(ticket))
        try:
            while True:
                with actions.at(self.address):
                    try:
                        chunk = reader.read_chunk()
                    except StopIteration:
                        return
                    chunk.data.validate(full=True)
                batch, crc = chunk.data, chunk.app_metadata
                if crc is None or bytes(crc) != protocol.places_crc(stream, batch):
                    raise CorruptError(
                        "checksum mismatch (CRC32C) in the offsets and versions received",
                        where=f"stream {stream}, {self.address}",
                        repair="check the network and the memory of both machines",
                    )
                yield from _entries(batch)
        finally:
            # A reader that is abandoned halfway must not keep the log server's call open.
            reader.cancel()

    def schemas(self, stream: str, hashes: Iterable[bytes]) -> dict[bytes, bytes]:
        """Schema records by their hashes. Raises `UnknownStreamError` or `CorruptError`."""
        wanted = list(hashes)
        request = of_log_server.SchemaRequest(stream, tuple(digest.hex() for digest in wanted))
        schemas = self._call(of_log_server.SCHEMA, request).schemas
        found = {digest: unhex(schemas.get(digest.hex(), "")) for digest in wanted}
        for digest, record in found.items():
            if schema_hash(record) != digest:
                raise CorruptError(
                    f"hash mismatch in schema {digest.hex()} received",
                    where=f"stream {stream}, {self.address}",
                )
        return found

    def relations(self, stream: str) -> list[bytes]:
        """The newest schema record of each relation that the stream has ever had, ordered by name."""
        answer = self._call(of_log_server.RELATIONS, of_log_server.StreamRequest(stream))
        return [unhex(record) for record in answer.schemas]

    def plan(
        self,
        stream: str,
        after_offset: int,
        up_to_version: int,
        max_bytes: int | None = None,
        max_versions: int | None = None,
    ) -> list[CutPoint]:
        """The commits that end beyond `after_offset`, up to a version, in order.

        `max_bytes` counts from `after_offset`; at least one commit is returned, whatever its size, and at
        most `protocol.MAX_PLAN`. Raises `TrimmedError`.
        """
        request = of_log_server.PlanRequest(
            stream, after_offset, up_to_version, max_bytes, max_versions
        )
        return [*self._call(of_log_server.PLAN, request).cuts]

    def version_at(self, stream: str, commit_time_us: int) -> CutPoint | None:
        """The first commit whose last transaction was committed at that time or later."""
        request = of_log_server.VersionAtRequest(stream, commit_time_us)
        return self._call(of_log_server.VERSION_AT, request).cut

    def cut_before(self, stream: str, version: int) -> CutPoint | None:
        """The last commit below `version` that has not been trimmed."""
        request = of_log_server.CutBeforeRequest(stream, version)
        return self._call(of_log_server.CUT_BEFORE, request).cut

    def list_transactions_after(
        self, stream: str, timeline: int, lsn: Lsn, limit: int = 100
    ) -> list[tuple[Lsn, int, int]]:
        """(end LSN, xid, commit time) of transactions beyond `lsn` on this timeline or a later one.

        Includes those not committed in the log; oldest first.
        """
        request = of_log_server.TransactionsRequest(stream, timeline, lsn, limit)
        return [*self._call(of_log_server.TRANSACTIONS, request).transactions]


def _entries(batch: pa.RecordBatch) -> Iterator[LogEntry]:
    offsets, versions, globals_, data = batch.columns
    for offset, version, place, value in zip(
        offsets.to_pylist(), versions.to_pylist(), globals_.to_pylist(), data, strict=True
    ):
        # A view of the batch's memory: reading an entry does not copy it.
        yield LogEntry(offset, version, place, memoryview(value.as_buffer()))


class AppendWriter(Closing):
    """The writer of a stream. `send` and `next_ack` may be called from different threads.

    `status` is that of the replica when the writer was opened: appends continue from there. Two threads of the writer
    communicate with the log server, so that no call here waits for a log server that hangs; the caller bounds the
    appends in flight. Any error ends the writer, and every later call raises it.
    """

    def __init__(
        self, address: str, stream: str, term: int, timeout: float, tls: TlsFiles | None = None
    ) -> None:
        self.address = address
        self._tls = tls
        self.stream = stream
        self.term = term
        self._error: TusklineError | None = None
        self._batches: queue.SimpleQueue[tuple[pa.RecordBatch, bytes] | None] = queue.SimpleQueue()
        self._opened: queue.SimpleQueue[ReplicaStatus | TusklineError] = queue.SimpleQueue()
        self._acks: queue.SimpleQueue[Ack | TusklineError] = queue.SimpleQueue()
        self._sender = threading.Thread(
            target=self._send_all, name=f"appends to {stream}", daemon=True
        )
        self._sender.start()
        try:
            first = self._opened.get(timeout=timeout)
        except queue.Empty:
            first = UnavailableError(
                "the log server did not open the append in time", where=address
            )
        if isinstance(first, TusklineError):
            self.close()
            raise first
        self.status = first

    def send(
        self,
        entries: Sequence[bytes],
        *,
        schemas: Sequence[bytes] = (),
        confirm_to: WalPosition | None = None,
        gate_lsn: Lsn = MAX_LSN,
        system_id: int | None = None,
    ) -> None:
        """Append the entries, in one durable step with their schemas; each call is acknowledged once.

        `confirm_to`: the position to record before the slot is confirmed. `gate_lsn`: transactions that end
        above it must not be committed yet. `system_id`: of the cluster, recorded permanently. Without
        entries, this is a heartbeat. Does not wait for the log server.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        kinds = [protocol.KIND_SCHEMA] * len(schemas) + [protocol.KIND_ENTRY] * len(entries)
        batch = pa.record_batch(
            [
                protocol.int_array(kinds, pa.uint8(), np.uint8),
                protocol.binary_array([*schemas, *entries]),
            ],
            schema=protocol.APPEND_SCHEMA,
        )
        request = of_log_server.AppendRequest(confirm_to, gate_lsn, system_id)
        self._batches.put((batch, actions.encode(request)))

    def next_ack(self, timeout: float | None = None) -> Ack | None:
        """Return the next acknowledgement, in the order of `send`; None if none arrives within `timeout`."""
        try:
            ack = self._acks.get(timeout=timeout) if timeout != 0 else self._acks.get_nowait()
        except queue.Empty:
            return None
        if isinstance(ack, TusklineError):
            self._acks.put(ack)
            raise ack.with_traceback(None)
        return ack

    def close(self) -> None:
        """End the append, and any `next_ack` in progress.

        Acknowledged appends are durable; others may or may not be. Waits at most a second
        for a log server that hangs.
        """
        self._batches.put(None)
        self._sender.join(_CLOSING)
        self._fail(UnavailableError("the writer is closed", where=self.address))

    def _fail(self, error: TusklineError) -> None:
        """End the writer. The first error is the one that later calls raise."""
        self._error = self._error or error
        self._opened.put(self._error)
        self._acks.put(self._error)

    def _send_all(self) -> None:
        """Send the queued batches. If the call ends, `_listen` receives the reason from the log server."""
        path = flight.FlightDescriptor.for_path("append", self.stream, str(self.term))
        try:
            with actions.at(self.address), connect(self.address, self._tls) as client:
                writer, reader = client.do_put(path, protocol.APPEND_SCHEMA)
                listener = threading.Thread(
                    target=self._listen, args=(writer, reader), name="acks", daemon=True
                )
                listener.start()
                with contextlib.suppress(flight.FlightError, pa.ArrowException, OSError):
                    while (handed := self._batches.get()) is not None:
                        writer.write_with_metadata(*handed)
                    writer.done_writing()
                listener.join()
        except TusklineError as error:
            self._fail(error)

    def _listen(self, writer: Any, reader: Any) -> None:
        """Deliver acknowledgements until the log server ends the call, then fail with its reason."""
        try:
            with actions.at(self.address):
                buffer = reader.read()
                if buffer is not None:
                    self._opened.put(actions.decode(ReplicaStatus, buffer.to_pybytes()))
                while buffer is not None and (buffer := reader.read()) is not None:
                    self._acks.put(actions.decode(Ack, buffer.to_pybytes()))
                # Only here does Flight report why a call ended.
                writer.close()
            self._fail(UnavailableError("the append has ended", where=self.address))
        except TusklineError as error:
            self._fail(error)
        finally:
            # Wake the sender, which waits for more batches.
            self._batches.put(None)
