"""Sends a replica's committed entries to another log server: the I/O of `synchronization.py`, both sides.

One call, DoPut `sync/<stream>`: the source's offer, answered by what the destination lacks, then batches, each answered by
the destination's status once it is durable. Rows of a batch, in this order: schemas, entries, commits, and the source's
state record at the end; commits and state record have the form and the checksums that they have on disk.

Each call has a name of its own, which the destination keeps durably: if another one has begun, for instance because the
repository lost sight of this one, it refuses the rest of this one.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from walsender_bridge.change_log import actions, protocol
from walsender_bridge.change_log.protocol import Position, ReplicaStatus
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.replica.sync_throttle import Throttle
from walsender_bridge.change_log.replica.synchronization import (
    SyncBatch,
    SyncOffer,
    SyncRange,
    call_name,
)
from walsender_bridge.change_log.storage.records import (
    pack_row,
    pack_state,
    unpack_row,
    unpack_state,
)
from walsender_bridge.errors import MalformedMessageError, UnavailableError

#: Kinds of rows beside those of an append.
KIND_COMMIT = 2
KIND_STATE = 3
#: Seconds of a call; what was copied by then is kept.
_LONGEST = 3600.0


@dataclass(frozen=True, slots=True)
class OfferMessage:
    """A `SyncOffer`. `log_id`: the log of the stream, for a destination that has no replica of it. `durable`: hexadecimal."""

    source: str
    log_id: str
    first: Position
    durable: str


# -- the source -------------------------------------------------------------------------------------


def synchronize(
    replica: HostedReplica,
    log_server_id: str,
    connect: Callable[[], flight.FlightClient],
    where: str,
    throttle: Throttle | None,
) -> ReplicaStatus:
    """Send the destination at the address `where` what it lacks, and return its status at the end.

    `throttle`: the log server's, if appends go before. Raises the errors of both sides.
    """
    offer = replica.sync_offer(call_name(log_server_id, secrets.token_hex(4)))
    stream = offer.durable.stream
    with actions.at(where), connect() as client:
        path = flight.FlightDescriptor.for_path("sync", stream)
        options = flight.FlightCallOptions(timeout=_LONGEST)
        writer, reader = client.do_put(path, protocol.APPEND_SCHEMA, options)
        try:
            writer.write_with_metadata(_rows([]), actions.encode(_message(offer)))
            lacking = actions.decode(SyncRange, _answer(reader))
            status = None
            batches = replica.sync_batches(offer, lacking)
            for batch in batches if throttle is None else throttle.paced(batches):
                writer.write_batch(_rows(_of_batch(batch)))
                status = actions.decode(ReplicaStatus, _answer(reader))
            writer.done_writing()
        finally:
            # Only here does Flight report why a call ended.
            writer.close()
    if status is None:
        raise UnavailableError("the synchronization ended without an answer", where=where)
    return status


def _message(offer: SyncOffer) -> OfferMessage:
    durable = offer.durable
    return OfferMessage(offer.source, durable.log_id, offer.first, pack_state(durable).hex())


def _answer(reader: Any) -> bytes:
    buffer = reader.read()
    if buffer is None:
        raise flight.FlightUnavailableError("the call ended")
    body: bytes = buffer.to_pybytes()
    return body


def _of_batch(batch: SyncBatch) -> list[tuple[int, bytes]]:
    rows = [(protocol.KIND_SCHEMA, record) for record in batch.schemas]
    rows += [(protocol.KIND_ENTRY, data) for data in batch.entries]
    rows += [(KIND_COMMIT, pack_row(row)) for row in batch.rows]
    if batch.done is not None:
        rows.append((KIND_STATE, pack_state(batch.done)))
    return rows


def _rows(rows: Sequence[tuple[int, bytes]]) -> pa.RecordBatch:
    return pa.record_batch(
        [
            protocol.int_array([kind for kind, _ in rows], pa.uint8(), np.uint8),
            protocol.binary_array([bytes(data) for _, data in rows]),
        ],
        schema=protocol.APPEND_SCHEMA,
    )


# -- the destination --------------------------------------------------------------------------------


def serve(
    stream: str,
    reader: flight.MetadataRecordBatchReader,
    writer: flight.FlightMetadataWriter,
    replica_of: Callable[[str], HostedReplica],
    took: Callable[[int], None],
) -> None:
    """Take the entries of another log server. `replica_of`: the replica of a stream; a source has none made.

    `took` is given the bytes of each message that has arrived.
    """
    if reader.schema != protocol.APPEND_SCHEMA:
        raise MalformedMessageError("a synchronization must have the columns kind and data")
    chunks = _chunks(reader, took)
    about = next(chunks, (None, None))[1]
    if about is None or len(about) > actions.MAX_REQUEST_BYTES:
        raise MalformedMessageError("a synchronization must begin with an offer")
    message = actions.decode(OfferMessage, about)
    durable = unpack_state(actions.unhex(message.durable), Path(stream))
    replica = replica_of(stream)
    offer = SyncOffer(message.source, message.first, durable)
    writer.write(actions.encode(replica.sync_init(offer, message.log_id)))
    for batch, _ in chunks:
        status = replica.sync_replicate(message.source, _received(batch, stream))
        writer.write(actions.encode(status))


def _chunks(
    reader: flight.MetadataRecordBatchReader, took: Callable[[int], None]
) -> Iterator[tuple[pa.RecordBatch, bytes | None]]:
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        took(message_bytes(chunk))
        if chunk.data is None or chunk.data.nbytes > protocol.MAX_BATCH_BYTES:
            raise MalformedMessageError("a batch exceeds the limit or is missing")
        yield chunk.data, None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()


def message_bytes(chunk: flight.FlightStreamChunk) -> int:
    """The bytes of a message that has arrived in a DoPut: its batch, and what is beside it."""
    return sum(
        0 if part is None else part.nbytes if isinstance(part, pa.RecordBatch) else part.size
        for part in (chunk.data, chunk.app_metadata)
    )


def _received(batch: pa.RecordBatch, stream: str) -> SyncBatch:
    with contextlib.suppress(pa.ArrowInvalid):
        batch.validate(full=True)
        if any(column.null_count for column in batch.columns):
            raise MalformedMessageError("a synchronization must not have null values")
        by_kind: dict[int, list[bytes]] = {}
        for kind, data in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            by_kind.setdefault(kind, []).append(data)
        if by_kind.keys() <= {protocol.KIND_SCHEMA, protocol.KIND_ENTRY, KIND_COMMIT, KIND_STATE}:
            state = by_kind.get(KIND_STATE, [])
            if len(state) > 1:
                raise MalformedMessageError(
                    f"a batch of a synchronization has {len(state)} state records"
                )
            return SyncBatch(
                entries=by_kind.get(protocol.KIND_ENTRY, []),
                schemas=by_kind.get(protocol.KIND_SCHEMA, []),
                rows=[unpack_row(row, stream) for row in by_kind.get(KIND_COMMIT, [])],
                done=unpack_state(state[0], Path(stream)) if state else None,
            )
    raise MalformedMessageError("a batch of a synchronization is malformed")
