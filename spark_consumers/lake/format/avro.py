"""The rows of an Avro file, as Iceberg's manifests are: enough of the format to read these without Spark.

Read are: the container with the codecs `null` and `deflate`, and all types but enums. Records are dicts, maps dicts,
arrays lists, `bytes` and `fixed` bytes.
"""

import io
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from spark_consumers.lake.format.checksums import read_whole
from spark_consumers.lake.store.place import Place
from walsender_bridge.errors import CorruptError

_MAGIC = b"Obj\x01"
_SYNC = 16


def rows(file: Place) -> list[Any]:
    """All rows of the file. Raises `CorruptError` for what is no such file."""
    with read_whole(file):
        content = file.read_bytes()
    return rows_of(content, str(file))


def rows_of(content: bytes, where: str) -> list[Any]:
    """All rows of a file of this content. Raises `CorruptError` for what is no such file."""
    try:
        # In memory a length that is damaged asks for no more than there is.
        return list(_rows(io.BytesIO(content)))
    except (ValueError, LookupError, TypeError, OverflowError, struct.error, zlib.error) as error:
        raise CorruptError(f"not an Avro file: {error}", where=where) from None


def _rows(content: BinaryIO) -> Iterator[Any]:
    if _exactly(content, len(_MAGIC)) != _MAGIC:
        raise ValueError("it does not begin with Avro's magic bytes")
    header = _read(content, {"type": "map", "values": "bytes"}, {})
    schema = json.loads(header["avro.schema"])
    codec = header.get("avro.codec", b"null").decode()
    if codec not in {"null", "deflate"}:
        raise ValueError(f"its codec is {codec}")
    sync = _exactly(content, _SYNC)
    named: dict[str, Any] = {}
    while first := content.read(1):
        count = _long(content, first)
        block = _exactly(content, _long(content))
        if codec == "deflate":
            block = zlib.decompress(block, wbits=-zlib.MAX_WBITS)
        if _exactly(content, _SYNC) != sync:
            raise ValueError("a block does not end with the sync marker")
        part = io.BytesIO(block)
        for _ in range(count):
            yield _read(part, schema, named)


def _read(content: BinaryIO, schema: Any, named: dict[str, Any]) -> Any:
    """One value. `named`: the schemas that have been seen by name."""
    if isinstance(schema, list):
        return _read(content, schema[_long(content)], named)
    kind = schema if isinstance(schema, str) else schema["type"]
    if isinstance(kind, dict | list):
        return _read(content, kind, named)
    if isinstance(schema, dict) and "name" in schema:
        named[schema["name"]] = schema
    match kind:
        case "null":
            return None
        case "boolean":
            return _exactly(content, 1) != b"\0"
        case "int" | "long":
            return _long(content)
        case "float":
            return struct.unpack("<f", _exactly(content, 4))[0]
        case "double":
            return struct.unpack("<d", _exactly(content, 8))[0]
        case "bytes":
            return _exactly(content, _long(content))
        case "string":
            return _exactly(content, _long(content)).decode()
        case "fixed":
            return _exactly(content, schema["size"])
        case "record":
            return {
                field["name"]: _read(content, field["type"], named) for field in schema["fields"]
            }
        case "array":
            return [_read(content, schema["items"], named) for _ in _counted(content)]
        case "map":
            return {
                _read(content, "string", named): _read(content, schema["values"], named)
                for _ in _counted(content)
            }
    return _read(content, named[kind], named)


def _counted(content: BinaryIO) -> Iterator[None]:
    """As many steps as an array or a map has members."""
    while count := _long(content):
        if count < 0:
            # Its size in bytes follows, for readers that skip it.
            _long(content)
        for _ in range(abs(count)):
            yield


def _long(content: BinaryIO, first: bytes = b"") -> int:
    found = shift = 0
    byte = (first or _exactly(content, 1))[0]
    while byte & 0x80:
        found |= (byte & 0x7F) << shift
        shift += 7
        byte = _exactly(content, 1)[0]
    found |= byte << shift
    return (found >> 1) ^ -(found & 1)


def _exactly(content: BinaryIO, size: int) -> bytes:
    found = content.read(size) if size >= 0 else b""
    if len(found) != size:
        raise ValueError("it is truncated")
    return found
