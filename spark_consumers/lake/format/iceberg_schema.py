"""Schemas between Arrow and Iceberg's JSON (Iceberg specification, appendix C), both ways."""

import base64
from typing import Any

import pyarrow as pa
import pyarrow.ipc

#: The Parquet metadata key by which Iceberg finds a column.
FIELD_ID = "PARQUET:field_id"

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
    """The Arrow schema of Iceberg's JSON, each field with the id that its Parquet column carries."""
    return pa.schema([_arrow_field(f["name"], f["type"], f["id"]) for f in schema["fields"]])


def _arrow_field(name: str, kind: Any, number: int) -> pa.Field:
    if isinstance(kind, dict):
        arrow = pa.list_(_arrow_field("element", kind["element"], kind["element-id"]))
    elif kind.startswith("decimal("):
        precision, scale = kind.removeprefix("decimal(").rstrip(")").split(",")
        arrow = pa.decimal128(int(precision), int(scale))
    else:
        arrow = _ARROW[kind]
    return pa.field(name, arrow, metadata={FIELD_ID: str(number)})


def encoded(columns: pa.Schema) -> str:
    """PostgreSQL's columns as Arrow types, which are finer than Iceberg's, in a table's property."""
    return base64.b64encode(columns.serialize().to_pybytes()).decode()


def decoded(text: str) -> pa.Schema:
    """What `encoded` made."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
