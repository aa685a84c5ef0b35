"""Parses the pgoutput messages that are read one by one: transactions, streams, messages, relations, types.

Rows (Insert, Update, Delete, Truncate) are never parsed here: capture copies them, and
`spark_consumers.decode.entries` reads many at once. Formats: PostgreSQL documentation, "Logical Replication
Message Formats" (protocol versions 1 to 4). Times are microseconds since the Unix epoch, UTC.

From version 2 on, between Stream Start and Stream Stop, rows, Relation, Type and Message messages have the xid of
their (sub)transaction after the first byte. This module parses the form of version 1, without
the xid.
"""

import struct
from dataclasses import dataclass, field

from walsender_bridge.errors import MalformedMessageError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.relation_name import relation_name

# Kinds, as the first byte of a message.
BEGIN = ord("B")
COMMIT = ord("C")
ORIGIN = ord("O")
RELATION = ord("R")
TYPE = ord("Y")
INSERT = ord("I")
UPDATE = ord("U")
DELETE = ord("D")
TRUNCATE = ord("T")
MESSAGE = ord("M")
STREAM_START = ord("S")
STREAM_STOP = ord("E")
STREAM_COMMIT = ord("c")
STREAM_ABORT = ord("A")

#: PostgreSQL counts time from 2000-01-01; this is that moment in microseconds since 1970.
POSTGRES_EPOCH = 946_684_800_000_000
#: The latest time representable as microseconds since 1970 in a signed 64-bit integer (year 294247).
_LAST_TIME = (1 << 63) - 1
#: PostgreSQL's limit on the columns of a table.
MAX_COLUMNS = 1664

_BEGIN = struct.Struct(">cQqI")
_COMMIT = struct.Struct(">cBQQq")
_STREAM_START = struct.Struct(">cIB")
_STREAM_COMMIT = struct.Struct(">cIBQQq")
_STREAM_ABORT = struct.Struct(">cII")
#: With streaming `parallel`: the LSN and the time of the abort follow, which nothing here needs.
_STREAM_ABORT_SIZES = (_STREAM_ABORT.size, _STREAM_ABORT.size + 16)
_MESSAGE = struct.Struct(">cBQ")
_U32 = struct.Struct(">I")
_COLUMN_TAIL = struct.Struct(">Ii")


@dataclass(frozen=True, slots=True)
class Begin:
    """Start of a transaction. `final_lsn` is where its commit record *starts*."""

    final_lsn: Lsn
    commit_time: int
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """End of a transaction. `end_lsn`, where its commit record ends, is its position everywhere."""

    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class StreamStart:
    """A block of a transaction in progress begins. `first`: it is this transaction's first."""

    xid: int
    first: bool


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """A streamed transaction has committed; `commit` is the equivalent Commit message."""

    xid: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """The subtransaction `subxid` of `xid` was rolled back; the whole transaction if both are equal."""

    xid: int
    subxid: int


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A message written by `pg_logical_emit_message`; `end_lsn` is the end of its record."""

    transactional: bool
    end_lsn: Lsn
    prefix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Column:
    """A column as a Relation message shows it. `is_key`: part of the replica identity."""

    name: str
    type_oid: int
    typmod: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as pgoutput describes it; `replica_identity` is one of `d`, `n`, `f`, `i`."""

    oid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[Column, ...]
    types: dict[int, tuple[str, str]] = field(default_factory=dict, hash=False)

    @property
    def full_name(self) -> str:
        """`schema.table`."""
        return relation_name(self.namespace, self.name)

    @property
    def key(self) -> frozenset[str]:
        """The columns by which updates and deletes name a row; none where they carry all of it.

        With REPLICA IDENTITY FULL every column is flagged, whatever the primary key is: the stream tells neither
        the key nor that it changed, so nothing may depend on one. Such a table is a multiset.
        """
        if self.replica_identity == "f":
            return frozenset()
        return frozenset(column.name for column in self.columns if column.is_key)


def _fault(what: str, message: bytes) -> MalformedMessageError:
    head = bytes(message[:16]).hex(" ")
    return MalformedMessageError(f"{what} (starts {head}, {len(message)} bytes)", where="pgoutput")


def _unix_time(time: int, message: bytes) -> int:
    """Convert a server's time to microseconds since 1970, checking that it fits into 64 bits."""
    if time > _LAST_TIME - POSTGRES_EPOCH:
        raise _fault("commit time out of range", message)
    return time + POSTGRES_EPOCH


def parse_begin(message: bytes) -> Begin:
    """A Begin message. Raises `MalformedMessageError`."""
    if len(message) != _BEGIN.size or message[0] != BEGIN:
        raise _fault("not a Begin message", message)
    _, final_lsn, time, xid = _BEGIN.unpack(message)
    return Begin(final_lsn, _unix_time(time, message), xid)


def parse_commit(message: bytes) -> Commit:
    """A Commit message. Raises `MalformedMessageError`."""
    if len(message) != _COMMIT.size or message[0] != COMMIT:
        raise _fault("not a Commit message", message)
    _, _, commit_lsn, end_lsn, time = _COMMIT.unpack(message)
    return Commit(commit_lsn, end_lsn, _unix_time(time, message))


def build_begin(begin: Begin) -> bytes:
    """A Begin message."""
    return _BEGIN.pack(b"B", begin.final_lsn, begin.commit_time - POSTGRES_EPOCH, begin.xid)


def build_commit(commit: Commit) -> bytes:
    """A Commit message."""
    time = commit.commit_time - POSTGRES_EPOCH
    return _COMMIT.pack(b"C", 0, commit.commit_lsn, commit.end_lsn, time)


def parse_stream_start(message: bytes) -> StreamStart:
    """A Stream Start message. Raises `MalformedMessageError`."""
    if len(message) != _STREAM_START.size or message[0] != STREAM_START:
        raise _fault("not a Stream Start message", message)
    _, xid, first = _STREAM_START.unpack(message)
    return StreamStart(xid, bool(first))


def parse_stream_commit(message: bytes) -> StreamCommit:
    """A Stream Commit message. Raises `MalformedMessageError`."""
    if len(message) != _STREAM_COMMIT.size or message[0] != STREAM_COMMIT:
        raise _fault("not a Stream Commit message", message)
    _, xid, _, commit_lsn, end_lsn, time = _STREAM_COMMIT.unpack(message)
    return StreamCommit(xid, Commit(commit_lsn, end_lsn, _unix_time(time, message)))


def parse_stream_abort(message: bytes) -> StreamAbort:
    """A Stream Abort message, with or without the abort's LSN. Raises `MalformedMessageError`."""
    if len(message) not in _STREAM_ABORT_SIZES or message[0] != STREAM_ABORT:
        raise _fault("not a Stream Abort message", message)
    _, xid, subxid = _STREAM_ABORT.unpack_from(message)
    return StreamAbort(xid, subxid)


def parse_message(message: bytes) -> LogicalMessage:
    """A logical decoding message. Raises `MalformedMessageError`."""
    if len(message) < _MESSAGE.size or message[0] != MESSAGE:
        raise _fault("not a Message message", message)
    _, flags, end_lsn = _MESSAGE.unpack_from(message)
    prefix, at = _text(message, _MESSAGE.size)
    if int.from_bytes(message[at : at + 4], "big") != len(message) - at - 4:
        raise _fault("Message message has a wrong length", message)
    return LogicalMessage(bool(flags & 1), end_lsn, prefix, message[at + 4 :])


def _text(message: bytes, start: int) -> tuple[str, int]:
    end = message.find(b"\0", start)
    if end < 0:
        raise _fault("unterminated name", message)
    return message[start:end].decode("utf-8", "surrogateescape"), end + 1


def parse_relation(message: bytes, types: tuple[bytes, ...] = ()) -> Relation:
    """A Relation message, with the Type messages of its columns. Raises `MalformedMessageError`."""
    if len(message) < 8 or message[0] != RELATION:
        raise _fault("not a Relation message", message)
    oid = _U32.unpack_from(message, 1)[0]
    namespace, at = _text(message, 5)
    name, at = _text(message, at)
    if at + 3 > len(message):
        raise _fault("a Relation message is cut short", message)
    identity = chr(message[at])
    count = int.from_bytes(message[at + 1 : at + 3], "big")
    if count > MAX_COLUMNS:
        raise _fault(f"{count} columns exceed the limit of a table", message)
    at += 3
    columns = []
    for _ in range(count):
        if at >= len(message):
            raise _fault("a Relation message is cut short", message)
        flags = message[at]
        column, at = _text(message, at + 1)
        if at + 8 > len(message):
            raise _fault("a Relation message is cut short", message)
        type_oid, typmod = _COLUMN_TAIL.unpack_from(message, at)
        at += 8
        columns.append(Column(column, type_oid, typmod, bool(flags & 1)))
    return Relation(
        # pgoutput sends an empty namespace for pg_catalog.
        oid,
        namespace or "pg_catalog",
        name,
        identity,
        tuple(columns),
        dict(parse_type(t) for t in types),
    )


def parse_type(message: bytes) -> tuple[int, tuple[str, str]]:
    """A Type message: OID, (schema, name). Raises `MalformedMessageError`."""
    if len(message) < 7 or message[0] != TYPE:
        raise _fault("not a Type message", message)
    namespace, at = _text(message, 5)
    name, _ = _text(message, at)
    return _U32.unpack_from(message, 1)[0], (namespace or "pg_catalog", name)


def relation_oid(message: bytes) -> int:
    """The OID at the head of a Relation, Type, Insert, Update or Delete message."""
    if len(message) < 5:
        raise _fault("truncated message", message)
    oid: int = _U32.unpack_from(message, 1)[0]
    return oid
