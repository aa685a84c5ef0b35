"""A replicated stream whose machines lose their power, among all other faults: what was not synced is gone (I1 to I14)."""

from collections.abc import Callable

import pytest

from tests.support.log_power import PowerMachine, PowerWorld
from tests.support.log_runs import check_found, check_replays, search, search_chunk
from tests.support.log_world import World


def test_power_cuts_lose_and_fork_nothing(seed: int) -> None:
    first = seed * 1_000_000
    print(f"seeds from {first}")
    happened = search(PowerWorld, first, 60)
    assert min(happened["cut_power"], happened["cut_within_a_write"], happened["cut_all"]) > 25
    assert happened["committed"] > 100


def test_a_seed_replays_exactly() -> None:
    check_replays(PowerWorld)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(20))
def test_ten_thousand_seeds(seed: int, chunk: int) -> None:
    search_chunk(PowerWorld, seed, chunk)


# -- mutants ----------------------------------------------------------------------------------------


def _answers_before_it_is_synced(patch: pytest.MonkeyPatch) -> None:
    really = PowerMachine.sync

    def now_and_then(self: PowerMachine) -> None:
        self.unsynced = getattr(self, "unsynced", 0) + 1  # type: ignore[attr-defined]
        if self.unsynced % 4 == 1:  # type: ignore[attr-defined]
            really(self)

    patch.setattr(PowerMachine, "sync", now_and_then)


def _repository_is_heard_before_its_record_is_synced(patch: pytest.MonkeyPatch) -> None:
    really = World.restart_repository

    def loses_its_last_record(self: World) -> None:
        found = sorted(key for key in self.etcd.keys if key.startswith("record/"))
        if len(found) > 6:
            del self.etcd.keys[found[-1]]
            self.number -= 1
        really(self)

    patch.setattr(World, "restart_repository", loses_its_last_record)


def _terms_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A machine's record of a seal is synced lazily, as a version is."""
    really = PowerMachine.sync

    def but_no_seal(self: PowerMachine) -> None:
        known, durable = self._synced.get("durable"), self.disk.durable
        if known is not None and durable is not None and durable.term != known.term:
            return
        really(self)

    patch.setattr(PowerMachine, "sync", but_no_seal)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "an answer leaves before the write is synced": _answers_before_it_is_synced,
    "a commit is sent before its record is synced": _repository_is_heard_before_its_record_is_synced,
    "a new term is not synced at once": _terms_are_forgotten,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulator_finds_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    check_found(PowerWorld, name, 300)
