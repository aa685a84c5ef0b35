"""A run of change log entries as one buffer: where each message is, and in which transaction.

Invariant: a row belongs to the last Begin before it, and that transaction is open: Begin and Commit
alternate, rows lie between them (PostgreSQL documentation, 53.5 "Logical Streaming Replication
Protocol"). Anything else is an error, never a guess.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_consumers.decode.spans import Bools, Bytes, Int64s
from spark_consumers.decode.split import malformed, split
from spark_consumers.decode.tuple_scan import PADDING, numbers
from walsender_bridge.change_log.entry import PartitionRow
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.pgoutput import (
    BEGIN,
    COMMIT,
    DELETE,
    INSERT,
    MESSAGE,
    ORIGIN,
    POSTGRES_EPOCH,
    TRUNCATE,
    UPDATE,
)

if TYPE_CHECKING:
    from walsender_bridge.change_log.client import LogEntry

_BEGIN_SIZE, _COMMIT_SIZE = 21, 26
_PADDING = PADDING.to_bytes(4, "little") + bytes(PADDING)
#: Kind, relation, marker of the tuple, number of columns.
_SMALLEST_ROW = 8

_IS_ROW = np.zeros(256, np.bool_)
_IS_ROW[[INSERT, UPDATE, DELETE]] = True
#: Messages that belong into a transaction.
_INSIDE = _IS_ROW.copy()
_INSIDE[[TRUNCATE, ORIGIN, MESSAGE, COMMIT]] = True
_KNOWN = _INSIDE.copy()
_KNOWN[BEGIN] = True


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction that continues in the next entry. Time: microseconds since the Unix epoch."""

    commit_lsn: Lsn
    commit_time: int
    xid: int


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry that is to be decoded, and its decompressed payload.

    `after_gap`: entries were left out before it, and a transaction that was open has ended there.
    `schemas`: the schema hash of each relation, by OID. `partitions`: see there.
    """

    entry: "LogEntry"
    payload: bytes
    message_count: int
    after_gap: bool
    schemas: dict[int, bytes]
    partitions: tuple[PartitionRow, ...] = ()


@dataclass(slots=True)
class Frames:
    """Messages of some entries, one item a message, and their transactions (index `number`)."""

    memory: pa.Buffer
    buffer: Bytes
    kinds: Bytes
    starts: Int64s
    limits: Int64s
    #: Which entry of the run, and what is known of it.
    entry: Int64s
    offset: npt.NDArray[np.uint64]
    version: npt.NDArray[np.uint64]
    sequence: npt.NDArray[np.uint32]
    number: Int64s
    commit_lsn: npt.NDArray[np.uint64]
    commit_time: npt.NDArray[np.int64]
    xid: npt.NDArray[np.uint32]
    #: The transaction that is still open at the end.
    transaction: Transaction | None

    def by_relation(self) -> Iterator[tuple[int, Int64s]]:
        """Each relation's OID with its changes (message numbers, rising), Truncates among them."""
        rows = np.flatnonzero(_IS_ROW[self.kinds])
        if (self.limits[rows] - self.starts[rows] < _SMALLEST_ROW).any():
            raise malformed("a row is truncated")
        oids = numbers(self.buffer, ">u4")[self.starts[rows] + 1].astype(np.int64)
        truncates = np.flatnonzero(self.kinds == TRUNCATE)
        if len(truncates):
            named = [(oid, m) for m in truncates.tolist() for oid in self._truncated(m)]
            oids = np.concatenate([oids, np.array([n[0] for n in named], np.int64)])
            rows = np.concatenate([rows, np.array([n[1] for n in named], np.int64)])
            order = np.lexsort((rows, oids))
        else:
            order = np.argsort(oids, kind="stable")
        oids, rows = oids[order], rows[order]
        first = np.flatnonzero(np.diff(oids, prepend=-1))
        for group in np.split(rows, first[1:]) if len(first) else []:
            yield int(oids[first[0]]), group
            first = first[1:]

    def _truncated(self, message: int) -> list[int]:
        """The relations in a Truncate message, each once."""
        raw = self.buffer[self.starts[message] : self.limits[message]].tobytes()
        count = int.from_bytes(raw[1:5], "big")
        if len(raw) != 6 + 4 * count:
            raise malformed("invalid length of a Truncate message")
        return list(dict.fromkeys(struct.unpack_from(f">{count}I", raw, 6)))


def frame(run: list[Piece], transaction: Transaction | None) -> Frames:
    """Put entries end to end. `transaction` is open before the first of them.

    Raises `MalformedMessageError`.
    """
    counts = np.array([piece.message_count for piece in run], np.int64)
    after = np.cumsum(counts)
    # One message more, of zeros, is the padding.
    memory, positions = split([*(piece.payload for piece in run), _PADDING], int(after[-1]) + 1)
    sizes = np.cumsum([len(piece.payload) for piece in run])
    if (positions[after] + 4 * after != sizes).any():
        raise malformed("the messages of an entry do not fill it")
    buffer = np.frombuffer(memory, np.uint8)
    starts, limits = positions[:-2], positions[1:-1]
    lengths = limits - starts
    kinds = buffer[starts]
    if not _KNOWN[kinds].all():
        bad = int(kinds[np.argmin(_KNOWN[kinds])])
        raise malformed(f"unexpected message of kind {chr(bad)!r} in an entry")

    entry = np.repeat(np.arange(len(run)), counts)
    firsts = after - counts
    begins, commits = kinds == BEGIN, kinds == COMMIT
    if (lengths[begins] != _BEGIN_SIZE).any() or (lengths[commits] != _COMMIT_SIZE).any():
        raise malformed("invalid length of a Begin or Commit message")
    number = np.cumsum(begins)
    resets = [int(at) for at, piece in zip(firsts, run, strict=True) if piece.after_gap]
    goes_on = _follow(kinds, begins, commits, resets, transaction is not None)

    heads = starts[begins]
    carried = transaction or Transaction(0, 0, 0)
    commit_lsn = _table(carried.commit_lsn, numbers(buffer, ">u8")[heads + 1], np.uint64)
    moments = numbers(buffer, ">i8")[heads + 9].astype(np.int64)
    if (np.abs(moments) > 2**62).any():
        raise malformed("a commit time is out of range")
    commit_time = _table(carried.commit_time, moments + POSTGRES_EPOCH, np.int64)
    xid = _table(carried.xid, numbers(buffer, ">u4")[heads + 17], np.uint32)
    ended = numbers(buffer, ">u8")[starts[commits] + 2].astype(np.uint64)
    if (ended != commit_lsn[number[commits]]).any():
        raise malformed("a Commit message belongs to another transaction than its Begin")

    return Frames(
        memory=memory,
        buffer=buffer,
        kinds=kinds,
        starts=starts,
        limits=limits,
        entry=entry,
        offset=np.array([piece.entry.offset for piece in run], np.uint64)[entry],
        version=np.array([piece.entry.version for piece in run], np.uint64)[entry],
        sequence=(np.arange(len(kinds)) - firsts[entry]).astype(np.uint32),
        number=number,
        commit_lsn=commit_lsn,
        commit_time=commit_time,
        xid=xid,
        transaction=(
            Transaction(int(commit_lsn[-1]), int(commit_time[-1]), int(xid[-1]))
            if goes_on
            else None
        ),
    )


def _follow(kinds: Bytes, begins: Bools, commits: Bools, resets: list[int], is_open: bool) -> bool:
    """Whether a transaction is open after these messages, all of which must be where they belong.

    At each message number in `resets` no transaction is open, whatever was before.
    """
    steps = begins.astype(np.int64) - commits
    after = np.cumsum(steps) + is_open
    before = after - steps
    for at in resets:
        if at < len(before) and before[at]:
            before[at:] -= before[at]
    if before[begins].any() or (before[_INSIDE[kinds]] != 1).any():
        raise malformed("a message outside of a transaction, or a Begin inside of one")
    return bool(before[-1] + steps[-1]) if len(steps) else is_open


def _table(carried: int, found: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """A transaction's value by its number: 0 is the one that was open before."""
    return np.concatenate([np.array([carried], dtype), found.astype(dtype)])
