"""A replicated stream on a virtual clock: the real cores of replicas and repository, a network, and disks.

A machine's disk applies the effects of an event whole or not at all; a crash comes before it, or behind it with the answer
lost. Messages are lost, doubled and reordered, and arrive after their sender has gone. Machines lose their disks, and lose
all entries of a disk that keeps its record. The repository restarts from its records between any two steps of a seal. Another
one takes over while the old leader goes on: it calls machines as far as it knows, and tries to write.
Writers die with appends on some replicas only, and go on being heard.

What the world knows better than any part, and checks after every step: `Truth`.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tests.support.etcd_model import LEADER, EtcdModel
from tests.support.log_entries import SCHEMAS, EntryMaker
from walsender_bridge.change_log.entry import read_header
from walsender_bridge.change_log.protocol import (
    MAX_COUNT,
    START,
    CommitContext,
    IssuedCommit,
    Position,
    ReplicaReport,
    is_from_before_a_rebuild,
)
from walsender_bridge.change_log.replica import invariants as of_replica
from walsender_bridge.change_log.replica.core import Replica, ReplicaState
from walsender_bridge.change_log.replica.disk import (
    DropFrom,
    Durable,
    Effect,
    IndexRow,
    PutDurable,
    PutEntry,
    PutIndex,
    PutSchema,
    StoredReplica,
    Wipe,
)
from walsender_bridge.change_log.replica.synchronization import SyncBatch, SyncOffer
from walsender_bridge.change_log.repository import invariants as of_repository
from walsender_bridge.change_log.repository import leadership
from walsender_bridge.change_log.repository.core import (
    Created,
    LogServerSeen,
    Record,
    ReplicasAssigned,
    Repository,
    RepositoryTick,
    StreamCreated,
    StreamSealed,
    StreamState,
    StreamUnsealed,
    TrimDecided,
)
from walsender_bridge.errors import (
    CorruptError,
    InvariantError,
    TusklineError,
    UnavailableError,
)

STREAM, LOG = "s", "log"
#: Members without which the stream stays sealed.
LEAST = 2
#: How often a member is asked to seal that lacks commits.
PATIENCE = 20
Content = dict[int, tuple[bytes, int]]


class Violation(AssertionError):
    """What must never be has happened."""


class Disk:
    """What survives a crash of a machine."""

    def __init__(self) -> None:
        self.durable: Durable | None = None
        self.entries: dict[int, bytes] = {}
        self.rows: list[IndexRow] = []
        self.schemas: dict[bytes, bytes] = {}
        self.full = False
        #: Damage that the next write meets; and what a write has met, which is kept aside until the replica is wiped.
        self.damaged = self.aside = False

    def check(self, effects: Sequence[Effect]) -> None:
        """Raises what keeps these effects from the disk."""
        wipes = any(isinstance(each, Wipe) for each in effects)
        if effects and self.full:
            raise UnavailableError("the disk is full")
        if wipes:
            self.damaged = self.aside = False
        elif effects and self.damaged:
            self.aside = True
            raise CorruptError("damaged page")

    def apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case DropFrom(offset):
                    self.entries = {o: data for o, data in self.entries.items() if o < offset}
                case PutSchema(digest, record):
                    self.schemas[digest] = record
                case PutEntry(offset, data):
                    self.entries[offset] = data
                case PutIndex(row):
                    self.rows.append(row)
                case PutDurable(durable):
                    self.durable = durable
                case Wipe(durable):
                    self.entries, self.rows, self.schemas = {}, [], {}
                    self.durable = durable

    def found(self) -> StoredReplica:
        assert self.durable is not None
        kept = self.entries
        end = self.rows[-1].context.end if self.rows else None
        return StoredReplica(self.durable, min(kept, default=None), max(kept, default=None), end)


class Machine:
    """A log server. `core` is None while it has no replica; `session`: of the writer that is open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.up = True
        self.disk = Disk()
        self.core: Replica | None = None
        self.session = 0
        #: Whether its disk has lost entries that it may have reported before.
        self.lost_entries = False

    def create(self) -> None:
        self.disk.durable = Durable(STREAM, LOG)
        self.core = Replica(self.disk.found(), (), ())

    def restart(self) -> None:
        self.up, self.session = True, self.session + 1
        self.recover()

    def recover(self) -> None:
        """Have the core that the disk says, whatever the one before it knew."""
        self.core = self.lost() if self.disk.aside else None
        if self.core is None and self.disk.durable is not None:
            found = self.disk.found()
            start = found.durable.committed_end
            tail = [data for offset, data in sorted(self.disk.entries.items()) if offset >= start]
            try:
                self.core = Replica(found, tail, self.disk.schemas)
            except CorruptError:
                self.core = self.lost()

    def lost(self) -> Replica:
        """The core of a machine that has nothing."""
        nothing = StoredReplica(Durable(STREAM, LOG), None, None, None, "it has no data yet")
        return Replica(nothing, (), ())

    def do(self, event: Callable[[Replica], list[Effect]]) -> None:
        """Perform an event durably. Raises its error, behind which nothing has changed."""
        if self.core is None:
            raise LookupError(f"{self.name} has no replica")
        core, before = self.core, self.core.current
        effects = event(core)
        of_replica.check_invariants(core, before)
        self.write(effects)
        self.lost_entries &= core.state == ReplicaState.LEARNING

    def write(self, effects: Sequence[Effect]) -> None:
        """Apply effects of the core, which is recovered from the disk if it takes none of them. Raises its error."""
        try:
            self.disk.check(effects)
        except TusklineError:
            # A report from before may still be on its way.
            self.lost_entries |= self.disk.aside
            self.recover()
            raise
        self.disk.apply(effects)

    @property
    def committed(self) -> Content:
        """The committed entries that it would serve, with their global offsets."""
        core = self.core
        if core is None or core.state in {ReplicaState.LEARNING, ReplicaState.CLOSED}:
            return {}
        places = {
            offset: row.context.global_offset + offset - row.context.local_offset
            for row in self.disk.rows
            for offset in range(row.context.local_offset, row.context.end)
        }
        low, end = core.durable.low_offset, core.durable.committed_end
        return {o: (self.disk.entries[o], places[o]) for o in range(low, end) if o in places}


@dataclass
class Writer:
    """A writer: of a term, on machines, each of which has a session for it. `acked`: appends, by machine."""

    term: int
    sessions: dict[str, int]
    make: EntryMaker
    start: int
    sent: list[bytes] = field(default_factory=list)
    acked: Counter[str] = field(default_factory=Counter)
    alive: bool = True

    @property
    def durable_end(self) -> int:
        """Behind what all machines have acknowledged."""
        return self.start + min(self.acked[name] for name in self.sessions)


@dataclass
class Seal:
    """A seal that is being carried out. `sealed`: the machines that answered. `asked`: how often those were that lack commits."""

    term: int
    end: int
    version: int
    members: tuple[str, ...]
    sealed: set[str] = field(default_factory=set)
    asked: Counter[str] = field(default_factory=Counter)
    #: What those that answered showed then as `replaced_by`.
    replaced: dict[str, str | None] = field(default_factory=dict)

    def answered(self, name: str, core: Replica) -> None:
        """A machine is sealed."""
        self.sealed.add(name)
        self.replaced[name] = core.durable.replaced_by


@dataclass
class Truth:
    """What has happened. `committed`: by offset; `rejected`: entries that a seal removed."""

    committed: Content = field(default_factory=dict)
    rejected: set[bytes] = field(default_factory=set)
    written: set[bytes] = field(default_factory=set)
    #: Up to where the repository has had entries trimmed.
    low: int = 1
    #: As what each machine, whose entries were lost before, became a member.
    joined: dict[str, str] = field(default_factory=dict)


@dataclass
class OldLeader:
    """A repository that does not know that another one leads. `number`: of its last record."""

    stream: StreamState
    etcd: EtcdModel
    fence: int
    number: int


class World:
    """See the module. `happened` counts events by name."""

    MACHINE = Machine

    def __init__(self, seed: int, names: str = "klm") -> None:
        self.choose = random.Random(seed)
        self.machines = {name: self.MACHINE(name) for name in names}
        self.happened: Counter[str] = Counter()
        self.faults = 0
        self.etcd = EtcdModel()
        self.fence = self.etcd.lead()
        self.number = 0
        self.old: OldLeader | None = None
        self.repository = Repository()
        self.messages: list[Callable[[], None]] = []
        self.reports: list[ReplicaReport] = []
        #: The last report of each machine, whether it counts or not.
        self.shown: dict[str, ReplicaReport] = {}
        self.seal: Seal | None = None
        self.writers: list[Writer] = []
        self.given: int | None = None
        self.syncs: dict[str, tuple[str, list[SyncBatch]]] = {}
        self.truth = Truth()
        self.serial = 0
        self.record(Created(LOG))
        for name in names:
            self.record(LogServerSeen(name, name))
        self.record(StreamCreated(STREAM, tuple(names)))
        for machine in self.machines.values():
            machine.create()

    # -- the repository -----------------------------------------------------------------------------

    def record(self, record: Record) -> bool:
        before = of_repository.checked(self.repository)
        changed = self.repository.apply(record)
        if changed:
            of_repository.check_invariants(self.repository, before)
            self.number += 1
            if not self.write_record(self.etcd, self.fence, self.number, record):
                raise Violation("W1: an old leader has written behind the one that leads")
        return changed

    @staticmethod
    def write_record(etcd: EtcdModel, fence: int, number: int, record: Record) -> bool:
        key = f"record/{number:09}"
        operation = {"request_put": {"key": key, "value": record}}
        free = leadership.created(key, 0)
        return etcd.txn(leadership.fenced(LEADER, fence, free, then=[operation]))

    @property
    def records(self) -> list[Record]:
        """All that were written."""
        found = sorted(key for key in self.etcd.keys if key != LEADER)
        return [self.etcd.keys[key][0] for key in found]

    @property
    def stream(self) -> StreamState:
        return self.repository.streams[STREAM]

    def restart_repository(self) -> None:
        """It goes on from its records; calls that it has sent may still arrive."""
        self.faults += 1
        self.repository = self.first_state()
        for record in self.records:
            self.repository.apply(record)
        self.seal, self.given, self.syncs, self.shown = None, None, {}, {}

    def first_state(self) -> Repository:
        """What the records begin with."""
        return Repository()

    def fail_over(self) -> None:
        """Another repository leads, and goes on from the records; the old one goes on, too."""
        self.old = OldLeader(self.stream, self.etcd, self.fence, self.number)
        self.fence = self.etcd.lead()
        self.restart_repository()

    def old_leader(self) -> None:
        """It calls machines by what it knows, or writes: both may arrive later still."""
        if self.old is None:
            return
        old, stream = self.old, self.old.stream
        end, term = stream.last.context.end, stream.term
        name = self.choose.choice(stream.members)
        match self.choose.randrange(4):
            case 0:
                missed = tuple(stream.missed(self.choose.choice(stream.history).context.version))
                self.send(partial(self.commit, name, missed))
            case 1:
                if stream.sealed:
                    self.send(partial(self.seal_late, name, end, term, stream.latest.version))
            case 2:
                self.begin_sync(stream)
            case _:
                record = self.choose.choice(
                    (StreamSealed(STREAM, term + 1), StreamUnsealed(STREAM, term, (name,)))
                )
                self.send(partial(self.write_late, old, record))

    def seal_late(self, name: str, end: int, term: int, version: int) -> None:
        machine = self.machines[name]
        machine.do(lambda core: core.seal(end, term, version))
        machine.session += 1

    def now(self) -> float:
        """The repository's clock. Here, no lease has an end."""
        return 0.0

    def write_late(self, old: OldLeader, record: Record) -> None:
        if self.write_record(old.etcd, old.fence, old.number + 1, record):
            raise Violation("W1: an old leader has written")

    def tick(self) -> None:
        reports = tuple(self.choose.sample(self.reports, min(len(self.reports), 6)))
        known = self.stream.last
        self.record(RepositoryTick(self.now(), reports))
        if self.stream.last is not known:
            self._check_issued(self.stream.last.context)
        for report in reports:
            if report.replica in self.stream.members and report.replica in self.machines:
                missed = tuple(self.stream.missed(report.version))
                if missed:
                    self.send(partial(self.commit, report.replica, missed))
        if self.choose.random() < 0.8:
            self.reports.clear()

    def _check_issued(self, context: CommitContext) -> None:
        """I6: every member has what is committed, and the same."""
        span = range(context.local_offset, context.end)
        for offset in span:
            held = {
                self.machines[name].disk.entries.get(offset)
                for name in self.stream.members
                if name in self.machines
                and not self.machines[name].lost_entries
                and not self.is_copy(self.machines[name])
                and not self.excused(self.machines[name])
            }
            if len(held) != 1 or None in held:
                raise Violation(f"I6: members differ at {offset}, which is committed")

    def commit(self, name: str, commits: tuple[IssuedCommit, ...]) -> None:
        for each in commits:
            self.machines[name].do(partial(Replica.commit, context=each.context, crc=each.crc))

    # -- seals --------------------------------------------------------------------------------------

    def begin_seal(self) -> None:
        """For a writer, or to change the members; more often when nobody writes."""
        stream = self.stream
        writes = any(each.alive and each.term == stream.term for each in self.writers)
        if writes and self.choose.random() < 0.8:
            return
        term = self.repository.next_term(STREAM, self.shown.values())
        self.record(StreamSealed(STREAM, term))
        self.given = None
        end = stream.last.context.end
        self.seal = Seal(term, end, self.repository.version, stream.members)
        for name in stream.members:
            for _ in range(self.choose.choice((1, 1, 2))):
                self.send(partial(self.seal_one, name, self.seal))

    def seal_one(self, name: str, seal: Seal) -> None:
        machine = self.machines[name]
        machine.do(lambda core: core.seal(seal.end, seal.term, seal.version))
        machine.session += 1
        assert machine.core is not None
        if machine.core.state == ReplicaState.SEALED:
            if self.choose.random() < 0.9 and self.seal is seal:
                seal.answered(name, machine.core)
        elif self.seal is seal and name in self.stream.members and seal.asked[name] < PATIENCE:
            seal.asked[name] += 1
            missed = tuple(self.stream.missed(machine.core.current.version))
            self.send(partial(self.commit, name, missed))
            self.send(partial(self.seal_one, name, seal))

    def end_seal(self) -> None:
        seal = self.seal
        if seal is None or not {*self.stream.members} or len(seal.sealed) < self.least():
            return
        members = tuple(n for n in self.stream.replicas if n in seal.sealed)
        # Whatever is not committed by now is not to be seen again, whoever has it.
        self.truth.rejected |= self.truth.written - {d for d, _ in self.truth.committed.values()}
        committed = {
            data
            for machine in self.machines.values()
            for offset, data in machine.disk.entries.items()
            if offset < seal.end and machine.name in members
        }
        self.truth.rejected -= committed
        if self.record(StreamUnsealed(STREAM, seal.term, members)):
            self.given = seal.term
            for name in members:
                if replaced_by := seal.replaced[name]:
                    self.truth.joined[name] = replaced_by
                    self.send(partial(self.joined, name, replaced_by))
        self.seal = None

    def joined(self, name: str, replaced_by: str) -> None:
        self.machines[name].do(partial(Replica.joined, replaced_by=replaced_by))

    def is_copy(self, machine: Machine) -> bool:
        """Whether a replica has a copy of what another one has, instead of what it had as a member."""
        core = machine.core
        known = {None, self.truth.joined.get(machine.name)}
        return core is not None and core.current.replaced_by not in known

    def least(self) -> int:
        return min(LEAST, len(self.stream.members))

    # -- replicas that are not in sync --------------------------------------------------------------

    def assign(self) -> None:
        """A machine whose disk was lost has another name."""
        kept = [n for n in self.stream.replicas if n in self.machines or n in self.stream.members]
        new = [n for n in self.machines if n not in kept][: 3 - len(kept)]
        if new or len(kept) < len(self.stream.replicas):
            self.record(ReplicasAssigned(STREAM, (*kept, *new)))

    def begin_sync(self, known: StreamState | None = None) -> None:
        """From any member to any other replica; an earlier one may still be going on. `known`: by an old leader."""
        stream = known or self.stream
        outside = [n for n in stream.outside if n in self.machines and self.machines[n].up]
        members = [n for n in stream.members if n in self.machines and self.machines[n].up]
        if not outside or not members:
            return
        to, source = self.choose.choice(outside), self.machines[self.choose.choice(members)]
        machine = self.machines[to]
        if machine.core is not None and machine.core.state != ReplicaState.LEARNING:
            end, term, version = stream.last.context.end, stream.term, stream.latest.version
            if is_from_before_a_rebuild(machine.core.current.version, version):
                end = MAX_COUNT
            if self.attempt(lambda: machine.do(lambda core: core.seal(end, term, version))):
                machine.session += 1
        core = source.core
        if core is None or core.state == ReplicaState.LEARNING:
            return
        if batches := self.sync_init(source, machine):
            self.syncs[to] = batches

    def sync_init(self, source: Machine, machine: Machine) -> tuple[str, list[SyncBatch]] | None:
        """Begin to synchronize, if the destination takes part: the name of the source, and what it is to send."""
        self.serial += 1
        label = f"{source.name}-{self.serial}"
        first, durable = self._offer(source)
        offer = SyncOffer(label, first, durable)
        if machine.core is None:
            machine.core = machine.lost()
        lacking = None

        def init(core: Replica) -> list[Effect]:
            nonlocal lacking
            lacking, effects = core.sync_init(offer)
            return effects

        if not self.attempt(lambda: machine.do(init)) or lacking is None:
            return None
        machine.session += 1
        return label, self._batches(source, lacking.first, lacking.end, durable)

    @staticmethod
    def _offer(source: Machine) -> tuple[Position, Durable]:
        assert source.core is not None
        durable = source.core.durable
        low = durable.low_offset
        if low == durable.committed_end:
            return durable.position, durable
        before = [row for row in source.disk.rows if row.context.end <= low]
        if before or low == START.end_offset:
            return (before[-1].position if before else START), durable
        # As the store's `position_at`: what a replica has taken from its source's low watermark on has no commit in front.
        first = source.disk.rows[0]
        total = first.position.bytes_total - first.size
        crc = read_header(source.disk.entries[low]).previous_crc
        return replace(START, end_offset=low, bytes_total=total, crc=crc), durable

    @staticmethod
    def _batches(source: Machine, start: int, end: int, durable: Durable) -> list[SyncBatch]:
        schemas = [*source.disk.schemas.values()]
        rows = [row for row in source.disk.rows if start < row.context.end <= end]
        batches = [
            SyncBatch(
                [source.disk.entries[o] for o in range(row.context.local_offset, row.context.end)],
                schemas,
                [row],
            )
            for row in rows
        ]
        if not batches:
            return [SyncBatch([], schemas, [], durable)]
        batches[-1] = replace(batches[-1], done=durable)
        return batches

    def step_sync(self) -> None:
        if not self.syncs:
            return
        to = self.choose.choice(sorted(self.syncs))
        label, batches = self.syncs[to]
        if to not in self.machines or not self.machines[to].up:
            return
        machine = self.machines[to]
        if not self.attempt(
            lambda: machine.do(lambda core: core.sync_replicate(label, batches[0]))
        ):
            del self.syncs[to]
            return
        batches.pop(0)
        if not batches:
            del self.syncs[to]

    def join(self) -> None:
        """While the stream is sealed: a replica that is sealed at the same end with the same last entry is a member, too."""
        seal = self.seal
        if seal is None or not seal.sealed:
            return
        cores = [self.machines[n].core for n in seal.sealed if n in self.machines]
        crc = {core.tail.crc for core in cores if core is not None}
        for name in self.stream.outside:
            machine = self.machines.get(name)
            if machine is None or not machine.up or machine.core is None:
                continue
            its = partial(Replica.seal, end=seal.end, term=seal.term, version=seal.version)
            self.attempt(partial(machine.do, its))
            core = machine.core
            if is_from_before_a_rebuild(core.current.version, self.repository.version):
                continue
            end = core.state, core.current.term, core.current.committed_end, {core.tail.crc}
            if end == (ReplicaState.SEALED, seal.term, seal.end, crc):
                machine.session += 1
                seal.answered(name, core)

    def may_end_apart(self, machine: Machine) -> bool:
        """Whether the machine may end differently from other members behind a seal."""
        return self.excused(machine)

    # -- writers ------------------------------------------------------------------------------------

    def open_writer(self) -> None:
        """With a term that was given out, on all members."""
        if self.given is None:
            return
        term, self.given = self.given, None
        sessions, ends = {}, set()
        for name in self.stream.members:
            machine = self.machines.get(name)
            if machine is None or not machine.up:
                return
            if not self.attempt(partial(machine.do, partial(Replica.open_writer, term=term))):
                return
            machine.session += 1
            sessions[name] = machine.session
            assert machine.core is not None
            ends.add((machine.core.tail.end_offset, machine.core.tail.crc))
        if len(ends) > 1:
            if any(self.may_end_apart(self.machines[name]) for name in sessions):
                # As `StreamWriter`, which then asks for another seal.
                return
            raise Violation("I3: members end differently behind a seal")
        make = EntryMaker(self.choose.getrandbits(32))
        first = self.machines[self.stream.members[0]].core
        assert first is not None
        make.follow(first.status())
        self.writers.append(Writer(term, sessions, make, first.tail.end_offset))

    def reopen(self) -> None:
        """A writer that was replaced comes back, where it can."""
        name = self.choose.choice([*self.machines])
        machine = self.machines[name]
        if not self.writers or not machine.up:
            return
        old = self.choose.choice(self.writers)
        if old.term == self.stream.term and not self.stream.sealed:
            return
        if self.attempt(lambda: machine.do(lambda core: core.open_writer(old.term))):
            machine.session += 1
            assert machine.core is not None
            make = EntryMaker(self.choose.getrandbits(32))
            make.follow(machine.core.status())
            start = machine.core.tail.end_offset
            self.writers.append(Writer(old.term, {name: machine.session}, make, start))

    def write(self) -> None:
        """One more append, sent to all machines of the writer."""
        living = [each for each in self.writers if each.alive]
        if not living:
            return
        writer = self.choose.choice(living)
        data = writer.make.whole(size=8)
        writer.sent.append(data)
        self.truth.written.add(data)
        for name in writer.sessions:
            self.send(partial(self.append, name, writer))

    def append(self, name: str, writer: Writer) -> None:
        """The next append in the order of its connection."""
        machine, number = self.machines[name], writer.acked[name]
        if machine.session != writer.sessions[name] or number >= len(writer.sent):
            writer.alive = False
            return
        data = writer.sent[number]
        machine.do(lambda core: core.append([data], [*SCHEMAS.values()]))
        if self.choose.random() < 0.99:
            writer.acked[name] += 1
        else:
            # The answer is lost, and the connection with it.
            writer.alive, writer.sessions[name] = False, -1

    # -- events -------------------------------------------------------------------------------------

    def send(self, message: Callable[[], None]) -> None:
        self.messages.append(message)

    def attempt(self, event: Callable[[], object]) -> bool:
        """Whether it was carried out. An invariant that does not hold is never an answer."""
        try:
            event()
        except InvariantError:
            raise
        except (TusklineError, LookupError):
            return False
        return True

    def deliver(self) -> None:
        """One message, in any order, perhaps twice; or it is lost."""
        if not self.messages:
            return
        message = self.messages.pop(self.choose.randrange(len(self.messages)))
        chance = self.choose.random()
        if chance < 0.03:
            self.faults += 1
            return
        if chance < 0.08:
            self.faults += 1
            self.messages.append(message)
        # It may be to a machine that has another name by now: that is a LookupError, too.
        self.attempt(message)

    def report(self) -> None:
        for name, machine in self.machines.items():
            if machine.up and machine.core is not None and self.choose.random() < 0.7:
                if not self.attempt(partial(machine.write, machine.core.persist())):
                    continue
                found = machine.core.report(name)
                if found is not None:
                    self.hear(name, found)

    def hear(self, name: str, found: ReplicaReport) -> None:
        """A report is on its way to the process that asks."""
        self.shown[name] = found
        self.reports.append(found)

    def crash(self) -> None:
        machine = self.choose.choice([*self.machines.values()])
        self.faults += 1
        machine.up = False
        if self.choose.random() < 0.7:
            machine.restart()

    def restart(self) -> None:
        for machine in self.machines.values():
            if not machine.up:
                machine.restart()

    def lose_disk(self) -> None:
        """As long as enough others have everything, or the loss would be none of ours."""
        name = self.choose.choice([*self.machines])
        if not self._may_lose(name):
            return
        self.faults += 1
        self.serial += 1
        del self.machines[name]
        self.syncs.pop(name, None)
        self.machines[f"{name[0]}{self.serial}"] = self.MACHINE(f"{name[0]}{self.serial}")

    def lose_entries(self) -> None:
        """A disk keeps its small record and loses all entries, or one in the middle of those that are not committed."""
        name = self.choose.choice([*self.machines])
        machine = self.machines[name]
        durable = machine.disk.durable
        # What is not committed yet leaves no trace in the record: such a loss is found when the commit comes.
        if durable is None or durable.low_offset == durable.committed_end:
            return
        if not self._may_lose(name):
            return
        self.faults += 1
        tail = [o for o in machine.disk.entries if o > durable.committed_end]
        if len(tail) > 1 and self.choose.random() < 0.5:
            del machine.disk.entries[tail[0]]
        else:
            machine.disk.entries, machine.disk.rows = {}, []
        machine.lost_entries = True
        machine.restart()

    def _may_lose(self, name: str) -> bool:
        others = [n for n in self.stream.members if n != name and n in self.machines]
        valid = [
            n
            for n in others
            if (core := self.machines[n].core) is not None
            and core.state != ReplicaState.LEARNING
            and not self.machines[n].disk.damaged
            and not self.is_copy(self.machines[n])
        ]
        return bool(valid) and len(valid) == len(others) and len(others) >= min(2, LEAST)

    def trim(self) -> None:
        """As `RepositoryServer._decided`: a trim is recorded, then sent."""
        for name in self.stream.members:
            machine = self.machines.get(name)
            if machine is None or not machine.up or machine.core is None:
                continue
            if at := self.trim_point(self.repository, name):
                self.record(TrimDecided(STREAM, at, 0.0))
                self.truth.low = max(self.truth.low, at)
                self.attempt(partial(self.trim_one, name, at, self.repository.version))

    def trim_point(self, repository: Repository, name: str) -> int:
        """Where a machine's entries may begin, so that some commits are left; 0: there are too few."""
        limit = repository.trim_limit(STREAM, 0.0)
        ends = [
            row.context.end for row in self.machines[name].disk.rows if row.context.end <= limit
        ]
        return ends[-3] if len(ends) > 3 else 0

    def trim_one(self, name: str, offset: int, version: int) -> None:
        machine = self.machines[name]
        machine.do(partial(Replica.trim, offset=offset, version=version))
        assert machine.core is not None
        low = machine.core.durable.low_offset
        machine.disk.entries = {o: d for o, d in machine.disk.entries.items() if o >= low}
        machine.disk.rows = [r for r in machine.disk.rows if r.context.end >= low]

    EVENTS: tuple[tuple[str, float], ...] = (
        ("write", 14),
        ("deliver", 70),
        ("report", 12),
        ("tick", 12),
        ("begin_seal", 2),
        ("end_seal", 6),
        ("open_writer", 6),
        ("reopen", 1),
        ("crash", 0.8),
        ("restart", 3),
        ("restart_repository", 0.7),
        ("fail_over", 0.7),
        ("old_leader", 6),
        ("lose_disk", 0.5),
        ("lose_entries", 0.4),
        ("assign", 2),
        ("begin_sync", 3),
        ("step_sync", 10),
        ("join", 4),
        ("trim", 0.6),
    )

    def run(self, events: int, faults: int = 0) -> None:
        """So many events, and more until there have been so many faults."""
        names, weights = zip(*self.EVENTS, strict=True)
        chosen = self.choose.choices(names, weights, k=events)
        while chosen or self.faults < faults:
            name = chosen.pop(0) if chosen else self.choose.choices(names, weights)[0]
            self.happened[name] += 1
            getattr(self, name)()
            self.check()

    def check(self) -> None:
        """I3 and I9 over all replicas that would be read; nothing that is committed is lost."""
        committed = self.truth.committed
        for machine in self.machines.values():
            if not self.serves(machine):
                continue
            for offset, entry in machine.committed.items():
                known = committed.setdefault(offset, entry)
                if known != entry:
                    raise Violation(f"I3: {machine.name} has another entry at {offset}")
                if entry[0] in self.truth.rejected:
                    raise Violation(f"I9: an entry that a seal removed is committed at {offset}")
        end = self.stream.last.context.end
        for name in self.stream.members:
            member = self.machines.get(name)
            core = member.core if member is not None else None
            if member is None or core is None or core.state == ReplicaState.LEARNING:
                continue
            if self.excused(member) or self.is_copy(member):
                continue
            low = core.durable.low_offset
            if low > self.truth.low:
                raise Violation(f"I12: member {name} begins at {low}, which was not trimmed")
            if low > (promised := self.stream.trimmed):
                raise Violation(
                    f"I10: member {name} begins at {low}, and what lies at {promised} is promised"
                )
            missing = [o for o in range(low, end) if o not in member.disk.entries]
            if missing:
                raise Violation(f"I12: member {name} lacks {missing[:3]}, which are committed")

    def excused(self, machine: Machine) -> bool:
        """Whether a member lacks entries by a fault that is none of the protocol's."""
        del machine
        return False

    def serves(self, machine: Machine) -> bool:
        """Whether somebody may read from it."""
        return machine.up

    def finish(self) -> None:
        """Everything works again: the stream goes on, and all replicas are in sync and equal."""
        for _ in range(400):
            self.restart()
            self.assign()
            for writer in self.writers:
                writer.alive = False
            self.begin_seal()
            while self.messages:
                self.attempt_message()
            self.begin_sync()
            while self.syncs:
                self.step_sync()
            self.join()
            self.end_seal()
            self.open_writer()
            self.write()
            while self.messages:
                self.attempt_message()
            self.report()
            self.tick()
            self.check()
            whole = {*self.stream.members} == {*self.machines} and not self.stream.sealed
            if whole and self._all_equal():
                return
        raise Violation("the stream does not go on, or its replicas do not get in sync")

    def attempt_message(self) -> None:
        message = self.messages.pop(0)
        self.attempt(message)

    def _all_equal(self) -> bool:
        end = self.stream.last.context.end
        contents = [machine.committed for machine in self.machines.values()]
        low = max(min(found, default=end) for found in contents)
        parts = [{o: e for o, e in found.items() if o >= low} for found in contents]
        return all(part == parts[0] for part in parts) and max(parts[0], default=0) == end - 1
