"""Carries out the decisions of `catch_up/core.py`: fetches WAL from donors and sends it to receivers."""

from collections.abc import Callable
from typing import Protocol

from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.proposer import effects as e
from walsender_bridge.quorum.proposer.catch_up.core import CatchUp
from walsender_bridge.quorum.proposer.core import Proposer
from walsender_bridge.quorum.proposer.links import SafekeeperLink
from walsender_bridge.quorum.protocol import messages as m


class SendToPeer(Protocol):
    """Queues a message for a peer, followed by WAL; None: there is no connection."""

    def __call__(
        self, peer: int, message: m.ToSafekeeper, /, *wal: memoryview
    ) -> SafekeeperLink | None:
        """See the class."""


class CatchUpFeed:
    """See the module. Without a primary there is no catch-up: only it knows the timelines of older WAL."""

    def __init__(
        self,
        core: Callable[[], Proposer],
        primary: e.Primary | None,
        segment_size: int,
        send: SendToPeer,
    ) -> None:
        self._core = core
        self._catch_up = CatchUp(primary.lineage, segment_size) if primary else None
        self._send = send

    def tick(self) -> None:
        """Time has passed."""
        core = self._core()
        if self._catch_up is not None and core.streaming is not None:
            for effect in self._catch_up.tick(core.streaming, core.node_id.term):
                self._send(effect.peer, effect.message)

    def held(self, peer: int, message: m.Held) -> None:
        """A safekeeper reports what it holds."""
        core = self._core()
        if self._catch_up is None or core.streaming is None or message.term != core.node_id.term:
            return
        for read in self._catch_up.held(core.peers[peer], message, core.streaming):
            fetch = m.Fetch(core.node_id.term, read.begin_lsn, read.end_lsn)
            link = self._send(read.donor, fetch)
            if link is None:
                self.was_read(read, b"")
            else:
                link.fetches.append(read)

    def was_read(self, read: e.ReadCatchUpWal, data: bytes) -> None:
        """A donor's answer; empty if it no longer holds that WAL."""
        core = self._core()
        assert self._catch_up is not None
        assert core.streaming is not None
        for send in self._catch_up.was_read(read, len(data), core.streaming):
            wal = m.CatchUpWal(core.node_id.term, send.begin_lsn, send.timeline, len(data))
            self._send(send.peer, wal, memoryview(data))

    def goals(self) -> dict[int, Lsn]:
        """By the peer's number: the LSN down to which it catches up."""
        core = self._core()
        if self._catch_up is None or core.streaming is None:
            return {}
        found = {n: self._catch_up.goal(peer, core.streaming) for n, peer in core.peers.items()}
        return {number: lsn for number, lsn in found.items() if lsn is not None}

    def stuck(self) -> frozenset[int]:
        """The peers in `goals` whose next WAL no donor could send."""
        core, catch_up = self._core(), self._catch_up
        if catch_up is None:
            return frozenset()
        return frozenset(number for number in self.goals() if catch_up.stuck(core.peers[number]))
