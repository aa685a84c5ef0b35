"""One read of the primary per poll, shared by all candidates, which also elects the active controller: one statement.

However many candidates there are, the primary is queried once: a caller that needs its state at some moment or later gets
the last result if that query began after this moment. For each candidate the moment is after its last read of the
standby, so it sees the primary, the standby, the primary, the standby, each later than the one before, as the resolver's
argument requires (`resolver.observed`). A failure is shared too: a primary that hangs costs one time-out, not one for each.

Of several controllers the one that holds a session-level advisory lock on the primary is active; the lock ends with its
connection. Advisory locks are local to a database, so controllers of one primary must name the same one. The lock saves
work and log output. The safety of copies does not depend on it: the standby itself refuses each action that would be
wrong, and each may be done twice.
"""

import threading
import time

from slot_sync.probe.primary import PrimaryProbe
from slot_sync.resolver.observed import ObservedPrimary
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime.closing import Closing


class SharedProbe(Closing):
    """Reads the primary at a DSN. `wants_turn`: also tries to take the lock of the active controller."""

    def __init__(self, dsn: str, *, wants_turn: bool = False) -> None:
        self._probe = PrimaryProbe(dsn, wants_turn=wants_turn)
        self._lock = threading.Lock()
        self._began = float("-inf")
        self._seen: ObservedPrimary | TusklineError | None = None
        #: Whether this process held the lock at the last read; its holder gets it again.
        self.has_turn = False
        self.where = self._probe.where

    def since(self, moment: float) -> ObservedPrimary:
        """The primary as it was at `moment` or later (monotonic seconds). Raises as `PrimaryProbe.read`."""
        with self._lock:
            if self._seen is None or self._began < moment:
                self._began = time.monotonic()
                try:
                    self._seen = self._probe.read()
                except TusklineError as error:
                    self._seen = error
                self.has_turn = self._probe.has_turn
            seen = self._seen
        if isinstance(seen, TusklineError):
            raise seen
        return seen

    def close(self) -> None:
        """Close the connection, and let another controller become active."""
        self._probe.close()
