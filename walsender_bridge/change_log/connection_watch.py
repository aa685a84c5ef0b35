"""Ends connections of a Flight service that are beyond its limits (`connection_limits`), several times a second."""

import threading
import time
from collections import Counter
from typing import Final

from walsender_bridge.change_log.calls import Calls
from walsender_bridge.change_log.connection_limits import (
    MOST_CONNECTIONS,
    Connection,
    ConnectionLimits,
    ProcessSize,
)
from walsender_bridge.change_log.peer_accounts import PeerAccounts
from walsender_bridge.runtime import logs, processes, tcp_connections

#: Seconds between two looks: a message grows by some ten megabytes meanwhile.
PERIOD: Final = 0.2
#: Seconds between two looks at the connections that this process has made: a call on one that waits for a machine which vanished
#: would end by gRPC's keepalive alone, after more than five minutes.
_MADE_SECONDS: Final = 5.0
#: Seconds between two lines in the log.
_LOG_SECONDS: Final = 30.0

_log = logs.logger()


class ConnectionWatch:
    """Watches the connections to `port` of this process, whose calls are in `calls`, from `start` to `stop`.

    `accounts`: of peers without certificates; connections of other accounts are ended. None: there are certificates.
    """

    def __init__(self, port: int, calls: Calls, accounts: PeerAccounts | None = None) -> None:
        self._port = port
        self._calls = calls
        self._accounts = accounts
        # Half of a process's files are for its data and its own connections.
        most = min(MOST_CONNECTIONS, tcp_connections.open_files() // 2)
        self._limits = ConnectionLimits(most)
        self._kept_alive: set[int] = set()
        #: The connections of other accounts at the last look.
        self._foreign: set[int] = set()
        #: The connections to other machines, and when they were looked for last.
        self._made: set[int] = set()
        self._made_at = -_MADE_SECONDS
        self._ended: Counter[str] = Counter()
        self._logged_at = -_LOG_SECONDS
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End, and leave the connections as they are."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD):
            try:
                self._look()
            except Exception as error:
                # Without this thread there are no limits any more.
                _log.exception("could not look at the connections", error=str(error))

    def _look(self) -> None:
        if time.monotonic() - self._made_at >= _MADE_SECONDS:
            self._made = tcp_connections.keep_made_alive(self._port, self._made)
            self._made_at = time.monotonic()
        # Before the bytes: what has grown the process by then is no part of its usual size unless its bytes are seen, too.
        size = ProcessSize(*processes.own_size())
        found = tcp_connections.accepted(self._port)
        for each in found:
            if each.inode not in self._kept_alive:
                tcp_connections.keep_alive(each)
        # The first call of a foreign client has the time to be answered with the reason.
        foreign = self._foreign & {each.inode for each in found}
        self._foreign = set() if self._accounts is None else self._accounts.foreign(found)
        self._kept_alive = {each.inode for each in found}
        self._calls.forget({each.peer for each in found})
        seen = [Connection(each.inode, each.peer, each.received, each.sent) for each in found]
        ended = self._limits.step(time.monotonic(), seen, self._calls.by_peer(), size)
        ended |= dict.fromkeys(foreign, "it is of another account, and there is no [tls]")
        for each in found:
            if each.inode in ended:
                tcp_connections.shut_down(each)
                self._ended[ended[each.inode]] += 1
        self._say()

    def _say(self) -> None:
        if self._ended and time.monotonic() - self._logged_at >= _LOG_SECONDS:
            self._logged_at = time.monotonic()
            for reason, count in self._ended.items():
                _log.warning("ended connections", port=self._port, count=count, reason=reason)
            self._ended.clear()
