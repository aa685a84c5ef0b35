"""Writers with terms that no repository gave, at one of three log servers: they delay the stream, and keep nobody out."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.log_entries import append_to
from tests.support.waiting import wait_for
from tests.unit.test_replication import STREAM, Machines
from walsender_bridge.change_log.client import LogClient, ReplicaClient
from walsender_bridge.change_log.log_server_messages import (
    COMMIT,
    SEAL,
    CommitRequest,
    SealRequest,
)
from walsender_bridge.change_log.protocol import (
    REBUILD_GAP,
    TERMS_AHEAD,
    CommitContext,
    IssuedCommit,
)
from walsender_bridge.change_log.repository.log_server_link import LogServerLink
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.change_log.repository.replication import Replication
from walsender_bridge.errors import DivergedError, InvalidReplicaError


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path, ReplicationPolicy(3, 3, 60.0))
    found.log.create_stream(STREAM)
    yield found
    found.close()


def claim(here: Machines, number: int, ahead: int) -> None:
    """Open a writer there with a term that is so far ahead of the replica's own."""
    with ReplicaClient(here.listens[number]) as replica:
        append_to(replica, STREAM, replica.stream_status(STREAM).term + ahead).close()


@pytest.mark.parametrize("times", [1, 3])
def test_38_a_forged_term_does_not_seal_the_stream_for_good(here: Machines, times: int) -> None:
    """All three have to be sealed, and one of them was never, so a writer may have raised its term."""
    for _ in range(times):
        claim(here, 0, TERMS_AHEAD)
    here.write_on(3)
    here.all_equal()


def test_38_once_sealed_a_replica_takes_no_higher_term(here: Machines) -> None:
    here.write_on(3)
    for ahead in (1, TERMS_AHEAD):
        with pytest.raises(InvalidReplicaError, match="is not that of the last seal"):
            claim(here, 1, ahead)
    with here.open_writer() as writer:
        here.write(writer, 3)
    here.all_equal()


def test_31_a_repository_that_a_replica_is_ahead_of_seals_and_trims_no_stream(
    here: Machines,
) -> None:
    """The log was rebuilt without this repository: its seals would stop the writer of the new one."""
    here.write_on(3)
    link = LogServerLink(here.listens[0])
    try:
        end, term = here.end(), here.repository._state.streams[STREAM].term
        fence = CommitContext(REBUILD_GAP, end, REBUILD_GAP, 0)
        link.call(COMMIT, CommitRequest({STREAM: (IssuedCommit(fence),)}, 0))
        wait_for(lambda: "a" if here.repository._noted.diverged else "", 20, "its report")
        with pytest.raises(DivergedError):
            here.log.open_writer(STREAM)
        with pytest.raises(DivergedError):
            here.repository._decided(STREAM, end)
        assert here.repository._state.streams[STREAM].term == term
    finally:
        link.close()


def test_38_a_replica_that_a_stranger_writes_to_is_taken_back(tmp_path: Path) -> None:
    """It is left out, sealed, and opened again with the term that it has by somebody who is not the writer."""
    here = Machines(tmp_path, ReplicationPolicy(3, 2, 60.0))
    try:
        here.log.create_stream(STREAM)
        here.write_on(3)
        here.stop(2)
        here.write_on(3)
        assert here.members() == [0, 1]
        here.repository.stop()
        here.start(2)
        term = here.repository._state.streams[STREAM].term
        with ReplicaClient(here.listens[2]) as replica:
            end = replica.stream_status(STREAM).committed_end
            replica._call(SEAL, SealRequest(STREAM, end, term, 0))
        claim(here, 2, 0)
        here.start_repository()
        here.log = LogClient(here.repository.address)
        wait_for(lambda: here.members() == [0, 1, 2], 30, "all replicas are in sync")
        here.write_on(3)
        here.all_equal()
    finally:
        here.close()


def test_38_a_silent_replica_with_a_high_term_is_taken_back_at_the_first_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its synchronization was interrupted, so it shows its term to nobody, and no seal below that makes it a member."""
    failures = []
    monkeypatch.setattr(Replication, "_not_taken_back", lambda *found: failures.append(found))
    here = Machines(tmp_path, ReplicationPolicy(3, 2, 60.0))
    try:
        here.log.create_stream(STREAM)
        here.write_on(3)
        here.stop(2)
        here.write_on(3)
        here.repository.stop()
        here.start(2)
        source, replica = (here.server(each).replica(STREAM) for each in (0, 2))
        status = replica.status()
        replica.seal(status.committed_end + 1, status.term + 1000, status.version)
        replica.sync_init(source.sync_offer("interrupted"), status.log_id)
        # No report comes between its synchronization and the seal.
        here.start_repository(tick=5.0)
        here.log = LogClient(here.repository.address)
        wait_for(lambda: here.members() == [0, 1, 2], 30, "all replicas are in sync")
        assert not failures
    finally:
        here.close()
