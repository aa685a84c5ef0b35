"""Large transactions that the server sends while they are in progress: what is kept, until when.

From version 14 on a walsender sends a transaction that outgrows `logical_decoding_work_mem` in blocks,
before anybody knows whether it commits. Its messages are kept in a file of its own, outside the log, and
go into the log at Stream Commit, in one piece. Here is decided what the files hold; `files` has them.

A file is (u32 length + message) repeated, each message in the form of protocol 1, Relation and Type among
them where the server sent them: read back from its start, it is the transaction as an ordinary one.

Invariants.
- *A file holds exactly the changes that may yet commit, in order.* Subtransactions nest, and the server
  sends changes in the order of the WAL. So from the first change of a subtransaction to its abort there
  are only changes of itself and of those inside it, and an abort cuts the file at that first change.
- *The starts that are kept are enough.* A child's xid is later than its parent's. When a change of xid X
  comes, X is open, so each later xid that was seen began inside of X and has ended; it can be undone only
  with X, whose abort the server sends as well. Its start becomes X's, if X had none. So starts rise with
  the xids, 12 bytes each (the server itself holds some hundred for each of these subtransactions).
- *Bounded.* In memory: one piece of `PIECE_BYTES` of one block. On disk: `limit` bytes over all files.
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

#: Bytes after which a block is written to its file, before it ends.
PIECE_BYTES: Final = 1 << 18
#: Bytes of all files together, unless the source says otherwise.
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
    """A transaction in progress: `length` bytes of its changes are kept."""

    xid: int
    length: int = 0
    #: Subtransactions, as how many xids after `xid`, and where their changes begin; both rise.
    ages: "array[int]" = field(default_factory=lambda: array("I"))
    starts: "array[int]" = field(default_factory=lambda: array("Q"))
    #: What the server takes for known once this commits: by OID, (when it was sent, schema record).
    relations: dict[int, tuple[int, bytes]] = field(default_factory=dict)

    def enter(self, xid: int, at: int) -> None:
        """A change of the (sub)transaction `xid` comes at `at`."""
        age = (xid - self.xid) % _XIDS
        place = bisect_left(self.ages, age)
        if place < len(self.ages):
            at = self.starts[place]
            del self.ages[place:], self.starts[place:]
        if age:
            self.ages.append(age)
            self.starts.append(at)

    def leave(self, xid: int) -> int:
        """The subtransaction `xid` is undone; how many bytes stay."""
        age = (xid - self.xid) % _XIDS
        place = bisect_left(self.ages, age)
        # One that is not there had no change that was sent, or its parent's abort follows.
        if place < len(self.ages) and self.ages[place] == age:
            self.length = self.starts[place]
            del self.ages[place:], self.starts[place:]
        return self.length


class Streams:
    """The transactions in progress of one session. `effects` is for the caller to take.

    `limit` is in bytes. Every method raises `MalformedMessageError` for what is not the protocol.
    """

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self.effects: list[SpoolAppend | SpoolCut] = []
        #: Bytes that all transactions together keep.
        self.spooled_bytes = 0
        self._limit = limit
        self._found: dict[int, Spooled] = {}
        self._block: Spooled | None = None
        self._xid = b""
        self._types: dict[int, bytes] = {}
        # Relation messages are counted, in blocks and outside, to tell which of two came later.
        self._clock = 0
        self._newest: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._found)

    @property
    def inside(self) -> bool:
        """Whether a block has begun and not ended."""
        return self._block is not None

    def start(self, message: bytes) -> None:
        """A Stream Start: `take` what follows."""
        start = pgoutput.parse_stream_start(message)
        if start.first == (start.xid in self._found):
            raise _fault(f"the first block of transaction {start.xid} is missing, or comes twice")
        self._block = self._found.setdefault(start.xid, Spooled(start.xid))
        self._xid = b""

    def take(self, payloads: Iterator[bytes]) -> bool:
        """Take CopyData payloads up to the block's end, or all; True if the server asked for a report.

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
                    raise _fault("a change in a block is cut short")
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
                raise _fault(f"a message of kind {chr(kind)!r} in a block of a transaction")
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
        """A Stream Abort: of a whole transaction, or of a part of one."""
        abort = pgoutput.parse_stream_abort(message)
        found = self._get(abort.xid)
        if abort.xid == abort.subxid:
            self._forget(found)
            return
        before, kept = found.length, found.leave(abort.subxid)
        # The server describes again what it needs from here on.
        found.relations.clear()
        if kept < before:
            self.spooled_bytes -= before - kept
            self.effects.append(SpoolCut(found.xid, kept))

    def commit(self, message: bytes) -> tuple[pgoutput.Commit, Spooled]:
        """A Stream Commit: what it says, and what was kept; then comes `done`."""
        found = pgoutput.parse_stream_commit(message)
        return found.commit, self._get(found.xid)

    def done(self, spooled: Spooled) -> list[tuple[int, bytes]]:
        """The transaction is over: forget it; gives the schemas (OID, record) that hold from here on."""
        self._forget(spooled)
        found = []
        for oid, (sent, record) in spooled.relations.items():
            if sent > self._newest.get(oid, 0):
                self._newest[oid] = sent
                found.append((oid, record))
        return found

    def described(self, oid: int) -> None:
        """A Relation message came outside of blocks: it is the newest of all."""
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
            raise _fault("a message of no transaction in a block")

    def _write(self, block: Spooled, piece: list[bytes], length: int) -> None:
        self.spooled_bytes += length - block.length
        block.length = length
        if self.spooled_bytes > self._limit:
            raise SpoolError(
                f"transactions in progress are {self.spooled_bytes} bytes, {self._limit} are allowed",
                where=f"spool, transaction {block.xid}",
                repair="raise the source's spool_limit, or set it to 0: then the server keeps large "
                "transactions on its own disk until they commit",
            )
        if piece:
            self.effects.append(SpoolAppend(block.xid, b"".join(piece)))
            piece.clear()

    def _get(self, xid: int) -> Spooled:
        found = self._found.get(xid)
        if found is None:
            raise _fault(f"transaction {xid} ends, of which nothing was sent")
        return found

    def _forget(self, spooled: Spooled) -> None:
        del self._found[spooled.xid]
        if spooled.length:
            self.spooled_bytes -= spooled.length
            self.effects.append(SpoolCut(spooled.xid, 0))


def split(data: bytes, size: int) -> tuple[list[bytes], int]:
    """The whole messages in a part of a file that starts with one, and how many bytes they take.

    At least one if `data` holds it whole. `size` is the longest that there may be: that of the file.
    Raises `CorruptError`.
    """
    messages = []
    at, end = 0, len(data)
    unpack = _LENGTH.unpack_from
    while at + 4 <= end:
        (length,) = unpack(data, at)
        if not 0 < length <= size:
            raise CorruptError(
                f"a message of {length} bytes in a file of {size}",
                where="spool",
                repair="its bytes changed since they were written: check that disk and memory",
            )
        if at + 4 + length > end:
            break
        messages.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return messages, at


def _fault(what: str) -> MalformedMessageError:
    return MalformedMessageError(what, where="walsender")
