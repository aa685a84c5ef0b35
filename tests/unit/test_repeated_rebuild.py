"""A rebuild of the repository that ended in its middle, and is repeated: real log servers, and what the first attempt has left on them."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.support.log_entries import SCHEMAS, tell
from tests.support.waiting import wait_for
from tests.unit.test_replication import STREAM, Machines, machines
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.operator_client import OperatorReplica
from walsender_bridge.change_log.protocol import CommitContext, IssuedCommit, ReplicaStatus
from walsender_bridge.change_log.replica.disk import Durable
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.replica.synchronization import SyncBatch
from walsender_bridge.change_log.repository import empty_store
from walsender_bridge.change_log.repository.core import Repository
from walsender_bridge.change_log.repository.rebuild import RebuildPlan, StreamPlan
from walsender_bridge.change_log.repository.rebuilder import Rebuilder
from walsender_bridge.change_log.storage.records import unpack_state
from walsender_bridge.change_log.storage.segment import Segment
from walsender_bridge.change_log.storage.store import WIPING, StreamStore
from walsender_bridge.errors import InvalidReplicaError, UnavailableError
from walsender_bridge.postgres.protocol.lsn import WalPosition

__all__ = ["machines"]

Make = Callable[..., Machines]


def lose_repository(here: Machines) -> None:
    here.repository.stop()
    shutil.rmtree(here.folder / "repository")


def attempt(here: Machines, *given_up: int) -> Repository:
    """All of a rebuild but the writing of the store. A log server that is given up does not run."""
    addresses = [here.listens[each] for each in given_up]
    with closing(Rebuilder(here.listens, here.policy, given_up=addresses)) as rebuilder:
        return rebuilder.rebuild(rebuilder.look(), hold=60.0)


def go_on(here: Machines, state: Repository) -> None:
    """With the rebuilt repository, on all log servers."""
    with empty_store.opened(here.folder / "repository" / "repository.sqlite", None) as store:
        store.begin_with(state)
    for number in range(3):
        if here.servers[number] is None:
            here.start(number)
    here.start_repository()
    here.log.close()
    here.log = LogClient(here.repository.address)
    here.write_on()
    here.all_equal()


def commit_on(here: Machines, number: int, length: int) -> None:
    """One more version, of so many entries, that this log server alone hears of."""
    with OperatorReplica(here.listens[number]) as replica:
        (found,) = replica.replicas().replicas
        known = found.context
        assert known is not None
        own = CommitContext(known.version + 1, known.end, known.global_end, length)
        assert not replica._call(
            m.COMMIT, m.CommitRequest({STREAM: (IssuedCommit(own),)}, 1)
        ).refused


def cut_short(here: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt without the third log server, whose synchronization breaks off at its first batch."""

    def broken(*_: object) -> Iterator[SyncBatch]:
        raise UnavailableError("the log server ends")

    with monkeypatch.context() as patch:
        patch.setattr(HostedReplica, "sync_batches", broken)
        with pytest.raises(UnavailableError, match="1 replicas are in sync"):
            attempt(here, 2)


def test_31_a_rebuild_is_repeated_whose_synchronization_broke_off(
    machines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that are left, one lacks the last commit, and was to take it from the other one."""
    here = machines()
    here.write_on(2)
    with here.open_writer() as writer:
        lose_repository(here)
        writer.send([here.make.whole()], schemas=list(SCHEMAS.values()))
        assert writer.next_ack(20) is not None
    commit_on(here, 0, 1)
    here.wipe(2)
    cut_short(here, monkeypatch)
    here.committed_end += 1
    go_on(here, attempt(here, 2))


@pytest.mark.parametrize("removed", [0, 1, None], ids=["none", "one", "all"])
def test_31_a_rebuild_is_repeated_that_ended_in_the_middle_of_a_wipe(
    machines: Make, monkeypatch: pytest.MonkeyPatch, removed: int | None
) -> None:
    """Of two that are left, one ends before what the other one has kept. `removed`: how many of its segments were by then."""
    here = machines()
    here.stop(1)
    here.segment_bytes = 1
    here.start(1)
    folder = here.folder / "log-server-1" / "streams" / STREAM

    def has_segments() -> bool:
        # Each version that it takes part in is one; it may be left out of some, since it was away.
        here.write_on()
        return len([*folder.glob("segment-*")]) >= 3

    wait_for(has_segments, 60, "segments")
    here.stop(1)
    for _ in range(3):
        here.write_on()
    version = here.repository._state.version
    lose_repository(here)
    with OperatorReplica(here.listens[0]) as replica:
        low = replica._call(m.TRIM, m.TrimRequest(STREAM, here.committed_end, version)).low_offset
    assert low > 3
    here.wipe(2)
    here.start(1)

    really = Segment.set_aside
    done: list[object] = []

    def broken(*given: Any) -> None:
        if removed is None or len(done) == removed:
            raise OSError(errno.EIO, "the log server ends")
        done.append(given)
        really(*given)

    with monkeypatch.context() as patch:
        if removed is None:
            patch.setattr(StreamStore, "_make_only", broken)
        else:
            patch.setattr(Segment, "set_aside", broken)
        with pytest.raises(UnavailableError, match="1 replicas are in sync"):
            attempt(here, 2)
    assert (folder / WIPING).exists()
    assert any(folder.glob("segment-*")) == (removed is not None)
    here.stop(1)
    here.start(1)
    with OperatorReplica(here.listens[1]) as replica:
        (found,) = replica.replicas().replicas
    assert (found.state, found.syncing_from) == ("learning", here.server(0).log_server_id)
    assert "it was being wiped" in found.reason
    cut_short(here, monkeypatch)
    its = attempt(here, 2).streams[STREAM]
    assert len(its.members) == 2
    assert its.last.context.end == here.committed_end


def test_31_what_one_log_server_has_trimmed_is_promised_to_nobody(machines: Make) -> None:
    """The others have it still, and may be lost."""
    here = machines()
    for _ in range(3):
        here.write_on()
    version = here.repository._state.version
    lose_repository(here)
    with OperatorReplica(here.listens[1]) as replica:
        low = replica._call(m.TRIM, m.TrimRequest(STREAM, 3, version)).low_offset
    assert low == 3
    state = attempt(here)
    assert state.streams[STREAM].low_offset([]) == 3


def test_31_what_one_was_told_and_an_empty_version_of_another_do_not_stop_a_rebuild(
    machines: Make,
) -> None:
    """Each of the two has what the other one lacks, and the third is lost."""
    here = machines()
    here.write_on(2)
    lose_repository(here)
    here.wipe(2)
    tell(here.listens[0], STREAM, WalPosition(1, 1 << 40), system_id=5)
    commit_on(here, 1, 0)
    go_on(here, attempt(here, 2))


def test_31_a_rebuild_is_repeated_with_a_log_server_that_was_told_more(machines: Make) -> None:
    """The first attempt went on without it, and fenced the others."""
    here = machines()
    here.write_on(2)
    lose_repository(here)
    tell(here.listens[2], STREAM, WalPosition(1, 1 << 40), system_id=5)
    here.stop(2)
    attempt(here, 2)
    here.start(2)
    go_on(here, attempt(here))


def test_31_a_rebuild_is_repeated_with_a_log_server_that_missed_the_first_attempt(
    machines: Make,
) -> None:
    """It lacks the last commit, and of those that were fenced, one is lost."""
    here = machines()
    here.write_on(2)
    here.stop(2)
    here.write_on()
    lose_repository(here)
    attempt(here, 2)
    here.wipe(1)
    here.start(2)
    go_on(here, attempt(here, 1))


def fence_first(here: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that ends once one log server knows its fence: the one with the least id."""
    really = Rebuilder._fence
    fenced: list[str] = []

    def fence(
        self: Rebuilder, plan: RebuildPlan, stream: StreamPlan, log_server: str
    ) -> ReplicaStatus:
        if fenced:
            raise UnavailableError("the command ends")
        fenced.append(log_server)
        return really(self, plan, stream, log_server)

    with monkeypatch.context() as patch:
        patch.setattr(Rebuilder, "_fence", fence)
        with pytest.raises(UnavailableError, match="the command ends"):
            attempt(here)


def least_id(here: Machines) -> int:
    return min(range(3), key=lambda each: here.server(each).log_server_id)


def test_31_what_an_attempt_alone_has_fenced_returns_behind_another_one(
    machines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given up, and knew the newest version."""
    here = machines()
    here.write_on(2)
    lose_repository(here)
    first = least_id(here)
    for _ in range(50):
        commit_on(here, first, 0)
    fence_first(here, monkeypatch)
    here.stop(first)
    go_on(here, attempt(here, first))


def test_31_what_attempts_alone_have_fenced_takes_part_in_a_later_one(
    machines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows higher global offsets than those that went on without it, whose newest version it would refuse."""
    here = machines()
    here.write_on(2)
    lose_repository(here)
    first = least_id(here)
    fence_first(here, monkeypatch)
    fence_first(here, monkeypatch)
    here.stop(first)
    attempt(here, first)
    here.start(first)
    tell(here.listens[(first + 1) % 3], STREAM, WalPosition(1, 1 << 40), system_id=5)
    go_on(here, attempt(here))


def damage_newest(here: Machines, number: int, *, gone: bool = False) -> Durable:
    """Damage both of LMDB's meta pages of the newest segment, or remove it; return the state record of the one before."""
    folder = here.folder / f"log-server-{number}" / "streams" / STREAM
    *_, before, newest = sorted(folder.iterdir())
    data = newest / "data.mdb"
    with data.open("r+b") as file:
        for page in range(2):
            file.seek(page * os.sysconf("SC_PAGE_SIZE"))
            file.write(b"\xff" * 64)
    if gone:
        shutil.rmtree(newest)
    segment = Segment(before, 1)
    with segment.using(), segment.reading() as snapshot:
        state = snapshot.get(b"meta", b"state")
        assert state is not None
        return unpack_state(state, before)


@pytest.mark.parametrize("gone", [False, True], ids=["damaged", "gone"])
def test_31_a_damaged_member_counts_as_away_though_it_was_copied_once(
    machines: Make, gone: bool
) -> None:
    """The segment before its newest one was filled by that copy, and its record still says so."""
    here = machines(replicas=2, least=1)
    here.write_on(2)
    source, copied = here.members()
    here.stop(copied)
    here.segment_bytes = 1 << 18
    with here.open_writer() as writer:
        # A batch of a synchronization, which fills a segment, and is not the last one.
        writer.send([here.make.whole(rows=300, size=1000)], schemas=list(SCHEMAS.values()))
        assert writer.next_ack(20) is not None
        here.committed()
        here.write(writer)
    here.start(copied)
    wait_for(lambda: here.members() == [source, copied], 30, "both are in sync")
    here.stop(source)
    here.write_on()
    lose_repository(here)
    here.stop(copied)
    assert damage_newest(here, copied, gone=gone).syncing_from
    here.start(source)
    damaged = ("renamed to segment-", "was damaged and has been renamed")
    for reason in ("is missing", "is missing") if gone else damaged:
        # The first start renames the segment; the next one opens the one before it.
        here.start(copied)
        with pytest.raises(InvalidReplicaError, match="1 others may have been all members"):
            attempt(here)
        with OperatorReplica(here.listens[copied]) as replica:
            (found,) = replica.replicas().replicas
        assert (found.state, found.syncing_from) == ("learning", "")
        assert reason in found.reason
        here.stop(copied)


def synchronize(here: Machines, source: int, to: int) -> ReplicaStatus:
    """As a repository does that has been deposed, and does not know it."""
    with OperatorReplica(here.listens[source]) as replica:
        address = f"grpc://{here.listens[to]}"
        return replica._call(m.SYNCHRONIZE, m.SynchronizeRequest(STREAM, address, throttled=False))


def replaced_by(here: Machines, number: int) -> str:
    with OperatorReplica(here.listens[number]) as replica:
        (found,) = replica.replicas().replicas
        return found.replaced_by


def test_31_what_a_deposed_leader_has_put_in_place_of_damage_counts_as_away(
    machines: Make,
) -> None:
    """It copies from one that was left out, and has it sealed: in front of the last commit, of which nobody else is left."""
    here = machines()
    here.segment_bytes = 1
    here.write_on(2)
    here.stop(0)
    here.write_on(2)
    assert here.members() == [1, 2]
    lose_repository(here)
    here.stop(2)
    damage_newest(here, 2)
    here.start(0)
    here.start(2)
    assert synchronize(here, 0, 2).state == "sealed"
    here.wipe(1)
    for _ in range(2):
        with pytest.raises(InvalidReplicaError, match="1 valid replicas were found, and the 2"):
            attempt(here, 1)
        here.stop(2)
        here.start(2)


def test_31_a_replica_counts_again_once_it_is_known_to_be_a_member(machines: Make) -> None:
    """Its entries were lost, and have been replaced; another log server is lost then, with the repository."""
    here = machines()
    here.write_on(2)
    here.stop(2)
    shutil.rmtree(here.folder / "log-server-2" / "streams" / STREAM)
    here.start(2)
    here.write_on()
    wait_for(lambda: here.members() == [0, 1, 2], 30, "all are in sync")
    wait_for(lambda: not replaced_by(here, 2), 30, "it knows that it is a member")
    here.write_on()
    lose_repository(here)
    here.wipe(1)
    go_on(here, attempt(here, 1))
