"""Up to where a slot lets go: never behind the start of a record that goes on."""

import struct

from walsender_bridge.postgres.protocol.wal_page import LONG_HEADER
from walsender_bridge.quorum.proposer.primary.clean_segments import CleanSegments
from walsender_bridge.quorum.proposer.wal_queue import WalQueue

SIZE = 1 << 20


def queue_of(start: int, rests: list[int]) -> WalQueue:
    """Segments of which each says how much of a record goes on there; in pieces that split heads."""
    queue = WalQueue(start)
    heads = [struct.pack("<HHIQI", 0xD113, int(rest > 0), 1, 0, rest) for rest in rests]
    raw = b"".join(head + bytes(SIZE - len(head)) for head in heads)
    for at in range(0, len(raw), 65_537):
        queue.append(memoryview(raw[at : at + 65_537]))
    return queue


def test_a_record_that_goes_on_over_segments_keeps_the_one_it_starts_in():
    clean = CleanSegments(SIZE, SIZE)
    # One begins in the second segment, and ends in the middle of the fourth.
    clean.pass_over(queue_of(SIZE, [0, 0, 3 * SIZE // 2, SIZE // 2, 0]))
    assert clean.last_at(SIZE - 1) is None
    assert clean.last_at(2 * SIZE) == 2 * SIZE
    assert clean.last_at(3 * SIZE) == 2 * SIZE
    assert (
        clean.last_at(4 * SIZE + SIZE // 2) == 2 * SIZE
    )  # its bytes are over, its pages' heads not
    assert clean.last_at(5 * SIZE - 1) == 4 * SIZE
    assert clean.last_at(5 * SIZE) == 5 * SIZE


def test_segments_that_all_begin_inside_a_record_are_let_go_of_too():
    clean = CleanSegments(SIZE, SIZE)
    clean.pass_over(queue_of(SIZE, [0, *[100] * 9]))
    assert clean.last_at(9 * SIZE) == 8 * SIZE
    assert clean.last_at(9 * SIZE + 100 + LONG_HEADER) == 9 * SIZE


def test_what_was_not_seen_is_not_let_go():
    clean = CleanSegments(SIZE + 100, SIZE)
    queue = WalQueue(SIZE + 100)
    queue.append(memoryview(bytes(SIZE - 102)))
    clean.pass_over(queue)
    assert clean.last_at(2 * SIZE) is None
    queue.append(memoryview(bytes(10)))  # half of what tells it
    clean.pass_over(queue)
    assert clean.last_at(2 * SIZE) is None
    queue.append(memoryview(bytes(30)))
    clean.pass_over(queue)
    assert clean.last_at(2 * SIZE) == 2 * SIZE
