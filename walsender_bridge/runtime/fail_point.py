"""Named places where a test makes a process die.

`hit("after-stage")` ends the process with SIGKILL when the environment names that place in
`TUSKLINE_FAIL_POINT`; otherwise it costs one comparison. Nothing is flushed or cleaned up: that is the
point.
"""

import os
import signal

#: The place that was chosen; empty: none.
ARMED = os.environ.get("TUSKLINE_FAIL_POINT", "")


def hit(name: str) -> None:
    """Die here, at once, if this place was chosen."""
    if name == ARMED:
        os.kill(os.getpid(), signal.SIGKILL)
