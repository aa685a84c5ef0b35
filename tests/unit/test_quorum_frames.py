"""The safekeeper protocol's bytes: golden frames, round trips, and garbage with a name."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walsender_bridge.errors import MalformedMessageError, NotSupportedError, TusklineError
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.quorum.protocol import frames
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import MAX_MEMBERS, Configuration
from walsender_bridge.quorum.protocol.history import MAX_ENTRIES, History, HistoryEntry

INFO = m.ServerInfo(0x0102030405060708, 16, 16 << 20)
ID = m.NodeId(5, 0xABCD)
HISTORY = History((HistoryEntry(2, 0x1000000, 1), HistoryEntry(5, 0x2000000, 1)))
ONE = Configuration(3, frozenset({1, 2}), None, 5)
JOINT = Configuration(4, frozenset({1}), frozenset({2}), 5, quorum=0xBEEF)

_HEAD = "02" + "0000"
_NODE = "0000000000000000000000000000abcd"
GOLDEN: list[tuple[m.Message, str]] = [
    (
        m.Append(5, 0x10, 0x20, 0x8, 300),
        "41" + _HEAD + "0000012c" + "0000000000000005" + "0000000000000010"
        "0000000000000020" + "0000000000000008",
    ),
    (
        m.AppendAck(5, 0x10, 0x20),
        "61" + _HEAD + "00000000" + "0000000000000005" + "0000000000000010"
        "0000000000000020" + "0000000000000000",
    ),
    (
        m.Vote(ID, m.Purpose.FAILOVER, 1, JOINT),
        "56" + _HEAD + "0000005a" + "0000000000000005" + "00" * 24 + _NODE + "02" + "00000001"
        + "00" * 14 + "beef" "0000000000000005" + "0000000000000004" + "0001" + "00" * 15 + "01" + "01" + "0001"
        + "00" * 15 + "02",
    ),
    (
        m.Refused(m.Refusal.FENCED_TIMELINE, ID, "no"),
        "72" + _HEAD + "00000015" + "0000000000000005" + "00" * 24 + "06" + _NODE + "0002" + "6e6f",
    ),
]  # fmt: skip

ALL: list[m.Message] = [
    *(message for message, _ in GOLDEN),
    m.ProposerGreeting(INFO, 77, 0xBEEF),
    m.SafekeeperGreeting(9, INFO, ID, ONE, 100, 90, 2, 1),
    m.Resume(ID),
    m.VoteReply(ID, 100, 90, 80, 16, HISTORY, JOINT),
    m.Elected(5, 100, 90, True, HISTORY, ONE),
    m.Elected(5, 100, 90, False, History(), Configuration()),
    m.Elected(5, 100, 90, True, HISTORY, JOINT, (WalPosition(1, 16), WalPosition(2, 48))),
    m.AppendAck(5, 1, 2, m.HotStandbyFeedback(700, 1, 600, 1)),
    m.Fetch(5, 10, 20),
    m.Fetched(5, 10, 10),
    m.CatchUpWal(5, 10, 2, 10),
    m.Held(5, 30, 10, 20),
    m.Configure(5, JOINT),
    m.Configure(5, replace(JOINT, distrusted=frozenset({1}))),
    m.Configure(5, replace(ONE, distrusted=frozenset({2}))),
    m.Configured(5, 4),
]


def split(data: bytes) -> tuple[frames.Header, bytes]:
    return frames.decode_header(data), data[frames.HEADER_BYTES :]


@pytest.mark.parametrize(("message", "golden"), GOLDEN)
def test_the_bytes_of_version_2_stay_what_they_are(message: m.Message, golden: str) -> None:
    assert frames.encode(message).hex() == golden


@pytest.mark.parametrize("message", ALL)
def test_what_is_encoded_is_decoded(message: m.Message) -> None:
    header, body = split(frames.encode(message))
    assert frames.decode(header, body) == message
    assert header.carries_wal == isinstance(message, m.Append | m.Fetched | m.CatchUpWal)


def test_the_longest_of_everything_fits() -> None:
    history = History(tuple(HistoryEntry(n + 1, n, 1) for n in range(MAX_ENTRIES)))
    members = frozenset(range(MAX_MEMBERS))
    configuration = Configuration(1, members, members, 1, distrusted=members)
    message = m.VoteReply(ID, 1, 2, 3, 4, history, configuration)
    header, body = split(frames.encode(message))
    assert header.length <= frames.MAX_BODY_BYTES
    assert frames.decode(header, body) == message


def test_another_version_is_refused_by_its_number() -> None:
    data = bytearray(frames.encode(m.Resume(ID)))
    data[1] = 1
    with pytest.raises(NotSupportedError, match="version 1"):
        frames.decode_header(data)


@pytest.mark.parametrize(("at", "value"), [(0, 0), (2, 1), (4, 0x7F)])
def test_22_a_header_that_is_none_is_refused(at: int, value: int) -> None:
    data = bytearray(frames.encode(m.Resume(ID)))
    data[at] = value
    with pytest.raises(MalformedMessageError):
        frames.decode_header(data)


def test_22_a_length_of_2_gib_is_not_believed() -> None:
    data = bytearray(frames.encode(m.Append(1, 2, 3, 4, 5)))
    data[4:8] = (2 << 30).to_bytes(4, "big")
    with pytest.raises(MalformedMessageError, match="exceeds the limit"):
        frames.decode_header(data)


@pytest.mark.parametrize("message", ALL[4:])
def test_22_half_a_message_and_one_byte_more_are_refused(message: m.Message) -> None:
    header, body = split(frames.encode(message))
    for wrong in [body + b"\0", *(body[:size] for size in range(len(body)))]:
        with pytest.raises(MalformedMessageError):
            frames.decode(header, wrong)


@given(st.sampled_from(ALL), st.data())
def test_22_a_flipped_byte_is_named_or_another_message(
    message: m.Message, data: st.DataObject
) -> None:
    flipped = bytearray(frames.encode(message))
    at = data.draw(st.integers(0, len(flipped) - 1))
    flipped[at] ^= data.draw(st.integers(1, 255))
    try:
        header, body = split(bytes(flipped))
        read = frames.decode(header, body)
    except TusklineError:
        return
    assert frames.encode(read) == bytes(flipped)[: len(frames.encode(read))]


@given(st.binary(max_size=200))
def test_22_garbage_is_named(garbage: bytes) -> None:
    with pytest.raises(TusklineError):
        frames.decode(*split(garbage))
