"""Reading a stream from any of its replicas: each entry once, whatever becomes of the log servers meanwhile."""

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import flight

from tests.support.child import start_child
from tests.support.log_entries import AUDIT, HASHES, SCHEMAS, EntryMaker
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from walsender_bridge.change_log import actions, protocol, stream_reader
from walsender_bridge.change_log.client import LogClient, LogEntry, ReplicaClient
from walsender_bridge.change_log.log_server_messages import CreateRequest, ReadAnswer
from walsender_bridge.change_log.protocol import CommitContext, IssuedCommit, StreamCut
from walsender_bridge.change_log.replica.core import ReplicaState
from walsender_bridge.change_log.replica.host import FOREVER, HostedReplica
from walsender_bridge.change_log.replica.service import ReplicaServer, _batch
from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.change_log.replica_order import (
    AVOIDED_SECONDS,
    decisive,
    in_order,
    rotated,
)
from walsender_bridge.change_log.repository.core import StreamCreated
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.change_log.storage.store import StoredEntry
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import (
    BehindError,
    ConfigError,
    CorruptError,
    InvalidReplicaError,
    MalformedMessageError,
    NotSupportedError,
    SilentError,
    TrimmedError,
    UnavailableError,
    UnknownStreamError,
)

SHOP = "shop"
#: Entries of the stream, of which every third is of the table `audit`; a batch has about four.
ENTRIES, END = 12, 13
NEWEST = 2**62


@pytest.fixture(scope="module")
def entries() -> list[bytes]:
    make = EntryMaker()
    return [make.whole(size=1 << 20, **({} if n % 3 else {"table": AUDIT})) for n in range(ENTRIES)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, entries: list[bytes]) -> Path:
    """The folder of a stream with these entries, each of which is a commit."""
    folder: Path = tmp_path_factory.mktemp("replica") / SHOP
    replica = HostedReplica(folder)
    replica.create(SHOP, "log")
    session, _ = replica.open_writer(1)
    replica.append(session, entries, list(SCHEMAS.values()), None, 2**64 - 1)
    replica.commit([IssuedCommit(CommitContext(n, n, n, 1)) for n in range(1, END)], 1)
    replica.close()
    return folder


@pytest.fixture(autouse=True)
def forget_failures() -> None:
    """A log server of a later test may get the port of one that failed."""
    stream_reader._failed.clear()


@pytest.fixture
def started() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(
    whole: Path, tmp_path: Path, started: contextlib.ExitStack
) -> Callable[[str], ReplicaServer]:
    """Start a log server, by its name, with a replica of its own."""

    def start(name: str) -> ReplicaServer:
        shutil.copytree(whole, tmp_path / name / "streams" / SHOP)
        server = ReplicaServer(tmp_path / name, "127.0.0.1:0")
        started.callback(server.stop)
        return server

    return start


def reading(*servers: ReplicaServer | str, **options: Any) -> StreamReader:
    addresses = [each if isinstance(each, str) else each.address for each in servers]
    return StreamReader(SHOP, addresses, **{"holds": END, **options})


def seen(found: Iterator[LogEntry]) -> list[tuple[int, bytes]]:
    return [(entry.offset, bytes(entry.data)) for entry in found]


def written(entries: list[bytes]) -> list[tuple[int, bytes]]:
    return list(enumerate(entries, 1))


# -- the order --------------------------------------------------------------------------------------


def test_ranges_begin_with_the_replicas_in_turn() -> None:
    assert [rotated("abc", number) for number in range(4)] == [
        ("a", "b", "c"),
        ("b", "c", "a"),
        ("c", "a", "b"),
        ("a", "b", "c"),
    ]
    assert rotated((), 3) == ()


def test_a_replica_that_failed_is_tried_last_for_a_while() -> None:
    assert in_order("abc", {}, 100) == ["a", "b", "c"]
    assert in_order("abc", {"a": 100}, 100) == ["b", "c", "a"]
    assert in_order("abc", {"a": 100, "b": 90}, 110) == ["c", "b", "a"]
    assert in_order("abc", {"a": 100, "b": 90}, 95 + AVOIDED_SECONDS) == ["b", "c", "a"]
    assert in_order("abc", {"a": 100}, 100 + AVOIDED_SECONDS) == ["a", "b", "c"]


TRIMMED, DEAD, BEHIND = TrimmedError("t"), UnavailableError("d"), BehindError("b")
DAMAGED = CorruptError("c")


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ([DEAD, DAMAGED], DAMAGED),
        ([DAMAGED, DEAD], DEAD),
        ([TRIMMED, TRIMMED], TRIMMED),
        ([TRIMMED, DEAD], TRIMMED),
        ([DEAD, TRIMMED], TRIMMED),
        # Another replica answers, and may have the entries once it is repaired or has caught up.
        ([DAMAGED, TRIMMED], DAMAGED),
        ([TRIMMED, BEHIND], BEHIND),
    ],
)
def test_trimmed_is_raised_only_if_all_that_answer_have_trimmed(errors, raised) -> None:
    assert decisive(errors) is raised


# -- a replica that fails ---------------------------------------------------------------------------


@pytest.fixture
def process(
    whole: Path, tmp_path: Path, started: contextlib.ExitStack
) -> Callable[[], tuple[Any, str]]:
    """Start a log server as a process; it and its address."""

    def start() -> tuple[Any, str]:
        shutil.copytree(whole, tmp_path / "process" / "streams" / SHOP)
        listen = f"127.0.0.1:{free_port()}"
        child = start_child(
            "walsender_bridge.change_log.log_server",
            ReplicaServerSettings(tmp_path / "process", listen),
            log=tmp_path / "process.log",
        )
        started.callback(child.wait)
        started.callback(child.kill)

        def answers() -> bool:
            with contextlib.suppress(UnavailableError), ReplicaClient(listen) as client:
                return client.stream_status(SHOP).committed_end == END
            return False

        wait_for(answers, 30, "the log server")
        return child, f"grpc://{listen}"

    return start


def test_41_a_log_server_killed_in_mid_read_costs_no_entry_and_repeats_none(
    process, serve, entries
) -> None:
    child, address = process()
    with reading(address, serve("b")) as reader:
        found, audits = reader.read(1, END), reader.read(1, END, ["public.audit"])
        first, audit = next(found), next(audits)
        child.kill()
        child.wait()
        assert [(first.offset, bytes(first.data)), *seen(found)] == written(entries)
        # Entries without the wanted table are left out by the second log server as by the first.
        assert [audit.offset, *(entry.offset for entry in audits)] == [1, 4, 7, 10]
    with reading(address) as alone, pytest.raises(UnavailableError, match="does not answer"):
        next(alone.read(1, END))


def test_41_a_log_server_that_hangs_is_left_within_the_timeout(process, serve, entries) -> None:
    child, address = process()
    other = serve("b")
    with reading(address, other, timeout=0.5, patience=(0.5,)) as reader:
        found = reader.read(1, END)
        first = next(found)
        suspend(child.pid)
        try:
            began = time.monotonic()
            assert [(first.offset, bytes(first.data)), *seen(found)] == written(entries)
            assert 0.5 <= time.monotonic() - began < 5
            # All readers of this process know by now.
            with reading(address, other) as another:
                began = time.monotonic()
                assert len(another.plan(1, NEWEST)) == ENTRIES
                assert time.monotonic() - began < 5
            with reading(address, timeout=0.3) as alone, pytest.raises(SilentError):
                alone.relations()
        finally:
            child.send_signal(signal.SIGCONT)


def test_41_a_consumer_that_is_slow_between_batches_is_not_cut_off(serve, entries) -> None:
    with reading(serve("a"), patience=(0.5,)) as reader:
        found = []
        for entry in reader.read(1, END):
            if entry.offset in {1, 5}:
                time.sleep(0.7)
            found.append((entry.offset, bytes(entry.data)))
    assert found == written(entries)


def test_41_a_damaged_replica_is_left_at_the_damage(serve, entries, tmp_path) -> None:
    damaged = serve("a")
    (file,) = (tmp_path / "a").glob("streams/shop/*/data.mdb")
    content = bytearray(file.read_bytes())
    content[content.index(entries[6]) + 5000] ^= 1
    with file.open("r+b") as changed:
        changed.write(content)
    other = serve("b")
    with reading(damaged, other) as reader:
        assert seen(reader.read(1, END)) == written(entries)
        assert in_order(reader.addresses, stream_reader._failed, time.monotonic()) == [
            other.address,
            damaged.address,
        ]
    with ReplicaClient(damaged.address) as client, pytest.raises(CorruptError, match="CRC32C"):
        client.stream_status(SHOP)
    # It was the damage that stopped it: nothing else did.
    with reading(damaged) as alone, pytest.raises(InvalidReplicaError):
        next(alone.read(1, 5))


@pytest.fixture
def behind(tmp_path: Path, started: contextlib.ExitStack, entries: list[bytes]) -> ReplicaServer:
    """A log server that has not received the last commits yet, nor the entries and the schema that they are first to need."""
    server = ReplicaServer(tmp_path / "behind", "127.0.0.1:0")
    started.callback(server.stop)
    server.create(CreateRequest(SHOP, "log"))
    replica = server.replica(SHOP)
    session, _ = replica.open_writer(1)
    replica.append(session, entries[:8], list(SCHEMAS.values()), None, 2**64 - 1)
    replica.commit([IssuedCommit(CommitContext(n, n, n, 1)) for n in range(1, 7)], 1)
    return server


def test_41_a_replica_that_is_behind_answers_nothing_it_lacks(behind, serve, entries) -> None:
    whole = serve("a")
    asked: list[Callable[[StreamReader], Any]] = [
        lambda r: r.plan(1, NEWEST),
        lambda r: r.cut_before(NEWEST),
        lambda r: r.version_at(0),
        lambda r: r.relations(),
        lambda r: r.schemas(HASHES.values()),
        lambda r: r.list_transactions_after(1, 0),
        lambda r: r.status().committed_end,
        lambda r: seen(r.read(1, END)),
    ]
    for ask in asked:
        stream_reader._failed.clear()
        with reading(behind, whole) as reader, reading(whole) as alone:
            assert ask(reader) == ask(alone)
        with reading(behind) as late, pytest.raises(BehindError):
            ask(late)
    # What it holds, it serves; and nobody took what it lacks for damage.
    with reading(behind, holds=7) as reader:
        assert len(reader.plan(1, NEWEST)) == 6
        assert seen(reader.read(1, 7)) == written(entries)[:6]
        assert reader.status().state == ReplicaState.APPENDABLE


def test_entries_that_one_replica_has_trimmed_are_read_from_another(serve, entries) -> None:
    trimmed, whole = serve("a"), serve("b")
    trimmed.replica(SHOP).trim(6, FOREVER)
    with reading(trimmed, whole) as reader:
        assert seen(reader.read(1, END)) == written(entries)
        assert trimmed.address not in stream_reader._failed
        whole.replica(SHOP).trim(4, FOREVER)
        with pytest.raises(TrimmedError, match="the first one available is 4"):
            next(reader.read(1, END))
        assert seen(reader.read(4, END)) == written(entries)[3:]
    with reading(f"127.0.0.1:{free_port()}", trimmed) as reader, pytest.raises(TrimmedError):
        next(reader.read(4, END))


def test_a_log_server_without_the_stream_is_left(tmp_path, started, serve, entries) -> None:
    empty = ReplicaServer(tmp_path / "empty", "127.0.0.1:0")
    started.callback(empty.stop)
    with reading(empty, serve("a")) as reader:
        assert seen(reader.read(1, END)) == written(entries)
    with reading(empty) as alone, pytest.raises(UnknownStreamError):
        next(alone.read(1, END))
    with StreamReader(SHOP, ()) as nothing, pytest.raises(UnavailableError, match="no log server"):
        nothing.relations()


def test_entries_of_another_log_are_an_error(serve) -> None:
    with (
        reading(serve("a"), log_id="another") as reader,
        pytest.raises(ConfigError, match="belongs to log another, but this is log log"),
    ):
        next(reader.read(1, END))


# -- what a log server sends ------------------------------------------------------------------------


class Wire(flight.FlightServerBase):  # type: ignore[misc]  # Flight carries no types
    """Sends the entries of these offsets, and that the next ones begin at `after`, once it has waited."""

    def __init__(
        self, offsets: list[int], after: int, pause: float = 0, version: int = actions.VERSION
    ) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._sent = offsets, after, pause
        self._version = version

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.GeneratorStream:
        del context, ticket
        offsets, after, pause = self._sent
        time.sleep(pause)
        batch = _batch([StoredEntry(offset, 1, offset, b"entry") for offset in offsets])
        answer = ReadAnswer("log", after, protocol.places_crc(SHOP, batch, after))
        about = {**json.loads(actions.encode(answer)), "v": self._version}
        chunks = iter([(batch, json.dumps(about).encode())][: 1 if after else 0])
        return flight.GeneratorStream(protocol.READ_SCHEMA, chunks)


@pytest.mark.parametrize(
    ("offsets", "after", "filtered"),
    [
        ([1, 3], 4, False),
        ([1, 2], 4, False),
        ([2, 3], 4, False),
        ([1, 2, 3, 4], 4, False),
        ([1, 2, 3, 4, 5], 6, False),
        ([], 1, True),
        ([3, 2], 4, True),
        ([2, 2], 4, True),
        ([3, 4], 4, True),
        ([0, 2], 4, True),
    ],
)
def test_a_batch_that_repeats_or_lacks_entries_is_an_error(offsets, after, filtered) -> None:
    with (
        Wire(offsets, after) as wire,
        reading(f"grpc://127.0.0.1:{wire.port}") as reader,
        pytest.raises(CorruptError, match="offset 1 on"),
    ):
        seen(reader.read(1, 5, ["public.audit"] if filtered else None))


def test_a_read_that_ends_without_a_batch_is_an_error() -> None:
    with (
        Wire([], 0) as wire,
        reading(f"grpc://127.0.0.1:{wire.port}") as reader,
        pytest.raises(UnavailableError, match="sent no entries"),
    ):
        seen(reader.read(1, 5))


def test_batches_of_which_no_entry_is_wanted_are_passed_over() -> None:
    with Wire([], 5) as wire, reading(f"grpc://127.0.0.1:{wire.port}") as reader:
        assert seen(reader.read(1, 5, ["public.audit"])) == []


def test_a_log_server_that_takes_an_oid_for_a_name_is_refused() -> None:
    """Version 6 filters by names alone, and would leave out the changes that a renamed table had under another name."""
    with (
        Wire([], 5, version=6) as wire,
        reading(f"grpc://127.0.0.1:{wire.port}") as reader,
        pytest.raises(NotSupportedError, match="unsupported version 6"),
    ):
        seen(reader.read(1, 5, ["16384", "public.papers"]))


def test_an_entry_that_takes_longer_than_the_first_timeout_is_waited_for() -> None:
    with Wire([1, 2, 3, 4], 5, pause=0.6) as wire:
        address = f"grpc://127.0.0.1:{wire.port}"
        with reading(address, patience=(0.2,)) as reader, pytest.raises(SilentError):
            seen(reader.read(1, 5))
        with reading(address, patience=(0.2, 10)) as reader:
            assert [offset for offset, _ in seen(reader.read(1, 5))] == [1, 2, 3, 4]


def test_an_error_of_the_request_is_raised_at_once(serve) -> None:
    with (
        Wire([1, 2, 3, 4], 5) as wire,
        reading(serve("a"), f"grpc://127.0.0.1:{wire.port}") as reader,
        pytest.raises(MalformedMessageError, match="relations"),
    ):
        seen(reader.read(1, 5, [7]))  # type: ignore[list-item]  # as another client


# -- the repository ---------------------------------------------------------------------------------


def test_41_a_cut_names_all_replicas_and_those_that_answer_first(tmp_path, started) -> None:
    servers = [ReplicaServer(tmp_path / name, "127.0.0.1:0") for name in "ab"]
    addresses = tuple(server.address for server in servers)
    repository = RepositoryServer(
        tmp_path / "repository",
        "127.0.0.1:0",
        log_servers=addresses,
        tick=0.02,
        replication=ReplicationPolicy(2, 2),
    )
    repository._record(StreamCreated(SHOP, tuple(server.log_server_id for server in servers)))
    repository.start()
    started.callback(repository.stop)
    started.callback(servers[1].stop)
    with LogClient(repository.address) as log:
        assert log.create_stream(SHOP).addresses == addresses
        cut = write_to_all(log, addresses)
        assert cut.addresses == addresses
        for address in addresses:
            with reading(address, holds=cut.end_offset) as reader:
                assert [entry.offset for entry in reader.read(1, cut.end_offset)] == [1, 2]
        servers[0].stop()

        def first() -> str:
            return log.status().streams[SHOP].addresses[0]

        wait_for(lambda: first() == addresses[1], 30, "the one that answers is first")
        assert set(log.status().streams[SHOP].addresses) == {*addresses}


def write_to_all(log: LogClient, addresses: tuple[str, ...]) -> StreamCut:
    """Append two entries to each replica; the cut when they can be read."""
    make = EntryMaker()
    made = [make.whole(), make.whole()]
    with log.open_writer(SHOP) as writer:
        assert {*writer.address.split(", ")} == {*addresses}
        writer.send(made, schemas=list(SCHEMAS.values()))
        log.barrier({SHOP: make.end_lsn}, 30)
        return log.status().streams[SHOP]
