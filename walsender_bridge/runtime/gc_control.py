"""Python's collector of cycles, out of the way of a hot loop: by itself it runs in the middle of a commit.

What was made before `disable_automatic` lives as long as the process and is never looked at again, so a sweep looks at what
the loop holds and nothing else: a fraction of a millisecond.
"""

import gc

#: Seconds between two sweeps: what leaves cycles (errors with tracebacks) is rare.
SWEEP_SECONDS = 10.0


def disable_automatic() -> None:
    """Collect no cycles but by a `Sweeper`. For a process that is all set up."""
    gc.collect()
    gc.freeze()
    gc.disable()


class Sweeper:
    """Collects cycles now and then, in a process that is kept quiet; otherwise Python does."""

    def __init__(self) -> None:
        self._due = 0.0

    def tick(self, now: float) -> None:
        """Sweep, if it is time. `now`: seconds of the monotonic clock."""
        if now >= self._due:
            self._due = now + SWEEP_SECONDS
            if not gc.isenabled():
                gc.collect()
