"""A small file that is replaced atomically: it has the old or the new content, never a mixture.

    magic (8)   version (u32)   length (u32)   JSON of that length   CRC-32C of all before it (u32)

Little-endian. Written under another name, synced, renamed over the old one, and the folder synced, in that order: a
crash leaves one of the two. A damaged file is renamed
(`NAME.corrupt-1`), never removed, and reported; one of a newer version is rejected.
"""

import json
import struct
from typing import Any

import google_crc32c

from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.runtime.folder import Disk

_HEAD = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
#: No record is longer; a length beyond it is damage.
_LARGEST = 1 << 20
NEW = ".new"
ASIDE = ".corrupt-"


def pack(magic: bytes, version: int, record: dict[str, Any]) -> bytes:
    """The file's bytes."""
    body = json.dumps(record).encode()
    data = _HEAD.pack(magic, version, len(body)) + body
    return data + _CRC.pack(google_crc32c.value(data))


def unpack(data: bytes, magic: bytes, newest: int) -> tuple[int, dict[str, Any]]:
    """Version and record. Raises `CorruptError`, or `NotSupportedError` above version `newest`."""
    if len(data) < _HEAD.size + _CRC.size:
        raise CorruptError(f"it is truncated to {len(data)} bytes")
    found, version, length = _HEAD.unpack_from(data)
    if found != magic:
        raise CorruptError(f"it begins with {found!r}, not {magic!r}")
    # The frame is the same in every version, so a newer file is known to be whole before it is refused.
    if length > _LARGEST or len(data) != _HEAD.size + length + _CRC.size:
        raise CorruptError(
            f"it has {len(data)} bytes, but its header gives {length} for the record"
        )
    if google_crc32c.value(data[: -_CRC.size]) != _CRC.unpack_from(data, len(data) - _CRC.size)[0]:
        raise CorruptError("its checksum does not match")
    if not 1 <= version <= newest:
        raise NotSupportedError(
            f"unsupported format {version} (this version supports 1 to {newest})",
            repair="use the version of Tuskline that wrote it, or a newer one",
        )
    try:
        record = json.loads(data[_HEAD.size : -_CRC.size])
    except ValueError as error:
        raise CorruptError(f"its record is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise CorruptError("its record is not a JSON object")
    return version, record


def replace(disk: Disk, name: str, data: bytes) -> None:
    """Make `data` the whole contents of the file, durably."""
    file = disk.create(name + NEW)
    try:
        file.write(data, 0)
        file.sync()
    finally:
        file.close()
    disk.rename(name + NEW, name)
    disk.sync()


def read_whole(disk: Disk, name: str) -> bytes:
    """All of a small file; of a longer one enough to tell that it is too long."""
    return disk.read(name, 0, _HEAD.size + _LARGEST + _CRC.size + 1)


def keep_aside(disk: Disk, name: str, mark: str = ASIDE) -> str:
    """Rename a damaged file, so that it is not read again: `mark` and a number behind its own; the name."""
    taken = disk.names()
    number = 1
    while f"{name}{mark}{number}" in taken:
        number += 1
    aside = f"{name}{mark}{number}"
    disk.rename(name, aside)
    disk.sync()
    return aside
