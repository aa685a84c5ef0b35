"""The wire protocol between clients, replicas and the repository of the change log.

The body of every action and every ticket is JSON with the protocol version `v`; entries are sent as Arrow
record batches. Errors are sent with their cause, and raised again at the other side as the same
class (`fault`, `raised`). Each side validates its input: sizes here, semantics in the cores.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import google_crc32c
import numpy as np
import pyarrow as pa
from pyarrow import flight

from walsender_bridge.errors import (
    ConfigError,
    MalformedMessageError,
    NotSupportedError,
    TusklineError,
    UnavailableError,
    from_wire,
)
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition

VERSION = 1
#: Bytes of an action's body, which contains names, numbers and hashes only.
MAX_ACTION_BYTES = 4 << 20
#: Bytes of one batch: an entry of the greatest length, or many small ones.
MAX_BATCH_BYTES = (1 << 30) + (64 << 20)
#: Bytes of entries that are sent together to a reader, unless a single one is longer.
READ_BATCH_BYTES = 4 << 20
#: The greatest number of commits in a plan.
MAX_PLAN = 10_000

#: Kinds of rows in an append's batch: an entry, or a schema record for the registry.
KIND_ENTRY = 0
KIND_SCHEMA = 1
APPEND_SCHEMA = pa.schema(
    [
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("data", pa.large_binary(), nullable=False),
    ]
)
READ_SCHEMA = pa.schema(
    [
        pa.field("offset", pa.uint64(), nullable=False),
        pa.field("version", pa.uint64(), nullable=False),
        pa.field("global_offset", pa.uint64(), nullable=False),
        pa.field("data", pa.large_binary(), nullable=False),
    ]
)

#: Reconnect to a restarted service within half a second, not after gRPC's default of two minutes.
CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_BATCH_BYTES),
    ("grpc.max_send_message_length", MAX_BATCH_BYTES),
]

_STREAM = re.compile(r"[a-z][a-z0-9_]{0,39}")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CommitContext:
    """A commit as the repository issues it: `length` entries from `local_offset` get global offsets.

    A commit with `length` 0 is empty: it only advances the version.
    """

    version: int
    local_offset: int
    global_offset: int
    length: int

    @property
    def end(self) -> int:
        """The next local offset."""
        return self.local_offset + self.length

    @property
    def global_end(self) -> int:
        """The next global offset of this stream's part."""
        return self.global_offset + self.length


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a stream just behind an entry that ends a transaction.

    `end_offset`: the next local offset. `end_lsn` and `commit_time` (microseconds): of that
    transaction. `latest_time`: the greatest commit time up to there. `timeline`: of that entry.
    `bytes_total`: of all entries up to there since the first. `crc`: of that entry, for the chain.
    `history_start`: the local offset where the present history begins, behind the newest RESTART entry.
    """

    end_offset: int = 1
    end_lsn: Lsn = 0
    commit_time: int = 0
    latest_time: int = 0
    timeline: int = 0
    bytes_total: int = 0
    crc: int = 0
    history_start: int = 1


#: Where every stream starts.
START = Position()


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's report to the repository: Varlog's three fields, and the replica's position.

    `version`: the highest one that it holds durably. `local_offset`, `length`: entries that are written
    and may be committed, but are not committed yet. `position`: behind the last of them.
    """

    replica: str
    stream: str
    log_id: str
    term: int
    version: int
    local_offset: int
    length: int
    position: Position
    low_offset: int


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """The status of a replica of one stream, for its writer and its readers.

    Offsets are local. `low_offset`: the first one retained. `end_offset`: the next to be written.
    `committed_end`: the next to be committed. `last_end_lsn`, `last_crc`, `last_timeline`: at the end of
    what is written, committed or not; `last_commit_time` (microseconds): of its last transaction.
    `confirmed_to`: the position up to which the slot may have been confirmed. `bytes_total`: of all
    committed entries since the first. `system_id`: of the cluster that the transactions are from; None
    if no writer has sent it yet.
    """

    stream: str
    log_id: str
    state: str
    term: int
    low_offset: int
    end_offset: int
    committed_end: int
    version: int
    last_end_lsn: Lsn
    last_crc: int
    last_timeline: int
    last_commit_time: int
    committed_end_lsn: Lsn
    confirmed_to: WalPosition | None
    bytes_total: int
    system_id: int | None


@dataclass(frozen=True, slots=True)
class Ack:
    """The acknowledgement of an append: the durable and the committed position. Ends are exclusive local offsets."""

    durable_end_offset: int
    durable_last_end_lsn: Lsn
    committed_end_offset: int
    committed_end_lsn: Lsn
    confirmed_to: WalPosition | None


@dataclass(frozen=True, slots=True)
class StreamCut:
    """Where a version cuts one stream: everything below `end_offset` (local, exclusive) is in it.

    `address`: the replica to read from. `last_end_lsn`, `last_commit_time` (microseconds), `timeline`:
    of the last transaction below the cut. `low_offset`: the first one retained. `history_start`: the first
    since the source was last reattached (1: never); nothing read below it continues above it.
    """

    stream: str
    address: str
    end_offset: int
    global_end: int
    last_end_lsn: Lsn
    last_commit_time: int
    timeline: int
    low_offset: int
    bytes_total: int
    history_start: int = 1


@dataclass(frozen=True, slots=True)
class LogStatus:
    """The newest version of which every entry can be read, and its cut.

    `forced_version`: the newest version that a barrier forced (0: none yet). `faults`: why streams are blocked, by
    stream.
    """

    log_id: str
    version: int
    forced_version: int
    streams: dict[str, StreamCut]
    faults: dict[str, TusklineError] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CutPoint:
    """The end of one commit: a cut that splits no transaction. `end_offset` is exclusive."""

    version: int
    end_offset: int
    bytes_total: int
    last_end_lsn: Lsn
    last_commit_time: int


# `pyarrow.array` imports pandas the first time, a second of every process that has it: these do not.


def int_array(values: Sequence[int], kind: pa.DataType, size: type[np.unsignedinteger[Any]]) -> Any:
    """An Arrow array of numbers."""
    data = np.array(values, size)
    return pa.Array.from_buffers(kind, len(data), [None, pa.py_buffer(data)])


def binary_array(values: Sequence[bytes]) -> Any:
    """An Arrow array of large binaries."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    data = values[0] if len(values) == 1 else b"".join(values)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def places_crc(stream: str, batch: pa.RecordBatch) -> bytes:
    """The CRC32C of the offsets and versions in a batch of entries, which the entries' own checksums do not cover."""
    crc = google_crc32c.value(stream.encode())
    for column in batch.columns[:3]:
        places = np.frombuffer(column.buffers()[1], np.uint64, len(column), column.offset * 8)
        crc = google_crc32c.extend(crc, places.tobytes())
    return int(crc).to_bytes(4, "little")


def address_of(listen: str) -> str:
    """Return `grpc://host:port` for `host:port`; an address is returned unchanged."""
    return listen if "://" in listen else f"grpc://{listen}"


def check_stream(stream: str) -> str:
    """Return the name if it is a valid stream name. Raises `ConfigError`."""
    if not _STREAM.fullmatch(stream):
        raise ConfigError(
            f"invalid stream name {stream[:60]!r}",
            repair="use a lower-case letter followed by up to 39 lower-case letters, digits and underscores",
        )
    return stream


def encode(**fields: Any) -> bytes:
    """Encode a JSON body with the protocol version."""
    return json.dumps({"v": VERSION, **fields}, separators=(",", ":")).encode()


def decode(body: bytes | memoryview) -> dict[str, Any]:
    """Decode a body. Raises `MalformedMessageError` or `NotSupportedError`."""
    if len(body) > MAX_ACTION_BYTES:
        raise MalformedMessageError(f"request of {len(body)} bytes exceeds the limit")
    try:
        record = json.loads(bytes(body))
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise MalformedMessageError("request is not a JSON object")
    if record.get("v") != VERSION:
        raise NotSupportedError(
            f"unsupported version {record.get('v')} of the change log's protocol (this is version {VERSION})",
            repair="run the same version of Tuskline on all machines",
        )
    return record


def load(kind: type[_T], record: Mapping[str, Any]) -> _T:
    """Build a record of this module from JSON. Raises `MalformedMessageError`.

    Types are checked here, so that no core needs to.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # a dataclass, by contract
        if field.name in {"faults", "history_start"} and field.name not in record:
            # Missing in messages of older versions.
            continue
        try:
            value = record[field.name]
        except (KeyError, TypeError):
            raise MalformedMessageError(f"{kind.__name__} lacks {field.name!r}") from None
        if field.type is Position:
            value = load(Position, value)
        elif field.type is int or field.type is str:
            if type(value) is not field.type:
                raise MalformedMessageError(f"{kind.__name__}.{field.name} is {value!r:.60}")
        elif field.name == "confirmed_to" and value is not None:
            value = WalPosition(int(value[0]), int(value[1]))
        elif field.name == "system_id" and value is not None:
            value = int(value)
        elif field.name == "streams":
            value = {name: load(StreamCut, cut) for name, cut in value.items()}
        elif field.name == "faults":
            value = {name: from_wire(fault) for name, fault in value.items()}
        values[field.name] = value
    return kind(**values)


def number(record: Mapping[str, Any], name: str) -> int:
    """Return a non-negative number from a request. Raises `MalformedMessageError`."""
    value = record.get(name)
    if type(value) is not int or value < 0:
        raise MalformedMessageError(f"{name} is {value!r:.60}, not a number")
    return value


def text(record: Mapping[str, Any], name: str) -> str:
    """Return a string from a request. Raises `MalformedMessageError`."""
    value = record.get(name)
    if not isinstance(value, str):
        raise MalformedMessageError(f"{name} is {value!r:.60}, not a string")
    return value


# -- errors -----------------------------------------------------------------------------------------


def fault(error: Exception) -> flight.FlightServerError:
    """Convert an error into the form that a Flight server raises."""
    if not isinstance(error, TusklineError):
        error = TusklineError(f"{type(error).__name__}: {error}")
    return flight.FlightServerError(error.what, json.dumps(error.to_wire()).encode())


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """For servers: send errors raised in the block over the wire with their cause."""
    try:
        yield
    except flight.FlightError:
        raise
    except Exception as error:
        raise fault(error) from error


def raised(error: Exception, where: str) -> TusklineError:
    """Convert a Flight error at the client; `where` is the service's address."""
    extra = getattr(error, "extra_info", b"")
    if extra:
        try:
            return from_wire(json.loads(extra))
        except ValueError:
            pass
    if isinstance(error, flight.FlightTimedOutError):
        return UnavailableError(
            "service did not answer in time", where=where, repair="check whether it hangs"
        )
    if isinstance(error, flight.FlightUnavailableError | flight.FlightCancelledError):
        return UnavailableError(
            "service does not answer", where=where, repair="check that it runs there"
        )
    return UnavailableError(f"the connection broke: {error}"[:500], where=where, repair="try again")


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    """For clients: convert Flight's errors raised in the block."""
    try:
        yield
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        raise raised(error, where) from error


def call(
    client: flight.FlightClient, where: str, action: str, timeout: float, /, **fields: Any
) -> dict[str, Any]:
    """Perform an action and return its answer. `timeout` in seconds. Raises the error that the service raised."""
    with at(where):
        options = flight.FlightCallOptions(timeout=timeout)
        results = list(client.do_action(flight.Action(action, encode(**fields)), options))
    answer: dict[str, Any] = json.loads(results[0].body.to_pybytes()) if results else {}
    return answer


def answer(
    handlers: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]], action: flight.Action
) -> list[bytes]:
    """For servers: dispatch an action to its handler and return the answer."""
    with faults():
        handler = handlers.get(action.type)
        if handler is None:
            raise NotSupportedError(f"unknown action {action.type!r:.60}")
        return [encode(**handler(decode(memoryview(action.body))))]
