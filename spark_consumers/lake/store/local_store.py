"""A lake's records as files in its folder, on a local disk or on one that machines share.

Created by `link` (`exclusive`), replaced by a rename. A process holds a kernel lock on its record, and so its death is
noticed at once.
"""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from spark_consumers.lake.store.drafts import Drafts
from spark_consumers.lake.store.exclusive import create_exclusively
from spark_consumers.lake.store.lake_store import STATE, Created, FoundRecord
from walsender_bridge.runtime import status_file


class LocalStore:
    """The lake's records below the folder `root` (`LakeStore`)."""

    has_locks = True
    pause = 0.0

    def __init__(self, root: Path) -> None:
        self.folder = root
        self.location = str(root)
        self._drafts = Drafts(root / STATE)

    @property
    def lock_domain(self) -> str:
        """See `LakeStore`: those of the same kernel and mount. Many file systems of several machines keep locks to each of them."""
        return f"{_kernel()} {(self.folder / STATE).stat().st_dev}"

    def create(self, name: str, content: bytes) -> Created:
        """See `LakeStore`; the outcome is always known here."""
        won = create_exclusively(self.folder / name, content)
        return Created.WON if won else Created.LOST

    def read(self, name: str) -> bytes:
        """See `LakeStore`."""
        return (self.folder / name).read_bytes()

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """See `LakeStore`."""
        with (self.folder / name).open("rb") as file:
            return os.pread(file.fileno(), length, offset)

    def replace(self, name: str, content: bytes, *, durable: bool = True) -> None:
        """See `LakeStore`."""
        path = self.folder / name
        if not durable:
            status_file.replace(path, content)
            return
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with draft.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def names(self, folder: str) -> list[str]:
        """See `LakeStore`. A name that begins with a dot is a draft's."""
        try:
            names = [path.name for path in (self.folder / folder).iterdir()]
        except FileNotFoundError:
            return []
        return [name for name in names if not name.startswith(".")]

    def remove(self, name: str) -> None:
        """See `LakeStore`."""
        (self.folder / name).unlink(missing_ok=True)

    def exists(self, name: str) -> bool:
        """See `LakeStore`."""
        return (self.folder / name).exists()

    def put_aside(self, name: str, to: str) -> None:
        """See `LakeStore`."""
        (self.folder / name).rename(self.folder / to)

    def hold(self, name: str, content: bytes, *, locked: bool) -> "LockedFile":
        """See `LakeStore`."""
        return LockedFile(self.folder / name, content, locked=locked)

    def held(self, folder: str) -> Iterator[FoundRecord]:
        """See `LakeStore`."""
        for name in self.names(folder):
            with contextlib.suppress(FileNotFoundError):
                yield _found(self.folder / folder / name)

    def where(self, name: str) -> str:
        """See `LakeStore`."""
        return str(self.folder / name)

    def is_at(self, location: str) -> bool:
        """See `LakeStore`: also by a symbolic link, or a second mount."""
        try:
            return self.folder.samefile(location)
        except OSError:
            return False

    def check(self) -> None:
        """See `LakeStore`: `link` has one winner on every file system."""

    def prepare(self, folder: str) -> None:
        """See `LakeStore`."""
        (self.folder / folder).mkdir(parents=True, exist_ok=True)

    def may_remove(self, folder: str) -> bool:
        """See `LakeStore`."""
        path = self.folder / folder
        return not path.exists() or os.access(path, os.R_OK | os.W_OK | os.X_OK)

    def drafts(self, folder: str) -> list[str]:
        """See `LakeStore`."""
        return [f"{folder}/{path.name}" for path in (self.folder / folder).glob(".*.tmp")]

    def sweep_drafts(self) -> int:
        """See `LakeStore`."""
        return self._drafts.sweep()


class LockedFile:
    """A file under a kernel lock for as long as its process lives (`HeldRecord`).

    Raises `OSError` if it cannot be made, or cannot be locked although it has to be.
    """

    def __init__(self, path: Path, content: bytes, *, locked: bool) -> None:
        path.parent.mkdir(exist_ok=True)
        self._path = path
        draft = path.with_name(f".{path.name}")
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with contextlib.nullcontext() if locked else contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.write(content)
            # It gets its name once it is locked, so it is never mistaken for a dead process's.
            draft.rename(path)
        except OSError:
            draft.unlink(missing_ok=True)
            os.close(self._file)
            raise

    def write(self, content: bytes) -> None:
        """See `HeldRecord`. Of the same length, so that a full disk does not end it."""
        os.pwrite(self._file, content, 0)
        # NFS sends what was written when a descriptor is closed; otherwise other machines would see it many seconds later.
        os.close(os.dup(self._file))

    def is_lost(self) -> bool:
        """See `HeldRecord`."""
        try:
            there, opened = self._path.stat(), os.fstat(self._file)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (opened.st_dev, opened.st_ino)

    def close(self) -> None:
        """See `HeldRecord`. One that is lost stays: another file has its name."""
        if not self.is_lost():
            self._path.unlink(missing_ok=True)
        os.close(self._file)

    def abandon(self) -> None:
        """See `HeldRecord`. The lock is free when the parent ends."""
        os.close(self._file)
        self._file = -1


@cache
def _kernel() -> str:
    """This kernel since its start; where that is not known, this process."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex


def _found(path: Path) -> FoundRecord:
    with path.open("rb") as file:
        content = file.read()
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return FoundRecord(path.name, content)
    return FoundRecord(path.name, content, is_dead=True)
