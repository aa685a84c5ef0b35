"""Builds the messages that a server sends to a PostgreSQL client. No I/O.

Source: PostgreSQL documentation, "Message Formats", "Error and Notice Message Fields", "SQLSTATE codes" and
"Streaming Replication Protocol". Times are microseconds since the Unix epoch, UTC.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.pgoutput import POSTGRES_EPOCH

#: OIDs of column types.
TEXT, INT4, INT8 = 25, 23, 20
_WIDTH = {TEXT: -1, INT4: 4, INT8: 8}

READY: Final = b"Z\0\0\0\5I"
COPY_BOTH: Final = b"W\0\0\0\7\0\0\0"
COPY_DONE: Final = b"c\0\0\0\4"
AUTHENTICATION_OK: Final = b"R\0\0\0\x08\0\0\0\0"
#: A safekeeper's error for non-replication connections. It identifies a safekeeper, since PostgreSQL never sends it.
REPLICATION_ONLY: Final = "a safekeeper takes replication connections only"

_SASL, _SASL_CONTINUE, _SASL_FINAL = 10, 11, 12
_COLUMN = struct.Struct(">IHIhih")
_KEEPALIVE = struct.Struct(">BIcQqB")
_XLOG = struct.Struct(">BIcQQq")
#: Bytes of `CopyData` and `XLogData` in front of WAL (see `put_xlog_header`).
XLOG_HEADER: Final = _XLOG.size


@dataclass(frozen=True, slots=True)
class SqlError:
    """An `ErrorResponse`. `code` is an SQLSTATE; a `fatal` one ends the connection."""

    code: str
    text: str
    detail: str = ""
    hint: str = ""
    fatal: bool = False


class SqlErrorReply(Exception):
    """Raised when a client's request ends in an `ErrorResponse`; sent to the client only."""

    def __init__(
        self, code: str, text: str, *, detail: str = "", hint: str = "", fatal: bool = False
    ) -> None:
        super().__init__(text)
        self.error = SqlError(code, text, detail, hint, fatal)


def message(kind: bytes, body: bytes = b"") -> bytes:
    """A message: kind, length, body."""
    return kind + struct.pack(">I", len(body) + 4) + body


def error(what: SqlError) -> bytes:
    """An `ErrorResponse`."""
    severity = "FATAL" if what.fatal else "ERROR"
    fields = {"S": severity, "V": severity, "C": what.code, "M": what.text}
    fields |= {k: v for k, v in (("D", what.detail), ("H", what.hint)) if v}
    packed = b"".join(k.encode() + _string(v) for k, v in fields.items())
    return message(b"E", packed + b"\0")


def sasl(mechanisms: Sequence[str]) -> bytes:
    """`AuthenticationSASL`: the mechanisms that the client may choose from, the preferred one first."""
    return _authentication(_SASL, b"".join(map(_string, mechanisms)) + b"\0")


def sasl_continue(data: str) -> bytes:
    """`AuthenticationSASLContinue`."""
    return _authentication(_SASL_CONTINUE, data.encode())


def sasl_final(data: str) -> bytes:
    """`AuthenticationSASLFinal`."""
    return _authentication(_SASL_FINAL, data.encode())


def negotiate_protocol(options: Sequence[str]) -> bytes:
    """`NegotiateProtocolVersion`: 3.0 is the newest version supported, and these options are not recognized."""
    names = b"".join(map(_string, options))
    return message(b"v", struct.pack(">II", 3 << 16, len(options)) + names)


def parameters(values: Mapping[str, str]) -> bytes:
    """`ParameterStatus` for each."""
    return b"".join(message(b"S", _string(k) + _string(v)) for k, v in values.items())


def key_data(pid: int, secret: int) -> bytes:
    """`BackendKeyData`."""
    return message(b"K", struct.pack(">II", pid, secret))


def complete(tag: str) -> bytes:
    """`CommandComplete`."""
    return message(b"C", _string(tag))


def row(columns: Sequence[tuple[str, int]], values: Sequence[str | int | bytes | None]) -> bytes:
    """A result of one row: its description (name and type of each column), and the row in text form."""
    described = b"".join(
        _string(name) + _COLUMN.pack(0, 0, kind, _WIDTH[kind], -1, 0) for name, kind in columns
    )
    cells = b"".join(map(_cell, values))
    count = struct.pack(">H", len(columns))
    return message(b"T", count + described) + message(b"D", count + cells)


def keepalive(wal_end: Lsn, now_us: int, *, reply: bool) -> bytes:
    """A primary keepalive message in its `CopyData`."""
    return _KEEPALIVE.pack(
        ord("d"), 4 + _KEEPALIVE.size - 5, b"k", wal_end, now_us - POSTGRES_EPOCH, reply
    )


def put_xlog_header(buffer: bytearray, size: int, lsn: Lsn, wal_end: Lsn, now_us: int) -> None:
    """Write the head of `size` bytes of WAL at `lsn` into the first `XLOG_HEADER` bytes of `buffer`."""
    length = 4 + _XLOG.size - 5 + size
    _XLOG.pack_into(buffer, 0, ord("d"), length, b"w", lsn, wal_end, now_us - POSTGRES_EPOCH)


def _authentication(code: int, body: bytes) -> bytes:
    return message(b"R", struct.pack(">I", code) + body)


def _string(text: str) -> bytes:
    # A NUL would end the string early, and the rest would be read as other fields.
    return text.replace("\0", "").encode() + b"\0"


def _cell(value: str | int | bytes | None) -> bytes:
    if value is None:
        return struct.pack(">i", -1)
    raw = value if isinstance(value, bytes) else str(value).encode()
    return struct.pack(">i", len(raw)) + raw
