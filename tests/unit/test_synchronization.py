"""Synchronization of replicas: every row of the table, wrong sources and batches, and a crash at every step (3 to 15, 22)."""

import copy
import itertools
import shutil
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import pgoutput_messages as pg
from tests.support.log_entries import ACCOUNTS, SCHEMAS, EntryMaker, batches
from walsender_bridge.change_log import entry
from walsender_bridge.change_log.protocol import MAX_COUNT, CommitContext, IssuedCommit
from walsender_bridge.change_log.replica.core import ReplicaState
from walsender_bridge.change_log.replica.disk import RecoveryOutcome
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.replica.synchronization import SyncBatch
from walsender_bridge.change_log.storage.segment import Segment
from walsender_bridge.errors import (
    BehindError,
    CorruptError,
    DivergedError,
    InvalidReplicaError,
    MalformedMessageError,
    UnavailableError,
)

FOREVER = 2**62


#: What is open in this process, which stands for several: LMDB opens a file only once in each.
OPENED: list[Segment] = []


@pytest.fixture(autouse=True)
def _segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    really = Segment.open

    def opened(segment: Segment, *, write: bool) -> None:
        really(segment, write=write)
        OPENED.append(segment)

    monkeypatch.setattr(Segment, "open", opened)
    yield
    end_process(Path("/"))


def end_process(folder: Path) -> None:
    """Nothing of the process that had this folder's replica is left but its files."""
    for segment in [each for each in OPENED if each.folder.is_relative_to(folder)]:
        segment.close()
        OPENED.remove(segment)


class Crash(BaseException):
    """The process is gone."""


class Replica(HostedReplica):
    """A replica on disk, with a writer and a repository of its own. `crash_at`: the step at which its process ends."""

    def __init__(self, folder: Path, segment_bytes: int = 100_000) -> None:
        self.steps = 0
        self.crash_at: int | None = None
        self.make = EntryMaker()
        # The stream's name is the folder's.
        super().__init__(folder / "s", segment_bytes=segment_bytes, step=self._count)

    def _count(self, name: str) -> None:
        self.steps += 1
        if self.steps - 1 == self.crash_at:
            raise Crash(name)

    def created(self) -> "Replica":
        self.create("s", "log")
        self.session, status = self.open_writer(1)
        self.make.follow(status)
        return self

    def write(self, *entries: bytes) -> None:
        self.append(self.session, entries, list(SCHEMAS.values()), None, 2**64 - 1, 7)

    def commit_next(self, count: int = 1, size: int = 3000) -> None:
        """Commit as many entries, each in a version of its own."""
        for _ in range(count):
            self.write(self.make.whole(size=size))
            self.commit_written()

    def commit_written(self) -> None:
        report = self.report("k")
        assert report is not None
        context = self._core.current.context
        known = context.global_end if context else 1
        version = self._core.current.version + 1
        self.commit(
            [IssuedCommit(CommitContext(version, report.local_offset, known + 3, report.length))], 1
        )

    def empty_commit(self) -> None:
        status, context = self.status(), self._core.current.context
        known = context.global_end if context else 1
        self.commit(
            [IssuedCommit(CommitContext(status.version + 1, status.committed_end, known + 5, 0))], 1
        )
        self._do(lambda core: core.persist())

    def reopened(self) -> "Replica":
        end_process(self.folder)
        again = Replica(self.folder.parent, self._segment_bytes)
        again.recover()
        return again

    def state(self) -> ReplicaState:
        return self._core.state

    def contents(self) -> list[tuple[int, int, int, bytes]]:
        status = self.status()
        found = batches(self, status.low_offset, status.committed_end)
        return [(*each,) for batch in found for each in batch]


def copied(replica: Replica, folder: Path) -> Replica:
    """Another replica with the same files."""
    shutil.copytree(replica.folder, folder / "s")
    again = Replica(folder)
    again.recover()
    again.make = copy.deepcopy(replica.make)
    return again


def synchronize(source: Replica, to: Replica, name: str = "k1") -> int:
    """Whole, or up to a crash. Returns how many entries were sent."""
    offer = source.sync_offer(name)
    lacking = to.sync_init(offer, "log")
    sent = 0
    for batch in source.sync_batches(offer, lacking):
        to.sync_replicate(name, batch)
        sent += len(batch.entries)
    return sent


def assert_same(source: Replica, to: Replica) -> None:
    """What the destination has is the source's, in memory and after a restart; and it takes part."""
    for reopen in (False, True):
        replica = to.reopened() if reopen else to
        assert replica.outcome[0] != RecoveryOutcome.INVALID, replica.outcome
        assert replica.state() == ReplicaState.SEALED
        theirs = [each for each in source.contents() if each[0] >= replica.status().low_offset]
        assert [
            each for each in replica.contents() if each[0] >= source.status().low_offset
        ] == theirs
        assert replica.status().term >= source.status().term
        for key in ("log_id", "context", "position", "confirmed_to", "system_id"):
            assert getattr(replica._core.durable, key) == getattr(source._core.durable, key), key
        assert replica.newest_schemas() == source.newest_schemas()
        report = replica.report("k2")
        assert report is not None
        assert (report.local_offset, report.length) == (source.status().committed_end, 0)


def sealed_behind(replica: Replica, end: int) -> None:
    replica.seal(end, replica.status().term + 1, MAX_COUNT)
    assert replica.state() == ReplicaState.SEALING


@pytest.fixture
def source(tmp_path: Path) -> Replica:
    return Replica(tmp_path / "source").created()


def new(tmp_path: Path) -> Replica:
    replica = Replica(tmp_path / "destination")
    replica.learn("log")
    return replica


def test_a_new_replica_gets_all(source: Replica, tmp_path: Path) -> None:
    source.commit_next(30)
    source.write(source.make.whole(), source.make.start())
    to = new(tmp_path)
    assert to.report("k2") is None
    assert synchronize(source, to) == 30
    assert_same(source, to)


def test_an_empty_source_makes_a_new_replica_sealed(source: Replica, tmp_path: Path) -> None:
    to = new(tmp_path)
    assert synchronize(source, to) == 0
    assert to.state() == ReplicaState.SEALED


def test_11_only_the_commit_context_is_lacking(source: Replica, tmp_path: Path) -> None:
    source.commit_next(3)
    to = copied(source, tmp_path / "to")
    source.empty_commit()
    sealed_behind(to, 99)
    offer = source.sync_offer("k1")
    lacking = to.sync_init(offer, "log")
    assert (lacking.first, lacking.end, lacking.context) == (4, 4, True)
    for batch in source.sync_batches(offer, lacking):
        to.sync_replicate("k1", batch)
    assert_same(source, to)


def test_10_a_replica_that_lacks_nothing_is_only_sealed(source: Replica, tmp_path: Path) -> None:
    source.commit_next(3)
    to = copied(source, tmp_path / "to")
    sealed_behind(to, 99)
    offer = source.sync_offer("k1")
    assert to.sync_init(offer, "log").context is False
    assert synchronize(source, to) == 0
    assert_same(source, to)


def test_13_a_middle_range_is_added_and_the_rejected_tail_dropped(
    source: Replica, tmp_path: Path
) -> None:
    source.commit_next(5)
    to = copied(source, tmp_path / "to")
    # A tail that the stream was sealed without: never to be seen again.
    to.session, status = to.open_writer(2)
    to.make.follow(status)
    to.write(to.make.whole(size=10), to.make.whole(size=10))
    source.commit_next(20)
    sealed_behind(to, 26)
    source.open_writer(3)
    assert synchronize(source, to) == 20
    assert_same(source, to)
    assert to.status().low_offset == 1


@pytest.mark.parametrize("where", ["middle of a segment", "start of a segment"])
def test_12_13_a_trimmed_source_wipes_what_ends_before_it(
    source: Replica, tmp_path: Path, where: str
) -> None:
    source.commit_next(5)
    to = copied(source, tmp_path / "to")
    source.commit_next(40)
    starts = source._store._offsets()
    assert len(starts) > 2
    low = source.trim(starts[1] + (where == "middle of a segment"), FOREVER)
    assert (low in source._store._offsets()) == (where == "start of a segment")
    sealed_behind(to, 40)
    assert low > 6
    assert synchronize(source, to) == 46 - low
    assert to.status().low_offset == low
    assert_same(source, to)


def test_5_a_source_that_was_trimmed_whole_gives_its_context(
    source: Replica, tmp_path: Path
) -> None:
    source.commit_next(5)
    source.trim(6, FOREVER)
    to = new(tmp_path)
    assert synchronize(source, to) == 0
    assert to.status().low_offset == 6
    assert_same(source, to)


def test_9_a_destination_with_more_than_its_source_is_left_alone(
    source: Replica, tmp_path: Path
) -> None:
    source.commit_next(3)
    to = copied(source, tmp_path / "to")
    to.session, status = to.open_writer(2)
    to.make.follow(status)
    to.commit_next(2)
    sealed_behind(to, 99)
    before = to.contents()
    with pytest.raises(DivergedError, match="source ends at 4 in version 3, before"):
        to.sync_init(source.sync_offer("k1"), "log")
    assert to.contents() == before


def test_7_another_log_and_another_history_are_refused(source: Replica, tmp_path: Path) -> None:
    source.commit_next(3)
    other = Replica(tmp_path / "other")
    other.create("s", "another log")
    to = new(tmp_path)
    with pytest.raises(DivergedError, match="of log another log, not of log log"):
        to.sync_init(other.sync_offer("k1"), "log")
    # The same stream with other bytes: the first entry does not continue those that are there, nor does an equal end.
    fork = Replica(tmp_path / "fork")
    fork.make = EntryMaker(2)
    fork.created().make.choose.seed(9)
    fork.commit_next(3)
    sealed_behind(fork, 99)
    with pytest.raises(DivergedError, match="another history"):
        synchronize(source, fork)
    source.commit_next(3)
    with pytest.raises(DivergedError, match="another history"):
        synchronize(source, fork)
    assert fork._core.current.committed_end == 4


@pytest.mark.parametrize("state", ["appendable", "sealed", "closed"])
def test_8_only_a_replica_that_is_behind_synchronizes(
    source: Replica, tmp_path: Path, state: str
) -> None:
    source.commit_next(3)
    to = copied(source, tmp_path / "to")
    if state == "sealed":
        to.seal(4, 2, MAX_COUNT)
    offer = source.sync_offer("k1")
    if state == "closed":
        to._core.close()
    with pytest.raises(InvalidReplicaError, match=f"cannot begin to synchronize.*{state}"):
        to.sync_init(offer, "log")


def test_14_a_batch_that_does_not_follow_changes_nothing(source: Replica, tmp_path: Path) -> None:
    source.commit_next(4)
    to = new(tmp_path)
    offer = source.sync_offer("k1")
    (batch,) = source.sync_batches(offer, to.sync_init(offer, "log"))
    entries, rows = batch.entries, batch.rows
    greater = replace(rows[1], context=replace(rows[1].context, length=2))
    wrong = [
        (SyncBatch(entries[1:], batch.schemas, rows[1:]), DivergedError),
        (SyncBatch([entries[0], entries[2]], batch.schemas, rows[:1]), DivergedError),
        (SyncBatch([entries[0][:-1] + b"?"], batch.schemas, rows[:1]), CorruptError),
        (SyncBatch(entries[:1], (), rows[:1]), MalformedMessageError),
        (SyncBatch(entries[:1], batch.schemas, rows[1:2]), InvalidReplicaError),
        (SyncBatch(entries, batch.schemas, [rows[0], greater, *rows[2:]]), InvalidReplicaError),
        (SyncBatch(entries, batch.schemas, [rows[0], *rows[2:]]), InvalidReplicaError),
        (SyncBatch(entries[:2], batch.schemas, rows[:2], offer.durable), InvalidReplicaError),
        (SyncBatch(entries, batch.schemas, rows[:3], offer.durable), InvalidReplicaError),
    ]
    for number, (each, error) in enumerate(wrong):
        with pytest.raises(error):
            to.sync_replicate("k1", each)
        assert to._core.tail.end_offset == 1, number
        assert to._core.current.context is None, number
    with pytest.raises(InvalidReplicaError, match="is being synchronized with k1, not k3"):
        to.sync_replicate("k3", batch)
    to.sync_replicate("k1", batch)
    assert_same(source, to)


@pytest.mark.parametrize("wipe", [True, False])
def test_15_a_crash_at_every_step_is_resumed(
    source: Replica, tmp_path: Path, *, wipe: bool
) -> None:
    """With several batches and rolls, and a wipe of several segments."""
    source.commit_next(6, 20_000)
    held = copied(source, tmp_path / "held")
    source.commit_next(12, 20_000)
    # A transaction larger than a batch, in several entries.
    source.write(
        source.make.start(size=3 << 20), source.make.middle(size=3 << 20), source.make.end()
    )
    source.commit_written()
    if wipe:
        assert source.trim(source._store._offsets()[-2], FOREVER) > 7
    sealed_behind(held, 99)
    end_process(held.folder)
    reached = set()
    for step in itertools.count():
        folder = tmp_path / f"crash-{step}"
        shutil.copytree(held.folder, folder / "s")
        to = Replica(folder)
        to.recover()
        to.crash_at = to.steps + step
        try:
            synchronize(source, to)
        except Crash as crash:
            reached.add(str(crash))
        else:
            break
        to = to.reopened()
        # What it is then is what it was, or it says nothing.
        if to.outcome[0] in {RecoveryOutcome.INVALID, RecoveryOutcome.SYNCHRONIZING}:
            assert to.report("k2") is None
        else:
            ends = {ReplicaState.SEALING: 7, ReplicaState.SEALED: source.status().committed_end}
            assert to._core.current.committed_end == ends[to.state()]
        if to._broken is not None or to.state() != ReplicaState.SEALED:
            synchronize(source, to, "k4")
        assert_same(source, to)
        end_process(folder)
        shutil.rmtree(folder)
    assert reached >= {"log-effect", "log-before-commit", "log-after-commit", "log-roll-renamed"}
    assert ({"log-wipe-removed", "log-wiped"} <= reached) == wipe


def test_15_a_source_that_restarts_between_any_two_batches_is_asked_again(
    source: Replica, tmp_path: Path
) -> None:
    """Meanwhile it has committed more, and trimmed what the destination already has."""
    source.commit_next(4, 1 << 20)
    to = new(tmp_path)
    done, taken = False, 0
    while not done:
        offer = source.sync_offer("k1")
        lacking = to.sync_init(offer, "log")
        sending = source.sync_batches(offer, lacking)
        batch = next(sending)
        to.sync_replicate("k1", batch)
        assert isinstance(sending, Generator)
        sending.close()
        taken, done = taken + 1, batch.done is not None
        assert (to.report("k2") is None) == (not done)
        make, source = source.make, source.reopened()
        source.make = make
        if taken == 1:
            assert not done
            source.session, _ = source.open_writer(2)
            source.commit_next(1, 1 << 20)
            source.trim(2, FOREVER)
    assert taken > 2
    synchronize(source, to) if to.state() != ReplicaState.SEALED else None
    assert_same(source, to)


@pytest.mark.parametrize("lost", ["everything", "a hole", "a flipped bit"])
def test_22_a_loss_is_no_trim_and_is_repaired(source: Replica, tmp_path: Path, lost: str) -> None:
    source.commit_next(90)
    to = copied(source, tmp_path / "to")
    end_process(to.folder)
    segments = sorted(to.folder.glob("segment-*"))
    assert len(segments) > 3
    gone = {"everything": segments, "a hole": segments[1:2]}
    for segment in gone.get(lost, ()):
        shutil.rmtree(segment)
    if lost == "a flipped bit":
        data = bytearray((segments[-1] / "data.mdb").read_bytes())
        data[:32] = bytes(32)
        data[4096 : 4096 + 32] = bytes(32)
        (segments[-1] / "data.mdb").write_bytes(data)
    again = Replica(to.folder.parent)
    again.recover()
    assert again.outcome[0] == RecoveryOutcome.INVALID
    assert again.report("k2") is None
    synchronize(source, again)
    assert_same(source, again)
    kept = [path.name for path in to.folder.iterdir() if ".replaced-" in path.name]
    assert len(kept) == (lost == "a flipped bit")


def test_8_a_replica_that_is_being_sealed_takes_no_source_behind_the_seal(
    source: Replica, tmp_path: Path
) -> None:
    """A repository that no longer leads may ask for it, while the source has not heard of the last commit yet."""
    source.commit_next(3)
    to = copied(source, tmp_path / "to")
    for each in (source, to):
        each.session, _ = each.open_writer(2)
        each.write(each.make.whole())
    # The repository has committed entry 4, which neither knows, and seals behind it.
    sealed_behind(to, 5)
    with pytest.raises(BehindError, match="committed up to 4, and not yet up to 5"):
        synchronize(source, to)
    assert to.state() == ReplicaState.SEALING
    known = to._core.current.context
    assert known is not None
    for each in (to, source):
        each.commit([IssuedCommit(CommitContext(known.version + 1, 4, known.global_end, 1))], 1)
    assert to.state() == ReplicaState.SEALED
    assert to.contents() == source.contents()


def damaged(replica: Replica) -> Replica:
    """The same, opened again without one of its older segments."""
    end_process(replica.folder)
    shutil.rmtree(sorted(replica.folder.glob("segment-*"))[1])
    return replica.reopened()


def test_9_an_invalid_replica_that_holds_more_than_its_source_is_left_alone(
    source: Replica, tmp_path: Path
) -> None:
    source.commit_next(3)
    more = copied(source, tmp_path / "to")
    more.session, _ = more.open_writer(2)
    more.commit_next(60)
    more = damaged(more)
    before = sorted(path.name for path in more.folder.iterdir())
    with pytest.raises(DivergedError, match="before the destination \\(64"):
        more.sync_init(source.sync_offer("k1"), "log")
    assert sorted(path.name for path in more.folder.iterdir()) == before
    # With a source that has it all it is repaired.
    assert more.outcome[0] == RecoveryOutcome.INVALID


def test_7_a_replica_that_cannot_be_read_takes_no_other_stream_and_no_other_log(
    source: Replica, tmp_path: Path
) -> None:
    source.commit_next(60)
    to = copied(source, tmp_path / "to")
    end_process(to.folder)
    newest = max(to.folder.glob("segment-*"))
    (newest / "data.mdb").write_bytes(b"no database")
    to = to.reopened()
    before = sorted(path.name for path in to.folder.iterdir())
    foreign = Replica(tmp_path / "foreign")
    foreign.create("zz", "log")
    another = Replica(tmp_path / "another")
    another.create("s", "another log")
    for other in (foreign, another):
        with pytest.raises(DivergedError, match="the source offers stream"):
            to.sync_init(other.sync_offer("k1"), "log")
        with pytest.raises(CorruptError):
            to.status()
    assert sorted(path.name for path in to.folder.iterdir()) == before
    synchronize(source, to)
    assert_same(source, to)


def test_the_newest_schema_of_a_relation_is_the_sources(source: Replica, tmp_path: Path) -> None:
    columns = [("id", 20)]
    for number in range(5):
        columns.append((f"c{number}", 25))
        record = entry.schema_record(pg.relation(ACCOUNTS, "accounts", columns))
        source.append(source.session, [], [record], None, 2**64 - 1, 7)
    source.commit_next(2)
    source.append(source.session, [], [record], None, 2**64 - 1, 7)
    to = new(tmp_path)
    synchronize(source, to)
    assert_same(source, to)


def test_8_a_refused_sync_init_leaves_the_writer_alone(source: Replica, tmp_path: Path) -> None:
    source.commit_next(3)
    to = copied(source, tmp_path / "to")
    to.session, _ = to.open_writer(2)
    with pytest.raises(InvalidReplicaError):
        to.sync_init(source.sync_offer("k1"), "log")
    to.commit_next(1)


def test_an_error_of_the_disk_in_a_wipe_passes(source: Replica, tmp_path: Path) -> None:
    source.commit_next(60)
    to = copied(source, tmp_path / "to")
    source.commit_next(60)
    source.trim(source._store._offsets()[-1], FOREVER)
    sealed_behind(to, 99)

    def full(name: str) -> None:
        if name == "log-wipe-removed":
            raise OSError(28, "No space left on device")

    count, to._step = to._step, full
    to._store._step = full
    with pytest.raises(UnavailableError, match="could not wipe"):
        synchronize(source, to)
    to._step = to._store._step = count
    assert to.report("k2") is None
    synchronize(source, to)
    assert_same(source, to)


def test_12_a_wiped_replica_takes_a_source_that_ends_below_its_watermark(
    source: Replica, tmp_path: Path
) -> None:
    source.commit_next(3)
    short = copied(source, tmp_path / "short")
    source.commit_next(60)
    source.trim(source._store._offsets()[-1], FOREVER)
    to = new(tmp_path)
    assert to.sync_init(source.sync_offer("k1"), "log").first > 4
    synchronize(short, to, "k3")
    assert_same(short, to)


def test_14_the_sources_state_at_the_end_has_to_follow(source: Replica, tmp_path: Path) -> None:
    source.commit_next(4)
    to = new(tmp_path)
    offer = source.sync_offer("k1")
    (batch,) = source.sync_batches(offer, to.sync_init(offer, "log"))
    context = offer.durable.context
    assert context is not None
    wrong = [
        replace(offer.durable, stream="zz"),
        replace(offer.durable, log_id="another log"),
        replace(offer.durable, context=replace(context, global_offset=context.global_offset + 1)),
        replace(offer.durable, context=CommitContext(context.version + 1, context.end, 1, 0)),
        replace(offer.durable, context=replace(context, version=context.version + 1)),
    ]
    for done in wrong:
        with pytest.raises(InvalidReplicaError, match="does not fit"):
            to.sync_replicate("k1", replace(batch, done=done))
    to.sync_replicate("k1", batch)
    assert_same(source, to)
