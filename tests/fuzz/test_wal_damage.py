"""Damaged WAL and plain noise: a walk comes to its end, soon, and never invents a record."""

import contextlib
import random
import time

import pytest

from tests.support.wal import MIB, SMALL, Wal
from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.postgres.protocol import wal_page
from walsender_bridge.postgres.protocol.wal_page import PAGE_BYTES
from walsender_bridge.postgres.protocol.wal_record import RecordScan, aligned, record_start_before

LIMIT_SECONDS = 5.0


def damage(data: bytearray, rng: random.Random) -> None:
    """Change bytes in place, where it tells most as often as anywhere."""
    for _ in range(rng.randrange(1, 4)):
        page = rng.randrange(0, len(data), PAGE_BYTES)
        at = rng.choice([page + rng.randrange(40), rng.randrange(len(data))]) % len(data)
        match rng.randrange(4):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + 8] = rng.randbytes(len(data[at : at + 8]))
            case 2:
                data[at : at + PAGE_BYTES] = bytes(len(data[at : at + PAGE_BYTES]))
            case _:
                other = rng.randrange(0, len(data), 8)
                piece = data[other : other + rng.randrange(8, PAGE_BYTES)]
                data[at : at + len(piece)] = piece[: len(data) - at]


@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_damage_ends_a_walk_where_it_lies_or_is_named(seed, rounds):
    print(f"seed {seed}")
    rng = random.Random(seed)
    whole = Wal()
    whole.fill(MIB + 60_000, rng)
    whole.record(rng.randbytes(30_000))
    whole.fill(MIB + 130_000, rng)
    honest = list(zip(whole.starts, whole.ends, strict=True))
    for _ in range(rounds):
        broken = Wal(data=bytearray(whole.data))
        damage(broken.data, rng)
        first = next((i for i, b in enumerate(broken.data) if b != whole.data[i]), len(whole.data))
        began = time.monotonic()
        walk = RecordScan(broken.page, MIB, SMALL)
        found = [(record.start, record.end) for record in walk]
        untouched = [each for each in honest if each[1] <= MIB + first]
        assert found[: len(untouched)] == untouched
        # A record behind the damage, found in spite of it, is one that was written.
        assert set(found) <= set(honest)
        for position in (broken.end, rng.randrange(MIB, broken.end)):
            with contextlib.suppress(CorruptError):
                assert aligned(broken.page, position, SMALL, oldest=MIB) <= position
        assert time.monotonic() - began < LIMIT_SECONDS


def test_noise_is_no_wal(seed):
    rng = random.Random(seed)
    for _ in range(300):
        noise = Wal(data=bytearray(rng.randbytes(rng.randrange(3 * PAGE_BYTES))))
        if rng.random() < 0.7 and len(noise.data) > 100:
            # Right headers, and noise for records.
            for at in range(0, len(noise.data) - 40, PAGE_BYTES):
                good = Wal(origin=MIB + at)
                good.record()
                size = wal_page.header_size(MIB + at, MIB)
                noise.data[at : at + size] = good.data[:size]
        assert list(RecordScan(noise.page, MIB, SMALL)) == []
        with contextlib.suppress(CorruptError):
            record_start_before(noise.page, noise.end, SMALL, oldest=MIB)
        with contextlib.suppress(CorruptError, NotSupportedError):
            wal_page.identify(bytes(noise.data))


def test_a_length_of_a_gigabyte_costs_nothing(seed):
    wal = Wal()
    start, _ = wal.record(b"x" * 100)
    wal.fill(MIB + 50_000, random.Random(seed))
    wal.data[start - MIB : start - MIB + 4] = (0x3FFFFFFF).to_bytes(4, "little")
    read = []

    def page(lsn):
        read.append(lsn)
        return wal.page(lsn)

    walk = RecordScan(page, MIB, SMALL)
    assert list(walk) == []
    assert len(read) == 2
