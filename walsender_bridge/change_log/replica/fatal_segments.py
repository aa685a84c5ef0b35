"""Segments whose reading ends the process, found by reading each in a process of its own.

LMDB reads its file through a memory map and trusts the sizes and page numbers in it. A flipped bit in one of them can
end the reader with SIGSEGV or SIGBUS, and a log server that is started again would die at the same read for ever. So a
log server that is started after such a death (`supervisor.last_signal`) lets a child read every segment before it opens
any. A segment at which the child dies is kept aside with the reason (`damaged_segments`): its stream's replica is invalid and says
why, and the log server serves all others.

Invariant: the data directory is locked meanwhile, so nobody writes. What is not readable for a reason that may pass,
such as missing permissions, stays where it is.
"""

import contextlib
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import lmdb
import structlog

from walsender_bridge.change_log.replica import damaged_segments
from walsender_bridge.change_log.storage.segment import DAMAGE, Segment
from walsender_bridge.errors import CorruptError, UnavailableError

#: Signals by which a process ends that reads a damaged memory map; LMDB's own assertions abort.
SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)

_log = structlog.get_logger(__name__)


def keep_fatal_aside(streams: Path) -> list[CorruptError]:
    """Read every segment below this folder; the errors of those that are kept aside now."""
    waiting = [
        folder
        for folder in sorted(streams.glob("*/*"))
        if Segment.offset_in_name(folder.name) is not None
    ]
    kept = []
    while waiting:
        done, reason = _read(waiting)
        if reason:
            error = damaged_segments.keep_aside(
                waiting[done], CorruptError(reason, where=str(waiting[done] / "data.mdb"))
            )
            _log.error("segment kept aside", where=error.where, reason=error.what)
            kept.append(error)
        waiting = waiting[done + 1 :]
    return kept


def _read(folders: Sequence[Path]) -> tuple[int, str]:
    """How many of them were read in a child, and why the next one was not; empty: all were."""
    child = subprocess.run(
        [sys.executable, "-m", __name__, *map(str, folders[:1000])],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    told = child.stdout.decode().splitlines()
    done = told.count("read")
    if -child.returncode in SIGNALS:
        return done, f"reading it ends the process with {signal.Signals(-child.returncode).name}"
    if told and told[-1] != "read":
        return done, told[-1]
    return max(done - 1, 0), ""


def _read_all(folder: Path) -> None:
    """Touch every byte of every row. Raises `CorruptError`."""
    segment = Segment(folder, 0)
    try:
        with segment.reading() as snapshot:
            for name in (b"meta", b"entries", b"index", b"schemas", b"relations"):
                left = snapshot.count(name)
                for key, value in snapshot.rows(name):
                    # Pages that point to each other would be read for ever.
                    if not left:
                        raise CorruptError("it has more rows than were written", where=str(folder))
                    left -= 1
                    bytes(key), bytes(value)
    except DAMAGE as error:
        raise CorruptError(f"it cannot be read: {error}", where=str(folder)) from error
    finally:
        segment.close()


def main() -> None:
    """In the child: read these segments, and say of each that it was read, or why not."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for folder in sys.argv[1:]:
        try:
            # What may pass is met again, and named, by whoever reads it next.
            with contextlib.suppress(OSError, lmdb.Error, UnavailableError):
                _read_all(Path(folder))
        except CorruptError as error:
            sys.stdout.write(f"{error.what}\n")
            sys.stdout.flush()
            return
        sys.stdout.write("read\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
