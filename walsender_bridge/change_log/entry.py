"""One entry of the change log: a header, and a run of raw pgoutput messages.

    fixed header (86 bytes, little-endian) | relations (36 bytes each) | payload

The payload is (u32 length + message) repeated, in the server's order, encoded by the codec.
It contains no Relation and Type messages: they are schema records, kept in a registry by their hash,
and the header refers, for each relation, to the one schema of its rows. So each entry can be decoded by itself.
After the relations, format 2 lists partitions whose rows are sent as another table's; an entry without any has format 1.

Invariant: `crc` is the CRC32C of every other byte of the entry, seeded with the `crc` of the preceding
entry (0 for the first). An entry that verifies is unchanged and in its place:
a lost, duplicated or exchanged entry breaks the chain just as a flipped bit does. Magic, version and the two checksums keep their places
in the fixed header in every format, so that a changed version is told from that of a newer format.

Positions are end LSNs: the *end* of the commit record according to the Commit message. Times are microseconds
since the Unix epoch, UTC. Lengths are in bytes.
"""

import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from operator import attrgetter

import google_crc32c
import numpy as np
import zstandard
from numpy.typing import NDArray

from walsender_bridge.errors import CorruptError, MalformedMessageError, NotSupportedError
from walsender_bridge.postgres.protocol import pgoutput
from walsender_bridge.postgres.protocol.lsn import Lsn

MAGIC = b"TLE1"
#: Without partitions, and with them.
VERSION, VERSION_OF_PARTITIONS = 1, 2
FLAG_STARTS_TRANSACTION = 1
FLAG_ENDS_TRANSACTION = 2
SCHEMA_HASH_SIZE = 16
#: A pgoutput message is smaller than 1 GiB (PostgreSQL's limit on one allocation), and an entry is one
#: message or about 1 MiB of them: no valid entry is longer than this.
MAX_RAW_LENGTH = 1 << 30
#: More relations than a transaction of 1 MiB can touch with messages of at least five bytes.
MAX_RELATIONS = 1 << 18
ZSTD_LEVEL = 1

_FIXED = struct.Struct("<4sHBBHIQQqqIIIQQIII")
_CRC = struct.Struct("<I")
_RELATION = struct.Struct("<I16sIIII")
_COUNTS = attrgetter("relation_id", "schema_hash", "inserts", "updates", "deletes", "truncates")
#: Markers in a partition's record: in place of a count, and of an OID (`PartitionRow`).
_PARTITION, NAMED_OTHERWISE = 2**32 - 1, 0
_PREFIX = bytes(4)
_BEGIN_SIZE = 21
_COMMIT_SIZE = 26
_I, _U, _D = pgoutput.INSERT, pgoutput.UPDATE, pgoutput.DELETE
#: The kinds of message allowed in a payload, by first byte.
_ALLOWED = np.zeros(256, np.bool_)
_ALLOWED[[_I, _U, _D, pgoutput.BEGIN, pgoutput.COMMIT, pgoutput.TRUNCATE]] = True
_ALLOWED[[pgoutput.ORIGIN, pgoutput.MESSAGE]] = True
_IS_ROW = np.zeros(256, np.bool_)
_IS_ROW[[_I, _U, _D]] = True


class EntryKind(IntEnum):
    """The kind of an entry (RESTART: see `restart`). Values from 4 on are reserved for prepared transactions."""

    DATA = 1
    RESTART = 2
    SNAPSHOT_MARK = 3


class Codec(IntEnum):
    """How the payload is compressed."""

    NONE = 0
    ZSTD = 1


_KINDS = frozenset(map(int, EntryKind))
_CODECS = frozenset(map(int, Codec))


@dataclass(frozen=True, slots=True)
class RelationCounts:
    """The number of changes of one relation in an entry, and their schema."""

    relation_id: int
    schema_hash: bytes
    inserts: int
    updates: int
    deletes: int
    truncates: int


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """Message `number` is a row of this partition, published as a row of the table with that schema.

    The first row, or the first after the partition has changed: for others the server sends no such indication.
    A second record with `NAMED_OTHERWISE`: its updates and deletes do not identify rows by the table's key.
    """

    relation_id: int
    schema_hash: bytes
    number: int


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """The header of an entry.

    The LSNs and commit times are those of the first and last transaction that *ends* in the entry,
    the xids the least and greatest of those that *begin* in it (compared as numbers); 0 where there is none.
    """

    kind: EntryKind
    codec: Codec
    flags: int
    timeline: int
    first_end_lsn: Lsn
    last_end_lsn: Lsn
    first_commit_time: int
    last_commit_time: int
    min_xid: int
    max_xid: int
    message_count: int
    raw_length: int
    payload_length: int
    previous_crc: int
    crc: int
    relations: tuple[RelationCounts, ...]
    partitions: tuple[PartitionRow, ...] = ()

    @property
    def starts_transaction(self) -> bool:
        """Whether the first message begins a transaction (or the entry stands between transactions)."""
        return bool(self.flags & FLAG_STARTS_TRANSACTION)

    @property
    def ends_transaction(self) -> bool:
        """Whether the last message ends a transaction (or the entry stands between transactions)."""
        return bool(self.flags & FLAG_ENDS_TRANSACTION)

    @property
    def header_length(self) -> int:
        """Bytes before the payload."""
        return _FIXED.size + _RELATION.size * (len(self.relations) + len(self.partitions))

    @property
    def length(self) -> int:
        """Bytes of the whole entry."""
        return self.header_length + self.payload_length


class _Codecs(threading.local):
    """One compressor and decompressor per thread: they are not thread-safe, and expensive to create."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_codecs = _Codecs()


# -- writing ----------------------------------------------------------------------------------------


def build_entry(
    messages: Sequence[bytes],
    *,
    timeline: int,
    previous_crc: int,
    schema_hashes: Mapping[int, bytes],
    kind: EntryKind = EntryKind.DATA,
    codec: Codec = Codec.ZSTD,
    partitions: Sequence[PartitionRow] = (),
) -> bytes:
    """Build the entry of these messages, from which the rest of its header is derived.

    `schema_hashes` has the hash of each relation's schema, by OID. An entry without messages stands between
    transactions and must not be of kind DATA. Raises `MalformedMessageError`.
    """
    if not messages:
        if kind == EntryKind.DATA:
            raise MalformedMessageError("DATA entry without messages", where="entry")
        flags = FLAG_STARTS_TRANSACTION | FLAG_ENDS_TRANSACTION
        return _assemble(
            (kind, codec, flags, timeline, 0, 0, 0, 0, 0, 0, 0), b"", [], codec, previous_crc
        )
    raw, data, starts, lengths = _frame(messages)
    kinds = data[starts]
    if not _ALLOWED[kinds].all():
        bad = messages[int(np.argmin(_ALLOWED[kinds]))]
        raise MalformedMessageError(
            f"message of kind {bad[:1]!r} is not allowed in an entry", where="entry"
        )
    begins = starts[kinds == pgoutput.BEGIN]
    commits = np.flatnonzero(kinds == pgoutput.COMMIT)
    _check_lengths(kinds, lengths)
    first_lsn = last_lsn = first_time = last_time = min_xid = max_xid = 0
    if len(commits):
        first = pgoutput.parse_commit(messages[int(commits[0])])
        last = pgoutput.parse_commit(messages[int(commits[-1])])
        first_lsn, last_lsn = first.end_lsn, last.end_lsn
        first_time, last_time = first.commit_time, last.commit_time
    if len(begins):
        xids = _u32_at(data, begins + 17)
        min_xid, max_xid = int(xids.min()), int(xids.max())
    flags = FLAG_STARTS_TRANSACTION if kinds[0] == pgoutput.BEGIN else 0
    flags |= FLAG_ENDS_TRANSACTION if kinds[-1] == pgoutput.COMMIT else 0
    truncates = [messages[int(i)] for i in np.flatnonzero(kinds == pgoutput.TRUNCATE)]
    relations = _count(data, starts, kinds, truncates, schema_hashes)
    fields = (
        *(kind, codec, flags, timeline, first_lsn, last_lsn, first_time, last_time),
        *(min_xid, max_xid, len(messages)),
    )
    return _assemble(fields, raw, relations, codec, previous_crc, partitions)


def _frame(
    messages: Sequence[bytes],
) -> tuple[bytearray, NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Return (length + message) repeated, the same as an array, and the start of each message in it."""
    lengths = np.fromiter(map(len, messages), np.int64, len(messages))
    if not lengths.all():
        raise MalformedMessageError("empty message", where="entry")
    raw = bytearray(_PREFIX + _PREFIX.join(messages))
    if len(raw) > MAX_RAW_LENGTH:
        raise MalformedMessageError(f"entry of {len(raw)} bytes exceeds the limit", where="entry")
    data = np.frombuffer(raw, np.uint8)
    starts = np.cumsum(lengths + 4) - lengths
    _at_every_byte(data, "<u4")[starts - 4] = lengths
    return raw, data, starts, lengths


def _check_lengths(kinds: NDArray[np.uint8], lengths: NDArray[np.int64]) -> None:
    for kind, size in ((pgoutput.BEGIN, _BEGIN_SIZE), (pgoutput.COMMIT, _COMMIT_SIZE)):
        if (lengths[kinds == kind] != size).any():
            raise MalformedMessageError(f"message of kind {chr(kind)} has a wrong length")
    if (lengths[_IS_ROW[kinds]] < 5).any():
        raise MalformedMessageError("truncated row", where="entry")


def _u32_at(data: NDArray[np.uint8], at: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The big-endian u32 at each of these indexes."""
    return _at_every_byte(data, ">u4")[at].astype(np.uint32)


def _at_every_byte(data: NDArray[np.uint8], kind: str) -> NDArray[np.uint32]:
    """The four bytes starting at *each* byte, as a number."""
    return np.ndarray((len(data) - 3,), kind, data, strides=(1,))


def _count(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    kinds: NDArray[np.uint8],
    truncates: Sequence[bytes],
    schema_hashes: Mapping[int, bytes],
) -> list[RelationCounts]:
    """The number of changes of each relation, by OID."""
    counts: dict[int, list[int]] = {}
    rows = _IS_ROW[kinds]
    if rows.any():
        keys = _u32_at(data, starts[rows] + 1).astype(np.uint64) << np.uint64(8) | kinds[rows]
        for key, number in zip(*np.unique(keys, return_counts=True), strict=True):
            oid, op = divmod(int(key), 256)
            counts.setdefault(oid, [0, 0, 0, 0])[(_I, _U, _D).index(op)] += int(number)
    for message in truncates:
        for oid in _truncated(message):
            counts.setdefault(oid, [0, 0, 0, 0])[3] += 1
    found = []
    for oid in sorted(counts):
        digest = schema_hashes.get(oid)
        if digest is None or len(digest) != SCHEMA_HASH_SIZE:
            raise MalformedMessageError(f"changes of relation {oid}, whose schema is unknown")
        found.append(RelationCounts(oid, digest, *counts[oid]))
    return found


def _truncated(message: bytes) -> tuple[int, ...]:
    """The OIDs in a Truncate message."""
    number = int.from_bytes(message[1:5], "big")
    if len(message) != 6 + 4 * number:
        raise MalformedMessageError("Truncate message has a wrong length", where="entry")
    return struct.unpack_from(f">{number}I", message, 6)


def _assemble(
    fields: tuple[int, ...],
    raw: bytes | bytearray,
    relations: Sequence[RelationCounts],
    codec: Codec,
    previous_crc: int,
    partitions: Sequence[PartitionRow] = (),
) -> bytes:
    payload = _codecs.compressor.compress(raw) if codec == Codec.ZSTD else bytes(raw)
    version = VERSION_OF_PARTITIONS if partitions else VERSION
    count = len(relations) + len(partitions)
    fixed = _FIXED.pack(*(MAGIC, version, *fields, len(raw), len(payload), count, previous_crc, 0))
    rows = [
        *map(_COUNTS, relations),
        *((p.relation_id, p.schema_hash, p.number, 0, 0, _PARTITION) for p in partitions),
    ]
    records = b"".join(_RELATION.pack(*row) for row in rows)
    head, tail = fixed[: -_CRC.size], records + payload
    return b"".join((head, _CRC.pack(_chain(previous_crc, head, tail)), tail))


def _chain(seed: int, *parts: bytes) -> int:
    for part in parts:
        seed = google_crc32c.extend(seed, part)
    return seed


# -- reading ----------------------------------------------------------------------------------------


def _corrupt(what: str) -> CorruptError:
    return CorruptError(
        what,
        where="entry",
        repair="the data changed after it was written: check the disk and the memory",
    )


def read_header(buf: bytes | memoryview) -> EntryHeader:
    """Read the header of the entry `buf`, without verifying its checksum (see `check`, `verify`).

    Raises `CorruptError`, or `NotSupportedError` for a version that is newer than this code: of such an entry the checksum is verified.
    """
    if len(buf) < _FIXED.size:
        raise _corrupt(f"entry of {len(buf)} bytes is too short")
    magic, version, kind, codec, flags, timeline, *positions = _FIXED.unpack_from(buf)
    first_lsn, last_lsn, first_time, last_time, min_xid, max_xid, *lengths = positions
    message_count, raw_length, payload_length, count, previous_crc, crc = lengths
    if magic != MAGIC:
        raise _corrupt(f"wrong magic {bytes(magic)!r}, expected {MAGIC!r}")
    if version not in {VERSION, VERSION_OF_PARTITIONS}:
        _check_sum(buf, previous_crc, crc)
        raise NotSupportedError(
            f"unknown entry format {version} (this version supports up to {VERSION_OF_PARTITIONS})",
            where="entry",
            repair="use the version of Tuskline that wrote the log, or a newer one",
        )
    if raw_length > MAX_RAW_LENGTH or count > MAX_RELATIONS:
        raise _corrupt(f"{raw_length} bytes of {count} relations exceed the limits of an entry")
    if _FIXED.size + _RELATION.size * count + payload_length != len(buf):
        raise _corrupt(f"the lengths in the header do not add up to {len(buf)} bytes")
    if kind not in _KINDS or codec not in _CODECS:
        raise _corrupt(f"unknown kind {kind} or codec {codec}")
    if first_lsn > last_lsn or flags & ~(FLAG_STARTS_TRANSACTION | FLAG_ENDS_TRANSACTION):
        raise _corrupt("invalid LSNs or flags")
    end = _FIXED.size + _RELATION.size * count
    rows = list(_RELATION.iter_unpack(memoryview(buf)[_FIXED.size : end]))
    partitions = [row for row in rows if version != VERSION and row[-1] == _PARTITION]
    return EntryHeader(
        *(EntryKind(kind), Codec(codec), flags, timeline, first_lsn, last_lsn),
        *(first_time, last_time, min_xid, max_xid, message_count, raw_length, payload_length),
        *(previous_crc, crc),
        tuple(RelationCounts(*row) for row in rows[: count - len(partitions)]),
        tuple(PartitionRow(*row[:3]) for row in partitions),
    )


def read_payload(buf: bytes | memoryview, header: EntryHeader | None = None) -> bytes:
    """Read the payload: (u32 little-endian length + message) repeated. Raises `CorruptError`.

    Memory is bounded by the header's `raw_length`, whatever length the compressed data declares.
    """
    header = header or read_header(buf)
    stored = memoryview(buf)[header.header_length :]
    if header.codec == Codec.NONE:
        raw = bytes(stored)
    elif not header.payload_length or not header.raw_length:
        raw = b""
    else:
        try:
            if zstandard.frame_content_size(bytes(stored[:32])) != header.raw_length:
                raise _corrupt("the payload's length differs from that in the header")
            raw = _codecs.decompressor.decompress(stored, max_output_size=header.raw_length)
        except zstandard.ZstdError as error:
            raise _corrupt(f"the payload does not decompress: {error}") from error
    if len(raw) != header.raw_length:
        raise _corrupt(f"payload has {len(raw)} bytes instead of {header.raw_length}")
    return raw


def check(buf: bytes | memoryview) -> EntryHeader:
    """Verify the entry's checksum, but not its place in the chain. Raises `CorruptError`."""
    header = read_header(buf)
    _check_sum(buf, header.previous_crc, header.crc)
    return header


def _check_sum(buf: bytes | memoryview, previous_crc: int, crc: int) -> None:
    view = memoryview(buf)
    head, tail = bytes(view[: _FIXED.size - _CRC.size]), bytes(view[_FIXED.size :])
    if _chain(previous_crc, head, tail) != crc:
        raise _corrupt("checksum mismatch (CRC32C)")


def check_follows(header: EntryHeader, previous_crc: int) -> None:
    """Verify that the entry follows the one with that checksum. Raises `CorruptError`."""
    if header.previous_crc != previous_crc:
        found = header.previous_crc
        raise _corrupt(
            f"broken chain: follows an entry with CRC {found:08x}, not {previous_crc:08x}"
        )


def verify(buf: bytes | memoryview, previous_crc: int) -> EntryHeader:
    """Verify the entry's checksum and its place in the chain. Raises `CorruptError`."""
    header = check(buf)
    check_follows(header, previous_crc)
    return header


def split_messages(raw: bytes) -> list[bytes]:
    """The messages of a payload or of a schema record. Raises `CorruptError`."""
    messages, at = [], 0
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        if end > len(raw) or end < at + 5:
            raise _corrupt("truncated message")
        messages.append(raw[at + 4 : end])
        at = end
    return messages


# -- schemas ----------------------------------------------------------------------------------------


def schema_record(relation: bytes, types: Iterable[bytes] = ()) -> bytes:
    """Build a schema record for the registry: a Relation message and the Type messages of its columns.

    Equal schemas have equal records: types are ordered by OID, without duplicates.
    """
    ordered = sorted(set(types), key=pgoutput.relation_oid)
    return b"".join(len(m).to_bytes(4, "little") + m for m in (relation, *ordered))


def schema_hash(record: bytes) -> bytes:
    """The key of a schema record in the registry (16 bytes)."""
    return blake2b(record, digest_size=SCHEMA_HASH_SIZE).digest()


def split_schema_record(record: bytes) -> list[bytes]:
    """The Relation message, then its Type messages. Raises `CorruptError`."""
    messages = split_messages(record)
    if not messages or messages[0][0] != pgoutput.RELATION:
        raise _corrupt("schema record does not start with a Relation message")
    return messages
