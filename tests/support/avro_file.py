"""Avro files for tests: containers without compression, of records, longs, strings and optional values."""

import json
from pathlib import Path
from typing import Any


def write(path: Path, fields: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """A file of records with these fields, by their Avro types."""
    schema = {"type": "record", "name": "row", "fields": _fields(fields)}
    body = b"".join(_encoded(row, schema) for row in rows)
    sync = bytes(range(16))
    text = json.dumps(schema).encode()
    header = _long(1) + _bytes(b"avro.schema") + _bytes(text) + _long(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"Obj\x01" + header + sync + _long(len(rows)) + _long(len(body)) + body + sync)


def record(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The type of a record inside another."""
    return {"type": "record", "name": name, "fields": _fields(fields)}


def _fields(fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "type": kind} for name, kind in fields.items()]


def _encoded(value: Any, schema: Any) -> bytes:
    if isinstance(schema, list):
        branch = 0 if value is None else 1
        return _long(branch) + _encoded(value, schema[branch])
    match schema if isinstance(schema, str) else schema["type"]:
        case "null":
            return b""
        case "int" | "long":
            return _long(value)
        case "string":
            return _bytes(value.encode())
        case "record":
            return b"".join(_encoded(value[f["name"]], f["type"]) for f in schema["fields"])
    raise AssertionError(schema)


def _bytes(value: bytes) -> bytes:
    return _long(len(value)) + value


def _long(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63)
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])
