"""A lost repository is rebuilt from replicas of which some were damaged, and copied since (31, I1 to I14)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.log_rebuilt_damaged import DamagedRebuiltWorld
from tests.support.log_runs import check_found, check_replays, search, search_chunk
from walsender_bridge.change_log.replica.core import Replica, ReplicaState
from walsender_bridge.change_log.replica.disk import Effect


def test_31_what_a_damaged_member_had_is_not_taken_for_what_it_was_sent_since(seed: int) -> None:
    first = seed * 1_000_000 + 2000
    print(f"seeds from {first}")
    happened = search(DamagedRebuiltWorld, first, 60)
    print(dict(happened))
    assert happened["rebuilt"] > 60
    assert happened["a copied member is damaged"] > 3
    assert happened["a damaged member is copied"] > 8


def test_a_seed_replays_exactly() -> None:
    check_replays(DamagedRebuiltWorld)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(20))
def test_ten_thousand_seeds(seed: int, chunk: int) -> None:
    search_chunk(DamagedRebuiltWorld, seed, chunk)


# -- mutants ----------------------------------------------------------------------------------------


def _says_what_an_older_segment_says(patch: pytest.MonkeyPatch) -> None:
    named = property(lambda core: core.current.syncing_from or "")
    patch.setattr(Replica, "synchronization", named)


def _not_marked(patch: pytest.MonkeyPatch) -> None:
    never = property(lambda _: False, lambda _, __: None)
    patch.setattr(Replica, "_lacks", never, raising=False)


def _marked_until_it_is_synchronized(patch: pytest.MonkeyPatch) -> None:
    really = Replica._sync_done

    def sync_done(core: Replica, *given: Any) -> Any:
        return replace(really(core, *given), replaced_by=None)

    patch.setattr(Replica, "_sync_done", sync_done)


def _marked_until_a_writer_comes(patch: pytest.MonkeyPatch) -> None:
    really = Replica.open_writer

    def open_writer(core: Replica, term: int) -> list[Effect]:
        unseals = core.state == ReplicaState.SEALED
        effects = really(core, term)
        if unseals:
            core.current = replace(core.current, replaced_by=None)
        return core._write(effects)

    patch.setattr(Replica, "open_writer", open_writer)


def _known_as_a_member_whatever_it_was(patch: pytest.MonkeyPatch) -> None:
    really = Replica.joined

    def joined(core: Replica, replaced_by: str) -> list[Effect]:
        return really(core, core.current.replaced_by or replaced_by)

    patch.setattr(Replica, "joined", joined)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a damaged replica is what an older segment says": _says_what_an_older_segment_says,
    "what was lost is not marked": _not_marked,
    "a synchronization ends the mark": _marked_until_it_is_synchronized,
    "a writer ends the mark": _marked_until_a_writer_comes,
    "any join ends the mark": _known_as_a_member_whatever_it_was,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_31_the_simulator_finds_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    check_found(DamagedRebuiltWorld, name, 300)
