"""Iceberg's partition transforms of whole columns (Iceberg specification, Partition Transforms).

NULL stays NULL. What a transform gives has the type that Iceberg's partitions have: `day` a date, the other times and
`bucket` a number, `truncate` and `identity` the column's own.
"""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_consumers.lake.layout import murmur3
from walsender_bridge.errors import NotSupportedError
from walsender_bridge.postgres.table_layout import IDENTITY, TIMES

_MICROS_OF_HOUR = 3_600_000_000


def applies(transform: str, kind: pa.DataType) -> bool:
    """Whether the transform can be applied to a column of this type of the data files."""
    is_whole: bool = pa.types.is_integer(kind) or pa.types.is_decimal(kind)
    is_text: bool = pa.types.is_string(kind) or pa.types.is_binary(kind)
    is_time: bool = pa.types.is_date(kind) or pa.types.is_timestamp(kind)
    if transform == "truncate":
        return is_whole or is_text
    if transform == "hour":
        return bool(pa.types.is_timestamp(kind))
    if transform in TIMES:
        return is_time
    # Of floating-point numbers, equal ones differ in their bytes.
    return is_whole or is_text or is_time or (transform == IDENTITY and pa.types.is_boolean(kind))


def applied(transform: str, number: int | None, column: pa.Array) -> pa.Array:
    """The transform of each value; the column has the type of the data files, and `applies` says that it can be.

    Raises `NotSupportedError` for a number whose truncation is not of its type.
    """
    if transform == IDENTITY:
        return column
    if transform == "bucket":
        assert number is not None
        return _buckets(column, number)
    if transform == "truncate":
        assert number is not None
        return _truncated(column, number)
    return _times(column, transform)


def _buckets(column: pa.Array, count: int) -> pa.Array:
    there = np.flatnonzero(np.asarray(pc.is_valid(column)))
    values = column.take(pa.array(there))
    found = np.zeros(len(column), np.int32)
    found[there] = (_hashes(values) & np.int32(2**31 - 1)) % np.int32(count)
    return pa.array(found, mask=np.asarray(pc.is_null(column)))


def _hashes(values: pa.Array) -> murmur3.Int32s:
    kind = values.type
    if pa.types.is_decimal(kind):
        unscaled = [_minimal(_unscaled(v)) for v in values.to_pylist()]
        return murmur3.of_bytes(pa.array(unscaled, pa.large_binary()))
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        # Text has no cast to large bytes.
        return murmur3.of_bytes(values.cast(pa.binary()).cast(pa.large_binary()))
    return murmur3.of_longs(_longs(values))


def _minimal(value: int) -> bytes:
    """A number in two's complement, the highest byte first, in as few bytes as it needs."""
    return value.to_bytes(
        (value if value >= 0 else ~value).bit_length() // 8 + 1, "big", signed=True
    )


def _longs(values: pa.Array) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Numbers, days or microseconds, without NULL."""
    if pa.types.is_date(values.type):
        values = values.cast(pa.int32())
    return np.asarray(values.cast(pa.int64())).astype(np.int64)


def _truncated(column: pa.Array, width: int) -> pa.Array:
    kind = column.type
    if pa.types.is_string(kind):
        return pc.utf8_slice_codeunits(column, 0, width)
    if pa.types.is_binary(kind):
        return pc.binary_slice(column, 0, width)
    if pa.types.is_decimal(kind):
        made = [None if v is None else _cut(v, kind.scale, width) for v in column.to_pylist()]
        try:
            return pa.array(made, kind)
        except pa.ArrowInvalid:
            raise _beyond(width, kind) from None
    values = np.asarray(column.fill_null(0))
    with np.errstate(over="ignore"):
        found = values - values % values.dtype.type(width)
    if (found > values).any():
        raise _beyond(width, kind)
    return pa.array(found, kind, mask=np.asarray(pc.is_null(column)))


def _beyond(width: int, kind: pa.DataType) -> NotSupportedError:
    """Of a number near the least one of its type. Iceberg's own writer takes the greatest one for it, or fails; readers then miss rows."""
    return NotSupportedError(
        f"a number near the least {kind} has no partition: truncate({width}, ...) of it is not of that type",
        repair="choose another partition for the table in [[lake.tables]], start `lake run` again, and tuskline table resume",
    )


def _cut(value: Decimal, scale: int, width: int) -> Decimal:
    unscaled = _unscaled(value)
    return Decimal(f"{unscaled - unscaled % width}E{-scale}")


def _unscaled(value: Decimal) -> int:
    """All digits as a number. Arithmetic with decimals would round to 28 of them."""
    sign, digits, _ = value.as_tuple()
    found = int("".join(map(str, digits)))
    return -found if sign else found


def _times(column: pa.Array, transform: str) -> pa.Array:
    mask = np.asarray(pc.is_null(column))
    values = np.zeros(len(column), np.int64)
    values[~mask] = _longs(column.drop_null())
    if transform == "hour":
        return pa.array((values // _MICROS_OF_HOUR).astype(np.int32), mask=mask)
    days = values if pa.types.is_date(column.type) else values // (24 * _MICROS_OF_HOUR)
    if transform == "day":
        return pa.array(days.astype(np.int32), mask=mask).cast(pa.date32())
    unit = "datetime64[M]" if transform == "month" else "datetime64[Y]"
    found = days.astype("datetime64[D]").astype(unit).astype(np.int64)
    return pa.array(found.astype(np.int32), mask=mask)
