"""A safekeeper's process: the real core, a disk that tears, and connections."""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING

from tests.support.quorum.wal import Disk
from walsender_bridge.quorum.protocol.messages import Append, Fetched, Held, Message
from walsender_bridge.quorum.safekeeper import effects as e
from walsender_bridge.quorum.safekeeper import invariants
from walsender_bridge.quorum.safekeeper.core import Safekeeper

if TYPE_CHECKING:
    from tests.support.quorum.world import Connection, World


class SafekeeperHost:
    core_class: type[Safekeeper] = Safekeeper

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.new_disk()
        self.start()

    def new_disk(self) -> None:
        self.identity = self.world.number()
        self.disk = Disk(self.world.records, self.world.choose)
        self.control = e.ControlState(self.identity)
        #: Control file and WAL of a snapshot.
        self.saved: tuple[e.ControlState, int, dict[int, int]] | None = None
        #: Until then its disk takes no more WAL.
        self.full_until = 0.0
        #: It is destroyed: it is not restarted before it is a member again.
        self.buried = False
        #: It belongs to another quorum: what its own proposer does with it proves nothing about ours.
        self.foreign = False
        #: It has voted for a foreign process.
        self.leapt = False

    def start(self) -> None:
        self.up = True
        self.connections: dict[int, Connection] = {}
        self.hand: list[int] = []
        self.drain_due = False
        self.core = self.core_class(self.control, self.disk.scan())
        self.checked = invariants.checked(self.core)

    # -- faults -------------------------------------------------------------------------------------

    def crash(self) -> None:
        if not self.up:
            return
        self.up = False
        self.disk.crash()
        for connection in self.connections.values():
            connection.safekeeper_open = False
            self.world.send_back(connection, None)
        self.connections = {}
        delay = 400 if self.world.choose.random() < 0.15 else 10
        self.world.at(self.world.choose.uniform(1, delay), self.restart)

    def restart(self) -> None:
        if not self.up and not self.buried:
            self.start()

    def lose_disk(self) -> None:
        self.crash()
        self.new_disk()

    def snapshot(self) -> None:
        """Take a snapshot of its disk, as after a power cut."""
        self.saved = copy.deepcopy((self.control, self.disk.base, self.disk.durable))

    def roll_back(self) -> None:
        """Restore the disk from the snapshot."""
        assert self.saved is not None
        self.crash()
        control, base, durable = copy.deepcopy(self.saved)
        self.control, self.disk.base = control, base
        self.disk.durable, self.disk.cells = durable, dict(durable)

    # -- events -------------------------------------------------------------------------------------

    def received(self, connection: Connection, message: Message, cells: list[int]) -> None:
        self.hand = cells
        self.handle(e.MessageReceived(connection.number, message))  # type: ignore[arg-type]  # sent by a proposer
        if isinstance(message, Append) and self.up and not self.drain_due:
            self.drain_due = True
            self.world.at(self.world.choose.uniform(0, 3), self.drain)

    def drain(self) -> None:
        self.drain_due = False
        if self.up:
            self.handle(e.Drained())

    def closed(self, connection: Connection) -> None:
        connection.safekeeper_open = False
        if self.connections.pop(connection.number, None) is not None:
            self.handle(e.Closed(connection.number))

    def persist_due(self) -> None:
        if self.up:
            self.handle(e.PersistDue())
        faults = self.world.faults
        if self.up and self.core.taken and (faults.capacity, faults.keep) != (None, None):
            keep = self._horizon()
            if keep > self.disk.base:
                keep = self.world.records.aligned(self.disk.cells, self.disk.base, keep)
                self.disk.remove_below(keep - keep % self.core.control.server.segment_size)

    def _horizon(self) -> int:
        core = self.core
        kept_back = core.flush_lsn - (self.world.faults.keep or 0)
        return max(0, min(core.restart_lsn, core.commit_lsn, kept_back))

    @property
    def wanted(self) -> int:
        """The LSN from which it should hold WAL."""
        horizon, size = self._horizon(), self.core.control.server.segment_size
        return min(self.disk.base, horizon - horizon % size)

    def _held(self, term: int) -> Held:
        begin, size = self.disk.base, self.core.control.server.segment_size
        some = self.core.flush_lsn > begin >= 2 * size
        following = begin - size + len(self.disk.catch_up) if some and self.wanted < begin else 0
        return Held(term, begin, self.wanted, following)

    def handle(self, event: e.Event) -> None:
        events = deque([event])
        while events:
            answers: list[e.Event] = []
            effects = self.core.step(events.popleft())
            self.checked = invariants.check_invariants(self.core, self.checked)
            for effect in effects:
                if isinstance(effect, e.KeepTimelines):
                    continue  # the simulated disk has no such files
                if self.world.crashes(effect):
                    self.world.happened[f"crash at {type(effect).__name__}"] += 1
                    if isinstance(effect, e.TruncateWal):
                        self.disk.tear_truncation(effect.lsn)
                    self.crash()
                    return
                answer = self.perform(effect)
                if answer is not None:
                    answers.append(answer)
            events.extendleft(reversed(answers))

    # -- effects ------------------------------------------------------------------------------------

    def perform(self, effect: e.Effect) -> e.Event | None:
        disk = self.disk
        match effect:
            case e.SendMessage(conn, message):
                connection = self.connections.get(conn)
                if connection is not None:
                    self.world.send_back(connection, (message, []))
            case e.WriteWal(lsn, length):
                assert length == len(self.hand)
                disk.write(lsn, self.hand)
                if self.full:
                    return self._disk_full(lsn + length)
                capacity = self.world.faults.capacity
                if capacity is not None and lsn + length > disk.base + capacity:
                    return self._keep(max(self.core.flush_lsn, disk.base + capacity))
            case e.SyncWal(lsn):
                if self.full:
                    return self._disk_full(lsn)
                disk.sync()
                return e.WalSynced(lsn)
            case e.ServeReaders(lsn):
                self.world.checks.served(self, lsn)
            case e.PersistControl(state):
                self.world.checks.persisted(self, self.control, state)
                self.control = state
            case e.AlignWal(flush_lsn, commit_lsn):
                aligned = self.world.records.aligned
                end = (
                    max(disk.cells, default=disk.base - 1) + 1
                )  # less than it had written, if the disk was full
                return e.WalAligned(
                    aligned(disk.cells, disk.base, min(flush_lsn, end)),
                    aligned(disk.cells, disk.base, min(commit_lsn, end)),
                    disk.base,
                )
            case e.TruncateWal(lsn):
                disk.truncate(lsn)
            case e.ResetWal(lsn):
                assert lsn % self.control.server.segment_size == 0, (
                    "a log begins at the start of a segment"
                )
                disk.reset(lsn)
            case e.SendWal(conn, term, begin, end):
                connection = self.connections.get(conn)
                if connection is not None:
                    first = max(begin, disk.base)
                    cells = disk.lend(first, end, self.core.control.server.segment_size)
                    self.world.send_back(connection, (Fetched(term, first, len(cells)), cells))
            case e.SendHeld(conn, term):
                if (connection := self.connections.get(conn)) is not None:
                    self.world.send_back(connection, (self._held(term), []))
            case e.TakeCatchUpWal(conn, term, begin, _):
                held = self._held(term)
                if begin == held.next_lsn:
                    self.world.happened["TakeCatchUpWal"] += 1
                    disk.take_catch_up(self.hand, self.core.control.server.segment_size)
                if (connection := self.connections.get(conn)) is not None:
                    self.world.send_back(connection, (self._held(term), []))
            case e.Close(conn):
                connection = self.connections.pop(conn, None)
                if connection is not None:
                    connection.safekeeper_open = False
                    self.world.send_back(connection, None)
        return None

    @property
    def full(self) -> bool:
        """Whether its disk is full now."""
        return not self.world.calm and self.world.now < self.full_until

    def _disk_full(self, end: int) -> e.DiskFull:
        """Of the WAL written up to `end` a first part fits."""
        return self._keep(self.world.choose.randint(self.core.flush_lsn, end))

    def _keep(self, kept: int) -> e.DiskFull:
        self.disk.keep(kept)
        self.world.happened["NoRoom"] += 1
        return e.DiskFull(kept, "disk full")
