"""Rows as small integers: equal rows get equal codes, so that numpy can group, sort and match them.

Equal means *the same value in the same representation*, as PostgreSQL's own test for a changed key does:
0.0 and -0.0 differ, NaN equals NaN, NULL equals NULL.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Int64s = npt.NDArray[np.int64]


def row_codes(sets: Sequence[Sequence[pa.Array]]) -> list[Int64s]:
    """For each set of rows (given as its columns, the same types in every set), one code a row.

    Codes are dense from 0 over all sets together.
    """
    lengths = [len(columns[0]) for columns in sets]
    codes = np.zeros(sum(lengths), np.int64)
    for parts in zip(*sets, strict=True):
        column = _codes(pa.concat_arrays(list(parts)))
        # Both factors are at most the number of rows, so the product fits in 64 bits.
        codes = codes * (int(column.max(initial=0)) + 1) + column
        codes = np.unique(codes, return_inverse=True)[1].astype(np.int64, copy=False)
    return np.split(codes, np.cumsum(lengths)[:-1])


def _codes(array: pa.Array) -> Int64s:
    if pa.types.is_floating(array.type):
        bits = pa.int64() if pa.types.is_float64(array.type) else pa.int32()
        array = array.view(bits)
    elif pa.types.is_nested(array.type):
        # Arrow does not hash lists. Their text is as good: each value has one.
        array = pa.array([None if v is None else repr(v) for v in array.to_pylist()], pa.string())
    indices = pc.dictionary_encode(array).indices
    return np.asarray(pc.fill_null(indices.cast(pa.int64()), -1)) + 1


def take(array: pa.Array, rows: Int64s) -> pa.Array:
    """`array` at `rows`; NULL where a row is negative."""
    missing = rows < 0
    if missing.any():
        return array.take(pa.array(rows, mask=missing))
    return array.take(pa.array(rows))
