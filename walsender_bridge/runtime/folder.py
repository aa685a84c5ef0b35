"""One folder on disk, as the safekeeper's storage uses it: the few operations whose order its safety rests on.

What is durable when: a write to a file that was opened `durable`, when it returns (O_DSYNC; past the page cache
where the file system has O_DIRECT); any other write, when the file's `sync` returns; a name (created, renamed,
removed), when the folder's `sync` returns. Nothing else may be relied on: an unsynced write can be there in part,
in any order. A test's disk behind the same two interfaces takes it that literally.

Errors are `OSError`, as the system gives them; what they mean is the caller's to say.
"""

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Protocol

from walsender_bridge.runtime.durable import sync_folder

#: Offsets, lengths and addresses of durable writes are multiples of this (the logical block of any disk).
BLOCK_BYTES = 4096


class File(Protocol):
    """An open file of a `Disk`."""

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of `data` at `offset`."""

    def sync(self) -> None:
        """Make the contents durable."""

    def close(self) -> None:
        """Close it; it says nothing about what is durable."""


class Disk(Protocol):
    """One folder. Names are plain file names in it."""

    def names(self) -> set[str]:
        """What is there."""

    def size(self, name: str) -> int:
        """A file's length in bytes."""

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Bytes of a file, fewer at its end."""

    def create(self, name: str) -> File:
        """A new, empty file, or an emptied one, for writes that are synced later."""

    def open(self, name: str, *, durable: bool) -> File:
        """An existing file for writing; `durable` writes are whole blocks, and on disk when they return."""

    def rename(self, old: str, new: str) -> None:
        """Give a file another name; a file that had that name is gone."""

    def remove(self, name: str) -> None:
        """Remove a file."""

    def sync(self) -> None:
        """Make the names durable."""

    def free_bytes(self) -> int:
        """What the file system still has room for."""


class _OpenFile:
    """A file descriptor. `path` is given where direct writes may have to be given up."""

    def __init__(self, descriptor: int, *, direct_path: Path | None = None) -> None:
        self._descriptor = descriptor
        self._direct_path = direct_path

    def write(self, data: memoryview | bytes, offset: int) -> None:
        try:
            written = os.pwrite(self._descriptor, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or self._direct_path is None:
                raise
            # The file system has O_DIRECT, and not for writes like ours.
            os.close(self._descriptor)
            self._descriptor = os.open(self._direct_path, _DURABLE)
            self._direct_path = None
            written = os.pwrite(self._descriptor, data, offset)
        while written < len(data):
            more = os.pwrite(self._descriptor, data[written:], offset + written)
            if more == 0:
                raise OSError(errno.EIO, "the disk takes no more bytes")
            written += more

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


_DURABLE = os.O_RDWR | os.O_CLOEXEC | os.O_DSYNC


class FolderDisk:
    """A real folder. `direct=False` writes through the page cache everywhere."""

    def __init__(self, folder: Path, *, direct: bool = True) -> None:
        self.folder = folder
        self._direct = getattr(os, "O_DIRECT", 0) if direct else 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self) -> set[str]:
        """See `Disk`."""
        return {path.name for path in self.folder.iterdir()}

    def size(self, name: str) -> int:
        """See `Disk`."""
        return (self.folder / name).stat().st_size

    def read(self, name: str, offset: int, length: int) -> bytes:
        """See `Disk`."""
        descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, length, offset)
        finally:
            os.close(descriptor)

    def create(self, name: str) -> File:
        """See `Disk`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return _OpenFile(os.open(self.folder / name, flags, 0o600))

    def open(self, name: str, *, durable: bool) -> File:
        """See `Disk`."""
        path = self.folder / name
        if not durable:
            return _OpenFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        if self._direct:
            with contextlib.suppress(OSError):
                return _OpenFile(os.open(path, _DURABLE | self._direct), direct_path=path)
        return _OpenFile(os.open(path, _DURABLE))

    def rename(self, old: str, new: str) -> None:
        """See `Disk`."""
        (self.folder / old).rename(self.folder / new)

    def remove(self, name: str) -> None:
        """See `Disk`."""
        (self.folder / name).unlink()

    def sync(self) -> None:
        """See `Disk`."""
        sync_folder(self.folder)

    def free_bytes(self) -> int:
        """See `Disk`."""
        return shutil.disk_usage(self.folder).free

    def __str__(self) -> str:
        return str(self.folder)
