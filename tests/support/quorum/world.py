"""A cluster on a virtual clock: the real cores, drivers that perform their effects, and faults.

A connection behaves as TCP: each direction keeps its order, may break at any time and lose what is under way, and what
one end sent before it closed can still arrive at the other. Connections are not ordered among each other. A safekeeper
can crash between any two effects and within those that write.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tests.support.quorum import leaps, quorums
from tests.support.quorum.checks import Checks
from tests.support.quorum.proposer_host import ProposerHost
from tests.support.quorum.safekeeper_host import SafekeeperHost
from tests.support.quorum.wal import Disk, Records, Server
from walsender_bridge.quorum.proposer.effects import Limits, MembersWanted, StopReason
from walsender_bridge.quorum.protocol.configuration import Configuration, majority, newest
from walsender_bridge.quorum.protocol.history import MAX_ENTRIES
from walsender_bridge.quorum.protocol.messages import Message, Purpose, ServerInfo
from walsender_bridge.quorum.safekeeper.effects import (
    AlignWal,
    Effect,
    PersistControl,
    ResetWal,
    TruncateWal,
)

SEGMENT = 16
INFO = ServerInfo(7, 16, SEGMENT)
LIMITS = Limits(
    queue_bytes=32,
    inflight_bytes=24,
    append_bytes=8,
    max_laggard_bytes=240,
    full_ticks=4,
    compare_bytes=8,
    patience_ticks=3,
)
Parcel = tuple[Message, list[int]]


@dataclass(slots=True)
class Connection:
    """From a proposer to a safekeeper. `None` in a direction is the end of the stream."""

    number: int
    proposer: ProposerHost
    peer: int
    there: deque[Parcel | None] = field(default_factory=deque)
    back: deque[Parcel | None] = field(default_factory=deque)
    proposer_open: bool = True
    safekeeper_open: bool = True
    arrives_there: float = 0
    arrives_back: float = 0


@dataclass(frozen=True, slots=True)
class Faults:
    """The kinds and rates of faults: the mean time between two faults, their weights, and probabilities."""

    weights: Mapping[str, int]
    every: float = 60.0
    crash_at_effect: float = 0.003
    #: The same for the effects of an election, which are few.
    crash_at_election: float = 0.01
    slow: float = 0.03
    #: How often a change of the membership removes a safekeeper, which may be added again.
    fewer_members: float = 0.0
    #: How often removed members are shut down for good once the change is reported as done, and a disk is lost right then.
    retires: float = 0.0
    #: How much WAL a safekeeper's disk takes (None: no limit). Then one of them is also disconnected for long.
    capacity: int | None = None
    #: How much WAL a safekeeper keeps even if it is not needed, and catches up on (None: keeps all, no catch-up).
    keep: int | None = None
    #: Whether the membership is from before quorums had ids.
    without_id: bool = False
    #: How often the server removes WAL that a new quorum has yet to begin with: its slot is reserved later, or lost.
    removes: float = 0.0
    #: How many election epochs a history keeps apart.
    epochs: int = MAX_ENTRIES


#: All kinds; promotions and proposers unaware of each other; lost and full disks; memberships that shrink and grow under
#: kills and power cuts; power cuts.
MIXED = Faults(
    {
        "break": 6,
        "crash": 6,
        "proposer": 4,
        "server": 2,
        "zombie": 2,
        "rivals": 1,
        "promote": 1,
        "failover": 2,
        "members": 3,
        "disk": 1,
        "full": 2,
    }
)
RIVALS = Faults(
    {"break": 4, "crash": 2, "proposer": 2, "zombie": 3, "rivals": 3, "promote": 4},
    every=20.0,
    slow=0.1,
)
DISKS = Faults(
    {"break": 2, "crash": 6, "proposer": 3, "zombie": 1, "members": 6, "disk": 6, "full": 4},
    every=20.0,
    slow=0.1,
)
CHANGES = Faults(
    {"break": 4, "crash": 5, "proposer": 6, "zombie": 2, "rivals": 1, "members": 12, "disk": 4},
    every=15.0,
    crash_at_effect=0.005,
    crash_at_election=0.06,
    slow=0.15,
    fewer_members=0.5,
    retires=0.6,
)
#: One proposer at a time, whose predecessors are dead, but their vote requests are still under way.
LONE = Faults({"break": 2, "crash": 2, "proposer": 8, "server": 1}, every=25.0, slow=0.3)
#: Disks that hold less than the lag allowed to a laggard.
SMALL = Faults({"break": 4, "crash": 5, "proposer": 4}, every=20.0, slow=0.1, capacity=128)
#: Histories that are full after some elections, promotions among them.
EPOCHS = Faults(
    {"break": 3, "crash": 6, "proposer": 8, "zombie": 1, "promote": 1, "members": 3, "disk": 2},
    every=15.0,
    crash_at_election=0.05,
    slow=0.1,
    epochs=2,
)
#: Diverged copies of the server, while members do frequent full resyncs.
CLONES = Faults(
    {"break": 1, "crash": 2, "proposer": 2, "members": 8, "disk": 6, "clone": 6, "idle": 2},
    every=20.0,
    fewer_members=0.3,
)
#: Disks that are restored from a snapshot.
SNAPSHOTS = Faults(
    {"break": 3, "crash": 4, "proposer": 5, "members": 1, "snapshot": 6, "rollback": 4},
    every=20.0,
    slow=0.1,
)
#: Lost disks, full resyncs, and catch-up on what the others keep.
BACKFILL = Faults(
    {"break": 4, "crash": 6, "proposer": 4, "zombie": 2, "promote": 1, "members": 6, "disk": 5},
    every=20.0,
    slow=0.1,
    keep=600,
)
#: The same where old segments are damaged.
DAMAGE = replace(BACKFILL, weights={**BACKFILL.weights, "damage": 8})
#: Safekeepers with lost disks that are formed into other quorums, and all disks moved away between two starts.
QUORUMS = Faults(
    {"break": 3, "crash": 4, "proposer": 6, "zombie": 1, "members": 2, "disk": 1}
    | {"stranger": 8, "second": 3, "emptied": 2},
    every=20.0,
    slow=0.1,
)
#: Few members, and other quorums at the addresses of removed ones.
STRANGERS = replace(
    QUORUMS,
    weights={"members": 10, "stranger": 10, "break": 5, "proposer": 4},
    every=12.0,
    fewer_members=0.9,
)
#: As `QUORUMS`, while our quorum has no id yet.
UPGRADE = replace(QUORUMS, without_id=True)
#: Votes of a minority for foreign processes, in terms that leave none above them.
LEAPS = Faults(
    {"break": 3, "crash": 3, "proposer": 5, "zombie": 1, "server": 1, "leap": 8},
    every=20.0,
    slow=0.1,
)
#: A server that removes the WAL with which its quorum would begin, and proposers that end before they have sent a byte.
BEGINS = Faults(
    {"break": 4, "crash": 5, "proposer": 4, "server": 1, "zombie": 2, "disk": 1, "members": 2},
    every=15.0,
    crash_at_election=0.05,
    slow=0.1,
    removes=0.7,
)
POWER = replace(RIVALS, crash_at_effect=0.01, crash_at_election=0.15)
PROFILES = {
    "power": POWER,
    "mixed": MIXED,
    "rivals": RIVALS,
    "disks": DISKS,
    "changes": CHANGES,
    "lone": LONE,
    "small": SMALL,
    "epochs": EPOCHS,
    "clones": CLONES,
    "snapshots": SNAPSHOTS,
    "backfill": BACKFILL,
    "damage": DAMAGE,
    "quorums": QUORUMS,
    "strangers": STRANGERS,
    "upgrade": UPGRADE,
    "leaps": LEAPS,
    "begins": BEGINS,
}


class World:
    """`size` safekeepers. `checks` holds the invariants; a violation is an AssertionError."""

    host_of_proposers: type[ProposerHost] = ProposerHost
    host_of_safekeepers: type[SafekeeperHost] = SafekeeperHost

    def __init__(self, seed: int, size: int = 3, faults: Faults = MIXED) -> None:
        self.choose = random.Random(seed)
        self.faults = faults
        self.now = self.idle_until = 0.0
        self.events = 0
        self.happened: Counter[str] = Counter()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._numbers = 0
        self.records = Records()
        self.checks = Checks(self)
        self.calm = self.quiet = False
        #: Whether any server's WAL was ever sent to safekeepers.
        self.streamed = False
        self.safekeepers = [self.host_of_safekeepers(self, number) for number in range(size)]
        self.quorum = self.number()
        members = frozenset(s.identity for s in self.safekeepers)
        quorum = 0 if faults.without_id else self.quorum
        self.configuration = Configuration(1, members, quorum=quorum)
        #: The newest membership of any proposer.
        self.membership = self.configuration
        #: The newest one that a proposer reported as settled, and that the operator considers done.
        self.settled = Configuration()
        self.server = Server(self.records, self.choose, 2 * SEGMENT)
        while self.server.flush_lsn < 3 * SEGMENT:  # it is attached to while it runs
            self.server.work()
        #: All servers so far; those that were abandoned for another one do not know it.
        self.servers = [self.server]
        self.clones: list[Server] = []
        self.proposers: list[ProposerHost] = []
        self.proposer = self.start_proposer(self.server)
        self.every(8, self._server_works)
        self.every(25, self._tick)
        self.every(40, self._persist_due)
        self.every(self.faults.every, self._fault)

    # -- the clock ----------------------------------------------------------------------------------

    def at(self, delay: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._agenda, (self.now + delay, self._sequence, action))

    def every(self, interval: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.at(interval * self.choose.uniform(0.5, 1.5), again)

        self.at(interval, again)

    @property
    def faults_injected(self) -> int:
        """The number of faults so far, power cuts included."""
        kinds = (*self.faults.weights, "power cut")
        return sum(self.happened[kind] for kind in kinds if kind != "members")

    def run(self, events: int, faults: int = 0) -> None:
        """Run so many events, and on until there were so many faults since the beginning."""
        last = self.events + events
        while self.events < last or self.faults_injected < faults:
            self.now, _, action = heapq.heappop(self._agenda)
            self.events += 1
            action()
            if self.events % 25 == 0:
                self.checks.logs()

    def finish(self) -> None:
        """No more faults: all WAL of the server gets committed and reaches every member.

        Before that, if disks are small, one safekeeper stays down: the others are a quorum.
        """
        self.calm = True
        for safekeeper in self.safekeepers:
            if safekeeper.foreign:
                safekeeper.lose_disk()  # it may rejoin our quorum later
        if self.faults.capacity is not None:
            self._without_one(self.choose.choice(self.safekeepers))
        for safekeeper in self.safekeepers:
            safekeeper.restart()
        self.run(300)
        self.quiet = True
        self._settle()
        if "leap" in self.faults.weights:
            leaps.undisturbed(self)

    def _without_one(self, dead: SafekeeperHost) -> None:
        """All follow first: the WAL of one that lags by `max_laggard_bytes` would be released for that reason alone."""
        assert self.faults.capacity is not None
        self._all_restart()
        dead.buried = True
        dead.crash()
        self._all_restart()
        for more in (self.faults.capacity + 2 * SEGMENT, 3 * self.faults.capacity):
            last = self.server.flush_lsn + more
            while self.server.flush_lsn < last:
                self.run(20)
            self.quiet = True
            self._settle()
            self.quiet = False
        dead.buried = False

    def _all_restart(self) -> None:
        for safekeeper in self.safekeepers:
            safekeeper.restart()
        self.quiet = True
        self._settle()
        self.quiet = False

    def _settle(self) -> None:
        for _ in range(12 if self.faults.capacity is None else 60):
            if self._all_follow():
                break
            if self.proposer.core.refusals.withheld and not self.proposer.leads:
                # Those without the fence may be no quorum, if a disk is lost: the operator has to decide.
                self.restart_proposer(self.proposer, Purpose.ABORT)
            self.run(200)
        self.checks.logs()
        self.checks.settled()

    def _all_follow(self) -> bool:
        """Whether each running member has voted for the proposer, and all WAL of the server is committed."""
        core = self.proposer.core
        members = [s for s in self.safekeepers if self.is_member(s)]
        done = self.proposer.leads and self.proposer.commit_lsn == self.server.flush_lsn
        voted = all(member.control.node_id == core.node_id for member in members)
        return done and voted and not self.lack_catch_up()

    def is_member(self, safekeeper: SafekeeperHost) -> bool:
        """Whether it is running, and has to follow the proposer in the end."""
        trusted = safekeeper.identity in self.proposer.core.configuration.trusted
        return safekeeper.up and trusted and not leaps.lost(self, safekeeper)

    def lack_catch_up(self) -> list[int]:
        """Members that lack older WAL which another member has undamaged."""
        if self.faults.keep is None:
            return []
        everyone = self.proposer.core.configuration.everyone
        members = [s for s in self.safekeepers if s.up and s.identity in everyone and s.core.taken]
        return [
            s.number
            for s in members
            if any(self._could_lend(o, s.disk) for o in members) and s.disk.base > s.wanted
        ]

    def _could_lend(self, donor: SafekeeperHost, lacking: Disk) -> bool:
        """Whether the donor has the segment below what a disk holds."""
        segment = lacking.base - SEGMENT
        return donor.disk.base <= segment and segment not in donor.disk.damaged

    @property
    def own_safekeepers(self) -> list[SafekeeperHost]:
        """The safekeepers that belong to no other quorum."""
        return [safekeeper for safekeeper in self.safekeepers if not safekeeper.foreign]

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- processes ----------------------------------------------------------------------------------

    def start_proposer(
        self, server: Server | None, purpose: Purpose = Purpose.ATTACH, above: int = 0
    ) -> ProposerHost:
        host = self.host_of_proposers(self, server, purpose, above)
        self.join(host)
        return host

    def join(self, host: ProposerHost) -> None:
        """Add a proposer's process to the running ones."""
        for other in self.proposers:
            if other.alive:
                other.had_rivals = host.had_rivals = True
        self.proposers.append(host)

    def stopped(self, host: ProposerHost, reason: StopReason, detail: str) -> None:
        """A proposer has ended, with its reason; another one is started, if it is still needed."""
        self.happened[f"stop: {reason.name}"] += 1
        self.checks.stopped(host, reason, detail)
        if host is not self.proposer:
            return
        # The same process, with its memory, when it was only outvoted.
        purpose = host.core.purpose if reason == StopReason.OUTVOTED else Purpose.ATTACH
        if reason in {StopReason.OTHER_HISTORY, StopReason.AHEAD, StopReason.FENCED}:
            # The operator looks for the server that can continue, or lifts a fence.
            self.server = self.choose.choice(self.servers)
            purpose = self.choose.choice((Purpose.ATTACH, Purpose.ABORT))
        above = host.core.heard_term if reason == StopReason.OUTVOTED else 0
        delay = self.choose.uniform(5, 40)
        self.at(delay, lambda: self.restart_proposer(host, purpose, above))

    def restart_proposer(
        self, previous: ProposerHost, purpose: Purpose = Purpose.ATTACH, above: int = 0
    ) -> None:
        if previous is self.proposer:
            previous.kill()
            self.proposer = self.start_proposer(self.server, purpose, above)

    def checkpoint(self, server: Server) -> None:
        """Perhaps a checkpoint removes WAL, while no quorum can hold a byte of it."""
        possible = self.faults.removes and not (self.streamed or self.calm)
        if possible and self.choose.random() < self.faults.removes:
            server.checkpoint(SEGMENT)
            self.happened["removed WAL"] += 1

    def unsent(self, host: ProposerHost) -> None:
        """The server does not have the WAL that a proposer requests, which ends; its supervisor starts another one."""
        self.happened["requested removed WAL"] += 1
        host.kill()
        self.at(self.choose.uniform(5, 40), lambda: self.restart_proposer(host))

    def _server_works(self) -> None:
        if not self.quiet and self.now >= self.idle_until:
            self.server.work()
        for proposer in self.proposers:
            proposer.stream()
        self.proposers = [each for each in self.proposers if each.alive or each is self.proposer]

    def _tick(self) -> None:
        self.proposer.tick()

    def _persist_due(self) -> None:
        self.choose.choice(self.safekeepers).persist_due()

    # -- the network --------------------------------------------------------------------------------

    def connect(self, proposer: ProposerHost, peer: int) -> None:
        safekeeper = self.safekeepers[peer]
        if not safekeeper.up or not proposer.alive or peer in proposer.connections:
            return
        connection = Connection(self.number(), proposer, peer)
        safekeeper.connections[connection.number] = connection
        proposer.connected(connection)

    def _delay(self) -> float:
        slow = not self.calm and self.choose.random() < self.faults.slow
        return self.choose.uniform(5, 120) if slow else self.choose.random()

    def send_there(self, connection: Connection, parcel: Parcel | None) -> None:
        connection.there.append(parcel)
        connection.arrives_there = max(connection.arrives_there, self.now + self._delay())
        self.at(connection.arrives_there - self.now, lambda: self._arrive_there(connection))

    def send_back(self, connection: Connection, parcel: Parcel | None) -> None:
        connection.back.append(parcel)
        connection.arrives_back = max(connection.arrives_back, self.now + self._delay())
        self.at(connection.arrives_back - self.now, lambda: self._arrive_back(connection))

    def _arrive_there(self, connection: Connection) -> None:
        if connection.there and connection.safekeeper_open:
            parcel = connection.there.popleft()
            safekeeper = self.safekeepers[connection.peer]
            if parcel is None:
                safekeeper.closed(connection)
            else:
                safekeeper.received(connection, *parcel)

    def _arrive_back(self, connection: Connection) -> None:
        if connection.back and connection.proposer_open:
            parcel = connection.back.popleft()
            if parcel is None:
                connection.proposer.closed(connection)
            else:
                connection.proposer.received(connection, *parcel)

    def lose(self, connection: Connection) -> None:
        """It breaks: of the messages under way, each end still gets some prefix, later or never."""
        for queue, end in ((connection.there, self.send_there), (connection.back, self.send_back)):
            for _ in range(self.choose.randint(0, len(queue))):
                queue.pop()
            end(connection, None)

    # -- faults -------------------------------------------------------------------------------------

    def crashes(self, effect: Effect) -> bool:
        """Whether power fails at this effect of a safekeeper."""
        if self.calm:
            return False
        election = isinstance(effect, PersistControl | TruncateWal | ResetWal | AlignWal)
        chance = self.faults.crash_at_election if election else self.faults.crash_at_effect
        power_cut = self.choose.random() < chance
        self.happened["power cut"] += power_cut
        return power_cut

    def _fault(self) -> None:
        if self.calm:
            return
        weights = self.faults.weights
        kind = self.choose.choices(list(weights), list(weights.values()))[0]
        if getattr(self, f"_fault_{kind}")() is not False:
            self.happened[kind] += 1

    def _fault_break(self) -> bool:
        connections = list(self.proposer.connections.values())
        if connections:
            self.lose(self.choose.choice(connections))
        return bool(connections)

    def _fault_crash(self) -> bool:
        safekeeper = self.choose.choice(self.safekeepers)
        was_up = safekeeper.up
        safekeeper.crash()
        return was_up

    def _fault_full(self) -> None:
        """A disk is full for a while."""
        self.choose.choice(self.safekeepers).full_until = self.now + self.choose.uniform(10, 200)

    def _fault_damage(self) -> bool:
        """A committed segment is damaged on one disk."""
        disk, core = (chosen := self.choose.choice(self.own_safekeepers)).disk, chosen.core
        old = range(disk.base, min(core.flush_lsn, core.commit_lsn) - SEGMENT, SEGMENT)
        segment = self.choose.choice(old) if old else None
        if segment is None or not self._held_whole(segment, but=chosen):
            return False
        disk.damaged.add(segment)
        return True

    def _held_whole(self, segment: int, *, but: SafekeeperHost) -> bool:
        """Whether another trusted member holds a segment undamaged: otherwise the faults exceed what a quorum tolerates."""
        return any(
            each is not but
            and each.identity in self.settled.trusted
            and each.disk.base <= segment <= each.core.flush_lsn - SEGMENT
            and segment not in each.disk.damaged
            for each in self.safekeepers
        )

    def _holds_the_last(self, lost: SafekeeperHost) -> bool:
        """Whether it is the only one with an undamaged copy of a segment that is damaged elsewhere."""
        return not all(
            self._held_whole(segment, but=lost)
            for each in self.safekeepers
            if each is not lost
            for segment in each.disk.damaged
        )

    def _fault_proposer(self) -> None:
        self.restart_proposer(self.proposer)

    def _fault_server(self) -> None:
        self.proposer.kill()
        self.server.crash()
        self.restart_proposer(self.proposer)

    def _fault_zombie(self) -> None:
        """An abandoned server starts its proposer again; or a second one starts for the same server."""
        self.start_proposer(self.choose.choice(self.servers))

    def _fault_snapshot(self) -> None:
        """Take a snapshot of a disk, to which it may be rolled back later."""
        self.choose.choice(self.safekeepers).snapshot()

    def _fault_rollback(self) -> bool:
        """A disk is rolled back by at least an election while a proposer leads, which detects it.

        Like lost disks, it belongs to a minority.
        """
        host, core = self.proposer, self.proposer.core
        trusted = core.configuration.trusted
        kept = [
            s
            for s in self.safekeepers
            if s.identity in trusted and s.saved and s.saved[0].safekeeper == s.identity
        ]
        if (
            not host.leads
            or not core.membership.settled
            or core.configuration.new_members
            or not kept
        ):
            return False
        lost = self.choose.choice(kept)
        assert lost.saved is not None
        assert core.streaming is not None
        known = (
            lost.identity in core.streaming.acked and lost.saved[0].node_id.term < core.node_id.term
        )
        left = trusted.intersection(s.identity for s in self.safekeepers) - {lost.identity}
        if not known or len(left) < majority(core.configuration.members):
            return False
        self._noticed(host, lost)
        return True

    def _noticed(self, host: ProposerHost, lost: SafekeeperHost) -> None:
        """No other fault happens until a majority has persisted it; if that proposer ends first, the disk counts as lost."""
        lost.roll_back()
        self.calm = True
        for _ in range(40):
            lost.restart()
            for each in self.safekeepers:
                each.restart()
            self.run(25)
            configuration = host.core.configuration
            if lost.identity in configuration.distrusted and host.core.membership.settled:
                self.happened["distrusted"] += 1
                break
            if not host.alive:
                lost.lose_disk()
                break
        self.calm = False

    def _fault_idle(self) -> None:
        """The server ends its segment (`pg_switch_wal`), and writes nothing for a while: all logs end there."""
        self.server.switch_segment(SEGMENT)
        self.idle_until = self.now + self.choose.uniform(50, 400)

    def _fault_clone(self) -> bool:
        """A copy of the server that lacks something committed, and has written WAL of its own since, attaches itself."""
        server, end = self.server, self.checks.end
        first = max([server.begin, *(switch.lsn for switch in server.switches)])
        if end <= first:
            return False
        fork = server.aligned(self.choose.randint(max(first, end - 30), end - 1))
        cells = {at: cell for at, cell in server.cells.items() if at < fork}
        clone = Server(self.records, self.choose, fork, server.timeline, server.switches, cells)
        while clone.flush_lsn <= server.flush_lsn + 2 * SEGMENT:
            clone.work()
        self.clones.append(clone)
        self.start_proposer(clone)
        return True

    def _fault_rivals(self) -> None:
        """Start two at the same moment: they learn of the same terms."""
        for _ in range(2):
            self._fault_zombie()

    def _fault_promote(self) -> None:
        """A standby that follows the server directly is promoted wherever it is."""
        server = self.server
        first = max([server.begin, *(switch.lsn for switch in server.switches)])
        end = self.choose.randint(max(first, server.flush_lsn - 30), server.flush_lsn)
        self._switch_to(server.promoted(server.cells, end, self._timeline()))

    def _timeline(self) -> int:
        return max(server.timeline for server in self.servers) + 1

    def _switch_to(self, server: Server, *, of_failover: bool = False) -> None:
        self.servers.append(server)
        previous, self.server = self.proposer, server
        if self.choose.random() < 0.5:
            previous.kill()
        self.proposer = self.start_proposer(server)
        self.proposer.of_failover = of_failover

    def _fault_failover(self) -> None:
        host = self.start_proposer(None, Purpose.FAILOVER)
        host.on_established = lambda: self._promote_at_vcl(host)

    def _promote_at_vcl(self, host: ProposerHost) -> None:
        if self.choose.random() < 0.2:
            # The operator aborts: the old server continues.
            host.kill()
            self.proposer.kill()
            self.proposer = self.start_proposer(self.server, Purpose.ABORT)
            return
        cells = self.checks.quorum_log(host)
        host.kill()
        # Only a proposer of the fenced timeline is followed.
        if host.core.history.entries[-1].timeline == self.server.timeline:
            # An operator who lifts the fence at the same time gets that result.
            aborting = any(p.alive and p.core.purpose == Purpose.ABORT for p in self.proposers)
            server = self.server.promoted(cells, host.core.vcl, self._timeline())
            self._switch_to(server, of_failover=not aborting)

    _fault_stranger = quorums.stranger
    _fault_second = quorums.second
    _fault_emptied = quorums.emptied
    _fault_leap = leaps.leap

    def _fault_disk(self) -> bool:
        return self.fault_disk()

    def fault_disk(self) -> bool:
        """One safekeeper loses its disk, if no change is under way, and a majority of the members is left.

        Until the last change is settled an older membership may still elect, and members of it that were shut down are lost
        to it, too.
        """
        lost = self.choose.choice(self.safekeepers)
        members = self.settled.members
        trusted = self.settled.trusted.intersection(s.identity for s in self.safekeepers)
        left = trusted - {lost.identity}
        if not self._is_done() or len(left) < majority(members) or self._holds_the_last(lost):
            return False
        lost.lose_disk()
        return True

    def _is_done(self) -> bool:
        """Whether the newest known membership is the one reported as settled."""
        held = [safekeeper.control.configuration for safekeeper in self.own_safekeepers]
        known = replace(newest((*held, self.membership)), term=self.settled.term)
        return known == self.settled and known.new_members is None

    def members_settled(self, configuration: Configuration) -> None:
        """The operator learns that this membership is settled."""
        self.settled = newest((self.settled, configuration))
        if self.calm or not self._is_done() or self.choose.random() >= self.faults.retires:
            return
        for safekeeper in self.safekeepers:
            if safekeeper.identity not in self.settled.members:
                safekeeper.lose_disk()
                self.happened["retired"] += 1
        self.fault_disk()

    def _fault_members(self) -> bool:
        """The operator makes all running safekeepers the members, or only some of them."""
        proposer = self.proposer
        configuration = proposer.core.configuration
        distrusted = configuration.distrusted
        there = sorted(s.identity for s in self.own_safekeepers if s.identity not in distrusted)
        if self.choose.random() < self.faults.fewer_members:
            there = self.choose.sample(there, self.choose.randint(1, len(there)))
        wanted = (
            proposer.leads
            and configuration.new_members is None
            and proposer.core.membership.settled
        )
        if not wanted or frozenset(there) == configuration.members:
            return False
        proposer.handle(MembersWanted(frozenset(there)))
        return True
