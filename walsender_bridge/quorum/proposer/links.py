"""A proposer's connections to its safekeepers: made, made again, and given up.

A safekeeper that refused is tried less and less often, up to `MOST_DIAL_SECONDS`: what it refuses for seldom mends
itself, and each try costs an election's worth of messages and a line in a log. One that says nothing though it is
expected to is given up, so that a connection that nobody is behind any more does not stand for one.
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

#: Seconds between two tries to connect to a safekeeper, and at most, when it refuses each time.
DIAL_SECONDS = 0.5
MOST_DIAL_SECONDS = 5.0
#: Seconds for a connection to stand.
CONNECT_SECONDS = 5.0
#: Seconds of silence when something is expected: heartbeats are answered several times a second.
SILENT_SECONDS = 15.0
#: The same for a safekeeper that was asked for WAL that another one lacks: commits may wait for that one, and a third one
#: may have it, too.
LENDING_SECONDS = 2.0
#: The same before there are heartbeats: it first reads the whole segment, of up to 1 GB, for its checksum.
COMPARED_SECONDS = 60.0


class SafekeeperLink:
    """A safekeeper's connection, and what was asked of it with `Fetch`, in order."""

    def __init__(self, end: WireEnd) -> None:
        self.end = end
        self.connected = False
        self.polled = select.EPOLLIN | select.EPOLLOUT
        #: When it was made, then when something came last.
        self.since = time.monotonic()
        self.fetches: deque[e.ReadWal | e.CompareWal | e.ReadCatchUpWal] = deque()
        self.fetched = bytearray()


class Links:
    """See the module. `by_peer` and `by_fd`: those that stand, or are being made."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        poll: select.epoll,
        names: Names | None = None,
    ) -> None:
        #: By the peer's number. They may become more.
        self.addresses = addresses
        self.by_peer: dict[int, SafekeeperLink] = {}
        self.by_fd: dict[int, int] = {}
        self._poll = poll
        self._dial_at: dict[int, float] = {}
        self._pause: dict[int, float] = {}
        self._names = names or Names()
        #: How often each was dialled: a name with several addresses is tried at one after the other.
        self._tries: dict[int, int] = {}

    def where(self, peer: int) -> str:
        """A safekeeper's address."""
        host, port = self.addresses[peer]
        return f"{host}:{port}"

    def dial(self, now: float) -> list[tuple[int, str]]:
        """Begin the connections that are due; (safekeeper, why) of those whose name leads nowhere."""
        faults = []
        for peer, (host, port) in enumerate(self.addresses):
            if peer in self.by_peer or now < self._dial_at.get(peer, 0.0):
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
        end = WireEnd(dialled, self.where(peer))
        end.trust()
        link = self.by_peer[peer] = SafekeeperLink(end)
        self.by_fd[end.fileno()] = peer
        self._poll.register(end, link.polled)

    def silent(self, now: float, expected: Callable[[int], bool]) -> list[tuple[int, str]]:
        """(safekeeper, why) of those to be given up. `expected`: whether one has something to say, but for what it was asked for."""
        found = []
        for peer, link in self.by_peer.items():
            if not link.connected:
                if now - link.since > CONNECT_SECONDS:
                    found.append((peer, "no answer to the connection"))
            elif expected(peer):
                if link.fetches and now - link.since > LENDING_SECONDS:
                    found.append((peer, "it was asked for WAL, and says nothing"))
                elif now - link.since > SILENT_SECONDS:
                    found.append((peer, "it says nothing"))
            elif not link.fetches:
                link.since = now
            elif now - link.since > COMPARED_SECONDS:
                found.append((peer, "it was asked for WAL to compare, and says nothing"))
        return found

    def refused(self, peer: int) -> None:
        """It refused: the next try waits twice as long as the one before."""
        pause = min(2 * self._pause.get(peer, DIAL_SECONDS), MOST_DIAL_SECONDS)
        self._pause[peer] = pause
        self._dial_at[peer] = time.monotonic() + pause

    def settled(self, peer: int) -> None:
        """It follows: when it breaks, it is tried again at once."""
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
        """Poll a link for what it waits for."""
        events = link.end.events
        if events != link.polled:
            link.polled = events
            self._poll.modify(link.end, events)

    def close(self) -> None:
        """Close all."""
        for peer in list(self.by_peer):
            self.drop(peer)
