"""Reads the entries of a segment, verifying each one.

Invariant: every entry returned is unchanged and in its place. An entry's own checksum
covers its bytes; the chain of checksums ties it to the preceding entry, and the index row of its commit to
the offset and the version at which that commit ends. LMDB itself verifies nothing.
"""

from collections.abc import Iterator

from walsender_bridge.change_log.entry import (
    EntryHeader,
    check,
    check_follows,
    schema_hash,
    split_schema_record,
)
from walsender_bridge.change_log.replica.damaged_segments import REPAIR
from walsender_bridge.change_log.replica.disk import IndexRow
from walsender_bridge.change_log.storage.records import key_of, offset_of
from walsender_bridge.change_log.storage.segment import SegmentSnapshot
from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.postgres.protocol import pgoutput


def entries(snapshot: SegmentSnapshot, start: int) -> Iterator[tuple[int, EntryHeader, bytes]]:
    """The entries from `start` on, committed or not, up to the first that is not there.

    Raises `CorruptError` with stream, offset and file.
    """
    before = snapshot.get(b"entries", key_of(start - 1))
    previous = None if before is None else _checked(snapshot, start - 1, before, None).crc
    offset = start
    for key, value in snapshot.rows(b"entries", key_of(start)):
        if offset_of(key) != offset:
            return
        data = bytes(value)
        header = _checked(snapshot, offset, data, previous)
        yield offset, header, data
        previous = header.crc
        offset += 1


def committed_entries(
    snapshot: SegmentSnapshot, start: int
) -> Iterator[tuple[int, IndexRow, EntryHeader, bytes]]:
    """The committed entries from `start` on with their commits. Raises `CorruptError`."""
    commit: IndexRow | None = None
    for offset, header, data in entries(snapshot, start):
        if commit is None or offset >= commit.context.end:
            commit = snapshot.commit_behind(offset)
        if commit is None:
            return
        if offset < commit.context.local_offset:
            raise _named(
                snapshot, _at(offset), "it belongs to no commit, although later commits exist"
            )
        if offset == commit.context.end - 1 and header.crc != commit.position.crc:
            raise _named(
                snapshot, _at(offset), f"commit {commit.context.version} ends with another entry"
            )
        yield offset, commit, header, data


def schema(snapshot: SegmentSnapshot, digest: bytes) -> bytes:
    """The schema record of that hash. Raises `CorruptError`."""
    record = snapshot.get(b"schemas", digest)
    if record is None:
        raise _named(snapshot, f"schema {digest.hex()}", "it is not in the registry")
    if schema_hash(record) != digest:
        raise _named(snapshot, f"schema {digest.hex()}", "it does not match its hash")
    return record


def newest_schemas(snapshot: SegmentSnapshot) -> Iterator[bytes]:
    """The newest schema record of each relation, ordered by name. Raises `CorruptError`."""
    for name, digest in snapshot.rows(b"relations"):
        record = schema(snapshot, bytes(digest))
        relation = pgoutput.parse_relation(split_schema_record(record)[0])
        if relation.full_name.encode() != bytes(name):
            raise _named(snapshot, f"schema {digest.hex()}", "it is stored under another name")
        yield record


def _checked(
    snapshot: SegmentSnapshot, offset: int, data: bytes, previous: int | None
) -> EntryHeader:
    try:
        header = check(data)
        if previous is not None:
            check_follows(header, previous)
    except CorruptError as error:
        raise _named(snapshot, _at(offset), error.what) from error
    except NotSupportedError as error:
        where = _place(snapshot, _at(offset))
        raise NotSupportedError(error.what, where=where, repair=error.repair) from error
    return header


def _at(offset: int) -> str:
    return f"offset {offset}"


def _place(snapshot: SegmentSnapshot, what: str) -> str:
    segment = snapshot.segment
    return f"stream {segment.folder.parent.name}, {what}, {segment.file}"


def _named(snapshot: SegmentSnapshot, place: str, what: str) -> CorruptError:
    return CorruptError(what, where=_place(snapshot, place), repair=REPAIR)
