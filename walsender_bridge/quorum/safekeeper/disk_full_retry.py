"""Disk-full retry: a safekeeper waits until a promise can be written to a full file system."""

import time
from collections.abc import Callable

from walsender_bridge.quorum.safekeeper.storage.segments import NO_ROOM
from walsender_bridge.runtime import logs

#: Seconds between two attempts.
FULL_SECONDS = 0.2

_log = logs.logger()


def retry_until_space(
    act: Callable[[], object], meanwhile: Callable[[str], bool], may: Callable[[], None]
) -> None:
    """Perform a write as soon as there is space for it; nothing is promised until then.

    `may` is called before each attempt, and raises: freeing space may involve mounting another disk in the full one's place.
    `meanwhile` is called at each failure with the error: it frees space if it can, and returns whether to continue waiting.
    Raises `OSError`, of any other kind at once.
    """
    logged = False
    while True:
        may()
        try:
            act()
        except OSError as error:
            if error.errno not in NO_ROOM or not meanwhile(error.strerror or str(error)):
                raise
            if not logged:
                _log.error("disk full, waiting to write the control file", reason=str(error))
            logged = True
            time.sleep(FULL_SECONDS)
            continue
        if logged:
            _log.info("disk has free space again")
        return
