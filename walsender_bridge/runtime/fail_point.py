"""Fail points, at which tests kill a process.

`hit("after-stage")` kills the process with SIGKILL if the environment variable
`TUSKLINE_FAIL_POINT` names that point; otherwise it costs one comparison. Intentionally, nothing is flushed or cleaned up.
"""

import os
import signal

#: The chosen fail point; empty if none.
ARMED = os.environ.get("TUSKLINE_FAIL_POINT", "")


def hit(name: str) -> None:
    """Kill the process if this fail point was chosen."""
    if name == ARMED:
        os.kill(os.getpid(), signal.SIGKILL)
