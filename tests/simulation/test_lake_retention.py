"""A lake's retention under clocks that are set and drivers that are started again: the real `Retention` and chain.

True time passes by `World.passes` alone. The wall clock shows it until it is set; the monotonic clock counts it, from
another origin in each process. What has to hold, whatever the order:

- a link is not removed before its successor is as old as half the retention (`CATCH_UP` is 2), in true time;
- once nothing is set any more, what is past its retention goes within a bounded time;
- a lake whose clocks were never set keeps exactly what its retention says.
"""

import os
import random
import time
from pathlib import Path
from typing import Any, cast

import pytest

from spark_consumers.lake.manifest.chain import Manifest, open_chain
from spark_consumers.lake.writer.retention import Retention, clock_after

HOUR, DAY = 3600.0, 86_400.0
KEPT = 7 * DAY
SEEDS = 60


class NoTables:
    """The tables are another subject."""

    def expire(self, *_: Any) -> int:
        return 0

    def sweep_of_links(self, _: Manifest, __: object) -> int:
        return 0


class World:
    """One lake, its clocks, and drivers one after the other."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chain = open_chain(folder)
        self.chain.initialise("log", "iceberg")
        self.true, self.ahead, self.booted = 20_000 * DAY, 0.0, 5.0
        self.head: Manifest | None = None
        self.kept: Retention | None = None
        self.published_at: dict[int, float] = {}
        # No power fails here.
        monkeypatch.setattr(os, "fsync", lambda _: None)
        monkeypatch.setattr(time, "time", lambda: self.true + self.ahead)
        monkeypatch.setattr(time, "monotonic", lambda: self.true - self.booted)

    def passes(self, seconds: float) -> None:
        self.true += seconds

    def is_set(self, seconds: float) -> None:
        self.ahead += seconds

    def starts(self) -> None:
        """A driver takes over."""
        self.booted = self.true - random.Random(self.true).uniform(0, DAY)
        before = self.chain.head()
        clock = clock_after(before)
        if before is None:
            link = Manifest("lake", 1, 1, 0, 1, time.time(), clock.now())
        else:
            link = before.next(clock.now(), term=before.term + 1)
        self.chain.publish(link, before)
        none = cast("Any", NoTables())
        self.kept = Retention.begin(self.chain, none, none, clock)
        self.adopt(link)

    def publishes(self) -> None:
        assert self.kept is not None
        assert self.head is not None
        link = self.head.next(self.kept.clock.now(), epoch=self.head.epoch + 1)
        self.chain.publish(link, self.head)
        self.adopt(link)
        self.expires()

    def adopt(self, link: Manifest) -> None:
        self.head = link
        self.published_at[link.link] = self.true

    def expires(self) -> None:
        assert self.kept is not None
        assert self.head is not None
        before = self.chain.numbers()
        self.kept.expire(self.head, KEPT)
        there = self.chain.numbers()
        assert there == list(range(there[0], self.head.link + 1))
        for gone in before[: -len(there)]:
            age = self.true - self.published_at[gone + 1]
            assert age >= KEPT / 2, f"link {gone} went {age / HOUR:.1f} h after it was succeeded"


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path / "lake", monkeypatch)


@pytest.mark.parametrize("leap", [30 * DAY, -30 * DAY, -19_000 * DAY])
def test_a_leap_of_the_clock_and_a_restart_end_no_epoch(world, leap):
    world.starts()
    for _ in range(24):
        world.passes(HOUR)
        world.publishes()
    world.is_set(leap)
    for _ in range(3):
        world.passes(HOUR)
        world.publishes()
    world.starts()
    world.passes(HOUR)
    world.publishes()
    assert world.chain.numbers()[0] == 1
    # The clock is set right, and the driver started again.
    world.is_set(-leap)
    world.starts()
    world.passes(HOUR)
    world.publishes()
    assert world.chain.numbers()[0] == 1


def test_clocks_that_are_never_set_keep_what_the_retention_says(world):
    world.starts()
    for _ in range(9 * 24):
        world.passes(HOUR)
        world.publishes()
    oldest = world.chain.numbers()[0]
    assert world.true - world.published_at[oldest] == pytest.approx(KEPT, abs=HOUR)
    # A night without a driver counts, though it is caught up with gradually.
    world.passes(12 * HOUR)
    world.starts()
    for _ in range(2 * 12):
        world.passes(HOUR)
        world.publishes()
    oldest = world.chain.numbers()[0]
    assert world.true - world.published_at[oldest] == pytest.approx(KEPT, abs=2 * HOUR)


def test_whatever_the_clocks_do_half_the_retention_is_kept_and_the_rest_goes(
    tmp_path, monkeypatch, seed
):
    for number in range(SEEDS):
        print(f"seed {seed + number}")
        choose = random.Random(seed + number)
        with monkeypatch.context() as clocks:
            world = World(tmp_path / str(number), clocks)
            world.starts()
            for _ in range(choose.randrange(20, 60)):
                match choose.randrange(6):
                    case 0:
                        world.is_set(choose.choice([-1, 1]) * choose.choice([HOUR, 30 * DAY, 9e8]))
                    case 1:
                        world.starts()
                    case 2:
                        # Nothing runs, or the machine is suspended.
                        world.passes(choose.choice([HOUR, 3 * DAY]))
                    case _:
                        world.passes(choose.uniform(0, 12 * HOUR))
                        world.publishes()
            last = len(world.published_at)
            world.publishes()
            while world.true - world.published_at[last + 1] < KEPT + DAY:
                world.passes(6 * HOUR)
                world.publishes()
            assert world.chain.numbers()[0] > last, "nothing goes any more"
