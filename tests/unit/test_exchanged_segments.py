"""Segments at the places of others: named, kept aside, never served, and replaced from another replica."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from tests.support import stored_log
from tests.support.log_entries import batches
from walsender_bridge.change_log.log_server_messages import CreateRequest
from walsender_bridge.change_log.protocol import MAX_COUNT
from walsender_bridge.change_log.replica import identity, replica_ids
from walsender_bridge.change_log.replica.disk import RecoveryOutcome
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.stored_replica import DataDirectoryLock
from walsender_bridge.errors import CorruptError, InvalidReplicaError


class Servers:
    """Log servers, of which one runs at a time."""

    def __init__(self) -> None:
        self._running: ReplicaServer | None = None

    def __call__(self, data_dir: Path) -> ReplicaServer:
        self.stop()
        self._running = ReplicaServer(data_dir, "127.0.0.1:0")
        return self._running

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None


@pytest.fixture
def start() -> Iterator[Servers]:
    """Starts the log server of a data directory."""
    servers = Servers()
    yield servers
    servers.stop()


def segments(data_dir: Path, stream: str = "shop") -> list[Path]:
    return sorted((data_dir / "streams" / stream).glob("segment-*"))


def exchange(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def check_kept_aside(server: ReplicaServer, data_dir: Path, stream: str, what: str) -> None:
    replica = server.replica(stream)
    outcome, reason = replica.outcome
    assert outcome == RecoveryOutcome.INVALID
    assert what in reason
    assert replica.report("k") is None
    with pytest.raises((CorruptError, InvalidReplicaError)):
        [*batches(replica, 1, 3)]
    assert any(".corrupt-" in path.name for path in segments(data_dir, stream))


def test_newest_segments_of_two_streams_that_were_exchanged_are_kept_aside(
    tmp_path: Path, start: Servers
) -> None:
    stored_log.make(tmp_path, stream="bank")
    stored_log.make(tmp_path, commits=9, first_global=100)
    exchange(segments(tmp_path, "bank")[-1], segments(tmp_path)[-1])
    with DataDirectoryLock(tmp_path) as offline:
        for replica in offline.replicas():
            with pytest.raises(CorruptError, match="a segment of stream"):
                replica.found()
    server = start(tmp_path)
    check_kept_aside(server, tmp_path, "bank", "it is a segment of stream shop")
    check_kept_aside(server, tmp_path, "shop", "it is a segment of stream bank")
    server = start(tmp_path)
    check_kept_aside(server, tmp_path, "bank", "it is a segment of stream shop")


def test_an_older_segment_in_the_place_of_the_newest_never_becomes_the_state(
    tmp_path: Path, start: Servers
) -> None:
    stored_log.make(tmp_path, commits=40, segment_bytes=100_000)
    older, newest = segments(tmp_path)[-2:]
    exchange(older, newest)
    check_kept_aside(start(tmp_path), tmp_path, "shop", "its first entry is 1: it is another one")


def synchronize(folder: Path, replica: HostedReplica) -> None:
    """From the replica in that folder."""
    source = HostedReplica(folder)
    source.recover()
    source.seal(source.status().committed_end, source.status().term + 1, MAX_COUNT)
    offer = source.sync_offer("a")
    for batch in source.sync_batches(offer, replica.sync_init(offer, "log")):
        replica.sync_replicate("a", batch)
    source.close()


@pytest.fixture(params=["log", "another log"])
def two(request: pytest.FixtureRequest, tmp_path: Path, start: Servers) -> tuple[Path, Path]:
    """The data directories of two log servers, of one log or two, with a stream of the same name; each has run."""
    made = [
        stored_log.make(tmp_path / name, commits=n, log_id=log_id)
        for name, n, log_id in (("own", 9, "log"), ("other", 6, request.param))
    ]
    for data_dir in made:
        start(data_dir)
    start.stop()
    return made[0], made[1]


def test_a_segment_of_another_replica_is_kept_aside_and_replaced(
    two: tuple[Path, Path], start: Servers, tmp_path: Path
) -> None:
    own, other = two
    shutil.copytree(segments(own)[-1], tmp_path / "source" / "shop" / segments(own)[-1].name)
    shutil.rmtree(segments(own)[-1])
    shutil.copytree(segments(other)[-1], own / "streams" / "shop" / segments(other)[-1].name)
    server = start(own)
    check_kept_aside(server, own, "shop", "it is a segment of another replica")
    synchronize(tmp_path / "source" / "shop", server.replica("shop"))
    server = start(own)
    assert server.replica("shop").outcome[0] == RecoveryOutcome.VALID
    assert server.replica("shop").status().version == 9


def test_the_segments_of_a_replica_that_was_synchronized_are_known_at_once(
    two: tuple[Path, Path], start: Servers, tmp_path: Path
) -> None:
    own, other = two
    server = start(tmp_path / "new")
    server.learn(CreateRequest("shop", "log"))
    synchronize(own / "streams" / "shop", server.replica("shop"))
    start.stop()
    shutil.rmtree(segments(tmp_path / "new")[-1])
    foreign = segments(other)[-1]
    shutil.copytree(foreign, tmp_path / "new" / "streams" / "shop" / foreign.name)
    server = start(tmp_path / "new")
    check_kept_aside(server, tmp_path / "new", "shop", "it is a segment of another replica")


def test_ids_that_are_lost_or_of_another_log_server_accuse_no_segment(
    two: tuple[Path, Path], start: Servers
) -> None:
    own, other = two
    (own / replica_ids.NAME).unlink()
    assert start(own).replica("shop").outcome[0] == RecoveryOutcome.VALID
    # The streams and the identity of one log server are put back onto a disk on which another one had begun.
    shutil.rmtree(other / "streams")
    shutil.copytree(own / "streams", other / "streams")
    shutil.copy(own / identity.NAME, other / identity.NAME)
    assert start(other).replica("shop").outcome[0] == RecoveryOutcome.VALID
    (own / replica_ids.NAME).write_bytes(b"{")
    assert start(own).replica("shop").outcome[0] == RecoveryOutcome.VALID


def test_a_segment_of_an_earlier_version_gets_its_replicas_id(
    tmp_path: Path, start: Servers
) -> None:
    stored_log.make(tmp_path)
    (newest,) = segments(tmp_path)
    with lmdb.open(str(newest), max_dbs=5) as env, env.begin(write=True) as transaction:
        assert transaction.delete(b"replica", db=env.open_db(b"meta", transaction))
    server = start(tmp_path)
    its = server.replica("shop").replica_id
    assert its
    start.stop()
    with lmdb.open(str(newest), max_dbs=5) as env, env.begin() as transaction:
        assert transaction.get(b"replica", db=env.open_db(b"meta", transaction)) == its.encode()
