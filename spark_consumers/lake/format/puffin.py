"""Deletion vectors: for each data file the positions of its removed rows, each in a Puffin file of its own.

    "PFA1" | blob | "PFA1" | footer (JSON) | its length, i32 LE | flags, 4 zero bytes | "PFA1"
    blob: length of the next two, u32 BE | D1 D3 39 64 | 64-bit roaring bitmap | CRC32 of these two, u32 BE

The bitmap is in the portable format of the roaring specification, blobs are of Iceberg's type `deletion-vector-v1`, and are
found by their offset and length, which the table's manifests record: the footer is for other readers.

The format allows several vectors in one file, and earlier versions wrote them so. But there are readers that take two
vectors of one file for the same: DuckDB 1.5 applies the one to the data file of the other.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.data_files import whole_file
from spark_consumers.lake.format.table_format import Vector
from spark_consumers.lake.store.place import Place, place, read_range
from walsender_bridge.errors import CorruptError

_MAGIC = b"PFA1"
_VECTOR_MAGIC = b"\xd1\xd3\x39\x64"
_U32 = struct.Struct(">I")
_FOOTER = struct.Struct("<i4s")
#: The number that Iceberg reserves for the position of a row.
_POSITION_FIELD = 2147483645

#: Files that are written at the same time.
_THREADS = 8

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


def write_vectors(folder: str, prefix: str, vectors: Mapping[str, BitMap64]) -> list[Vector]:
    """Write the vectors of these data files (paths below the table's `folder`); each file's name begins with `prefix`."""

    def write(numbered: tuple[int, tuple[str, BitMap64]]) -> Vector:
        number, (file, positions) = numbered
        return _write_vector(folder, f"data/{prefix}-{number}.puffin", file, positions)

    # Each waits for the disk more than it computes.
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="vector") as pool:
        return list(pool.map(write, enumerate(vectors.items())))


def _write_vector(folder: str, name: str, file: str, positions: BitMap64) -> Vector:
    blob = encode(positions)
    footer = _footer(f"{folder}/{file}", len(blob), len(positions))
    end = _MAGIC + footer + _FOOTER.pack(len(footer), b"\0\0\0\0") + _MAGIC
    with whole_file(f"{folder}/{name}") as out:
        out.write(_MAGIC + blob + end)
    size = len(_MAGIC) + len(blob) + len(end)
    return Vector(file, name, len(_MAGIC), len(blob), len(positions), size)


def _footer(file: str, length: int, rows: int) -> bytes:
    blob = {
        "type": "deletion-vector-v1",
        "fields": [_POSITION_FIELD],
        # Both are assigned when the file is added to the table.
        "snapshot-id": -1,
        "sequence-number": -1,
        "offset": len(_MAGIC),
        "length": length,
        "properties": {"referenced-data-file": file, "cardinality": str(rows)},
    }
    return json.dumps({"blobs": [blob], "properties": {"created-by": "Tuskline"}}).encode()


def read_vector(folder: str | Place, vector: Vector) -> BitMap64:
    """The positions that are removed from a data file. Raises `CorruptError`."""
    path = place(folder) / vector.puffin
    try:
        with checksums.read_whole(path):
            blob = read_range(path, vector.offset, vector.length)
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
