"""Fail points, at which tests kill or suspend a process.

`hit("after-stage")` kills the process with SIGKILL if the environment variable `TUSKLINE_FAIL_POINT` names that point, and suspends it with
SIGSTOP, once, if that is `after-stage:stop`; otherwise it costs one comparison. Intentionally, nothing is flushed or cleaned up.
"""

import contextlib
import os
import signal

#: The chosen fail point; empty if none.
ARMED, _, _HOW = os.environ.get("TUSKLINE_FAIL_POINT", "").partition(":")
#: What is left to be done there: threads may come at the same moment, and a suspended process goes on.
_LEFT = [signal.SIGSTOP if _HOW == "stop" else signal.SIGKILL]


def hit(name: str) -> None:
    """Kill or suspend the process if this fail point was chosen."""
    if name == ARMED:
        with contextlib.suppress(IndexError):
            os.kill(os.getpid(), _LEFT.pop())
