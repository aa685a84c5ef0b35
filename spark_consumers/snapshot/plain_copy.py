"""Reads a COPY from the socket of a connection that is not encrypted, past libpq.

libpq has a call, and memory of its own, for every row, and a driver above it one for every value. Here the socket is read into
one buffer, a few megabytes at a time, and the rows in it are converted a column at a time (`decode.copy_rows`).

libpq connects and authenticates, and it takes all commands but the COPY. It never learns of that one: the query goes to the
socket, and everything up to the server's ReadyForQuery is read from there. In between, libpq is idle and reads nothing.
With TLS or GSS encryption only libpq can read what arrives (`driver_copy`).
"""

import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import psycopg
import pyarrow as pa

from spark_consumers.decode.copy_rows import (
    PADDING,
    columns_of,
    malformed,
    row_after_header,
    rows_in,
)
from spark_consumers.decode.spans import Bytes, Int64s
from spark_consumers.snapshot.exported import failure, reader_conninfo
from walsender_bridge.postgres.client.replication_connection import describe
from walsender_bridge.runtime.closing import Closing
from walsender_bridge.runtime.sql import load

#: Bytes that are converted at once, or one row: more of them leave the processor's caches.
_BUFFER: Final = 4 << 20
#: Milliseconds without a byte after which what there is is converted.
_QUIET_MS: Final = 1000
#: The first version with GSS encryption.
_GSS: Final = 120000
#: Kind and length of the message with which a server says that it waits for a command, without its last byte.
_READY: Final = b"Z\0\0\0\5"


class PlainCopy(Closing):
    """A session that reads a snapshot. Made by `connect`; not for several threads. Raises psycopg's errors, `OSError`."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]], where: str) -> None:
        self._connection = connection
        self._where = where
        self._socket = socket.socket(fileno=os.dup(connection.pgconn.socket))
        self._socket.setblocking(False)

    @classmethod
    def connect(cls, dsn: str) -> "PlainCopy | None":
        """Connect; None if the connection is encrypted."""
        connection = psycopg.connect(reader_conninfo(dsn))
        try:
            if _is_encrypted(connection):
                connection.close()
                return None
            return cls(connection, describe(dsn))
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """End the session."""
        self._socket.close()
        self._connection.close()

    def run(self, script: str) -> None:
        """Run statements that return nothing, in the session's transaction."""
        self._connection.execute(script.encode())

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        return self._connection.execute(query.encode()).fetchall()

    def batches(self, query: str, oids: Sequence[int | None]) -> Iterator[pa.RecordBatch]:
        """The rows of a query, whose columns are read as `columns_of` says. Raises `TusklineError` for what the server refuses."""
        self._send(b"COPY (" + query.encode() + b") TO STDOUT (FORMAT binary)")
        names = [str(i) for i in range(len(oids))]
        buffer, end, is_over = np.zeros(_BUFFER + PADDING, np.uint8), 0, False
        while not is_over:
            end = self._receive(buffer, end)
            spans, at, is_over = self._messages(buffer, end, len(oids))
            starts, ends = (np.concatenate(each) for each in zip(*spans, strict=True))
            if len(starts):
                arrays = columns_of(buffer, starts, ends, oids)
                yield pa.RecordBatch.from_arrays(arrays, names)
            buffer, end = _rest(buffer, at, end)

    def _send(self, query: bytes) -> None:
        left = memoryview(b"Q" + struct.pack(">I", len(query) + 5) + query + b"\0")
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while left:
            poll.poll()
            left = left[self._socket.send(left) :]

    def _receive(self, buffer: Bytes, end: int) -> int:
        """Fill the buffer from `end` on, until the server waits for a command or is quiet; the new end."""
        memory = buffer[:-PADDING].data
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while end < len(memory):
            try:
                count = self._socket.recv_into(memory[end:])
            except BlockingIOError:
                if not poll.poll(_QUIET_MS):
                    break
                continue
            if not count:
                raise OSError("server closed the connection unexpectedly")
            end += count
            if buffer[max(0, end - 6) : end - 1].tobytes() == _READY:
                break
        return end

    def _messages(
        self, buffer: Bytes, end: int, columns: int
    ) -> tuple[list[tuple[Int64s, Int64s]], int, bool]:
        """Where the rows start and end in the buffer, how far it was read, and whether the COPY is over."""
        nothing = np.zeros(0, np.int64)
        spans, at = [(nothing, nothing)], 0
        while True:
            found = rows_in(buffer, at, end, columns)
            spans.append((found.starts, found.ends))
            at = found.stop
            if end - at < 5:
                return spans, at, False
            kind, size = _head(buffer, at)
            if end - at < size:
                return spans, at, False
            body = buffer[at + 5 : at + size]
            if kind == b"Z":
                return spans, at + size, True
            if kind == b"d":
                if (row := row_after_header(body)) is not None:
                    spans.append((np.array([at + 5 + row]), np.array([at + size])))
            elif kind == b"E":
                raise _refused(body.tobytes(), self._where)
            elif kind not in b"HcCNSA":
                raise malformed(f"a message of kind {kind!r}")
            at += size


def _is_encrypted(connection: psycopg.Connection[tuple[Any, ...]]) -> bool:
    if connection.pgconn.ssl_in_use:
        return True
    if connection.info.server_version < _GSS:
        return False
    (found,) = connection.execute(load("snapshot/gss_encrypted")).fetchone() or (True,)
    connection.rollback()
    return bool(found)


def _head(buffer: Bytes, at: int) -> tuple[bytes, int]:
    """Kind and size of the message at `at`."""
    kind, size = struct.unpack_from(">ci", buffer.data, at)
    if size < 4:
        raise malformed(f"a message of {size} bytes")
    return kind, size + 1


def _rest(buffer: Bytes, at: int, end: int) -> tuple[Bytes, int]:
    """A buffer that begins with what is left in this one, and has room for all of its first message."""
    left = end - at
    size = _BUFFER
    if left >= 5:
        size = max(size, _head(buffer, at)[1] + 1)
    if len(buffer) != size + PADDING:
        made = np.zeros(size + PADDING, np.uint8)
        made[:left] = buffer[at:end]
        return made, left
    buffer[:left] = buffer[at:end].copy()
    return buffer, left


def _refused(body: bytes, where: str) -> Exception:
    """The error that an ErrorResponse stands for."""
    fields = {part[:1]: part[1:].decode("utf-8", "replace") for part in body.split(b"\0") if part}
    text = f"{fields.get(b'S', 'ERROR')}: {fields.get(b'M', '')}"
    return failure(fields.get(b"C"), text, where)
