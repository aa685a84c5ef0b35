"""Deletion vectors: for each data file the positions of its removed rows, in one Puffin file for a table and an epoch.

    "PFA1" | blob ... | "PFA1" | footer (JSON) | its length, i32 LE | flags, 4 zero bytes | "PFA1"
    blob: length of the next two, u32 BE | D1 D3 39 64 | 64-bit roaring bitmap | CRC32 of these two, u32 BE

The bitmap is in the portable format of the roaring specification, blobs are of Iceberg's type `deletion-vector-v1`, and are
found by their offset and length, which the table's manifests record: the footer is for other readers.
"""

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.data_files import whole_file
from spark_consumers.lake.format.table_format import Vector
from walsender_bridge.errors import CorruptError

_MAGIC = b"PFA1"
_VECTOR_MAGIC = b"\xd1\xd3\x39\x64"
_U32 = struct.Struct(">I")
_FOOTER = struct.Struct("<i4s")
#: The number that Iceberg reserves for the position of a row.
_POSITION_FIELD = 2147483645

Positions = npt.NDArray[np.uint32]


def encode(positions: BitMap64) -> bytes:
    """A blob."""
    positions.run_optimize()
    content = _VECTOR_MAGIC + positions.serialize()
    return _U32.pack(len(content)) + content + _U32.pack(zlib.crc32(content))


def decode(blob: bytes, where: str) -> BitMap64:
    """The positions in a blob. Raises `CorruptError` for what is none."""
    if len(blob) < 2 * _U32.size + len(_VECTOR_MAGIC):
        raise _damaged("the deletion vector is truncated", where)
    (length,), content = _U32.unpack_from(blob), blob[_U32.size : -_U32.size]
    if length != len(content) or not content.startswith(_VECTOR_MAGIC):
        raise _damaged("this is not a deletion vector", where)
    if _U32.unpack_from(blob, len(blob) - _U32.size)[0] != zlib.crc32(content):
        raise _damaged("checksum mismatch in a deletion vector", where)
    try:
        return BitMap64.deserialize(content[len(_VECTOR_MAGIC) :])
    except ValueError as error:
        raise _damaged(f"this is not a deletion vector: {error}", where) from None


def write_vectors(folder: str, name: str, vectors: Mapping[str, BitMap64]) -> list[Vector]:
    """Write the vectors of these data files (paths below the table's `folder`) as the file `name` of its data."""
    blobs, offset = [], len(_MAGIC)
    with whole_file(f"{folder}/data/{name}") as out:
        out.write(_MAGIC)
        for file, positions in vectors.items():
            blob = encode(positions)
            out.write(blob)
            blobs.append((file, offset, len(blob), len(positions)))
            offset += len(blob)
        footer = _footer(folder, blobs)
        out.write(_MAGIC + footer + _FOOTER.pack(len(footer), b"\0\0\0\0") + _MAGIC)
    size = offset + 2 * len(_MAGIC) + len(footer) + _FOOTER.size
    return [Vector(blob[0], f"data/{name}", *blob[1:], size) for blob in blobs]


def _footer(folder: str, blobs: list[tuple[str, int, int, int]]) -> bytes:
    described = [
        {
            "type": "deletion-vector-v1",
            "fields": [_POSITION_FIELD],
            # Both are assigned when the file is added to the table.
            "snapshot-id": -1,
            "sequence-number": -1,
            "offset": offset,
            "length": length,
            "properties": {"referenced-data-file": f"{folder}/{file}", "cardinality": str(rows)},
        }
        for file, offset, length, rows in blobs
    ]
    return json.dumps({"blobs": described, "properties": {"created-by": "Tuskline"}}).encode()


def read_vector(folder: str | Path, vector: Vector) -> BitMap64:
    """The positions that are removed from a data file. Raises `CorruptError`."""
    path = Path(folder, vector.puffin)
    try:
        with checksums.read_whole(path), path.open("rb") as content:
            blob = os.pread(content.fileno(), vector.length, vector.offset)
    except FileNotFoundError:
        raise _damaged("the file is missing", str(path)) from None
    positions = decode(blob, str(path))
    if len(positions) != vector.rows:
        raise _damaged(
            f"a deletion vector has {len(positions)} positions, but its manifest records {vector.rows}",
            str(path),
        )
    return positions


def positions_of(vector: BitMap64) -> Positions:
    """The positions as an array, ascending."""
    return np.frombuffer(vector.to_array(), np.uint64).astype(np.uint32)


def _damaged(what: str, where: str) -> CorruptError:
    return CorruptError(what, where=where, repair=checksums.REPAIR)
