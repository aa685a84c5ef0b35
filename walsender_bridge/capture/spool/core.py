"""The core of the spool: what is kept of large transactions that the server streams while they are in progress.

From version 14 on a walsender sends a transaction that outgrows `logical_decoding_work_mem` in blocks,
before its outcome is known. Its messages are kept in a file of their own, outside the log, and
are moved into the log at Stream Commit, in one piece. This module decides the contents of the files; `files.py` does the I/O.

A file is (u32 length + message) repeated, each message in the form of protocol 1, with Relation and Type messages
where the server sent them: read from its start, it is the transaction in the form of one that was not streamed.

Invariants.
- *A file holds exactly the changes that may still commit, in order.* Subtransactions nest, and the server
  sends changes in the order of the WAL. So from the first change of a subtransaction to its abort there
  are only changes of itself and of those inside it, and an abort cuts the file at that first change.
- *The recorded starts are sufficient.* A child's xid is later than its parent's. When a change of xid X
  arrives, X is open, so each later xid seen so far began inside X and has ended; it can be rolled back only
  with X, whose abort the server sends as well. Its start becomes X's, if X had none. So starts ascend with
  the xids, 12 bytes each (the server itself keeps about a hundred for each of these subtransactions).
- *Bounded.* In memory: one piece of `PIECE_BYTES` of one block. On disk: `limit` bytes in all files.
"""

import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from walsender_bridge.capture.events import SpoolAppend, SpoolCut
from walsender_bridge.change_log.entry import schema_record
from walsender_bridge.errors import CorruptError, MalformedMessageError, SpoolError
from walsender_bridge.postgres.protocol import pgoutput
from walsender_bridge.postgres.protocol.replication import (
    XLOG_DATA,
    XLOG_HEADER_SIZE,
    parse_keepalive,
)

#: Bytes after which the part of a block received so far is written to its file.
PIECE_BYTES: Final = 1 << 18
#: Default of the source's spool_limit: bytes of all files together.
LIMIT_BYTES: Final = 64 << 30

_LENGTH: Final = struct.Struct("<I")
_XID_AT: Final = XLOG_HEADER_SIZE + 1
_XID_END: Final = _XID_AT + 4
_XIDS: Final = 1 << 32
#: Kinds that have an xid behind the first byte inside of a block, and how they begin in the file.
_ROWS: Final = {
    kind: bytes([kind])
    for kind in (pgoutput.INSERT, pgoutput.UPDATE, pgoutput.DELETE, pgoutput.TRUNCATE)
}
_OTHERS: Final = frozenset((pgoutput.RELATION, pgoutput.TYPE, pgoutput.MESSAGE))


@dataclass(slots=True)
class Spooled:
    """A transaction in progress of which `length` bytes of changes are spooled."""

    xid: int
    length: int = 0
    #: Subtransactions, as how many xids after `xid`, and where their changes begin; both rise.
    ages: "array[int]" = field(default_factory=lambda: array("I"))
    starts: "array[int]" = field(default_factory=lambda: array("Q"))
    #: Schemas that the server does not send again once this commits: by OID, (when it was sent, schema record).
    relations: dict[int, tuple[int, bytes]] = field(default_factory=dict)

    def enter(self, xid: int, at: int) -> None:
        """Note that a change of the (sub)transaction `xid` starts at `at`."""
        age = (xid - self.xid) % _XIDS
        place = bisect_left(self.ages, age)
        if place < len(self.ages):
            at = self.starts[place]
            del self.ages[place:], self.starts[place:]
        if age:
            self.ages.append(age)
            self.starts.append(at)

    def leave(self, xid: int) -> int:
        """Roll back the subtransaction `xid`; return the number of bytes that remain."""
        age = (xid - self.xid) % _XIDS
        place = bisect_left(self.ages, age)
        # If it is unknown, no change of it was sent, or its parent's abort follows.
        if place < len(self.ages) and self.ages[place] == age:
            self.length = self.starts[place]
            del self.ages[place:], self.starts[place:]
        return self.length


class Streams:
    """The transactions in progress of one session. The caller collects `effects`.

    `limit` is in bytes. Every method raises `MalformedMessageError` on a protocol violation.
    """

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self.effects: list[SpoolAppend | SpoolCut] = []
        #: Bytes spooled for all transactions together.
        self.spooled_bytes = 0
        self._limit = limit
        self._found: dict[int, Spooled] = {}
        self._block: Spooled | None = None
        self._xid = b""
        self._types: dict[int, bytes] = {}
        # Counts Relation messages, in blocks and outside, to order any two of them.
        self._clock = 0
        self._newest: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._found)

    @property
    def inside(self) -> bool:
        """Whether a block has started and not ended."""
        return self._block is not None

    def start(self, message: bytes) -> None:
        """Process a Stream Start; `take` the payloads that follow."""
        start = pgoutput.parse_stream_start(message)
        if start.first == (start.xid in self._found):
            raise _fault(f"first block of transaction {start.xid} is missing or duplicated")
        self._block = self._found.setdefault(start.xid, Spooled(start.xid))
        self._xid = b""

    def take(self, payloads: Iterator[bytes]) -> bool:
        """Process CopyData payloads up to the end of the block, or all; True if the server requested a reply.

        Raises `SpoolError` past the limit.
        """
        block = self._block
        assert block is not None
        reply = False
        xid, length = self._xid, block.length
        piece: list[bytes] = []
        written = length
        for data in payloads:
            if not data or data[0] != XLOG_DATA:
                reply |= parse_keepalive(data).reply_requested
                continue
            kind = data[XLOG_HEADER_SIZE] if len(data) > XLOG_HEADER_SIZE else 0
            head = _ROWS.get(kind)
            if head is not None:
                if len(data) <= _XID_END:
                    raise _fault("truncated change in a block")
                if data[_XID_AT:_XID_END] != xid:
                    xid = data[_XID_AT:_XID_END]
                    block.enter(int.from_bytes(xid, "big"), length)
                rest = data[_XID_END:]
            elif kind == pgoutput.STREAM_STOP:
                self._block = None
                break
            elif kind == pgoutput.ORIGIN:
                head, rest = b"O", data[_XID_AT:]
            elif kind in _OTHERS and len(data) > _XID_END:
                if data[_XID_AT:_XID_END] != xid:
                    xid = data[_XID_AT:_XID_END]
                    block.enter(int.from_bytes(xid, "big"), length)
                head, rest = data[XLOG_HEADER_SIZE:_XID_AT], data[_XID_END:]
                self._other(block, head + rest)
            else:
                raise _fault(f"unexpected message of kind {chr(kind)!r} in a block")
            size = len(rest) + 1
            piece += (_LENGTH.pack(size), head, rest)
            length += size + _LENGTH.size
            if length - written >= PIECE_BYTES:
                self._write(block, piece, length)
                written = length
        self._write(block, piece, length)
        self._xid = xid
        return reply

    def abort(self, message: bytes) -> None:
        """Process a Stream Abort of a transaction or subtransaction."""
        abort = pgoutput.parse_stream_abort(message)
        found = self._get(abort.xid)
        if abort.xid == abort.subxid:
            self._forget(found)
            return
        before, kept = found.length, found.leave(abort.subxid)
        # The server sends the schemas again that it needs from here on.
        found.relations.clear()
        if kept < before:
            self.spooled_bytes -= before - kept
            self.effects.append(SpoolCut(found.xid, kept))

    def commit(self, message: bytes) -> tuple[pgoutput.Commit, Spooled]:
        """Process a Stream Commit; return it with the spooled transaction, for which `done` is to be called later."""
        found = pgoutput.parse_stream_commit(message)
        return found.commit, self._get(found.xid)

    def done(self, spooled: Spooled) -> list[tuple[int, bytes]]:
        """Forget a transaction that has ended; return the schemas (OID, record) that apply from here on."""
        self._forget(spooled)
        found = []
        for oid, (sent, record) in spooled.relations.items():
            if sent > self._newest.get(oid, 0):
                self._newest[oid] = sent
                found.append((oid, record))
        return found

    def described(self, oid: int) -> None:
        """Note a Relation message outside of blocks, which is the newest of all."""
        self._clock += 1
        self._newest[oid] = self._clock

    def _other(self, block: Spooled, message: bytes) -> None:
        if message[0] == pgoutput.TYPE:
            self._types[pgoutput.relation_oid(message)] = message
        elif message[0] == pgoutput.RELATION:
            relation = pgoutput.parse_relation(message)
            used = {column.type_oid for column in relation.columns} & self._types.keys()
            self._clock += 1
            record = schema_record(message, [self._types[oid] for oid in used])
            block.relations[relation.oid] = (self._clock, record)
        elif not pgoutput.parse_message(message).transactional:
            raise _fault("non-transactional message in a block")

    def _write(self, block: Spooled, piece: list[bytes], length: int) -> None:
        self.spooled_bytes += length - block.length
        block.length = length
        if self.spooled_bytes > self._limit:
            raise SpoolError(
                f"transactions in progress need {self.spooled_bytes} bytes of spool, but spool_limit is {self._limit}",
                where=f"spool, transaction {block.xid}",
                repair="increase the source's spool_limit, or set it to 0 to have the server keep large "
                "transactions on its own disk until they commit",
            )
        if piece:
            self.effects.append(SpoolAppend(block.xid, b"".join(piece)))
            piece.clear()

    def _get(self, xid: int) -> Spooled:
        found = self._found.get(xid)
        if found is None:
            raise _fault(f"end of unknown transaction {xid}")
        return found

    def _forget(self, spooled: Spooled) -> None:
        del self._found[spooled.xid]
        if spooled.length:
            self.spooled_bytes -= spooled.length
            self.effects.append(SpoolCut(spooled.xid, 0))


def split(data: bytes, size: int) -> tuple[list[bytes], int]:
    """Split a part of a file, which starts at a message, into complete messages; also return their length in bytes.

    At least one if `data` contains it completely. `size`, that of the file, is the longest possible message.
    Raises `CorruptError`.
    """
    messages = []
    at, end = 0, len(data)
    unpack = _LENGTH.unpack_from
    while at + 4 <= end:
        (length,) = unpack(data, at)
        if not 0 < length <= size:
            raise CorruptError(
                f"message of {length} bytes in a file of {size} bytes",
                where="spool",
                repair="the file changed after it was written: check the disk and the memory",
            )
        if at + 4 + length > end:
            break
        messages.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return messages, at


def _fault(what: str) -> MalformedMessageError:
    return MalformedMessageError(what, where="walsender")
