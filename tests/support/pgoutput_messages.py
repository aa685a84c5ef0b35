"""pgoutput messages as PostgreSQL's "Logical Replication Message Formats" describe them, for tests.

Only what a test asks for varies; lengths and layout are the server's own.
"""

import struct
from collections.abc import Sequence

from walsender_bridge.postgres.protocol.pgoutput import POSTGRES_EPOCH

#: A commit record's length in bytes: its end LSN lies this far behind its start.
COMMIT_RECORD = 0x30
#: 2024-01-01 00:00 UTC, where the clock of these tests starts (microseconds).
START_TIME = 1_704_067_200_000_000


def begin(final_lsn: int, xid: int, commit_time: int = START_TIME) -> bytes:
    """Begin of a transaction whose commit record starts at `final_lsn`."""
    return struct.pack(">cQqI", b"B", final_lsn, commit_time - POSTGRES_EPOCH, xid)


def commit(commit_lsn: int, end_lsn: int, commit_time: int = START_TIME) -> bytes:
    """Commit whose record spans `commit_lsn` to `end_lsn`."""
    return struct.pack(">cBQQq", b"C", 0, commit_lsn, end_lsn, commit_time - POSTGRES_EPOCH)


def row(values: Sequence[bytes | None]) -> bytes:
    """A tuple in text form; None is NULL."""
    columns = (b"n" if v is None else b"t" + struct.pack(">I", len(v)) + v for v in values)
    return struct.pack(">H", len(values)) + b"".join(columns)


def insert(oid: int, values: Sequence[bytes | None]) -> bytes:
    """Insert of one row."""
    return b"I" + struct.pack(">I", oid) + b"N" + row(values)


def update(oid: int, values: Sequence[bytes | None]) -> bytes:
    """Update whose key stays."""
    return b"U" + struct.pack(">I", oid) + b"N" + row(values)


def delete(oid: int, key: Sequence[bytes | None]) -> bytes:
    """Delete by key."""
    return b"D" + struct.pack(">I", oid) + b"K" + row(key)


def truncate(*oids: int) -> bytes:
    """Truncate of these relations."""
    return b"T" + struct.pack(">IB", len(oids), 0) + struct.pack(f">{len(oids)}I", *oids)


def relation(
    oid: int, name: str, columns: Sequence[tuple[str, int]], schema: str = "public"
) -> bytes:
    """Relation with replica identity default; the first column is its key."""
    head = b"R" + struct.pack(">I", oid) + schema.encode() + b"\0" + name.encode() + b"\0d"
    body = b"".join(
        bytes([i == 0]) + column.encode() + b"\0" + struct.pack(">Ii", type_oid, -1)
        for i, (column, type_oid) in enumerate(columns)
    )
    return head + struct.pack(">H", len(columns)) + body


def type_message(oid: int, name: str, schema: str = "public") -> bytes:
    """Type of a column that is not built in."""
    return b"Y" + struct.pack(">I", oid) + schema.encode() + b"\0" + name.encode() + b"\0"


def transaction(
    start_lsn: int, xid: int, changes: Sequence[bytes], commit_time: int = START_TIME
) -> list[bytes]:
    """Begin, the changes, Commit; its end LSN is `start_lsn + COMMIT_RECORD`."""
    return [
        begin(start_lsn, xid, commit_time),
        *changes,
        commit(start_lsn, start_lsn + COMMIT_RECORD, commit_time),
    ]


def message(end_lsn: int, prefix: str, content: bytes, *, transactional: bool = False) -> bytes:
    """Message, as `pg_logical_emit_message` writes it; its record ends at `end_lsn`."""
    head = struct.pack(">cBQ", b"M", transactional, end_lsn)
    return head + prefix.encode() + b"\0" + struct.pack(">I", len(content)) + content


def origin(name: str, lsn: int = 0) -> bytes:
    """Origin of a transaction that came by replication."""
    return struct.pack(">cQ", b"O", lsn) + name.encode() + b"\0"


def in_block(xid: int, plain: bytes) -> bytes:
    """A message as it is inside of a block of a streamed transaction."""
    return plain[:1] + struct.pack(">I", xid) + plain[1:]


def stream_start(xid: int, *, first: bool) -> bytes:
    """Stream Start."""
    return struct.pack(">cIB", b"S", xid, first)


def stream_stop() -> bytes:
    """Stream Stop."""
    return b"E"


def stream_commit(xid: int, commit_lsn: int, end_lsn: int, commit_time: int = START_TIME) -> bytes:
    """Stream Commit whose record spans `commit_lsn` to `end_lsn`."""
    moment = commit_time - POSTGRES_EPOCH
    return struct.pack(">cIBQQq", b"c", xid, 0, commit_lsn, end_lsn, moment)


def stream_abort(xid: int, subxid: int, *, parallel: bool = True) -> bytes:
    """Stream Abort of a subtransaction, or of all when the xids are the same."""
    return struct.pack(">cII", b"A", xid, subxid) + (struct.pack(">Qq", 5, 0) if parallel else b"")
