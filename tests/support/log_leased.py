"""A replicated stream with consumers, whose leases keep it from being trimmed, on clocks that drift and are set.

Each process has a clock of its own: of a repository, the `SteadyClock` on a wall clock that may be days from that of the one before it, and is
set meanwhile; of a consumer, one that goes up to a tenth faster or slower. A trim is asked for, decided and carried out in three
messages, each of which may be late, doubled or lost, and may be of a repository that another one has replaced since. A consumer that has
registered looks at the cut of the stream, and from then on counts on what it needs of that, for so long as its own clock says.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.support.log_world import STREAM, Violation, World
from walsender_bridge.change_log.replica.core import ReplicaState
from walsender_bridge.change_log.repository.core import ConsumerSeen, RepositoryTick, TrimDecided
from walsender_bridge.runtime.steady_clock import CATCH_UP, SteadyClock

#: Seconds of a lease, by the repository's clock.
LEASE: Final = 7200.0
#: How much faster or slower than others a clock goes.
DRIFT: Final = 0.1
#: Seconds, by its own clock, for which a consumer counts on a lease since it asked for it.
TRUST: Final = LEASE / CATCH_UP * (1 - DRIFT) / (1 + DRIFT)
_DAY: Final = 86_400.0


@dataclass
class Consumer:
    """A consumer. `rate`: of its clock. `until`: for how long it counts, by its own clock, on what lies at `kept` or above."""

    name: str
    rate: float
    version: int | None = None
    kept: int = 1
    until: float = 0.0


class LeasedWorld(World):
    """See the module."""

    EVENTS = (
        *(each for each in World.EVENTS if each[0] != "trim"),
        ("trim", 5),
        ("register", 8),
        ("set_clock", 0.5),
    )

    def __init__(self, seed: int, names: str = "klm") -> None:
        #: True seconds.
        self.time = 1e9
        self.wall = 0.0
        self.clock: SteadyClock | None = None
        super().__init__(seed, names)
        self.consumers = [Consumer(name, self.rate()) for name in ("lake", "copy", "other")]
        self.start_clock()

    # -- clocks -------------------------------------------------------------------------------------

    def rate(self) -> float:
        return self.choose.uniform(1 - DRIFT, 1 + DRIFT)

    def start_clock(self) -> None:
        """That of a process which has just started."""
        rate = self.rate()
        self.wall = self.choose.uniform(-2, 2) * _DAY
        self.clock = SteadyClock(
            self.repository.since,
            wall=lambda: self.time * rate + self.wall,
            monotonic=lambda: self.time * rate,
        )

    def set_clock(self) -> None:
        self.wall += self.choose.uniform(-2, 2) * _DAY

    def now(self) -> float:
        assert self.clock is not None
        return self.clock.now()

    def restart_repository(self) -> None:
        """What it had asked for is answered to nobody, and what was reported to it reaches no other one."""
        super().restart_repository()
        self.reports.clear()
        self.start_clock()

    def check(self) -> None:
        """I10: what consumers count on is kept by all members."""
        super().check()
        self.time += self.choose.uniform(0, 200)
        trusting = [each for each in self.consumers if self.time * each.rate < each.until]
        for name in self.stream.members:
            machine = self.machines.get(name)
            if machine is None or machine.core is None:
                continue
            if machine.core.state == ReplicaState.LEARNING:
                continue
            low = machine.core.durable.low_offset
            for each in trusting:
                if low > each.kept:
                    raise Violation(
                        f"I10: {name} begins at {low}, and {each.name} has a lease from {each.kept} on"
                    )

    # -- consumers ----------------------------------------------------------------------------------

    def register(self) -> None:
        """A consumer registers, renews its lease with what it has published, or returns after a long time."""
        its = self.choose.choice(self.consumers)
        asked = self.time * its.rate
        if asked < its.until or self.choose.random() < 0.5:
            its.version = self.repository.published or None
        version = its.version
        self.send(self.of_this(partial(self.grant, its, version, asked + TRUST)))

    def grant(self, its: Consumer, version: int | None, until: float) -> None:
        """The repository grants a lease, and the consumer asks where the stream begins."""
        now = self.now()
        self.record(RepositoryTick(now, (), issue=False))
        self.record(ConsumerSeen(its.name, version, now + LEASE))
        needed = self.stream.needed_from(version)
        reports = [self.shown[each] for each in self.stream.members if each in self.shown]
        kept = max(1 if needed is None else needed.end, self.stream.low_offset(reports))
        if version == its.version:
            its.kept, its.until = kept, max(its.until, until)

    # -- trims --------------------------------------------------------------------------------------

    def of_this(self, event: Callable[[], None]) -> Callable[[], None]:
        """An event of the repository that runs now: one that has been replaced records nothing more."""
        clock = self.clock

        def happens() -> None:
            if self.clock is clock:
                event()

        return happens

    def trim(self) -> None:
        """Each member is asked how far what is old enough reaches."""
        limit = self.repository.trim_limit(STREAM, self.now())
        for name in self.stream.members:
            machine = self.machines.get(name)
            if machine is None or not machine.up or machine.core is None:
                continue
            ends = [row.context.end for row in machine.disk.rows if row.context.end <= limit]
            if ends:
                self.send(self.of_this(partial(self.decide, name, self.choose.choice(ends))))

    def decide(self, name: str, point: int) -> None:
        """As `RepositoryServer._decided`: the trim is recorded, then sent."""
        now = self.now()
        point = min(point, self.repository.trim_limit(STREAM, now))
        self.record(TrimDecided(STREAM, point, now))
        self.truth.low = max(self.truth.low, point)
        self.send(partial(self.trim_late, name, point, self.repository.version))

    def trim_late(self, name: str, point: int, version: int) -> None:
        machine = self.machines[name]
        ends = [row.context.end for row in machine.disk.rows if row.context.end <= point]
        if ends:
            self.trim_one(name, ends[-1], version)
            self.happened["trimmed"] += 1
