"""What a safekeeper does when its file system is full and it has to write down a promise."""

import time
from collections.abc import Callable

import structlog

from walsender_bridge.quorum.safekeeper.storage.segments import NO_ROOM

#: Seconds between two tries.
FULL_SECONDS = 0.2

_log = structlog.get_logger(__name__)


def until_room(
    act: Callable[[], object], meanwhile: Callable[[str], bool], may: Callable[[], None]
) -> None:
    """Do it, as soon as there is room for it; nothing is promised until then.

    `may` is asked before each try, and raises: whoever makes room may put another disk in the full one's place.
    `meanwhile` is called at each failure with what is wrong: it makes room if it can, and says whether to go on
    waiting. Raises `OSError`, of any other kind at once.
    """
    told = False
    while True:
        may()
        try:
            act()
        except OSError as error:
            if error.errno not in NO_ROOM or not meanwhile(error.strerror or str(error)):
                raise
            if not told:
                _log.error("the disk is full; nothing is promised", reason=str(error))
            told = True
            time.sleep(FULL_SECONDS)
            continue
        if told:
            _log.info("there is room again")
        return
