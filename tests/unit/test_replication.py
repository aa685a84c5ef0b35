"""A stream on several log servers, over their ports: seals, members, replicas that leave and come back."""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.log_entries import SCHEMAS, EntryMaker
from tests.support.waiting import wait_for
from walsender_bridge.capture.session_setup import settle
from walsender_bridge.change_log import protocol
from walsender_bridge.change_log.append_writer import AppendWriter
from walsender_bridge.change_log.client import LogClient, ReplicaClient, StreamWriter
from walsender_bridge.change_log.log_server_messages import CREATE, ReportAnswer
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.repository import membership, replication
from walsender_bridge.change_log.repository.core import StreamSealed
from walsender_bridge.change_log.repository.log_server_link import LogServerLink
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.change_log.restart import build_restart
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import FencedError, StreamSealedError, TusklineError, UnavailableError
from walsender_bridge.postgres.protocol.lsn import WalPosition

STREAM = "shop"


class Machines:
    """Three log servers and a repository, each of which can be stopped, started again, and lose its disk."""

    def __init__(self, folder: Path, policy: ReplicationPolicy) -> None:
        self.folder = folder
        self.policy = policy
        self.segment_bytes = 1 << 16
        self.listens = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        self.servers: list[ReplicaServer | None] = [None] * 3
        for number in range(3):
            self.start(number)
        self.start_repository()
        self.log = LogClient(self.repository.address)
        self.failed: set[str] = set()
        self.make = EntryMaker()
        self.committed_end = 1

    def start_repository(self, tick: float = 0.02) -> None:
        self.repository = RepositoryServer(
            self.folder / "repository",
            "127.0.0.1:0",
            log_servers=self.listens,
            tick=tick,
            replication=self.policy,
        )
        self.repository.start()

    def start(self, number: int) -> None:
        place = self.folder / f"log-server-{number}"
        self.servers[number] = ReplicaServer(
            place, self.listens[number], segment_bytes=self.segment_bytes
        )

    def server(self, number: int) -> ReplicaServer:
        """One that runs."""
        found = self.servers[number]
        assert found is not None
        return found

    def stop(self, number: int) -> None:
        server, self.servers[number] = self.servers[number], None
        if server is not None:
            server.stop()

    def wipe(self, number: int) -> None:
        self.stop(number)
        shutil.rmtree(self.folder / f"log-server-{number}")

    def close(self) -> None:
        self.log.close()
        self.repository.stop()
        for number in [*range(3)]:
            self.stop(number)

    # -- writing and reading ------------------------------------------------------------------------

    def open_writer(self) -> StreamWriter:
        """As capture does it: until it succeeds."""

        def opened() -> StreamWriter | None:
            with contextlib.suppress(UnavailableError):
                return self.log.open_writer(STREAM, self.failed)
            return None

        writer = wait_for(opened, 30, "a writer")
        self.make.follow(writer.status)
        return writer

    def write(self, writer: StreamWriter, count: int = 1) -> None:
        """Write transactions, each acknowledged."""
        for _ in range(count):
            writer.send([self.make.whole()], schemas=list(SCHEMAS.values()))
            assert writer.next_ack(20) is not None

    def write_on(self, count: int = 1) -> None:
        """Write that many transactions at least, with a new writer after each error."""
        while count:
            with contextlib.suppress(UnavailableError), self.open_writer() as writer:
                before = writer.status.committed_end
                try:
                    self.write(writer, count)
                finally:
                    self.committed()
                count -= self.end() - before
        self.committed()

    def committed(self) -> int:
        """Wait until everything that is written is committed. None of it may be missing later."""
        version = self.log.barrier({}, 20)
        self.committed_end = max(self.committed_end, self.end())
        return version

    def end(self) -> int:
        return self.log.status().streams[STREAM].end_offset

    def members(self) -> list[int]:
        """The numbers of the log servers that are in sync."""
        state = self.repository._state
        known = [state.log_servers[each] for each in state.streams[STREAM].members]
        return sorted(self.listens.index(each.removeprefix("grpc://")) for each in known)

    def entries(self, number: int) -> list[tuple[int, int, int, bytes]]:
        with ReplicaClient(self.listens[number]) as replica:
            status = replica.stream_status(STREAM)
            found = replica.read(STREAM, status.low_offset, status.committed_end)
            return [(e.offset, e.version, e.global_offset, bytes(e.data)) for e in found]

    def entries_or_none(self, number: int) -> list[tuple[int, int, int, bytes]] | None:
        """None while it cannot be read."""
        with contextlib.suppress(TusklineError):
            return self.entries(number)
        return None

    def all_equal(self) -> None:
        """All log servers are in sync, and hold the same."""
        wait_for(lambda: self.members() == [0, 1, 2], 30, "all replicas are in sync")
        self.committed()
        first = wait_for(
            lambda: len(found := self.entries(0)) == self.end() - 1 and found, 20, "the entries"
        )
        assert [self.entries(1), self.entries(2)] == [first, first]
        assert [each[0] for each in first] == [*range(1, len(first) + 1)]
        assert len({data for *_, data in first}) == len(first) >= self.committed_end - 1


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., Machines]]:
    made: list[Machines] = []

    def make(*, replicas: int = 3, least: int = 2, silence: float = 60.0) -> Machines:
        policy = ReplicationPolicy(replicas, min(replicas, least), silence)
        made.append(Machines(tmp_path, policy))
        made[0].log.create_stream(STREAM)
        return made[0]

    yield make
    for each in made:
        each.close()


def test_an_append_is_on_every_replica_before_it_is_acknowledged(machines) -> None:
    here = machines()
    with here.open_writer() as writer:
        here.write(writer, 5)
        for number in range(3):
            with ReplicaClient(here.listens[number]) as replica:
                assert replica.stream_status(STREAM).end_offset == 6
    here.all_equal()


def test_23_a_writer_goes_on_without_a_log_server_that_has_ended(machines) -> None:
    here = machines()
    with here.open_writer() as writer:
        here.write(writer, 3)
        here.committed()
        here.stop(1)
        with pytest.raises(UnavailableError, match=f"{here.listens[1]} failed"):
            here.write(writer, 100)
    assert here.failed == {f"grpc://{here.listens[1]}"}
    began = time.monotonic()
    here.write_on(20)
    assert time.monotonic() - began < 15, "not as long as a silence"
    assert here.members() == [0, 2]
    here.start(1)
    here.write_on(5)
    here.all_equal()


def test_23_a_log_server_that_lost_its_disk_gets_everything_again(machines) -> None:
    here = machines()
    here.write_on(60)
    here.wipe(2)
    here.write_on(20)
    assert here.members() == [0, 1]
    here.start(2)
    here.write_on(5)
    here.all_equal()
    assert len(here.repository._state.streams[STREAM].replicas) == 3


def test_39_a_synchronization_ends_with_the_machine_that_it_was_for(machines, monkeypatch) -> None:
    """It vanishes in the middle: it is tried again once it is back, not after the longest time of a call."""
    here = machines()
    here.write_on(60)
    here.wipe(2)
    here.write_on(1)
    assert here.members() == [0, 1]
    begun, over = threading.Event(), threading.Event()
    take, report = HostedReplica.sync_replicate, ReplicaServer.report

    def vanishes(self: HostedReplica, *arguments: object) -> object:
        begun.set()
        assert over.wait(60)
        return take(self, *arguments)  # type: ignore[arg-type]

    def silent(self: ReplicaServer) -> object:
        if self is here.servers[2] and begun.is_set() and not over.is_set():
            raise UnavailableError("it has vanished")
        return report(self)

    monkeypatch.setattr(HostedReplica, "sync_replicate", vanishes)
    monkeypatch.setattr(ReplicaServer, "report", silent)
    try:
        here.start(2)
        assert begun.wait(20)
        running = here.repository._replication._running
        assert len(running) == 1
        wait_for(lambda: not running, 20, "the end of the synchronization")
        here.write_on(1)
    finally:
        over.set()
    here.all_equal()


def test_not_fewer_than_min_replicas_go_on(machines) -> None:
    here = machines(least=2)
    here.write_on(3)
    here.stop(0)
    here.write_on(1)
    with here.open_writer() as writer:
        here.stop(1)
        with pytest.raises(UnavailableError, match="failed"):
            here.write(writer, 100)
    with pytest.raises(UnavailableError, match="1 of 2 replicas can be written, and 2 are needed"):
        here.log.open_writer(STREAM, here.failed)
    here.start(1)
    here.write_on(2)
    here.start(0)
    here.all_equal()


def test_a_replica_that_is_silent_is_left_out_without_a_writer(machines) -> None:
    here = machines(silence=0.5)
    here.write_on(3)
    here.stop(2)
    wait_for(lambda: here.members() == [0, 1], 20, "the silent one is left out")
    here.committed()
    here.start(2)
    here.all_equal()
    here.write_on(2)
    here.all_equal()


def test_an_append_is_built_once_for_all_replicas(machines, monkeypatch) -> None:
    here = machines()
    here.write_on(1)
    built: list[list[bytes]] = []
    binary_array = protocol.binary_array

    def counted(values: Sequence[bytes]) -> pa.Array:
        built.append([*values])
        return binary_array(values)

    monkeypatch.setattr(protocol, "binary_array", counted)
    with here.open_writer() as writer:
        assert len(writer._writers) > 1
        entry = here.make.whole(size=1000)
        writer.send([entry], schemas=list(SCHEMAS.values()))
        assert writer.next_ack(20) is not None
    assert sum(entry in values for values in built) == 1


def test_21_tails_of_two_writers_never_meet(machines) -> None:
    """One log server got what the others did not; the next writer's entries are other ones."""
    here = machines()
    here.write_on(3)
    first, end = here.log.writer_term(STREAM), here.end()
    with AppendWriter(here.listens[0], STREAM, first.term, 10) as alone:
        here.make.follow(alone.status)
        alone.send([here.make.whole(size=77)], schemas=list(SCHEMAS.values()))
        assert alone.next_ack(10) is not None
        with pytest.raises(UnavailableError, match=f"the replicas end at {end} and {end + 1}"):
            StreamWriter(STREAM, first.term, first.addresses, set(), 10)
        here.write_on(3)
        alone.send([], gate_lsn=0)
        with pytest.raises(FencedError):
            alone.next_ack(10)
    here.all_equal()


def test_a_writer_of_before_a_seal_is_fenced(machines) -> None:
    here = machines()
    with here.open_writer() as old:
        here.write(old)
        here.log.writer_term(STREAM)
        with pytest.raises(UnavailableError, match="the stream was sealed"):
            here.write(old, 3)
    assert here.failed == set(), "no log server did"
    with here.open_writer() as old:
        here.open_writer().close()
        with pytest.raises(FencedError, match="newer writer"):
            here.write(old, 3)
    with pytest.raises(FencedError, match="older than"):
        StreamWriter(STREAM, old.term, [f"grpc://{each}" for each in here.listens], set(), 10)


def test_a_repository_that_ends_while_a_stream_is_sealed_seals_it_again(
    machines, monkeypatch
) -> None:
    here = machines()
    here.write_on(3)
    with monkeypatch.context() as patch:
        patch.setattr(replication, "_begun", None)  # nothing is sealed behind the record
        with pytest.raises(TusklineError):
            here.log.writer_term(STREAM)
    assert here.repository._state.streams[STREAM].sealed
    here.log.close()
    here.repository.stop()
    here.start_repository()
    here.log = LogClient(here.repository.address)
    here.write_on(3)
    here.all_equal()


def test_a_stream_of_one_log_server_gets_others_while_it_is_written(machines) -> None:
    here = machines(replicas=1)
    with here.open_writer() as writer:
        here.write(writer, 5)
        here.committed()
        assert here.members() == [0]
        here.repository.stop()
        here.log.close()
        here.policy = ReplicationPolicy(3, 2)
        here.start_repository()
        here.log = LogClient(here.repository.address)
        wait_for(lambda: here.members() == [0, 1, 2], 30, "it has others")
        with pytest.raises(StreamSealedError):
            here.write(writer)
    here.write_on(3)
    here.all_equal()
    assert here.end() > 8


def test_a_report_that_arrives_late_commits_nothing_that_was_cut_off(machines, monkeypatch) -> None:
    """It was asked for before capture settled the stream, and its answer was held up, as by another stream's slow disk."""
    here = machines(replicas=1)
    really = ReplicaServer.report
    held, later = threading.Event(), list[ReportAnswer]()

    def report(self: ReplicaServer) -> ReportAnswer:
        answer = really(self)
        if not held.is_set() and any(each.length for each in answer.reports):
            held.set()
            time.sleep(2)
        elif held.is_set() and answer.reports:
            later.append(answer)
        return answer

    with here.open_writer() as writer:
        here.write(writer, 2)
        here.committed()
        monkeypatch.setattr(ReplicaServer, "report", report)
        here.write(writer)
        assert held.wait(10)
    # As capture does on a server that lacks the last transaction.
    with here.open_writer() as writer, ReplicaClient(writer.address) as replica:
        settle(writer, here.log, 10)
        end = replica.stream_status(STREAM).committed_end
        replica.cut_tail(STREAM, writer.term, end)
    # Its log server is asked again when the answer has come.
    wait_for(lambda: len(later) > 2, 10, "the late report has arrived")
    assert here.end() == end
    with here.open_writer() as writer:
        here.make.lsn += 0x5000
        here.write(writer)
        here.log.barrier({STREAM: here.make.end_lsn}, 10)
    assert here.end() == end + 1


def test_a_replica_that_was_out_learns_what_the_slot_was_confirmed_to(machines) -> None:
    """Nothing was written meanwhile, so it has all entries."""
    here = machines()
    here.write_on(2)
    here.stop(2)
    with contextlib.suppress(UnavailableError), here.open_writer() as writer:
        writer.send([], confirm_to=WalPosition(1, 777), system_id=5)
        assert writer.next_ack(10) is not None
    wait_for(lambda: here.members() == [0, 1], 20, "it is left out")
    with here.open_writer() as writer:
        writer.send([], confirm_to=WalPosition(1, 999), system_id=5)
        assert writer.next_ack(10) is not None
    here.start(2)
    wait_for(lambda: here.members() == [0, 1, 2], 20, "it is in sync")
    here.open_writer().close()
    with ReplicaClient(here.listens[2]) as replica:
        status = replica.stream_status(STREAM)
    assert (status.confirmed_to, status.system_id) == (WalPosition(1, 999), 5)


def test_23_a_replica_knows_what_the_slot_was_confirmed_to_before_it_is_a_member(machines) -> None:
    """Nobody writes when it is taken back, and it may be the only one left for the next writer."""
    here = machines()
    here.write_on(2)
    here.stop(2)
    wait_for(lambda: here.open_writer().close() or here.members() == [0, 1], 20, "it is left out")
    with here.open_writer() as writer:
        writer.send([], confirm_to=WalPosition(1, 999), system_id=5)
        assert writer.next_ack(10) is not None
    here.start(2)
    wait_for(lambda: here.members() == [0, 1, 2], 20, "it is in sync")
    with ReplicaClient(here.listens[2]) as replica:
        status = replica.stream_status(STREAM)
    assert (status.confirmed_to, status.system_id) == (WalPosition(1, 999), 5)
    here.all_equal()


def test_a_stream_that_stays_sealed_under_a_living_writer_goes_on(machines, monkeypatch) -> None:
    monkeypatch.setattr(membership, "SEALED_SECONDS", 1.0)
    here = machines()
    with here.open_writer() as writer:
        here.write(writer)
        with here.repository._changed:
            term = here.repository._state.streams[STREAM].term + 1
            here.repository._record(StreamSealed(STREAM, term))
        wait_for(lambda: not here.repository._state.streams[STREAM].sealed, 20, "it is unsealed")
        with pytest.raises(StreamSealedError):
            here.write(writer)
    here.write_on(1)
    here.all_equal()


def test_of_two_members_one_is_gone_for_good_and_a_third_returns(machines) -> None:
    here = machines()
    here.write_on(3)
    here.stop(2)
    here.write_on(2)
    assert here.members() == [0, 1]
    here.stop(1)
    here.start(2)
    wait_for(lambda: here.members() == [0, 2], 30, "the third one is in sync")
    here.write_on(2)
    here.start(1)
    here.all_equal()


def test_a_member_that_lost_its_streams_while_no_other_may_be_left_out_is_mended(machines) -> None:
    here = machines(silence=1.0)
    here.write_on(3)
    here.stop(2)
    here.write_on(2)
    here.stop(1)
    # Its identity is kept.
    shutil.rmtree(here.folder / "log-server-1" / "streams")
    here.start(1)
    everything = here.end() - 1
    wait_for(lambda: len(here.entries_or_none(1) or ()) == everything, 30, "it has it all again")
    here.write_on(2)
    here.start(2)
    here.all_equal()


@pytest.mark.parametrize("is_left_out", [True, False])
def test_a_stream_of_several_log_servers_goes_on_with_a_single_one(machines, is_left_out) -> None:
    """The others were removed from the configuration, before or after they were left out."""
    here = machines(least=1, silence=0.5)
    here.write_on(3)
    here.stop(1)
    here.stop(2)
    if is_left_out:
        wait_for(lambda: here.members() == [0], 30, "the others are left out")
    here.log.close()
    here.repository.stop()
    here.listens = here.listens[:1]
    here.policy = ReplicationPolicy(1, 1, 0.5)
    if not is_left_out:
        # As the repository knows them, two members are still there: they have to be left out first.
        here.listens.append(f"127.0.0.1:{free_port()}")
    here.start_repository()
    here.log = LogClient(here.repository.address)
    here.write_on(2)
    assert here.end() >= 6


def test_a_log_server_that_ends_while_a_stream_is_created_is_left_out(
    machines, monkeypatch
) -> None:
    here = machines()
    really = LogServerLink.call
    away = here.listens[0]

    def call(self: LogServerLink, action, request, **options):
        if action is CREATE and self.address.endswith(away):
            raise UnavailableError("service does not answer")
        return really(self, action, request, **options)

    monkeypatch.setattr(LogServerLink, "call", call)
    here.log.create_stream("second")
    with here.log.open_writer("second") as writer:
        make = EntryMaker()
        writer.send([make.whole()], schemas=list(SCHEMAS.values()))
        assert writer.next_ack(10) is not None
        here.log.barrier({"second": make.end_lsn}, 20)


def test_a_restart_that_a_seal_removes_leaves_nothing_behind(machines) -> None:
    """Neither in those that wrote it nor in one that was synchronized with them meanwhile."""
    here = machines()
    with here.open_writer() as writer:
        here.write(writer, 2)
        writer.send([], confirm_to=WalPosition(1, 0x5000), system_id=7)
        assert writer.next_ack(10) is not None
        here.committed()
    here.stop(2)
    here.wipe(2)
    wait_for(lambda: here.log.open_writer(STREAM, here.failed).close() is None, 20, "a writer")
    source = here.servers[0]
    assert source is not None
    replica = source.replica(STREAM)
    session, status = replica.open_writer(replica.status().term)
    entry = build_restart(status.last_crc)
    replica.append(session, [entry], [], WalPosition(1, 0x90000), 0, 99)
    assert replica.status().system_id == 99
    offer = replica.sync_offer("k")
    assert (offer.durable.confirmed_to, offer.durable.system_id) == (WalPosition(1, 0x5000), 7)
    with here.open_writer() as writer:
        assert writer.status.confirmed_to == WalPosition(1, 0x5000)
        assert writer.status.system_id == 7
    assert replica.status().system_id == 7
