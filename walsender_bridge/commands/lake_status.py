"""What a lake job says of itself beside its manifests: that it cannot start, or that its rounds fail, and why.

One JSON file in the run folder, replaced as a whole: `pid`, `updated_at` (seconds since the Unix epoch), `error`
(`code`, `what`, `where`, `repair`; null when all is well). It is not in the lake, for a full disk there is what it
most often has to tell of. It is no promise: what cannot be written is left out, and a look at the lake itself
(`trouble`) tells of a full disk without it.
"""

import contextlib
import json
import os
import time
from pathlib import Path

from walsender_bridge import processes
from walsender_bridge.errors import TusklineError, from_wire

#: Seconds within which a job that cannot start is started again, and says so again.
_AGAIN_SECONDS = 60.0


def write(run_dir: Path, error: TusklineError | None) -> None:
    """Replace what is there."""
    record = {
        "pid": os.getpid(),
        "updated_at": time.time(),
        "error": None if error is None else error.to_wire(),
    }
    path = _path(run_dir)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(record))
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def said(run_dir: Path, since: float) -> TusklineError | None:
    """What the job said that lives, or said it after `since` (seconds since the Unix epoch)."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(_path(run_dir).read_text())
        just_now = record["updated_at"] >= since
        if record["error"] is not None and (just_now or processes.alive(record["pid"])):
            return from_wire(record["error"])
    return None


def trouble(run_dir: Path, lake: str) -> TusklineError | None:
    """Why the lake does not go on: what its job said, if that lives or has just ended, or what its disk says."""
    error = said(run_dir, time.time() - _AGAIN_SECONDS)
    if error is not None:
        return error
    from spark_consumers.lakehouse import folder

    return folder.lack_of_room(lake)


def _path(run_dir: Path) -> Path:
    return run_dir / "lake.status.json"
