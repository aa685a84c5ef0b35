"""Every order of events of a small replicated stream: the world of `log_world.py`, without chance, by breadth first.

A message waits until it is delivered, in any order, and may be for ever; a report is heard again at every tick, until the
replica's next one. Appends of a connection arrive in order, however late. Faults, seals and writes are limited by the scope,
so the states are finitely many. `World.check` and the invariants of both cores are checked at each step; and from some
states everything works again, and the stream has to go on.

Two states are the same if all that can be observed later is: what has led to them is not part of the key.
"""

import io
import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, get_args

from tests.support.log_world import STREAM, Machine, Seal, World, Writer
from walsender_bridge.change_log.protocol import CommitContext, Position, ReplicaReport
from walsender_bridge.change_log.replica.disk import Durable, IndexRow, Tail
from walsender_bridge.change_log.repository.core import (
    Record,
    RepositoryTick,
    StreamCommit,
    StreamSealed,
    StreamUnsealed,
)

#: Values of these types are shared by all states.
VALUES = frozenset(
    {
        CommitContext,
        Durable,
        IndexRow,
        Position,
        ReplicaReport,
        StreamCommit,
        Tail,
        *get_args(Record),
    }
    - {RepositoryTick}
)
FAULTS = ("crash", "repository", "leader", "disk", "entries", "reopen")
Action = Callable[["SmallWorld"], None]


@dataclass(frozen=True, slots=True)
class Scope:
    """What may happen, how often. `faults`: names of the events that count against `limit`.

    `start`: events before the search begins, which count against no limit; a name may be cut short.
    `finish`: from one of so many states everything works again.
    """

    names: str = "kl"
    writes: int = 1
    seals: int = 1
    faults: tuple[str, ...] = ()
    limit: int = 1
    start: tuple[str, ...] = ()
    finish: int = 31


def committed(names: str, term: int = 2, entries: int = 1) -> tuple[str, ...]:
    """The events of a commit of so many entries."""
    written = (f"write, term {term}", *(f"append of term {term} at {name}" for name in names))
    reports = *(f"report of {name}" for name in names), "tick"
    return (*written * entries, *reports, *(f"deliver commit {name}" for name in names))


class Chosen:
    """What a world asks of chance, answered: the next of `answers`, then always what is usual."""

    def __init__(self) -> None:
        self.answers: deque[Any] = deque()
        self.serial = 0

    def random(self) -> float:
        # In the world's comparisons: nothing is lost, and a seal may begin while somebody writes.
        return self.answers.popleft() if self.answers else 0.85

    def choice(self, options: Sequence[Any]) -> Any:
        if self.answers:
            wanted = self.answers.popleft()
            return next(each for each in options if each is wanted or each == wanted)
        return options[0]

    def randrange(self, _: int) -> int:
        number: int = self.answers.popleft()
        return number

    def sample(self, options: Sequence[Any], count: int) -> list[Any]:
        return [*options][-count:]

    def getrandbits(self, _: int) -> int:
        self.serial += 1
        return self.serial


class _Rows(random.Random):
    """The bytes of a writer's rows: no two writers write the same."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __reduce__(self) -> tuple[type["_Rows"], tuple[int]]:
        return _Rows, (self.number,)

    def randbytes(self, n: int) -> bytes:
        return self.number.to_bytes(n, "big")


class SmallWorld(World):
    """A world whose next events are enumerated."""

    def __init__(self, scope: Scope) -> None:
        self.left = Counter({"write": 99, "seal": 99, "fault": 99})
        self.possible: Sequence[str] = FAULTS
        super().__init__(0, scope.names)
        self.choose = Chosen()  # type: ignore[assignment]
        self.begin_seal()
        while self.messages:
            self.attempt_message()
        self.end_seal()
        self.open_writer()
        for name in scope.start:
            event = next(event for found, event in self.events() if found.startswith(name))
            _carry_out(self, event, ["before the search", name])
        self.left = Counter({"write": scope.writes, "seal": scope.seals, "fault": scope.limit})
        self.possible = scope.faults

    # -- events -------------------------------------------------------------------------------------

    def events(self) -> Iterator[tuple[str, Action]]:
        """All that may come next, by name."""
        yield from self._of_writers()
        for number, message in enumerate(self.messages):
            yield f"deliver {_named(message)}", partial(SmallWorld.delivered, number=number)
        for name, machine in self.machines.items():
            if machine.up and machine.core is not None:
                yield f"report of {name}", partial(SmallWorld.heard, name=name)
        if self.reports:
            yield "tick", World.tick
        if self.left["seal"]:
            yield "seal", SmallWorld.sealed
        if self.seal is not None and len(self.seal.sealed) >= self.least():
            yield "unseal", World.end_seal
        yield from self._of_replicas()
        yield from self._of_the_old_leader()
        if self.left["fault"] > 0:
            yield from self._faults()

    def _of_writers(self) -> Iterator[tuple[str, Action]]:
        if self.given is not None:
            yield "open a writer", World.open_writer
        for number, writer in enumerate(self.writers):
            if writer.alive and self.left["write"]:
                yield f"write, term {writer.term}", partial(SmallWorld.written, number=number)
            for name in writer.sessions:
                if writer.acked[name] < len(writer.sent) and self._answers(name):
                    append = partial(SmallWorld.appended, number=number, name=name)
                    yield f"append of term {writer.term} at {name}", append

    def _of_replicas(self) -> Iterator[tuple[str, Action]]:
        for name, machine in self.machines.items():
            if not machine.up:
                yield f"start {name}", partial(SmallWorld.started, name=name)
        if any(name not in self.stream.replicas for name in self.machines):
            yield "assign", World.assign
        for name in self.stream.outside:
            if self._answers(name) and name not in self.syncs:
                for source in filter(self._answers, self.stream.members):
                    begin = partial(SmallWorld.synchronized, name=name, source=source)
                    yield f"synchronize {name} with {source}", begin
        for name in self.syncs:
            yield f"batch for {name}", partial(SmallWorld.batch, name=name)
        if self.seal is not None and self.stream.outside:
            yield "join", World.join
        if any(len(machine.disk.rows) > 3 for machine in self.machines.values()):
            yield "trim", World.trim

    def _of_the_old_leader(self) -> Iterator[tuple[str, Action]]:
        if self.old is None:
            return
        stream = self.old.stream
        for name in stream.members:
            calls: dict[str, list[Any]] = {
                "commits": [0, stream.history[0]],
                "seals": [1],
                "writes a seal": [3, StreamSealed(STREAM, stream.term + 1)],
                "ends a seal": [3, StreamUnsealed(STREAM, stream.term, (name,))],
            }
            for what, answers in calls.items():
                call = partial(SmallWorld.called, answers=(name, *answers))
                yield f"the old leader {what} at {name}", call

    def _answers(self, name: str) -> bool:
        return name in self.machines and self.machines[name].up

    def _faults(self) -> Iterator[tuple[str, Action]]:
        if "repository" in self.possible:
            yield "restart the repository", partial(SmallWorld.failed, event="restart_repository")
        if "leader" in self.possible:
            yield "another repository leads", partial(SmallWorld.failed, event="fail_over")
        for name, machine in self.machines.items():
            if "crash" in self.possible and machine.up:
                answers = [machine, 0.85]
                crash = partial(SmallWorld.failed, event="crash", answers=answers)
                yield f"crash of {name}", crash
            if "disk" in self.possible:
                lose = partial(SmallWorld.failed, event="lose_disk", answers=[name])
                yield f"{name} loses its disk", lose
            if "entries" in self.possible:
                for chance, which in ((0.1, "one entry"), (0.9, "its entries")):
                    answers = [name, chance]
                    lose = partial(SmallWorld.failed, event="lose_entries", answers=answers)
                    yield f"{name} loses {which}", lose
        if "reopen" in self.possible:
            for number, writer in enumerate(self.writers):
                for name in self.machines:
                    reopen = partial(SmallWorld.reopened, number=number, name=name)
                    yield f"the writer of term {writer.term} returns at {name}", reopen

    def written(self, number: int) -> None:
        self.left["write"] -= 1
        writer = self.writers[number]
        data = writer.make.whole(size=8)
        writer.sent.append(data)
        self.truth.written.add(data)

    def appended(self, number: int, name: str) -> None:
        self.attempt(partial(self.append, name, self.writers[number]))

    def open_writer(self) -> None:
        super().open_writer()
        self._own_rows()

    def reopened(self, number: int, name: str) -> None:
        self.left["fault"] -= 1
        self._answered([name, self.writers[number]], self.reopen)
        self._own_rows()

    def _own_rows(self) -> None:
        for number, writer in enumerate(self.writers):
            if not isinstance(writer.make.choose, _Rows):
                writer.make.choose = _Rows(number + 1)

    def delivered(self, number: int) -> None:
        self.attempt(self.messages.pop(number))

    def called(self, answers: Sequence[Any]) -> None:
        self._answered(answers, self.old_leader)

    def started(self, name: str) -> None:
        self.machines[name].restart()

    def heard(self, name: str) -> None:
        machine = self.machines[name]
        assert machine.core is not None
        machine.disk.apply(machine.core.persist())
        found = machine.core.report(name)
        if found is not None:
            self.reports = [each for each in self.reports if each.replica != name]
            self.reports.append(found)

    def sealed(self) -> None:
        self.left["seal"] -= 1
        self.begin_seal()

    def synchronized(self, name: str, source: str) -> None:
        serial = self.serial
        self._answered([name, source], self.begin_sync)
        # One synchronization of a replica at a time: the label of the next one may be the same.
        self.serial = serial

    def batch(self, name: str) -> None:
        self._answered([name], self.step_sync)

    def failed(self, event: str, answers: Sequence[Any] = ()) -> None:
        before = self.faults
        if answers and isinstance(answers[0], Machine):
            answers = [self.machines[answers[0].name], *answers[1:]]
        self._answered(answers, getattr(self, event))
        self.left["fault"] -= self.faults - before

    def _answered(self, answers: Sequence[Any], event: Callable[[], None]) -> None:
        assert isinstance(self.choose, Chosen)
        self.choose.answers.extend(answers)
        event()
        self.choose.answers.clear()

    def send(self, message: Callable[[], None]) -> None:
        """The same message is not kept twice: what has been delivered may be sent again."""
        if _named(message) not in map(_named, self.messages):
            self.messages.append(message)

    def check(self) -> None:
        super().check()
        self.happened.clear()

    # -- states -------------------------------------------------------------------------------------

    def key(self) -> bytes:
        """What distinguishes a state from others."""
        whole = (
            [self._machine(machine) for machine in self.machines.values()],
            self._repository(),
            sorted(map(_named, self.messages)),
            sorted(self.reports, key=lambda each: each.replica),
            self.seal and (self.seal.term, sorted(self.seal.sealed)),
            [self._writer(writer) for writer in self.writers],
            self.given,
            self.old and (self.old.stream, self.number - self.old.number),
            [(name, [*map(repr, batches)]) for name, (_, batches) in sorted(self.syncs.items())],
            sorted(self.truth.rejected),
            sorted(self.truth.committed.items()),
            sorted(self.left.items()),
        )
        return blake2b(repr(whole).encode(), digest_size=8).digest()

    def _repository(self) -> tuple[object, ...]:
        core = self.repository
        return core.version, core.published, core.next_global, core.log_servers, core.streams

    @staticmethod
    def _machine(machine: Machine) -> tuple[object, ...]:
        core, disk = machine.core, machine.disk
        known = None if core is None else (core.state, core.current, core.tail, core.outcome)
        stored = disk.durable, sorted(disk.entries.items()), disk.rows
        return machine.name, machine.up, machine.lost_entries, known, stored

    def _writer(self, writer: Writer) -> tuple[object, ...]:
        """Of its sessions, it matters only which are still open: none is opened again."""
        now = {name: machine.session for name, machine in self.machines.items()}
        opened = [name for name, session in writer.sessions.items() if now.get(name) == session]
        acked = sorted(writer.acked.items())
        return writer.term, writer.alive, opened, writer.sent, acked, writer.make.lsn


def _named(message: Callable[[], None]) -> str:
    """A message, as equal as what it does."""
    assert isinstance(message, partial)
    told = [f"seal {each.term}" if isinstance(each, Seal) else str(each) for each in message.args]
    return " ".join([message.func.__name__, *told])


class Found(AssertionError):
    """A violation, with the shortest way there."""


@dataclass
class Explored:
    """How far an exploration came. `complete`: nothing else can happen within the scope."""

    states: int = 0
    steps: int = 0
    depth: int = 0
    finished: int = 0
    complete: bool = False


class _Packer(pickle.Pickler):
    """Values that never change are kept once for all states."""

    def __init__(self, file: io.BytesIO, kept: dict[object, object]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.kept = kept

    def persistent_id(self, value: object) -> object:
        if type(value) not in VALUES:
            return None
        return self.kept.setdefault(value, len(self.kept))


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: bytes, values: list[object]) -> None:
        super().__init__(io.BytesIO(packed))
        self.values = values

    def persistent_load(self, number: int) -> object:
        return self.values[number]


class States:
    """Worlds in few bytes each."""

    def __init__(self) -> None:
        self._kept: dict[object, object] = {}
        self._values: list[object] = []

    def packed(self, world: SmallWorld) -> bytes:
        file = io.BytesIO()
        _Packer(file, self._kept).dump(world)
        self._values.extend([*self._kept][len(self._values) :])
        return file.getvalue()

    def world(self, packed: bytes) -> SmallWorld:
        found: SmallWorld = _Unpacker(packed, self._values).load()
        return found


def explore(scope: Scope, most: int) -> Explored:
    """Up to `most` states. Raises `Found`."""
    states = States()
    first = SmallWorld(scope)
    first.check()
    seen = {first.key()}
    queue: deque[tuple[bytes, tuple[str, ...]]] = deque([(states.packed(first), ())])
    done = Explored()
    while queue and len(seen) < most:
        packed, path = queue.popleft()
        done.depth = len(path)
        for name, event in states.world(packed).events():
            world, way = states.world(packed), (*path, name)
            _carry_out(world, event, way)
            done.steps += 1
            key = world.key()
            if key in seen:
                continue
            seen.add(key)
            queue.append((states.packed(world), way))
            if len(seen) % scope.finish == 0:
                world.choose = random.Random(1)
                _carry_out(world, World.finish, (*way, "everything works again"))
                done.finished += 1
    done.states, done.complete = len(seen), not queue
    return done


def _carry_out(world: SmallWorld, event: Action, way: Sequence[str]) -> None:
    try:
        event(world)
        world.check()
    except Exception as error:
        raise Found(f"{error!r} by: {', '.join(way)}") from error
