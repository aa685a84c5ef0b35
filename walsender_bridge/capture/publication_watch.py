"""Looks at the catalog while capture streams, on a thread of its own: tables that come to fit are published (`publication`).

Nothing waits for it, and no failure of it ends a session: what could not be changed is tried again with the next look, and
`status` and `doctor` name what the role may not change. But a session ends whose publication is not the one that it began
with: from 18 on the server leaves out what is committed while there is none, and only warns. The first look comes after the
walsender has started, since the publication may have gone between the session's own look and that.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from walsender_bridge.capture import publication, source
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.errors import PublicationError, TusklineError
from walsender_bridge.postgres.table_patterns import Choice

#: Seconds between two looks.
POLL_SECONDS: Final = 10.0
#: Seconds that the end of a session waits for a look.
_END_SECONDS: Final = 1.0

_log = structlog.get_logger(__name__)


class PublicationPoll:
    """What the thread has found so far."""

    def __init__(self) -> None:
        self.fault: PublicationError | None = None

    def check(self) -> None:
        """Raise the `PublicationError` that ends the session, if there is one."""
        if self.fault is not None:
            raise self.fault


@contextmanager
def watched(here: CaptureSource, oid: int | None) -> Iterator[PublicationPoll]:
    """Look at the catalog from now on until the session ends. `here`: with a DSN of the server that it streams from.

    `oid`: of the publication that the session began with.
    """
    poll, ended = PublicationPoll(), threading.Event()
    arguments = (here, oid, poll, ended)
    thread = threading.Thread(target=_run, args=arguments, name="tables", daemon=True)
    thread.start()
    try:
        yield poll
    finally:
        ended.set()
        thread.join(_END_SECONDS)


def _run(
    here: CaptureSource, oid: int | None, poll: PublicationPoll, ended: threading.Event
) -> None:
    follows = Choice.of(here.tables).follows
    while not ended.is_set():
        try:
            with source.connect(here) as connection:
                while not ended.is_set():
                    _poll(connection, here, oid, poll)
                    if poll.fault is not None:
                        return
                    if follows:
                        publication.follow(connection, here)
                    ended.wait(POLL_SECONDS)
        except TusklineError as error:
            _log.warning("tables not seen", source=here.name, error=str(error))
            ended.wait(POLL_SECONDS)


def _poll(
    connection: publication.Connection, here: CaptureSource, oid: int | None, poll: PublicationPoll
) -> None:
    if oid is None:
        return
    try:
        publication.check_same(connection, here, oid)
    except PublicationError as error:
        poll.fault = error
