"""`python -m walsender_bridge.safekeeper.archiver`: uploads one safekeeper's complete segments, beside its hot loop.

An archive may be slow, or away for days: it is a process of its own, which only reads the segments. What the quorum
has committed it takes from the control file, where it is a second old at most. The hot loop keeps what is not
archived yet, up to a limit (`horizon`). An archive that holds something else ends the process: somebody has to look.
"""

import argparse
import signal
import sys
import threading
import time
from pathlib import Path

import structlog

from walsender_bridge import logs, supervisor
from walsender_bridge.errors import TusklineError, UnavailableError
from walsender_bridge.safekeeper import control_file, data_dir
from walsender_bridge.safekeeper.archive import Archive
from walsender_bridge.safekeeper.disk import FolderDisk

#: Seconds between two looks when there is nothing to do, and after a failure.
LOOK_SECONDS = 1.0
FAILED_SECONDS = 5.0
#: Seconds between two questions for WAL that the archive lacked.
AGAIN_SECONDS = 60.0

_log = structlog.get_logger(__name__)


def run(place: Path, url: str, stop: threading.Event) -> None:
    """Until `stop`. Raises `DivergedError`, `CorruptError`, `NotSupportedError`."""
    control, archive = FolderDisk(place / data_dir.CONTROL), None
    again_at = 0.0
    while not stop.is_set():
        # Read, never loaded: the file is the hot loop's, which may replace it at this moment.
        found = control_file.read(control)
        state = found[1] if found else None
        if state is None or not state.history:
            stop.wait(LOOK_SECONDS)
            continue
        if archive is None:
            archive = Archive(
                FolderDisk(place / data_dir.ARCHIVED),
                FolderDisk(place / data_dir.WAL),
                state.server.segment_size,
                url,
                node=f"{state.safekeeper:032x}",
            )
        try:
            if archive.step(state.commit_lsn):
                continue
            if archive.missing and time.monotonic() >= again_at:
                again_at = time.monotonic() + AGAIN_SECONDS
                archive.look_again()
            stop.wait(LOOK_SECONDS)
        except UnavailableError as error:
            _log.warning("the archive is behind", reason=error.what, repair=error.repair)
            stop.wait(FAILED_SECONDS)


def main(arguments: list[str]) -> int:
    """Run until a signal; the exit code."""
    supervisor.exit_with_parent()
    logs.configure()
    parser = argparse.ArgumentParser(prog="python -m walsender_bridge.safekeeper.archiver")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--archive", required=True, help="a folder: any URL that fsspec knows")
    given = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        run(given.data_dir, given.archive, stop)
    except TusklineError as error:
        logs.say_error(error)
        return error.cause
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
