"""`python -m walsender_bridge.quorum.safekeeper.archive.process`: uploads one safekeeper's complete segments, beside its hot loop.

An archive may be slow, or unreachable for days: so this is a process of its own, which only reads the segments. It takes
`commit_lsn` from the control file, where it is at most a second old. The hot loop keeps WAL that is not archived yet, up
to a limit (`horizon`). An archive with different content ends the process: an operator has to act.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from walsender_bridge.errors import DivergedError, TusklineError, UnavailableError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.safekeeper import control_file, data_dir
from walsender_bridge.quorum.safekeeper.archive.settings import ArchiverSettings
from walsender_bridge.quorum.safekeeper.archive.upload import Archive
from walsender_bridge.quorum.safekeeper.effects import ControlState
from walsender_bridge.quorum.safekeeper.status_record import ArchiverStatus
from walsender_bridge.runtime import child_process, logs, status_file
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.folder import FolderDisk

#: Seconds between two polls when there is nothing to do, and after a failure.
POLL_SECONDS = 1.0
FAILED_SECONDS = 5.0
#: Seconds between two checks for WAL that the archive lacked, or had with other content.
AGAIN_SECONDS = 60.0

_log = logs.logger()


def run(
    place: Path, url: str, stop: threading.Event, tell: Callable[[TusklineError | None], None]
) -> None:
    """Run until `stop`; `tell` is called at each poll with the error, if any. Raises `CorruptError`, `NotSupportedError`."""
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
            stop.wait(POLL_SECONDS)
        except (UnavailableError, DivergedError, OSError) as error:
            found = _its_disk(error, place) if isinstance(error, OSError) else error
            _log.warning("the archive is behind", reason=found.what, repair=found.repair)
            tell(found)
            # The record is read again: it may have been removed on purpose.
            archive = None
            # The archive was readable: its content differs.
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


def _commit_lsn(place: Path) -> Lsn:
    state = _read(place)
    return 0 if state is None else state.commit_lsn


def _read(place: Path) -> ControlState | None:
    # Read, never loaded: the file is the hot loop's, which may replace it at this moment.
    found = control_file.read(FolderDisk(place / data_dir.CONTROL))
    return found[1] if found else None


def _its_disk(error: OSError, place: Path) -> UnavailableError:
    return UnavailableError(
        f"could not read the safekeeper's files: {error.strerror or error}",
        where=str(error.filename or place),
        repair="check its disk; the operation is retried",
    )


def _tell(path: Path | None, error: TusklineError | None) -> None:
    if path is not None:
        record = None if error is None else ErrorRecord.of(error)
        status_file.write(path, ArchiverStatus(error=record))


def _keep_private(url: str) -> None:
    """Have what is made in an archive on a disk be accessible to its owner only, or as the folder's mode allows if it is there."""
    files, folder = fsspec.core.url_to_fs(url)
    if isinstance(files, LocalFileSystem):
        mode = 0o700
        with contextlib.suppress(FileNotFoundError):
            mode = Path(folder).stat().st_mode
        os.umask(os.umask(0o077) | (0o077 & ~mode))


def archive_wal(settings: ArchiverSettings) -> None:
    """Run until a signal."""
    _keep_private(settings.archive)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    run(settings.data_dir, settings.archive, stop, partial(_tell, settings.status_file))


if __name__ == "__main__":
    sys.exit(child_process.run(ArchiverSettings, archive_wal))
