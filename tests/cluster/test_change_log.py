"""The change log as processes: killed under load, restarted, trimmed, fenced, forced."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pyarrow as pa
import pytest
from pyarrow import flight

from tests.support.child import run_child, start_child
from tests.support.log_entries import SCHEMAS, EntryMaker
from tests.support.suspended import suspend
from walsender_bridge.change_log import entry
from walsender_bridge.change_log.actions import MAX_REQUEST_BYTES, VERSION, Action, Empty
from walsender_bridge.change_log.append_writer import AppendWriter
from walsender_bridge.change_log.client import LogClient, ReplicaClient, StreamWriter
from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import (
    BehindError,
    ConfigError,
    DeadlineError,
    FencedError,
    MalformedMessageError,
    NotSupportedError,
    TrimmedError,
    TusklineError,
    UnavailableError,
    UnknownStreamError,
    UsageError,
)
from walsender_bridge.postgres.protocol.lsn import WalPosition

ROOT = Path(__file__).resolve().parent.parent.parent
LOG_SERVER = "walsender_bridge.change_log.log_server"
STREAM = "shop"
PATIENCE = 30.0


def eventually(check: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Until `check` holds; services that are not up yet count as no."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(UnavailableError):
            if check():
                return
        time.sleep(0.02)
    pytest.fail(f"not within {seconds} s: {what}")


class Processes:
    """A log server and a repository, each a process."""

    def __init__(self, folder: Path, *, retention: float = 3600.0) -> None:
        self.folder = folder
        self.retention = retention
        self.log_server_listen = f"127.0.0.1:{free_port()}"
        self.listen = f"127.0.0.1:{free_port()}"
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start_log_server(self) -> None:
        self.running["log-server"] = start_child(
            LOG_SERVER,
            ReplicaServerSettings(self.folder / "log-server", self.log_server_listen, 16 << 20),
            log=self.folder / "log-server.log",
        )

    def start_repository(self) -> None:
        with (self.folder / "repository.log").open("ab") as log:
            self.running["repository"] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.support.repository_process"),
                    *(str(self.folder / "repository"), self.listen),
                    *(str(self.retention), self.log_server_listen),
                ],
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        for name in list(self.running):
            self.kill(name)

    def log(self) -> LogClient:
        return LogClient(self.listen)

    def replica(self) -> ReplicaClient:
        return ReplicaClient(self.log_server_listen)

    @property
    def disk_bytes(self) -> int:
        while True:
            # Segments may go while they are counted.
            with contextlib.suppress(FileNotFoundError):
                return sum(f.stat().st_size for f in (self.folder / "log-server").rglob("data.mdb"))


@contextlib.contextmanager
def running(folder: Path, *, retention: float = 3600.0) -> Iterator[Processes]:
    """Both processes, with the stream."""
    made = Processes(folder, retention=retention)
    try:
        made.start_log_server()
        made.start_repository()
        create(made, STREAM)
        yield made
    finally:
        made.stop()
        for path in folder.glob("*.log"):
            print(path.name, path.read_text()[-3000:], sep="\n")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with running(tmp_path) as made:
        yield made


def create(processes: Processes, *streams: str) -> None:
    def done() -> bool:
        with processes.log() as log:
            for stream in streams:
                log.create_stream(stream)
        return True

    eventually(done, "the streams are made")


@contextlib.contextmanager
def repository_here(processes: Processes) -> Iterator[RepositoryServer]:
    """The repository in this process, where it can be looked into."""
    processes.kill("repository")
    repository = RepositoryServer(
        processes.folder / "repository",
        processes.listen,
        log_servers=[processes.log_server_listen],
        retention=processes.retention,
    )
    repository.start()
    try:
        yield repository
    finally:
        repository.stop()


def answers(log: LogClient) -> None:
    """Until the repository is there."""
    eventually(lambda: log.status() is not None, "it answers")


def reaches(log: LogClient, end: int) -> None:
    """Until the stream is committed up to `end`."""
    eventually(lambda: log.status().streams[STREAM].end_offset == end, f"{end} is committed")


def open_writer(processes: Processes, make: EntryMaker, stream: str = STREAM) -> StreamWriter:
    opened: list[StreamWriter] = []

    def done() -> bool:
        with processes.log() as log:
            opened.append(log.open_writer(stream))
        return True

    eventually(done, "the writer is open")
    make.follow(opened[0].status)
    return opened[0]


def send(writer: StreamWriter, *entries: bytes) -> int:
    """Append, and wait for the acknowledgement; the durable end."""
    writer.send(entries, schemas=list(SCHEMAS.values()), confirm_to=WalPosition(1, 1))
    ack = writer.next_ack(PATIENCE)
    assert ack is not None
    return ack.durable_end_offset


# -- crashes ----------------------------------------------------------------------------------------


class Load:
    """Appends until it is stopped, over any crash of the log server, remembering what was acknowledged."""

    def __init__(self, processes: Processes, seed: int) -> None:
        self.processes = processes
        self.choose = random.Random(seed)
        self.acknowledged: dict[int, bytes] = {}
        self.count = 0
        self.stopping = threading.Event()
        self.restarts = 0
        self.problem: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.thread.join()

    def has_history(self) -> None:
        """Until more is acknowledged than now, and than what was on its way from a log server that is dead."""
        enough = self.count + 2
        eventually(lambda: self.count >= enough or self.problem is not None, "the load goes on")

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                with contextlib.suppress(UnavailableError):
                    self._session()
                self.restarts += 1
        except BaseException as error:
            self.problem = error

    def _session(self) -> None:
        make = EntryMaker(self.choose.randrange(2**32))
        with contextlib.closing(open_writer(self.processes, make)) as writer:
            end = writer.status.end_offset
            # Only an unfinished transaction may have gone.
            gone = [data for offset, data in self.acknowledged.items() if offset >= end]
            assert not any(entry.read_header(data).ends_transaction for data in gone)
            self.acknowledged = {o: d for o, d in self.acknowledged.items() if o < end}
            while not self.stopping.is_set():
                batch = [make.whole(self.choose.randint(1, 20), size=2000)]
                if self.choose.random() < 0.3:
                    batch += [make.start(size=100_000), make.middle(size=100_000), make.end()]
                writer.send(batch, schemas=list(SCHEMAS.values()))
                ack = writer.next_ack(PATIENCE)
                assert ack is not None
                start = ack.durable_end_offset - len(batch)
                self.acknowledged |= {start + i: data for i, data in enumerate(batch)}
                self.count += 1


def check_log(processes: Processes, acknowledged: dict[int, bytes]) -> None:
    """Everything acknowledged gets committed, and reads as it was sent, in one chain."""
    with processes.log() as log, processes.replica() as replica:
        last = max(acknowledged)
        eventually(lambda: log.status().streams[STREAM].end_offset > last, "all is committed")
        cut = log.status().streams[STREAM]
        entries = list(replica.read(STREAM, 1, cut.end_offset))
        assert [e.offset for e in entries] == list(range(1, cut.end_offset))
        assert [e.global_offset for e in entries] == list(range(1, cut.end_offset))
        versions = [e.version for e in entries]
        assert versions == sorted(versions)
        previous, lsn = 0, 0
        for each in entries:
            header = entry.verify(each.data, previous)
            previous = header.crc
            if header.last_end_lsn:
                assert header.first_end_lsn > lsn
                lsn = header.last_end_lsn
            if each.offset in acknowledged:
                assert bytes(each.data) == acknowledged[each.offset], f"entry {each.offset}"


def test_a_log_server_killed_under_load_loses_nothing_acknowledged(
    processes: Processes, seed: int
) -> None:
    choose = random.Random(seed)
    with Load(processes, seed) as load:
        for _ in range(4):
            load.has_history()
            time.sleep(choose.uniform(0.0, 0.7))
            processes.kill("log-server")
            processes.start_log_server()
        load.has_history()
    assert load.problem is None
    assert load.restarts >= 4
    check_log(processes, load.acknowledged)


def test_a_repository_killed_under_load_goes_on_where_it_was(
    processes: Processes, seed: int
) -> None:
    choose = random.Random(seed)
    seen = 0
    with Load(processes, seed) as load:
        for _ in range(4):
            load.has_history()
            time.sleep(choose.uniform(0.0, 0.7))
            with processes.log() as log:
                seen = max(seen, log.status().version)
            processes.kill("repository")
            processes.start_repository()
            with processes.log() as log:
                answers(log)
                assert log.status().version >= seen, "what was readable stays readable"
    assert load.problem is None
    check_log(processes, load.acknowledged)


def test_a_log_server_that_is_behind_gets_the_commits_it_missed(processes: Processes) -> None:
    make = EntryMaker()
    create(processes, "other")
    with contextlib.closing(open_writer(processes, make)) as writer, processes.log() as log:
        for _ in range(3):
            send(writer, make.whole())
            log.barrier({STREAM: make.end_lsn}, 10)
        version = log.status().version
        # Empty commits wait a second in memory: a kill loses them, and nothing else.
        for _ in range(3):
            log.barrier({}, 10)
        processes.kill("log-server")
        assert log.status().version >= version
        processes.start_log_server()
        forced = log.barrier({}, 10)
        with processes.replica() as replica:
            eventually(lambda: replica.stream_status(STREAM).version >= forced, "it caught up")
    with contextlib.closing(open_writer(processes, make)) as writer, processes.log() as log:
        send(writer, make.whole())
        log.barrier({STREAM: make.end_lsn}, 10)
        assert log.status().streams[STREAM].end_offset == 5


# -- versions and barriers --------------------------------------------------------------------------


def test_two_streams_share_versions_and_global_offsets(processes: Processes) -> None:
    create(processes, "north", "south")
    with processes.log() as log:
        makers = {name: EntryMaker(n) for n, name in enumerate(("north", "south"))}
        writers = {n: open_writer(processes, make, n) for n, make in makers.items()}
        for _ in range(10):
            for name, make in makers.items():
                send(writers[name], make.whole(), make.whole())
        version = log.barrier({n: make.end_lsn for n, make in makers.items()}, 10)
        status = log.status()
        assert status.version >= version == status.forced_version
        with processes.replica() as replica:
            places = sorted(
                (e.global_offset, e.version)
                for n in makers
                for e in replica.read(n, 1, status.streams[n].end_offset)
            )
        assert [place for place, _ in places] == list(range(1, 41))
        assert [v for _, v in places] == sorted(v for _, v in places)
        assert max(c.global_end for c in status.streams.values()) == 41
        for writer in writers.values():
            writer.close()


def test_ten_barriers_at_once_make_one_version(processes: Processes) -> None:
    make = EntryMaker()
    with (
        repository_here(processes) as repository,
        contextlib.closing(open_writer(processes, make)) as writer,
        processes.log() as log,
    ):
        send(writer, make.whole())
        log.barrier({STREAM: make.end_lsn}, 10)
        before = log.status().version
        position = make.end_lsn + 0x100
        versions: list[int] = []
        threads = [
            threading.Thread(target=lambda: versions.append(log.barrier({STREAM: position}, 20)))
            for _ in range(10)
        ]
        for thread in threads:
            thread.start()
        # One that came after the version would force another.
        eventually(lambda: len(repository.barriers.waiting) == 10, "all of them wait")
        assert versions == []
        send(writer, make.whole())
        for thread in threads:
            thread.join()
        assert set(versions) == {before + 1}
        assert log.status().forced_version == before + 1


def test_a_barrier_is_quick_and_names_what_it_waits_for(processes: Processes) -> None:
    make = EntryMaker()
    with contextlib.closing(open_writer(processes, make)) as writer, processes.log() as log:
        seconds = []
        for _ in range(15):
            send(writer, make.whole())
            start = time.monotonic()
            log.barrier({STREAM: make.end_lsn}, 10)
            seconds.append(time.monotonic() - start)
        assert sorted(seconds)[7] < 0.15
        with pytest.raises(DeadlineError, match=STREAM):
            log.barrier({STREAM: make.end_lsn + 1}, 0.3)
        with pytest.raises(UnknownStreamError):
            log.barrier({"nowhere": 1}, 0.3)


def test_a_commit_follows_an_append_within_a_tick(processes: Processes) -> None:
    make = EntryMaker()
    with contextlib.closing(open_writer(processes, make)) as writer, processes.log() as log:
        seconds = []
        for _ in range(10):
            end = send(writer, make.whole())
            start = time.monotonic()
            reaches(log, end)
            seconds.append(time.monotonic() - start)
        assert sorted(seconds)[5] < 0.3


def test_what_the_gate_holds_back_is_durable_and_not_committed(processes: Processes) -> None:
    make = EntryMaker()
    with contextlib.closing(open_writer(processes, make)) as writer, processes.log() as log:
        first = make.whole()
        open_until = make.end_lsn
        writer.send([first, make.whole()], schemas=list(SCHEMAS.values()), gate_lsn=open_until)
        ack = writer.next_ack(PATIENCE)
        assert ack is not None
        assert (ack.durable_end_offset, ack.durable_last_end_lsn) == (3, make.end_lsn)
        log.barrier({STREAM: open_until}, 10)
        assert log.status().streams[STREAM].end_offset == 2
        writer.send([], gate_lsn=make.end_lsn)
        ack = writer.next_ack(PATIENCE)
        assert ack is not None
        assert ack.committed_end_lsn == open_until
        log.barrier({STREAM: make.end_lsn}, 10)


# -- writers ----------------------------------------------------------------------------------------


def test_an_old_writer_is_fenced_while_it_writes(processes: Processes) -> None:
    make = EntryMaker()
    old = open_writer(processes, make)
    send(old, make.whole(), make.start())
    new = open_writer(processes, make)
    assert new.status.end_offset == 2
    assert new.status.term > old.term
    with pytest.raises(FencedError, match="newer writer"):
        send(old, make.whole())
    with pytest.raises(FencedError):
        old.send([])
    with pytest.raises(FencedError, match="older than"):
        AppendWriter(processes.log_server_listen, STREAM, old.term, 10)
    make.follow(new.status)
    assert send(new, make.whole()) == 3
    old.close()
    new.close()


def test_terms_grow_over_restarts_of_the_repository(processes: Processes) -> None:
    with processes.log() as log:
        terms = [log.writer_term(STREAM).term for _ in range(3)]
    processes.kill("repository")
    processes.start_repository()
    with processes.log() as log:
        answers(log)
        terms.append(log.writer_term(STREAM).term)
    assert terms == sorted(set(terms))


def test_a_wrong_entry_ends_the_writer_and_writes_nothing(processes: Processes) -> None:
    make = EntryMaker()
    with contextlib.closing(open_writer(processes, make)) as writer:
        send(writer, make.whole())
        writer.send([EntryMaker(5).middle()])
        with pytest.raises(TusklineError, match="follows"):
            writer.next_ack(PATIENCE)
    with contextlib.closing(open_writer(processes, make)) as writer:
        assert writer.status.end_offset == 2
        make.crc = writer.status.last_crc
        writer.send([rebuilt(make.whole())])
        with pytest.raises(MalformedMessageError, match="schema of relation"):
            writer.next_ack(PATIENCE)


def rebuilt(data: bytes) -> bytes:
    """The entry with schemas that nobody has sent."""
    header = entry.read_header(data)
    return entry.build_entry(
        entry.split_messages(entry.read_payload(data)),
        timeline=header.timeline,
        previous_crc=header.previous_crc,
        schema_hashes={r.relation_id: bytes(16) for r in header.relations},
    )


# -- reading and trimming ---------------------------------------------------------------------------


def test_a_stalled_reader_blocks_neither_trim_nor_its_disk(tmp_path: Path) -> None:
    with running(tmp_path, retention=1.0) as processes:
        make = EntryMaker()
        with contextlib.closing(open_writer(processes, make)) as writer, processes.log() as log:
            log.register_consumer("slow", None, 600.0)
            for _ in range(64):
                send(writer, make.whole(size=1 << 20))
            log.barrier({STREAM: make.end_lsn}, 10)
            stalled = processes.replica().read(STREAM, 1, 65)
            assert next(stalled).offset == 1
            # The consumer's lease holds everything, then ends.
            time.sleep(1.5)
            assert log.status().streams[STREAM].low_offset == 1
            log.register_consumer("slow", None, 0.2)
            for _ in range(136):
                send(writer, make.whole(size=1 << 20))
            log.barrier({STREAM: make.end_lsn}, 10)

            def trimmed() -> bool:
                log.barrier({}, 5)
                return log.status().streams[STREAM].low_offset > 180

            eventually(trimmed, "the log is trimmed")
            # 200 MB were written; what is left is at most two segments of 16 MB and a little.
            eventually(lambda: processes.disk_bytes < 50 << 20, "the disk is back")
            with pytest.raises(TrimmedError, match="has been trimmed; the first one available"):
                list(processes.replica().read(STREAM, 1, 65))
            # The reader that stalled gets what was sent to it, then learns the same.
            with pytest.raises(TrimmedError):
                list(stalled)


def test_a_consumers_published_version_holds_trim_there(tmp_path: Path) -> None:
    with running(tmp_path, retention=0.5) as processes:
        make = EntryMaker()
        with contextlib.closing(open_writer(processes, make)) as writer, processes.log() as log:
            log.register_consumer("lake", None, 60.0)
            versions = []
            for _ in range(5):
                send(writer, make.whole())
                versions.append(log.barrier({STREAM: make.end_lsn}, 10))
            time.sleep(1.0)
            assert log.status().streams[STREAM].low_offset == 1
            log.register_consumer("lake", versions[2], 60.0)
            eventually(lambda: log.status().streams[STREAM].low_offset == 4, "up to the consumer")
            time.sleep(0.7)
            assert log.status().streams[STREAM].low_offset == 4
            log.drop_consumer("lake")
            eventually(lambda: log.status().streams[STREAM].low_offset == 6, "all of it")
            with pytest.raises(UsageError, match="never issued"):
                log.register_consumer("lake", 10_000, 60.0)


def test_26_a_consumer_behind_the_trim_gets_its_error_and_another_one_reads_on(
    tmp_path: Path,
) -> None:
    """Both are in the middle of the same stream when it is trimmed; one of them has a lease there."""
    with running(tmp_path, retention=1.0) as processes:
        make = EntryMaker()
        sent: list[bytes] = []
        versions: list[int] = []
        with contextlib.closing(open_writer(processes, make)) as writer, processes.log() as log:
            log.register_consumer("fast", None, 600.0)
            for half in range(2):
                sent += [make.whole(size=1 << 20) for _ in range(20)]
                for each in sent[20 * half :]:
                    send(writer, each)
                versions.append(log.barrier({STREAM: make.end_lsn}, 10))
            # It was there, slower than the retention, and its lease has ended.
            log.register_consumer("slow", None, 0.1)
            with processes.replica() as fast, processes.replica() as slow:
                reading, late = fast.read(STREAM, 21, 41), slow.read(STREAM, 1, 41)
                found, behind = [bytes(next(reading).data)], [bytes(next(late).data)]
                log.register_consumer("fast", versions[0], 600.0)

                def trimmed() -> bool:
                    return log.status().streams[STREAM].low_offset == 21

                eventually(trimmed, "all that no lease holds is trimmed")
                with pytest.raises(TrimmedError, match="the first one available is 21"):
                    behind += [bytes(each.data) for each in late]
                found += [bytes(each.data) for each in reading]
                assert found == sent[20:]
                assert behind == sent[: len(behind)]
                assert len(behind) < 20
                # The stream goes on for the one, and the other one begins again where it is told.
                sent.append(make.whole())
                send(writer, sent[-1])
                log.barrier({STREAM: make.end_lsn}, 10)
                for client in (fast, slow):
                    assert [bytes(e.data) for e in client.read(STREAM, 21, 42)] == sent[20:]


def test_an_idle_stream_neither_grows_nor_slows_the_restart(processes: Processes) -> None:
    create(processes, "busy")
    make = EntryMaker()
    with contextlib.closing(open_writer(processes, make, "busy")) as writer, processes.log() as log:
        send(writer, make.whole())
        log.barrier({"busy": make.end_lsn}, 10)
        folder = processes.folder / "log-server" / "streams" / STREAM
        before = sum(f.stat().st_size for f in folder.rglob("data.mdb"))
        first = log.status().version
        while log.status().version < first + 1500:
            log.barrier({}, 10)
        assert sum(f.stat().st_size for f in folder.rglob("data.mdb")) <= before + (64 << 10)
    processes.kill("log-server")
    from walsender_bridge.change_log.replica.host import HostedReplica

    # Of this thread alone: others may have the processor meanwhile.
    start = time.thread_time()
    host = HostedReplica(folder)
    host.recover()
    assert time.thread_time() - start < 0.1
    assert host.status().version > first
    host.close()


# -- the wire ---------------------------------------------------------------------------------------


def test_errors_cross_the_wire_as_what_they_are(processes: Processes) -> None:
    with processes.replica() as replica, processes.log() as log:
        with pytest.raises(UnknownStreamError, match="nowhere"):
            replica.stream_status("nowhere")
        with pytest.raises(UnknownStreamError):
            list(replica.read("nowhere", 1, 2))
        with pytest.raises(UnknownStreamError):
            AppendWriter(replica.address, "nowhere", 1, 10)
        for term in (-1, 10**30):
            with pytest.raises(MalformedMessageError, match="append/<stream>/<term>"):
                AppendWriter(replica.address, STREAM, term, 10)
        with pytest.raises(UnknownStreamError):
            log.writer_term("nowhere")
        with pytest.raises(MalformedMessageError, match="-1 in a request is negative"):
            log.raise_version(-1)
        with pytest.raises(MalformedMessageError, match=r"relations\[0\] is not of type str"):
            list(replica.read(STREAM, 1, 2, [7]))  # type: ignore[list-item]  # as another client
        with pytest.raises(ConfigError, match="invalid stream name"):
            log.create_stream("../up")
        with pytest.raises(BehindError, match="beyond the committed end 1"):
            list(replica.read(STREAM, 1, 5))
        with pytest.raises(NotSupportedError, match="unknown action"):
            log._call(Action("drop_everything", Empty, Empty), Empty())
        with pytest.raises(MalformedMessageError, match="exceeds the limit"):
            log.create_stream("x" * MAX_REQUEST_BYTES)
    with pytest.raises(UnavailableError, match="does not answer"):
        LogClient(f"127.0.0.1:{free_port()}").status()


def test_any_flight_client_can_read_the_log(processes: Processes) -> None:
    make = EntryMaker()
    with contextlib.closing(open_writer(processes, make)) as writer, processes.log() as log:
        entries = [make.whole() for _ in range(3)]
        send(writer, *entries)
        log.barrier({STREAM: make.end_lsn}, 10)
        address = log.status().streams[STREAM].addresses[0]
    with flight.FlightClient(address) as client:
        request = {"v": VERSION, "stream": STREAM, "from_offset": 1, "to_offset": 4}
        ticket = flight.Ticket(json.dumps(request).encode())
        table: pa.Table = client.do_get(ticket).read_all()
    assert table["offset"].to_pylist() == [1, 2, 3]
    assert table["data"].to_pylist() == entries


def test_two_log_servers_never_share_a_data_directory(processes: Processes) -> None:
    other = run_child(
        LOG_SERVER,
        ReplicaServerSettings(processes.folder / "log-server", f"127.0.0.1:{free_port()}"),
    )
    assert other.returncode == int(ConfigError.cause)
    assert "data directory is in use by another log server" in other.stderr


def test_a_log_server_that_hangs_blocks_neither_its_writer_nor_the_repository(
    processes: Processes,
) -> None:
    make = EntryMaker()
    writer = open_writer(processes, make)
    send(writer, make.whole())
    suspend(processes.running["log-server"].pid)
    start = time.monotonic()
    for _ in range(100):
        writer.send([make.whole(size=1 << 20)])
    assert writer.next_ack(0.2) is None

    def wait() -> None:
        with pytest.raises(UnavailableError):
            writer.next_ack()

    waiting = threading.Thread(target=wait)
    waiting.start()
    writer.close()
    waiting.join(20)
    assert not waiting.is_alive()
    assert time.monotonic() - start < 20
    with pytest.raises(UnavailableError, match="closed"):
        writer.send([])
    with ReplicaClient(processes.log_server_listen, timeout=0.5) as replica:
        with pytest.raises(UnavailableError):
            AppendWriter(replica.address, STREAM, 99, 0.5)
        with pytest.raises(UnavailableError):
            replica.stream_status(STREAM)
    with processes.log() as log:
        assert log.status().log_id
    processes.running["log-server"].send_signal(signal.SIGCONT)
    with contextlib.closing(open_writer(processes, make)) as again, processes.log() as log:
        send(again, make.whole())
        log.barrier({STREAM: make.end_lsn}, 20)


def test_a_log_server_ends_politely_with_an_open_writer(processes: Processes) -> None:
    make = EntryMaker()
    with contextlib.closing(open_writer(processes, make)) as writer:
        send(writer, make.whole())
        log_server = processes.running.pop("log-server")
        log_server.terminate()
        assert log_server.wait(10) == 0
        with pytest.raises(UnavailableError):
            writer.next_ack(PATIENCE)
    processes.start_log_server()
    with contextlib.closing(open_writer(processes, make)) as writer:
        assert writer.status.end_offset == 2


def test_a_client_brings_neither_pandas_nor_a_server(processes: Processes, tmp_path: Path) -> None:
    # Where pandas is, pyarrow.array() imports it on first use: a second of CPU in every log server and executor.
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "__init__.py").write_text('__version__ = "2.3.3"\n')
    program = f"""
import sys
sys.path.append({str(tmp_path)!r})
from walsender_bridge.change_log.append_writer import AppendWriter
from walsender_bridge.change_log.client import ReplicaClient
address = "grpc://" + {processes.log_server_listen!r}
with ReplicaClient(address) as replica, AppendWriter(address, "shop", 9, 10) as writer:
    writer.send([])
    assert writer.next_ack(30) is not None
    assert list(replica.read("shop", 1, 1)) == []
print(sorted({{"pandas", "lmdb", "sqlite3", "typer", "psycopg", "pyspark"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
