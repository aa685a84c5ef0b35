"""Whether a bridge reaches the log. The captures of an active one show that; one that stands by asks the log.

An active bridge that reaches etcd, but not the log, gives way to one that reaches both (`leadership.py`). A bridge whose sources do not
answer stays active: the captures of another bridge would wait for the same servers.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from walsender_bridge.capture.status_record import CaptureStatus
from walsender_bridge.change_log.client import LogClient, ReplicaClient
from walsender_bridge.errors import TusklineError, UnavailableError
from walsender_bridge.runtime import status_file

if TYPE_CHECKING:
    from walsender_bridge.config import Config
    from walsender_bridge.config.sections import SourceSection

#: Seconds to wait for an answer of the log.
_ANSWER: Final = 3.0


class LogReach:
    """See the module. `patience`: seconds for which captures may be without the log."""

    def __init__(
        self, settings: "Config", patience: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._patience = patience
        self._now = now
        #: Since when no capture has had the log; None: one has.
        self._since: float | None = None

    def begin(self) -> None:
        """The captures start now."""
        self._since = None

    def is_cut_off(self) -> bool:
        """Whether no capture here has had the log for some time, and the log is what they lack."""
        found = [self._lacks_log(source) for source in self._settings.source]
        if False in found or True not in found:
            # Between two attempts of a capture it is not known.
            self._since = None if False in found else self._since
        elif self._since is None:
            self._since = self._now()
        return self._since is not None and self._now() - self._since >= self._patience

    def _lacks_log(self, source: "SourceSection") -> bool | None:
        seen = status_file.read(self._settings.capture_status(source), CaptureStatus)
        if seen is None or (seen.error is None and seen.state != "streaming"):
            return None
        return seen.error is not None and isinstance(seen.error.error(), UnavailableError)

    def reaches(self) -> bool:
        """Whether the log, and all replicas in sync of the streams of all sources, answer here."""
        try:
            with LogClient(self._settings.log_address, timeout=_ANSWER) as log:
                status = log.status()
            for source in self._settings.source:
                cut = status.streams.get(source.name)
                if cut is None or source.name in status.faults:
                    return False
                for address in cut.addresses:
                    with ReplicaClient(address, timeout=_ANSWER) as replica:
                        replica.stream_status(source.name)
        except TusklineError:
            return False
        return True
