"""A run: an immutable file that says for some rows of a table where they are, in the order of their digests.

    "TUSKRUN1" | record ... | first digests of the blocks | CRC32s of the blocks | tables (JSON) | trailer
    record: upper and lower half of the digest, u64; data file, u32; position, u32
    trailer: number of records, u64; bytes of the tables, u32; CRC32 of all between the records and here, u32; "TUSKRUN1"

All numbers are little-endian. A block is `BLOCK` records, about 16 KiB. The upper halves of the blocks' first digests are
in memory while a run is read, 12 bytes a block with the CRC: a lookup therefore reads the block that has the digest, and
no other. The tables name the data files (`DataFile`), and what the epochs of this run have changed of any: deletion vectors,
and files that are no longer the table's.

A reader needs `read(offset, length)` and the size, nothing else of a file system.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from spark_consumers.lake.format.data_files import whole_file
from spark_consumers.lake.format.table_format import Vector
from spark_consumers.lake.index.digests import UInt64s
from spark_consumers.lake.layout.arrangement import NO_PARTITION
from spark_consumers.lake.store.place import ObjectPlace, Place, place

RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("file", "<u4"), ("position", "<u4")])
Records = npt.NDArray[np.void]

#: Records of a block.
BLOCK = 682
_MAGIC = b"TUSKRUN1"
_TRAILER = struct.Struct("<QII8s")


class IndexDamagedError(Exception):
    """A run is missing, or is not what was written. The index is built again from the table's files."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file: its path below the table's folder, its rows, removed ones among them, its size in bytes, its partition."""

    name: str
    rows: int
    size: int
    partition: str = NO_PARTITION


@dataclass(frozen=True)
class Tables:
    """What a run knows besides its records.

    `files`: those that the records are of, by their number there. `vectors` and `gone`: what has changed of these and of
    older runs' files: the deletion vectors, and the files that the table does not have any more.
    """

    files: tuple[DataFile, ...] = ()
    vectors: tuple[Vector, ...] = ()
    gone: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Run:
    """A run as the manifest has it: its path below the table's folder, and how much it holds."""

    name: str
    weight: int


def write_run(folder: str, name: str, records: Iterable[Records], tables: Tables) -> Run:
    """Write a run of these records, which come in the order of their digests, as `name` below the table's folder."""
    fences: list[int] = []
    sums: list[int] = []
    count = 0
    with whole_file(str(place(folder) / name)) as out:
        out.write(_MAGIC)
        for block in _blocks(records):
            content = block.tobytes()
            fences.append(int(block["high"][0]))
            sums.append(zlib.crc32(content))
            count += len(block)
            out.write(content)
        described = _dump(tables)
        rest = np.array(fences, "<u8").tobytes() + np.array(sums, "<u4").tobytes() + described
        out.write(rest + _TRAILER.pack(count, len(described), zlib.crc32(rest), _MAGIC))
    weight = count + len(tables.files) + len(tables.vectors) + len(tables.gone)
    return Run(name, weight)


def _blocks(records: Iterable[Records]) -> Iterator[Records]:
    left = np.zeros(0, RECORD)
    for part in records:
        left = np.concatenate([left, part]) if len(left) else part
        whole = len(left) // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            yield left[start : start + BLOCK]
        left = left[whole:]
    if len(left):
        yield left


def _dump(tables: Tables) -> bytes:
    record = {
        "files": [_listed(each) for each in tables.files],
        "vectors": [_listed(each) for each in tables.vectors],
        "gone": sorted(tables.gone),
    }
    return json.dumps(record).encode()


def _listed(each: DataFile | Vector) -> list[str | int]:
    """Its members. A partition that it does not have is left out, as earlier versions know none."""
    found = [getattr(each, name) for name in each.__slots__]
    return found if each.partition else found[:-1]


@dataclass(frozen=True)
class RunReader:
    """One run. `where` names it in errors. Everything raises `IndexDamagedError`."""

    where: str
    read: Callable[[int, int], bytes]
    count: int
    tables: Tables
    fences: UInt64s
    sums: npt.NDArray[np.uint32] = field(repr=False)

    @classmethod
    def open(cls, where: str, read: Callable[[int, int], bytes], size: int) -> "RunReader":
        """The run of this size."""
        if size < len(_MAGIC) + _TRAILER.size:
            raise IndexDamagedError(f"{where}: the file is truncated")
        trailer = read(size - _TRAILER.size, _TRAILER.size)
        count, described, crc, magic = _TRAILER.unpack(trailer)
        blocks = -(-count // BLOCK)
        rest = blocks * 12 + described
        begin = len(_MAGIC) + count * RECORD.itemsize
        if magic != _MAGIC or begin + rest + _TRAILER.size != size:
            raise IndexDamagedError(f"{where}: this is not a run of the row index")
        content = read(begin, rest)
        if zlib.crc32(content) != crc or read(0, len(_MAGIC)) != _MAGIC:
            raise IndexDamagedError(f"{where}: checksum mismatch")
        found = json.loads(content[blocks * 12 :])
        tables = Tables(
            tuple(DataFile(*each) for each in found["files"]),
            tuple(Vector(*each) for each in found["vectors"]),
            frozenset(found["gone"]),
        )
        fences = np.frombuffer(content, "<u8", blocks)
        sums = np.frombuffer(content, "<u4", blocks, blocks * 8)
        return cls(where, read, count, tables, fences, sums)

    def blocks(self, first: int, last: int) -> Records:
        """The records of these blocks, `last` included."""
        size = BLOCK * RECORD.itemsize
        end = min((last + 1) * BLOCK, self.count)
        content = self.read(len(_MAGIC) + first * size, (end - first * BLOCK) * RECORD.itemsize)
        for number in range(first, last + 1):
            place = (number - first) * size
            if zlib.crc32(content[place : place + size]) != self.sums[number]:
                raise IndexDamagedError(f"{self.where}: checksum mismatch in block {number}")
        return np.frombuffer(content, RECORD)

    def blocks_with(self, low: UInt64s, high: UInt64s) -> tuple[npt.NDArray[np.int64], ...]:
        """For each range of upper halves the first and the last block that may have some; -1 as last if none has."""
        # A digest that a block begins with may be at the end of the block before, too.
        first = np.searchsorted(self.fences, low, "left") - 1
        last = np.searchsorted(self.fences, high, "right") - 1
        return np.maximum(first, 0), last

    def between(self, low: int, high: int | None) -> Records:
        """The records whose upper halves are at least `low` and less than `high` (None: all that follow)."""
        if not self.count:
            return np.zeros(0, RECORD)
        first = max(int(np.searchsorted(self.fences, np.uint64(low), "left")) - 1, 0)
        last = len(self.fences) - 1
        if high is not None:
            last = int(np.searchsorted(self.fences, np.uint64(high), "left")) - 1
        if last < first:
            return np.zeros(0, RECORD)
        found = self.blocks(first, last)
        begin = int(np.searchsorted(found["high"], np.uint64(low), "left"))
        end = len(found)
        if high is not None:
            end = int(np.searchsorted(found["high"], np.uint64(high), "left"))
        return found[begin:end]


@contextmanager
def open_runs(folder: str, names: Sequence[str]) -> Iterator[list[RunReader]]:
    """These runs of the table in `folder`, in their order. Raises `IndexDamagedError`, also while they are read."""
    opened: list[int] = []
    try:
        yield [_opened(place(folder) / name, opened) for name in names]
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _opened(path: Place, opened: list[int]) -> RunReader:
    if isinstance(path, ObjectPlace):
        return _of_object(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise IndexDamagedError(f"{path}: the file is missing") from None
    opened.append(descriptor)

    def read(offset: int, length: int) -> bytes:
        try:
            found = os.pread(descriptor, length, offset)
        except OSError as error:
            raise IndexDamagedError(f"{path}: {error.strerror}") from error
        if len(found) != length:
            raise IndexDamagedError(f"{path}: the file is truncated")
        return found

    return RunReader.open(str(path), read, os.fstat(descriptor).st_size)


def _of_object(path: ObjectPlace) -> RunReader:
    def read(offset: int, length: int) -> bytes:
        try:
            found = path.read_range(offset, length) if length else b""
        except FileNotFoundError:
            raise IndexDamagedError(f"{path}: the file is missing") from None
        if len(found) != length:
            raise IndexDamagedError(f"{path}: the file is truncated")
        return found

    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise IndexDamagedError(f"{path}: the file is missing") from None
    return RunReader.open(str(path), read, size)
