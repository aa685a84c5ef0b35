"""Partition values as Iceberg's JSON (Iceberg specification, JSON single-value serialization)."""

from typing import Any

import numpy as np
import pyarrow as pa

_MICROS_OF_DAY = 86_400_000_000
#: That is written without a sign.
_LAST_YEAR = 9999


def json_value(value: pa.Scalar) -> Any:
    """The value in JSON; None for NULL."""
    kind = value.type
    if not value.is_valid:
        return None
    if pa.types.is_date(kind):
        return _date(value.value)
    if pa.types.is_timestamp(kind):
        days, micros = divmod(value.value, _MICROS_OF_DAY)
        seconds, micros = divmod(micros, 1_000_000)
        hour, minute, second = seconds // 3600, seconds // 60 % 60, seconds % 60
        zone = "+00:00" if kind.tz else ""
        return f"{_date(days)}T{hour:02}:{minute:02}:{second:02}.{micros:06}{zone}"
    if pa.types.is_decimal(kind):
        return f"{value.as_py():f}"
    if pa.types.is_binary(kind):
        return value.as_py().hex().upper()
    return value.as_py()


def _date(days: int) -> str:
    """A day, which may be in any year: of four digits, or with a sign."""
    year, month, day = str(np.datetime64(days, "D")).rsplit("-", 2)
    number = int(year)
    sign = "-" if number < 0 else "+" if number > _LAST_YEAR else ""
    return f"{sign}{abs(number):04}-{month}-{day}"
