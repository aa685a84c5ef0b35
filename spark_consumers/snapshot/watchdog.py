"""Ends the reading of a COPY when its server has stopped answering.

ADBC's driver waits inside libpq without a limit, and a reader that waits for ever holds its executor's slot: soon
nothing of any source is read. A server that works on the next rows may be silent for long, so silence alone is no
sign. After a while of it the server is asked on a connection of its own; if that is not answered either, the
driver's sockets are shut down, and its wait ends with an error.

The sockets are those that came while the driver connected. Where the system does not list a process's
descriptors (`/proc`), there is no such end.
"""

import contextlib
import os
import socket
import threading
from pathlib import Path

import psycopg

from walsender_bridge.errors import DeadlineError, TusklineError
from walsender_bridge.postgres.client.bounded_query import BoundedConnection, no_answer
from walsender_bridge.postgres.client.replication_connection import CONNECT_TIMEOUT, describe
from walsender_bridge.runtime.closing import Closing

#: Seconds without a batch after which the server is asked.
QUIET_SECONDS = 20.0

_OPEN = Path("/proc/self/fd")


def open_sockets() -> frozenset[int]:
    """The descriptors of this process that are sockets; none where they cannot be listed."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in _OPEN.iterdir():
            with contextlib.suppress(OSError):
                if str(entry.readlink()).startswith("socket:"):
                    found.add(int(entry.name))
    return frozenset(found)


class Watchdog(Closing):
    """Watches a driver's connection to `dsn` from a thread; `before`: the sockets that are not the driver's."""

    def __init__(self, dsn: str, before: frozenset[int]) -> None:
        self._dsn = dsn
        # Copies, which the driver cannot close and the system not give to somebody else.
        self._sockets = [socket.socket(fileno=os.dup(fd)) for fd in open_sockets() - before]
        self._moved = True
        self._over = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def moved(self) -> None:
        """The driver has given something."""
        self._moved = True

    def error(self) -> TusklineError | None:
        """The error, if this watchdog ended the driver's wait."""
        return no_answer(CONNECT_TIMEOUT, describe(self._dsn)) if self._stopped else None

    def close(self) -> None:
        """Watch no more."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(QUIET_SECONDS):
            if not self._moved and not self._answers():
                self._stopped = True
                for one in self._sockets:
                    with contextlib.suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)
                break
            self._moved = False
        for one in self._sockets:
            one.close()

    def _answers(self) -> bool:
        try:
            with BoundedConnection.open(self._dsn) as connection:
                connection.execute("SELECT 1")
        except (DeadlineError, psycopg.errors.ConnectionTimeout):
            return False
        except psycopg.Error:
            # A refusal is an answer too; and what is gone altogether, the driver hears of itself.
            return True
        return True
