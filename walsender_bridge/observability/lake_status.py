"""The status of the lake's job, beside its manifests: whether its rounds succeed, or the error of its start or its rounds.

One JSON file in the run folder, replaced atomically: `pid`, `updated_at` (seconds since the Unix epoch), `error`
(`code`, `what`, `where`, `repair`; null when all is well). A job without problems writes it every few seconds, so a live
job that has not written for long hangs; a job that has not written it yet is starting. The file is not in the lake,
because a full disk there is its most frequent error. Writing is best effort: if it fails, the check of the lake itself
(`problem`) still detects a full disk.
"""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from walsender_bridge.errors import TusklineError, UnavailableError
from walsender_bridge.runtime import pid_file, processes, status_file
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.status_file import Status
from walsender_bridge.runtime.supervisor import read_states

#: Seconds within which a job that cannot start is restarted, and reports its error again.
_RESTART_SECONDS = 60.0
#: Seconds after which a round in which nothing ends is reported.
HUNG_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeJobStatus(Status):
    """`error`: of the job's start or its last round; None: all is well."""

    error: ErrorRecord | None


def write(run_dir: Path, error: TusklineError | None) -> None:
    """Replace the file."""
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
    status = LakeJobStatus(error=None if error is None else ErrorRecord.of(error))
    status_file.write(_path(run_dir), status)


def reported_error(
    run_dir: Path, since: float, *, older_of_a_live_job: bool
) -> TusklineError | None:
    """The error that the job wrote after `since` (seconds since the Unix epoch), or an older one of a job that still runs."""
    status = _read(run_dir)
    if status is None or not (older_of_a_live_job or status.updated_at >= since):
        return None
    return _error(status, since)


def problem(run_dir: Path, lake: str, moved_at: float = 0.0) -> TusklineError | None:
    """Why the lake does not continue: the error of its job, if that lives or has just ended; a hung or starting job; a full disk.

    `moved_at`: when the epoch under way was seen to progress last (`EpochStatus`); a round that does has not hung.
    """
    status, now, job = _read(run_dir), time.time(), _job(run_dir)
    error = status and (_error(status, now - _RESTART_SECONDS) or _hung(status, now, moved_at))
    if error := error or _starting(status, job):
        return error
    from spark_consumers.lake import folder

    return folder.lack_of_room(lake)


def _read(run_dir: Path) -> LakeJobStatus | None:
    """The status last written; None if there is none."""
    return status_file.read(_path(run_dir), LakeJobStatus)


def _error(status: LakeJobStatus, since: float) -> TusklineError | None:
    recent = status.updated_at >= since
    if status.error is not None and (recent or processes.alive(status.pid)):
        return status.error.error()
    return None


def _hung(status: LakeJobStatus, now: float, moved_at: float) -> TusklineError | None:
    """An error if the job lives, had no error, and neither it nor its epoch has progressed for too long."""
    silent, pid = now - max(status.updated_at, moved_at), status.pid
    if status.error is None and silent > HUNG_SECONDS and processes.alive(pid):
        return UnavailableError(
            f"the lake's job has not progressed for {silent:.0f} s",
            where=f"process {pid}",
            repair="check what the process and its JVM wait for; if they hang, kill it: `tuskline up` restarts it, and nothing is lost",
        )
    return None


def _starting(status: LakeJobStatus | None, job: int | None) -> TusklineError | None:
    """An error if the job runs and has not written its status yet. `job`: its process, None if none is known to run."""
    if job is None or (status is not None and status.pid == job):
        return None
    before = status and status.error
    return UnavailableError(
        "the lake's job has started, and has not finished a round yet"
        + (f"; the previous job reported: {before.what}" if before else ""),
        where=f"process {job}",
        repair="wait a minute or two for the JVM to start; if it takes longer, read the job's log",
    )


def _job(run_dir: Path) -> int | None:
    """The process of `lake run`, under `up` or by itself; None: neither runs."""
    if pid_file.owner(run_dir) is not None:
        lake = read_states(run_dir, "up").children.get("lake")
        if lake is not None and lake.pid is not None:
            return lake.pid
    return pid_file.owner(run_dir, "lake")


def _path(run_dir: Path) -> Path:
    return run_dir / "lake.status.json"
