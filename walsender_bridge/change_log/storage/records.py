"""The format of a segment's records: keys, index rows, and the replica's state record.

Invariant: LMDB keeps no checksums, so each record has its own. An index row ends with the CRC32C of the
preceding bytes; the state record has that of its other members. Records of older formats have none: they are
read unverified, and get a checksum at their next write.
"""

import json
import struct
from pathlib import Path

import google_crc32c

from walsender_bridge.change_log.protocol import MAX_COUNT, CommitContext, Position
from walsender_bridge.change_log.replica.disk import BeforeRestart, Durable, IndexRow
from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, WalPosition
from walsender_bridge.runtime.checksummed_json import crc_of

#: Of the small record. Format 1 did not know the source's system identifier, format 2 had no checksums, format 3 did not
#: know where the present history begins, format 4 did not know synchronization, format 5 could not take back a RESTART, format 6
#: did not know whether the stream was ever sealed, format 7 whether what was lost had been replaced.
FORMAT = 8
_READABLE = (1, 2, 3, 4, 5, 6, 7, FORMAT)
_CHECKED_FROM = 3
_KEY = struct.Struct(">Q")
_ROW = struct.Struct("<QQQQQqQQqqIQIQ")
#: Of earlier versions, for which each stream was one history.
_ROW_OF_ONE_HISTORY = struct.Struct("<QQQQQqQQqqIQI")
_CRC = struct.Struct("<I")


def key_of(offset: int) -> bytes:
    """A key that sorts as the number does."""
    return _KEY.pack(offset)


def offset_of(key: bytes | memoryview) -> int:
    """The number of a key. Raises `CorruptError`."""
    if len(key) != _KEY.size:
        raise CorruptError(f"a key of {len(key)} bytes is not an offset")
    number: int = _KEY.unpack(key)[0]
    return number


def pack_row(row: IndexRow) -> bytes:
    """An index row's value."""
    c, p = row.context, row.position
    packed = _ROW.pack(
        *(c.version, c.local_offset, c.global_offset, c.length, row.size, row.taken_at),
        *(p.end_offset, p.end_lsn, p.commit_time, p.latest_time, p.timeline, p.bytes_total, p.crc),
        p.history_start,
    )
    return packed + _CRC.pack(google_crc32c.value(packed))


def unpack_row(value: bytes | memoryview, where: str) -> IndexRow:
    """The row of such a value. Raises `CorruptError`."""
    form = _ROW if len(value) >= _ROW.size else _ROW_OF_ONE_HISTORY
    packed, crc = bytes(value[: form.size]), bytes(value[form.size :])
    wrong = crc != _CRC.pack(google_crc32c.value(packed))
    if len(packed) != form.size or (wrong and (crc or form is _ROW)):
        raise CorruptError("a commit's row does not match its checksum (CRC32C)", where=where)
    version, local, global_, length, size, taken_at, *position = form.unpack(packed)
    context = CommitContext(version, local, global_, length)
    return IndexRow(context, size, Position(*position), taken_at)


def chain_of(value: bytes, where: str) -> list[int]:
    """The first offsets of the segments before this one, from such a value. Raises `CorruptError`."""
    try:
        return [int(each) for each in json.loads(value)]
    except (ValueError, TypeError) as error:
        raise CorruptError(f"the list of segments is damaged: {error}", where=where) from None


def replica_id_of(value: bytes | None, where: str) -> str:
    """The replica's id, from such a value; empty if there is none. Raises `CorruptError`."""
    try:
        return (value or b"").decode("ascii")
    except UnicodeDecodeError:
        raise CorruptError("the replica's id is damaged", where=where) from None


def pack_state(durable: Durable) -> bytes:
    """The small record's value."""
    context = durable.context
    record = {
        "format": FORMAT,
        "stream": durable.stream,
        "log_id": durable.log_id,
        "term": durable.term,
        "low_offset": durable.low_offset,
        "context": context and [getattr(context, n) for n in CommitContext.__slots__],
        "position": [getattr(durable.position, n) for n in Position.__slots__],
        "confirmed_to": durable.confirmed_to,
        "gate_lsn": durable.gate_lsn,
        "sealed_at": durable.sealed_at,
        "taken_at": durable.taken_at,
        "system_id": durable.system_id,
        "syncing_from": durable.syncing_from,
        "before_restart": durable.before_restart
        and [durable.before_restart.confirmed_to, durable.before_restart.system_id],
        "was_sealed": durable.was_sealed,
        "replaced_by": durable.replaced_by,
    }
    return json.dumps({**record, "crc": crc_of(record)}).encode()


def _wal_position(pair: list[int] | None) -> WalPosition | None:
    return WalPosition(int(pair[0]), int(pair[1])) if pair else None


def _check_types(durable: Durable) -> None:
    """Raise `ValueError` for a value that is not of its type or range.

    A record need not be from this replica's disk: synchronization receives it, with a checksum that its sender made. One number
    beyond 64 bits would make the report of all replicas of the log server unreadable.
    """
    d, c, p = durable, durable.context or CommitContext(0, 1, 1, 0), durable.position
    before = d.before_restart or BeforeRestart(None, None)
    offsets = (d.low_offset, d.sealed_at or 0, c.local_offset, c.global_offset, p.end_offset)
    counts = (*offsets, d.term, c.version, c.length, p.bytes_total, p.history_start)
    wal = [each for each in (d.confirmed_to, before.confirmed_to) if each is not None]
    lsns = (d.gate_lsn, p.end_lsn, *(each.lsn for each in wal))
    system_ids = (d.system_id or 0, before.system_id or 0)
    timelines = (p.timeline, p.crc, *(each.timeline for each in wal))
    ranges = (
        (counts, range(MAX_COUNT + 1)),
        ((*lsns, *system_ids), range(MAX_LSN + 1)),
        (timelines, range(1 << 32)),
        ((p.commit_time, p.latest_time, d.taken_at), range(-(1 << 63), 1 << 63)),
    )
    for values, within in ranges:
        if not all(type(each) is int and each in within for each in values):
            raise ValueError("a number is out of range")
    texts = (d.stream, d.log_id, d.syncing_from or "", d.replaced_by or "")
    if not all(isinstance(each, str) for each in texts) or not isinstance(d.was_sealed, bool):
        raise ValueError("a value is not of its type")


def unpack_state(value: bytes, where: Path) -> Durable:
    """The record of such a value. Raises `CorruptError`, or `NotSupportedError` for a newer format."""
    try:
        record = json.loads(value)
        version = record["format"]
        crc = record.pop("crc", None)
        # Of any format that has one: a format's number may be what has changed.
        unchecked = crc is None and version in _READABLE and version < _CHECKED_FROM
        if crc != crc_of(record) and not unchecked:
            raise ValueError("it does not match its checksum (CRC32C)")
        if version in _READABLE:
            del record["format"]
            context, position = record.pop("context"), record.pop("position")
            confirmed, before = record.pop("confirmed_to"), record.pop("before_restart", None)
            durable = Durable(
                **record,
                context=context and CommitContext(*context),
                position=Position(*position),
                confirmed_to=_wal_position(confirmed),
                before_restart=before and BeforeRestart(_wal_position(before[0]), before[1]),
            )
            _check_types(durable)
            return durable
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise CorruptError(f"the replica's record is damaged: {error}", where=str(where)) from error
    raise NotSupportedError(
        f"unknown format {version} of the log's store (this version supports {min(_READABLE)} to {FORMAT})",
        where=str(where),
        repair="use the version of Tuskline that wrote it, or a newer one",
    )
