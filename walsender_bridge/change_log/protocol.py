"""What clients, log servers and the repository of the change log exchange: records, and batches of entries.

Entries are sent as Arrow record batches; everything else is sent by actions (`actions.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from walsender_bridge.errors import TusklineError
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition

#: Bytes of one batch: an entry of the greatest length, or many small ones.
MAX_BATCH_BYTES = (1 << 30) + (64 << 20)
#: Bytes of entries that are sent together to a reader, unless a single one is longer.
READ_BATCH_BYTES = 4 << 20
#: The greatest number of commits in a plan.
MAX_PLAN = 10_000

#: Terms, versions and offsets are counted up. What is that far beyond the last one was made up: it would fence every later one,
#: or leave no room for it. A writer may claim the next term of a replica that was never sealed; a replica may show what several
#: such writers have left.
TERMS_AHEAD = 1 << 32
TERMS_SHOWN_AHEAD = 1 << 48
VERSIONS_AHEAD = 1 << 40
ENTRIES_AHEAD = 1 << 40
#: No count gets there.
MAX_COUNT = 1 << 62
#: Versions, and global offsets, that are skipped when a lost repository is rebuilt (`repository/rebuild.py`). Nothing else
#: skips so many, but `raise_version` for a lake that has seen such a version.
REBUILD_GAP = 1_000_000_000


def is_from_before_a_rebuild(known: int, version: int) -> bool:
    """Whether a replica that knows `known` was away when the repository was rebuilt, if `version` is of a present one.

    It may know versions that the rebuild did not, so it need not lack the whole gap.
    """
    return version - known >= REBUILD_GAP // 2


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

#: Of connections to other machines, which all have TLS: a service whose machine vanishes says no goodbye. What was sent to it has
#: to be taken, by its kernel, within `keepalive_timeout_ms` (it becomes TCP_USER_TIMEOUT), or the connection ends. A call that only
#: waits is asked after at `keepalive_time_ms`; a service ends the connection of a client that asks more often than every five
#: minutes. In a service's process the kernel asks more often, and has more patience (`ConnectionWatch`). Within a machine, a
#: connection outlasts a service that is stopped for longer.
REMOTE_CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 320_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


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
class IssuedCommit:
    """A commit as a replica is sent it. `crc`: of the entry at its end, unless it is empty.

    An offset alone does not say which entries are meant: a log server that was put back to an older state has, at the same
    offsets, those that a seal has removed since. The checksum stands for that entry and all before it. None: whoever sends it does
    not know it.
    """

    context: CommitContext
    crc: int | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a stream just behind an entry that ends a transaction.

    `end_offset`: the next local offset. `end_lsn` and `commit_time` (microseconds): of that
    transaction. `latest_time`: the greatest commit time up to there. `timeline`: of that entry.
    `bytes_total`: of all entries up to there since the first. `crc`: of that entry, for the chain.
    `history_start`: the local offset where the present history begins, behind the newest RESTART entry.
    """

    end_offset: int
    end_lsn: Lsn
    commit_time: int
    latest_time: int
    timeline: int
    bytes_total: int
    crc: int
    history_start: int = 1


#: Where every stream starts.
START = Position(1, 0, 0, 0, 0, 0, 0)


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
    if no writer has sent it yet. `replaced_by`: see `Durable`; empty: nothing was lost here.
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
    replaced_by: str = ""


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

    `addresses`: of the replicas to read from, in the order to try; each has everything below the cut. `last_end_lsn`,
    `last_commit_time` (microseconds), `timeline`: of the last transaction below the cut. `low_offset`: the first offset that all
    replicas retain, also after trims that are on their way. `history_start`: the first since the source was last reattached
    (1: never); nothing read below it continues above it.
    """

    stream: str
    addresses: tuple[str, ...]
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
    faults: dict[str, TusklineError] = field(default_factory=dict)


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


def places_crc(stream: str, batch: pa.RecordBatch, next_offset: int) -> int:
    """The CRC32C of the offsets and versions in a batch of entries, which the entries' own checksums do not cover.

    `next_offset`: where the batch behind it begins.
    """
    crc = google_crc32c.value(stream.encode() + next_offset.to_bytes(8, "little"))
    # An empty column may come without a buffer.
    for column in batch.columns[:3] if len(batch) else ():
        places = np.frombuffer(column.buffers()[1], np.uint64, len(column), column.offset * 8)
        crc = google_crc32c.extend(crc, places.tobytes())
    return int(crc)


def follows(from_offset: int, to_offset: int, next_offset: int) -> bool:
    """Whether a batch of [from, to) may end at `next_offset`: behind its beginning, unless nothing was asked for."""
    return from_offset < next_offset <= to_offset or next_offset == from_offset >= to_offset


def are_within(offsets: Sequence[int], asked: range, *, complete: bool) -> bool:
    """Whether the offsets of a batch ascend within those asked for; `complete`: and are all of them."""
    if complete:
        return offsets == [*asked]
    return all(each in asked for each in offsets) and all(a < b for a, b in pairwise(offsets))
