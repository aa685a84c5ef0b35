"""The rows of a COPY in PostgreSQL's binary format as Arrow arrays, a column at a time. Pure.

Formats: PostgreSQL documentation, "Message Formats" (CopyData) and "COPY", Binary Format. A server sends each row in one
CopyData message, the header before the first row, and the trailer in a message of its own. Each length tells where the next
message is, which numpy cannot follow for all at once. So all places that look like the beginning of a row are found first;
each is then checked to be where the one before it ends, and what is not in that chain was a part of a value.

Safety: bytes are never trusted. Every position lies within the row's message before it is read, the buffer goes on for
`PADDING` bytes, and a row has to fill its message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from spark_consumers.decode import types
from spark_consumers.decode.spans import Bools, Bytes, Int64s, gather, validity
from spark_consumers.decode.tuple_scan import numbers
from walsender_bridge.errors import MalformedMessageError

#: Zero bytes that must follow what is read.
PADDING: Final = 16
#: Bytes of a CopyData message before what it holds: `d`, and its length, which counts itself.
_HEAD: Final = 5
_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
_TRAILER: Final = b"\xff\xff"
#: What follows the signature: flags, and the length of an extension.
_FLAGS: Final = 8
#: 2000-01-01, from which PostgreSQL counts, in days and microseconds since 1970.
_DAYS: Final = 10957
_MICROSECONDS: Final = _DAYS * 86_400_000_000

#: How the types that are read in binary form are laid out.
_FIXED: Final = {
    types.INT2: ">i2",
    types.INT4: ">i4",
    types.INT8: ">i8",
    types.FLOAT4: ">f4",
    types.FLOAT8: ">f8",
    types.DATE: ">i4",
    types.TIMESTAMP: ">i8",
    types.TIMESTAMPTZ: ">i8",
    types.BOOL: "u1",
}
_EPOCHS: Final = {
    types.DATE: _DAYS,
    types.TIMESTAMP: _MICROSECONDS,
    types.TIMESTAMPTZ: _MICROSECONDS,
}


@dataclass(frozen=True, slots=True)
class Messages:
    """Whole messages at the beginning of a buffer: where rows start and end, and where reading stopped.

    `stop`: the first byte that is in none of them: of a message that is no row, or of one that is not whole.
    """

    starts: Int64s
    ends: Int64s
    stop: int


def rows_in(buffer: Bytes, begin: int, end: int, columns: int) -> Messages:
    """The messages from `begin` on that have one row of so many columns each. `end`: of what was received.

    It stops before a message of 16 MiB or more, too, whose length does not begin with a zero: text has no zeros, but many a `d`.
    """
    last_head = max(begin, end - _HEAD - 1)
    is_head = (buffer[begin:last_head] == ord("d")) & (buffer[begin + 1 : last_head + 1] == 0)
    heads = np.flatnonzero(is_head) + begin
    heads = heads[numbers(buffer, ">u2")[heads + _HEAD] == columns]
    after = heads + 1 + numbers(buffer, ">i4")[heads + 1]
    breaks = np.flatnonzero(after[:-1] != heads[1:])
    parts: list[Int64s] = []
    at, stop = 0, begin
    while at < len(heads) and heads[at] == stop:
        # Up to the next break, each begins where the one before it ends.
        nearest = int(np.searchsorted(breaks, at))
        last = int(breaks[nearest]) if nearest < len(breaks) else len(heads) - 1
        if after[last] > end:
            last -= 1
        if last < at or after[last] < heads[last] + _HEAD + 2:
            break
        parts.append(np.arange(at, last + 1))
        stop = int(after[last])
        at = int(np.searchsorted(heads, stop))
    chosen = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return Messages(heads[chosen] + _HEAD, after[chosen], stop)


def row_after_header(body: Bytes) -> int | None:
    """Where the row of a CopyData message begins: after the header, if it has that; None: there is no row.

    Raises `MalformedMessageError`.
    """
    begin, head = 0, body[: len(_SIGNATURE) + _FLAGS].tobytes()
    if head.startswith(_SIGNATURE):
        flags, extension = head[len(_SIGNATURE) : -4], head[-4:]
        if len(head) < len(_SIGNATURE) + _FLAGS or any(flags):
            raise malformed("its header has flags that are unknown")
        begin = len(head) + int.from_bytes(extension, "big")
    # Without rows, header and trailer come together.
    left = body[begin : begin + len(_TRAILER) + 1].tobytes()
    return None if left in {b"", _TRAILER} else begin


def columns_of(
    buffer: Bytes, starts: Int64s, ends: Int64s, oids: Sequence[int | None]
) -> list[pa.Array]:
    """The rows that begin at `starts` and end at `ends`, as one array for each column.

    `oids`: of the type of each column that is in binary form; None: a text. Dates and times may have any value of their Arrow
    type: `infinity` is outside of every year that PostgreSQL has. A text is not checked to be UTF-8. Raises `MalformedMessageError`.
    """
    if len(starts) and (
        (starts + 2 > ends).any() or (numbers(buffer, ">u2")[starts] != len(oids)).any()
    ):
        raise malformed(f"a row does not have {len(oids)} columns")
    words, memory = numbers(buffer, ">i4"), pa.py_buffer(buffer)
    here, found = starts + 2, []
    for oid in oids:
        if (here + 4 > ends).any():
            raise malformed("a row is truncated")
        lengths = words[here].astype(np.int64)
        valid: Bools | None = None
        if len(lengths) and lengths.min() < 0:
            valid = lengths >= 0
            if (lengths[~valid] != -1).any():
                raise malformed("a value has a negative length")
            lengths[~valid] = 0
        begins = here + 4
        here = begins + lengths
        if (here > ends).any():
            raise malformed("a value extends beyond its row")
        layout = None if oid is None else _FIXED.get(oid)
        if layout is None:
            kind = pa.binary() if oid == types.BYTEA else pa.string()
            found.append(gather(memory, begins, lengths, valid, kind))
        else:
            assert oid is not None
            width = np.dtype(layout).itemsize
            if ((lengths if valid is None else lengths[valid]) != width).any():
                raise malformed(f"a value of type OID {oid} does not have {width} bytes")
            found.append(_fixed(numbers(buffer, layout)[begins], valid, oid))
    if (here != ends).any():
        raise malformed("a row does not end where its message does")
    return found


def _fixed(raw: np.ndarray, valid: Bools | None, oid: int) -> pa.Array:
    """Numbers as PostgreSQL sends them, as the Arrow type of `oid`; NULL where not `valid`."""
    kind = types.column_type(oid, -1).arrow
    if oid == types.BOOL:
        values = np.packbits(raw != 0, bitorder="little")
    else:
        values = raw.astype(raw.dtype.newbyteorder("="))
        if oid in _EPOCHS:
            # Infinity wraps around, and stays outside of every year.
            values += values.dtype.type(_EPOCHS[oid])
    return pa.Array.from_buffers(kind, len(raw), [validity(valid), pa.py_buffer(values)])


def malformed(what: str) -> MalformedMessageError:
    """Bytes that are no COPY in binary format."""
    return MalformedMessageError(
        f"unexpected bytes in a COPY: {what}",
        where="COPY",
        repair="check what is between here and the server: a pooler, or a proxy",
    )
