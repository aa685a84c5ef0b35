"""Whole runs of a simulated log under faults, by their seeds."""

from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeVar

import pytest

from tests.support.log_world import World

#: Events of each run, and faults among them at least, before everything works again.
EVENTS, FAULTS = 700, 5


class Simulated(Protocol):
    """A world of these runs, whatever is in it."""

    def run(self, events: int, faults: int) -> None:
        """So many events, and more until there have been so many faults."""

    def finish(self) -> None:
        """Everything works again."""


_W = TypeVar("_W", bound=Simulated)


def run(world_of: Callable[[int], _W], seed: int) -> _W:
    """A whole run; a violation says how to have it again."""
    world = world_of(seed)
    try:
        world.run(EVENTS, FAULTS)
        world.finish()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
    return world


def search(world_of: Callable[[int], World], first: int, count: int) -> Counter[str]:
    """What happened in the runs of these seeds."""
    happened: Counter[str] = Counter()
    for number in range(first, first + count):
        world = run(world_of, number)
        happened += world.happened
        assert world.faults >= FAULTS
        happened["faults"] += world.faults
        happened["committed"] += world.stream.last.context.end - 1
    return happened


def search_chunk(world_of: Callable[[int], World], seed: int, chunk: int) -> None:
    """One of the chunks, each of 500 seeds, of a long search."""
    first = seed * 1_000_000 + 10_000 + chunk * 500
    print(f"seeds from {first}: {dict(search(world_of, first, 500))}")


def check_replays(world_of: Callable[[int], World]) -> None:
    """A seed has the same run each time."""
    first, second = run(world_of, 5), run(world_of, 5)
    assert first.happened == second.happened
    assert first.records == second.records
    assert first.truth == second.truth


def check_found(world_of: Callable[[int], Simulated], mutant: str, count: int) -> None:
    """The mutant, which is in effect, is noticed in one of so many seeds."""
    for number in range(count):
        try:
            run(world_of, number)
        except AssertionError as error:
            print(f"{mutant}: {error}")
            return
    pytest.fail(f"{mutant}: nothing was noticed in {count} seeds")
