"""Drivers under supervision, by a clock of its own: stopped, killed, started again, and left in peace in the end.

Each runs the production's takeover and `DriverWait`. Time goes in steps; in each, a driver that is not stopped gives a
sign of life and does one thing. For `TROUBLE` seconds drivers are stopped and killed at random; after that,
within `SETTLED`, one has to have the lake and keep it.
"""

import random
from dataclasses import dataclass, field

from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.takeover import DriverWait, Sign
from tests.support.lake.store import Link, Store, ViolationError
from walsender_bridge.errors import FencedError

STEP = 0.5
TROUBLE, SETTLED, PEACE = 400.0, 60.0, 200.0
#: Seconds that a driver needs to start, its JVM above all.
_START = 6.0


@dataclass
class _Driver:
    name: str
    starts_at: float = 0.0
    stopped_until: float = 0.0
    standby: DriverWait = field(default_factory=DriverWait)
    claim: int = 0
    beat: int = 0
    head: Link | None = None
    #: A stopped one is in the middle of a takeover: it goes on with this when it wakes up.
    under_way: tuple[takeover.Steps[takeover.Taken[Link]], takeover.Effect] | None = None

    def restart(self, now: float) -> None:
        self.starts_at, self.stopped_until = now + _START, 0.0
        self.standby, self.claim, self.head, self.under_way = DriverWait(), 0, None, None


class Supervised:
    """See the module. `takeovers`: when, and by whom."""

    def __init__(self, drivers: int, seed: int) -> None:
        self.store = Store()
        self.random = random.Random(seed)
        self.drivers = [_Driver(f"d{number}") for number in range(drivers)]
        self.takeovers: list[tuple[float, str]] = []

    def run(self) -> None:
        """Trouble, then peace. Raises `ViolationError` if they do not settle."""
        now = 0.0
        while now < TROUBLE + SETTLED + PEACE:
            now += STEP
            for driver in self.random.sample(self.drivers, len(self.drivers)):
                if now < TROUBLE:
                    self._trouble(driver, now)
                if driver.starts_at <= now and driver.stopped_until <= now:
                    self._step(driver, now)
        late = [each for each in self.takeovers if each[0] > TROUBLE + SETTLED]
        working = [driver.name for driver in self.drivers if driver.head is not None]
        if late or len(working) != 1:
            raise ViolationError(f"not settled: {working} at work, taken over at {late}")

    def _trouble(self, driver: _Driver, now: float) -> None:
        chance = self.random.random()
        if chance < 0.005:
            driver.stopped_until = now + self.random.uniform(0.0, 3 * takeover.LEASE)
        elif chance < 0.008:
            driver.restart(now)

    def _signs(self, but: _Driver, now: float) -> dict[str, Sign]:
        return {
            d.name: Sign(d.claim, str(d.beat).encode())
            for d in self.drivers
            if d is not but and d.starts_at <= now
        }

    def _step(self, driver: _Driver, now: float) -> None:
        driver.beat += 1
        try:
            if driver.head is not None:
                self._work(driver)
            elif driver.under_way is not None or not self._waits(driver, now):
                self._take_over(driver, now)
        except FencedError:
            if driver.head is not None:
                # The process ends, and its supervisor starts another.
                driver.restart(now)
            driver.claim, driver.under_way = 0, None

    def _waits(self, driver: _Driver, now: float) -> bool:
        term = self.store.head.term if self.store.head is not None else 0
        return driver.standby.waits_for(term, self._signs(driver, now), now) is not None

    def _work(self, driver: _Driver) -> None:
        assert driver.head is not None
        link = driver.head.next()
        if self.store.create_link(link, driver.head) is not None:
            raise FencedError("cannot publish link")
        driver.head = link

    def _take_over(self, driver: _Driver, now: float) -> None:
        """An effect a step, so that a driver may be stopped in between."""

        def propose(before: Link | None, term: int) -> Link:
            link = Link(1, 0, term) if before is None else before.next(term=term)
            driver.claim = link.term
            return link

        if driver.under_way is None:
            steps = takeover.take_over(propose)
            driver.under_way = steps, next(steps)
            return
        steps, effect = driver.under_way
        try:
            driver.under_way = steps, steps.send(self.store.do(effect))
        except StopIteration as end:
            driver.head, driver.under_way = end.value.head, None
            self.takeovers.append((now, driver.name))
