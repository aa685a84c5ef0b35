"""The spool's files: performs the effects of `core.py` on disk.

Invariant: files belong to one session and are removed with it; after a crash the server sends everything again, so
nothing here is ever synced to disk. Each session has a folder of its own, named after its writer's
term. The next session removes all others once it has acquired the slot: an older session that resumes finds its
folder gone, and cannot write into a file of the newer one.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from walsender_bridge.capture.events import SpoolAppend, SpoolCut
from walsender_bridge.capture.spool.core import split
from walsender_bridge.errors import CorruptError, SpoolError

#: Bytes that are read back at a time, unless a message is longer.
READ_BYTES = 1 << 20


class SpoolFiles:
    """The files of one session, in `folder/term`. Every method raises `SpoolError` for errors of the disk."""

    def __init__(self, folder: Path, term: int) -> None:
        self._folder = folder
        self._own = folder / str(term)
        self._writing: tuple[int, BinaryIO] | None = None
        self._reading: tuple[int, BinaryIO] | None = None

    def open(self) -> None:
        """Create the session's folder and remove those of earlier sessions."""
        with self._named(self._folder):
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            for other in self._folder.iterdir():
                if other != self._own:
                    shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        self._end_writing()
        self._end_reading()
        shutil.rmtree(self._own, ignore_errors=True)

    def append(self, effect: SpoolAppend) -> None:
        """Append to the transaction's file."""
        path = self._path(effect.xid)
        with self._named(path):
            if self._writing is None or self._writing[0] != effect.xid:
                self._end_writing()
                self._writing = (effect.xid, path.open("ab", buffering=0))
            file = self._writing[1]
            rest = memoryview(effect.data)
            while rest:
                rest = rest[file.write(rest) :]

    def cut(self, effect: SpoolCut) -> None:
        """Truncate the transaction's file, or remove it."""
        path = self._path(effect.xid)
        self._end_writing()
        with self._named(path):
            if effect.length:
                os.truncate(path, effect.length)
                return
            if self._reading is not None and self._reading[0] == effect.xid:
                self._end_reading()
            path.unlink()

    def read(self, xid: int) -> list[bytes]:
        """Read the next messages of the transaction's file: at least one until its end.

        Raises `CorruptError` if its contents are not what was written.
        """
        path = self._path(xid)
        with self._named(path):
            if self._reading is None:
                self._reading = (xid, path.open("rb"))
            file = self._reading[1]
            start, size = file.tell(), os.fstat(file.fileno()).st_size
            wanted = READ_BYTES
            while True:
                file.seek(start)
                data = file.read(wanted)
                messages, used = split(data, size)
                if messages:
                    file.seek(start + used)
                    return messages
                if len(data) < wanted:
                    raise CorruptError(
                        f"{len(data)} bytes at offset {start} are not a message",
                        where=str(path),
                        repair="find out which other program writes to this folder",
                    )
                wanted *= 8

    def _path(self, xid: int) -> Path:
        return self._own / f"{xid}.spool"

    def _end_writing(self) -> None:
        if self._writing is not None:
            self._writing[1].close()
            self._writing = None

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading[1].close()
            self._reading = None

    @contextmanager
    def _named(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SpoolError(
                f"could not access spool file: {error.strerror}",
                where=str(path),
                repair="free disk space there, or set the source's spool_limit to 0 to have the server keep "
                "large transactions on its own disk until they commit",
            ) from None
