"""Older WAL for a safekeeper that lacks it: who is asked and told (proposer), what is taken, checked and joined (storage)."""

import errno
import random

import pytest

from tests.support.simulated_disk import PowerCutError, SimulatedDisk
from tests.support.wal import MIB, SMALL, Wal
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.quorum.proposer import effects as e
from walsender_bridge.quorum.proposer.catch_up.core import CatchUp as Feed
from walsender_bridge.quorum.proposer.peer import PeerState, SafekeeperPeer
from walsender_bridge.quorum.proposer.replication import Streaming
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.safekeeper import catch_up
from walsender_bridge.quorum.safekeeper.backfill import BackfillStorage
from walsender_bridge.quorum.safekeeper.effects import ControlState, SendWal, TakeCatchUpWal
from walsender_bridge.quorum.safekeeper.lending import Lending
from walsender_bridge.quorum.safekeeper.storage.segments import RECEIVING, StorageLimits
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage
from walsender_bridge.quorum.wal_server.refused_readers import RefusedReaders

BEGIN = 4 * MIB


@pytest.fixture
def wal(seed: int) -> Wal:
    """WAL of three older segments and of some that is held, with records over the segments' boundaries."""
    made = Wal()
    made.fill(BEGIN + 200_000, random.Random(seed), largest=100_000)
    return made


@pytest.fixture
def disk(seed: int) -> SimulatedDisk:
    return SimulatedDisk(random.Random(seed))


def opened(
    disk: SimulatedDisk, limits: StorageLimits | None = None
) -> tuple[WalStorage, BackfillStorage]:
    storage = WalStorage(disk, SMALL, limits or StorageLimits(free_bytes=0))
    storage.open()
    backfill = BackfillStorage(storage)
    backfill.want(MIB)
    return storage, backfill


def began_anew(
    disk: SimulatedDisk, wal: Wal, limits: StorageLimits | None = None
) -> tuple[WalStorage, BackfillStorage]:
    storage, backfill = opened(disk, limits)
    storage.reset(BEGIN)
    storage.write(BEGIN, wal.piece(BEGIN, BEGIN + 150_000), 1)
    storage.flush()
    return storage, backfill


def bring(backfill: BackfillStorage, wal: Wal, timeline: int = 1) -> None:
    """One segment, or the rest of it, in pieces; and its check."""
    start = backfill.next_lsn
    end = start - start % MIB + MIB
    while (lsn := backfill.next_lsn) and lsn < end:
        backfill.take(lsn, wal.piece(lsn, min(lsn + 300_000, end)), timeline)
    while backfill.checking:
        backfill.check()


# -- what is taken ----------------------------------------------------------------------------------


def test_39_older_wal_is_joined_down_to_what_is_wanted(disk, wal):
    storage, backfill = began_anew(disk, wal)
    backfill.want(2 * MIB + 5)
    for begin in (3 * MIB, 2 * MIB):
        bring(backfill, wal)
        assert storage.begin_lsn == begin
        assert storage.read(begin, MIB) == wal.piece(begin, begin + MIB)
    assert backfill.next_lsn == 0
    assert backfill.wanted_lsn == storage.begin_lsn
    # The WAL goes on where it was, and all of it is found again.
    storage.write(storage.write_lsn, wal.piece(storage.write_lsn, BEGIN + 180_000), 1)
    storage.flush()
    storage.close()
    again, _ = opened(disk)
    assert (again.begin_lsn, again.flush_lsn) == (2 * MIB, BEGIN + 180_000)
    assert again.sums._sums.keys() == {"000000010000000000000002", "000000010000000000000003"}


def test_39_a_kill_at_any_operation_leaves_the_old_beginning_or_the_new_one(seed, wal):
    for cut in range(100):
        disk = SimulatedDisk(random.Random(seed + cut))
        storage, backfill = began_anew(disk, wal)
        disk.cut_at = cut
        try:
            bring(backfill, wal)
        except PowerCutError:
            disk.restart()
            storage, backfill = opened(disk)
            assert storage.begin_lsn in {BEGIN, BEGIN - MIB}
            assert RECEIVING not in disk.names()
            assert storage.flush_lsn >= wal.last_end(BEGIN + 150_000)
            bring(backfill, wal)
        else:
            assert cut > 8, "every step was a place to be killed at"
            return
        lsn = storage.begin_lsn
        assert lsn <= BEGIN - MIB
        assert storage.read(lsn, MIB) == wal.piece(lsn, lsn + MIB)
    pytest.fail("it never came to its end")


@pytest.mark.parametrize("where", ["first", "middle", "seam"])
def test_39_a_damaged_segment_is_not_taken_and_named(disk, wal, where):
    storage, backfill = began_anew(disk, wal)
    inside = [each for each in wal.starts if BEGIN - MIB <= each < BEGIN]
    record = {"first": inside[0], "middle": inside[len(inside) // 2], "seam": inside[-1]}[where]
    right = wal.data[record - wal.origin + 20]
    wal.data[record - wal.origin + 20] ^= 1
    bring(backfill, wal)
    assert storage.begin_lsn == BEGIN
    assert "received WAL at 0/300000 was rejected" in backfill.why
    assert RECEIVING not in disk.names()
    # From a donor that has it right:
    wal.data[record - wal.origin + 20] = right
    bring(backfill, wal)
    assert (storage.begin_lsn, backfill.why) == (BEGIN - MIB, "")


def test_39_wal_that_does_not_lead_to_what_is_held_is_not_taken(disk, wal, seed):
    """Each record is right in itself: only the next one does not follow."""
    storage, backfill = began_anew(disk, wal)
    other = Wal()
    other.fill(BEGIN + 10_000, random.Random(seed + 1))
    bring(backfill, other)
    assert storage.begin_lsn == BEGIN
    assert backfill.why


def test_39_pages_of_a_later_timeline_than_the_name_are_not_taken(disk, seed):
    wal = Wal(timeline=2)
    wal.fill(BEGIN + 200_000, random.Random(seed))
    storage, backfill = opened(disk)
    storage.reset(BEGIN)
    storage.write(BEGIN, wal.piece(BEGIN, wal.end), 2)
    storage.flush()
    bring(backfill, wal, timeline=1)
    assert "is of timeline 2, not 1" in backfill.why
    bring(backfill, wal, timeline=3)
    assert "timeline 3 before 2" in backfill.why
    bring(backfill, wal, timeline=2)
    assert storage.begin_lsn == BEGIN - MIB
    assert "000000020000000000000003" in disk.names()


def test_39_a_segment_inside_of_one_record_is_taken_with_the_next(disk, seed):
    wal = Wal()
    wal.fill(2 * MIB + 500_000, random.Random(seed))
    wal.record(random.Random(seed).randbytes(2 * MIB))
    wal.fill(BEGIN + MIB, random.Random(seed))
    storage, backfill = opened(disk)
    storage.reset(BEGIN)
    assert backfill.next_lsn == 0, "nothing is held yet that it could be joined to"
    storage.write(BEGIN, wal.piece(BEGIN, wal.end), 1)
    storage.flush()
    bring(backfill, wal)
    assert storage.begin_lsn == 3 * MIB
    bring(backfill, wal)
    assert storage.begin_lsn == 2 * MIB


def test_39_what_comes_meanwhile_ends_a_segment_that_is_received(disk, wal):
    storage, backfill = began_anew(disk, wal)
    backfill.take(3 * MIB, wal.piece(3 * MIB, 3 * MIB + 100_000), 1)
    assert backfill.next_lsn == 3 * MIB + 100_000
    backfill.take(3 * MIB, wal.piece(3 * MIB, 3 * MIB + 100_000), 1)  # of a connection that broke
    assert backfill.next_lsn == 3 * MIB + 100_000
    storage.reset(6 * MIB)
    assert backfill.next_lsn == 0
    assert RECEIVING not in disk.names()


def test_39_no_older_wal_is_taken_where_the_log_needs_the_room(disk, wal):
    storage, backfill = began_anew(disk, wal, StorageLimits(wal_bytes=5 * MIB, free_bytes=0))
    bring(backfill, wal)
    assert storage.begin_lsn == 3 * MIB
    assert backfill.next_lsn == 0, (
        "two segments, this one, and three for the log are more than five"
    )
    disk.capacity = 3 * MIB
    _, backfill = opened(disk)
    assert backfill.next_lsn == 0


def test_39_a_full_disk_ends_a_piece_and_nothing_else(disk, wal):
    storage, backfill = began_anew(disk, wal)
    backfill.take(3 * MIB, wal.piece(3 * MIB, 3 * MIB + 100_000), 1)
    disk.capacity = 100_000
    backfill.take(backfill.next_lsn, wal.piece(3 * MIB + 100_000, 4 * MIB), 1)
    disk.capacity = 1 << 40
    assert RECEIVING not in disk.names()
    assert not storage.failed
    bring(backfill, wal)
    assert storage.begin_lsn == 3 * MIB


# -- the safekeeper's core --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeline", "begin", "length", "taken"),
    [
        (1, 3 * MIB, MIB, True),
        (
            2,
            3 * MIB,
            MIB,
            False,
        ),  # nothing of the log's first timeline or below it is of a later one
        (0, 3 * MIB, MIB, False),
        (1, 3 * MIB, MIB + 1, False),
        (1, 5 * MIB, 10, False),
        (2, 5 * MIB, 10, True),  # the segment in which the timeline changed
    ],
)
def test_39_older_wal_of_another_timeline_than_the_history_says_is_refused(
    timeline, begin, length, taken
):
    history = History((HistoryEntry(3, 4 * MIB, 1), HistoryEntry(5, 5 * MIB + 7, 2)))
    control = ControlState(1, m.ServerInfo(7, 16, MIB), m.NodeId(5, 9), history)
    effects = catch_up.answer(4, m.CatchUpWal(5, begin, timeline, length), control, 9 * MIB)
    assert effects == ([TakeCatchUpWal(4, 5, begin, timeline)] if taken else [])
    behind = ControlState(1, m.ServerInfo(7, 16, MIB), m.NodeId(6, 9), history)
    assert catch_up.answer(4, m.CatchUpWal(6, begin, timeline, length), behind, 9 * MIB) == []


# -- the proposer's ---------------------------------------------------------------------------------

PIECE = MIB // 2


@pytest.fixture
def streaming() -> Streaming:
    """Three that follow: 0 lacks what 1 has, 2 has a little more than 0."""
    peers = {number: SafekeeperPeer(number) for number in range(3)}
    found = Streaming(
        peers,
        Configuration(1, frozenset({10, 11, 12})),
        History((HistoryEntry(5, 4 * MIB, 2),)),
        epoch_start=5 * MIB,
        commit_lsn=5 * MIB,
        restart_lsn=4 * MIB,
        segment_size=MIB,
        limits=e.Limits(append_bytes=PIECE, backfill_bytes=2 * PIECE),
        primary_begin=None,
    )
    for number, begin in enumerate((4 * MIB, MIB, 3 * MIB)):
        peers[number].state = PeerState.STREAMING
        peers[number].begin_lsn, peers[number].flush_lsn = begin, 5 * MIB
    return found


@pytest.fixture
def feed(streaming: Streaming) -> Feed:
    made = Feed(e.Lineage(2, (WalPosition(1, 2 * MIB + 5),)), MIB)
    assert [each.peer for each in made.tick(streaming, 5)] == [0, 1, 2]
    return made


def held(begin: int, following: int, wanted: int = MIB) -> m.Held:
    return m.Held(5, begin, wanted, following)


def test_39_a_segment_is_read_in_pieces_from_one_that_has_all_of_it(feed, streaming):
    peers = streaming.peers
    (read,) = feed.held(peers[0], held(4 * MIB, 3 * MIB), streaming)
    assert read == e.ReadCatchUpWal(0, 3 * MIB, 3 * MIB + PIECE, 1)
    assert feed.held(peers[0], held(4 * MIB, 3 * MIB), streaming) == [], "one piece at a time"
    assert feed.was_read(read, PIECE, streaming) == [
        e.SendCatchUpWal(0, 3 * MIB, 3 * MIB + PIECE, 2)
    ]
    (read,) = feed.held(peers[0], held(4 * MIB, 3 * MIB + PIECE), streaming)
    assert read.end_lsn == 4 * MIB
    assert feed.goal(peers[0], streaming) == MIB
    feed.was_read(read, PIECE, streaming)
    assert feed.held(peers[0], held(3 * MIB, 2 * MIB), streaming) == [], (
        "the rest of the tick is others'"
    )
    feed.tick(streaming, 5)
    (read,) = feed.held(peers[0], held(3 * MIB, 2 * MIB), streaming)
    assert feed.was_read(read, PIECE, streaming)[0].timeline == 2, "of the segment's last byte"
    feed.held(peers[0], held(2 * MIB, 0, wanted=2 * MIB), streaming)
    assert feed.goal(peers[0], streaming) is None
    assert peers[0].begin_lsn == 2 * MIB


def test_39_whose_segment_was_not_taken_is_not_asked_for_it_again(feed, streaming):
    peers = streaming.peers
    for donor in (1, 2):
        for begin in (3 * MIB, 3 * MIB + PIECE):
            feed.tick(streaming, 5)
            (read,) = feed.held(peers[0], held(4 * MIB, begin), streaming)
            assert read.donor == donor
            feed.was_read(read, PIECE, streaming)
    feed.tick(streaming, 5)
    assert feed.held(peers[0], held(4 * MIB, 3 * MIB), streaming) == []
    assert not feed.stuck(peers[0]), "one may only have been restarted"
    assert feed.goal(peers[0], streaming) == MIB, "it lacks that WAL still"
    # After a while they are asked again, less and less often.
    asked = []
    for tick in range(1000):
        feed.tick(streaming, 5)
        for read in feed.held(peers[0], held(4 * MIB, 3 * MIB), streaming):
            asked.append((tick, read.donor))
            feed.was_read(read, 0, streaming)
    assert {donor for _, donor in asked} == {1, 2}
    assert 10 <= len(asked) < 24, asked
    assert feed.stuck(peers[0])
    assert feed.goal(peers[0], streaming) == MIB
    feed.held(peers[0], held(3 * MIB, 2 * MIB), streaming)
    assert not feed.stuck(peers[0]), "it has been brought it"


def test_a_donor_that_has_nothing_or_closed_is_not_asked_first_again(feed, streaming):
    peers = streaming.peers
    (read,) = feed.held(peers[0], held(4 * MIB, 3 * MIB), streaming)
    assert read.donor == 1
    assert feed.was_read(read, 0, streaming) == []
    # It says that it holds that WAL, as it did before.
    feed.held(peers[1], held(MIB, 0), streaming)
    (read,) = feed.held(peers[0], held(4 * MIB, 3 * MIB), streaming)
    assert read.donor == 2
    assert not feed.stuck(peers[0])


def test_39_nobody_lends_who_is_not_in_the_term_or_has_less(feed, streaming):
    peers = streaming.peers
    peers[1].state = PeerState.VOTED
    (read,) = feed.held(peers[0], held(4 * MIB, 3 * MIB), streaming)
    assert read.donor == 2
    # It has removed it since.
    assert feed.was_read(read, 0, streaming) == []
    assert feed.held(peers[0], held(4 * MIB, 3 * MIB), streaming) == []
    peers[0].state = PeerState.RECOVERING
    assert feed.held(peers[0], held(4 * MIB, 3 * MIB), streaming) == []


def test_39_only_committed_wal_is_lent(feed, streaming):
    streaming.commit_lsn = 3 * MIB + 100
    (read,) = feed.held(streaming.peers[0], held(4 * MIB, 3 * MIB), streaming)
    assert read.end_lsn == 3 * MIB + 100


def test_39_a_receiver_that_went_away_is_brought_the_rest_when_it_is_back(feed, streaming):
    peers = streaming.peers
    (read,) = feed.held(peers[0], held(4 * MIB, 3 * MIB), streaming)
    peers[0].closed()
    assert feed.was_read(read, PIECE, streaming) == []
    peers[0].state = PeerState.STREAMING
    assert feed.held(peers[0], held(4 * MIB, 3 * MIB), streaming) != []


# -- readers that were refused ----------------------------------------------------------------------

STANDBY, OTHER = ("reader", "standby"), ("reader", "other")


def test_39_what_a_reader_was_refused_counts_until_it_has_it_or_stays_away():
    lacking = RefusedReaders()
    assert lacking.pin_lsn(0.0) is None
    lacking.refused(STANDBY, 500, 0.0)
    lacking.refused(OTHER, 300, 10.0)
    assert lacking.pin_lsn(59.0) == 300
    lacking.refused(STANDBY, 500, 59.0)
    assert lacking.pin_lsn(71.0) == 500, "the other has not come back"
    # It is being served: what lies behind what it has been sent is needed, as long as it reads.
    lacking.sent(STANDBY, 500, 80.0)
    for now in range(100, 2000, 50):
        lacking.sent(STANDBY, 500 + now, float(now))
        lacking.sent(OTHER, 5, float(now))
        assert lacking.pin_lsn(float(now)) == 500 + now
    lacking.sent(STANDBY, 2450, 2000.0)  # it has not got on
    assert lacking.pin_lsn(2030.0) == 2450
    assert lacking.pin_lsn(2100.0) is None


def test_39_wal_that_nobody_has_is_not_retained_for_ever():
    lacking = RefusedReaders()
    counted = []
    for now in range(0, 1000, 5):
        lacking.refused(STANDBY, 500, float(now))
        counted.append(lacking.pin_lsn(float(now)))
    assert counted[:121] == [500] * 121
    assert set(counted[121:]) == {None}
    lacking.refused(STANDBY, 700, 1001.0)
    assert lacking.pin_lsn(1001.0) == 700, "another position"
    for number in range(200):
        lacking.refused(("reader", str(number)), 900, 1002.0)
    assert len(lacking._refused) == 64


# -- what is lent -----------------------------------------------------------------------------------


def donor(disk: SimulatedDisk, wal: Wal) -> tuple[WalStorage, Lending]:
    """One that has received it all, in order."""
    storage, _ = opened(disk)
    storage.reset(MIB)
    for begin in range(MIB, BEGIN + MIB // 8, MIB // 8):
        storage.write(begin, wal.piece(begin, begin + MIB // 8), 1)
        storage.flush()
    return storage, Lending(storage)


def overwrite(disk: SimulatedDisk, name: str, at: int) -> None:
    handle = disk.open(name, durable=False)
    handle.write(b"DAMAGE", at)
    handle.sync()
    handle.close()


def lent(lending: Lending, begin: int, end: int, term: int = 5) -> bytes:
    lending.ask(SendWal(7, 5, begin, end))
    found = b""
    while lending.busy(lambda _: False):
        for conn, message, data in lending.step(term, lambda _: False):
            assert (conn, message.begin_lsn, message.length) == (7, begin + len(found), len(data))
            found += data
    return found


@pytest.fixture
def long_record(seed: int) -> Wal:
    """A record that begins in the second segment goes on in the third."""
    made = Wal()
    made.fill(3 * MIB - 50_000, random.Random(seed), largest=5000)
    made.record(random.Random(seed).randbytes(300_000))
    made.fill(BEGIN + MIB, random.Random(seed), largest=5000)
    return made


def test_a_damaged_segment_is_not_lent_wherever_the_damage_lies(disk, long_record, seed):
    """Also where no record of the segment itself covers it: within the rest of one that began before it."""
    wal, damaged = long_record, "000000010000000000000003"
    for at in (300, MIB - 300, random.Random(seed).randrange(MIB - 8)):
        folder = SimulatedDisk(random.Random(seed))
        storage, lending = donor(folder, wal)
        overwrite(folder, damaged, at)
        assert lent(lending, 2 * MIB, 2 * MIB + 1000) == wal.piece(2 * MIB, 2 * MIB + 1000)
        assert lending.damaged == []
        for begin in (3 * MIB, 3 * MIB + 4096, 4 * MIB - 8192):
            assert lent(lending, begin, begin + 8192) == b"", at
        assert lending.damaged == [damaged]
        # What is not complete has no sum yet; what is sound is lent on.
        assert lent(lending, BEGIN, BEGIN + 1000) == wal.piece(BEGIN, BEGIN + 1000)
        assert lent(lending, MIB, 3 * MIB) == wal.piece(MIB, 3 * MIB)
        assert lent(lending, 2 * MIB + 9, 3 * MIB + 9) == wal.piece(2 * MIB + 9, 3 * MIB)
        storage.remove_below(storage.flush_lsn)
        assert lending.damaged == [], "it is gone"


def test_a_receiver_is_brought_a_sound_copy_where_the_first_donor_has_it_damaged(
    disk, long_record, seed
):
    wal = long_record
    storage, backfill = began_anew(disk, wal)
    folders = [SimulatedDisk(random.Random(seed + n)) for n in range(2)]
    lenders = [donor(folder, wal)[1] for folder in folders]
    overwrite(folders[0], "000000010000000000000003", 300)
    for lsn in (3 * MIB, 2 * MIB):
        for lending in lenders:
            if data := lent(lending, lsn, lsn + MIB):
                backfill.take(lsn, data, 1)
                while backfill.checking:
                    backfill.check()
                break
        assert (storage.begin_lsn, backfill.why) == (lsn, "")
        assert storage.read(lsn, MIB) == wal.piece(lsn, lsn + MIB)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_segment_that_cannot_be_read_is_not_lent_and_ends_nothing(
    disk, wal, monkeypatch, recorded
):
    _, lending = donor(disk, wal)
    bad, read = "000000010000000000000002", SimulatedDisk.read
    if not recorded:
        lending._storage.sums.keep(set())

    def unreadable(self: SimulatedDisk, name: str, offset: int, length: int) -> bytes:
        if name == bad and offset <= 500_000 < offset + length:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, name, offset, length)

    monkeypatch.setattr(SimulatedDisk, "read", unreadable)
    assert bad not in lending.damaged
    assert lent(lending, 2 * MIB + 499_000, 2 * MIB + 501_000) == b""
    assert lending.damaged == [bad]
    assert lent(lending, 3 * MIB, 3 * MIB + 5000) == wal.piece(3 * MIB, 3 * MIB + 5000)


def test_a_segment_whose_seam_cannot_be_read_is_not_taken(disk, wal, monkeypatch):
    storage, backfill = began_anew(disk, wal)
    read = SimulatedDisk.read

    def unreadable(self: SimulatedDisk, name: str, offset: int, length: int) -> bytes:
        if name.endswith("4.partial"):
            raise OSError(errno.EIO, "Input/output error")
        return read(self, name, offset, length)

    monkeypatch.setattr(SimulatedDisk, "read", unreadable)
    bring(backfill, wal)
    assert storage.begin_lsn == BEGIN
    assert "Input/output error" in backfill.why


def test_nothing_is_lent_that_another_term_may_have_cut(disk, wal):
    _, lending = donor(disk, wal)
    assert lent(lending, 2 * MIB, 2 * MIB + 1000, term=6) == b""


def test_one_that_reads_no_answers_is_given_no_more_and_holds_up_nobody(disk, wal):
    _, lending = donor(disk, wal)
    for conn in (1, 2):
        while not lending.is_full(conn):
            lending.ask(SendWal(conn, 5, 2 * MIB, 2 * MIB + 1000))
    answered = []
    while lending.busy(lambda conn: conn == 1):
        answered += [conn for conn, _, _ in lending.step(5, lambda conn: conn == 1)]
    assert set(answered) == {2}
    assert not lending.is_full(2)
    assert lending.is_full(1)
    lending.forget(1)
    assert not lending.busy(lambda _: False)
