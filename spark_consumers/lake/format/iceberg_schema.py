"""Schemas between Arrow and Iceberg's JSON (Iceberg specification, appendix C), both ways."""

import base64
import json
from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from spark_consumers.lake.format import initial_default
from spark_consumers.lake.format.file_names import FIELD_ID
from spark_consumers.lake.format.table_format import ROW_ID

_SIMPLE = [
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int8, "int"),
    (pa.types.is_int16, "int"),
    (pa.types.is_int32, "int"),
    (pa.types.is_int64, "long"),
    (pa.types.is_float32, "float"),
    (pa.types.is_float64, "double"),
    (pa.types.is_string, "string"),
    (pa.types.is_binary, "binary"),
    (pa.types.is_date32, "date"),
]
_ARROW = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
}


def iceberg_schema(columns: pa.Schema) -> dict[str, Any]:
    """Iceberg's JSON for an Arrow schema (Iceberg specification, appendix C)."""
    fields = []
    # Iceberg numbers the columns first, and then what is inside them.
    inner = len(columns)
    for number, column in enumerate(columns, 1):
        kind: Any
        if pa.types.is_list(column.type):
            inner += 1
            kind = {
                "type": "list",
                "element-id": inner,
                "element": _iceberg_type(column.type.value_type),
                "element-required": False,
            }
        else:
            kind = _iceberg_type(column.type)
        fields.append({"id": number, "name": column.name, "required": False, "type": kind})
    return {"type": "struct", "schema-id": 0, "fields": fields}


def _iceberg_type(kind: pa.DataType) -> str:
    if pa.types.is_decimal128(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamptz" if kind.tz else "timestamp"
    return next(name for is_one, name in _SIMPLE if is_one(kind))


def file_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column in data files: small integers are kept as wider ones."""
    (field,) = arrow_schema(iceberg_schema(pa.schema([pa.field("c", kind)])))
    return field.type


def arrow_schema(schema: dict[str, Any]) -> pa.Schema:
    """The Arrow schema of Iceberg's JSON, each field with the id that its Parquet column carries, and with its initial default."""
    return pa.schema(
        [
            _arrow_field(f["name"], f["type"], f["id"], f.get(initial_default.MEMBER))
            for f in schema["fields"]
        ]
    )


def _arrow_field(name: str, kind: Any, number: int, default: Any = None) -> pa.Field:
    if isinstance(kind, dict):
        arrow = pa.list_(_arrow_field("element", kind["element"], kind["element-id"]))
    elif kind.startswith("decimal("):
        precision, scale = kind.removeprefix("decimal(").rstrip(")").split(",")
        arrow = pa.decimal128(int(precision), int(scale))
    else:
        arrow = _ARROW[kind]
    metadata: dict[str | bytes, str] = {FIELD_ID: str(number)}
    if default is not None:
        metadata[initial_default.METADATA] = json.dumps(default)
    return pa.field(name, arrow, metadata=metadata)


def evolved(
    before: dict[str, Any],
    newest: dict[str, Any],
    columns: pa.Schema,
    sources: Mapping[str, str],
    last: int,
    ours: Collection[str],
    defaults: Mapping[str, Any],
) -> tuple[dict[str, Any], int]:
    """The schema of a table with the schema `before` that gets these columns, and the greatest field number then.

    `sources`: for columns that the table has, their names in it; others get numbers above `last`, and those of `defaults` this initial default, in
    Iceberg's JSON. Fields of `before` that no column
    has for its source, and whose name is `ROW_ID`, stay at the end. `newest`: the table's schema now, which an attempt that was not
    published may have made: it stays if it has the same columns, whose new fields nothing published has. Its fields that are none of
    `ours` are other programs', and stay, behind all others, unless a column has their name.
    """
    there = {field["name"]: field for field in before["fields"]}
    known = {field["id"] for field in before["fields"]}
    fields: list[dict[str, Any]] = []
    top = last
    for column in columns:
        if column.name in sources:
            field = {**there[sources[column.name]], "name": column.name}
            # A list keeps the number of its elements; nothing widens these.
            if not pa.types.is_list(column.type):
                initial_default.widen(field, _iceberg_type(column.type))
            fields.append(field)
            continue
        (field,) = iceberg_schema(pa.schema([column]))["fields"]
        top += 1
        field["id"] = top
        if isinstance(field["type"], dict):
            top += 1
            field["type"] = {**field["type"], "element-id": top}
        if column.name in defaults:
            field[initial_default.MEMBER] = defaults[column.name]
        fields.append(field)
    fields += [field for field in before["fields"] if field["name"] == ROW_ID]
    known_names = {ROW_ID, *ours, *columns.names}
    fields += [field for field in newest["fields"] if field["name"] not in known_names]
    if [_like(f, known) for f in fields] == [_like(f, known) for f in newest["fields"]]:
        return newest, last
    return {"type": "struct", "schema-id": newest["schema-id"] + 1, "fields": fields}, top


def _like(field: dict[str, Any], known: Collection[int]) -> Any:
    """What a field is, but for its number if it is not one of these."""
    kind = field["type"]
    if isinstance(kind, dict):
        kind = {name: value for name, value in kind.items() if name != "element-id"}
    number = field["id"] if field["id"] in known else None
    return number, field["name"], kind, field.get(initial_default.MEMBER)


def by_number(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Rows of a data file with the columns of the table now, found by their numbers; the initial default, or NULL, in absent ones."""
    there = places(table.schema, schema)
    columns = []
    for field, at in zip(schema, there, strict=True):
        if at is None:
            default = initial_default.of_field(field)
            absent = pa.nulls(len(table), field.type)
            columns.append(
                pa.chunked_array([absent if default is None else pa.repeat(default, len(table))])
            )
        else:
            column = table.column(at)
            columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def places(file: pa.Schema, schema: pa.Schema) -> list[int | None]:
    """Where each column of the table is in a data file; None: the file does not have it. Without numbers, by its name."""
    has_numbers = any(_number(field) is not None for field in file)
    of = _number if has_numbers else _name
    found = {of(field): at for at, field in enumerate(file)}
    return [found.get(of(field)) for field in schema]


def _number(field: pa.Field) -> str | None:
    """The number by which Iceberg finds a column; None if it has none."""
    number = (field.metadata or {}).get(FIELD_ID.encode())
    return None if number is None else str(number.decode())


def _name(field: pa.Field) -> str | None:
    return str(field.name)


def encoded(columns: pa.Schema) -> str:
    """PostgreSQL's columns as Arrow types, which are finer than Iceberg's, in a table's property."""
    return base64.b64encode(columns.serialize().to_pybytes()).decode()


def decoded(text: str) -> pa.Schema:
    """What `encoded` made."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
