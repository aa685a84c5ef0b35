"""A replicated stream whose repository is lost, and rebuilt from the replicas, among all other faults (31, I1 to I14)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.log_confirmed import RebuiltConfirmedWorld
from tests.support.log_rebuilt import RebuiltWorld
from tests.support.log_runs import check_found, check_replays, search, search_chunk
from walsender_bridge.change_log.protocol import REBUILD_GAP
from walsender_bridge.change_log.replica import core, synchronization
from walsender_bridge.change_log.repository import rebuild
from walsender_bridge.change_log.repository.core import Repository
from walsender_bridge.change_log.repository.rebuild import (
    Offer,
    RebuildPlan,
    StreamHistory,
    StreamPlan,
)


@pytest.mark.parametrize("part", range(2))
def test_31_a_rebuilt_repository_loses_nothing_and_gives_no_version_two_meanings(
    seed: int, part: int
) -> None:
    first = seed * 1_000_000 + part * 1000
    print(f"seeds from {first}")
    happened = search(RebuiltWorld, first, 100)
    print(dict(happened))
    assert happened["committed"] > 300
    assert happened["rebuilt"] > 150
    assert happened["refused to rebuild"] > 10
    assert happened["the old repository stops"] > 20


def test_31_members_behind_a_rebuild_know_what_the_slot_was_confirmed_to(seed: int) -> None:
    first = seed * 1_000_000
    print(f"seeds from {first}")
    assert search(RebuiltConfirmedWorld, first, 30)["confirm"] > 900


def test_a_seed_replays_exactly() -> None:
    check_replays(RebuiltWorld)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(20))
def test_ten_thousand_seeds(seed: int, chunk: int) -> None:
    search_chunk(RebuiltWorld, seed, chunk)
    search_chunk(RebuiltConfirmedWorld, seed, chunk)


# -- mutants ----------------------------------------------------------------------------------------


def _any_replica(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rebuild, "_check_servers", lambda *_: None)
    patch.setattr(rebuild, "_check_known", lambda *_: None)
    really = rebuild.plan
    patch.setattr(rebuild, "plan", lambda *given: replace(really(*given), least=1))


def _no_gap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rebuild, "REBUILD_GAP", 0)


def _next_term(patch: pytest.MonkeyPatch) -> None:
    really = rebuild._stream

    def stream(name: str, servers: Any, offers: Sequence[Offer], *others: Any) -> StreamPlan:
        term = max(each.term for each in offers) + 1
        return replace(really(name, servers, offers, *others), term=term)

    patch.setattr(rebuild, "_stream", stream)


def _returns_as_it_was(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(synchronization, "is_from_before_a_rebuild", lambda *_: False)


def _seals_of_any_repository(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(core, "is_from_before_a_rebuild", lambda *_: False)


def _fence_of_its_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rebuild, "_fence", lambda version, _: version + REBUILD_GAP)


def _cut_short_is_lost(patch: pytest.MonkeyPatch) -> None:
    really = rebuild._check_known

    def check_known(name: str, servers: Any, its: Sequence[Offer], policy: Any) -> None:
        really(name, servers, [replace(each, source="") for each in its], policy)

    patch.setattr(rebuild, "_check_known", check_known)


def _promised_by_the_source(patch: pytest.MonkeyPatch) -> None:
    really = rebuild.rebuilt

    def rebuilt(
        plan: RebuildPlan, histories: Mapping[str, StreamHistory], *others: Any, **named: Any
    ) -> Repository:
        its = {name: replace(each, low_offset=1) for name, each in histories.items()}
        return really(plan, its, *others, **named)

    patch.setattr(rebuild, "rebuilt", rebuilt)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "any replica is enough": _any_replica,
    "no gap in versions and global offsets": _no_gap,
    "the next term": _next_term,
    "a replica that missed it keeps what it has": _returns_as_it_was,
    "a member takes seals of the old repository": _seals_of_any_repository,
    "what the source has is promised": _promised_by_the_source,
}


#: One in some hundred seeds finds them.
RARE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "an attempt's fence is behind those alone that it sees": _fence_of_its_own,
    "a synchronization that was cut short is a lost member": _cut_short_is_lost,
}


@pytest.mark.long
@pytest.mark.parametrize("name", RARE)
def test_31_the_simulator_finds_the_rare_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    RARE[name](monkeypatch)
    check_found(RebuiltWorld, name, 1500)


@pytest.mark.parametrize("name", MUTANTS)
def test_31_the_simulator_finds_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    check_found(RebuiltWorld, name, 300)


def test_31_the_simulator_finds_a_member_that_does_not_know_what_was_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rebuild, "with_told", lambda stream, _: stream)
    check_found(RebuiltConfirmedWorld, "a member that does not know what was confirmed", 300)


def test_31_the_simulator_finds_that_an_empty_version_stops_a_rebuild(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rebuild, "newest_context", lambda *_: None)
    check_found(RebuiltConfirmedWorld, "an empty version stops a rebuild", 300)
