"""Finds segments that crash their reader, by reading each segment in a child process.

LMDB reads its file through a memory map and trusts the sizes and page numbers in it. A flipped bit in one of them can
kill the reader with SIGSEGV or SIGBUS, and a restarted log server would crash at the same read for ever. So a
log server that is started after such a crash (`supervisor.last_signal`) has a child read every segment before it opens
any. A segment that crashes the child is renamed with the reason (`damaged_segments`): its stream's replica is invalid and
reports why, and the log server serves all others.

Invariant: the data directory is locked during this, so there are no writers. A segment that is unreadable for a temporary
reason, such as missing permissions, is left in place.
"""

import contextlib
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import lmdb

from walsender_bridge.change_log.replica import damaged_segments
from walsender_bridge.change_log.storage.segment import DAMAGE, Segment
from walsender_bridge.errors import CorruptError, UnavailableError
from walsender_bridge.runtime import logs

#: Signals that kill a reader of a damaged memory map; LMDB's own assertions abort.
SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)

_log = logs.logger()


def keep_fatal_aside(streams: Path) -> list[CorruptError]:
    """Read every segment below this folder; return the errors of those that were renamed."""
    kept = []
    for folder, reason in find_fatal(streams.glob("*/*")):
        error = damaged_segments.keep_aside(
            folder, CorruptError(reason, where=str(folder / "data.mdb"))
        )
        _log.error("damaged segment renamed", where=error.where, reason=error.what)
        kept.append(error)
    return kept


def find_fatal(folders: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """The segments among these folders that cannot be read, with the reasons."""
    waiting = [each for each in sorted(folders) if Segment.offset_in_name(each.name) is not None]
    while waiting:
        done, reason = _read(waiting)
        if reason:
            yield waiting[done], reason
        waiting = waiting[done + 1 :]


def _read(folders: Sequence[Path]) -> tuple[int, str]:
    """Return how many of them a child has read, and why it could not read the next one; empty if it read all."""
    child = subprocess.run(
        [sys.executable, "-m", __name__, *map(str, folders[:1000])],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    reported = child.stdout.decode().splitlines()
    done = reported.count("read")
    if -child.returncode in SIGNALS:
        return (
            done,
            f"reading the segment kills the process with {signal.Signals(-child.returncode).name}",
        )
    if reported and reported[-1] != "read":
        return done, reported[-1]
    return max(done - 1, 0), ""


def _read_all(folder: Path) -> None:
    """Read every byte of every row. Raises `CorruptError`."""
    segment = Segment(folder, 0)
    try:
        with segment.reading() as snapshot:
            for name in (b"meta", b"entries", b"index", b"schemas", b"relations"):
                left = snapshot.count(name)
                for key, value in snapshot.rows(name):
                    # Pages that point to each other would form an endless loop.
                    if not left:
                        raise CorruptError(
                            "segment has more rows than were written", where=str(folder)
                        )
                    left -= 1
                    bytes(key), bytes(value)
    except DAMAGE as error:
        raise CorruptError(f"could not read segment: {error}", where=str(folder)) from error
    finally:
        segment.close()


def main() -> None:
    """In the child: read these segments, and report for each that it was read, or why not."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for folder in sys.argv[1:]:
        try:
            # A temporary error is reported by the next reader that meets it.
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
