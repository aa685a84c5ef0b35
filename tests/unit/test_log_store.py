"""The replica's disk: segments that roll and are dropped, what damage is called, look-ups."""

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tests.support import pgoutput_messages as pm
from tests.support.log_entries import AUDIT, SCHEMAS, EntryMaker, batches
from walsender_bridge.change_log import entry
from walsender_bridge.change_log.protocol import MAX_COUNT, CommitContext, IssuedCommit
from walsender_bridge.change_log.replica.disk import RecoveryOutcome
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.storage.records import FORMAT
from walsender_bridge.change_log.storage.segment import Segment
from walsender_bridge.change_log.storage.store import StreamStore
from walsender_bridge.errors import (
    BehindError,
    CorruptError,
    FencedError,
    InvalidReplicaError,
    NotSupportedError,
    TrimmedError,
    UnavailableError,
)
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.runtime.checksummed_json import crc_of

SEGMENT = 1 << 20
FOREVER = 2**62


class Log:
    """A hosted replica with its writer; commits are numbered by `version`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "s"
        self.make = EntryMaker()
        self.written: dict[int, bytes] = {}
        self.version = 0
        self.now = 0.0
        self.host = self.hosted()
        self.host.create("s", "log")
        self.session, _ = self.host.open_writer(1)

    def hosted(self) -> HostedReplica:
        return HostedReplica(self.folder, segment_bytes=SEGMENT, clock=lambda: self.now)

    def restart(self) -> None:
        self.host.close()
        self.host = self.hosted()
        self.host.recover()

    def take_over(self) -> None:
        self.session, status = self.host.open_writer(self.host.status().term)
        self.make.follow(status)

    def append(self, *entries: bytes) -> None:
        start = self.host.status().end_offset
        self.host.append(self.session, entries, list(SCHEMAS.values()), None, 2**64 - 1)
        self.written |= {start + i: data for i, data in enumerate(entries)}

    def commit(self) -> CommitContext:
        report = self.host.report("k")
        assert report is not None
        self.version += 1
        context = CommitContext(
            self.version, report.local_offset, report.local_offset, report.length
        )
        self.host.commit([IssuedCommit(context)], int(time.time() * 1e6))
        return context

    def fill(self, commits: int, size: int = 300_000) -> None:
        for _ in range(commits):
            self.append(self.make.whole(size=size))
            self.commit()

    def segments(self) -> list[int]:
        return sorted(int(p.name.split("-")[1]) for p in self.folder.glob("segment-*"))

    def read(self, start: int, stop: int) -> dict[int, bytes]:
        return {e.offset: e.data for batch in batches(self.host, start, stop) for e in batch}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path)
    yield made
    made.host.close()


def test_what_is_read_is_what_was_written_over_segments_and_restarts(log: Log) -> None:
    log.fill(12)
    assert len(log.segments()) >= 3
    log.restart()
    assert log.host.outcome == (RecoveryOutcome.VALID, "")
    assert log.read(1, 13) == log.written
    entries = [e for batch in batches(log.host, 4, 9) for e in batch]
    assert [(e.offset, e.version, e.global_offset) for e in entries] == [
        (n, n, n) for n in range(4, 9)
    ]
    previous = 0
    for offset in sorted(log.written):
        previous = entry.verify(log.written[offset], previous).crc
    assert log.host.status().last_crc == previous


def test_a_roll_makes_no_folder_that_was_taken_away(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look like a replica at the place where the disk is mounted, or the folder is put back."""
    log.fill(2)
    before = log.segments()
    known = StreamStore._roll

    def taken_away(store: StreamStore, first_offset: int) -> None:
        log.folder.rename(tmp_path / "away")
        known(store, first_offset)

    with monkeypatch.context() as patch:
        patch.setattr(StreamStore, "_roll", taken_away)
        with pytest.raises(UnavailableError):
            log.fill(8)
    assert not log.folder.exists()
    (tmp_path / "away").rename(log.folder)
    log.restart()
    assert log.host.outcome == (RecoveryOutcome.VALID, "")
    assert log.segments() == before


@pytest.mark.parametrize("behind", [False, True])
def test_21_what_a_seal_rejects_is_on_no_disk_and_never_returns(log: Log, *, behind: bool) -> None:
    """Through restarts, below another writer's entries; also if the last commit arrives behind the seal."""
    log.fill(2, size=100)
    log.append(log.make.whole(size=100))
    log.append(log.make.whole(size=77))
    log.version = 3
    last = CommitContext(3, 3, 3, 1)
    if not behind:
        log.host.commit([IssuedCommit(last)], 1)
    log.host.seal(4, 9, MAX_COUNT)
    if behind:
        log.host.commit([IssuedCommit(last)], 1)
    log.restart()
    report, status = log.host.report("k"), log.host.status()
    assert report is not None
    assert (status.state, status.end_offset, report.length) == ("sealed", 4, 0)
    with pytest.raises(CorruptError, match="entry 4 is missing"):
        list(log.host._store.scan(4, 5))
    log.take_over()
    log.append(log.make.whole(size=78))
    log.commit()
    log.restart()
    assert log.read(1, 5) == log.written
    assert log.host.status().end_offset == 5


def test_a_roll_takes_the_uncommitted_tail_along(log: Log) -> None:
    log.fill(3)
    log.append(log.make.whole(size=900_000))
    report = log.host.report("k")
    assert report is not None
    tail = [log.make.whole(), log.make.start(), log.make.middle()]
    log.append(*tail)
    log.host.commit(
        [IssuedCommit(CommitContext(9, report.local_offset, report.local_offset, report.length))], 1
    )
    assert log.segments()[-1] == report.local_offset + report.length
    log.restart()
    assert log.host.status().end_offset == 8
    log.take_over()  # the unfinished transaction goes, from the newest segment alone
    assert log.host.status().end_offset == 6
    log.version = 9
    log.append(log.make.whole(size=1000))
    log.commit()
    assert log.read(1, 7) == {o: d for o, d in log.written.items() if o < 7}


def test_trimmed_segments_give_their_disk_back(log: Log) -> None:
    log.fill(60)
    full = log.host.disk_bytes
    assert full > 60 * 300_000
    assert log.host.trim(58, FOREVER) == 58
    assert log.host.disk_bytes < 3 * SEGMENT
    assert sum(f.stat().st_size for f in log.folder.rglob("data.mdb")) < 3 * SEGMENT
    log.restart()
    assert log.host.status().low_offset == 58
    assert set(log.read(58, 61)) == {58, 59, 60}
    with pytest.raises(TrimmedError, match="the first one available is 58"):
        log.read(57, 61)
    with pytest.raises(TrimmedError):
        log.host.plan(57, 99, None, None)


def test_all_trimmed_is_valid_and_goes_on_where_it_was(log: Log) -> None:
    log.fill(8)
    log.host.trim(FOREVER, FOREVER)
    log.restart()
    assert log.host.outcome[0] in {RecoveryOutcome.ALL_TRIMMED, RecoveryOutcome.VALID}
    status = log.host.status()
    assert (status.low_offset, status.end_offset, status.version) == (9, 9, 8)
    log.take_over()
    log.fill(1)
    assert log.read(9, 10) == {9: log.written[9]}


def trim(log: Log, up_to: int, before_time: int, now: int = FOREVER) -> int:
    """What is older than that time."""
    return log.host.trim(log.host.trim_point(up_to, before_time, now), FOREVER)


def test_trimming_stops_at_the_end_of_a_commit_and_at_the_time(log: Log) -> None:
    log.append(log.make.start(), log.make.middle(), log.make.end())
    log.commit()
    log.append(log.make.whole())
    log.commit()
    taken = [row.taken_at for row in log.host._store.commits_behind(1)]
    assert taken == sorted(taken)
    assert trim(log, 5, taken[0]) == 1
    assert log.host.trim(3, FOREVER) == 1
    assert trim(log, 5, taken[0] + 1) == 4
    assert log.host.trim(5, FOREVER) == 5


def test_commits_of_a_clock_that_was_ahead_go_with_those_behind_them(log: Log) -> None:
    ahead = 10**9

    def take(*times: int) -> int:
        for now in times:
            log.append(log.make.whole())
            at = log.host.report("k")
            assert at is not None
            log.version += 1
            start = at.local_offset
            log.host.commit(
                [IssuedCommit(CommitContext(log.version, start, start, at.length))], now
            )
        return log.host.status().committed_end

    end = take(100, 110, *[ahead] * 6)
    assert trim(log, end, 90, 140) == 1
    assert trim(log, end, 105, 140) == 2
    # Nothing is behind those of the clock that was ahead: they may be of this moment.
    assert trim(log, end, 200, 300) == 3
    end = take(310, 320)
    assert trim(log, end, 305, 330) == 3
    # They are older than 310, whatever they say.
    assert trim(log, end, 315, 330) == 10
    assert trim(log, end, 325, 330) == 11


def test_a_reader_in_the_middle_of_a_trimmed_segment_holds_nothing(log: Log) -> None:
    log.fill(40)
    reader = batches(log.host, 1, 41)
    first = next(reader)
    log.host.trim(40, FOREVER)
    assert log.host.disk_bytes < 3 * SEGMENT
    with pytest.raises(TrimmedError):
        list(reader)
    assert first[0].data == log.written[1]
    assert log.host.report("k") is not None  # that was no damage


def test_a_long_transaction_is_not_copied_about(log: Log) -> None:
    log.append(log.make.start(size=10))
    for _ in range(30):
        log.append(log.make.middle(size=200_000))
    log.append(log.make.end())
    assert log.segments() == [1]
    log.commit()
    log.fill(1)
    assert len(log.segments()) == 2
    assert log.read(1, 34) == log.written


# -- crashes while rolling and trimming -------------------------------------------------------------


def test_a_half_made_segment_is_removed(log: Log) -> None:
    log.fill(3)
    draft = log.folder / "new-segment-00000000000000000099"
    draft.mkdir()
    (draft / "data.mdb").write_bytes(b"half")
    log.restart()
    assert not draft.exists()
    assert log.host.outcome == (RecoveryOutcome.VALID, "")


def test_a_drop_that_was_cut_off_is_finished_at_the_next_opening(log: Log) -> None:
    log.fill(12)
    kept = log.folder.parent / "kept"
    shutil.copytree(log.folder, kept)
    log.host.trim(12, FOREVER)
    for folder in kept.iterdir():
        if not (log.folder / folder.name).exists():
            shutil.copytree(folder, log.folder / folder.name)
    log.restart()
    assert log.segments()[0] > 1
    assert log.host.outcome == (RecoveryOutcome.VALID, "")


# -- damage -----------------------------------------------------------------------------------------


def silent(log: Log, reason: str) -> None:
    assert log.host.report("k") is None
    outcome, why = log.host.outcome
    assert outcome == RecoveryOutcome.INVALID
    assert reason in why


def test_a_short_newest_segment_is_kept_aside_and_named(log: Log) -> None:
    log.fill(2)
    log.host.close()
    data = next(log.folder.glob("segment-*/data.mdb"))
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    log.host = log.hosted()
    log.host.recover()
    silent(log, "corrupt-1")
    with pytest.raises(CorruptError, match="renamed"):
        log.host.status()
    assert [p.name for p in log.folder.iterdir()] == ["segment-00000000000000000001.corrupt-1"]
    log.restart()
    silent(log, "renamed")


def test_an_older_state_never_stands_in_for_a_damaged_one(log: Log) -> None:
    log.fill(12)
    log.host.close()
    newest = max(log.folder.glob("segment-*"))
    (newest / "data.mdb").write_bytes(b"rubbish" * 2000)
    for _ in range(2):
        log.host = log.hosted()
        log.host.recover()
        silent(log, "corrupt-1")
        log.host.close()
    # The older segments, whole by themselves, were not opened as if nothing were missing.
    with pytest.raises(UnavailableError):
        log.host.open_writer(99)


def test_a_missing_segment_is_a_hole_and_no_trim(log: Log) -> None:
    log.fill(12)
    log.host.close()
    shutil.rmtree(sorted(log.folder.glob("segment-*"))[1])
    log.host = log.hosted()
    log.host.recover()
    silent(log, "is missing")
    with pytest.raises(InvalidReplicaError):
        log.host.open_writer(99)


def test_a_missing_first_segment_is_a_loss_and_no_trim(log: Log) -> None:
    log.fill(12)
    log.host.close()
    shutil.rmtree(min(log.folder.glob("segment-*")))
    log.host = log.hosted()
    log.host.recover()
    silent(log, "is missing")


def test_damage_that_a_reader_meets_makes_the_replica_silent(log: Log) -> None:
    log.fill(12)
    log.restart()
    middle = sorted(log.folder.glob("segment-*"))[1]
    (middle / "data.mdb").write_bytes(b"rubbish" * 2000)
    with pytest.raises(CorruptError):
        log.read(1, 13)
    assert log.host.report("k") is None
    with pytest.raises(InvalidReplicaError, match="segment-"):
        log.read(1, 2)


def _change_state(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write the state record with other values; `...`: without this one. Returns it."""
    newest = max(folder.glob("segment-*"))
    with lmdb.open(str(newest), max_dbs=5) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as transaction:
            state = json.loads(transaction.get(b"state", db=meta) or b"") | changes
            kept = {name: value for name, value in state.items() if value is not ...}
            transaction.put(b"state", json.dumps(kept).encode(), db=meta)
    return kept


def test_a_store_of_the_first_format_is_opened_and_adopts_the_next_writers_cluster(
    log: Log,
) -> None:
    log.fill(2)
    log.host.close()
    _change_state(log.folder, format=1, system_id=..., crc=...)
    log.restart()
    assert log.host.status().system_id is None
    session, _ = log.host.open_writer(log.host.status().term + 1)
    log.host.append(session, [], [], WalPosition(1, 0x9000), 0, 77)
    log.restart()
    assert log.host.status().system_id == 77


def test_a_newer_format_is_refused_by_its_number_and_left_alone(log: Log) -> None:
    log.fill(1)
    log.host.close()
    record = _change_state(log.folder, format=FORMAT + 1, crc=...)
    _change_state(log.folder, crc=crc_of(record))
    log.host = log.hosted()
    log.host.recover()
    with pytest.raises(NotSupportedError, match=f"format {FORMAT + 1}"):
        log.host.status()
    assert log.segments() == [1]


def test_entries_that_are_lost_are_no_trim(log: Log) -> None:
    log.fill(3)
    log.host.close()
    newest = max(log.folder.glob("segment-*"))
    with lmdb.open(str(newest), max_dbs=5) as env:
        entries = env.open_db(b"entries")
        with env.begin(write=True) as transaction:
            transaction.delete((2).to_bytes(8, "big"), db=entries)
    log.host = log.hosted()
    log.host.recover()
    silent(log, "missing")


def test_a_stream_folder_without_a_segment_is_not_a_replica(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    host = HostedReplica(folder)
    host.recover()
    with pytest.raises(CorruptError, match="no segment"):
        host.status()
    assert Segment.offset_in_name("segment-1") is None


# -- writers and lazy commits -----------------------------------------------------------------------


def test_the_writer_before_the_last_is_fenced(log: Log) -> None:
    old = log.session
    log.take_over()
    with pytest.raises(FencedError, match="newer writer"):
        log.host.append(old, [], [], None, 0)
    log.append(log.make.whole())


def test_a_store_that_cannot_write_leaves_the_core_at_what_the_disk_says(log: Log) -> None:
    log.fill(2)
    before = log.host.status()
    store = log.host._store

    def fail(*_: object, **__: object) -> None:
        raise lmdb.DiskError("No space left on device")

    store._segments[-1].write = fail  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="No space left"):
        log.append(log.make.whole())
    assert log.host.status() == before
    log.take_over()
    log.fill(1)
    assert set(log.read(1, 4)) == {1, 2, 3}


@pytest.mark.parametrize(
    "broken", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("a fault of ours")]
)
def test_a_disk_that_cannot_be_opened_again_leaves_no_core_ahead_of_it(
    log: Log, monkeypatch: pytest.MonkeyPatch, broken: Exception
) -> None:
    log.fill(2)
    before = log.host.status()

    def fail(*_: object, **__: object) -> None:
        raise lmdb.DiskError("No space left on device")

    def cannot(_: object) -> None:
        raise broken

    log.host._store._segments[-1].write = fail  # type: ignore[method-assign]
    with monkeypatch.context() as patched:
        patched.setattr(StreamStore, "open", cannot)
        with pytest.raises((UnavailableError, RuntimeError)):
            log.append(log.make.whole())
        # Nothing is told or taken until the disk has been read.
        with pytest.raises((UnavailableError, RuntimeError)):
            log.host.status()
        with pytest.raises((UnavailableError, RuntimeError)):
            log.host.append(log.session, [], [], None, 0)
    assert log.host.status() == before
    log.take_over()
    log.fill(1)
    assert set(log.read(1, 4)) == {1, 2, 3}


def test_a_folder_that_cannot_be_listed_now_is_asked_again(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.fill(2)
    before = log.host.status()
    log.host.close()
    log.host = log.hosted()

    def cannot(_: object) -> Iterator[Path]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", cannot)
        log.host.recover()
        assert log.host.report("k") is None
        with pytest.raises(UnavailableError, match="Too many open files"):
            log.host.status()
    assert log.host.status() == before


def test_empty_commits_are_written_once_a_second(log: Log) -> None:
    log.fill(1)
    for n in range(2, 12):
        log.version = n
        log.host.commit([IssuedCommit(CommitContext(n, 2, 2, 0))], n)
        report = log.host.report("k")
        assert report is not None
        assert report.version == 1
    log.now += 1.0
    report = log.host.report("k")
    assert report is not None
    assert report.version == 11
    log.host.commit([IssuedCommit(CommitContext(12, 2, 2, 0))], 12)
    log.restart()  # a polite end writes it down
    assert log.host.status().version == 12


def test_thirty_six_thousand_empty_versions_leave_nothing_behind(log: Log) -> None:
    log.fill(2)
    before = log.host.disk_bytes
    for version in range(3, 36_003):
        log.host.commit([IssuedCommit(CommitContext(version, 3, 3, 0))], version)
        log.now += 0.01  # 100 versions a second: 360 writes
        log.host.report("k")
    assert log.host.disk_bytes <= before + (64 << 10)
    log.host.close()
    log.host = log.hosted()
    start = time.thread_time()
    log.host.recover()
    assert time.thread_time() - start < 0.1
    assert log.host.status().version == 36_002
    log.take_over()
    log.version = 36_002
    log.fill(1)
    assert set(log.read(1, 4)) == {1, 2, 3}


# -- look-ups ---------------------------------------------------------------------------------------


def test_plans_are_bounded_by_bytes_versions_and_version(log: Log) -> None:
    log.fill(10)
    cuts = log.host.plan(1, 99, None, None)
    assert [(c.version, c.end_offset) for c in cuts] == [(n, n + 1) for n in range(1, 11)]
    assert cuts[-1].bytes_total == sum(map(len, log.written.values()))
    assert [c.version for c in log.host.plan(1, 4, None, None)] == [1, 2, 3, 4]
    assert [c.version for c in log.host.plan(4, 99, None, 2)] == [4, 5]
    one = len(log.written[4])
    assert [c.version for c in log.host.plan(4, 99, 3 * one, None)] == [4, 5, 6]
    assert [c.version for c in log.host.plan(4, 99, 1, None)] == [4]
    assert log.host.plan(11, 99, None, None) == []
    log.host.trim(6, FOREVER)
    assert [c.version for c in log.host.plan(6, 99, 2 * one, None)] == [6, 7]


def test_commits_are_found_by_time_and_by_version(log: Log) -> None:
    times = []
    for n in range(12):
        if n % 3 == 2:
            log.make.time -= 50_000  # a commit time that goes back
        log.append(log.make.whole(size=300_000))
        log.commit()
        times.append(log.make.time)
    for wanted in sorted({*times, min(times) - 1, max(times) + 1}):
        expected = next((n + 1 for n, time in enumerate(times) if time >= wanted), None)
        found = log.host.version_at(wanted)
        assert (found and found.version) == expected
    for version in range(1, 15):
        found = log.host.cut_before(version)
        assert (found.version if found else 0) == min(version - 1, 12)
    log.host.trim(5, FOREVER)
    assert log.host.version_at(0) is not None


def test_transactions_behind_an_lsn_committed_or_not(log: Log) -> None:
    ends = []
    for _ in range(4):
        log.append(log.make.whole(2, size=200_000))
        ends += [(log.make.end_lsn - 0x100, log.make.xid - 1), (log.make.end_lsn, log.make.xid)]
        log.commit()
    log.append(log.make.start(), log.make.middle())
    log.append(log.make.end())
    ends.append((log.make.end_lsn, log.make.xid))
    for skip in range(len(ends)):
        lsn = ends[skip - 1][0] if skip else 0
        found = log.host.transactions_after(1, lsn, 100)
        assert [(end, xid) for end, xid, _ in found] == ends[skip:]
    assert len(log.host.transactions_after(1, 0, 3)) == 3
    assert log.host.transactions_after(2, 0, 100) == []


def test_entries_without_the_wanted_relations_stay_where_they_are(log: Log) -> None:
    log.append(log.make.whole(), log.make.whole(table=AUDIT))
    log.append(log.make.start(), log.make.middle(table=AUDIT), log.make.middle(), log.make.end())
    log.commit()
    wanted = [e.offset for b in batches(log.host, 1, 7, ["public.audit"]) for e in b]
    assert wanted == [2, 3, 4]  # 3 begins a transaction that goes on
    assert [e.offset for b in batches(log.host, 1, 7, ["public.none"]) for e in b] == [3]


def test_nothing_is_read_above_what_is_committed(log: Log) -> None:
    log.fill(1)
    log.append(log.make.whole())
    with pytest.raises(BehindError, match="offset 3 is beyond the committed end 2"):
        log.read(1, 3)


def test_the_newest_schema_of_each_relation(log: Log) -> None:
    assert log.host.newest_schemas() == []
    log.fill(8)
    assert log.host.newest_schemas() == [SCHEMAS[16385], SCHEMAS[AUDIT]]
    digest = entry.schema_hash(SCHEMAS[AUDIT])
    assert log.host.schemas([digest]) == {digest: SCHEMAS[AUDIT]}
    with pytest.raises(CorruptError, match="not in the registry"):
        log.host.schemas([bytes(16)])
    # Whoever asks for a hash that never was does not stop the replica.
    assert log.host.report("k") is not None
    assert log.host.schemas([digest]) == {digest: SCHEMAS[AUDIT]}


def test_the_newest_schema_of_a_relation_is_the_last_that_was_sent(log: Log) -> None:
    before = SCHEMAS[AUDIT]
    after = entry.schema_record(pm.relation(AUDIT, "audit", [("note", 25), ("more", 25)]))
    for records in ([before], [after], [before, after], [after, before]):
        log.host.append(log.session, [], records, None, 2**64 - 1)
        assert log.host.newest_schemas() == [records[-1]]
    log.restart()
    assert log.host.newest_schemas() == [before]


def test_a_read_that_meets_a_closed_store_is_told_so(log: Log) -> None:
    log.fill(3)
    store = log.host._store
    store.close()
    reads: list[Callable[[], object]] = [
        lambda: store.read(1, 3, 100),
        lambda: list(store.scan(1, 3)),
        lambda: list(store.commits_behind(0)),
        lambda: list(store.uncommitted(1)),
        lambda: store.schemas([b"x"]),
        store.known_schemas,
        store.newest_schemas,
    ]
    for read in reads:
        with pytest.raises(UnavailableError, match="closed"):
            read()
    # Nothing is left to be closed twice.
    log.restart()
    assert log.host.status().end_offset == 4


def test_readers_and_a_writer_at_the_same_time(log: Log) -> None:
    stop = threading.Event()
    problems: list[Exception] = []

    def follow() -> None:
        try:
            while not stop.is_set():
                status = log.host.status()
                for batch in batches(log.host, status.low_offset, status.committed_end):
                    for each in batch:
                        assert log.written[each.offset] == each.data
        except TrimmedError:
            return follow()
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=follow) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        log.fill(3, size=200_000)
        log.host.trim(log.host.status().committed_end - 4, FOREVER)
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []


def test_an_environment_that_is_only_out_of_reach_is_not_kept_aside(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append(*(log.make.whole() for _ in range(3)))
    log.host.close()
    newest = Segment.at(log.folder, 1)
    # A reader of a store that a failed write has closed still has the environment open.
    newest.open(write=True)
    again = log.hosted()
    again.recover()
    with pytest.raises(UnavailableError, match="could not open it now"):
        again.status()
    assert again.report("k") is None
    assert [path.name for path in log.folder.iterdir()] == [newest.folder.name]
    newest.close()
    assert again.status().end_offset == 4
    again.close()
