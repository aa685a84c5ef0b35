"""Looks at the catalog while capture streams, on a thread of its own: tables that come to fit are published (`publication`).

Nothing waits for it, and no failure of it ends a session: what could not be changed is tried again with the next look, and
`status` and `doctor` name what the role may not change.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from walsender_bridge.capture import publication, source
from walsender_bridge.capture.source import Source
from walsender_bridge.capture.table_choice import Choice
from walsender_bridge.errors import TusklineError

#: Seconds between two looks.
LOOK_SECONDS: Final = 10.0
#: Seconds that the end of a session waits for a look.
_END_SECONDS: Final = 1.0

_log = structlog.get_logger(__name__)


@contextmanager
def watched(here: Source) -> Iterator[None]:
    """Look at the catalog from now on until the session ends. `here`: with a DSN of the server that it streams from."""
    if not Choice.of(here.tables).follows:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_run, args=(here, ended), name="tables", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_END_SECONDS)


def _run(here: Source, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            with source.connect(here) as connection:
                while not ended.is_set():
                    publication.follow(connection, here)
                    ended.wait(LOOK_SECONDS)
        except TusklineError as error:
            _log.warning("tables not seen", source=here.name, error=str(error))
            ended.wait(LOOK_SECONDS)
