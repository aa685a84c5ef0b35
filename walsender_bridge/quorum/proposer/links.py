"""A proposer's connections to its safekeepers: opened, reopened, and timed out.

A safekeeper that refused is retried at growing intervals, up to `MOST_DIAL_SECONDS`: the cause of a refusal seldom
disappears by itself, and each attempt costs an election's worth of messages and a log line. A connection on which an
expected message does not arrive is closed, so that a dead peer does not count as connected.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from walsender_bridge.quorum.proposer import effects as e
from walsender_bridge.quorum.proposer.name_resolution import Names
from walsender_bridge.quorum.protocol.message_socket import WireEnd
from walsender_bridge.quorum.protocol.tls_wire import wire
from walsender_bridge.runtime import peer_account
from walsender_bridge.runtime.tls_context import TlsContext

#: Seconds between two attempts to connect to a safekeeper, and the maximum when it refuses each time.
DIAL_SECONDS = 0.5
MOST_DIAL_SECONDS = 5.0
#: Seconds to establish a connection.
CONNECT_SECONDS = 5.0
#: Seconds of silence while a message is expected: heartbeats are answered several times a second.
SILENT_SECONDS = 15.0
#: The same for a safekeeper from which WAL was requested for another one: commits may wait for that one, and a third one
#: may have it, too.
LENDING_SECONDS = 2.0
#: The same before there are heartbeats: it first reads the whole segment, of up to 1 GB, to verify its checksum.
COMPARED_SECONDS = 60.0


class SafekeeperLink:
    """A safekeeper's connection, and what was requested from it with `Fetch`, in order."""

    def __init__(self, end: WireEnd) -> None:
        self.end = end
        self.connected = False
        self.polled = select.EPOLLIN | select.EPOLLOUT
        #: Time of the connection, then of the last message.
        self.since = time.monotonic()
        self.fetches: deque[e.ReadWal | e.CompareWal | e.ReadCatchUpWal] = deque()
        self.fetched = bytearray()


class Links:
    """See the module. `by_peer` and `by_fd`: connections that are established or being opened."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        poll: select.epoll,
        names: Names | None = None,
        tls: TlsContext | None = None,
    ) -> None:
        #: By the peer's number. The list may grow.
        self.addresses = addresses
        self.by_peer: dict[int, SafekeeperLink] = {}
        self.by_fd: dict[int, int] = {}
        self._poll = poll
        self._dial_at: dict[int, float] = {}
        self._pause: dict[int, float] = {}
        self._names = names or Names()
        self._tls = tls
        #: Attempts for each peer: the addresses of a name are tried in turn.
        self._tries: dict[int, int] = {}

    def where(self, peer: int) -> str:
        """A safekeeper's address."""
        host, port = self.addresses[peer]
        return f"{host}:{port}"

    def dial(self, now: float) -> list[tuple[int, str]]:
        """Open the connections that are due; (safekeeper, reason) of those that cannot be."""
        faults = []
        for peer, (host, port) in enumerate(self.addresses):
            if peer in self.by_peer or now < self._dial_at.get(peer, 0.0):
                continue
            if self._tls is None and (fault := peer_account.foreign_listener(host, port)):
                faults.append((peer, fault))
                self._dial_at[peer] = now + DIAL_SECONDS
                continue
            found = self._names.find(host, port, now)
            if fault := self._names.fault(host, port, now):
                faults.append((peer, fault))
            if found:
                self._dial_at[peer] = now + DIAL_SECONDS
                self._tries[peer] = self._tries.get(peer, -1) + 1
                self._connect(peer, *found[self._tries[peer] % len(found)])
        return faults

    def _connect(self, peer: int, family: int, address: tuple[Any, ...]) -> None:
        try:
            dialled = socket.socket(family)
        except OSError:
            return  # this machine has no such network
        dialled.setblocking(False)
        try:
            dialled.connect(address)
        except BlockingIOError:
            pass
        except OSError:
            dialled.close()
            return
        end = wire(dialled, self.where(peer), self._tls, self.addresses[peer][0])
        end.trust()
        link = self.by_peer[peer] = SafekeeperLink(end)
        self.by_fd[end.fileno()] = peer
        self._poll.register(end, link.polled)

    def silent(self, now: float, expected: Callable[[int], bool]) -> list[tuple[int, str]]:
        """(safekeeper, reason) of connections to close. `expected`: whether a message is due, apart from requested WAL."""
        found = []
        for peer, link in self.by_peer.items():
            if not link.connected:
                if now - link.since > CONNECT_SECONDS:
                    found.append((peer, "connection timed out"))
            elif expected(peer):
                if link.fetches and now - link.since > LENDING_SECONDS:
                    found.append((peer, "no answer to a request for WAL"))
                elif now - link.since > SILENT_SECONDS:
                    found.append((peer, "no message received in time"))
            elif not link.fetches:
                link.since = now
            elif now - link.since > COMPARED_SECONDS:
                found.append((peer, "no answer to a request for WAL to compare"))
        return found

    def refused(self, peer: int) -> None:
        """It refused: double the interval to the next attempt."""
        pause = min(2 * self._pause.get(peer, DIAL_SECONDS), MOST_DIAL_SECONDS)
        self._pause[peer] = pause
        self._dial_at[peer] = time.monotonic() + pause

    def settled(self, peer: int) -> None:
        """It follows: if its connection breaks, it is reopened at once."""
        self._pause.pop(peer, None)

    def drop(self, peer: int) -> SafekeeperLink:
        """Close one."""
        link = self.by_peer.pop(peer)
        descriptor = link.end.fileno()
        del self.by_fd[descriptor]
        self._poll.unregister(descriptor)
        link.end.close()
        return link

    def watch(self, link: SafekeeperLink) -> None:
        """Poll a link for the events that it needs."""
        events = link.end.events
        if events != link.polled:
            link.polled = events
            self._poll.modify(link.end, events)

    def close(self) -> None:
        """Close all."""
        for peer in list(self.by_peer):
            self.drop(peer)
