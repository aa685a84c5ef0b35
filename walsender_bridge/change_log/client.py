"""The client of the change log: of its repository (`LogClient`) and of one log server (`ReplicaClient`).

Readers use `StreamReader` (`stream_reader.py`), which reads a stream from any of its replicas.

Safe on a Spark executor: it needs pyarrow, numpy, zstandard and google-crc32c only, and every object is
used by the process that created it. All methods raise the errors of `walsender_bridge.errors`, whichever
side they come from: `UnavailableError` when a service does not answer (it may be restarting: try
again), `TrimmedError`, `FencedError`, `UnknownStreamError`, `InvalidReplicaError` and so on. Timeouts
are in seconds, times in microseconds since the Unix epoch; offsets are local, and ends exclusive.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import pyarrow as pa
from pyarrow import flight

from walsender_bridge.change_log import actions, protocol
from walsender_bridge.change_log import log_server_messages as of_log_server
from walsender_bridge.change_log import repository_messages as of_repository
from walsender_bridge.change_log.actions import Action, Empty, unhex
from walsender_bridge.change_log.connection import Connection
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
from walsender_bridge.change_log.repository_messages import WriterTermAnswer
from walsender_bridge.change_log.stream_writer import StreamWriter
from walsender_bridge.errors import (
    CorruptError,
    NotLeaderError,
    SilentError,
    UnavailableError,
    UnreachableError,
    UntrustedServiceError,
)
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.runtime import tls_files
from walsender_bridge.runtime.certificate_holder import Role
from walsender_bridge.runtime.closing import Closing
from walsender_bridge.runtime.tls_files import TlsFiles

__all__ = [
    "Ack",
    "CutPoint",
    "EntryHeader",
    "EntryKind",
    "LogClient",
    "LogEntry",
    "LogStatus",
    "ReplicaClient",
    "ReplicaStatus",
    "StreamCut",
    "StreamWriter",
    "TlsFiles",
    "check",
    "read_header",
    "read_payload",
    "split_messages",
    "split_schema_record",
    "verify",
]

#: Seconds allowed for sealing a stream, of which a log server may hang.
_SEALING = 30.0
#: Seconds allowed for a barrier's answer beyond the barrier's own timeout.
_GRACE = 5.0
#: Seconds allowed for a batch of entries: as long as the longest entry (1 GiB) needs over a slow network.
READ_SECONDS = 300.0

_R = TypeVar("_R")
_A = TypeVar("_A")


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A committed entry: its offsets, the version that committed it, and its bytes."""

    offset: int
    version: int
    global_offset: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class EntryBatch:
    """Committed entries from one log server, where the batch behind them begins, and the log's id."""

    entries: list[LogEntry]
    next_offset: int
    log_id: str


class _Client(Closing):
    """A connection to one service; `address` like `grpc://127.0.0.1:7400`.

    A service with TLS asks for a certificate: `tls`, or the paths of its files in the address,
    `grpc+tls://db-1:7400?ca=FILE&certificate=FILE&key=FILE`. `address` of the client is without them.
    """

    #: Of the service.
    _role: Role

    def __init__(self, address: str, *, timeout: float = 10.0, tls: TlsFiles | None = None) -> None:
        self.timeout = timeout
        self._connection = Connection(address, tls, role=self._role, within=timeout)
        self.address = self._connection.address

    def _call(self, action: Action[_R, _A], request: _R, *, within: float | None = None) -> _A:
        within = self.timeout if within is None else within
        with self._connection.use(action.streams(request)) as service:
            return actions.call(service.client, self.address, action, request, within)

    def _reachable(self, cut: StreamCut) -> StreamCut:
        """The cut, whose replicas are reached with the certificate of this client."""
        return replace(cut, addresses=tuple(map(self._connection.with_files, cut.addresses)))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class LogClient(_Client):
    """The metadata repository: versions, streams, barriers, consumers.

    `address` may name several repositories, `grpc://db-1:7400,db-2:7400`, one of which leads: each call goes to the one that
    answered last, and on to the others while it cannot be reached or does not lead. All calls may be repeated.
    """

    _role = Role.REPOSITORY

    def __init__(self, address: str, *, timeout: float = 10.0, tls: TlsFiles | None = None) -> None:
        first, *others = tls_files.each(address)
        super().__init__(first, timeout=timeout, tls=tls)
        share = timeout / (1 + len(others))
        self._connections = tuple(
            Connection(each, tls, role=self._role, within=share) for each in (first, *others)
        )
        #: Which of them answered last.
        self._leader = 0

    def _call(self, action: Action[_R, _A], request: _R, *, within: float | None = None) -> _A:
        count = len(self._connections)
        # One that hangs is not to take the time of all.
        share = self.timeout / count
        if within is None:
            return self._call_any(action, request, share)
        if count > 1:
            # An answer that may take long is waited for at one that answers.
            self._call_any(of_repository.STATUS, Empty(), share)
        return self._call_any(action, request, within)

    def _call_any(self, action: Action[_R, _A], request: _R, within: float) -> _A:
        """The answer of the repository that leads; `within` for each of them."""
        count, first = len(self._connections), self._leader
        refusal: UnavailableError | None = None
        for number in range(first, first + count):
            connection = self._connections[number % count]
            try:
                with connection.use(action.streams(request)) as service:
                    answer = actions.call(
                        service.client, connection.address, action, request, within
                    )
            except (NotLeaderError, UnreachableError, SilentError) as error:
                if refusal is None or _says(error) >= _says(refusal):
                    refusal = error
                self._leader = (number + 1) % count
                if within > self.timeout and isinstance(error, SilentError):
                    break
            else:
                self._leader = number % count
                return answer
        assert refusal is not None
        raise refusal

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()

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

    def open_writer(self, stream: str, failed: set[str] | None = None) -> StreamWriter:
        """Become the stream's writer, on all its replicas: older terms are fenced, an unfinished transaction is cut off.

        `failed`: addresses at which the previous writer failed, which the repository may leave out; the set is cleared,
        and those at which this writer fails are added. Raises `FencedError` if there is a newer writer.
        """
        failed = set() if failed is None else failed
        found = self.writer_term(stream, sorted(failed))
        failed.clear()
        tls = self._connection.tls
        return StreamWriter(stream, found.term, found.addresses, failed, self.timeout, tls=tls)

    def writer_term(self, stream: str, failed: Sequence[str] = ()) -> WriterTermAnswer:
        """Obtain a term for a new writer of the stream, greater than any issued before, and where to write."""
        request = of_repository.WriterTermRequest(stream, tuple(failed))
        return self._call(of_repository.WRITER_TERM, request, within=_SEALING)

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
        before the lease ends renews it. Entries below the `low_offset` that a stream's cut shows after the first call are not
        covered: they may have been trimmed.
        """
        request = of_repository.RegisterConsumerRequest(name, version, lease_seconds)
        self._call(of_repository.REGISTER_CONSUMER, request)

    def drop_consumer(self, name: str) -> None:
        """End the consumer's lease now."""
        self._call(of_repository.DROP_CONSUMER, of_repository.DropConsumerRequest(name))

    def raise_version(self, version: int) -> None:
        """Skip the versions up to this one, so that every later commit gets a greater one."""
        self._call(of_repository.RAISE_VERSION, of_repository.RaiseVersionRequest(version))


def _says(error: UnavailableError) -> int:
    """How much an error says of why no repository answers: a certificate to replace, who leads, or that one is not there."""
    if isinstance(error, UntrustedServiceError):
        return 2
    return int(isinstance(error, NotLeaderError))


class ReplicaClient(_Client):
    """One log server's replicas: read, plan.

    `holds`: the offset up to which a replica has to be committed to answer. Raises `BehindError`.
    """

    _role = Role.LOG_SERVER

    def stream_status(self, stream: str) -> ReplicaStatus:
        """The status of this log server's replica of the stream."""
        return self._call(of_log_server.STREAM_STATUS, of_log_server.StreamRequest(stream))

    def cut_tail(self, stream: str, term: int, end: int) -> None:
        """Remove the uncommitted entries, at or above the local offset `end`, where the last commit ends.

        To be called by the writer of this term after it has ensured that no commit is in transit; the writer must then be
        opened again.
        """
        self._call(of_log_server.CUT_TAIL, of_log_server.CutTailRequest(stream, term, end))

    def read(
        self,
        stream: str,
        from_offset: int,
        to_offset: int,
        relations: Sequence[str] | None = None,
    ) -> Iterator[LogEntry]:
        """The committed entries [from, to), in order. Raises `TrimmedError` below the low watermark.

        With `relations` ("schema.table", or an OID as text) the log server omits entries that contain none of them, unless
        a transaction begins in the entry and does not end there; offsets then have gaps. The offsets and versions are
        checked here, the entries' bytes by the decoder (`check`, `verify`). Raises `CorruptError`.
        """
        return in_batches(
            lambda offset: self.read_batch(stream, offset, to_offset, relations),
            from_offset,
            to_offset,
        )

    def read_batch(
        self,
        stream: str,
        from_offset: int,
        to_offset: int,
        relations: Sequence[str] | None = None,
        *,
        within: float = READ_SECONDS,
    ) -> EntryBatch:
        """The first batch of what `read` returns: at least one entry, unless `relations` omits all.

        A batch is a call of its own, so `within` limits the wait for the log server, and not the time that the caller takes
        between two batches; nor does a caller that stalls keep a call open.
        """
        names = None if relations is None else tuple(relations)
        request = of_log_server.ReadRequest(stream, from_offset, to_offset, names)
        ticket = flight.Ticket(actions.encode(request))
        with self._connection.use([stream]) as service:
            reader = service.client.do_get(ticket, flight.FlightCallOptions(timeout=within))
            try:
                chunk = reader.read_chunk()
                chunk.data.validate(full=True)
            except StopIteration:
                raise UnavailableError(
                    "the log server sent no entries", where=self.address, repair="try again"
                ) from None
            finally:
                reader.cancel()
        metadata = b"" if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
        answer = actions.decode(of_log_server.ReadAnswer, metadata)
        self._check_places(request, chunk.data, answer)
        return EntryBatch([*_entries(chunk.data)], answer.next_offset, answer.log_id)

    def _check_places(
        self,
        request: of_log_server.ReadRequest,
        batch: pa.RecordBatch,
        answer: of_log_server.ReadAnswer,
    ) -> None:
        """Raise `CorruptError` unless these are entries that were asked for, and all of them."""
        if answer.places_crc != protocol.places_crc(request.stream, batch, answer.next_offset):
            what = "checksum mismatch (CRC32C) in the offsets and versions received"
        elif not protocol.follows(request.from_offset, request.to_offset, answer.next_offset):
            what = f"the entries from offset {request.from_offset} on end at {answer.next_offset}"
        elif not protocol.are_within(
            batch.column(0).to_pylist(),
            range(request.from_offset, answer.next_offset),
            complete=request.relations is None,
        ):
            what = f"the entries from offset {request.from_offset} on are not those requested"
        else:
            return
        raise CorruptError(
            what,
            where=f"stream {request.stream}, {self.address}",
            repair="check the network and the memory of both machines",
        )

    def schemas(
        self, stream: str, hashes: Iterable[bytes], *, holds: int = 0
    ) -> dict[bytes, bytes]:
        """Schema records by their hashes. Raises `UnknownStreamError` or `CorruptError`."""
        wanted = list(hashes)
        names = tuple(digest.hex() for digest in wanted)
        request = of_log_server.SchemaRequest(stream, names, holds)
        schemas = self._call(of_log_server.SCHEMA, request).schemas
        found = {digest: unhex(schemas.get(digest.hex(), "")) for digest in wanted}
        for digest, record in found.items():
            if schema_hash(record) != digest:
                raise CorruptError(
                    f"hash mismatch in schema {digest.hex()} received",
                    where=f"stream {stream}, {self.address}",
                )
        return found

    def relations(self, stream: str, *, holds: int = 0) -> list[bytes]:
        """The newest schema record of each relation that the stream has ever had, ordered by name."""
        request = of_log_server.RelationsRequest(stream, holds)
        answer = self._call(of_log_server.RELATIONS, request)
        return [unhex(record) for record in answer.schemas]

    def plan(
        self,
        stream: str,
        after_offset: int,
        up_to_version: int,
        max_bytes: int | None = None,
        max_versions: int | None = None,
        *,
        holds: int = 0,
    ) -> list[CutPoint]:
        """The commits that end beyond `after_offset`, up to a version, in order.

        `max_bytes` counts from `after_offset`; at least one commit is returned, whatever its size, and at
        most `protocol.MAX_PLAN`. Raises `TrimmedError`.
        """
        request = of_log_server.PlanRequest(
            stream, after_offset, up_to_version, max_bytes, max_versions, holds
        )
        return [*self._call(of_log_server.PLAN, request).cuts]

    def version_at(self, stream: str, commit_time_us: int, *, holds: int = 0) -> CutPoint | None:
        """The first commit whose last transaction was committed at that time or later."""
        request = of_log_server.VersionAtRequest(stream, commit_time_us, holds)
        return self._call(of_log_server.VERSION_AT, request).cut

    def cut_before(self, stream: str, version: int, *, holds: int = 0) -> CutPoint | None:
        """The last commit below `version` that has not been trimmed."""
        request = of_log_server.CutBeforeRequest(stream, version, holds)
        return self._call(of_log_server.CUT_BEFORE, request).cut

    def list_transactions_after(
        self, stream: str, timeline: int, lsn: Lsn, limit: int = 100, *, holds: int = 0
    ) -> list[tuple[Lsn, int, int]]:
        """(end LSN, xid, commit time) of transactions beyond `lsn` on this timeline or a later one.

        Includes those not committed in the log; oldest first.
        """
        request = of_log_server.TransactionsRequest(stream, timeline, lsn, limit, holds)
        return [*self._call(of_log_server.TRANSACTIONS, request).transactions]


def in_batches(
    batch_at: Callable[[int], EntryBatch], from_offset: int, to_offset: int
) -> Iterator[LogEntry]:
    """The entries [from, to), of which `batch_at` reads the batch that begins at an offset."""
    while True:
        batch = batch_at(from_offset)
        yield from batch.entries
        from_offset = batch.next_offset
        if from_offset >= to_offset:
            return


def _entries(batch: pa.RecordBatch) -> Iterator[LogEntry]:
    offsets, versions, globals_, data = batch.columns
    for offset, version, place, value in zip(
        offsets.to_pylist(), versions.to_pylist(), globals_.to_pylist(), data, strict=True
    ):
        # A view of the batch's memory: reading an entry does not copy it.
        yield LogEntry(offset, version, place, memoryview(value.as_buffer()))
