"""Times in pgoutput's frames: what an entry's header cannot hold is refused where it is read."""

import struct
from collections.abc import Callable

import pytest

from walsender_bridge.change_log.entry import build_entry, read_header
from walsender_bridge.errors import MalformedMessageError
from walsender_bridge.postgres.protocol import pgoutput

#: The last moment, in the server's microseconds, that is a signed 64-bit one since 1970 as well.
LATEST = (1 << 63) - 1 - pgoutput.POSTGRES_EPOCH


def begin(time: int) -> bytes:
    return struct.pack(">cQqI", b"B", 1, time, 7)


def commit(time: int) -> bytes:
    return struct.pack(">cBQQq", b"C", 0, 1, 2, time)


def stream_commit(time: int) -> bytes:
    return struct.pack(">cIBQQq", b"c", 7, 0, 1, 2, time)


@pytest.mark.parametrize("time", [-(1 << 63), 0, LATEST])
def test_the_first_and_the_last_commit_time_go_into_an_entry(time: int) -> None:
    entry = build_entry([begin(time), commit(time)], timeline=1, previous_crc=0, schema_hashes={})
    assert read_header(entry).last_commit_time == time + pgoutput.POSTGRES_EPOCH


@pytest.mark.parametrize("time", [LATEST + 1, (1 << 63) - 1])
@pytest.mark.parametrize(
    ("build", "parse"),
    [
        (begin, pgoutput.parse_begin),
        (commit, pgoutput.parse_commit),
        (stream_commit, pgoutput.parse_stream_commit),
    ],
)
def test_a_commit_time_that_no_entry_can_hold_is_refused(
    build: Callable[[int], bytes], parse: Callable[[bytes], object], time: int
) -> None:
    with pytest.raises(MalformedMessageError, match="commit time"):
        parse(build(time))
