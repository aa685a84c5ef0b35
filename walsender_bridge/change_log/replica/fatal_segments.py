"""Finds segments that crash or refuse LMDB, in a child process.

LMDB reads its file through a memory map and trusts the sizes and page numbers in it. A flipped bit in one of them can
kill the process with SIGSEGV or SIGBUS, and a restarted log server would crash at the same read or write for ever. So a
child checks the segments before the log server opens any:

- every page (`pages`) and every row of all segments, after such a crash (`supervisor.last_signal`);
- every page of each stream's newest segment, the only one that is written, after any end of the log server that was not
  clean; and that of one stream when LMDB refuses to write.

A segment that is damaged, or crashes the child, is renamed with the reason (`damaged_segments`): its stream's replica is invalid,
reports why, and is synchronized from another one, and the log server serves all others. A trial write would not do: which
pages it meets depends on the free list, and it would write by a damaged one.

Invariant: there are no writers during this: the data directory, or the replica, is locked. A segment that is unreadable for a
temporary reason, such as missing permissions, is left in place.
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
from walsender_bridge.change_log.storage import pages
from walsender_bridge.change_log.storage.segment import DAMAGE, Segment
from walsender_bridge.errors import CorruptError, UnavailableError
from walsender_bridge.runtime import logs

#: Signals that kill a reader of a damaged memory map; LMDB's own assertions abort.
SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE)
#: To the child: what to read of each segment.
_PAGES, _ROWS = "pages", "rows"

_log = logs.logger()


def keep_fatal_aside(streams: Path) -> list[CorruptError]:
    """Read every segment below this folder; return the errors of those that were renamed."""
    return _keep_aside(find_fatal(streams.glob("*/*")))


def keep_newest_aside(streams: Path) -> list[CorruptError]:
    """Check the pages of each stream's newest segment; return the errors of those that were renamed."""
    newest = (max(_segments(stream.iterdir()), default=None) for stream in streams.iterdir())
    return _keep_aside(_find((each for each in newest if each is not None), _PAGES))


def find_fatal(folders: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """The segments among these folders that cannot be read, with the reasons."""
    return _find(folders, _ROWS)


def damage_of(folder: Path) -> str:
    """What is wrong with the pages of a segment; empty if nothing is."""
    return next((reason for _, reason in _find([folder], _PAGES)), "")


def _keep_aside(found: Iterable[tuple[Path, str]]) -> list[CorruptError]:
    kept = []
    for folder, reason in found:
        error = damaged_segments.keep_aside(
            folder, CorruptError(reason, where=str(folder / "data.mdb"))
        )
        _log.error("damaged segment renamed", where=error.where, reason=error.what)
        kept.append(error)
    return kept


def _segments(folders: Iterable[Path]) -> list[Path]:
    return [each for each in sorted(folders) if Segment.offset_in_name(each.name) is not None]


def _find(folders: Iterable[Path], what: str) -> Iterator[tuple[Path, str]]:
    waiting = _segments(folders)
    while waiting:
        done, reason = _read(waiting, what)
        if reason:
            yield waiting[done], reason
        waiting = waiting[done + 1 :]


def _read(folders: Sequence[Path], what: str) -> tuple[int, str]:
    """Return how many of them a child has read, and why it could not read the next one; empty if it read all."""
    child = subprocess.run(
        [sys.executable, "-m", __name__, what, *map(str, folders[:1000])],
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
    """Read every byte of every row as a reader does, and then every page. Raises `CorruptError`."""
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
    pages.check_pages(folder / "data.mdb")


def main() -> None:
    """In the child: read these segments, and report for each that it was read, or why not."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    what, *folders = sys.argv[1:]
    for folder in map(Path, folders):
        try:
            # A temporary error is reported by the next reader that meets it.
            with contextlib.suppress(OSError, lmdb.Error, UnavailableError):
                if what == _PAGES:
                    pages.check_pages(folder / "data.mdb")
                else:
                    _read_all(folder)
        except CorruptError as error:
            sys.stdout.write(f"{error.what}\n")
            sys.stdout.flush()
            return
        sys.stdout.write("read\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
