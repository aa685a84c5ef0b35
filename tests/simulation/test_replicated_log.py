"""A stream on several log servers under faults: the real cores on a virtual clock, seeds that replay (I1 to I14)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.log_confirmed import ConfirmedWorld
from tests.support.log_disks import DiskWorld
from tests.support.log_restored import RestoredWorld
from tests.support.log_runs import FAULTS, check_found, check_replays, run, search, search_chunk
from tests.support.log_world import World
from walsender_bridge.change_log.entry import check
from walsender_bridge.change_log.protocol import CommitContext, ReplicaReport
from walsender_bridge.change_log.replica import core, disk
from walsender_bridge.change_log.replica.core import Replica, ReplicaState
from walsender_bridge.change_log.replica.disk import DropFrom, Effect, RecoveryOutcome, Wipe
from walsender_bridge.change_log.replica.synchronization import SyncBatch, SyncOffer, SyncRange
from walsender_bridge.change_log.repository import leadership, membership
from walsender_bridge.change_log.repository.core import Repository, StreamState
from walsender_bridge.errors import InvalidReplicaError


@pytest.mark.parametrize("part", range(4))
def test_no_order_of_faults_loses_or_forks_what_is_committed(seed: int, part: int) -> None:
    first = seed * 1_000_000 + part * 1000
    print(f"seeds from {first}")
    happened = search(World, first, 120)
    print(dict(happened))
    assert happened["committed"] > 600
    assert happened["faults"] > 2 * FAULTS * 120


def test_disks_that_are_full_or_damaged_lose_and_fork_nothing(seed: int) -> None:
    first = seed * 1_000_000
    print(f"seeds from {first}")
    happened = search(DiskWorld, first, 50)
    assert min(happened["fill_disk"], happened["damage_disk"]) > 25


def test_21_log_servers_that_are_put_back_to_an_older_state_fork_nothing(seed: int) -> None:
    first = seed * 1_000_000
    print(f"seeds from {first}")
    assert search(RestoredWorld, first, 40)["put_back"] > 20


def test_23_each_member_knows_what_the_slot_was_confirmed_to(seed: int) -> None:
    first = seed * 1_000_000
    print(f"seeds from {first}")
    assert search(ConfirmedWorld, first, 50)["confirm"] > 1500


def test_a_seed_replays_exactly() -> None:
    check_replays(World)
    check_replays(DiskWorld)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(20))
def test_ten_thousand_seeds(seed: int, chunk: int) -> None:
    search_chunk(World, seed, chunk)
    search_chunk(DiskWorld, seed, chunk)
    search_chunk(ConfirmedWorld, seed, chunk)
    search_chunk(RestoredWorld, seed, chunk)


# -- mutants ----------------------------------------------------------------------------------------


def _behind_the_seal(patch: pytest.MonkeyPatch) -> None:
    """A source that is behind takes a sealing member back to where it is."""
    patch.setattr(core, "check_source", lambda *_: None)


def _report_of_any_term(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamState, "counts", lambda self, r: r.version >= self.last.context.version)


def _commit_without_a_member(patch: pytest.MonkeyPatch) -> None:
    really = Repository._committable

    def committable(self: Repository, reports: Sequence[ReplicaReport]) -> dict[str, ReplicaReport]:
        for stream in self.streams.values():
            stream.members = stream.members[:2]
        return really(self, reports)

    patch.setattr(Repository, "_committable", committable)


def _rejected_tail_stays_on_disk(patch: pytest.MonkeyPatch) -> None:
    """Varlog's own: a tail that a seal has rejected is reported again after a restart."""
    really = Replica._sealed

    def sealed(self: Replica) -> list[Effect]:
        return [each for each in really(self) if not isinstance(each, DropFrom)]

    patch.setattr(Replica, "_sealed", sealed)


def _lost_entries_are_taken_for_trimmed(patch: pytest.MonkeyPatch) -> None:
    """Varlog's own."""
    really = disk.evaluate

    def evaluate(found: disk.StoredReplica) -> tuple[RecoveryOutcome, str]:
        outcome, reason = really(found)
        gone = found.first_offset is None and not found.damage
        return (RecoveryOutcome.ALL_TRIMMED, "") if gone else (outcome, reason)

    patch.setattr(core, "evaluate", evaluate)


def _wiped_and_sealed(patch: pytest.MonkeyPatch) -> None:
    """Varlog's own: after a crash behind the wipe, a replica is SEALED without data."""
    really = Replica.sync_init

    def sync_init(self: Replica, offer: SyncOffer) -> tuple[SyncRange, list[Effect]]:
        lacking, effects = really(self, offer)
        theirs = offer.durable
        end = theirs.committed_end
        wiped = replace(theirs, low_offset=end, sealed_at=end)
        return lacking, [Wipe(wiped) if isinstance(each, Wipe) else each for each in effects]

    patch.setattr(Replica, "sync_init", sync_init)


def _cannot_begin_again(patch: pytest.MonkeyPatch) -> None:
    """Varlog's own: a replica of a trimmed source cannot be opened after a crash in the middle."""
    really = Replica.sync_init

    def sync_init(self: Replica, offer: SyncOffer) -> tuple[SyncRange, list[Effect]]:
        if self.current.context is None and self.current.low_offset > 1:
            raise InvalidReplicaError("it begins behind the start of the stream, and has no commit")
        return really(self, offer)

    patch.setattr(Replica, "sync_init", sync_init)


def _hole_in_the_tail(patch: pytest.MonkeyPatch) -> None:
    """Varlog's own: a hole within the entries is sealed."""
    patch.setattr(core, "verify", lambda data, crc: check(data))


def _batches_after_damage(patch: pytest.MonkeyPatch) -> None:
    really = Replica.sync_replicate

    def sync_replicate(self: Replica, source: str, batch: SyncBatch) -> list[Effect]:
        if self.outcome == RecoveryOutcome.INVALID:
            self.outcome = RecoveryOutcome.SYNCHRONIZING
        return really(self, source, batch)

    patch.setattr(Replica, "sync_replicate", sync_replicate)


def _any_writer_unseals(patch: pytest.MonkeyPatch) -> None:
    really = Replica.open_writer

    def open_writer(self: Replica, term: int) -> list[Effect]:
        if self.state in {ReplicaState.SEALED, ReplicaState.SEALING}:
            self.state = ReplicaState.APPENDABLE
            self.current = replace(self.current, sealed_at=None)
        return really(self, max(term, self.current.term))

    patch.setattr(Replica, "open_writer", open_writer)


def _writes_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    def unfenced(_key: str, _fence: int, *others: Any, then: Sequence[Any]) -> dict[str, Any]:
        return {"compare": [*others], "success": [*then]}

    patch.setattr(leadership, "fenced", unfenced)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a report counts with any term": _report_of_any_term,
    "a commit does not need every member": _commit_without_a_member,
    "any writer unseals": _any_writer_unseals,
    "an old leader's writes take effect": _writes_are_not_fenced,
    "a damaged replica takes the rest of a synchronization": _batches_after_damage,
    "Varlog 1: a crash in the middle of a synchronization is the end": _cannot_begin_again,
    "Varlog 2: sealed without data behind a wipe": _wiped_and_sealed,
    "Varlog 3: lost entries are taken for trimmed ones": _lost_entries_are_taken_for_trimmed,
    "Varlog 4: a hole within the entries is sealed": _hole_in_the_tail,
    "Varlog 5: a rejected tail stays on disk": _rejected_tail_stays_on_disk,
}


def test_the_simulator_finds_that_a_source_behind_the_seal_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _behind_the_seal(monkeypatch)
    # One in some hundred seeds finds it.
    with pytest.raises(AssertionError, match=r"I12: member \w+ lacks"):
        run(DiskWorld, 152)


def test_21_the_simulator_finds_that_a_commit_is_for_any_entries_at_its_offsets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really = Replica.commit

    def commit(
        self: Replica, context: CommitContext, now: int = 0, crc: int | None = None
    ) -> list[Effect]:
        del crc
        return really(self, context, now)

    monkeypatch.setattr(Replica, "commit", commit)
    # One in some hundred seeds finds it.
    with pytest.raises(AssertionError, match="I3: m has another entry"):
        run(RestoredWorld, 145)


def test_23_the_simulator_finds_that_a_replica_is_taken_back_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "told", lambda _: (None, None))
    check_found(ConfirmedWorld, "a replica is taken back as it is", 200)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulator_finds_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    check_found(World, name, 600)
