"""One look at the primary for all who need one, and with it whose turn it is to act: one statement a poll.

However many candidates there are, the primary is asked once: whoever wants it as it was at some moment or later gets what
was seen last, if that was asked for after this moment. For each candidate the moment is after its last look at the standby,
so it sees the primary, the standby, the primary, the standby, each later than the one before, as the resolver's argument
wants it (`resolver.observed`). A failure is shared alike: a primary that hangs costs one time-out, and not one for each.

Of several controllers one acts: it has a session lock on the primary, which ends with its holder's connection. The lock is
of a database, so controllers of one primary have to name the same one. It saves work and noise. It is not what keeps
copies safe: each action is refused by the standby itself where it would be wrong, and may be done twice.
"""

import threading
import time

from slot_sync.probe.primary import PrimaryProbe
from slot_sync.resolver.observed import ObservedPrimary
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime.closing import Closing


class SharedProbe(Closing):
    """Looks at the primary behind a DSN. `wants_turn`: and takes the turn to act, when it is free."""

    def __init__(self, dsn: str, *, wants_turn: bool = False) -> None:
        self._look = PrimaryProbe(dsn, wants_turn=wants_turn)
        self._lock = threading.Lock()
        self._began = float("-inf")
        self._seen: ObservedPrimary | TusklineError | None = None
        #: Whether it was ours to act at the last look: who has the turn gets it again.
        self.has_turn = False
        self.where = self._look.where

    def since(self, moment: float) -> ObservedPrimary:
        """The primary as it was at `moment` or later (monotonic seconds). Raises what the look did."""
        with self._lock:
            if self._seen is None or self._began < moment:
                self._began = time.monotonic()
                try:
                    self._seen = self._look.look()
                except TusklineError as error:
                    self._seen = error
                self.has_turn = self._look.has_turn
            seen = self._seen
        if isinstance(seen, TusklineError):
            raise seen
        return seen

    def close(self) -> None:
        """End the connection, and leave the turn to others."""
        self._look.close()
