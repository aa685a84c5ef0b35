r"""A checksum beside each file of the lake, in the form that Hadoop's local file system reads by itself.

    data/00...-0.parquet    data/.00...-0.parquet.crc    "crc\0" | u32 chunk | CRC32 of each chunk (big-endian)

Spark, and any other reader that uses Hadoop, verifies each chunk as it reads it, in any session and for any kind of
file: Parquet with its footer, manifests, metadata. `check` does the same for files that Python reads.

Invariants. A file is complete and has its name before its checksums are made, and is referred to only after that. A
small file is one chunk, so truncation of it is always detected. The checksums are removed before their file, so those
without a file mean a loss. A file that is removed while it is sealed leaves none either: `seal` looks for the file
after it has made them, `remove` removes them again after the file, and the later of the two finds the other's work. A
file without checksums was written by an older version, or lost them in a power failure: they are not synced, since an
epoch of many tables would wait for each, unless they are larger than a disk writes atomically.

An object of a bucket has none here: the store has its own, which it compares when an object arrives and while it keeps it.
"""

import contextlib
import errno
import os
import struct
import uuid
import zlib
from collections.abc import Iterator
from typing import BinaryIO, TypeVar, cast

from spark_consumers.lake.store.place import ObjectPlace, Place, is_object
from walsender_bridge.errors import CorruptError

_P = TypeVar("_P", bound=Place)

_MAGIC = b"crc\0"
_HEADER = struct.Struct(">4sI")
_SUM = struct.Struct(">I")
#: The chunk of larger files: the least that a reader of a few bytes reads.
CHUNK = 64 << 10
#: The largest file that is a single chunk.
SMALL = 1 << 20
#: Bytes that a disk writes atomically.
_AT_ONCE = 4000

REPAIR = "restore the file from a backup, or copy its table again: tuskline table resync"


def sums_of(file: _P) -> _P:
    """Where the checksums of a file are."""
    return cast("_P", file.with_name(f".{file.name}.crc"))


def file_of(sums: Place) -> Place | None:
    """The file that these checksums are of; None: the name is another kind of file's."""
    name = sums.name
    own = name.startswith(".") and name.endswith(".crc") and len(name) > len("..crc")
    return sums.with_name(name[1 : -len(".crc")]) if own else None


def seal(file: Place) -> None:
    """Make the file's checksums, unless it has them."""
    if isinstance(file, ObjectPlace):
        return
    sums = sums_of(file)
    if sums.exists():
        return
    with file.open("rb") as content:
        size = file.stat().st_size
        chunk = SMALL if size <= SMALL else CHUNK
        made = b"".join(_SUM.pack(found) for found in _chunks(content, chunk))
    draft = sums.with_name(f"{sums.name}.{uuid.uuid4().hex}.tmp")
    try:
        with draft.open("xb") as out:
            out.write(_HEADER.pack(_MAGIC, chunk) + made)
            if len(made) > _AT_ONCE:
                out.flush()
                os.fsync(out.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, sums)
        if not file.exists():
            sums.unlink(missing_ok=True)
    finally:
        draft.unlink(missing_ok=True)


def remove(file: Place) -> None:
    """Remove the file, and its checksums before it; and those that `seal` has made in between."""
    if isinstance(file, ObjectPlace):
        file.unlink()
        return
    sums_of(file).unlink(missing_ok=True)
    file.unlink(missing_ok=True)
    sums_of(file).unlink(missing_ok=True)


def remove_of(table: Place, file: Place) -> bool:
    """Remove the file if it is one of the table in this folder, by whatever name; whether it is.

    A table's metadata may name any file: of another lake, that this one is a copy of, or a user's own.
    """
    own = [str((table / name).resolve()) for name in ("data", "metadata")]
    if not any(f"{file.parent.resolve()}/".startswith(f"{folder}/") for folder in own):
        return False
    remove(file)
    return True


def check(file: Place) -> bool:
    """Compare the whole file with its checksums; False if it has none, as objects of a bucket.

    Raises `CorruptError` for another content, a file that is missing or that the disk cannot read, or checksums that are
    damaged themselves.
    """
    if isinstance(file, ObjectPlace):
        return False
    sums = sums_of(file)
    try:
        with read_whole(sums):
            sums_content = sums.read_bytes()
    except FileNotFoundError:
        if not file.exists():
            raise CorruptError("the file is missing", where=str(file), repair=REPAIR) from None
        return False
    if not any(sums_content):
        return False
    if len(sums_content) < _HEADER.size or (len(sums_content) - _HEADER.size) % _SUM.size:
        raise _damaged(sums, "the checksum file is truncated")
    magic, chunk = _HEADER.unpack_from(sums_content)
    if magic != _MAGIC or not 0 < chunk <= SMALL:
        raise _damaged(sums, "this is not a checksum file")
    wanted = sums_content[_HEADER.size :]
    try:
        with read_whole(file), file.open("rb") as content:
            place = 0
            for found in _chunks(content, chunk):
                if wanted[place : place + _SUM.size] != _SUM.pack(found):
                    at = place // _SUM.size * chunk
                    raise _damaged(file, f"checksum mismatch in the chunk at byte {at}")
                place += _SUM.size
    except FileNotFoundError:
        raise CorruptError("the file is missing", where=str(file), repair=REPAIR) from None
    if place != len(wanted):
        raise _damaged(file, "the file is truncated")
    return True


@contextlib.contextmanager
def read_whole(file: Place) -> Iterator[None]:
    """A disk that cannot read what it has written is damage of this file, and no other one's: `CorruptError`.

    So is an object that is not there: it has no checksums that tell so before.
    """
    try:
        yield
    except FileNotFoundError:
        if not is_object(file):
            raise
        raise CorruptError("the file is missing", where=str(file), repair=REPAIR) from None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise _damaged(file, f"could not read the file from disk: {error.strerror}") from error


def _chunks(content: BinaryIO, size: int) -> Iterator[int]:
    while chunk := content.read(size):
        yield zlib.crc32(chunk)


def _damaged(file: Place, what: str) -> CorruptError:
    return CorruptError(what, where=str(file), repair=REPAIR)
