"""The form of a value: a text that PostgreSQL and an executor make of equal values, and of those only.

Invariant: two values of one column have the same form exactly if they are the same value, as docs/types.md defines it. So what
differs in case, in a trailing blank, in the sign of a zero or in the scale of a `numeric` kept as text has another form, and
every NaN has one form. `NULL` has none (`framed` tells it from every text).

| column in the lake | form |
|---|---|
| `string` | PostgreSQL's own text: what its type's output function writes, as the log has it |
| `boolean`, integers | the same |
| `float`, `double` | the bits, as the type's send function writes them, in hexadecimal; `NaN` |
| `decimal(p,s)` | the unscaled integer |
| `date`, `timestamp`, `timestamp_ntz` | days or microseconds since 2000, as the send function writes them, in hexadecimal |
| `binary` | hexadecimal |
| `array` | `array_dims`, then the framed forms of its elements |

A decimal's text depends on who writes it (`0E-7`), that of a float on the server's version (before 12 it is not the shortest),
and that of a time on settings; so none of these is used. Nothing here depends on a server's version, and no extension is needed.

A column's text is in the server's encoding there and in UTF-8 here; the server converts what it hashes, and counts bytes of UTF-8. A `SQL_ASCII`
database converts nothing, and may have bytes that are not UTF-8: rows with these are recognized (`sql_is_utf8`) instead of raising an error.
"""

import binascii
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from spark_consumers.decode import types
from spark_consumers.decode.spans import Int64s
from spark_consumers.decode.types import ColumnType, column_type, element_oid
from spark_consumers.snapshot.exported import ReadColumn

#: The functions that write a type's text, where it is an element's: a column has its own (`ReadColumn.output`).
_OUTPUT: Final = {
    types.BOOL: "boolout",
    types.INT2: "int2out",
    types.INT4: "int4out",
    types.INT8: "int8out",
    types.NUMERIC: "numeric_out",
    types.TEXT: "textout",
    types.VARCHAR: "varcharout",
    types.BPCHAR: "bpcharout",
    types.NAME: "nameout",
    types.UUID: "uuid_out",
    types.JSON: "json_out",
    types.JSONB: "jsonb_out",
}
#: Those that write its bytes.
_SEND: Final = {
    types.FLOAT4: "float4send",
    types.FLOAT8: "float8send",
    types.DATE: "date_send",
    types.TIMESTAMP: "timestamp_send",
    types.TIMESTAMPTZ: "timestamptz_send",
}
#: The values that the lake's type holds, as conditions of those that can hold others.
_HELD: Final = {
    types.DATE: "{} BETWEEN '0001-01-01' AND '9999-12-31'",
    types.TIMESTAMP: "{0} >= '0001-01-01' AND {0} < '10000-01-01'",
    types.TIMESTAMPTZ: "{0} >= '0001-01-01 00:00+00' AND {0} < '10000-01-01 00:00+00'",
    types.NUMERIC: "{} <> 'NaN'",
}
#: Days and microseconds from 1970 to 2000, from where PostgreSQL counts.
_DAYS: Final = 10_957
_MICROSECONDS: Final = _DAYS * 86_400_000_000
#: The encoding of a database that converts nothing; and UTF-8 (RFC 3629) as a regular expression for it, which compares bytes.
_AS_IT_IS: Final = "SQL_ASCII"
_UTF8: Final = (
    r"^([\x01-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xed[\x80-\x9f][\x80-\xbf]"
    r"|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})*$"
)
#: The arguments of one call of `concat`; a function of PostgreSQL may have 100.
_ARGUMENTS: Final = 80


def sql_form(read: ReadColumn, encoding: str) -> sql.Composable:
    """The form of a column, as an expression of the type `text`; NULL for NULL. `encoding`: the database's."""
    column = read.column
    kind = column_type(column.type_oid, column.typmod)
    name: sql.Composable = sql.Identifier(column.name)
    if not pa.types.is_string(kind.arrow):
        return _form(name, kind, encoding)
    if read.argument:
        name = sql.SQL("{}::{}").format(name, sql.Identifier(*read.argument))
    return sql.SQL("{}({})::text").format(sql.Identifier(*read.output), name)


def sql_text(read: ReadColumn) -> sql.Composable:
    """A column's text, for people."""
    name: sql.Composable = sql.Identifier(read.column.name)
    if read.argument:
        name = sql.SQL("{}::{}").format(name, sql.Identifier(*read.argument))
    return sql.SQL("{}({})::text").format(sql.Identifier(*read.output), name)


def _form(value: sql.Composable, kind: ColumnType, encoding: str) -> sql.Composable:
    """The form of a value of a type that has no text in the lake, or of an array's element."""
    oid = kind.type_oid
    if (element := element_oid(oid)) is not None:
        inner = _form(sql.SQL("u.e"), column_type(element, kind.typmod), encoding)
        return sql.SQL(
            "CASE WHEN {0} IS NOT NULL THEN coalesce(array_dims({0}), '') || (SELECT coalesce(string_agg({1}, '' ORDER BY f.n), '')"
            " FROM (SELECT {2} AS form, u.n FROM unnest({0}) WITH ORDINALITY AS u(e, n)) AS f) END"
        ).format(value, sql_framed(sql.SQL("f.form"), encoding), inner)
    if oid == types.BYTEA:
        return sql.SQL("encode({}, 'hex')").format(value)
    if oid in _SEND:
        sent = sql.SQL("encode({}({}), 'hex')").format(sql.SQL(_SEND[oid]), value)
        if oid not in {types.FLOAT4, types.FLOAT8}:
            return sent
        return sql.SQL("CASE WHEN {} = 'NaN' THEN 'NaN' ELSE {} END").format(value, sent)
    if pa.types.is_decimal(kind.arrow):
        unscaled = sql.SQL("trunc({} * {})").format(value, sql.Literal(10**kind.arrow.scale))
        return sql.SQL("numeric_out({})::text").format(unscaled)
    return sql.SQL("{}({})::text").format(sql.SQL(_OUTPUT[oid]), value)


def sql_held(read: ReadColumn) -> sql.Composable | None:
    """The condition that the lake's type has the column's value (docs/types.md, "Unrepresentable values"); None if it has all."""
    column = read.column
    return _held(sql.Identifier(column.name), column_type(column.type_oid, column.typmod))


def _held(value: sql.Composable, kind: ColumnType) -> sql.Composable | None:
    if kind.kept_as_text:
        return None
    if (element := element_oid(kind.type_oid)) is not None:
        is_list = sql.SQL(
            "coalesce(array_ndims({0}) = 1 AND array_lower({0}, 1) = 1, true)"
        ).format(value)
        inner = _held(sql.SQL("u.e"), column_type(element, kind.typmod))
        if inner is None:
            return is_list
        return sql.SQL("({} AND NOT EXISTS (SELECT FROM unnest({}) AS u(e) WHERE NOT {}))").format(
            is_list, value, inner
        )
    condition = _HELD.get(kind.type_oid)
    if condition is None:
        return None
    return sql.SQL("coalesce({}, true)").format(sql.SQL(condition).format(value))


def sql_bytes(text: sql.Composable, encoding: str) -> sql.Composable:
    """The bytes of a text in UTF-8. From a `SQL_ASCII` database they come as they are."""
    to = _AS_IT_IS if encoding == _AS_IT_IS else "UTF8"
    return sql.SQL("convert_to({}, {})").format(text, sql.Literal(to))


def sql_is_utf8(text: sql.Composable) -> sql.Composable:
    """Whether a text of a `SQL_ASCII` database is UTF-8."""
    return sql.SQL("{} ~ {}").format(text, sql.Literal(_UTF8))


def sql_framed(form: sql.Composable, encoding: str) -> sql.Composable:
    """A form with its length in bytes of UTF-8 before it, so that forms can be put end to end; `-` for NULL."""
    stored = form if encoding in {"UTF8", _AS_IT_IS} else sql_bytes(form, encoding)
    return sql.SQL("coalesce(octet_length({1})::text || ':' || {0}, '-')").format(form, stored)


def sql_joined(forms: Sequence[sql.Composable], encoding: str) -> sql.Composable:
    """The framed forms of several columns, end to end."""
    parts = [sql_framed(form, encoding) for form in forms]
    while len(parts) > 1 or not parts:
        groups = [parts[i : i + _ARGUMENTS] for i in range(0, max(1, len(parts)), _ARGUMENTS)]
        parts = [
            sql.SQL("concat({})").format(sql.SQL(", ").join(g or [sql.SQL("''")])) for g in groups
        ]
    return parts[0]


def forms(values: pa.Array, kind: ColumnType) -> pa.Array:
    """The forms of a column of the lake, as `large_string`; NULL for NULL."""
    oid, arrow = kind.type_oid, kind.arrow
    if (element := element_oid(oid)) is not None and pa.types.is_list(arrow):
        return _of_lists(values, column_type(element, kind.typmod))
    if pa.types.is_string(arrow):
        return values.cast(pa.large_string())
    if pa.types.is_boolean(arrow):
        found = pc.if_else(values, "t", "f")
    elif pa.types.is_integer(arrow):
        found = values.cast(pa.string())
    elif pa.types.is_floating(arrow):
        found = pc.if_else(pc.is_nan(values), "NaN", _of_floats(values, arrow))
    elif pa.types.is_decimal(arrow):
        found = _unscaled(values, arrow)
    elif pa.types.is_date(arrow):
        found = _hexadecimal(values.view(pa.int32()), ">i4", _DAYS)
    elif pa.types.is_timestamp(arrow):
        found = _hexadecimal(values.view(pa.int64()), ">i8", _MICROSECONDS)
    else:
        return _of_bytes(values)
    return found.cast(pa.large_string())


def joined(columns: Sequence[pa.Array], rows: int) -> pa.Array:
    """As `sql_joined`: of columns of forms with so many rows each, as `large_string`."""
    if not columns:
        return pc.fill_null(pa.nulls(rows, pa.large_string()), "")
    return _together(*map(_framed, columns))


def _framed(column: pa.Array) -> pa.Array:
    lengths = pc.binary_length(column).cast(pa.large_string())
    return pc.fill_null(_together(lengths, _text(":"), column), "-")


def _together(*texts: pa.Array | pa.Scalar) -> pa.Array:
    return pc.binary_join_element_wise(*texts, _text(""))


def _text(text: str | None) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


def _of_floats(values: pa.Array, arrow: pa.DataType) -> pa.Array:
    kind, plain = (">i4", pa.int32()) if arrow == pa.float32() else (">i8", pa.int64())
    return _hexadecimal(values.view(plain), kind, 0)


def _hexadecimal(numbers: pa.Array, kind: str, origin: int) -> pa.Array:
    """The numbers, less the origin, as big-endian bytes in hexadecimal."""
    plain = pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False)
    digits = binascii.hexlify((plain - plain.dtype.type(origin)).astype(kind).tobytes())
    width = 2 * np.dtype(kind).itemsize
    offsets = np.arange(len(numbers) + 1, dtype=np.int64) * width
    return pc.if_else(numbers.is_valid(), _texts(offsets, digits), _text(None))


def _of_bytes(values: pa.Array) -> pa.Array:
    plain = values.cast(pa.large_binary())
    lengths = pc.fill_null(pc.binary_length(plain), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(2 * lengths.astype(np.int64), out=offsets[1:])
    digits = b"".join(binascii.hexlify(each.as_buffer()) for each in plain if each.is_valid)
    return pc.if_else(values.is_valid(), _texts(offsets, digits), _text(None))


def _texts(offsets: Int64s, data: bytes | pa.Buffer) -> pa.Array:
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)


def _unscaled(values: pa.Array, arrow: pa.DataType) -> pa.Array:
    """The integers of which a decimal is a fraction, as text."""
    values = values.cast(arrow)
    plain = pa.decimal128(arrow.precision, 0)
    buffers = values.buffers()
    found = pa.Array.from_buffers(plain, len(values), buffers, values.null_count, values.offset)
    return found.cast(pa.string())


def _of_lists(values: pa.Array, element: ColumnType) -> pa.Array:
    sizes = pc.fill_null(pc.list_value_length(values), 0).cast(pa.int64())
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum(sizes.to_numpy(zero_copy_only=False), out=ends[1:])
    # Those of NULL lists are left out.
    items = _framed(forms(values.flatten(), element))
    starts, data = np.zeros(1, np.int64), b""
    if len(items):
        _, offsets, content = items.buffers()
        starts = np.frombuffer(offsets, np.int64, len(items) + 1, items.offset * 8)
        data = content
    dims = _together(_text("[1:"), sizes.cast(pa.large_string()), _text("]"))
    dims = pc.if_else(pc.greater(sizes, 0), dims, _text(""))
    return pc.if_else(values.is_valid(), _together(dims, _texts(starts[ends], data)), _text(None))
