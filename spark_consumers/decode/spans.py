"""Spans of one byte buffer as an Arrow array, gathered at the speed of memcpy.

A span is (start, length) in bytes. Spans come in rising order and do not overlap; that is how rows lie
in a change log, and it is what lets Arrow's own `take` do the copying.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Bytes: TypeAlias = npt.NDArray[np.uint8]

#: Arrow's string and binary arrays address their bytes with 32 bits.
MAX_BUFFER = 2**31 - 64


def validity(valid: Bools | None) -> pa.Buffer | None:
    """Arrow's validity bitmap, or None when everything is valid."""
    if valid is None or valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def of_numbers(values: np.ndarray) -> pa.Array:
    """Numbers as an Arrow array over the same memory.

    `pa.array` would do, but it imports pandas when it is first called: a second of each new worker.
    """
    plain = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(plain.dtype)
    return pa.Array.from_buffers(kind, len(plain), [None, pa.py_buffer(plain)])


def of_texts(texts: Sequence[str]) -> pa.Array:
    """A few texts as an Arrow array; `of_numbers` says why not `pa.array`."""
    raw = [text.encode("utf-8", "surrogateescape") for text in texts]
    ends = np.cumsum([0, *map(len, raw)]).astype(np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(raw))]
    return pa.Array.from_buffers(pa.string(), len(raw), buffers)


def gather(
    buffer: pa.Buffer, starts: Int64s, lengths: Int64s, valid: Bools | None, kind: pa.DataType
) -> pa.Array:
    """The spans as an array of `kind` (`pa.string()` or `pa.binary()`); NULL where not `valid`.

    A string array is not checked to be UTF-8 here. `buffer` is at most `MAX_BUFFER` bytes.
    """
    count = len(starts)
    if count == 0:
        return pa.nulls(0, kind)
    # Every second slot of this array is a wanted span, the others are what lies between.
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[0:-1:2] = starts
    np.add(starts, lengths, out=offsets[1::2], casting="unsafe")
    offsets[-1] = offsets[-2]
    both = pa.Array.from_buffers(kind, 2 * count, [None, pa.py_buffer(offsets), buffer])
    taken = both.take(of_numbers(np.arange(0, 2 * count, 2, dtype=np.int32)))
    bitmap = validity(valid)
    if bitmap is None:
        return taken
    return pa.Array.from_buffers(kind, count, [bitmap, *taken.buffers()[1:]])


def contents(values: pa.Array) -> tuple[Int64s, Bytes, Bools | None]:
    """Offsets (from 0), bytes and validity (None: all valid) of a string or binary array.

    A NULL takes no bytes in arrays that come from `gather`; for others that is made so first.
    """
    count = len(values)
    if count == 0:
        return np.zeros(1, np.int64), np.empty(0, np.uint8), None
    buffers = values.buffers()
    valid = None
    if values.null_count:
        bits = np.unpackbits(np.frombuffer(buffers[0], np.uint8), bitorder="little")
        valid = bits[values.offset : values.offset + count].astype(np.bool_)
    raw = np.frombuffer(buffers[1], np.int32, count + 1, values.offset * 4).astype(np.int64)
    if valid is not None and (np.diff(raw)[~valid] != 0).any():
        nothing = "" if pa.types.is_string(values.type) else b""
        return (*contents(values.fill_null(nothing))[:2], valid)
    data = np.frombuffer(buffers[2], np.uint8) if buffers[2] else np.empty(0, np.uint8)
    return raw - raw[0], data[raw[0] : raw[-1]], valid
