"""Safekeepers and proposers under faults: the real cores on a virtual clock, seeds that replay (23, 24)."""

from collections import Counter

import pytest

from tests.support.quorum.mutants import MUTANTS, mutant
from tests.support.quorum.world import PROFILES, World

#: At least so many in each run, before the cluster is left in peace to settle.
EVENTS = 600
FAULTS = 5


def run(seed: int, size: int, profile: str, events: int = EVENTS) -> World:
    """A whole run; a violation says how to have it again."""
    world = World(seed, size, PROFILES[profile])
    try:
        world.run(events, FAULTS)
        world.finish()
    except Exception as error:
        raise AssertionError(f"{profile} seed {seed} of {size} safekeepers: {error!r}") from error
    return world


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("profile", PROFILES)
def test_23_power_cuts_and_every_other_fault(seed: int, profile: str, size: int) -> None:
    first = seed * 1_000_000
    print(f"seeds from {first}")
    happened: Counter[str] = Counter()
    for number in range(first, first + 15):
        happened += run(number, size, profile).happened
    print(dict(happened))
    assert happened["commits"] > 75
    assert happened["elected"] > 36


def test_23_a_seed_replays_exactly() -> None:
    def trace() -> tuple[object, ...]:
        world = run(11, 3, "rivals")
        logs = [sorted(safekeeper.disk.cells.items()) for safekeeper in world.safekeepers]
        return world.now, sorted(world.happened.items()), logs, world.checks.end

    assert trace() == trace()


#: Each mutant with the faults that show it, and the seeds in which the search begins.
SHOWN_BY = {
    "a copy is compared with one voter": ("clones", 0),
    "a quorum begins below the slot": ("begins", 0),
    "a quorum without a byte waits": ("begins", 0),
    "catch-up: lost donors are waited for": ("backfill", 10),
    "catch-up: damage is lent": ("damage", 0),
    "catch-up: the same donor is asked again": ("damage", 0),
    "1: VCL from before the vote": ("rivals", 0),
    "2: a vote for an equal term": ("rivals", 0),
    "2: an epoch that is no term": ("mixed", 0),
    "2: terms without a bound": ("leaps", 0),
    "2: any term is outbid": ("leaps", 0),
    "3: no zeros over the tail": ("power", 0),
    "3: the history first": ("power", 0),
    "4: commits before the epoch": ("mixed", 0),
    "4: votes are acknowledgements": ("rivals", 0),
    "5: a resumption truncates": ("mixed", 0),
    "5: a rejected proposer goes on": ("mixed", 0),
    "5: ended by one newer timeline": ("rivals", 0),
    "5: a minority's newer timeline stays": ("rivals", 0),
    "5: displaced by a vote alone": ("lone", 0),
    "5: outvoted for ever": ("lone", 0),
    "5: out of reach, and waited for": ("leaps", 0),
    "6: by position alone": ("rivals", 0),
    "6: uncommitted epochs are compacted": ("epochs", 0),
    "7: restart_lsn goes back": ("mixed", 0),
    "8: an unbounded queue": ("mixed", 0),
    "8: laggards hold on": ("mixed", 0),
    "8: laggards fill every disk": ("small", 0),
    "8: no room, and acknowledged": ("disks", 0),
    "9: bytes, not records": ("mixed", 0),
    "9: the committed part of a record stays": ("mixed", 0),
    "10: one majority for two memberships": ("disks", 0),
    "10: done before it is on disk": ("changes", 0),
    "10: a disk that was rolled back is forgotten": ("snapshots", 0),
    "10: a lost disk under its old identity": ("disks", 0),
    "10: a membership of any quorum": ("quorums", 0),
    "10: a membership without an id of anybody": ("upgrade", 0),
    "10: a quorum formed beside another": ("quorums", 0),
    "10: ended by strangers": ("strangers", 0),
}


@pytest.mark.parametrize("name", SHOWN_BY)
def test_24_the_simulator_finds_the_mutant(name: str) -> None:
    profile, first = SHOWN_BY[name]
    with mutant(name):
        for number in range(first, first + 400):
            try:
                run(number, 3, profile)
            except AssertionError as error:
                print(f"{name}: seed {number}: {error}")
                return
    pytest.fail(f"{name}: nothing was noticed in 400 seeds")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(20))
@pytest.mark.parametrize("size", [3, 5])
def test_23_ten_thousand_seeds(seed: int, size: int, chunk: int) -> None:
    """In twenty parts: a long run that is stopped goes on with the part it was in."""
    happened: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    profiles = list(PROFILES)
    first = seed * 1_000_000 + 10_000 + chunk * 500
    for number in range(first, first + 500):
        world = run(number, size, profiles[number % len(profiles)])
        assert world.events >= EVENTS
        assert world.faults_injected >= FAULTS
        happened += world.happened
        totals += Counter(seeds=1, events=world.events, faults=world.faults_injected)
    print(f"{size} safekeepers, seeds from {first}: {dict(totals)}")
    print(f"elections: {happened['elected']}, commits: {happened['commits']}; {dict(happened)}")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MUTANTS)
def test_24_in_how_many_seeds_a_mutant_is_found(name: str) -> None:
    profile, _ = SHOWN_BY[name]
    found = 0
    with mutant(name):
        for number in range(1000):
            try:
                run(number, 3, profile)
            except AssertionError:
                found += 1
    print(f"{name}: {found} of 1000 seeds of {profile}")
    assert found
