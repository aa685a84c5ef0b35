"""Keys and rows as 128-bit digests, by which the index finds them.

Equal means what it means for a fold (`fold.row_codes`): the same value in the same representation. NULL equals NULL, NaN
equals NaN, 0.0 and -0.0 differ.

- A key of at most 16 bytes (any one number, date or moment; two `bigint`) is permuted: two such keys never have one digest.
- Everything else, and any row of a table without a key, is hashed by BLAKE2b, so nobody can choose two values of one digest.
  Of n distinct values two are equal with a probability below n^2 / 2^129: 2e-15 for 10^12 rows. Of a row, NULLs are left
  out: rows that were written before a column was added have the digest that they have with it.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

_BYTES = 16
_FIELD = struct.Struct("<HI")
_EMPTY = pa.scalar(b"", pa.large_binary())
_ROUNDS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7, 0xABC98388FB8FAC03)


@dataclass(frozen=True, slots=True)
class Digests:
    """The upper and the lower half of each digest."""

    high: UInt64s
    low: UInt64s

    def __len__(self) -> int:
        return len(self.high)

    def take(self, rows: Int64s) -> "Digests":
        """Those at `rows`."""
        return Digests(self.high[rows], self.low[rows])

    def order(self) -> Int64s:
        """The rows in ascending order of their digests; of equal ones, the earlier first."""
        # Twice as fast as a stable sort, and the same where no two are equal.
        order = np.argsort(self.high)
        sorted_high = self.high[order]
        if (sorted_high[1:] == sorted_high[:-1]).any():
            order = np.lexsort((self.low, self.high))
        return order


def together(parts: Sequence[Digests]) -> Digests:
    """The digests of all of them, one behind the other."""
    return Digests(np.concatenate([p.high for p in parts]), np.concatenate([p.low for p in parts]))


def key_digests(columns: Sequence[pa.Array], types: Sequence[pa.DataType]) -> Digests:
    """The digests of keys, given as their columns, which are compared as these types."""
    cast = _cast(columns, types)
    widths = [_width(kind) for kind in types]
    if None in widths or sum(w for w in widths if w) > _BYTES:
        return _hashed(cast)
    packed = np.zeros((len(cast[0]), _BYTES), np.uint8)
    at = 0
    for column in cast:
        raw = _raw(column)
        packed[:, at : at + raw.shape[1]] = raw
        at += raw.shape[1]
    halves = packed.view("<u8")
    found = _permuted(halves[:, 0].copy(), halves[:, 1].copy())
    with_null = np.flatnonzero(np.logical_or.reduce([np.asarray(c.is_null()) for c in cast]))
    if len(with_null):
        rows = pa.array(with_null)
        hashed = _hashed([column.take(rows) for column in cast])
        found.high[with_null], found.low[with_null] = hashed.high, hashed.low
    return found


def row_digests(columns: Sequence[pa.Array], types: Sequence[pa.DataType]) -> Digests:
    """The digests of whole rows."""
    return _hashed(_cast(columns, types))


def _cast(columns: Sequence[pa.Array], types: Sequence[pa.DataType]) -> list[pa.Array]:
    pairs = zip(columns, types, strict=True)
    # A list's type also has the number of its elements' column.
    return [c if c.type == t or pa.types.is_nested(t) else c.cast(t) for c, t in pairs]


def _width(kind: pa.DataType) -> int | None:
    """Bytes of a value; None: they differ."""
    if pa.types.is_boolean(kind):
        return 1
    try:
        return int(kind.bit_width) // 8
    except ValueError:
        return None


def _raw(column: pa.Array) -> npt.NDArray[np.uint8]:
    """The bytes of each value, whatever they are for NULL."""
    if pa.types.is_boolean(column.type):
        return np.asarray(column.fill_null(False)).astype(np.uint8)[:, None]
    width = _width(column.type)
    assert width is not None
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return np.zeros((len(column), width), np.uint8)
    raw = np.frombuffer(buffer, np.uint8, len(column) * width, column.offset * width)
    if pa.types.is_floating(column.type):
        values = raw.view(f"<f{width}")
        raw = np.where(np.isnan(values), np.array(np.nan, values.dtype), values).view(np.uint8)
    return raw.reshape(len(column), width)


def _permuted(high: UInt64s, low: UInt64s) -> Digests:
    """A Feistel network over both halves: each of its rounds can be undone, so no two inputs have one result."""
    for number, key in enumerate(_ROUNDS):
        if number % 2:
            low ^= _mixed(high, key)
        else:
            high ^= _mixed(low, key)
    return Digests(high, low)


def _mixed(half: UInt64s, key: int) -> UInt64s:
    mixed = half + np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _hashed(columns: Sequence[pa.Array]) -> Digests:
    framed = [part for number, column in enumerate(columns) for part in _framed(number, column)]
    # Arrow puts the bytes of each row together. NULLs are skipped; a row without any value needs one that is not NULL; the
    # last argument is the separator.
    nothing = pa.repeat(_EMPTY, len(columns[0]))
    rows = pc.binary_join_element_wise(nothing, *framed, _EMPTY, null_handling="skip")
    _, bounds, content = rows.buffers()
    whole = memoryview(content or b"")
    at = np.frombuffer(bounds, np.int64, len(rows) + 1, rows.offset * 8).tolist()
    made = b"".join([blake2b(whole[i:j], digest_size=_BYTES).digest() for i, j in pairwise(at)])
    halves = np.frombuffer(made, ">u8").reshape(-1, 2)
    return Digests(halves[:, 0].astype(np.uint64), halves[:, 1].astype(np.uint64))


def _framed(number: int, column: pa.Array) -> list[pa.Array]:
    """Arrays of bytes that together have each value with the number of its column and its length before it; NULL for NULL."""
    width = _width(column.type)
    if width is not None:
        head = np.frombuffer(_FIELD.pack(number, width), np.uint8)
        return [_bytes_of(head, _raw(column), column)]
    if pa.types.is_nested(column.type):
        texts = [None if v is None else repr(v).encode() for v in column.to_pylist()]
        values = pa.array(texts, _EMPTY.type)
    else:
        values = column.cast(pa.binary()).cast(_EMPTY.type)
    lengths = np.asarray(pc.binary_length(values).fill_null(0)).astype("<u4")
    head = np.frombuffer(struct.pack("<H", number), np.uint8)
    return [_bytes_of(head, lengths.view(np.uint8).reshape(-1, 4), values), values]


def _bytes_of(
    left: npt.NDArray[np.uint8], right: npt.NDArray[np.uint8], like: pa.Array
) -> pa.Array:
    """An array with the bytes of each row of `right` behind those of `left`; NULL where `like` is."""
    both = np.empty((len(right), len(left) + right.shape[1]), np.uint8)
    both[:, : len(left)], both[:, len(left) :] = left, right
    bounds = np.arange(len(both) + 1, dtype=np.int64) * both.shape[1]
    valid = pa.array(np.asarray(like.is_valid())).buffers()[1] if like.null_count else None
    buffers = [valid, pa.py_buffer(bounds), pa.py_buffer(both)]
    return pa.Array.from_buffers(_EMPTY.type, len(both), buffers)
