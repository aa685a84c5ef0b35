"""The proposer's WAL in memory: every range as it came, and no more memory than it holds."""

import random

from walsender_bridge.quorum.proposer.wal_queue import BLOCK_BYTES, WalQueue

START = 5 * BLOCK_BYTES + 1234


def test_every_range_is_as_it_came(seed):
    chance = random.Random(seed)
    wal = chance.randbytes(3 * BLOCK_BYTES)
    queue, at = WalQueue(START), 0
    while at < len(wal):
        length = chance.choice([1, 8, 100, BLOCK_BYTES // 2, BLOCK_BYTES + 7])
        queue.append(memoryview(wal)[at : at + length])
        at = queue.end - START
        begin = chance.randint(queue.begin, queue.end)
        end = chance.randint(begin, queue.end)
        found = b"".join(queue.views(begin, end))
        assert found == wal[begin - START : end - START], seed
        queue.release(chance.randint(queue.begin, begin))


def test_a_view_stays_as_it_was_when_its_bytes_are_released():
    queue = WalQueue(START)
    queue.append(b"a" * 100)
    (view,) = queue.views(START, START + 100)
    queue.release(START + 100)
    queue.append(b"b" * 2 * BLOCK_BYTES)
    queue.release(queue.end)
    assert bytes(view) == b"a" * 100


def test_8_many_small_pieces_take_no_more_memory_than_their_bytes():
    queue = WalQueue(START)
    for _ in range(200_000):
        queue.append(b"x" * 20)
    assert len(queue._blocks) * BLOCK_BYTES < 200_000 * 20 + 2 * BLOCK_BYTES
    queue.release(queue.end)
    assert len(queue._blocks) == 1


def test_a_queue_that_has_not_begun_holds_nothing():
    queue = WalQueue(0)
    assert not queue.holds(START, START + 100)
    queue = WalQueue(START)
    queue.append(b"a" * 100)
    assert queue.holds(START, START + 100)
    assert not queue.holds(START - 1, START + 1)
    assert not queue.holds(START + 1, START + 101)
