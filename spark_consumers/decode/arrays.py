r"""PostgreSQL's array text, many values at a time.

`{1,NULL,3}`, `{"a,b","say \"hi\"",NULL,"NULL"}` (PostgreSQL documentation, 8.15.6 "Array Input and
Output Syntax"): an element is quoted when it is empty, or holds braces, commas, quotes, backslashes or
white space, or reads NULL; a backslash in quotes takes the next byte as it is. An array of one dimension
that starts at 1 is a list; others carry more than a list can, and are refused.
"""

import numpy as np
import pyarrow as pa

from spark_consumers.decode.spans import Bools, Bytes, Int64s, contents, gather
from spark_consumers.decode.unrepresentable import UnrepresentableValueError

_OPEN, _CLOSE, _COMMA, _QUOTE, _ESCAPE = b'{},"\\'
_NULL = int.from_bytes(b"NULL", "little")


def elements(values: pa.Array) -> tuple[Int64s, pa.Array, Bools | None]:
    """Where each list starts among the elements (one more than lists), the elements' text, validity.

    Raises `UnrepresentableValueError`.
    """
    offsets, data, valid = contents(values)
    rows = np.arange(len(values)) if valid is None else np.flatnonzero(valid)
    firsts, ends = offsets[:-1][rows], offsets[1:][rows]
    _check_braces(data, rows, firsts, ends)
    outside, kept = _outside_quotes(data, rows, firsts, ends)

    opens = np.flatnonzero((data == _OPEN) & outside)
    closes = np.flatnonzero((data == _CLOSE) & outside)
    if len(opens) != len(rows) or len(closes) != len(rows):
        per_row = np.diff(np.searchsorted(opens, np.append(firsts, len(data))))
        odd = rows[per_row > 1]
        if len(odd):
            what = "an array of more than one dimension"
            raise UnrepresentableValueError(int(odd[0]), what, malformed=False)
        raise UnrepresentableValueError(int(rows[0]), "not an array", malformed=True)

    # Each element lies between two of `{ , }`; an empty array has a pair of braces and no element.
    commas = np.flatnonzero((data == _COMMA) & outside)
    filled = ends - firsts > 2
    starts = np.sort(np.concatenate([opens[filled], commas])) + 1
    stops = np.sort(np.concatenate([closes[filled], commas]))
    quoted = data[starts] == _QUOTE if len(starts) else np.zeros(0, np.bool_)

    counts = np.zeros(len(values) + 1, np.int64)
    counts[1:][rows] = np.diff(np.searchsorted(starts, np.append(firsts, len(data))))
    if kept is not None:
        # Quotes and escapes go; positions move with them.
        moved = np.concatenate([[0], np.cumsum(kept)])
        starts, stops, data = moved[starts], moved[stops], data[kept]
    null = ~quoted & (stops - starts == 4) & (_words(data, starts) == _NULL)
    sizes = np.where(null, 0, stops - starts)
    texts = gather(pa.py_buffer(data), starts, sizes, ~null, pa.string())
    return np.cumsum(counts), texts, valid


def _check_braces(data: Bytes, rows: Int64s, firsts: Int64s, ends: Int64s) -> None:
    short = rows[ends - firsts < 2]
    if len(short):
        raise UnrepresentableValueError(int(short[0]), "not an array", malformed=True)
    bounded = rows[data[firsts] == ord("[")]
    if len(bounded):
        what = "an array whose first index is not 1"
        raise UnrepresentableValueError(int(bounded[0]), what, malformed=False)
    bad = rows[(data[firsts] != _OPEN) | (data[ends - 1] != _CLOSE)]
    if len(bad):
        raise UnrepresentableValueError(int(bad[0]), "not an array", malformed=True)


def _outside_quotes(
    data: Bytes, rows: Int64s, firsts: Int64s, ends: Int64s
) -> tuple[Bools, Bools | None]:
    """Which bytes lie outside quotes, and which are left without quotes and escapes (None: all)."""
    quotes = data == _QUOTE
    if not quotes.any():
        return np.ones(len(data), np.bool_), None
    escapes = _escapes(data)
    if escapes is not None:
        quotes[1:] &= ~escapes[:-1]
    turns = np.cumsum(quotes)
    # Every value closes its quotes, so the parity carries over from one value to the next.
    odd = rows[(turns[ends - 1] - turns[firsts]) % 2 != 0]
    if len(odd):
        raise UnrepresentableValueError(
            int(odd[0]), "an array with an unterminated quote", malformed=True
        )
    outside = turns % 2 == 0
    return outside, ~quotes if escapes is None else ~quotes & ~escapes


def _escapes(data: Bytes) -> Bools | None:
    """Which bytes are backslashes that escape: the first, third, ... of a run of them."""
    slashes = data == _ESCAPE
    if not slashes.any():
        return None
    places = np.arange(len(data))
    before = np.maximum.accumulate(np.where(slashes, -1, places))
    return np.asarray(slashes & ((places - before) % 2 == 1))


def _words(data: Bytes, starts: Int64s) -> Int64s:
    """Four bytes from each start as one number; past the end of the data, zeros."""
    if not len(starts):
        return np.zeros(0, np.int64)
    padded = np.concatenate([data, np.zeros(4, np.uint8)])
    words = np.ndarray((len(padded) - 3,), "<u4", padded, strides=(1,))
    return words[starts].astype(np.int64)
