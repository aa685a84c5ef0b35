"""Damage between the log's writer and its reader: every value is right, or the read is a named error."""

import contextlib
import faulthandler
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import lmdb
import pyarrow as pa
import pytest
from pyarrow import flight

from tests.support.log_entries import HASHES, SCHEMAS, EntryMaker, batches
from walsender_bridge.change_log import actions, protocol
from walsender_bridge.change_log.client import LogStatus, ReplicaClient, StreamCut
from walsender_bridge.change_log.log_server_messages import ReadAnswer
from walsender_bridge.change_log.protocol import CommitContext, CutPoint, IssuedCommit
from walsender_bridge.change_log.replica import fatal_segments
from walsender_bridge.change_log.replica.disk import RecoveryOutcome
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.replica.service import ReplicaServer, _batch
from walsender_bridge.change_log.storage.segment import Segment
from walsender_bridge.change_log.storage.store import StoredEntry
from walsender_bridge.errors import CorruptError, TusklineError, UnavailableError
from walsender_bridge.observability.log_problems import damaged

NOW = 2**62


def write(replica: HostedReplica, make: EntryMaker, commits: int = 6) -> list[tuple[Any, ...]]:
    """Commits of two entries each; what a reader of all of them gets."""
    session, _ = replica.open_writer(1)
    written: list[tuple[Any, ...]] = []
    for version in range(1, commits + 1):
        first = len(written) + 1
        entries = [make.whole(), make.whole(rows=2)]
        replica.append(session, entries, list(SCHEMAS.values()), None, 2**64 - 1)
        replica.commit([IssuedCommit(CommitContext(version, first, first, 2))], version)
        written += [(first + i, version, first + i, data) for i, data in enumerate(entries)]
    return written


def everything(replica: HostedReplica, end: int) -> tuple[Any, ...]:
    """All that readers may ask for."""
    found = [tuple(each) for batch in batches(replica, 1, end) for each in batch]
    hashes = list(HASHES.values())
    return (
        found,
        replica.schemas(hashes),
        replica.newest_schemas(),
        replica.plan(1, NOW, None, None),
        replica.transactions_after(1, 0, 1000),
    )


def values(segment: Path) -> list[bytes]:
    """Every value that the segment holds now."""
    found: list[bytes] = []
    with lmdb.open(str(segment), max_dbs=5, readonly=True, lock=False) as env:
        for name in (b"meta", b"entries", b"index", b"schemas", b"relations"):
            database = env.open_db(name, create=False)
            with env.begin() as transaction:
                found += [bytes(value) for _, value in transaction.cursor(database)]
    return found


def flip(file: Path, value: bytes, at: int, bit: int) -> None:
    """Flip a bit of that value, in older copies of its page too."""
    content = file.read_bytes()
    changed = bytearray(value)
    changed[at] ^= 1 << bit
    assert value in content
    file.write_bytes(content.replace(value, bytes(changed)))


@pytest.mark.parametrize("kind", [lmdb.MemoryError, lmdb.ReadersFullError, lmdb.DiskError])
def test_an_error_of_the_moment_is_no_damage(tmp_path, monkeypatch, kind):
    """Too little memory for one read kept a healthy segment aside, and its stream stood still for good."""
    replica = HostedReplica(tmp_path / "stream")
    replica.create("s", "log")
    written = write(replica, EntryMaker())
    right = everything(replica, len(written) + 1)

    def failing(_: Segment) -> NoReturn:
        raise kind("mdb_txn_begin: of the moment")

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "reading", failing)
        for ask in (lambda: [*batches(replica, 1, 3)], replica.newest_schemas):
            with pytest.raises(UnavailableError, match="could not read it now"):
                ask()
    assert [path.name for path in (tmp_path / "stream").glob("*.corrupt-*")] == []
    assert replica.report("k") is not None
    assert everything(replica, len(written) + 1) == right
    replica.close()


def test_a_folder_that_is_away_for_now_is_no_damage(tmp_path):
    """It was moved, or its disk was not mounted, while the log server opened an older segment."""
    place, away = tmp_path / "stream", tmp_path / "away"
    replica = HostedReplica(place, segment_bytes=1)
    replica.create("s", "log")
    written = write(replica, EntryMaker(), commits=20)
    place.rename(away)
    with pytest.raises(UnavailableError, match="folder is missing"):
        [*batches(replica, 1, 3)]
    away.rename(place)
    assert everything(replica, len(written) + 1)[0] == written
    # A file that is gone from a folder that is there is a loss, as ever.
    replica.close()
    replica = HostedReplica(place, segment_bytes=1)
    replica.recover()
    min(place.glob("segment-*/data.mdb")).unlink()
    with pytest.raises(CorruptError, match="its data file is missing"):
        [*batches(replica, 1, 3)]
    replica.close()


def test_a_folder_that_is_gone_is_named_until_it_is_back(tmp_path: Path) -> None:
    """The hint used to name a full disk and exhausted file descriptors."""
    place, away = tmp_path / "s", tmp_path / "away"
    replica = HostedReplica(place, segment_bytes=1)
    replica.create("s", "log")
    written = write(replica, EntryMaker(), commits=3)
    place.rename(away)
    with pytest.raises(UnavailableError, match="not the one that is open"):
        replica.open_writer(2)
    with pytest.raises(UnavailableError) as found:
        replica.status()
    assert "put the folder back, or mount its disk" in found.value.repair
    away.rename(place)
    assert everything(replica, len(written) + 1)[0] == written
    replica.close()


def test_33_a_damaged_replica_id_is_damage_and_no_failure(tmp_path: Path) -> None:
    source = tmp_path / "source"
    replica = HostedReplica(source)
    replica.create("s", "log")
    its = replica.replica_id
    replica.close()
    assert its is not None
    (segment,) = source.iterdir()
    flip(segment / "data.mdb", its.encode(), 3, 7)
    replica = HostedReplica(source)
    replica.recover()
    outcome, reason = replica.outcome
    replica.close()
    assert (outcome, "the replica's id is damaged" in reason) == (RecoveryOutcome.INVALID, True)


def test_33_a_flipped_bit_in_the_logs_store_never_becomes_a_value(tmp_path: Path) -> None:
    source = tmp_path / "source"
    replica = HostedReplica(source)
    replica.create("s", "log")
    written = write(replica, EntryMaker())
    right = everything(replica, len(written) + 1)
    assert right[0] == written
    status = replica.status()
    replica.close()
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    (segment,) = source.iterdir()
    places = [(value, at) for value in values(segment) for at in range(len(value))]
    found: list[TusklineError] = []
    loud: list[TusklineError] = []
    for value, at in choose.sample(places, 250):
        folder = tmp_path / "damaged"
        shutil.copytree(source, folder)
        flip(folder / segment.name / "data.mdb", value, at, choose.randrange(8))
        replica = HostedReplica(folder)
        replica.recover()
        try:
            assert everything(replica, len(written) + 1) == right, f"seed {seed}, {value!r}, {at}"
            assert replica.status() == status, f"seed {seed}, {value!r}, {at}"
        except TusklineError as error:
            found.append(error)
            if replica.report("k") is not None:
                loud.append(error)
        finally:
            replica.close()
            shutil.rmtree(folder)
    assert not loud, "it takes part in no commit"
    assert len(found) > 200, "the damaged bytes were those that are read"
    placeless = [error for error in found if str(tmp_path / "damaged") not in str(error)]
    assert not placeless


@pytest.fixture
def damaged_log(tmp_path: Path) -> tuple[Path, int]:
    """A log server's folder whose stream has a damaged entry 3; the greatest offset."""
    folder = tmp_path / "streams" / "shop"
    folder.parent.mkdir()
    replica = HostedReplica(folder)
    replica.create("shop", "log")
    written = write(replica, EntryMaker())
    replica.close()
    data = next(folder.glob("segment-*/data.mdb"))
    flip(data, written[2][3], len(written[2][3]) - 5, 2)
    return folder, len(written)


def test_a_damaged_entry_is_named_kept_aside_and_not_skipped(damaged_log: tuple[Path, int]) -> None:
    folder, last = damaged_log
    replica = HostedReplica(folder)
    replica.recover()
    assert replica.outcome[0] == RecoveryOutcome.VALID
    with pytest.raises(CorruptError, match=r"CRC32C.*renamed") as caught:
        list(batches(replica, 1, last + 1))
    assert "stream shop, offset 3, " in caught.value.where
    assert "data.mdb" in caught.value.where
    (kept,) = folder.iterdir()
    assert kept.name == "segment-00000000000000000001.corrupt-1"
    assert (kept / "data.mdb").stat().st_size > 0
    with pytest.raises(CorruptError, match="CRC32C"):
        replica.check()
    assert replica.report("k") is None
    replica.close()
    again = HostedReplica(folder)
    again.recover()
    outcome, reason = again.outcome
    assert outcome == RecoveryOutcome.INVALID
    assert "offset 3" in reason
    again.close()


def test_a_filtered_read_verifies_what_it_leaves_out(damaged_log: tuple[Path, int]) -> None:
    folder, last = damaged_log
    replica = HostedReplica(folder)
    replica.recover()
    with contextlib.closing(replica), pytest.raises(CorruptError, match="CRC32C"):
        list(batches(replica, 1, last + 1, ["public.elsewhere"]))


def test_status_names_a_stream_whose_replica_is_damaged(damaged_log: tuple[Path, int]) -> None:
    folder, last = damaged_log
    log_server = ReplicaServer(folder.parents[1], "127.0.0.1:0")
    cut = StreamCut("shop", (log_server.address,), last + 1, last + 1, 0, 0, 1, 1, 0)
    status = LogStatus("log", 1, 0, {"shop": cut})
    try:
        assert damaged(status) is None
        with (
            ReplicaClient(log_server.address) as client,
            pytest.raises(CorruptError, match="CRC32C"),
        ):
            list(client.read("shop", 1, last + 1))
        found = damaged(status)
        assert found is not None
        assert "offset 3" in str(found)
    finally:
        log_server.stop()


def test_a_version_that_changed_on_the_wire_is_an_error() -> None:
    data = EntryMaker().whole()

    class Wire(flight.FlightServerBase):  # type: ignore[misc]  # Flight carries no types
        """Sends an entry under version 8 with the checksum of the version that is its offset."""

        def do_get(
            self, context: flight.ServerCallContext, ticket: flight.Ticket
        ) -> flight.GeneratorStream:
            del context
            first = json.loads(ticket.ticket)["from_offset"]
            batch = _batch([StoredEntry(first, 8, 1, data)])
            meant = _batch([StoredEntry(first, first, 1, data)])
            crc = protocol.places_crc("shop", meant, first + 1)
            about = actions.encode(ReadAnswer("log", first + 1, crc))
            chunks: Iterator[tuple[pa.RecordBatch, bytes]] = iter([(batch, about)])
            return flight.GeneratorStream(protocol.READ_SCHEMA, chunks)

    wire = Wire("grpc://127.0.0.1:0")
    with wire, ReplicaClient(f"grpc://127.0.0.1:{wire.port}") as client:
        (got,) = client.read("shop", 8, 9)
        assert (got.version, bytes(got.data)) == (8, data)
        with pytest.raises(CorruptError, match="checksum mismatch"):
            list(client.read("shop", 9, 10))
        with pytest.raises(CorruptError, match="checksum mismatch"):
            list(client.read("other", 8, 9))


def test_a_plan_over_a_missing_commit_is_an_error(tmp_path: Path) -> None:
    replica = HostedReplica(tmp_path / "s")
    replica.create("s", "log")
    write(replica, EntryMaker())
    assert isinstance(replica.plan(1, NOW, None, None)[0], CutPoint)
    replica.close()
    folder = next((tmp_path / "s").iterdir())
    with lmdb.open(str(folder), max_dbs=5) as env, env.begin(write=True) as transaction:
        transaction.delete((5).to_bytes(8, "big"), db=env.open_db(b"index", transaction))
    replica = HostedReplica(tmp_path / "s")
    replica.recover()
    with contextlib.closing(replica), pytest.raises(CorruptError, match="does not follow 3"):
        replica.plan(1, NOW, None, None)


@pytest.mark.parametrize(
    ("moved", "what"),
    [
        # None of them is the last of a commit: only the chain of checksums tells.
        ({3: 5, 5: 3}, "follows an entry"),
        # Of another log, in whose chain they are: only the commits tell.
        ({offset: -offset for offset in range(1, 13)}, "ends with another entry"),
    ],
)
def test_33_whole_entries_at_the_places_of_others_are_an_error(
    tmp_path: Path, moved: dict[int, int], what: str
) -> None:
    found: dict[int, bytes] = {}
    for name, sign in (("other", -1), ("s", 1)):
        replica = HostedReplica(tmp_path / name)
        replica.create(name, "log")
        found |= {
            sign * offset: data for offset, _, _, data in write(replica, EntryMaker(2 + sign))
        }
        replica.close()
    folder = next((tmp_path / "s").iterdir())
    with lmdb.open(str(folder), max_dbs=5) as env, env.begin(write=True) as transaction:
        entries = env.open_db(b"entries", transaction)
        for offset, from_ in moved.items():
            transaction.put(offset.to_bytes(8, "big"), found[from_], db=entries)
    replica = HostedReplica(tmp_path / "s")
    replica.recover()
    with contextlib.closing(replica), pytest.raises(CorruptError, match=what) as caught:
        list(batches(replica, 1, 13))
    assert f"offset {2 if -1 in moved.values() else 3}" in caught.value.where


def test_33_a_relation_that_names_anothers_schema_is_an_error(tmp_path: Path) -> None:
    replica = HostedReplica(tmp_path / "s")
    replica.create("s", "log")
    write(replica, EntryMaker())
    replica.close()
    folder = next((tmp_path / "s").iterdir())
    with lmdb.open(str(folder), max_dbs=5) as env, env.begin(write=True) as transaction:
        relations = env.open_db(b"relations", transaction)
        (name, digest), (_, others) = map(bytes_of, transaction.cursor(relations))
        assert digest != others
        transaction.put(name, others, db=relations)
    replica = HostedReplica(tmp_path / "s")
    replica.recover()
    with (
        contextlib.closing(replica),
        pytest.raises(CorruptError, match="under another name") as caught,
    ):
        replica.newest_schemas()
    assert others.hex() in caught.value.where


def bytes_of(row: tuple[Any, Any]) -> tuple[bytes, bytes]:
    """Key and value of LMDB, for longer than its transaction."""
    return bytes(row[0]), bytes(row[1])


def _read_in_child(segment: Path) -> int:
    """The signal that ends a process that reads all of the segment; 0: none."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            fatal_segments._read_all(segment)
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def break_fatally(segment: Path) -> None:
    """Flip a bit in a page's table of nodes such that reading it ends the process."""
    data = segment / "data.mdb"
    good = data.read_bytes()
    for page in reversed(range(0, len(good), 4096)):
        # Behind the page's header of 16 bytes: the places of its nodes, two bytes each.
        for at in range(page + 17, page + 40, 2):
            data.write_bytes(good[:at] + bytes([good[at] ^ 0x80]) + good[at + 1 :])
            if _read_in_child(segment) in fatal_segments.SIGNALS:
                return
    pytest.fail("no flip ends the reader")


def test_a_segment_that_ends_its_reader_is_found_and_kept_aside_by_the_next_log_server(
    tmp_path: Path,
) -> None:
    streams = tmp_path / "streams"
    streams.mkdir()
    for name in ("bank", "shop"):
        replica = HostedReplica(streams / name)
        replica.create(name, "log")
        write(replica, EntryMaker(), commits=60)
        replica.close()
    assert fatal_segments.keep_fatal_aside(streams) == []
    (segment,) = (streams / "shop").iterdir()
    break_fatally(segment)
    # After any other end nothing is looked at.
    ReplicaServer(tmp_path, "127.0.0.1:0", after=signal.SIGKILL).stop()
    assert segment.exists()
    log_server = ReplicaServer(tmp_path, "127.0.0.1:0", after=signal.SIGBUS)
    try:
        judged = {name: log_server.replica(name).outcome for name in ("bank", "shop")}
        assert judged["bank"][0] == RecoveryOutcome.VALID
        assert judged["shop"][0] == RecoveryOutcome.INVALID
        assert "kills the process with SIG" in judged["shop"][1]
    finally:
        log_server.stop()
    assert not segment.exists()
    (kept,) = (streams / "shop").iterdir()
    assert "data.mdb" in {file.name for file in kept.iterdir()}
    assert fatal_segments.keep_fatal_aside(streams) == []
