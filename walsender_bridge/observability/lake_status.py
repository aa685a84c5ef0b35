"""What a lake job says of itself beside its manifests: that it cannot start, or that its rounds fail, and why, or go well.

One JSON file in the run folder, replaced as a whole: `pid`, `updated_at` (seconds since the Unix epoch), `error`
(`code`, `what`, `where`, `repair`; null when all is well). A job that is well says so every few seconds, so one that lives
and has been silent for long hangs; one that has not said anything yet is being started. It is not in the lake, for a full disk there is what it
most often has to tell of. It is no promise: what cannot be written is left out, and a look at the lake itself
(`trouble`) tells of a full disk without it.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from walsender_bridge.errors import TusklineError, UnavailableError, from_wire
from walsender_bridge.runtime import pid_file, processes, status_file
from walsender_bridge.runtime.supervisor import read_states

#: Seconds within which a job that cannot start is started again, and says so again.
_AGAIN_SECONDS = 60.0
#: Seconds after which a round that has not come to its end is told. One of a large backlog takes a while.
HUNG_SECONDS = 300.0


def write(run_dir: Path, error: TusklineError | None) -> None:
    """Replace what is there."""
    record = {
        "pid": os.getpid(),
        "updated_at": time.time(),
        "error": None if error is None else error.to_wire(),
    }
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        status_file.replace(_path(run_dir), json.dumps(record).encode())


def said(run_dir: Path, since: float) -> TusklineError | None:
    """What the job said that lives, or said it after `since` (seconds since the Unix epoch)."""
    record = _read(run_dir)
    return None if record is None else _told(record, since)


def trouble(run_dir: Path, lake: str) -> TusklineError | None:
    """Why the lake does not go on: what its job said, if that lives or has just ended, or does not say any more or yet, or its disk."""
    record, now, job = _read(run_dir), time.time(), _job(run_dir)
    error = record and (_told(record, now - _AGAIN_SECONDS) or _hung(record, now))
    if error := error or _starting(record, job):
        return error
    from spark_consumers.lake import folder

    return folder.lack_of_room(lake)


def _read(run_dir: Path) -> dict[str, Any] | None:
    """What is there; None: nothing, or nothing that can be read."""
    with contextlib.suppress(OSError, ValueError):
        record: dict[str, Any] = json.loads(_path(run_dir).read_text())
        return record
    return None


def _told(record: Mapping[str, Any], since: float) -> TusklineError | None:
    just_now = record["updated_at"] >= since
    if record["error"] is not None and (just_now or processes.alive(record["pid"])):
        return from_wire(record["error"])
    return None


def _hung(record: Mapping[str, Any], now: float) -> TusklineError | None:
    """That the job lives, was well, and has said nothing for too long."""
    silent, pid = now - record["updated_at"], record["pid"]
    if record["error"] is None and silent > HUNG_SECONDS and processes.alive(pid):
        return UnavailableError(
            f"its job has not come to the end of a round for {silent:.0f} s",
            where=f"process {pid}",
            repair="see what it and its JVM wait for; if they hang, kill it: `tuskline up` starts another, and nothing is lost",
        )
    return None


def _starting(record: Mapping[str, Any] | None, job: int | None) -> TusklineError | None:
    """That the job runs, and what there is was said by one before it; `job`: its process, None if none is known to run."""
    if job is None or (record is not None and record["pid"] == job):
        return None
    before = record and record["error"]
    return UnavailableError(
        "its job has been started, and has not come to the end of a round yet"
        + (f"; the one before said: {before['what']}" if before else ""),
        where=f"process {job}",
        repair="that takes a minute or two, while the JVM starts; if it takes longer, its log says why",
    )


def _job(run_dir: Path) -> int | None:
    """The process that `up` has started for the lake, or that runs by itself; None: neither."""
    if pid_file.owner(run_dir) is not None:
        children = read_states(run_dir, "up").get("children", {})
        if pid := children.get("lake", {}).get("pid"):
            return int(pid)
    return pid_file.owner(run_dir, "lake")


def _path(run_dir: Path) -> Path:
    return run_dir / "lake.status.json"
