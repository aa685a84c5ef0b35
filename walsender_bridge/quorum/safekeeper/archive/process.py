"""`python -m walsender_bridge.quorum.safekeeper.archive.process`: uploads one safekeeper's complete segments, beside its hot loop.

An archive may be slow, or away for days: it is a process of its own, which only reads the segments. What the quorum
has committed it takes from the control file, where it is a second old at most. The hot loop keeps what is not
archived yet, up to a limit (`horizon`). An archive that holds something else ends the process: somebody has to look.
"""

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog

from walsender_bridge.errors import DivergedError, TusklineError, UnavailableError
from walsender_bridge.quorum.safekeeper import control_file, data_dir
from walsender_bridge.quorum.safekeeper.archive.upload import Archive
from walsender_bridge.quorum.safekeeper.effects import ControlState
from walsender_bridge.runtime import logs, status_file, supervisor
from walsender_bridge.runtime.folder import FolderDisk

#: Seconds between two looks when there is nothing to do, and after a failure.
LOOK_SECONDS = 1.0
FAILED_SECONDS = 5.0
#: Seconds between two questions for WAL that the archive lacked, or has otherwise.
AGAIN_SECONDS = 60.0

_log = structlog.get_logger(__name__)


def run(
    place: Path, url: str, stop: threading.Event, tell: Callable[[TusklineError | None], None]
) -> None:
    """Until `stop`; `tell` hears of each look why nothing could be archived. Raises `CorruptError`, `NotSupportedError`."""
    archive: Archive | None = None
    again_at = 0.0
    while not stop.is_set():
        try:
            archive = archive or _open(place, url)
            if archive is not None and archive.step(_commit_lsn(place)):
                tell(None)
                continue
            if archive is not None and time.monotonic() >= again_at:
                again_at = time.monotonic() + AGAIN_SECONDS
                archive.rescan()
            tell(None)
            stop.wait(LOOK_SECONDS)
        except (UnavailableError, DivergedError, OSError) as error:
            found = _its_disk(error, place) if isinstance(error, OSError) else error
            _log.warning("the archive is behind", reason=found.what, repair=found.repair)
            tell(found)
            # What is remembered is read again: it may have been removed on purpose.
            archive = None
            # An archive that holds something else was read to find that out.
            stop.wait(AGAIN_SECONDS if isinstance(error, DivergedError) else FAILED_SECONDS)


def _open(place: Path, url: str) -> Archive | None:
    """The archive; None: there is no WAL yet. Raises as `control_file.read`, and `OSError`."""
    state = _read(place)
    if state is None or not state.history:
        return None
    return Archive(
        FolderDisk(place / data_dir.ARCHIVED),
        FolderDisk(place / data_dir.WAL),
        state.server.segment_size,
        url,
        node=f"{state.safekeeper:032x}",
        began_lsn=state.history.entries[0].start_lsn,
    )


def _commit_lsn(place: Path) -> int:
    state = _read(place)
    return 0 if state is None else state.commit_lsn


def _read(place: Path) -> ControlState | None:
    # Read, never loaded: the file is the hot loop's, which may replace it at this moment.
    found = control_file.read(FolderDisk(place / data_dir.CONTROL))
    return found[1] if found else None


def _its_disk(error: OSError, place: Path) -> UnavailableError:
    return UnavailableError(
        f"the safekeeper's files cannot be read: {error.strerror or error}",
        where=str(error.filename or place),
        repair="see whether its disk works; it is tried again",
    )


def _tell(path: Path | None, error: TusklineError | None) -> None:
    if path is not None:
        status_file.write(path, {"error": None if error is None else error.to_wire()})


def main(arguments: list[str]) -> int:
    """Run until a signal; the exit code."""
    supervisor.exit_with_parent()
    logs.configure()
    parser = argparse.ArgumentParser(
        prog="python -m walsender_bridge.quorum.safekeeper.archive.process"
    )
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--archive", required=True, help="a folder: any URL that fsspec knows")
    parser.add_argument("--status-file", type=Path, help="where to say how it is (JSON)")
    given = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        run(given.data_dir, given.archive, stop, partial(_tell, given.status_file))
    except TusklineError as error:
        logs.say_error(error)
        return error.cause
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
