"""The commits that the repository keeps for consumers that lag: few, and nothing is trimmed that a lease holds."""

import random
from bisect import bisect_right

import pytest

from tests.unit.test_repository import committed, log_of, report
from walsender_bridge.change_log.repository import past_commits
from walsender_bridge.change_log.repository.core import ConsumerSeen, Repository
from walsender_bridge.change_log.repository.past_commits import PastCommit

COMMITS = 4000


def _kept(versions: list[int]) -> list[PastCommit]:
    """What is kept of commits at these versions, thinned out as the repository does."""
    past: list[PastCommit] = []
    for version in versions:
        past.append(PastCommit(version, version + 1, version * 10))
        if len(past) >= past_commits.MOST:
            past = past_commits.thinned(past, version + 1)
    return past


@pytest.mark.parametrize("steps", [(1,), (1, 1, 1, 7, 60)], ids=str)
def test_few_are_kept_and_what_is_held_in_vain_is_an_eighth_of_the_lag(
    steps: tuple[int, ...], seed: int
) -> None:
    rng = random.Random(seed)
    versions, version = [], 0
    for _ in range(50_000):
        version += rng.choice(steps)
        versions.append(version)
    past = _kept(versions)
    assert past[0].version == versions[0]
    assert len(past) < past_commits.MOST
    for _ in range(2000):
        wanted = rng.choice((rng.randint(1, version), max(1, version - rng.randint(0, 1000))))
        place = bisect_right(versions, wanted)
        found = past_commits.at(past, wanted)
        if not place:
            assert found is None
            continue
        assert found is not None
        assert found.version <= versions[place - 1]
        assert (versions[place - 1] - found.version) * 8 <= version + 1 - wanted


def _limit(ends: dict[int, int], version: int) -> int:
    return ends[max(each for each in ends if each <= version)]


def test_10_a_lagging_consumer_loses_nothing_and_costs_no_memory(seed: int) -> None:
    """It renews its lease at versions of its own, further and further behind, while others come and go."""
    rng, state = random.Random(seed), log_of("a")
    ends = {0: 1}
    needed, most = 1, 0
    state.apply(ConsumerSeen("lags", 1, until=1e9))
    for number in range(1, COMMITS):
        committed(state, 1.0, report("a", state.version, number, 1))
        ends[state.version] = number + 1
        if not number % 50:
            needed = rng.randint(needed, max(needed, state.version // 2))
            state.apply(ConsumerSeen("lags", needed, until=1e9))
        if not number % 77:
            state.apply(ConsumerSeen("other", state.version - rng.randint(0, 20), until=1e9))
        limit = state.trim_limit("a", 1.0)
        assert limit <= _limit(ends, needed), "I10: entries that it needs may be trimmed"
        stream = state.streams["a"]
        most = max(most, len(stream.past) + len(stream.history))
        assert _limit(ends, needed) - limit <= max(1, (state.version - needed) / 8 + 1)
    assert most <= past_commits.MOST + 2
    assert Repository.from_record(state.to_record()).to_record() == state.to_record()


def test_a_consumer_that_is_not_known_needs_everything() -> None:
    state = log_of("a")
    for number in range(1, 400):
        committed(state, 1.0, report("a", state.version, number, 1))
    state.apply(ConsumerSeen("new", 200, until=1e9))
    assert state.trim_limit("a", 1.0) == 1
    state.apply(ConsumerSeen("new", state.version, until=1e9))
    assert state.trim_limit("a", 1.0) == 400
