"""Finds the positions of tuples and values in a run of pgoutput messages. Nothing is converted.

Layouts: PostgreSQL documentation, "Logical Replication Message Formats" (TupleData). All rows of one
table are scanned at once, a column a step: from each row's position, the kind of its value and its
length give the position of its next value.

Safety: bytes are never trusted. Before a step every position lies at most at its message's end, the
buffer goes on for `PADDING` bytes, and a length that is negative or leads past the end is an error; so
nothing outside the buffer is read, and the work is bounded by rows times columns.
"""

from dataclasses import dataclass

import numpy as np

from spark_consumers.decode.spans import Bools, Bytes, Int64s
from spark_consumers.decode.split import malformed

#: Zero bytes that must follow the last message in a buffer.
PADDING = 16

NULL, UNCHANGED, TEXT = ord("n"), ord("u"), ord("t")


def numbers(buffer: Bytes, dtype: str) -> np.ndarray:
    """The buffer as numbers of `dtype` that start at *every* byte."""
    size = np.dtype(dtype).itemsize
    return np.ndarray((len(buffer) - size + 1,), dtype, buffer, strides=(1,))


@dataclass(slots=True)
class Tuples:
    """The positions of some rows' values; each list has one array per column, each array one item per row."""

    kinds: list[Bytes]
    starts: list[Int64s]
    lengths: list[Int64s]
    ends: Int64s


def scan(buffer: Bytes, at: Int64s, limits: Int64s, columns: int) -> Tuples:
    """Scan TupleData that starts at `at` in messages that end at `limits`.

    Raises `MalformedMessageError` for a tuple with another number of columns, or one that extends beyond its message.
    """
    if (at + 2 > limits).any() or (numbers(buffer, ">u2")[at] != columns).any():
        raise malformed(f"the number of columns in a row differs from its table's {columns}")
    words = numbers(buffer, ">i4")
    found = Tuples([], [], [], at + 2)
    here = found.ends
    for _ in range(columns):
        if (here >= limits).any():
            raise malformed("a row is truncated")
        kinds = buffer[here]
        sent: Bools = kinds == TEXT
        if sent.all():
            lengths = words[here + 1].astype(np.int64)
            starts = here + 5
        else:
            if (~sent & (kinds != NULL) & (kinds != UNCHANGED)).any():
                raise malformed("a value is neither text, NULL nor unchanged")
            lengths = np.where(sent, words[here + 1], 0).astype(np.int64)
            starts = here + np.where(sent, 5, 1)
        here = starts + lengths
        if (lengths < 0).any() or (here > limits).any():
            raise malformed("a value extends beyond its message")
        found.kinds.append(kinds)
        found.starts.append(starts)
        found.lengths.append(lengths)
    found.ends = here
    return found


def scatter(part: Tuples, rows: Int64s, count: int) -> Tuples:
    """Scatter the tuples over `count` rows; rows without a tuple are NULL, an empty span.

    `rows` (ascending) has the row of each tuple. An empty span keeps the order of positions.
    """
    if len(rows) == count:
        return part
    before = np.zeros(count, np.int64)
    before[rows] = 1
    before = np.maximum(np.cumsum(before) - 1, 0)
    absent = np.ones(count, np.bool_)
    absent[rows] = False
    whole = Tuples([], [], [], part.ends)
    for kinds, starts, lengths in zip(part.kinds, part.starts, part.lengths, strict=True):
        if not len(rows):
            empty = np.zeros(count, np.int64)
            whole.kinds.append(np.full(count, NULL, np.uint8))
            whole.starts.append(empty)
            whole.lengths.append(empty)
            continue
        # A row without a tuple takes the end of the span before it.
        ends = starts[before] + lengths[before]
        if absent[0]:
            ends[: rows[0]] = starts[0]
        whole.kinds.append(np.where(absent, NULL, kinds[before]).astype(np.uint8))
        whole.starts.append(np.where(absent, ends, starts[before]))
        whole.lengths.append(np.where(absent, 0, lengths[before]))
    return whole
