"""Controls Python's cyclic garbage collector.

It would otherwise interrupt a hot loop in the middle of a commit, and take a tenth of a short command's processor time.
Objects created before `disable_automatic` live as long as the process and are never examined again, so a collection
examines only the loop's own objects, in a fraction of a millisecond.
"""

import gc

#: Seconds between two collections: cycles (errors with tracebacks) are rare.
SWEEP_SECONDS = 10.0


def collect_rarely() -> None:
    """Collect after 50,000 allocations instead of 700: imports allocate that often, and leave nothing to collect."""
    gc.set_threshold(50_000)


def disable_automatic() -> None:
    """Disable automatic collection, leaving it to a `Sweeper`. To be called at the end of initialization."""
    gc.collect()
    gc.freeze()
    gc.disable()


class Sweeper:
    """Collects cycles periodically in a process with `disable_automatic`; in others it does nothing."""

    def __init__(self) -> None:
        self._due = 0.0

    def tick(self, now: float) -> None:
        """Collect if due. `now`: monotonic seconds."""
        if now >= self._due:
            self._due = now + SWEEP_SECONDS
            if not gc.isenabled():
                gc.collect()
