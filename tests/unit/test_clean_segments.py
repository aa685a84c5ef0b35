"""Up to where a slot lets go: never behind the start of a record that goes on."""

import struct

from walsender_bridge.proposer.clean_segments import CleanSegments
from walsender_bridge.proposer.wal_queue import WalQueue

SIZE = 1 << 20


def queue_of(start: int, goes_on: list[bool]) -> WalQueue:
    """Segments of which each says whether a record goes on over its start; in pieces that split heads."""
    queue = WalQueue(start)
    raw = b"".join(struct.pack("<HH", 0xD113, int(on)) + bytes(SIZE - 4) for on in goes_on)
    for at in range(0, len(raw), 65_537):
        queue.append(memoryview(raw[at : at + 65_537]))
    return queue


def test_a_record_that_goes_on_over_segments_keeps_the_one_it_starts_in():
    clean = CleanSegments(SIZE, SIZE)
    clean.pass_over(queue_of(SIZE, [False, False, True, True, False]))
    assert clean.last_at(SIZE - 1) is None
    assert clean.last_at(2 * SIZE) == 2 * SIZE
    assert clean.last_at(3 * SIZE) == 2 * SIZE
    assert clean.last_at(5 * SIZE - 1) == 2 * SIZE
    assert clean.last_at(5 * SIZE) == 5 * SIZE


def test_what_was_not_seen_is_not_let_go():
    clean = CleanSegments(SIZE + 100, SIZE)
    queue = WalQueue(SIZE + 100)
    queue.append(memoryview(bytes(SIZE - 102)))
    clean.pass_over(queue)
    assert clean.last_at(2 * SIZE) is None
    queue.append(memoryview(bytes(1)))  # half of what tells it
    clean.pass_over(queue)
    assert clean.last_at(2 * SIZE) is None
    queue.append(memoryview(bytes(10)))
    clean.pass_over(queue)
    assert clean.last_at(2 * SIZE) == 2 * SIZE
