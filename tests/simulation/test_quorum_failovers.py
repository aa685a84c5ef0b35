"""Failovers under faults, on the virtual clock: what was fenced stays so, what was promoted is not refused (29, sim)."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tests.support.quorum.failovers import FailoverWorld
from walsender_bridge.quorum.proposer import core as proposer_core
from walsender_bridge.quorum.proposer import lineage
from walsender_bridge.quorum.proposer.effects import Lineage
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.safekeeper import effects as e
from walsender_bridge.quorum.safekeeper.core import Safekeeper

EVENTS = 900


def run(seed: int, size: int = 3) -> FailoverWorld:
    """A whole run; a violation says how to have it again."""
    world = FailoverWorld(seed, size)
    try:
        world.run(EVENTS)
        world.finish()
    except Exception as error:
        raise AssertionError(f"failover seed {seed} of {size} safekeepers: {error!r}") from error
    return world


@pytest.mark.parametrize("size", [3, 5])
def test_29_failovers_that_are_killed_displaced_and_taken_back(seed: int, size: int) -> None:
    first = seed * 1_000_000
    print(f"seeds from {first}")
    happened: Counter[str] = Counter()
    for number in range(first, first + 60):
        happened += run(number, size).happened
    print(dict(happened))
    for step in ("ELECT", "RECEIVE", "COMMIT", "PROMOTE", "ATTACH", "DONE"):
        assert happened[f"failover {step}"], step
    assert happened["stop: FENCED"] > 5
    assert happened["failover killed"] > 5


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [3, 5])
def test_29_three_thousand_seeds(seed: int, size: int) -> None:
    happened: Counter[str] = Counter()
    for number in range(3000):
        happened += run(seed * 1_000_000 + 1000 + number, size).happened
    print(dict(happened))


# -- what the simulator must notice -----------------------------------------------------------------

Patch = tuple[object, str, object]


def _fence_in_memory() -> list[Patch]:
    """The fence is not persisted: a restart forgets it."""
    persist = Safekeeper._persist

    def forget(self: Safekeeper) -> e.PersistControl:
        return e.PersistControl(replace(persist(self).state, fence=None))

    return [(Safekeeper, "_persist", forget)]


def _fence_lifted_at_once() -> list[Patch]:
    """Whoever is on a newer timeline lifts the fence with its vote, attached or not."""
    vote = Safekeeper._vote

    def lift(self: Safekeeper, conn: int, message: m.Vote) -> list[e.Effect]:
        done = vote(self, conn, message)
        fence = self.control.fence
        if fence is not None and message.timeline > fence.timeline:
            self.control = replace(self.control, fence=None)
        return done

    return [(Safekeeper, "_vote", lift)]


def _any_switch_point() -> list[Patch]:
    """A server may have left its timeline below VCL; nor are bytes compared, which would tell."""

    def successors(log: History, vcl: int, term: int, origin: Lineage) -> tuple[HistoryEntry, ...]:
        entries = log.counted(vcl)
        start = entries[-1].timeline if entries else origin.timeline_at(vcl)
        timeline = max(start, origin.timeline)
        return (HistoryEntry(term, vcl, timeline),)

    compare = proposer_core.Proposer._compare

    def unseen(self: proposer_core.Proposer) -> list[Any]:
        reaches = self.primary is None or self.primary.flush_lsn >= self.vcl
        compared = self.phase == proposer_core.Phase.COMPARING and reaches
        return self._lead() if compared else compare(self)

    return [(lineage, "successors", successors), (proposer_core.Proposer, "_compare", unseen)]


MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    "the fence is not persisted": _fence_in_memory,
    "a vote lifts the fence": _fence_lifted_at_once,
    "the switch point is not checked": _any_switch_point,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_24_the_simulator_finds_the_failover_s_mutant(name: str) -> None:
    patches = [
        mock.patch.object(where, attribute, value) for where, attribute, value in MUTANTS[name]()
    ]
    for patch in patches:
        patch.start()
    try:
        for number in range(400):
            try:
                run(number)
            except AssertionError as error:
                if not isinstance(error.__cause__, AssertionError):
                    raise  # no invariant that has a name
                print(f"{name}: seed {number}: {error}")
                return
    finally:
        for patch in patches:
            patch.stop()
    pytest.fail(f"{name}: nothing was noticed in 400 seeds")
