"""Whether this driver may take the lake over, or has been overtaken: what `takeover` decides, asked of a lake's records."""

import contextlib
import time
from collections.abc import Callable

from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.chain import Chain
from spark_consumers.lake.writer.presence import Presence
from walsender_bridge.errors import CorruptError, FencedError
from walsender_bridge.runtime import logs

#: Seconds between two looks of a driver at work whether a later one has come. One look is one small record.
_LOOK = 1.0

log = logs.logger()


class Standby:
    """What one driver knows of the others. `clock` counts seconds."""

    def __init__(
        self, chain: Chain, presence: Presence, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._chain = chain
        self._clock = clock
        self._presence = presence
        self._wait = takeover.DriverWait()
        self._looked_at = float("-inf")
        #: The driver that is waited for.
        self.waits_for: str | None = None
        #: The newest term when nobody was waited for: a takeover is of a writer of this one, or of an earlier one.
        self.decided: int | None = None

    def stands_by(self) -> bool:
        """Whether another driver is at work, or about to be."""
        now = self._clock()
        head = self._chain.head()
        term = head.term if head is not None else 0
        found = self._wait.waits_for(term, self._presence.others(), now)
        if found != self.waits_for and found is not None:
            log.info("standing by: another driver is active", driver=found, term=term)
        self.waits_for = found
        self.decided = None if found is not None else term
        if found is None:
            self._presence.forget(self._wait.silent)
        return found is not None

    def confirm(self) -> None:
        """Look once more, if this driver has looked: what is done before a takeover takes seconds. Raises `FencedError`."""
        if self.decided is not None and self.stands_by():
            raise FencedError(
                "another driver is active again",
                where=self._chain.store.location,
                repair="no action is needed: that driver continues",
            )

    def check(self, term: int) -> None:
        """Raise `FencedError` if a later writer than that of `term` has come; looks once a second.

        A writer that was suspended would find that out with its next link. Until there is something to publish, it would
        renew leases and write the status of a lake that is another driver's.
        """
        now = self._clock()
        if now - self._looked_at < _LOOK:
            return
        self._looked_at = now
        # One that is damaged is said by the next publication.
        with contextlib.suppress(CorruptError):
            recorded = self._chain.recorded_newest()
            if recorded is not None and recorded.term > term:
                raise takeover.overtaken(recorded.term)
