"""What crosses the wire between clients, replicas and the repository of the change log.

Every action's body and every ticket is JSON with the protocol's version `v`; entries travel as Arrow
record batches. Errors travel with their cause, and are raised again at the other side as the same
class (`fault`, `raised`). Each side checks what it gets: sizes here, meaning in the cores.
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

VERSION = 1
#: An action's body is names, numbers and hashes.
MAX_ACTION_BYTES = 4 << 20
#: One batch: an entry of the greatest length, or many small ones.
MAX_BATCH_BYTES = (1 << 30) + (64 << 20)
#: Entries that are sent together to a reader, unless a single one is longer.
READ_BATCH_BYTES = 4 << 20
#: A plan lists no more commits than this at once.
MAX_PLAN = 10_000

#: What a batch of an append holds: an entry, or a schema record for the registry.
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

#: A service that was restarted is met again within half a second, not after gRPC's two minutes.
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

    `length` 0 is an empty commit: it only tells the version.
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
    """Where a stream stands just behind an entry that ends a transaction.

    `end_offset`: the next local offset. `end_lsn` and `commit_time` (microseconds): of that
    transaction. `latest_time`: the greatest commit time up to there. `timeline`: of that entry.
    `bytes_total`: of all entries up to there since the first. `crc`: of that entry, for the chain.
    `history_start`: the local offset where the present history begins, behind the newest RESTART entry.
    """

    end_offset: int = 1
    end_lsn: int = 0
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
    """What a replica tells the repository: the seed's three fields, and where it stands.

    `version`: the highest that it holds durably. `local_offset`, `length`: entries that are written
    and may be committed, but are not. `position`: behind the last of them.
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
    """A replica of one stream, as its writer and its readers see it.

    Offsets are local. `low_offset`: the first that is kept. `end_offset`: the next to be written.
    `committed_end`: the next to be committed. `last_end_lsn`, `last_crc`, `last_timeline`: at the end of
    what is written, committed or not; `last_commit_time` (microseconds): of its last transaction.
    `confirmed_to`: (timeline, LSN) up to which the slot may have been confirmed. `bytes_total`: of all
    committed entries since the first. `system_id`: of the cluster that the transactions are from; None:
    no writer has told it yet.
    """

    stream: str
    log_id: str
    state: str
    term: int
    low_offset: int
    end_offset: int
    committed_end: int
    version: int
    last_end_lsn: int
    last_crc: int
    last_timeline: int
    last_commit_time: int
    committed_end_lsn: int
    confirmed_to: tuple[int, int] | None
    bytes_total: int
    system_id: int | None


@dataclass(frozen=True, slots=True)
class Ack:
    """What is durable and what is committed, after an append. Ends are exclusive local offsets."""

    durable_end_offset: int
    durable_last_end_lsn: int
    committed_end_offset: int
    committed_end_lsn: int
    confirmed_to: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class StreamCut:
    """Where a version cuts one stream: everything below `end_offset` (local, exclusive) is in it.

    `address`: the replica to read from. `last_end_lsn`, `last_commit_time` (microseconds), `timeline`:
    of the last transaction below the cut. `low_offset`: the first that is still kept. `history_start`: the first
    since the source was reattached last (1: it never was); nothing that was read below it goes on above it.
    """

    stream: str
    address: str
    end_offset: int
    global_end: int
    last_end_lsn: int
    last_commit_time: int
    timeline: int
    low_offset: int
    bytes_total: int
    history_start: int = 1


@dataclass(frozen=True, slots=True)
class LogStatus:
    """The newest version of which every entry can be read, and its cut.

    `forced_version`: the newest version that a barrier forced (0: none yet). `faults`: why streams stand still, by
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
    last_end_lsn: int
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
    """The CRC32C of what a batch of entries says of their places, which their own checksums do not cover."""
    crc = google_crc32c.value(stream.encode())
    for column in batch.columns[:3]:
        places = np.frombuffer(column.buffers()[1], np.uint64, len(column), column.offset * 8)
        crc = google_crc32c.extend(crc, places.tobytes())
    return int(crc).to_bytes(4, "little")


def address_of(listen: str) -> str:
    """`grpc://host:port` of `host:port`; an address stays as it is."""
    return listen if "://" in listen else f"grpc://{listen}"


def check_stream(stream: str) -> str:
    """The name, if it may be one. Raises `ConfigError`."""
    if not _STREAM.fullmatch(stream):
        raise ConfigError(
            f"{stream[:60]!r} is no name for a stream",
            repair="use a lower-case letter, then up to 39 letters, digits and underscores",
        )
    return stream


def encode(**fields: Any) -> bytes:
    """A JSON body with the protocol's version."""
    return json.dumps({"v": VERSION, **fields}, separators=(",", ":")).encode()


def decode(body: bytes | memoryview) -> dict[str, Any]:
    """A body that `encode` made. Raises `MalformedMessageError` or `NotSupportedError`."""
    if len(body) > MAX_ACTION_BYTES:
        raise MalformedMessageError(f"{len(body)} bytes are more than a request may have")
    try:
        record = json.loads(bytes(body))
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise MalformedMessageError("a request of the change log is a JSON object")
    if record.get("v") != VERSION:
        raise NotSupportedError(
            f"version {record.get('v')} of the change log's protocol (this is {VERSION})",
            repair="use the same version of Tuskline everywhere",
        )
    return record


def load(kind: type[_T], record: Mapping[str, Any]) -> _T:
    """A record of this module from its JSON form. Raises `MalformedMessageError`.

    Numbers must be numbers and texts texts, so that no core has to think of it.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # a dataclass, by contract
        if field.name in {"faults", "history_start"} and field.name not in record:
            # Of an older version, which knows none.
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
            value = (int(value[0]), int(value[1]))
        elif field.name == "system_id" and value is not None:
            value = int(value)
        elif field.name == "streams":
            value = {name: load(StreamCut, cut) for name, cut in value.items()}
        elif field.name == "faults":
            value = {name: from_wire(fault) for name, fault in value.items()}
        values[field.name] = value
    return kind(**values)


def number(record: Mapping[str, Any], name: str) -> int:
    """A number of a request that is not negative. Raises `MalformedMessageError`."""
    value = record.get(name)
    if type(value) is not int or value < 0:
        raise MalformedMessageError(f"{name} is {value!r:.60}, not a number")
    return value


def text(record: Mapping[str, Any], name: str) -> str:
    """A text of a request. Raises `MalformedMessageError`."""
    value = record.get(name)
    if not isinstance(value, str):
        raise MalformedMessageError(f"{name} is {value!r:.60}, not a text")
    return value


# -- errors -----------------------------------------------------------------------------------------


def fault(error: Exception) -> flight.FlightServerError:
    """The error as a Flight server raises it."""
    if not isinstance(error, TusklineError):
        error = TusklineError(f"{type(error).__name__}: {error}")
    return flight.FlightServerError(error.what, json.dumps(error.to_wire()).encode())


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """In a server: whatever is raised here crosses the wire as what it is."""
    try:
        yield
    except flight.FlightError:
        raise
    except Exception as error:
        raise fault(error) from error


def raised(error: Exception, where: str) -> TusklineError:
    """What a Flight error stands for at the client; `where` is the service's address."""
    extra = getattr(error, "extra_info", b"")
    if extra:
        try:
            return from_wire(json.loads(extra))
        except ValueError:
            pass
    if isinstance(error, flight.FlightTimedOutError):
        return UnavailableError("no answer in time", where=where, repair="see whether it hangs")
    if isinstance(error, flight.FlightUnavailableError | flight.FlightCancelledError):
        return UnavailableError("does not answer", where=where, repair="see that it runs there")
    return UnavailableError(f"the connection broke: {error}"[:500], where=where, repair="try again")


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    """In a client: Flight's errors become ours."""
    try:
        yield
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        raise raised(error, where) from error


def call(
    client: flight.FlightClient, where: str, action: str, timeout: float, /, **fields: Any
) -> dict[str, Any]:
    """One action and its answer. `timeout` in seconds. Raises what the service raised."""
    with at(where):
        options = flight.FlightCallOptions(timeout=timeout)
        results = list(client.do_action(flight.Action(action, encode(**fields)), options))
    answer: dict[str, Any] = json.loads(results[0].body.to_pybytes()) if results else {}
    return answer


def answer(
    handlers: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]], action: flight.Action
) -> list[bytes]:
    """In a server: the answer of the handler of this action's name."""
    with faults():
        handler = handlers.get(action.type)
        if handler is None:
            raise NotSupportedError(f"no action {action.type!r:.60} in the change log's protocol")
        return [encode(**handler(decode(memoryview(action.body))))]
