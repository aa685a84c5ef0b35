"""Where each message of a payload is: (u32 little-endian length + message), repeated.

Each length tells where the next one is, so this is the one step of the decoder that cannot be done for
all messages at once; a loop in Python took half of the decoder's time. Apache Parquet keeps byte arrays in
just this form (its PLAIN encoding of BYTE_ARRAY, parquet-format, Encodings.md), and Arrow's reader of it
is C++ that trusts nothing it reads. So the payload is given to it as a Parquet file: one column, one row
group, one data page, and the few bytes of headers that say so (Thrift's compact protocol).

Invariant: every message comes out, in order, or there is an error.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark_consumers.decode.spans import MAX_BUFFER, Int64s
from walsender_bridge.errors import MalformedMessageError

_MAGIC = b"PAR1"
_BYTE_ARRAY, _PLAIN, _RLE, _UNCOMPRESSED, _REQUIRED = 6, 0, 3, 0, 0


def split(parts: Sequence[bytes], count: int) -> tuple[pa.Buffer, Int64s]:
    """The `count` messages of the parts, end to end without their lengths, and where each starts and ends.

    The positions are `count + 1`, the first is 0. Raises `MalformedMessageError` unless the messages fill
    the parts exactly.
    """
    size = sum(map(len, parts))
    if size > MAX_BUFFER:
        raise malformed(f"{size} bytes in one run of entries")
    if not 0 < count * 5 <= size:
        # Before memory is allocated for so many.
        raise malformed(f"{count} messages in {size} bytes")
    source = pa.BufferReader(b"".join(_file(parts, size, count)))
    try:
        found = pq.ParquetFile(source, pre_buffer=False).read(use_threads=False).column(0)
    except (pa.ArrowException, OSError) as error:
        raise malformed(f"message lengths do not match the payload: {error}"[:200]) from None
    if len(found) != count or found.num_chunks != 1:
        raise malformed(f"expected {count} messages, found {len(found)}")
    _, ends, messages = found.chunk(0).buffers()
    positions = np.frombuffer(ends, np.int32, count + 1).astype(np.int64)
    if positions[-1] + 4 * count != size:
        raise malformed(f"{count} messages are {positions[-1] + 4 * count} bytes of {size}")
    if not np.diff(positions).all():
        raise malformed("a message is empty")
    return messages, positions


def malformed(what: str) -> MalformedMessageError:
    """Bytes that are not pgoutput."""
    return MalformedMessageError(
        what,
        where="pgoutput",
        repair="check which program wrote the log, and the log server's disk",
    )


def _file(parts: Sequence[bytes], size: int, count: int) -> list[bytes]:
    """A Parquet file of one column whose one page is the parts (parquet.thrift has the fields' numbers)."""
    in_page = _struct((1, count), (2, _PLAIN), (3, _RLE), (4, _RLE))
    header = _struct((1, 0), (2, size), (3, size), (5, in_page))
    page = len(header) + size
    name = _text(b"m")
    column = _struct(
        *((1, _BYTE_ARRAY), (2, _list(_INT32, [_number(_PLAIN)])), (3, _list(_BINARY, [name]))),
        *((4, _UNCOMPRESSED), (5, _Long(count)), (6, _Long(page)), (7, _Long(page))),
        (9, _Long(len(_MAGIC))),
    )
    chunk = _struct((2, _Long(len(_MAGIC))), (3, column))
    group = _struct((1, _list(_STRUCT, [chunk])), (2, _Long(page)), (3, _Long(count)))
    schema = [
        _struct((4, name), (5, 1)),
        _struct((1, _BYTE_ARRAY), (3, _REQUIRED), (4, name)),
    ]
    footer = _struct(
        (1, 2), (2, _list(_STRUCT, schema)), (3, _Long(count)), (4, _list(_STRUCT, [group]))
    )
    return [_MAGIC, header, *parts, footer, len(footer).to_bytes(4, "little"), _MAGIC]


# -- Thrift's compact protocol, as far as the headers need it ----------------------------------------

_INT32, _INT64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12


class _Long(int):
    """A number that Thrift declares with 64 bits."""


class _Text(bytes):
    """A text with its length before it."""


class _List(bytes):
    """A list with its size and its items' type before it."""


_KINDS = {int: _INT32, _Long: _INT64, _Text: _BINARY, _List: _LIST, bytes: _STRUCT}


def _struct(*fields: tuple[int, int | bytes]) -> bytes:
    """Fields by number, rising: a byte of (step from the last one, type), and the value; then a zero."""
    found, last = bytearray(), 0
    for number, value in fields:
        kind = _KINDS[type(value)]
        found.append((number - last) << 4 | kind)
        found += _number(value) if isinstance(value, int) else value
        last = number
    return bytes(found) + b"\0"


def _number(value: int) -> bytes:
    """A signed number as zigzag in groups of seven bits; none here is negative."""
    return _varint(value << 1)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _text(value: bytes) -> _Text:
    return _Text(_varint(len(value)) + value)


def _list(kind: int, items: Sequence[bytes]) -> _List:
    """A short list: fewer than 15 items."""
    return _List(bytes([len(items) << 4 | kind]) + b"".join(items))
