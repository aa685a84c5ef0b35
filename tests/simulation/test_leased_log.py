"""A replicated stream that is trimmed beside consumers with leases, on clocks that drift and are set, among all other faults (26, I10)."""

from collections.abc import Callable, Iterable

import pytest

from tests.support.log_leased import LeasedWorld
from tests.support.log_runs import check_found, check_replays, search, search_chunk
from walsender_bridge.change_log.protocol import ReplicaReport
from walsender_bridge.change_log.repository.core import Repository, StreamState
from walsender_bridge.runtime.steady_clock import SteadyClock


def test_26_no_trim_that_is_on_its_way_takes_what_a_lease_covers(seed: int) -> None:
    happened = search(LeasedWorld, seed * 1_000_000, 40)
    assert happened["register"] > 500
    assert happened["trimmed"] > 100


def test_one_seed_has_the_same_leases_each_time() -> None:
    check_replays(LeasedWorld)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(20))
def test_ten_thousand_seeds(seed: int, chunk: int) -> None:
    search_chunk(LeasedWorld, seed, chunk)


# -- mutants ----------------------------------------------------------------------------------------


def _what_replicas_have(patch: pytest.MonkeyPatch) -> None:
    def low_offset(_: StreamState, reports: Iterable[ReplicaReport]) -> int:
        return max((report.low_offset for report in reports), default=1)

    patch.setattr(StreamState, "low_offset", low_offset)


def _begins_with_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Repository, "since", property(lambda _: 0.0))


def _follows_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SteadyClock, "now", lambda self: self._wall())


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a cut begins where replicas do, whatever was decided": _what_replicas_have,
    "a new repository begins with its wall clock": _begins_with_the_wall_clock,
    "leases follow the wall clock": _follows_the_wall_clock,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_26_the_simulator_finds_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    check_found(LeasedWorld, name, 300)
