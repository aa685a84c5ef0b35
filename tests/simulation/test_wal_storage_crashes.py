"""Acceptance 23 and 32, the storage's half: power cuts at every write, torn and lost, in mid-truncation too.

The real storage runs on a disk that loses whatever it may lose. A model knows every byte that was given, and what was
acknowledged. The server often ends a segment early, and files are recycled. After each cut the storage must hold at
least `aligned(acknowledged)`, and of what it holds every byte must be right: the very bytes that were given there last.
Old WAL is removed, and brought back by donors, of which some have damaged WAL, or say the wrong timeline.
"""

import random

import pytest

from tests.support.simulated_disk import PowerCutError, SimulatedDisk, _Handle
from tests.support.wal import MIB, SMALL, Wal
from walsender_bridge.errors import CorruptError, DiskFullError, TrimmedError
from walsender_bridge.postgres.protocol import wal_record
from walsender_bridge.postgres.protocol.wal_page import (
    PAGE_BYTES,
    SHORT_HEADER,
    page_start,
    parse_page_header,
    parse_segment_name,
)
from walsender_bridge.postgres.protocol.wal_record import RecordScan
from walsender_bridge.quorum.safekeeper import backfill
from walsender_bridge.quorum.safekeeper.backfill import BackfillStorage
from walsender_bridge.quorum.safekeeper.storage import recovery as wal_recovery
from walsender_bridge.quorum.safekeeper.storage import segments
from walsender_bridge.quorum.safekeeper.storage import wal as wal_storage
from walsender_bridge.quorum.safekeeper.storage.segments import PARTIAL, Segments, StorageLimits
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage

#: Room for the position file is always left.
LIMITS = StorageLimits(free_bytes=100_000)
ENOUGH = 1 << 40


class Simulation:
    """One storage, the WAL that is fed to it, and what was promised about it."""

    def __init__(self, seed: int) -> None:
        print(f"seed {seed}")
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk(self.rng)
        self.wal = Wal(origin=MIB)
        self.wal.fill(self.wal.origin + 100_000, self.rng)
        self.acknowledged = MIB
        self.committed = MIB
        self.floor: int | None = None  # a truncation to here was begun
        self.anew: Wal | None = None  # a reset to the beginning of this was begun
        self.full = 0
        self.cuts: dict[str, int] = {}
        #: From where on the WAL is of which timeline.
        self.timelines = [(MIB, 1)]
        #: The highest beginning since the WAL began anew; below it lies what spares hold.
        self.highest = MIB
        #: The beginning that older WAL was joined at; None: WAL was removed since.
        self.joined: int | None = None
        self.brought = self.refused = 0
        self.storage = self._opened()
        self.storage.reset(MIB)

    def _opened(self) -> WalStorage:
        storage = WalStorage(self.disk, SMALL, LIMITS)
        storage.open()
        self.catch_up = BackfillStorage(storage)
        return storage

    # -- what is done to it -------------------------------------------------------------------------

    def feed(self) -> None:
        """A few pieces, up to ends of records, of pages, or anywhere; then one flush, and the acknowledgement."""
        for _ in range(self.rng.randrange(1, 4)):
            start = self.storage.write_lsn
            length = self.rng.choice([200, 3000, 8192, 60_000, 400_000])
            to = start + self.rng.randrange(1, length)
            if self.wal.end < to:
                self.wal.fill(to, self.rng, largest=self.rng.choice([100, 400, 20_000, 300_000]))
            choice = self.rng.random()
            if choice < 0.4:
                to = max(to // 8192 * 8192, start)
            elif choice < 0.6:
                to = min((end for end in self.wal.ends if end >= to), default=to)
            self.give(start, self.wal.piece(start, to))
        self.acknowledged = self.storage.flush()
        while self.rng.random() < 0.5:
            self.storage.prepare()

    def switch(self) -> None:
        """The server ends its segment early. The rest arrives in pieces; it is zeros, or what an old file held."""
        if self.storage.write_lsn < self.wal.end:
            self.give(self.storage.write_lsn, self.wal.piece(self.storage.write_lsn, self.wal.end))
        _, end = self.wal.switch(stale=self.rng.random() < 0.3)
        own = self.wal.switches[-1]
        pieces = {own, end, *(self.rng.randrange(own, end + 1) for _ in range(3))}
        for to in sorted(pieces):
            self.give(self.storage.write_lsn, self.wal.piece(self.storage.write_lsn, to))
            self.acknowledged = self.storage.flush()

    def give(self, start: int, data: bytes) -> None:
        """Hand in bytes, as whole pieces or as a receiver does that reads straight into the buffer."""
        if self.rng.random() < 0.5:
            self.storage.write(start, data, self.wal.timeline)
            return
        while data:
            space = self.storage.buffer(self.wal.timeline)
            length = self.rng.randrange(1, min(len(space), len(data)) + 1)
            if self.rng.random() < 0.5:
                length = min(len(space), len(data))
            space[:length] = data[:length]
            self.storage.advance(length)
            data = data[length:]

    def fill_up(self) -> None:
        """There is no room for another segment; what fits is durable, and once there is room it goes on."""
        self.disk.capacity = ENOUGH - self.disk.free_bytes() + self.rng.randrange(2 * MIB)
        start = self.storage.write_lsn
        to = start + self.rng.randrange(3 * MIB)
        if self.wal.end < to:
            self.wal.fill(to, self.rng, largest=20_000)
        try:
            self.give(start, self.wal.piece(start, to))
            self.storage.flush()
        except DiskFullError:
            self.full += 1
        # What the disk took counts, whether the flush said so or not.
        self.acknowledged = self.storage.flush_lsn
        self.disk.capacity = ENOUGH
        assert not self.storage.failed
        self.acknowledged = self.storage.flush()
        assert self.acknowledged == self.storage.write_lsn

    def begin_anew(self) -> None:
        """A rebuild: the log begins again somewhere else, below or above what was held."""
        origin = MIB * self.rng.randrange(1, self.storage.flush_lsn // MIB + 3)
        self.anew = Wal(origin=origin, timeline=self.wal.timeline)
        self.anew.fill(origin + 100_000, self.rng)
        self.storage.reset(origin)
        self._began_anew()

    def _began_anew(self) -> None:
        assert self.anew is not None
        self.wal, self.anew = self.anew, None
        self.acknowledged = self.committed = self.highest = self.wal.origin
        self.timelines = [(self.wal.origin, self.wal.timeline)]
        self.joined = None

    def commit(self) -> None:
        self.committed = self.rng.randrange(self.committed, self.acknowledged + 1)

    def fork(self) -> None:
        """Another proposer's WAL from a record that is not committed: often the same layout, other bytes."""
        low = self.wal.last_end(self.committed)
        ends = [end for end in self.wal.ends if low <= end <= self.storage.flush_lsn]
        point = self.rng.choice([*ends[-40:], *ends[:1]]) if ends else low
        timeline = self.wal.timeline + (self.rng.random() < 0.3)
        if point < self.storage.begin_lsn:
            return
        self.floor = point
        self.storage.truncate(point)
        self.floor = None
        self.acknowledged = point
        self.committed = min(self.committed, point)
        self.wal = self._diverged(point, timeline)
        self.timelines = [each for each in self.timelines if each[0] < point]
        self.timelines.append((point, timeline))

    def _diverged(self, point: int, timeline: int) -> Wal:
        """The other WAL: its records have the lengths of the old ones, so old ones would fit in behind them."""
        other = self.wal.copy(point, timeline=timeline)
        if point == self.wal.origin:
            other.starts, other.ends = [], []
        lengths = [b - a for a, b in zip(self.wal.starts, self.wal.ends, strict=True) if a >= point]
        for length in lengths[: self.rng.randrange(1, 60)]:
            other.record(self.rng.randbytes(max(length - 29, 0) // 8 * 8 - 5 if length > 40 else 0))
        return other

    def remove(self) -> None:
        self.joined = None
        self.storage.remove_below(self.committed)
        self.highest = max(self.highest, self.storage.begin_lsn)
        if self.storage.begin_lsn > self.wal.origin:
            with pytest.raises(TrimmedError):
                self.storage.read(self.storage.begin_lsn - 1, 1)

    def backfill(self) -> None:
        """A donor's older WAL comes in pieces, in between whatever else there is; now and then one has it wrong."""
        self.catch_up.want(self.rng.randrange(self.wal.origin, self.storage.begin_lsn + 1))
        for _ in range(self.rng.randrange(1, 12)):
            lsn, begin = self.catch_up.next_lsn, self.storage.begin_lsn
            if self.catch_up.checking:
                self._check_catch_up(begin)
            elif lsn >= self.wal.origin:
                if lsn == begin - MIB:
                    self.donated = self._donated(lsn, begin)
                data, timeline, _ = self.donated
                at = lsn - (begin - MIB)
                self.catch_up.take(lsn, data[at : at + self.rng.choice([5000, 600_000])], timeline)

    def _donated(self, start: int, end: int) -> tuple[bytes, int, bool]:
        """A segment as a donor has it, its timeline, and whether it is right."""
        data, timeline = bytearray(self.wal.piece(start, end)), self.timeline_at(end - 1)
        records = [each for each in self.wal.starts if start <= each < end]
        addressed = {int.from_bytes(data[at + 4 : at + 8], "little") for at in range(0, MIB, 8192)}
        fault = self.rng.random()
        if fault < 0.15 and records:
            data[self.rng.choice(records) - start + self.rng.randrange(4)] ^= (
                1 << self.rng.randrange(8)
            )
            return bytes(data), timeline, False
        if fault < 0.3 and timeline > 1 and timeline in addressed:
            return bytes(data), timeline - 1, False
        return bytes(data), timeline, True

    def timeline_at(self, lsn: int) -> int:
        return next(timeline for start, timeline in reversed(self.timelines) if start <= lsn)

    def _check_catch_up(self, begin: int) -> None:
        while self.catch_up.checking and self.rng.random() < 0.95:
            if self.catch_up.check():
                self.joined = begin - MIB
                assert self.donated[2], "wrong WAL was joined"
                self.brought += 1
        if self.catch_up.why:
            assert not self.donated[2], self.catch_up.why
            self.catch_up.why = ""
            self.refused += 1

    def stop_and_start(self) -> None:
        end = self.storage.write_lsn
        self.storage.close()
        self.storage = self._opened()
        assert self.storage.flush_lsn == end, "an orderly stop keeps the end to the byte"
        self.check()

    # -- what must hold -----------------------------------------------------------------------------

    def crash(self) -> None:
        self.disk.restart()
        while True:
            try:
                if self.rng.random() < 0.3:
                    self.disk.cut_at = self.rng.randrange(12)
                self.storage = self._opened()
                self.disk.cut_at = None
                break
            except PowerCutError:
                self.disk.restart()
        self.disk.capacity = ENOUGH
        if self.anew is not None:
            # Either all of the old WAL, or nothing and the new beginning.
            begin, end = self.storage.begin_lsn, self.storage.flush_lsn
            if begin == end == self.anew.origin:
                self._began_anew()
            self.anew = None
        self.highest = max(self.highest, self.storage.begin_lsn)
        if self.joined is not None:
            assert self.storage.begin_lsn <= self.joined, "what was joined is gone"
        promised = self.wal.last_end(self.acknowledged)
        if self.floor is not None:
            promised = min(promised, self.floor)
            self.floor = None
        assert self.storage.flush_lsn >= promised
        end = self.storage.flush_lsn
        if (
            self.timelines[-1][0] > end
        ):  # it is fed on from there in the timeline that it had come to
            self.timelines = [each for each in self.timelines if each[0] < end]
            self.timelines.append((end, self.wal.timeline))
        self.check()
        self.acknowledged = self.storage.flush_lsn
        # Nobody was told that a record is committed which was not acknowledged.
        self.committed = min(self.committed, self.acknowledged)

    def check(self) -> None:
        storage = self.storage
        assert storage.flush_lsn <= self.wal.end
        lsn = storage.begin_lsn
        while lsn < storage.flush_lsn:
            data = storage.read(lsn, MIB)
            # Compared here: pytest would take minutes to draw the difference of two megabytes.
            right = data == self.wal.piece(lsn, lsn + len(data))
            assert right, f"other bytes from {lsn:x} on"
            lsn += len(data)
        assert storage.align(storage.flush_lsn) == max(
            self.wal.last_end(storage.flush_lsn), storage.begin_lsn
        )
        self.check_spares()
        self.check_behind_the_end()

    def check_behind_the_end(self) -> None:
        """After a start nothing but zeros lies behind the end, and a complete name is of a whole segment."""
        end = self.storage.flush_lsn
        for name in self.disk.names():
            place = parse_segment_name(name.removesuffix(PARTIAL), MIB)
            if place is None:
                continue
            _, start = place
            assert self.storage.begin_lsn < start + MIB, f"{name} lies below the beginning"
            assert start < end, f"{name} lies behind the end"
            if name.endswith(PARTIAL):
                behind = any(self.disk.read(name, max(end - start, 0), MIB))
                assert not behind or end >= start + MIB, f"{name} has bytes behind {end:x}"
            else:
                assert start + MIB <= end, f"{name} is not whole"
                newest = self.storage.segments.at(start)
                if newest is not None and newest.name == name:
                    assert place[0] == self.timeline_at(start + MIB - 1), f"{name}: its timeline"

    def check_spares(self) -> None:
        """A spare may become any later segment: what lies in it must never look like that one's WAL."""
        for name in self.disk.names():
            if name.startswith("spare-"):
                data = self.disk.read(name, 0, MIB)
                addresses = (
                    int.from_bytes(data[at + 8 : at + 16], "little")
                    for at in range(0, MIB, PAGE_BYTES)
                )
                assert max(addresses) < self.highest, f"{name} holds WAL that may come again"

    def run(self, actions: int) -> None:
        doing = [self.feed] * 12 + [self.commit] * 4
        doing += [self.switch] * 3 + [self.remove] * 3
        doing += [self.fork, self.fork, self.stop_and_start, *[self.backfill] * 4]
        doing += [self.fill_up, self.begin_anew]
        for _ in range(actions):
            if self.disk.cut_at is None:
                self.disk.cut_at = self.rng.randrange(1, 60)
            action = self.rng.choice(doing)
            try:
                action()
            except PowerCutError:
                name = action.__name__
                self.cuts[name] = self.cuts.get(name, 0) + 1
                self.crash()


@pytest.mark.parametrize("number", range(4))
def test_23_power_cuts_at_any_write(seed, number):
    simulation = Simulation(seed * 1000 + number)
    simulation.run(150)
    assert sum(simulation.cuts.values()) > 5
    print(f"older segments: {simulation.brought} brought, {simulation.refused} refused")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_23_power_cuts_at_any_write_for_long(seed):
    cuts: dict[str, int] = {}
    for number in range(60):
        simulation = Simulation(seed * 10_000 + number)
        simulation.run(300)
        for name, count in simulation.cuts.items():
            cuts[name] = cuts.get(name, 0) + count
    print(cuts)
    actions = {"feed", "switch", "fork", "remove", "stop_and_start", "fill_up", "begin_anew"}
    actions.add("backfill")
    assert set(cuts) == actions


def found(seed: int, runs: int) -> bool:
    """Whether the simulation finds a fault in so many runs."""
    for number in range(runs):
        try:
            Simulation(seed * 1000 + number).run(150)
        except (AssertionError, CorruptError):
            return True
    return False


def test_23_a_truncation_that_leaves_old_bytes_is_found(seed, monkeypatch):
    """The unsafe variant of rule 3: cut the length alone. Then an old record stands behind a new one."""
    monkeypatch.setattr(Segments, "wipe", lambda self, file, lsn: None)
    assert found(seed, 25)


def test_23_a_flush_that_is_not_durable_is_found(seed, monkeypatch):
    opened = SimulatedDisk.open
    monkeypatch.setattr(
        SimulatedDisk, "open", lambda self, name, durable: opened(self, name, durable=False)
    )
    assert found(seed, 25)


def test_23_a_cut_that_is_not_announced_is_found(seed, monkeypatch):
    monkeypatch.setattr(WalStorage, "_mark", lambda self, lsn, cutting=False, exact=False: None)
    assert found(seed, 25)


def test_23_a_rebuild_that_keeps_its_spares_is_found(seed, monkeypatch):
    """They may hold WAL of the very LSNs that come again."""
    monkeypatch.setattr(Segments, "drop_spares", lambda self: None)
    assert found(seed, 25)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_23_a_copy_for_a_new_timeline_that_outlives_a_crash_is_found(seed, monkeypatch):
    """As a spare it brought back WAL that was cut off."""
    monkeypatch.setattr(Segments, "take_for_copy", Segments.take_spare)
    assert found(seed, 400)


def test_32_a_scan_past_a_switch_without_its_padding_is_found(seed, monkeypatch):
    """What a recycled file holds there is taken for the padding, and called damaged at the next start."""

    def walk(pages, start, expected, *, stop=None, previous=None):
        end = 1 << 62 if stop is None else stop
        return RecordScan(pages, start, expected, stop=end, previous=previous)

    monkeypatch.setattr(wal_recovery, "RecordScan", walk)
    assert found(seed, 40)


def test_32_an_end_told_before_its_name_is_durable_is_found(seed, monkeypatch):
    """After a switch nothing else says that the padding had come."""
    monkeypatch.setattr(WalStorage, "_sync_names", lambda self: None)
    assert found(seed, 60)


def test_32_padding_that_must_be_pages_is_found(seed, monkeypatch):
    """A server that crashed in a switch sends old WAL as its padding: it is no damage."""
    look_back = wal_record.record_start_before

    def strict(pages, position, expected, *, oldest):
        page_lsn = page_start(position - 1)
        page = pages(page_lsn)
        if any(page[:SHORT_HEADER]):
            parse_page_header(page, page_lsn, expected)
        return look_back(pages, position, expected, oldest=oldest)

    for module in (wal_record, wal_storage):
        monkeypatch.setattr(module, "record_start_before", strict)
    assert found(seed, 25)


def test_23_a_complete_name_before_the_segment_is_whole_is_found(seed, monkeypatch):
    """What has such a name is believed to be durable to its end."""
    adopt = Segments.adopt

    def hasty(self, spare, timeline, start):
        file = adopt(self, spare, timeline, start)
        self.complete(file)
        return self.at(start)

    monkeypatch.setattr(Segments, "adopt", hasty)
    assert found(seed, 25)


def test_39_a_beginning_that_is_not_durable_is_found(seed, monkeypatch):
    """Readers would have been told of WAL that the next start removes."""

    def join(self, received, timeline, crc):
        begin = self.begin_lsn - MIB
        file = self.segments.join(received, timeline, begin)
        self.begin_lsn = begin
        self.sums.add(file.name, crc)

    monkeypatch.setattr(WalStorage, "join", join)
    assert found(seed, 25)


def test_39_an_older_segment_that_is_not_synced_is_found(seed, monkeypatch):
    sync = _Handle.sync
    monkeypatch.setattr(
        _Handle, "sync", lambda self: self._name == segments.RECEIVING or sync(self)
    )
    assert found(seed, 60)


def test_39_older_wal_that_is_not_walked_is_found(seed, monkeypatch):
    monkeypatch.setattr(BackfillStorage, "_scanned", lambda self: iter(()))
    assert found(seed, 25)


def test_39_an_older_segment_under_another_timelines_name_is_found(seed, monkeypatch):
    class Any:
        @staticmethod
        def unpack_from(_):
            return (0,)

    monkeypatch.setattr(backfill, "_PAGE_TIMELINE", Any)
    assert found(seed, 60)
