"""Two replicated streams of one repository: one is sealed, for long at times, while the other goes on.

Each of three log servers has a replica of both, which crash together. Messages are lost, doubled and reordered, and late by any time;
the repository restarts from its records. The cores are the real ones. What is checked beside their own invariants: no global offset
is that of two entries (I4), no replica has another entry than the others (I3), none that a seal removed (I9), nothing is
committed in a stream that is sealed, and the other one is committed and published meanwhile.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.support.log_entries import SCHEMAS, EntryMaker
from tests.support.log_world import LOG, Content, Machine, Violation
from walsender_bridge.change_log.protocol import IssuedCommit, ReplicaReport
from walsender_bridge.change_log.replica.core import Replica, ReplicaState
from walsender_bridge.change_log.replica.disk import Durable
from walsender_bridge.change_log.repository import invariants as of_repository
from walsender_bridge.change_log.repository.core import (
    Created,
    LogServerSeen,
    Record,
    Repository,
    RepositoryTick,
    StreamCommit,
    StreamCreated,
    StreamSealed,
    StreamState,
    StreamUnsealed,
)
from walsender_bridge.errors import InvariantError, TusklineError


@dataclass
class Stream:
    """One of the two. `sealed`: by a seal of `term` that goes on; `sent`: by the writer, of which each replica has got `acked`."""

    name: str
    replicas: dict[str, Machine]
    committed: Content = field(default_factory=dict)
    rejected: set[bytes] = field(default_factory=set)
    term: int | None = None
    sealed: set[str] = field(default_factory=set)
    last: StreamCommit | None = None
    make: EntryMaker | None = None
    sent: list[bytes] = field(default_factory=list)
    acked: Counter[str] = field(default_factory=Counter)
    #: Of the writer: messages of another one are late.
    session: int = 0


class TwoStreamsWorld:
    """See the module. `happened` counts events by name."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self.faults = 0
        self.records: list[Record] = []
        self.repository = Repository()
        self.messages: list[tuple[str, Callable[[], None]]] = []
        self.reports: list[ReplicaReport] = []
        self.shown: dict[tuple[str, str], ReplicaReport] = {}
        self.placed: dict[int, tuple[str, int]] = {}
        self.record(Created(LOG))
        self.streams = {}
        for each in "klm":
            self.record(LogServerSeen(each, each))
        for name in "ab":
            self.record(StreamCreated(name, tuple("klm")))
            self.streams[name] = Stream(name, {each: self._machine(name, each) for each in "klm"})

    @staticmethod
    def _machine(stream: str, log_server: str) -> Machine:
        machine = Machine(log_server)
        machine.disk.durable = Durable(stream, LOG)
        machine.core = Replica(machine.disk.found(), (), ())
        return machine

    def record(self, record: Record) -> None:
        before = of_repository.checked(self.repository)
        if self.repository.apply(record):
            of_repository.check_invariants(self.repository, before)
            self.records.append(record)

    def state(self, its: Stream) -> StreamState:
        return self.repository.streams[its.name]

    def any(self) -> Stream:
        return self.choose.choice([*self.streams.values()])

    def send(self, its: Stream, message: Callable[[], None]) -> None:
        self.messages.append((its.name, message))

    # -- events -------------------------------------------------------------------------------------

    def seal(self) -> None:
        """A stream is sealed for a new writer, or again if that takes long."""
        its = self.any()
        state = self.state(its)
        if its.make is not None and self.choose.random() < 0.7:
            return
        shown = [report for (name, _), report in self.shown.items() if name == its.name]
        its.term = self.repository.next_term(its.name, shown)
        self.record(StreamSealed(its.name, its.term))
        its.sealed, its.make, its.last = set(), None, state.last
        for each in its.replicas:
            self.send(its, partial(self.seal_one, its, each, its.term, state.last.context.end))

    def seal_one(self, its: Stream, name: str, term: int, end: int) -> None:
        machine = its.replicas[name]
        machine.do(partial(Replica.seal, end=end, term=term, version=self.repository.version))
        assert machine.core is not None
        if machine.core.state != ReplicaState.SEALED:
            missed = tuple(self.state(its).missed(machine.core.current.version))
            self.send(its, partial(self.commit, its, name, missed))
            self.send(its, partial(self.seal_one, its, name, term, end))
        elif term == its.term:
            its.sealed.add(name)

    def unseal(self) -> None:
        """Once all are sealed, a writer begins."""
        its = self.any()
        if its.term is None or len(its.sealed) < len(its.replicas):
            return
        committed = {data for data, _ in its.committed.values()}
        end = self.state(its).last.context.end
        kept = {d for m in its.replicas.values() for o, d in m.disk.entries.items() if o < end}
        its.rejected |= {*its.sent} - committed - kept
        self.record(StreamUnsealed(its.name, its.term, tuple(its.replicas)))
        its.last = None
        term, its.term = its.term, None
        if not all(
            self.attempt(partial(each.do, partial(Replica.open_writer, term=term)))
            for each in its.replicas.values()
        ):
            return
        core = its.replicas["k"].core
        assert core is not None
        its.make = EntryMaker(self.choose.getrandbits(32))
        its.make.follow(core.status())
        its.sent, its.acked, its.session = [], Counter(), its.session + 1

    def write(self) -> None:
        its = self.any()
        if its.make is None:
            return
        its.sent.append(its.make.whole(size=8))
        for each in its.replicas:
            self.send(its, partial(self.append, its, each, its.session))

    def append(self, its: Stream, name: str, session: int) -> None:
        """The next one in the order of the connection."""
        if its.session != session or its.make is None or its.acked[name] >= len(its.sent):
            return
        data = its.sent[its.acked[name]]
        its.replicas[name].do(lambda core: core.append([data], [*SCHEMAS.values()]))
        its.acked[name] += 1

    def commit(self, its: Stream, name: str, commits: Sequence[IssuedCommit]) -> None:
        for each in commits:
            its.replicas[name].do(partial(Replica.commit, context=each.context, crc=each.crc))

    def report(self, only: Stream | None = None) -> None:
        for its in self.streams.values() if only is None else [only]:
            for name, machine in its.replicas.items():
                core = machine.core
                if core is None or not machine.up or (only is None and self.choose.random() < 0.3):
                    continue
                machine.write(core.persist())
                if found := core.report(name):
                    self.shown[its.name, name] = found
                    self.reports.append(found)

    def tick(self) -> None:
        """With some of the reports, old ones among them."""
        reports = tuple(self.choose.sample(self.reports, min(len(self.reports), 12)))
        self._tick(reports)
        if self.choose.random() < 0.8:
            self.reports.clear()

    def _tick(self, reports: tuple[ReplicaReport, ...]) -> None:
        self.record(RepositoryTick(0.0, reports, ({},) if self.choose.random() < 0.1 else ()))
        for each in reports:
            its = self.streams[each.stream]
            if missed := tuple(self.state(its).missed(each.version)):
                self.send(its, partial(self.commit, its, each.replica, missed))

    def go_on(self) -> None:
        """While the other one is sealed, what a stream's replicas have is committed, published and applied, if nothing is lost."""
        its, other = (self.streams[each] for each in self.choose.choice(("ab", "ba")))
        if other.term is None or its.make is None or not all(m.up for m in its.replicas.values()):
            return
        known = self.state(other).last
        for _ in range(3):
            for message in [m for name, m in self.messages if name == its.name]:
                self.attempt(message)
            self.messages = [m for m in self.messages if m[0] != its.name]
            self.reports.clear()
            self.report(its)
            self._tick(tuple(self.reports))
        end = self.state(its).last.context.end
        held = {m.core.tail.whole.end_offset for m in its.replicas.values() if m.core is not None}
        if min(held) != end:
            raise Violation(
                f"{its.name} ends at {end} while {other.name} is sealed, and not at {held}"
            )
        if self.state(other).last is not known:
            raise Violation(f"{other.name} is sealed, and has a commit")
        behind = [m for m in self.state(other).members if self._lacks(other, m)]
        if not behind and self.repository.published != self.repository.version:
            raise Violation(f"{its.name} is not published while {other.name} is sealed")
        self.happened["went on"] += 1

    def _lacks(self, its: Stream, member: str) -> bool:
        return self.state(its).applied.get(member, 0) < self.state(its).last.context.version

    def deliver(self) -> None:
        if not self.messages:
            return
        message = self.messages.pop(self.choose.randrange(len(self.messages)))
        chance = self.choose.random()
        self.faults += chance < 0.08
        if chance < 0.03:
            return
        if chance < 0.08:
            self.messages.append(message)
        self.attempt(message[1])

    def attempt(self, event: Callable[[], object]) -> bool:
        try:
            event()
        except InvariantError:
            raise
        except TusklineError:
            return False
        return True

    def crash(self) -> None:
        """A log server with both replicas: its connections end."""
        self.faults += 1
        name = self.choose.choice("klm")
        for its in self.streams.values():
            its.replicas[name].restart()
            its.make = None

    def restart_repository(self) -> None:
        """What is under way is known by the records alone."""
        self.faults += 1
        self.repository = Repository()
        for each in self.records:
            self.repository.apply(each)
        self.reports.clear()
        self.shown.clear()
        for its in self.streams.values():
            its.make = None
            its.sealed, its.term = set(), None
            its.last = self.state(its).last if self.state(its).sealed else None

    EVENTS = (
        ("write", 14),
        ("deliver", 60),
        ("report", 10),
        ("tick", 10),
        ("seal", 3),
        ("unseal", 6),
        ("go_on", 3),
        ("crash", 0.7),
        ("restart_repository", 0.7),
    )

    def run(self, events: int, faults: int = 0) -> None:
        """So many events, and more until there have been so many faults."""
        names, weights = zip(*self.EVENTS, strict=True)
        chosen = self.choose.choices(names, weights, k=events)
        while chosen or self.faults < faults:
            name = chosen.pop() if chosen else self.choose.choices(names, weights)[0]
            self.happened[name] += 1
            getattr(self, name)()
            self.check()

    def check(self) -> None:
        for its in self.streams.values():
            if its.last is not None and self.state(its).last != its.last:
                raise Violation(f"{its.name} is sealed, and has a commit")
            for machine in its.replicas.values():
                for offset, entry in machine.committed.items():
                    if its.committed.setdefault(offset, entry) != entry:
                        raise Violation(f"I3: {machine.name} has another entry at {offset}")
                    if entry[0] in its.rejected:
                        raise Violation(f"I9: an entry that a seal removed is back at {offset}")
                    place = its.name, offset
                    if self.placed.setdefault(entry[1], place) != place:
                        raise Violation(f"I4: global offset {entry[1]} is of two entries")

    def finish(self) -> None:
        """Everything works again: both go on, and their replicas are equal."""
        for _ in range(60):
            for event in (self.seal, self.unseal, self.write, self.report, self.tick):
                event()
                # A seal is sent again for as long as its replica lacks a commit.
                for _, message in [
                    self.messages.pop(0) for _ in range(min(len(self.messages), 100))
                ]:
                    self.attempt(message)
                self.check()
            self.report()
            self.tick()
            if all(self._is_whole(its) for its in self.streams.values()):
                return
        raise Violation("a stream does not go on, or its replicas differ")

    def _is_whole(self, its: Stream) -> bool:
        end = self.state(its).last.context.end
        ends = {max(machine.committed, default=0) + 1 for machine in its.replicas.values()}
        return ends == {end} and not self.state(its).sealed and end > 1
