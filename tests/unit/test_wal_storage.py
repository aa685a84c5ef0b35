"""A safekeeper's WAL on a real disk: segments, boundaries, timelines, the horizon, and no room left."""

import errno
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from tests.support.simulated_disk import SimulatedDisk
from tests.support.wal import MIB, SMALL, Wal
from walsender_bridge.errors import (
    CorruptError,
    DiskFullError,
    TrimmedError,
    UnavailableError,
)
from walsender_bridge.quorum.safekeeper.horizon import horizon
from walsender_bridge.quorum.safekeeper.storage import checksums as segment_sums
from walsender_bridge.quorum.safekeeper.storage.segments import StorageLimits
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage
from walsender_bridge.runtime.folder import FolderDisk

LIMITS = StorageLimits(free_bytes=0)


def opened(disk, limits: StorageLimits = LIMITS) -> WalStorage:
    storage = WalStorage(disk, SMALL, limits)
    storage.open()
    return storage


def feed(storage: WalStorage, wal: Wal, to: int, step: int = 70_000) -> None:
    while storage.write_lsn < to:
        end = min(storage.write_lsn + step, to)
        storage.write(storage.write_lsn, wal.piece(storage.write_lsn, end), wal.timeline)
        storage.flush()


def held(storage: WalStorage) -> bytes:
    data = b""
    while piece := storage.read(storage.begin_lsn + len(data), 1 << 30):
        data += piece
    return data


@cache
def long_wal(seed: int) -> Wal:
    wal = Wal()
    wal.fill(8 * MIB, random.Random(seed), largest=2000)
    return wal


@pytest.fixture
def wal(seed: int) -> Wal:
    """One for all tests, which only read it."""
    return long_wal(seed)


@pytest.fixture(params=["direct", "cached", "simulated"])
def disk(request, tmp_path, seed):
    if request.param == "simulated":
        return SimulatedDisk(random.Random(seed))
    return FolderDisk(tmp_path / "wal", direct=request.param == "direct")


@pytest.fixture
def storage(disk) -> WalStorage:
    storage = opened(disk)
    storage.reset(MIB)
    return storage


def test_segments_have_postgresqls_names_and_bytes(storage, disk, wal):
    feed(storage, wal, 3 * MIB + 12_345)
    assert {name for name in disk.names() if name.startswith("0")} == {
        "000000010000000000000001",
        "000000010000000000000002",
        "000000010000000000000003.partial",
    }
    assert disk.read("000000010000000000000002", 0, MIB) == wal.piece(2 * MIB, 3 * MIB)
    assert disk.size("000000010000000000000003.partial") == MIB
    assert held(storage) == wal.piece(MIB, 3 * MIB + 12_345)


@pytest.mark.parametrize("position", [MIB + 8192 * 9, 2 * MIB, 2 * MIB + 8192, 3 * MIB])
@pytest.mark.parametrize("orderly", [True, False])
def test_11_restart_at_a_page_and_at_a_segment_boundary(disk, seed, position, orderly):
    rng = random.Random(seed)
    for exact in (True, False):
        wal = Wal()
        if exact:
            wal.fill_exactly(position, rng)
        wal.fill(position + 50_000, rng, largest=5000)
        storage = opened(disk)
        storage.reset(MIB)
        feed(storage, wal, position)
        if orderly:
            storage.close()
        again = opened(disk)
        promised = position if orderly else wal.last_end(position)
        assert again.flush_lsn >= promised
        assert again.flush_lsn <= position
        assert held(again) == wal.piece(MIB, again.flush_lsn)
        assert again.align(again.flush_lsn) == wal.last_end(again.flush_lsn)
        feed(again, wal, wal.end)
        assert held(again) == wal.piece(MIB, wal.end)


def test_a_crash_in_a_record_keeps_every_whole_one(storage, disk, wal, seed):
    rng = random.Random(seed)
    for _ in range(30):
        position = rng.randrange(storage.flush_lsn + 1, storage.flush_lsn + 200_000)
        feed(storage, wal, position)
        storage = opened(disk)
        assert wal.last_end(position) <= storage.flush_lsn <= position + 7


def test_what_is_given_in_small_pieces_is_one_write(storage, disk, wal):
    if not isinstance(disk, SimulatedDisk):
        pytest.skip("the operations are counted on the simulated disk")
    feed(storage, wal, MIB + 4096)
    before = len(disk.log)
    for lsn in range(MIB + 4096, MIB + 104_096, 1000):
        storage.write(lsn, wal.piece(lsn, lsn + 1000), 1)
    assert storage.flush() == MIB + 104_096
    assert [entry.split()[0] for entry in disk.log[before:]] == ["write"]
    storage.flush()
    assert len(disk.log) == before + 1


def test_a_receiver_puts_bytes_where_they_are_written_from(storage, wal):
    space = storage.buffer(1)
    space[:5000] = wal.piece(MIB, MIB + 5000)
    storage.advance(5000)
    assert storage.flush_lsn == MIB
    assert storage.flush() == MIB + 5000
    assert held(storage) == wal.piece(MIB, MIB + 5000)


# -- recycled segments ------------------------------------------------------------------------------


def test_a_recycled_segment_is_read_only_as_far_as_it_was_written(storage, disk, wal):
    feed(storage, wal, 3 * MIB + 50_000)
    assert storage.remove_below(3 * MIB + 50_000) == 2
    feed(storage, wal, 4 * MIB + 20_000)
    last = next(name for name in disk.names() if name.endswith(".partial"))
    # The old WAL is there, whole records of it, behind what was written.
    assert disk.read(last, 40_960, 8192) in {
        wal.piece(start + 40_960, start + 49_152) for start in (MIB, 2 * MIB)
    }
    assert storage.read(4 * MIB + 19_000, 8192) == wal.piece(4 * MIB + 19_000, 4 * MIB + 20_000)
    assert storage.read(4 * MIB + 20_000, 8192) == b""
    again = opened(disk)
    assert wal.last_end(4 * MIB + 20_000) <= again.flush_lsn <= 4 * MIB + 20_007
    # After a start nothing of it is left in the current segment.
    assert not any(disk.read(last, 40_960, MIB))


def test_old_records_that_fit_in_behind_new_ones_are_not_found(disk, seed):
    """The worst case: in each segment a record begins at the same block, where the new WAL ends for now."""
    rng = random.Random(seed)
    wal = Wal()
    block = 3 * 8192 + 4096
    for start in range(MIB, 7 * MIB, MIB):
        wal.fill_exactly(start + block, rng)
        wal.record(rng.randbytes(1000))
        wal.switch()
    storage = opened(disk)
    storage.reset(MIB)
    feed(storage, wal, 4 * MIB)
    assert storage.remove_below(4 * MIB) > 1
    feed(storage, wal, 4 * MIB + block)
    partial = next(name for name in disk.names() if name.endswith(".partial"))
    old = disk.read(partial, block, 1024)
    assert old in {wal.piece(s + block, s + block + 1024) for s in range(MIB, 4 * MIB, MIB)}
    again = opened(disk)
    assert again.flush_lsn == 4 * MIB + block


@pytest.mark.parametrize("stale", [False, True])
def test_32_a_crash_at_any_byte_of_a_segment_switch(disk, seed, stale):
    """The segment is a recycled one: behind what was written lies old WAL, where the padding would be."""
    rng = random.Random(seed)
    wal = Wal()
    wal.fill(3 * MIB + 500_000, rng)
    start, end = wal.switch(stale=stale)
    wal.fill(end + 50_000, rng)
    storage = opened(disk)
    storage.reset(MIB)
    feed(storage, wal, 3 * MIB)
    assert storage.remove_below(3 * MIB)
    own = start + 24
    cuts = {start + 8, own - 1, own, own + 1, own + 9000, end - 8192, end - 1, end, end + 9000}
    for position in sorted({*cuts, *(rng.randrange(start, end) for _ in range(3))}):
        feed(storage, wal, position)
        for _ in range(2):
            storage = opened(disk)
            assert wal.last_end(position) <= storage.flush_lsn <= max(position, own)
            assert held(storage) == wal.piece(storage.begin_lsn, storage.flush_lsn)
            assert storage.align(storage.flush_lsn) == wal.last_end(storage.flush_lsn)


# -- cutting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [MIB, MIB + 4096, 2 * MIB, 3 * MIB + 70_000, 3 * MIB + 70_001])
def test_7_after_a_truncation_nothing_is_left_behind_it(storage, disk, wal, cut):
    feed(storage, wal, 4 * MIB + 100_000)
    storage.truncate(cut)
    assert storage.flush_lsn == storage.write_lsn == cut
    assert held(storage) == wal.piece(MIB, cut)
    for name in disk.names():
        if name.startswith("0"):
            start = int(name[16:24], 16) * MIB
            assert start < cut
            assert not any(disk.read(name, max(cut - start, 0), MIB))
    feed(storage, wal, 4 * MIB + 50)
    assert held(storage) == wal.piece(MIB, 4 * MIB + 50)


def test_a_reset_begins_anew_and_lower_too(storage, disk, wal):
    feed(storage, wal, 4 * MIB + 100_000)
    storage.remove_below(3 * MIB)
    storage.reset(2 * MIB)
    assert (storage.begin_lsn, storage.flush_lsn) == (2 * MIB, 2 * MIB)
    assert {name for name in disk.names() if name.startswith(("0", "spare"))} == set()
    feed(storage, wal, 2 * MIB + 9000)
    again = opened(disk)
    assert again.begin_lsn == 2 * MIB
    assert held(again) == wal.piece(2 * MIB, again.flush_lsn)


def test_what_begins_inside_a_record_is_never_less_than_acknowledged(disk, seed):
    """All that is held is the rest of one record: it is found again, although nothing can check it."""
    wal = Wal()
    wal.fill(2 * MIB - 50_000, random.Random(seed))
    wal.record(random.Random(seed).randbytes(200_000))
    wal.fill(2 * MIB + 300_000, random.Random(seed))
    storage = opened(disk)
    storage.reset(2 * MIB)
    for to in range(2 * MIB + 5000, 2 * MIB + 300_000, 35_000):
        feed(storage, wal, to)
        storage = opened(disk)
        assert storage.flush_lsn >= max(wal.last_end(to), 2 * MIB)
        assert held(storage) == wal.piece(2 * MIB, storage.flush_lsn)


def test_a_timeline_switch_copies_the_start_of_its_segment(storage, disk, wal, seed):
    point = next(end for end in wal.ends if end > 2 * MIB + 300_000)
    feed(storage, wal, point)
    other = wal.copy(point, timeline=2)
    other.fill(4 * MIB, random.Random(seed))
    feed(storage, other, 3 * MIB + 1000)
    assert {name for name in disk.names() if name.startswith("0")} == {
        "000000010000000000000001",
        "000000010000000000000002.partial",
        "000000020000000000000002",
        "000000020000000000000003.partial",
    }
    assert disk.read("000000020000000000000002", 0, MIB) == other.piece(2 * MIB, 3 * MIB)
    assert opened(disk).timeline == 2
    # The older proposer comes back, and the newer timeline's WAL was never committed.
    storage.truncate(point)
    feed(storage, wal, 3 * MIB + 500)
    again = opened(disk)
    assert again.timeline == 1
    assert held(again) == wal.piece(MIB, again.flush_lsn)
    assert not any(name.startswith("00000002") for name in disk.names())


def test_histories_are_kept(storage, disk):
    assert storage.history(2) is None
    storage.save_history(2, b"1\t0/3000000\tno recovery target specified\n")
    assert opened(disk).history(2) == b"1\t0/3000000\tno recovery target specified\n"
    assert "00000002.history" in disk.names()


# -- old WAL, and no room ---------------------------------------------------------------------------


def test_10_old_wal_is_removed_at_the_horizon_and_not_before(storage, wal):
    feed(storage, wal, 5 * MIB + 100_000)
    at = wal.last_end(3 * MIB)
    for bound in (MIB, 2 * MIB - 1, 2 * MIB - 8):
        assert storage.remove_below(bound) == 0
    assert storage.begin_lsn == MIB
    # The record at the horizon begins in the segment before it: that is still needed.
    assert storage.remove_below(at + 8) == (2 if at == 3 * MIB else 1)
    assert storage.read(at, 8) == wal.piece(at, at + 8)
    with pytest.raises(TrimmedError, match="has been removed"):
        storage.read(storage.begin_lsn - 1, 1)
    assert storage.remove_below(2**63) > 0
    assert storage.begin_lsn == 5 * MIB
    assert storage.flush_lsn == 5 * MIB + 100_000


def test_10_the_horizon_is_the_least_of_all_that_needs_wal():
    base: dict[str, Any] = {"restart_lsn": 900, "commit_lsn": 950, "flush_lsn": 1000}
    assert horizon(**base) == 900
    assert horizon(**base | {"restart_lsn": 999}) == 950
    assert horizon(**base, slots=[850, 870]) == 850
    assert horizon(**base, archived_lsn=700) == 700
    assert horizon(**base, archived_lsn=0) == 0
    assert horizon(**base, keep_bytes=300) == 700
    assert horizon(**base, keep_bytes=3000) == 0


def test_10_slots_and_archive_hold_max_slot_wal_keep_size_at_most():
    base: dict[str, Any] = {"restart_lsn": 900, "commit_lsn": 950, "flush_lsn": 1000}
    # A reader that never comes back, and an archive that is away, hold no more than that.
    assert horizon(**base, slots=[100, 870], max_slot_wal_keep_size=300) == 700
    assert horizon(**base, archived_lsn=0, max_slot_wal_keep_size=300) == 700
    assert horizon(**base, slots=[850], archived_lsn=800, max_slot_wal_keep_size=300) == 800
    assert horizon(**base, slots=[100], max_slot_wal_keep_size=None) == 100
    assert horizon(**base, slots=[100], max_slot_wal_keep_size=0) == 900
    assert horizon(**base, slots=[100], max_slot_wal_keep_size=2000) == 100
    # It limits nobody else: a laggard has a limit of its own, and `keep_bytes` is asked for.
    assert horizon(**base | {"restart_lsn": 50}, slots=[100], max_slot_wal_keep_size=300) == 50
    assert horizon(**base, slots=[100], keep_bytes=500, max_slot_wal_keep_size=300) == 500


def test_9_no_room_for_a_segment_is_an_error_no_ack_and_it_goes_on(wal, seed):
    disk = SimulatedDisk(random.Random(seed))
    storage = opened(disk)
    storage.reset(MIB)
    feed(storage, wal, 2 * MIB - 5000)
    disk.capacity = MIB + 300_000
    storage.write(storage.write_lsn, wal.piece(2 * MIB - 5000, 2 * MIB + 9000), 1)
    for _ in range(3):
        with pytest.raises(
            DiskFullError, match=r"(?s)no space for more WAL.*HINT:  free disk space"
        ):
            storage.flush()
        # What fits is durable, and no byte more was told.
        assert storage.flush_lsn == 2 * MIB
        assert "new-segment" not in disk.names()
    assert storage.segments.full
    disk.capacity = 1 << 40
    assert storage.flush() == 2 * MIB + 9000
    assert not storage.segments.full
    assert held(storage) == wal.piece(MIB, 2 * MIB + 9000)


def test_9_the_file_system_is_full_although_it_said_otherwise(wal, seed, monkeypatch):
    """Quotas and thin volumes: the room that is told is not there when it is written."""
    disk = SimulatedDisk(random.Random(seed), capacity=MIB + 400_000)
    monkeypatch.setattr(disk, "free_bytes", lambda: 1 << 40)
    grown = SimulatedDisk._write

    def write(self, file, data, offset, *, durable, name):
        if offset + len(data) > len(file.now) and self.capacity < 2 * MIB and "new-seg" in name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        grown(self, file, data, offset, durable=durable, name=name)

    monkeypatch.setattr(SimulatedDisk, "_write", write)
    storage = opened(disk)
    storage.reset(MIB)
    storage.write(MIB, wal.piece(MIB, MIB + 100), 1)
    with pytest.raises(DiskFullError, match="the file system is full"):
        storage.flush()
    assert storage.flush_lsn == MIB
    disk.capacity = 1 << 40
    assert storage.flush() == MIB + 100


def test_31_the_limit_stops_it_before_the_disk_is_full(storage, disk, wal):
    storage.segments.limits = StorageLimits(wal_bytes=3 * MIB, free_bytes=0, spares=1)
    feed(storage, wal, 4 * MIB)
    with pytest.raises(DiskFullError, match="3145728 bytes, and its limit is 3145728"):
        feed(storage, wal, 4 * MIB + 10)
    assert storage.segments.full
    assert storage.flush_lsn == 4 * MIB
    storage.remove_below(3 * MIB)
    assert storage.flush() == 4 * MIB + 10
    assert not storage.segments.full


def test_31_room_that_is_to_stay_free_does(wal, seed):
    disk = SimulatedDisk(random.Random(seed), capacity=4 * MIB)
    storage = opened(disk, StorageLimits(free_bytes=MIB))
    storage.reset(MIB)
    with pytest.raises(DiskFullError, match="must remain free"):
        feed(storage, wal, 8 * MIB)
    assert disk.free_bytes() >= MIB
    storage.close()


def test_a_write_that_fails_is_not_tried_again(storage, disk, wal, monkeypatch):
    feed(storage, wal, MIB + 5000)

    def fail(data, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(storage._file, "write", fail)
    storage.write(MIB + 5000, wal.piece(MIB + 5000, MIB + 6000), 1)
    with pytest.raises(OSError, match="Input/output"):
        storage.flush()
    with pytest.raises(UnavailableError, match=r"(?s)Input/output.*restart the safekeeper"):
        storage.flush()
    assert storage.flush_lsn == MIB + 5000


# -- a disk that is not what was written ------------------------------------------------------------


def test_lost_and_damaged_wal_is_named(tmp_path, seed):
    wal = Wal()
    wal.fill(3 * MIB, random.Random(seed), largest=200)
    disk = FolderDisk(tmp_path / "wal")
    storage = opened(disk)
    storage.reset(MIB)
    feed(storage, wal, 2 * MIB + 100_000)
    storage.close()
    name = "000000010000000000000002.partial"
    path = tmp_path / "wal" / name
    data = path.read_bytes()
    start = wal.starts[wal.ends.index(wal.last_end(2 * MIB + 100_000))]
    for at in (start - 2 * MIB + 20, 100_000 // 8192 * 8192 + 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CorruptError):
            opened(disk)
    path.write_bytes(data[:-1])
    with pytest.raises(CorruptError, match="1048575 bytes, not 1048576"):
        opened(disk)
    path.unlink()
    with pytest.raises(CorruptError, match="which was durable, is missing"):
        opened(disk)
    (tmp_path / "wal" / "position").unlink()
    with pytest.raises(CorruptError, match="position file is missing"):
        opened(disk)


def test_a_damaged_position_is_kept_aside(tmp_path, wal):
    disk = FolderDisk(Path(tmp_path / "wal"))
    storage = opened(disk)
    storage.reset(MIB)
    feed(storage, wal, MIB + 100_000)
    path = tmp_path / "wal" / "position"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptError, match=r"renamed to position\.corrupt-1"):
        opened(disk)
    assert (tmp_path / "wal" / "position.corrupt-1").exists()


def test_40_every_complete_segment_has_the_sum_of_what_was_received(disk, wal, seed):
    """Over restarts, cuts and a change of the timeline; a sum never outlives what it is about."""
    rng = random.Random(seed)
    storage = opened(disk)
    storage.reset(MIB)
    feed(storage, wal, 3 * MIB + rng.randrange(MIB))
    if rng.random() < 0.5:
        storage.close()
    storage = opened(disk)
    feed(storage, wal, 5 * MIB + 100_000)
    point = wal.last_end(3 * MIB + rng.randrange(MIB))
    storage.truncate(point)
    assert set(segment_sums.read(disk)) == {f"00000001000000000000000{n}" for n in (1, 2)}
    other = wal.copy(point, timeline=2)
    other.fill(6 * MIB, rng)
    feed(storage, other, 6 * MIB)
    sums = segment_sums.read(disk)
    assert len(sums) == 5
    for name, crc in sums.items():
        assert crc == google_crc32c.value(disk.read(name, 0, MIB)), name


class ForgetfulCache(SimulatedDisk):
    """After a write that failed, the page cache holds its bytes as clean ones: a later sync succeeds without them."""

    fails = False

    def _write(self, file, data, offset, *, durable, name):
        if durable and self.fails:
            file.now[offset : offset + len(data)] = data
            raise OSError(errno.EIO, "input/output error")
        super()._write(file, data, offset, durable=durable, name=name)

    def _sync_file(self, file, name):
        self._step(f"sync {name}")
        for offset, data in file.pending:
            file.durable[len(file.durable) :] = bytes(max(offset - len(file.durable), 0))
            file.durable[offset : offset + len(data)] = data
        file.pending.clear()


def test_23_what_a_failed_write_left_in_the_page_cache_is_written_again(seed, wal):
    disk = ForgetfulCache(random.Random(seed))
    storage = opened(disk)
    storage.reset(MIB)
    feed(storage, wal, 2 * MIB + 100_000)
    disk.fails = True
    with pytest.raises(OSError, match="input/output"):
        feed(storage, wal, 2 * MIB + 160_000)
    disk.fails = False
    told = opened(disk).flush_lsn
    disk.restart()
    assert opened(disk).flush_lsn >= told
