"""Which connections of a Flight service are ended: those beyond its limits, and no others."""

import pytest

from walsender_bridge.change_log.connection_limits import (
    ALL_HEAD_BYTES,
    ALL_PENDING_BYTES,
    GROWN_BYTES,
    GROWN_THREADS,
    HEAD_BYTES,
    PENDING_BYTES,
    Connection,
    ConnectionLimits,
    PeerCalls,
    ProcessSize,
)
from walsender_bridge.change_log.protocol import MAX_BATCH_BYTES

MIB = 1 << 20


def connection(number: int, received: int = 0, sent: int = 0) -> Connection:
    return Connection(number, f"peer {number}", received, sent)


def test_a_message_that_grows_beyond_a_request_ends_its_connection() -> None:
    limits = ConnectionLimits()
    assert not limits.step(0.0, [connection(1, PENDING_BYTES)], {})
    ended = limits.step(0.2, [connection(1, PENDING_BYTES + 1), connection(2, 5)], {})
    assert ended == {1: "it sends more than a request has"}


def test_what_calls_have_taken_is_no_credit_for_later() -> None:
    limits, calls = ConnectionLimits(), PeerCalls(b"reader")
    received = 0
    for _ in range(100):
        received += 4 * MIB
        calls.begun, calls.taken = calls.begun + 1, calls.taken + 4 * MIB
        assert not limits.step(0.0, [connection(1, received, sent=0)], {"peer 1": calls})
    grown = connection(1, received + PENDING_BYTES + MIB)
    assert limits.step(0.0, [grown], {"peer 1": calls})


def test_an_append_may_send_the_greatest_batch_and_no_more() -> None:
    limits, calls = ConnectionLimits(), {"peer 1": PeerCalls(b"writer", begun=1, open=1, appends=1)}
    assert not limits.step(0.0, [connection(1, MAX_BATCH_BYTES + PENDING_BYTES)], calls)
    assert limits.step(0.0, [connection(1, MAX_BATCH_BYTES + PENDING_BYTES + MIB)], calls)


def test_acknowledgements_of_what_is_sent_are_no_message() -> None:
    limits, calls = ConnectionLimits(), {"peer 1": PeerCalls(b"reader", begun=1, open=1)}
    sent = 100 << 30
    assert not limits.step(0.0, [connection(1, sent // 100, sent)], calls)


def test_many_connections_do_not_add_up_to_more_than_all_may_have() -> None:
    found = [connection(number, 15 * MIB + number) for number in range(20)]
    ended = ConnectionLimits().step(0.0, found, {})
    assert (20 - len(ended)) * 15 * MIB <= ALL_PENDING_BYTES < (21 - len(ended)) * 15 * MIB
    assert set(ended) == set(range(20 - len(ended), 20))


def test_the_oldest_connection_without_a_call_makes_room() -> None:
    limits = ConnectionLimits(most=3)
    found = [connection(number) for number in range(3)]
    for now in range(3):
        assert not limits.step(now, found[: now + 1], {})
    assert [*limits.step(3.0, [*found, connection(3)], {})] == [0]


def test_a_flood_of_one_holder_ends_none_of_the_others() -> None:
    limits = ConnectionLimits(most=10)
    calls = {"peer 0": PeerCalls(b"lake", begun=1), "peer 1": PeerCalls(b"bridge", begun=1)}
    calls |= {f"peer {n}": PeerCalls(b"reader", begun=1, open=n % 2) for n in range(2, 30)}
    strangers = [connection(number) for number in range(30, 32)]
    ended = limits.step(0.0, [*(connection(n) for n in range(30)), *strangers], calls)
    assert len(ended) == 22
    assert set(ended) <= set(range(2, 30))
    # Those with a call in progress are the last to end.
    assert {n for n in range(2, 30) if n % 2 == 0} <= set(ended)


def test_the_longest_idle_connection_of_a_holder_makes_room() -> None:
    calls = {f"peer {n}": PeerCalls(b"lake", begun=1, ended_at=9.0 - n) for n in range(4)}
    found = [connection(number) for number in range(4)]
    assert [*ConnectionLimits(most=3).step(0.0, found, calls)] == [3]


@pytest.mark.parametrize(("due", "ends"), [(10.0, False), (9.9, True)])
def test_an_answer_that_is_not_read_in_time_ends_its_connection(due: float, ends: bool) -> None:
    calls = {"peer 1": PeerCalls(b"reader", begun=2, open=2, answers_due={1: due, 2: 99.0})}
    assert bool(ConnectionLimits().step(10.0, [connection(1)], calls)) is ends


def test_an_unwanted_connection_ends() -> None:
    calls = {"peer 1": PeerCalls(b"writer", begun=1, open=1, appends=1, unwanted="fenced")}
    found = [connection(1), connection(2)]
    assert ConnectionLimits().step(0.0, found, calls) == {1: "fenced"}


@pytest.mark.parametrize(
    "grown", [ProcessSize(GROWN_BYTES + 101, 10), ProcessSize(100, GROWN_THREADS + 11)]
)
def test_calls_that_are_only_begun_end_their_connection_when_the_process_grows(
    grown: ProcessSize,
) -> None:
    limits, calls = ConnectionLimits(), {"peer 3": PeerCalls(b"writer", begun=1, open=1, appends=1)}
    before, small = ProcessSize(100, 10), connection(1, HEAD_BYTES)
    assert not limits.step(0.0, [small], {}, before)
    # A request that arrives in parts, and an append, are no reason.
    found = [small, connection(2, HEAD_BYTES + 1), connection(3, 1 << 30)]
    assert not limits.step(0.2, found, calls, before)
    ended = limits.step(0.4, found, calls, grown)
    assert ended == {2: "it begins calls and sends no requests"}
    # What has grown for other reasons is what it is from then on.
    assert not limits.step(0.6, [small], calls, grown)
    assert not limits.step(0.8, found, calls, grown)


def test_a_crowd_begins_no_more_calls_than_a_few_connections_may() -> None:
    limits, grown = ConnectionLimits(), ProcessSize(GROWN_BYTES + 1, 1)
    crowd = [connection(number, HEAD_BYTES) for number in range(100)]
    assert not limits.step(0.0, [], {})
    assert not limits.step(0.2, crowd, {})
    ended = limits.step(0.4, crowd, {}, grown)
    assert len(crowd) - len(ended) == ALL_HEAD_BYTES // HEAD_BYTES
