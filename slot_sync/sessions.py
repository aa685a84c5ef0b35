"""A pool of sessions of one server for actions, by the database in which an action runs."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from slot_sync.session import BoundedSession
from walsender_bridge.runtime.closing import Closing

#: Seconds that one step of an action may take, plus the time for the WAL that it reads (`apply.SLOWEST`).
ACTION_SECONDS: Final = 30.0


class Sessions(Closing):
    """Lends sessions of `dsn`'s server, and reuses those that are not broken."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._lock = threading.Lock()
        self._idle: dict[str | None, list[BoundedSession]] = defaultdict(list)
        self._closed = False

    @contextmanager
    def lent(self, database: str | None) -> Iterator[BoundedSession]:
        """A session of that database; None: the DSN's."""
        with self._lock:
            idle = self._idle[database]
            session = idle.pop() if idle else None
        if session is None:
            session = BoundedSession(self._dsn, seconds=ACTION_SECONDS, dbname=database)
        try:
            yield session
        finally:
            with self._lock:
                keep = session.is_open and not self._closed
                if keep:
                    self._idle[database].append(session)
            if not keep:
                session.close()

    def close(self) -> None:
        """Close the idle sessions; one that is lent is closed when it is returned."""
        with self._lock:
            self._closed = True
            idle = [session for each in self._idle.values() for session in each]
            self._idle.clear()
        for session in idle:
            session.close()
