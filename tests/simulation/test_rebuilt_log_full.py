"""A rebuild that a full disk interrupts, behind which the former repository goes on (31, I1 to I14)."""

import pytest

from tests.support.log_rebuilt_full import FullRebuiltWorld
from tests.support.log_runs import check_found, check_replays, search, search_chunk
from walsender_bridge.change_log.protocol import ReplicaReport
from walsender_bridge.change_log.repository.core import Repository


def test_31_a_stream_goes_on_behind_a_rebuild_that_a_full_disk_interrupts(seed: int) -> None:
    first = seed * 1_000_000 + 1000
    print(f"seeds from {first}")
    happened = search(FullRebuiltWorld, first, 15)
    print(dict(happened))
    assert min(happened["fill_disk"], happened["refused to rebuild"]) > 3


def test_a_seed_replays_exactly() -> None:
    check_replays(FullRebuiltWorld)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(20))
def test_ten_thousand_seeds(seed: int, chunk: int) -> None:
    search_chunk(FullRebuiltWorld, seed, chunk)


def test_31_the_simulator_finds_terms_below_those_of_an_interrupted_rebuild(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def next_of_its_own(its: Repository, name: str, _: list[ReplicaReport]) -> int:
        return its.streams[name].term + 1

    monkeypatch.setattr(Repository, "next_term", next_of_its_own)
    check_found(FullRebuiltWorld, "the repository's terms alone count", 100)
