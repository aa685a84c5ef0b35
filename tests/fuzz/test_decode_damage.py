"""Damaged entries: whatever the bytes are, the decoder ends soon, with rows or with an error of ours."""

import contextlib
import random
import time
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from spark_consumers.decode.entries import decode_entries
from tests.support import pgoutput_messages as pm
from tests.support.change_entries import (
    Entries,
    Table,
    delete,
    insert,
    logs,
    transactions,
    update,
)
from walsender_bridge.change_log.entry import Codec, read_header
from walsender_bridge.errors import (
    CorruptError,
    MalformedMessageError,
    NotSupportedError,
    UnsupportedValueError,
)

#: What damage may be called; a version that is not known is one of the things it looks like.
EXPECTED = (CorruptError, MalformedMessageError, NotSupportedError, UnsupportedValueError)
#: Far more than an honest run takes on a busy machine, far less than a loop over a wild length.
LIMIT_SECONDS = 5.0
TABLE = Table(
    1,
    "t",
    (
        *(("id", 20, -1), ("note", 25, -1), ("body", 17, -1), ("n", 1700, (9 << 16 | 2) + 4)),
        *(("day", 1082, -1), ("yes", 16, -1), ("list", 1009, -1), ("numbers", 1007, -1)),
    ),
)
ROW = ["1", "a note", "\\x00ff", "1.50", "2024-02-29", "t", '{a,"b,c",NULL}', "{1,NULL,3}"]
KEY = ["1", *([None] * 7)]


def decode_damaged(log: Entries, data: bytes, at: int) -> None:
    entries = list(log.entries)
    entries[at] = replace(entries[at], data=data)
    began = time.monotonic()
    with contextlib.suppress(*EXPECTED):
        for batch in decode_entries(entries, log.schemas):
            for array in (*batch.columns, *(batch.old_columns or ())):
                array.validate(full=True)
    assert time.monotonic() - began < LIMIT_SECONDS


def uncompressed() -> Entries:
    """An entry of every kind of change, whose messages lie open to damage."""
    log = Entries()
    groups = [
        [insert(TABLE, ROW), update(TABLE, ROW), update(TABLE, ROW, KEY), delete(TABLE, KEY)],
        [update(TABLE, ROW, ROW, b"O"), pm.truncate(1), insert(TABLE, [None] * 8)],
        [pm.origin("o"), pm.message(9, "p", b"x", transactional=True), delete(TABLE, ROW, b"O")],
    ]
    log.add(list(transactions(groups)), [TABLE], Codec.NONE)
    return log


def test_each_byte_damaged_in_turn(seed: int) -> None:
    """Every byte of the header and of every message, each with two other values."""
    draw = random.Random(seed)
    log = uncompressed()
    data = bytes(log.entries[0].data)
    for at in range(len(data)):
        for value in {draw.choice([0, 255, data[at] ^ 1, data[at] ^ 128]), draw.randrange(256)}:
            decode_damaged(log, data[:at] + bytes([value]) + data[at + 1 :], 0)


def test_pieces_cut_out_doubled_and_moved(seed: int) -> None:
    draw = random.Random(seed)
    log = uncompressed()
    data = bytes(log.entries[0].data)
    start = read_header(data).header_length
    for _ in range(1000):
        first, end = sorted(draw.choices(range(start, len(data)), k=2))
        piece, target = data[first:end], draw.randrange(start, len(data))
        # The payload keeps its length, or the header would tell.
        moved = (data[:target] + piece + data[target:])[: len(data)]
        decode_damaged(log, moved, 0)


@settings(max_examples=200)
@given(logs(), st.data())
def test_random_logs_damaged_at_random(log: Entries, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(log.entries) - 1))
    raw = bytearray(log.entries[at].data)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    decode_damaged(log, bytes(raw), at)
