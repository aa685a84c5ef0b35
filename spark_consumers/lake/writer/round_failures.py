"""Logs failed rounds of the lake: each cause once, and once a minute while it lasts.

Successful rounds are logged periodically too, since a job that hangs logs nothing.
"""

import time
from collections.abc import Callable

from spark_consumers.lake.folder import why
from spark_consumers.lake.store.place import Place
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime import logs

#: Seconds after which a cause that lasts is logged again.
_AGAIN_SECONDS = 60.0
#: Seconds after which successful rounds are logged again.
_WELL_SECONDS = 5.0
#: Characters of an error that is not one of ours.
_DETAIL = 4000

log = logs.logger()


class RoundFailures:
    """Names failures in the log, and to `failing`: with the error each time, and with None while all is well."""

    def __init__(
        self,
        lake: str | Place,
        failing: Callable[[TusklineError | None], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lake = lake
        self._now = now
        self._failing = failing
        self._count = 0
        self._logged = ""
        self._logged_at = 0.0
        #: An earlier driver's report holds until a round has succeeded.
        self._is_well = False
        self._well_at = 0.0

    def failed(self, error: Exception, again_in_seconds: float) -> None:
        """A round has failed; the next one begins in so many seconds."""
        self._count += 1
        self._is_well = False
        cause, now = why(error, self._lake), self._now()
        self._failing(cause)
        if cause.what == self._logged and now - self._logged_at < _AGAIN_SECONDS:
            return
        # Spark's own words are the only trace that there is of a fault in it; they are many lines.
        detail = "" if isinstance(error, TusklineError) else " ".join(str(error).split())[:_DETAIL]
        log.warning(
            "round failed",
            error=cause.what,
            where=cause.where,
            repair=cause.repair,
            failures=self._count,
            again_in_seconds=again_in_seconds,
            **({"detail": detail} if detail and cause.what != self._logged else {}),
        )
        self._logged, self._logged_at = cause.what, now

    def ended(self, error: TusklineError) -> None:
        """The job ends by this error."""
        self._failing(error)

    def went_well(self, but: TusklineError | None = None) -> None:
        """A round has succeeded. `but`: what is not well all the same, and ends no round."""
        now = self._now()
        if self._is_well and now - self._well_at < _WELL_SECONDS:
            return
        self._is_well, self._well_at = True, now
        self._failing(but)
        if self._count:
            log.info("rounds succeed again", failures=self._count)
        self._count, self._logged = 0, ""
