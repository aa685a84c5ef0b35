"""The messages of a payload, by Arrow's Parquet reader, against a loop that reads each length."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_consumers.decode.split import split
from walsender_bridge.change_log.entry import split_messages
from walsender_bridge.errors import CorruptError, MalformedMessageError


def payload(messages: list[bytes]) -> bytes:
    return b"".join(len(m).to_bytes(4, "little") + m for m in messages)


def found(parts: list[bytes], count: int) -> list[bytes]:
    memory, positions = split(parts, count)
    raw = memory.to_pybytes()
    return [raw[a:b] for a, b in pairwise(positions)]


@given(st.lists(st.lists(st.binary(min_size=1, max_size=300), max_size=40), min_size=1, max_size=5))
def test_the_messages_of_all_parts_come_out_in_order(parts):
    messages = [message for part in parts for message in part]
    if messages:
        assert found([payload(part) for part in parts], len(messages)) == messages


def test_lengths_of_every_size_of_number():
    messages = [b"x" * size for size in (1, 127, 128, 16383, 16384, 2**21, 2**24)]
    assert found([payload(messages)], len(messages)) == messages


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        (payload([b"a", b"bc"]), 1),
        (payload([b"a", b"bc"]), 3),
        (payload([b"a", b"bc"])[:-1], 2),
        (payload([b"a", b"", b"bcd"]), 3),
        (payload([b"a"]) + b"\xff\xff\xff\xffab", 2),
        (payload([b"a"]) + b"\xff\xff\xff\x7fab", 2),
        (b"", 0),
        (b"", 1),
        (payload([b"abc"]), 2**32 - 1),
        (payload([b"abc"]), 2**62),
    ],
)
def test_what_is_not_filled_by_its_messages_is_refused(raw, count):
    with pytest.raises(MalformedMessageError):
        split([raw], count)


def test_a_flipped_byte_gives_an_error_or_what_the_loop_finds(seed):
    chance = random.Random(seed)
    messages = [chance.randbytes(chance.randrange(1, 40)) for _ in range(50)]
    raw = bytearray(payload(messages))
    for _ in range(2000):
        at, old = chance.randrange(len(raw)), 0
        old, raw[at] = raw[at], chance.randrange(256)
        try:
            expected = split_messages(bytes(raw))
        except CorruptError:
            expected = []
        try:
            assert found([bytes(raw)], 50) == expected, seed
        except MalformedMessageError:
            assert len(expected) != 50, seed
        raw[at] = old
