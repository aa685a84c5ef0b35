"""The value of a column in the rows that are older than it: Iceberg's `initial-default` (format version 3). Pure.

`ADD COLUMN ... DEFAULT` with a value that is the same for all rows writes no row in PostgreSQL, which keeps the value in its catalog. Here
it is kept in the table's schema: a reader takes it for each row of a file that lacks the column. A schema is one of a snapshot, and a field's
initial default never changes.

Which values are kept. One that each reader gives back as PostgreSQL has it: JSON has neither NaN nor infinity, Iceberg's library refuses
defaults of lists, and not every reader has years before 1. A wider type leaves the value as it is, but Iceberg's library writes a `float` with
few digits, which as those of a `double` are another number (`widen`).
"""

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa

from spark_consumers.decode.types import ColumnType, from_text
from spark_consumers.decode.unrepresentable import UnrepresentableValueError

#: The member of a field in Iceberg's JSON.
MEMBER = "initial-default"
#: The metadata of an Arrow field that has it, as JSON.
METADATA = b"tuskline.initial-default"


def value_of(text: str, kind: ColumnType) -> pa.Scalar | None:
    """PostgreSQL's text of a value as a column of that type has it in the lake; None if it cannot be kept as a default."""
    try:
        value = from_text(pa.array([text], pa.string()), kind)[0]
        json_of(value)
    except (UnrepresentableValueError, TypeError, OverflowError, ValueError):
        return None
    return value


def json_of(value: pa.Scalar) -> Any:
    """The value in Iceberg's JSON (specification, appendix D). Raises `TypeError` for one that cannot be a default."""
    python = value.as_py()
    match python:
        case bool() | int() | str():
            return python
        case float() if math.isfinite(python):
            return python
        case bytes():
            return python.hex()
        case Decimal():
            return f"{python:f}"
        case datetime():
            text = python.replace(tzinfo=None).isoformat(timespec="microseconds")
            return text if python.tzinfo is None else f"{text}+00:00"
        case date():
            return python.isoformat()
    raise TypeError(f"a default of the type {value.type}")


def widen(field: dict[str, Any], kind: str) -> None:
    """Give a field of Iceberg's JSON this type, which has all values of its own."""
    if (field["type"], kind) == ("float", "double") and MEMBER in field:
        field[MEMBER] = pa.scalar(field[MEMBER], pa.float32()).as_py()
    field["type"] = kind


def scalar(record: Any, kind: pa.DataType) -> pa.Scalar:
    """The value of the type that its column has in data files, from Iceberg's JSON."""
    if pa.types.is_binary(kind):
        return pa.scalar(bytes.fromhex(record), kind)
    if pa.types.is_decimal(kind):
        return pa.scalar(Decimal(record), kind)
    if pa.types.is_timestamp(kind):
        found = datetime.fromisoformat(record)
        return pa.scalar(found if kind.tz is None else found.astimezone(UTC), kind)
    if pa.types.is_date(kind):
        return pa.scalar(date.fromisoformat(record), kind)
    return pa.scalar(record, kind)


def of_field(field: pa.Field) -> pa.Scalar | None:
    """The initial default of a column of a data file's schema; None: it has none."""
    text = (field.metadata or {}).get(METADATA)
    return None if text is None else scalar(json.loads(text), field.type)
