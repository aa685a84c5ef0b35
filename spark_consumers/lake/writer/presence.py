"""Heartbeats of drivers: `<lake>/_tuskline/drivers/<driver>`, so that one driver waits while another is at work.

Each driver has a file with its term and a counter that it increments every second, and holds a kernel lock on it for
as long as it runs. A file whose lock is free belongs to a dead driver; one whose counter does not change belongs to a
driver that is suspended, or is on a file system whose locks do not work across machines (`takeover.DriverWait` decides).
Safety does not depend on this: the term fences a writer.
"""

import contextlib
import fcntl
import json
import os
import threading
import uuid
from pathlib import Path

from spark_consumers.lake.manifest.exclusive import names
from spark_consumers.lake.manifest.takeover import Sign
from walsender_bridge.runtime import logs

#: Seconds between two beats.
_BEAT = 1.0
#: A file's size from the start: a full disk does not end a sign of life.
_SIZE = 128

log = logs.logger()


class Presence:
    """One driver's heartbeat, and those of the others. `folder` is the lake's `_tuskline`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "drivers"
        self.name = uuid.uuid4().hex
        self._term = 0
        self._beat = 0
        self._file: int | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self, term: int) -> None:
        """Show that this driver writes under `term`, or tries to take over under it; 0: neither.

        Raises `OSError` if no sign can be made; the next claim tries again.
        """
        with self._lock:
            self._term = term
            if self._file is not None and not names(self._folder / self.name, self._file):
                # The lake was replaced in its folder.
                os.close(self._file)
                self._file = None
            if self._file is None:
                self._begin()
            self._write()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sign of life", daemon=True)
                self._thread.start()

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f".{self.name}"
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            # Where the file system has no locks, the beats have to do.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write()
            # It gets its name once it is locked, so it is never mistaken for a dead driver's.
            draft.rename(self._folder / self.name)
        except OSError:
            # On a full disk the next claim begins again.
            draft.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None
            raise

    def _run(self) -> None:
        while not self._stop.wait(_BEAT):
            with self._lock, contextlib.suppress(OSError):
                if self._file is not None:
                    self._write()

    def _write(self) -> None:
        assert self._file is not None
        self._beat += 1
        record = json.dumps({"term": self._term, "beat": self._beat, "pid": os.getpid()})
        os.pwrite(self._file, record.ljust(_SIZE).encode(), 0)

    def close(self) -> None:
        """Take the sign away: another driver need not wait."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._file is not None:
            (self._folder / self.name).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def others(self) -> dict[str, Sign]:
        """The signs of all other drivers; those of dead ones are removed."""
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                if path.name != self.name and not path.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):
                        found[path.name] = _read_sign(path)
        for name in [name for name, sign in found.items() if sign.is_dead]:
            (self._folder / name).unlink(missing_ok=True)
        return found


def _read_sign(path: Path) -> Sign:
    with path.open("rb") as file:
        beat = file.read(_SIZE)
        try:
            term = int(json.loads(beat)["term"])
        except (ValueError, KeyError, TypeError):
            # Read in the middle of a write: it lives.
            return Sign(2**63, beat)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return Sign(term, beat)
        return Sign(term, beat, is_dead=True)
