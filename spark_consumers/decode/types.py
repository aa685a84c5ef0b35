"""PostgreSQL's types in Arrow and Spark, and PostgreSQL's text turned into them, a column at a time.

Invariant: a value arrives exactly, or as PostgreSQL's own text, or as an error that names it. No value silently
becomes NULL or loses a digit. `kept_as_text` marks the columns that are kept as text.

The text is what a type's output function writes with the settings of `replication_connection.PINNED_OPTIONS`;
capture and snapshot both pin them. Formats: PostgreSQL documentation, chapter 8 "Data Types" and 8.15.6 for
arrays. docs/types.md has the whole table.
"""

import binascii
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from spark_consumers.decode.arrays import elements
from spark_consumers.decode.spans import contents, of_texts, validity
from spark_consumers.decode.unrepresentable import UnrepresentableValueError
from spark_consumers.fold.row_codes import take
from walsender_bridge.postgres.protocol.pgoutput import Column, Relation

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

BOOL, BYTEA, NAME, INT8, INT2, INT4, TEXT = 16, 17, 19, 20, 21, 23, 25
JSON, FLOAT4, FLOAT8, BPCHAR, VARCHAR, DATE = 114, 700, 701, 1042, 1043, 1082
TIMESTAMP, TIMESTAMPTZ, NUMERIC, UUID, JSONB = 1114, 1184, 1700, 2950, 3802
INT2_ARRAY, INT4_ARRAY, TEXT_ARRAY, INT8_ARRAY, NUMERIC_ARRAY = 1005, 1007, 1009, 1016, 1231

#: The widest decimal that Arrow's decimal128 and Spark hold.
MAX_DECIMAL = 38

_ARROW: dict[int, pa.DataType] = {
    BOOL: pa.bool_(),
    INT2: pa.int16(),
    INT4: pa.int32(),
    INT8: pa.int64(),
    FLOAT4: pa.float32(),
    FLOAT8: pa.float64(),
    TEXT: pa.string(),
    VARCHAR: pa.string(),
    BPCHAR: pa.string(),
    NAME: pa.string(),
    UUID: pa.string(),
    JSON: pa.string(),
    JSONB: pa.string(),
    BYTEA: pa.binary(),
    DATE: pa.date32(),
    TIMESTAMP: pa.timestamp("us"),
    TIMESTAMPTZ: pa.timestamp("us", "UTC"),
}
#: Array types by the type of their elements; `numeric[]` goes by its modifier.
_ELEMENTS = {
    199: JSON,
    1000: BOOL,
    1001: BYTEA,
    1003: NAME,
    INT2_ARRAY: INT2,
    INT4_ARRAY: INT4,
    TEXT_ARRAY: TEXT,
    1014: BPCHAR,
    1015: VARCHAR,
    INT8_ARRAY: INT8,
    1021: FLOAT4,
    1022: FLOAT8,
    1115: TIMESTAMP,
    1182: DATE,
    1185: TIMESTAMPTZ,
    2951: UUID,
    3807: JSONB,
}
_ARROW |= {array: pa.list_(_ARROW[element]) for array, element in _ELEMENTS.items()}

#: The types above by their names in `pg_catalog`: a Type message names a domain's base type so.
_NAMES = {
    "bool": BOOL,
    "bytea": BYTEA,
    "name": NAME,
    "int8": INT8,
    "int2": INT2,
    "int4": INT4,
    "text": TEXT,
    "json": JSON,
    "float4": FLOAT4,
    "float8": FLOAT8,
    "bpchar": BPCHAR,
    "varchar": VARCHAR,
    "date": DATE,
    "timestamp": TIMESTAMP,
    "timestamptz": TIMESTAMPTZ,
    "numeric": NUMERIC,
    "uuid": UUID,
    "jsonb": JSONB,
}
_BY_OID = {oid: name for name, oid in _NAMES.items()}
_NAMES |= {f"_{_BY_OID[element]}": array for array, element in _ELEMENTS.items()}
_NAMES["_numeric"] = NUMERIC_ARRAY

#: Values that PostgreSQL can store and the target type cannot represent.
_BEYOND = re.compile(r"-?infinity|.* BC|\d{5,}-.*|NaN|-?Infinity", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ColumnType:
    """What a column becomes. `kept_as_text`: its values are PostgreSQL's own text, exactly."""

    type_oid: int
    typmod: int
    arrow: pa.DataType
    kept_as_text: bool


def column_type(type_oid: int, typmod: int) -> ColumnType:
    """The Arrow type for a PostgreSQL type OID and modifier (`pg_attribute.atttypmod`)."""
    if type_oid in {NUMERIC, NUMERIC_ARRAY}:
        limits = numeric_limits(typmod)
        if limits is None:
            return ColumnType(type_oid, typmod, pa.string(), kept_as_text=True)
        decimal = pa.decimal128(*limits)
        arrow = decimal if type_oid == NUMERIC else pa.list_(decimal)
        return ColumnType(type_oid, typmod, arrow, kept_as_text=False)
    found = _ARROW.get(type_oid)
    return ColumnType(type_oid, typmod, found or pa.string(), kept_as_text=found is None)


def element_oid(type_oid: int) -> int | None:
    """The type OID of the elements of an array type that may be one here; None for every other type."""
    return NUMERIC if type_oid == NUMERIC_ARRAY else _ELEMENTS.get(type_oid)


def with_base_types(relation: Relation) -> Relation:
    """The relation with its columns of a domain as columns of the domain's base type.

    A Type message tells the base type's name and not its modifier, so a domain over `numeric(p, s)` is
    one over `numeric`: text. The copy of a table (`snapshot`) goes by the same rule.
    """
    return replace(
        relation, columns=tuple(_with_base_type(c, relation.types) for c in relation.columns)
    )


def _with_base_type(column: Column, types: Mapping[int, tuple[str, str]]) -> Column:
    schema, name = types.get(column.type_oid, ("", ""))
    base = _NAMES.get(name) if schema == "pg_catalog" else None
    return column if base is None else replace(column, type_oid=base)


def streamed_type(declared: int, base: int) -> int:
    """The type OID that `with_base_types` leaves a column with, from its type and that type's base type."""
    return base if base in _NAMES.values() else declared


def numeric_limits(typmod: int) -> tuple[int, int] | None:
    """(precision, scale) of a `numeric(p, s)` that a decimal holds, otherwise None.

    None for `numeric` without limits, more than 38 digits, and the scales below 0 or above the
    precision that PostgreSQL 15 brought: those are kept as text.
    """
    if typmod < 4:
        return None
    packed = typmod - 4
    precision = packed >> 16 & 0xFFFF
    # Since 15 the scale has 11 bits and a sign: one below 0 reads as more than any precision here.
    scale = packed & 0x7FF
    if precision > MAX_DECIMAL or scale > precision:
        return None
    return precision, scale


def arrow_schema(columns: Iterable[Column]) -> pa.Schema:
    """The Arrow schema of a table's columns; every field may be NULL."""
    return pa.schema([pa.field(c.name, column_type(c.type_oid, c.typmod).arrow) for c in columns])


def spark_schema(schema: pa.Schema) -> "StructType":
    """The same schema for Spark: `timestamp` is `TIMESTAMP_NTZ`, `timestamptz` is `TIMESTAMP`."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def text_columns(columns: Iterable[Column]) -> list[str]:
    """The names of the columns that are kept as PostgreSQL's own text."""
    return [c.name for c in columns if column_type(c.type_oid, c.typmod).kept_as_text]


def from_text(values: pa.Array, kind: ColumnType) -> pa.Array:
    """PostgreSQL's text (a `pa.string()` array, UTF-8 not yet checked) as `kind.arrow`.

    Raises `UnrepresentableValueError` with the position of the first unrepresentable value.
    """
    return _converted(values, kind.arrow)


def _converted(values: pa.Array, arrow: pa.DataType) -> pa.Array:
    if pa.types.is_string(arrow):
        return checked_utf8(values)
    if pa.types.is_boolean(arrow):
        return _booleans(values)
    if pa.types.is_binary(arrow):
        return _bytea(values)
    if pa.types.is_list(arrow):
        return _lists(values, arrow)
    return _cast(values, arrow)


def apart(
    values: pa.Array, arrow: pa.DataType, convert: Callable[[pa.Array], pa.Array]
) -> tuple[pa.Array, pa.Array | None]:
    r"""The values as `convert` returns them (of type `arrow`), and the text of the unrepresentable ones.

    An unrepresentable value is NULL in the first array; in the second all others are (None: there is none). Bytes
    that are not UTF-8 are written `\xff`. Raises `UnrepresentableValueError` for damage.
    """
    try:
        return convert(values), None
    except UnrepresentableValueError as fault:
        if fault.malformed:
            raise
    unrepresentable: list[int] = []
    parts = _by_halves(values, arrow, convert, 0, unrepresentable)
    raw = values.cast(pa.binary())
    texts = [raw[row].as_py().decode("utf-8", "backslashreplace") for row in unrepresentable]
    places = np.full(len(values), -1, np.int64)
    places[unrepresentable] = np.arange(len(unrepresentable))
    return pa.concat_arrays(parts), take(of_texts(texts), places)


def _by_halves(
    values: pa.Array,
    arrow: pa.DataType,
    convert: Callable[[pa.Array], pa.Array],
    first: int,
    unrepresentable: list[int],
) -> list[pa.Array]:
    """Convert; a slice that fails is halved until it is one value, whose index goes to `unrepresentable`."""
    try:
        return [convert(values)]
    except UnrepresentableValueError as fault:
        if fault.malformed:
            raise UnrepresentableValueError(
                first + fault.index, fault.what, malformed=True
            ) from None
    if len(values) == 1:
        unrepresentable.append(first)
        return [pa.nulls(1, arrow)]
    middle = len(values) // 2
    return [
        *_by_halves(values.slice(0, middle), arrow, convert, first, unrepresentable),
        *_by_halves(values.slice(middle), arrow, convert, first + middle, unrepresentable),
    ]


def checked_utf8(values: pa.Array) -> pa.Array:
    """The same array, once every byte of it is known to be UTF-8 (a SQL_ASCII database may differ)."""
    raw = values.cast(pa.binary())
    try:
        raw.cast(pa.string())
    except pa.ArrowInvalid:
        at = _first_unrepresentable(raw, pa.string())
        raise UnrepresentableValueError(at, "bytes that are not UTF-8", malformed=False) from None
    return values


def _cast(values: pa.Array, arrow: pa.DataType) -> pa.Array:
    try:
        return values.cast(arrow)
    except pa.ArrowInvalid:
        at = _first_unrepresentable(values, arrow)
        text = values.cast(pa.binary())[at].as_py().decode("utf-8", "replace")
        beyond = _BEYOND.fullmatch(text) is not None
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise UnrepresentableValueError(
            at, f"{shown!r} is not in {arrow}", malformed=not beyond
        ) from None


def _first_unrepresentable(values: pa.Array, arrow: pa.DataType) -> int:
    """The index of the first value that does not cast, by bisection, since the cast's error does not have it."""
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            values.slice(low, middle - low).cast(arrow)
        except pa.ArrowInvalid:
            high = middle
        else:
            low = middle
    return low


def _booleans(values: pa.Array) -> pa.Array:
    offsets, data, valid = contents(values)
    starts, lengths = offsets[:-1], np.diff(offsets)
    rows = np.arange(len(values)) if valid is None else np.flatnonzero(valid)
    bad = rows[lengths[rows] != 1]
    if not len(bad):
        letters = data[starts[rows]]
        bad = rows[(letters != ord("t")) & (letters != ord("f"))]
    if len(bad):
        raise UnrepresentableValueError(int(bad[0]), "not a boolean", malformed=True)
    truth = np.zeros(len(values), np.bool_)
    truth[rows] = letters == ord("t")
    bits = pa.py_buffer(np.packbits(truth, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(truth), [validity(valid), bits])


def _bytea(values: pa.Array) -> pa.Array:
    r"""`\x` and two hexadecimal digits a byte (8.4.1, "bytea Hex Format")."""
    offsets, data, valid = contents(values)
    lengths = np.diff(offsets)
    rows = np.arange(len(values)) if valid is None else np.flatnonzero(valid)
    bad = rows[(lengths[rows] < 2) | (lengths[rows] % 2 != 0)]
    if not len(bad):
        heads = offsets[rows]
        bad = rows[(data[heads] != ord("\\")) | (data[heads + 1] != ord("x"))]
    if len(bad):
        raise UnrepresentableValueError(int(bad[0]), "not bytea in hex format", malformed=True)
    digits = np.ones(len(data), np.bool_)
    digits[heads] = False
    digits[heads + 1] = False
    try:
        decoded = binascii.a2b_hex(data[digits].data)
    except binascii.Error:
        for row in rows.tolist():
            try:
                binascii.a2b_hex(data[offsets[row] + 2 : offsets[row + 1]].data)
            except binascii.Error:
                raise UnrepresentableValueError(
                    row, "not bytea in hex format", malformed=True
                ) from None
        raise
    sizes = np.zeros(len(values) + 1, np.int64)
    sizes[1:][rows] = (lengths[rows] - 2) // 2
    ends = np.cumsum(sizes).astype(np.int32)
    return pa.Array.from_buffers(
        pa.binary(), len(values), [validity(valid), pa.py_buffer(ends), pa.py_buffer(decoded)]
    )


def _lists(values: pa.Array, arrow: pa.DataType) -> pa.Array:
    offsets, texts, valid = elements(values)
    try:
        items = _converted(texts, arrow.value_type)
    except UnrepresentableValueError as fault:
        row = int(np.searchsorted(offsets, fault.index, side="right")) - 1
        raise UnrepresentableValueError(row, fault.what, malformed=fault.malformed) from None
    return pa.ListArray.from_buffers(
        arrow,
        len(values),
        [validity(valid), pa.py_buffer(offsets.astype(np.int32))],
        children=[items],
    )
