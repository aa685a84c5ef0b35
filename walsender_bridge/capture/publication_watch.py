"""Polls the catalog while capture streams, on a thread of its own, and publishes tables that become publishable (`publication`).

Nothing waits for it, and its failures do not end a session: what could not be changed is retried at the next poll, and
`status` and `doctor` name what the role is not allowed to change. But a session ends when its publication is no longer the one
that it started with: from 18 on the server omits what is committed while there is none, and only warns. The first poll comes
after the walsender has started, since the publication may have been dropped between the session's own check and that.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from walsender_bridge.capture import publication, source
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.errors import PublicationError, TusklineError
from walsender_bridge.postgres.table_patterns import Choice
from walsender_bridge.runtime import logs

#: Seconds between two polls.
POLL_SECONDS: Final = 10.0
#: Seconds that the end of a session waits for a poll.
_END_SECONDS: Final = 1.0

_log = logs.logger()


class PublicationPoll:
    """The result of the polls so far."""

    def __init__(self) -> None:
        self.fault: PublicationError | None = None

    def check(self) -> None:
        """Raise the `PublicationError` that ends the session, if there is one."""
        if self.fault is not None:
            raise self.fault


@contextmanager
def watched(here: CaptureSource, oid: int | None) -> Iterator[PublicationPoll]:
    """Poll the catalog until the session ends. `here`: the source, with a DSN of the server that the session streams from.

    `oid`: of the publication that the session started with.
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
            _log.warning("could not poll the publication", source=here.name, error=str(error))
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
