"""Pages and records of the WAL, made by hand: where records begin, end, and are given up."""

import random
import struct
from itertools import pairwise

import pytest

from tests.support.wal import MIB, SMALL, Wal
from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.postgres.protocol import wal_page
from walsender_bridge.postgres.protocol.wal_page import PAGE_BYTES, WalFormat
from walsender_bridge.postgres.protocol.wal_record import RecordScan, aligned, record_start_before


def walk(
    wal: Wal, start: int | None = None, stop: int | None = None
) -> tuple[list[int], RecordScan]:
    walked = RecordScan(wal.page, wal.origin if start is None else start, wal.format, stop=stop)
    return [record.end for record in walked], walked


@pytest.fixture
def wal(seed: int) -> Wal:
    wal = Wal()
    wal.fill(MIB + 300_000, random.Random(seed), largest=3000)
    wal.record(random.Random(seed).randbytes(100_000))
    wal.fill(MIB + 500_000, random.Random(seed))
    return wal


def test_every_record_is_found_in_order(wal):
    ends, walked = walk(wal)
    assert ends == wal.ends
    assert walked.ran_out
    assert [r.start for r in RecordScan(wal.page, wal.origin, wal.format)] == wal.starts
    assert all(
        b.previous == a.start for a, b in pairwise(RecordScan(wal.page, wal.origin, wal.format))
    )


def test_aligned_is_the_end_of_the_last_whole_record(wal, seed):
    rng = random.Random(seed)
    positions = {rng.randrange(wal.origin, wal.end + 1) for _ in range(300)}
    near = {end + d for end in rng.sample(wal.ends, 100) for d in (-8, -1, 0, 1, 7, 24)}
    pages = {lsn + d for lsn in range(wal.origin, wal.end, PAGE_BYTES) for d in (0, 1, 24, 40)}
    for position in sorted(positions | near | pages):
        if wal.origin <= position <= wal.end:
            found = aligned(wal.page, position, wal.format, oldest=wal.origin)
            assert found == wal.last_end(position), position


def test_aligned_reads_few_pages(wal):
    read = []

    def page(lsn):
        read.append(lsn)
        return wal.page(lsn)

    aligned(page, wal.end, wal.format, oldest=wal.origin)
    assert len(read) <= 4


def test_what_begins_in_a_page_is_found_behind_a_record_over_many(wal):
    long = max(pairwise(wal.starts), key=lambda each: each[1] - each[0])[0]
    within = long + 50_000
    assert record_start_before(wal.page, within, wal.format, oldest=wal.origin) <= long
    assert aligned(wal.page, within, wal.format, oldest=wal.origin) == wal.last_end(within)
    # All that is held is the middle of that record.
    oldest = wal_page.page_start(long) + PAGE_BYTES
    assert record_start_before(wal.page, within, wal.format, oldest=oldest) is None
    assert aligned(wal.page, within, wal.format, oldest=oldest) == oldest


def test_a_changed_byte_ends_the_walk_before_its_record(wal, seed):
    rng = random.Random(seed)
    for start, end in rng.sample(list(zip(wal.starts, wal.ends, strict=True))[:-1], 60):
        length = struct.unpack_from("<I", wal.data, start - wal.origin)[0]
        at = start - wal.origin + rng.choice([0, 8, 16, 17, 20, min(length, 40) - 1])
        old = wal.data[at]
        wal.data[at] ^= 1 << rng.randrange(8)
        ends, walked = walk(wal)
        assert walked.end <= end
        assert walked.end == wal.last_end(start)
        assert ends == [each for each in wal.ends if each <= start]
        wal.data[at] = old


def test_damage_below_what_was_received_is_named(wal):
    # Two records on one page, behind the first that begins there: no page further back is looked at.
    page = [(end - 1) // PAGE_BYTES for end in wal.ends]
    middle = next(n for n in range(2, len(page)) if page[n - 2] == page[n - 1] == page[n + 1])
    position = wal.ends[middle + 1]
    wal.data[wal.starts[middle] - wal.origin + 20] ^= 1
    with pytest.raises(CorruptError, match="another checksum"):
        aligned(wal.page, position, wal.format, oldest=wal.origin)


@pytest.mark.parametrize("left", [8, 16])
@pytest.mark.parametrize("stale", [False, True])
def test_32_a_switch_over_a_page_boundary_is_followed_by_padding(wal, seed, left, stale):
    """The page behind the boundary names where the switch record ends: no other record begins there."""
    wal.fill(2 * MIB + 200_000, random.Random(seed))
    wal.record(bytes(PAGE_BYTES - left - wal.end % PAGE_BYTES + PAGE_BYTES - 29 - 24))
    assert wal.end % PAGE_BYTES == PAGE_BYTES - left
    _, end = wal.switch(stale=stale)
    own = wal.switches[-1]
    assert own % PAGE_BYTES == 24 + 24 - left
    for position in (end, end - 1, own, own - 1):
        found = aligned(wal.page, position, wal.format, oldest=wal.origin)
        assert found == wal.last_end(position), hex(position)
    wal.data[wal.starts[-1] - wal.origin + 4] ^= 1
    with pytest.raises(CorruptError, match="another checksum"):
        aligned(wal.page, end, wal.format, oldest=wal.origin)


def test_records_of_a_recycled_segment_are_not_found(seed):
    """Whole records with a right checksum, left from older WAL: only their predecessor betrays them."""
    old, new = Wal(), Wal(origin=5 * MIB)
    old.fill(2 * MIB, random.Random(seed))
    new.record(b"new")
    start = new.ends[-1]
    # The same layout, so that an old record begins exactly where the new WAL ends.
    old_start = next(s for s in old.starts if s > old.origin + 1000)
    stale = old.piece(old_start, 2 * MIB)
    new.data += stale[: PAGE_BYTES - start % PAGE_BYTES]
    ends, walked = walk(new)
    assert ends == [start]
    assert "follows" in walked.why
    assert not walked.ran_out


def test_a_page_of_a_recycled_segment_is_refused(seed):
    old, new = Wal(), Wal(origin=5 * MIB)
    old.fill(2 * MIB, random.Random(seed))
    new.fill(5 * MIB + PAGE_BYTES - 2000, random.Random(seed), largest=100)
    new.record(bytes(8000))
    last = new.ends[-2]
    page = 5 * MIB + PAGE_BYTES
    new.data[page - new.origin :] = old.piece(MIB + PAGE_BYTES, MIB + 2 * PAGE_BYTES)
    _, walked = walk(new)
    assert walked.end == last
    assert "it says that it is 0/102000" in walked.why


def test_a_switch_ends_at_the_next_segment(seed):
    wal = Wal()
    wal.fill(MIB + 20_000, random.Random(seed))
    start, end = wal.switch()
    assert end == 2 * MIB
    wal.record(b"next")
    ends, _ = walk(wal, stop=wal.end)
    assert ends == wal.ends
    assert aligned(wal.page, wal.end, wal.format, oldest=MIB) == wal.end
    assert aligned(wal.page, end, wal.format, oldest=MIB) == end
    # In the padding the record itself is whole.
    for position in (start + 24, start + 25, start + 30_000, end - 1):
        assert aligned(wal.page, position, wal.format, oldest=MIB) == start + 24
    assert aligned(wal.page, start + 23, wal.format, oldest=MIB) == wal.ends[-3]


def test_32_a_walk_that_seeks_the_end_stops_at_a_switch(seed):
    wal = Wal()
    wal.fill(MIB + 20_000, random.Random(seed))
    start, _ = wal.switch()
    wal.record(b"next")
    ends, walked = walk(wal)
    assert ends[-1] == walked.end == start + 24
    assert "padding" in walked.why


@pytest.mark.parametrize("behind", [0, 50_000])
def test_32_padding_that_is_old_wal_is_stepped_over(seed, behind):
    """What a server sends that crashed before it had zeroed the rest of a recycled segment."""
    wal = Wal()
    wal.fill(2 * MIB + 20_000, random.Random(seed))
    start, end = wal.switch(stale=True)
    wal.fill(end + behind, random.Random(seed))
    ends, _ = walk(wal, stop=wal.end)
    assert ends == wal.ends
    for position in (start + 24, start + 30_000, end - 8192, end - 1, end, wal.end):
        found = aligned(wal.page, position, wal.format, oldest=MIB)
        assert found == wal.last_end(position), position
    # A foreign page is damage where no switch comes before it.
    page = start // PAGE_BYTES * PAGE_BYTES
    wal.data[page - MIB] ^= 1
    with pytest.raises(CorruptError, match="magic"):
        aligned(wal.page, end, wal.format, oldest=MIB)
    with pytest.raises(CorruptError, match="magic"):
        aligned(wal.page, page + 100, wal.format, oldest=page)


def test_a_record_that_was_given_up_is_stepped_over(seed):
    wal = Wal()
    wal.fill(MIB + PAGE_BYTES - 1000, random.Random(seed), largest=100)
    before = wal.end
    start, _ = wal.record(bytes(20_000))
    wal.give_up(start)
    wal.record(b"overwrite")
    wal.fill(MIB + 40_000, random.Random(seed))
    ends, walked = walk(wal)
    assert ends == wal.ends
    assert walked.ran_out
    assert before in ends
    boundary = MIB + PAGE_BYTES
    assert aligned(wal.page, boundary, wal.format, oldest=MIB) == before
    assert aligned(wal.page, wal.end, wal.format, oldest=MIB) == wal.end


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"\x10\xd1", "its magic is D110, not D113"),
        (2, b"\x20\x00", "its flags are 0020"),
        (2, b"\x00\x00", "its flags are 0000"),
        (4, bytes(4), "timeline 0"),
        (8, b"\x08", "it says that it is"),
        (16, b"\x01", "timeline 1, 1 bytes to continue"),
        (24, b"\x00", "it is of system"),
        (32, b"\x01", "segments of 1048577"),
        (36, b"\x00\x40\x00\x00", "pages of 16384"),
    ],
)
def test_a_wrong_header_is_refused_by_what_is_wrong(offset, data, message):
    wal = Wal()
    wal.record(b"one")
    wal.data[offset : offset + len(data)] = data
    with pytest.raises(CorruptError, match=message):
        wal_page.parse_page_header(bytes(wal.data), MIB, wal.format)


def test_a_first_page_tells_whose_wal_it_is():
    wal = Wal()
    wal.record(b"one")
    header = wal_page.identify(bytes(wal.data))
    assert (header.major, header.lsn, header.timeline) == (16, MIB, 1)
    assert (header.system_id, header.segment_bytes) == (SMALL.system_id, MIB)
    swapped = bytes([wal.data[1], wal.data[0], *wal.data[2:]])
    with pytest.raises(NotSupportedError, match="big-endian PostgreSQL 16"):
        wal_page.identify(swapped)
    with pytest.raises(CorruptError, match="39 bytes"):
        wal_page.identify(bytes(wal.data[:39]))
    with pytest.raises(CorruptError, match="begin no WAL segment"):
        wal_page.identify(bytes(8192))


def test_formats_that_are_not_known_are_refused():
    with pytest.raises(NotSupportedError, match="PostgreSQL 10"):
        WalFormat(10, 1, 16 * MIB)
    with pytest.raises(NotSupportedError, match="3145728 bytes"):
        WalFormat(16, 1, 3 * MIB)


@pytest.mark.parametrize("size", [MIB, 16 * MIB, 1 << 30])
def test_segment_names(size):
    for lsn in (size, 1 << 32, (1 << 32) - 1, 0x123_4567_89AB, (1 << 64) - 1):
        name = wal_page.segment_name(0x1F, lsn, size)
        assert wal_page.parse_segment_name(name, size) == (0x1F, lsn // size * size)
    assert wal_page.segment_name(1, 0x1_6800_0000, 16 * MIB) == "000000010000000100000068"
    for name in ("00000000" * 3, "000000010000000100000068.partial", "00000001.history", "", "x"):
        assert wal_page.parse_segment_name(name, size) is None
    assert wal_page.parse_segment_name("0000000100000000FFFFFFFF", size) is None
    assert wal_page.history_name(26) == "0000001A.history"
