"""The rows of a COPY in binary format: every value exactly, wherever the bytes were cut, and no other error than a named one."""

import random
import struct

import numpy as np
import pyarrow as pa
import pytest

from spark_consumers.decode import types
from spark_consumers.decode.copy_rows import PADDING, columns_of, row_after_header, rows_in
from spark_consumers.sources.snapshot import converted
from walsender_bridge.errors import MalformedMessageError

OIDS = [types.INT2, types.INT4, types.BOOL, types.BYTEA, types.FLOAT8, types.DATE, types.TIMESTAMP, None]  # fmt: skip
PACKED = {0: ">h", 1: ">i", 2: ">?", 4: ">d", 5: ">i", 6: ">q"}
HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)


def row_message(values, header=b""):
    body = header + struct.pack(">h", len(values))
    for number, value in enumerate(values):
        raw = value
        if value is not None and not isinstance(value, bytes):
            raw = struct.pack(PACKED[number], value)
        body += struct.pack(">i", -1) if raw is None else struct.pack(">i", len(raw)) + raw
    return b"d" + struct.pack(">i", len(body) + 4) + body


def padded(data):
    return np.frombuffer(data + bytes(PADDING), np.uint8)


def some_rows(drawn, count):
    """Rows whose values look like the beginning of a message of eight columns as often as they do not."""
    heads = [b"d\0\0\0\x20\0\x08", b"d" * 9, b"", row_message([b"inner"] * 8)]
    for _ in range(count):
        row = [
            drawn.choice([100, 8, -1]),
            drawn.choice([0x64000000, 0x64, 7]),
            drawn.random() < 0.5,
            drawn.choice(heads),
            drawn.choice([0.5, -0.0, float("inf")]),
            drawn.choice([-10957, 0, 100]),
            drawn.choice([-946684800000000, 0x6400000020000864]),
            drawn.choice(["ö".encode(), b"d", b"x" * 300]),
        ]
        yield [None if drawn.random() < 0.1 else value for value in row]


def expected(rows):
    for i, j, b, raw, f, day, moment, text in rows:
        yield (
            *(i, j, b, raw, f),
            None if day is None else day + 10957,
            None if moment is None else moment + 946684800000000,
            None if text is None else text.decode(),
        )


def found_in(data, at, end):
    found = rows_in(data, at, end, len(OIDS))
    arrays = columns_of(data, found.starts, found.ends, OIDS)
    for array in arrays:
        array.validate(full=True)
    plain = {types.DATE: pa.int32(), types.TIMESTAMP: pa.int64()}
    arrays = [a.view(plain[o]) if o in plain else a for a, o in zip(arrays, OIDS, strict=True)]
    return list(zip(*(a.to_pylist() for a in arrays), strict=True)), found.stop


def test_every_row_is_found_wherever_the_bytes_are_cut(seed):
    drawn = random.Random(seed)
    rows = list(some_rows(drawn, 300))
    data = b"".join(map(row_message, rows))
    buffer = padded(data)
    got, at, end = [], 0, 0
    while at < len(data):
        end = min(len(data), end + drawn.randrange(1, 3000))
        # What follows has not come yet, and may be anything.
        part = buffer.copy()
        part[end:] = drawn.choice([0, ord("d")])
        more, at = found_in(part, at, end)
        got += more
    assert got == list(expected(rows))
    # At once, too, whatever is in the values.
    assert found_in(buffer, 0, len(data)) == (got, len(data))


def test_a_message_that_is_no_row_ends_the_rows_before_it():
    row = row_message([None] * 8)
    data = row + b"N\0\0\0\x04" + row
    assert found_in(padded(data), 0, len(data)) == ([(None,) * 8], len(row))


def test_the_header_comes_before_the_first_row_or_alone():
    row = row_message([None] * 8, HEADER)[5:]
    assert row_after_header(np.frombuffer(row, np.uint8)) == len(HEADER)
    assert row_after_header(np.frombuffer(HEADER, np.uint8)) is None
    for trailer in (b"\xff\xff", HEADER + b"\xff\xff"):
        assert row_after_header(np.frombuffer(trailer, np.uint8)) is None
    assert row_after_header(np.frombuffer(row[len(HEADER) :], np.uint8)) == 0
    with pytest.raises(MalformedMessageError):
        row_after_header(np.frombuffer(HEADER[:-5] + b"\1" + HEADER[-4:], np.uint8))


def test_damaged_rows_are_a_named_error_or_other_values(seed):
    drawn = random.Random(seed)
    refused = 0
    for _ in range(300):
        data = bytearray(b"".join(map(row_message, some_rows(drawn, 3))))
        for _ in range(drawn.randrange(1, 4)):
            data[drawn.randrange(len(data))] = drawn.choice([0, 1, 0x64, 0x7F, 0xFF])
        buffer = padded(bytes(data))
        # A buffer is never read behind its end: the last pages of it are not there.
        found = rows_in(buffer, 0, len(data), len(OIDS))
        try:
            columns_of(buffer, found.starts, found.ends, OIDS)
        except MalformedMessageError:
            refused += 1
        else:
            assert (found.ends <= len(data)).all()
    assert refused


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31)])
def test_infinite_days_are_outside_of_every_year(value):
    refuse_infinity(types.DATE, ">i", value)


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63)])
@pytest.mark.parametrize("oid", [types.TIMESTAMP, types.TIMESTAMPTZ])
def test_infinite_moments_are_outside_of_every_year(oid, value):
    refuse_infinity(oid, ">q", value)


def refuse_infinity(oid, layout, value):
    data = row_message([struct.pack(layout, value)])
    found = rows_in(padded(data), 0, len(data), 1)
    (array,) = columns_of(padded(data), found.starts, found.ends, [oid])
    with pytest.raises(Exception, match="infinity"):
        converted(array, oid, -1)


def test_a_row_has_to_fill_its_message():
    data = row_message([b"12"]) + b"!"
    with pytest.raises(MalformedMessageError, match="does not end"):
        columns_of(padded(data), np.array([5]), np.array([len(data)]), [types.INT2])


def test_a_value_of_another_width_is_no_value():
    data = row_message([b"1234"])
    with pytest.raises(MalformedMessageError, match="2 bytes"):
        columns_of(padded(data), np.array([5]), np.array([len(data)]), [types.INT2])
