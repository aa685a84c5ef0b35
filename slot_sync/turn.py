"""One controller acts, however many run: a session lock on the primary, which ends with its holder's connection.

The lock is of a database, so controllers of one primary have to name the same one. It saves work and noise. It is not
what keeps copies safe: each action is refused by the standby itself where it would be wrong, and may be done twice.
"""

from typing import Final

from slot_sync.session import Session
from walsender_bridge.closing import Closing
from walsender_bridge.errors import TusklineError

_SECONDS: Final = 5.0


class Turn(Closing):
    """Whether it is ours to act. `error`: why nobody knows, if the primary does not answer."""

    def __init__(self, primary_dsn: str) -> None:
        self._session = Session(primary_dsn, seconds=_SECONDS)
        self.error: TusklineError | None = None
        self.where = self._session.where

    def held(self) -> bool:
        """Take the lock, or see that we still have it: who has it gets it again."""
        try:
            held = bool(self._session.one("slots_lock"))
        except TusklineError as error:
            self.error = error
            return False
        self.error = None
        return held

    def close(self) -> None:
        """Leave it to others."""
        self._session.close()
