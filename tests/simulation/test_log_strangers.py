"""A replicated stream whose replicas are opened by strangers: it is delayed, and nothing is lost, and it goes on (38)."""

from collections.abc import Callable, Iterable

import pytest

from tests.support.log_runs import check_found, search, search_chunk
from tests.support.log_strangers import CertifiedWorld, StrangerWorld
from walsender_bridge.change_log.protocol import ReplicaReport
from walsender_bridge.change_log.repository.core import Repository

WORLDS = [StrangerWorld, CertifiedWorld]


@pytest.mark.parametrize("world", WORLDS)
def test_38_strangers_lose_and_fork_nothing(world: type[StrangerWorld], seed: int) -> None:
    first = seed * 1_000_000
    print(f"seeds from {first}")
    happened = search(world, first, 40)
    assert happened["forged"] > 20
    assert happened["committed"] > 100


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(20))
def test_ten_thousand_seeds(seed: int, chunk: int) -> None:
    for world in WORLDS:
        search_chunk(world, seed, chunk)


# -- mutants ----------------------------------------------------------------------------------------


def _terms_of_the_repository_alone(patch: pytest.MonkeyPatch) -> None:
    def next_term(self: Repository, name: str, shown: Iterable[ReplicaReport]) -> int:
        del shown
        return self.streams[name].term + 1

    patch.setattr(Repository, "next_term", next_term)


def _terms_of_members_alone(patch: pytest.MonkeyPatch) -> None:
    really = Repository.next_term

    def next_term(self: Repository, name: str, shown: Iterable[ReplicaReport]) -> int:
        members = self.streams[name].members
        return really(self, name, [each for each in shown if each.replica in members])

    patch.setattr(Repository, "next_term", next_term)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the next term is above those that were given alone": _terms_of_the_repository_alone,
    "a replica that is not in sync does not raise the next term": _terms_of_members_alone,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulator_finds_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    check_found(StrangerWorld, name, 300)
