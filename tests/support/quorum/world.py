"""A cluster on a virtual clock: the real cores, drivers that do what the effects say, and faults.

A connection is TCP: each direction keeps its order, may break at any time and lose what is on the way, and
what one end sent before it closed can still arrive at the other. Across connections nothing is ordered.
A safekeeper can crash between any two effects and within those that write.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tests.support.quorum.checks import Checks
from tests.support.quorum.proposer_host import ProposerHost
from tests.support.quorum.safekeeper_host import SafekeeperHost
from tests.support.quorum.wal import Records, Server
from walsender_bridge.proposer.effects import Limits, MembersWanted, StopReason
from walsender_bridge.safekeeper.configuration import Configuration, majority, newest
from walsender_bridge.safekeeper.effects import (
    AlignWal,
    Effect,
    PersistControl,
    ResetWal,
    TruncateWal,
)
from walsender_bridge.safekeeper.history import MAX_ENTRIES
from walsender_bridge.safekeeper.messages import Message, Purpose, ServerInfo

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
    """What goes wrong, and how often: the mean time between two faults, their weights, and chances."""

    weights: Mapping[str, int]
    every: float = 60.0
    crash_at_effect: float = 0.003
    #: The same for the effects of an election, which are few.
    crash_at_election: float = 0.01
    slow: float = 0.03
    #: How often a change of the membership leaves somebody out, who may be taken in again.
    fewer_members: float = 0.0
    #: How often whoever left is switched off for good once the change is said to be done, and a disk lost right then.
    retires: float = 0.0
    #: How much WAL a safekeeper's disk takes (None: no limit). Then one of them is away for long, too.
    capacity: int | None = None
    #: How many epochs a history tells apart.
    epochs: int = MAX_ENTRIES


#: Something of everything; promotions and proposers that do not know of each other; lost and full disks; memberships that shrink and grow
#: under kills and power cuts; power cuts.
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
#: One proposer at a time, whose predecessors are dead, and whose votes are still on the way.
LONE = Faults({"break": 2, "crash": 2, "proposer": 8, "server": 1}, every=25.0, slow=0.3)
#: Disks that hold less than a laggard may lag behind.
SMALL = Faults({"break": 4, "crash": 5, "proposer": 4}, every=20.0, slow=0.1, capacity=128)
#: Histories that are full after some elections, promotions among them.
EPOCHS = Faults(
    {"break": 3, "crash": 6, "proposer": 8, "zombie": 1, "promote": 1, "members": 3, "disk": 2},
    every=15.0,
    crash_at_election=0.05,
    slow=0.1,
    epochs=2,
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
}


class World:
    """`size` safekeepers. `checks` holds the invariants; a violation is an AssertionError."""

    host_of_proposers: type[ProposerHost] = ProposerHost
    host_of_safekeepers: type[SafekeeperHost] = SafekeeperHost

    def __init__(self, seed: int, size: int = 3, faults: Faults = MIXED) -> None:
        self.choose = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self.events = 0
        self.happened: Counter[str] = Counter()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._numbers = 0
        self.records = Records()
        self.checks = Checks(self)
        self.calm = self.quiet = False
        self.safekeepers = [self.host_of_safekeepers(self, number) for number in range(size)]
        self.configuration = Configuration(1, frozenset(s.identity for s in self.safekeepers))
        #: The newest membership that anybody made.
        self.membership = self.configuration
        #: The newest that a proposer has called settled: what the operator takes for done.
        self.settled = Configuration()
        self.server = Server(self.records, self.choose, 2 * SEGMENT)
        while self.server.flush_lsn < 3 * SEGMENT:  # it is attached to while it runs
            self.server.work()
        #: All servers that there were; those that were left for another do not know it.
        self.servers = [self.server]
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
        """How many faults there were, power cuts included."""
        kinds = (*self.faults.weights, "power cut")
        return sum(self.happened[kind] for kind in kinds if kind != "members")

    def run(self, events: int, faults: int = 0) -> None:
        """So many events, and on until there were so many faults since the beginning."""
        last = self.events + events
        while self.events < last or self.faults_injected < faults:
            self.now, _, action = heapq.heappop(self._agenda)
            self.events += 1
            action()
            if self.events % 25 == 0:
                self.checks.logs()

    def finish(self) -> None:
        """No more faults: whatever the server has is committed by everybody at last.

        Before that, where disks are small, without one of them: the others are a quorum.
        """
        self.calm = True
        if self.faults.capacity is not None:
            self._without_one(self.choose.choice(self.safekeepers))
        for safekeeper in self.safekeepers:
            safekeeper.restart()
        self.run(300)
        self.quiet = True
        self._settle()

    def _without_one(self, dead: SafekeeperHost) -> None:
        assert self.faults.capacity is not None
        dead.buried = True
        dead.crash()
        for safekeeper in self.safekeepers:
            safekeeper.restart()
        last = self.server.flush_lsn + 3 * self.faults.capacity
        while self.server.flush_lsn < last:
            self.run(100)
        self.quiet = True
        self._settle()
        self.quiet = dead.buried = False

    def _settle(self) -> None:
        for _ in range(12 if self.faults.capacity is None else 60):
            if self._all_follow():
                break
            if self.proposer.core.fenced and not self.proposer.leads:
                # Those without the fence may be no quorum, if a disk is lost: an operator reads of it, and decides.
                self.restart_proposer(self.proposer, Purpose.ABORT)
            self.run(200)
        self.checks.logs()
        self.checks.settled()

    def _all_follow(self) -> bool:
        """Whether each member that is up has voted for the proposer, and what the server has is committed."""
        core = self.proposer.core
        members = [
            s for s in self.safekeepers if s.up and s.identity in core.configuration.everyone
        ]
        done = self.proposer.leads and self.proposer.commit_lsn == self.server.flush_lsn
        return done and all(member.control.node_id == core.node_id for member in members)

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- processes ----------------------------------------------------------------------------------

    def start_proposer(
        self, server: Server | None, purpose: Purpose = Purpose.ATTACH, above: int = 0
    ) -> ProposerHost:
        host = self.host_of_proposers(self, server, purpose, above)
        for other in self.proposers:
            if other.alive:
                other.had_rivals = host.had_rivals = True
        self.proposers.append(host)
        return host

    def stopped(self, host: ProposerHost, reason: StopReason, detail: str) -> None:
        """A proposer said why it ends; another one is started, if it is still wanted."""
        self.happened[f"stop: {reason.name}"] += 1
        self.checks.stopped(host, reason, detail)
        if host is not self.proposer:
            return
        # The same process, which remembers, when it was only outvoted.
        purpose = host.core.purpose if reason == StopReason.OUTVOTED else Purpose.ATTACH
        if reason in {StopReason.OTHER_HISTORY, StopReason.AHEAD, StopReason.FENCED}:
            # The operator looks for the server that can go on, or takes a fence back.
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

    def _server_works(self) -> None:
        if not self.quiet:
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
        """It breaks: of what is on the way, each end still gets a first part, later or never."""
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
        """A disk has no more room for WAL for a while."""
        self.choose.choice(self.safekeepers).full_until = self.now + self.choose.uniform(10, 200)

    def _fault_proposer(self) -> None:
        self.restart_proposer(self.proposer)

    def _fault_server(self) -> None:
        self.proposer.kill()
        self.server.crash()
        self.restart_proposer(self.proposer)

    def _fault_zombie(self) -> None:
        """A server that was left starts its proposer again; or a second one for the same server."""
        self.start_proposer(self.choose.choice(self.servers))

    def _fault_rivals(self) -> None:
        """Two at the same moment: they hear of the same terms."""
        for _ in range(2):
            self._fault_zombie()

    def _fault_promote(self) -> None:
        """A standby that follows the server directly is promoted wherever it is."""
        server = self.server
        first = max([server.begin, *(switch for _, switch in server.switches)])
        end = self.choose.randint(max(first, server.flush_lsn - 30), server.flush_lsn)
        self._switch_to(server.promoted(server.cells, end, self._timeline()))

    def _timeline(self) -> int:
        return max(server.timeline for server in self.servers) + 1

    def _switch_to(self, server: Server, *, told: bool = False) -> None:
        self.servers.append(server)
        previous, self.server = self.proposer, server
        if self.choose.random() < 0.5:
            previous.kill()
        self.proposer = self.start_proposer(server)
        self.proposer.told = told

    def _fault_failover(self) -> None:
        host = self.start_proposer(None, Purpose.FAILOVER)
        host.on_established = lambda: self._promote_at_vcl(host)

    def _promote_at_vcl(self, host: ProposerHost) -> None:
        if self.choose.random() < 0.2:
            # The operator changes their mind: the old server goes on.
            host.kill()
            self.proposer.kill()
            self.proposer = self.start_proposer(self.server, Purpose.ABORT)
            return
        cells = self.checks.quorum_log(host)
        host.kill()
        # Only who stood for the timeline that was fenced is followed.
        if host.core.history.entries[-1].timeline == self.server.timeline:
            # An operator who takes the fence back at the same time gets what they asked for.
            aborting = any(p.alive and p.core.purpose == Purpose.ABORT for p in self.proposers)
            server = self.server.promoted(cells, host.core.vcl, self._timeline())
            self._switch_to(server, told=not aborting)

    def _fault_disk(self) -> bool:
        """One safekeeper loses its disk, if no change is under way, and a majority of the members is left.

        Until the last change is settled an older membership may still be the one that elects, and disks of it that
        were switched off are lost to it, too.
        """
        lost = self.choose.choice(self.safekeepers)
        members = self.settled.members
        left = members.intersection(s.identity for s in self.safekeepers) - {lost.identity}
        if not self._is_done() or len(left) < majority(members):
            return False
        lost.lose_disk()
        return True

    def _is_done(self) -> bool:
        """Whether the newest membership that anybody knows is the one that was called settled."""
        held = [safekeeper.control.configuration for safekeeper in self.safekeepers]
        known = replace(newest((*held, self.membership)), term=self.settled.term)
        return known == self.settled and known.new_members is None

    def members_settled(self, configuration: Configuration) -> None:
        """The operator hears that this membership stands by itself."""
        self.settled = newest((self.settled, configuration))
        if self.calm or not self._is_done() or self.choose.random() >= self.faults.retires:
            return
        for safekeeper in self.safekeepers:
            if safekeeper.identity not in self.settled.members:
                safekeeper.lose_disk()
                self.happened["retired"] += 1
        self._fault_disk()

    def _fault_members(self) -> bool:
        """The operator makes those that are there the members, or only some of them."""
        proposer = self.proposer
        configuration = proposer.core.configuration
        there = sorted(s.identity for s in self.safekeepers)
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
