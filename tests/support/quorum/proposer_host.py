"""A proposer's process: the real core, its primary, its queue, and connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from walsender_bridge.quorum.proposer import effects as e
from walsender_bridge.quorum.proposer import invariants
from walsender_bridge.quorum.proposer.catch_up.core import CatchUp
from walsender_bridge.quorum.proposer.core import Proposer
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import newest

if TYPE_CHECKING:
    from tests.support.quorum.quorums import Beside
    from tests.support.quorum.wal import Server
    from tests.support.quorum.world import Connection, World


#: A safekeeper's reasons to withhold its vote from a server.
TIMELINES = (m.Refusal.FENCED_TIMELINE, m.Refusal.OLDER_TIMELINE)


class ProposerHost:
    core_class: type[Proposer] = Proposer
    backfill_class: type[CatchUp] = CatchUp

    def __init__(
        self,
        world: World,
        server: Server | None,
        purpose: m.Purpose,
        above: int = 0,
        beside: Beside | None = None,
    ) -> None:
        from tests.support.quorum.world import INFO, LIMITS

        self.world = world
        self.server = server
        self.alive = True
        self.connections: dict[int, Connection] = {}
        #: What was requested from each peer with Fetch: the effect, in order.
        self.fetches: dict[int, deque[e.ReadWal | e.CompareWal | e.ReadCatchUpWal]] = {}
        self.queue: dict[int, int] = {}
        self.hands: dict[int, list[int]] = {}
        self.stream_lsn: int | None = None
        self.commit_lsn = self.restart_lsn = 0
        #: It is the proposer of another quorum.
        self.beside = beside
        #: It was promoted as `failover` says: it must not be refused.
        self.of_failover = False
        #: Safekeepers that have refused to vote for its timeline.
        self.withheld: set[int] = set()
        #: Another proposer ran concurrently.
        self.had_rivals = False
        self.on_established: Callable[[], None] | None = None
        primary = None
        if server is not None:
            lineage = e.Lineage(server.timeline, server.switches)
            primary = e.Primary(lineage, server.flush_lsn)
            world.checkpoint(server)
        self.core = self.core_class(
            world.number(),
            INFO,
            primary,
            beside.configuration if beside else world.configuration,
            len(world.safekeepers),
            purpose=purpose,
            limits=replace(
                LIMITS,
                epochs=world.faults.epochs,
                backfill_bytes=0 if world.faults.keep is None else 2 * INFO.segment_size,
            ),
            primary_begin=server.keeps if server else None,
            above=above,
            quorum=0 if beside else world.quorum,
            may_begin=True,
        )
        self.checked = invariants.checked(self.core)
        lineage = primary.lineage if primary else e.Lineage(0)
        self.catch_up = self.backfill_class(lineage, INFO.segment_size)
        for peer in beside.peers if beside else range(len(world.safekeepers)):
            self.dial(peer)

    @property
    def leads(self) -> bool:
        streaming = self.core.streaming
        return self.alive and streaming is not None and streaming.established

    @property
    def is_elsewhere(self) -> bool:
        """Its server is not ours: its commits do not count as ours."""
        return self.beside is not None and self.beside.copy

    def _lives(self) -> bool:
        """Checked again after an event, which may have ended it."""
        return self.alive

    def kill(self) -> None:
        self.alive = False
        for connection in self.connections.values():
            connection.proposer_open = False
            self.world.send_there(connection, None)
        self.connections = {}

    # -- events -------------------------------------------------------------------------------------

    def dial(self, peer: int) -> None:
        def again() -> None:
            if self.alive and peer not in self.connections:
                self.world.connect(self, peer)
                if peer not in self.connections:
                    self.dial(peer)

        self.world.at(self.world.choose.uniform(0, 10), again)

    def connected(self, connection: Connection) -> None:
        self.connections[connection.peer] = connection
        self.fetches[connection.peer] = deque()
        self.handle(e.PeerConnected(connection.peer))

    def closed(self, connection: Connection) -> None:
        connection.proposer_open = False
        peer = connection.peer
        if self.connections.get(peer) is connection:
            del self.connections[peer]
            failed = self.fetches.pop(peer)
            self.handle(e.PeerClosed(peer))
            for fetch in failed:
                self._fetched(fetch, [])
            self.dial(peer)

    def received(self, connection: Connection, message: m.Message, cells: list[int]) -> None:
        peer = connection.peer
        if isinstance(message, m.Fetched):
            self._fetched(self.fetches[peer].popleft(), cells)
        elif isinstance(message, m.Held):
            self._held(peer, message)
        else:
            if isinstance(message, m.Refused) and message.reason in TIMELINES:
                self.withheld.add(self.core.peers[peer].identity)
            self.handle(e.PeerReceived(peer, message))  # type: ignore[arg-type]  # sent by a safekeeper

    def _held(self, peer: int, held: m.Held) -> None:
        streaming = self.core.streaming
        if self.alive and streaming is not None:
            for read in self.catch_up.held(self.core.peers[peer], held, streaming):
                self._fetch(read.donor, read)

    def _catch_up_read(self, read: e.ReadCatchUpWal, cells: list[int]) -> None:
        streaming = self.core.streaming
        if self.alive and streaming is not None:
            for send in self.catch_up.was_read(read, len(cells), streaming):
                term = self.core.node_id.term
                wal = m.CatchUpWal(term, send.begin_lsn, send.timeline, len(cells))
                self._send(send.peer, wal, cells)

    def _fetched(
        self, fetch: e.ReadWal | e.CompareWal | e.ReadCatchUpWal, cells: list[int]
    ) -> None:
        whole = len(cells) == fetch.end_lsn - fetch.begin_lsn
        if isinstance(fetch, e.ReadCatchUpWal):
            self._catch_up_read(fetch, cells if whole else [])
            return
        if isinstance(fetch, e.ReadWal):
            self._in_hand(fetch, cells if whole else [])
            return
        equal = None
        if whole:
            assert self.server is not None
            own = self.server.cells
            equal = cells == [own.get(at) for at in range(fetch.begin_lsn, fetch.end_lsn)]
        self.handle(e.WalCompared(fetch.peer, fetch.end_lsn, equal))

    def _in_hand(self, read: e.ReadWal, cells: list[int]) -> None:
        self.hands[read.peer] = cells
        self.handle(e.WalRead(read.peer, read.begin_lsn, read.begin_lsn + len(cells)))

    def stream(self) -> None:
        """Stream what the server has flushed."""
        server = self.server
        if not self.alive or server is None or self.stream_lsn is None:
            return
        if self.stream_lsn < server.keeps:
            self.world.unsent(self)
        elif server.flush_lsn > self.stream_lsn:
            self.world.streamed = True
            begin, end = self.stream_lsn, server.flush_lsn
            self.queue.update((at, server.cells[at]) for at in range(begin, end))
            self.stream_lsn = end
            self.handle(e.WalReceived(begin, end))
            if self._lives() and self.core.streaming is not None:
                self.world.checks.streamed(self.core.streaming)

    def tick(self) -> None:
        if self.alive:
            self.handle(e.Tick())
        if self._lives() and self.server is not None and self.core.streaming is not None:
            for ask in self.catch_up.tick(self.core.streaming, self.core.node_id.term):
                self._send(ask.peer, ask.message, [])

    def handle(self, event: e.Event) -> None:
        if not self.alive:
            return
        established = self.leads
        effects = self.core.step(event)
        self.checked = invariants.check_invariants(self.core, self.checked)
        for effect in effects:
            self.perform(effect)
        streaming = self.core.streaming
        if self._lives() and streaming is not None:
            self.world.checks.streams(self, streaming)
            if self.leads and not established and self.on_established:
                self.on_established()

    # -- effects ------------------------------------------------------------------------------------

    def perform(self, effect: e.Effect) -> None:
        match effect:
            case e.SendMessage(peer, message):
                self._send(peer, message, [])
            case e.SendWal(peer, begin, end, commit_lsn, restart_lsn):
                cells = self._cells(peer, begin, end)
                term = self.core.node_id.term
                append = m.Append(term, begin, commit_lsn, restart_lsn, end - begin)
                self._send(peer, append, cells)
            case e.Feedback(lsn):
                self.world.checks.committed(self, lsn)
                self.commit_lsn = lsn
            case e.StartStreaming(lsn=lsn):
                self.stream_lsn = lsn
                assert self.server is not None
                self.world.checkpoint(self.server)
                self.world.at(0.1, self.stream)
            case e.LocatePrimary():
                assert self.server is not None
                at = e.PrimaryAt(self.server.flush_lsn)
                self.world.at(self.world.choose.uniform(0.1, 3), lambda: self.handle(at))
            case e.ReadWal():
                self._read(effect)
            case e.CompareWal(peer, begin, end):
                self._fetch(peer, effect)
            case e.ReleaseWal(lsn):
                self.queue = {at: cell for at, cell in self.queue.items() if at >= lsn}
            case e.AdvanceSlot(lsn):
                self._advance_slot(lsn)
            case e.ClosePeer(peer):
                connection = self.connections.get(peer)
                if connection is not None:
                    self.world.send_there(connection, None)
                    self.world.at(0.1, lambda: self.closed(connection))
            case e.Stop(reason, detail, by):
                assert by != self.core.node_id, f"displaced by itself: {detail}"
                self.kill()
                self.world.stopped(self, reason, detail)
            case e.MembersChanged(configuration):
                self.world.happened["MembersChanged"] += 1
                if self.beside is None:
                    self.world.membership = newest((self.world.membership, configuration))
            case e.MembersSettled(configuration):
                self.world.happened["MembersSettled"] += 1
                if self.beside is None:
                    self.world.members_settled(configuration)
            case e.MarkRebuild() | e.PeerFault():
                self.world.happened[type(effect).__name__] += 1
            case _:
                raise AssertionError(effect)

    def _send(self, peer: int, message: m.ToSafekeeper, cells: list[int]) -> None:
        connection = self.connections.get(peer)
        if connection is not None:
            self.world.send_there(connection, (message, cells))

    def _cells(self, peer: int, begin: int, end: int) -> list[int]:
        if end == begin:
            return []
        if begin in self.queue:  # ReleaseWal comes behind what is still sent from it
            return [self.queue[at] for at in range(begin, end)]
        cells = self.hands.pop(peer)
        assert len(cells) == end - begin
        return cells

    def _read(self, read: e.ReadWal) -> None:
        begin, end = read.begin_lsn, read.end_lsn
        if read.source == e.WalSource.PEER:
            assert read.donor is not None
            self._fetch(read.donor, read)
            return
        self.world.happened[f"read {read.source}"] += 1
        assert self.server is not None
        held = self.server.cells if begin >= self.server.keeps else {}
        cells = [held[at] for at in range(begin, end)] if held else []
        self.world.at(self.world.choose.uniform(0.1, 5), lambda: self._in_hand(read, cells))

    def _fetch(self, peer: int, fetch: e.ReadWal | e.CompareWal | e.ReadCatchUpWal) -> None:
        if peer not in self.connections:
            self.world.at(0.1, lambda: self._fetched(fetch, []))
            return
        self.world.happened[f"fetch for {type(fetch).__name__}"] += 1
        self.fetches[peer].append(fetch)
        message = m.Fetch(self.core.node_id.term, fetch.begin_lsn, fetch.end_lsn)
        self._send(peer, message, [])

    def _advance_slot(self, lsn: int) -> None:
        self.world.checks.restarted(self, lsn)
        if self.server is not None:
            # WAL is removed by whole segments, except the one in which a record begins that continues here.
            kept = self.server.aligned(lsn)
            self.server.keeps = max(self.server.keeps, kept - kept % self.core.server.segment_size)
            keeps = self.server.keeps
            self.world.at(0.1, lambda: self.handle(e.PrimaryKeeps(keeps)))
