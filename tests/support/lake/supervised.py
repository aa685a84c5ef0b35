"""Drivers under supervision, by a clock of its own: stopped, killed, cut off from the lake, started again, and left in peace in the end.

Each runs the production's takeover and `DriverWait`. Time goes in steps. In each, a driver that runs beats and does one
thing: it looks at the others, is about to take over (Spark's checks take seconds), takes over, or is at work, mostly without anything to
publish. Beats arrive late or never, as far as the lake's place allows (`Place`). For `TROUBLE` seconds drivers are stopped, killed and cut off
at random, alone or all at once. After that, within `SETTLED`, one has to have the lake and keep it; then that one is
killed, and another has to have it within `REPLACED`.

At all times a driver that was well for `WELL` seconds is not taken over, and one that was overtaken ends within `TOLD`
seconds of running.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.takeover import Sign
from tests.support.lake.store import Link, Store, ViolationError
from walsender_bridge.errors import FencedError

STEP = 0.5
TROUBLE, SETTLED, PEACE = 400.0, 60.0, 200.0
#: Seconds that a driver needs to start, its JVM above all, and those of the checks between a decision and the takeover, at most.
_START, _CHECKS = 6.0, 8.0
#: Beats are this late at most, and of each so many are lost in a row at most, in a bucket.
_LATE, _LOST = 3.0, 4
WELL = takeover.LEASE + _LATE
REPLACED = takeover.LEASE + _LATE + _CHECKS + 5.0
TOLD = 3.0


class Place(Enum):
    """Where the lake is: a folder whose locks all see, one whose locks each machine sees alone, a bucket."""

    LOCKS = auto()
    OWN_LOCKS = auto()
    BUCKET = auto()


@dataclass
class _Record:
    """A driver's sign of life as it is in the lake. `arriving`: beats on their way, by when they arrive."""

    sign: Sign
    is_held: bool = True
    arriving: list[tuple[float, Sign]] = field(default_factory=list)


@dataclass
class _Driver:
    name: str
    starts_at: float = 0.0
    stopped_until: float = 0.0
    cut_off_until: float = 0.0
    #: Since when it runs, and reaches the lake.
    well_since: float = 0.0
    standby: takeover.DriverWait = field(default_factory=lambda: takeover.DriverWait())  # noqa: PLW0108  # mutants replace it
    claim: int = 0
    beat: int = 0
    lost: int = 0
    head: Link | None = None
    #: What it took for the time and the term of its decision to take over, and when its checks are done.
    decided: tuple[float, int] | None = None
    began: float = 0.0
    #: A stopped one is in the middle of a takeover: it goes on with this when it wakes up.
    under_way: tuple[takeover.Steps[takeover.Taken[Link]], takeover.Effect] | None = None
    starts: int = 0

    @property
    def record(self) -> str:
        """The name of its sign of life: each process has another."""
        return f"{self.name}.{self.starts}"

    def restart(self, now: float) -> None:
        self.starts_at, self.stopped_until, self.starts = now + _START, 0.0, self.starts + 1
        self.well_since = self.starts_at
        self.standby, self.claim, self.head = takeover.DriverWait(), 0, None
        self.decided = self.under_way = None


class Supervised:
    """See the module. `takeovers`: when, and by whom."""

    def __init__(
        self, drivers: int, seed: int, place: Place = Place.LOCKS, *, looks: bool = True
    ) -> None:
        self.store = Store()
        self.random = random.Random(seed)
        self.place, self.looks = place, looks
        self.drivers = [_Driver(f"d{number}") for number in range(drivers)]
        self.records: dict[str, _Record] = {}
        self.takeovers: list[tuple[float, str]] = []
        #: A driver at work or in a takeover, by its term.
        self.owners: dict[int, _Driver] = {}

    def run(self) -> None:
        """Trouble, then peace. Raises `ViolationError` if they do not settle."""
        now, killed = 0.0, False
        settled, ends = TROUBLE + SETTLED, TROUBLE + SETTLED + 2 * PEACE
        while now < ends:
            now += STEP
            if now < TROUBLE:
                self._trouble_of_all(now)
            elif now >= settled + PEACE and not killed:
                killed = True
                self._settled(since=settled)
                self._kill(next(d for d in self.drivers if d.head is not None), now)
            for driver in self.random.sample(self.drivers, len(self.drivers)):
                if now < TROUBLE:
                    self._trouble(driver, now)
                if max(driver.starts_at, driver.stopped_until) <= now:
                    self._step(driver, now)
        replaced = settled + PEACE + REPLACED
        self._settled(since=replaced)
        if len(self.records) > len(self.drivers) + 1:
            raise ViolationError(f"signs of dead drivers pile up: {sorted(self.records)}")
        if not any(settled + PEACE < when <= replaced for when, _ in self.takeovers):
            raise ViolationError(f"a dead driver is not replaced: {self.takeovers[-2:]}")

    def _settled(self, since: float) -> None:
        late = [each for each in self.takeovers if each[0] > since]
        working = [driver.name for driver in self.drivers if driver.head is not None]
        if late or len(working) != 1:
            raise ViolationError(f"not settled: {working} at work, taken over at {late}")

    # -- trouble ------------------------------------------------------------------------------------

    def _trouble_of_all(self, now: float) -> None:
        chance = self.random.random()
        if chance < 0.004:
            until = now + self.random.uniform(0.0, 3 * takeover.LEASE)
            for driver in self.drivers:
                if chance < 0.002:
                    driver.stopped_until = max(driver.stopped_until, until)
                else:
                    driver.cut_off_until = max(driver.cut_off_until, until)

    def _trouble(self, driver: _Driver, now: float) -> None:
        chance, seconds = self.random.random(), self.random.uniform(0.0, 3 * takeover.LEASE)
        if chance < 0.004:
            driver.stopped_until = now + seconds
        elif chance < 0.007:
            self._kill(driver, now)
        elif chance < 0.011:
            driver.cut_off_until = now + seconds

    def _kill(self, driver: _Driver, now: float) -> None:
        if driver.record in self.records:
            self.records[driver.record].is_held = False
        driver.restart(now)

    def _end(self, driver: _Driver, now: float) -> None:
        """The process ends by itself, and its supervisor starts another."""
        self.records.pop(driver.record, None)
        driver.restart(now)

    # -- signs of life ------------------------------------------------------------------------------

    def _beats(self, driver: _Driver, now: float) -> None:
        driver.beat += 1
        if driver.claim == 0 and driver.record not in self.records:
            return  # the first claim makes it
        sign = Sign(driver.claim, f"{driver.claim} {driver.beat}".encode())
        record = self.records.setdefault(driver.record, _Record(sign))
        late = 0.0
        if self.place is Place.BUCKET:
            driver.lost = driver.lost + 1 if self.random.random() < 0.3 else 0
            if 0 < driver.lost <= _LOST:
                return
            driver.lost, late = 0, self.random.uniform(0.0, _LATE)
        record.arriving.append((now + late, sign))

    def _claims(self, driver: _Driver, term: int) -> None:
        """A claim is waited for, as it is written before what it announces."""
        driver.claim = term
        sign = Sign(term, f"{term} {driver.beat}".encode())
        self.records[driver.record] = _Record(sign)

    def _signs(self, but: _Driver, now: float) -> dict[str, Sign]:
        found = {}
        for name, record in self.records.items():
            arrived = [sign for at, sign in record.arriving if at <= now]
            record.arriving = [each for each in record.arriving if each[0] > now]
            record.sign = arrived[-1] if arrived else record.sign
            free = not record.is_held or self.place is Place.OWN_LOCKS
            if name != but.record:
                found[name] = Sign(
                    record.sign.term,
                    record.sign.beat,
                    is_dead=self.place is Place.LOCKS and not record.is_held,
                    is_unlocked=self.place is not Place.BUCKET and free,
                )
        return found

    def _forget(self, names: Iterable[str]) -> None:
        """As `Presence.forget`. One that lives makes its sign again with its next beat."""
        for name in names:
            self.records.pop(name, None)

    # -- a driver's step ----------------------------------------------------------------------------

    def _step(self, driver: _Driver, now: float) -> None:
        if driver.cut_off_until > now:
            driver.well_since = driver.cut_off_until
            return
        driver.well_since = max(driver.well_since, driver.stopped_until)
        if now % 1.0 == 0.0:
            self._beats(driver, now)
        try:
            if driver.head is not None:
                self._work(driver, now)
            elif driver.under_way is not None:
                self._go_on(driver, now)
            elif driver.decided is not None:
                if driver.decided[0] <= now and not self._thinks_better(driver, now):
                    self._begin(driver, now)
            else:
                self._look(driver, now)
        except FencedError:
            if driver.head is not None:
                self._end(driver, now)
            elif driver.record in self.records:
                self._claims(driver, 0)
            driver.under_way = driver.decided = None

    def _look(self, driver: _Driver, now: float) -> None:
        term = self.store.head.term if self.store.head is not None else 0
        # It may be stopped in the middle of the look.
        seen = now - (self.random.uniform(0.0, 2.0) if now < TROUBLE else 0.0)
        if driver.standby.waits_for(term, self._signs(driver, now), seen) is None:
            self._forget(driver.standby.silent)
            driver.decided = now + self.random.uniform(0.0, _CHECKS), term

    def _thinks_better(self, driver: _Driver, now: float) -> bool:
        """As `Standby.confirm`."""
        driver.decided = None
        self._look(driver, now)
        return driver.decided is None

    def _work(self, driver: _Driver, now: float) -> None:
        assert driver.head is not None
        told = self.store.told
        overtaken = told is not None and told.term > driver.head.term
        if overtaken and self.looks:
            raise FencedError("another writer has taken over")
        if overtaken and now - driver.well_since > TOLD:
            raise ViolationError(f"{driver.name} is at work still, under term {driver.head.term}")
        if self.random.random() < 0.98:
            return
        link = driver.head.next()
        if self.store.create_link(link, driver.head) is not None:
            raise FencedError("cannot publish link")
        driver.head = link

    def _begin(self, driver: _Driver, now: float) -> None:
        def propose(before: Link | None, term: int) -> Link:
            link = Link(1, 0, term) if before is None else before.next(term=term)
            self._claims(driver, link.term)
            return link

        assert driver.decided is not None
        steps = takeover.take_over(propose, None, driver.decided[1])
        driver.decided, driver.began = None, now
        driver.under_way = steps, next(steps)
        self._go_on(driver, now)

    def _go_on(self, driver: _Driver, now: float) -> None:
        """An effect a step, so that a driver may be stopped in between."""
        assert driver.under_way is not None
        steps, effect = driver.under_way
        before = self.store.head
        try:
            answer = self.store.do(effect)
            if isinstance(effect, takeover.Publish) and answer is None:
                self._taken(driver, before, effect.link.term, now)
                signs = self._signs(driver, now)
                self._forget(takeover.overtaken_signs(effect.link.term, signs))
            driver.under_way = steps, steps.send(answer)
        except StopIteration as end:
            driver.head, driver.under_way = end.value.head, None

    def _taken(self, driver: _Driver, before: Link | None, term: int, now: float) -> None:
        self.takeovers.append((now, driver.name))
        older = self.owners.get(before.term) if before is not None else None
        self.owners[term] = driver
        if older is None or older is driver or before is None or older.claim != before.term:
            return  # it has ended
        if max(older.starts_at, older.stopped_until, older.cut_off_until) > now:
            return
        if max(driver.stopped_until, driver.cut_off_until) > driver.began:
            return  # suspended behind the last look that it can take
        if now - max(older.well_since, older.stopped_until) > WELL:
            raise ViolationError(f"{older.name} lives, and {driver.name} takes over at {now}")
