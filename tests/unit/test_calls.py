"""How many calls the clients of a Flight service may have in progress."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from walsender_bridge.change_log import calls as module
from walsender_bridge.change_log.calls import (
    MOST_ANSWERS_OF_HOLDER,
    MOST_APPENDS,
    MOST_CALLS,
    MOST_OF_HOLDER,
    MOST_WAITS_OF_HOLDER,
    Call,
    Calls,
)
from walsender_bridge.errors import UnavailableError


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def begin(calls: Calls, number: int, holder: bytes = b"reader") -> Call:
    return calls.begin(f"ipv4:127.0.0.1:{number}", holder)


def test_one_holder_has_at_most_half_of_the_calls() -> None:
    calls = Calls()
    begun = [begin(calls, 1) for _ in range(MOST_OF_HOLDER)]
    with pytest.raises(UnavailableError, match="too many calls in progress"):
        begin(calls, 2)
    other = begin(calls, 3, b"lake")
    begun[0].end()
    begin(calls, 2).end()
    other.end()
    assert calls.by_peer()["127.0.0.1 3"].open == 0


def test_all_clients_together_have_a_limit_also_without_certificates() -> None:
    calls = Calls()
    for number in range(MOST_CALLS):
        begin(calls, number, b"")
    with pytest.raises(UnavailableError, match=f"in progress: {MOST_CALLS + 1}"):
        begin(calls, 9999, b"")


def test_one_holder_does_not_wait_in_all_threads(stack: ExitStack) -> None:
    calls = Calls()
    for number in range(MOST_WAITS_OF_HOLDER):
        stack.enter_context(begin(calls, number).waiting())
    with (
        pytest.raises(UnavailableError, match="too many calls that wait"),
        begin(calls, 9999).waiting(),
    ):
        pass
    with begin(calls, 9999, b"lake").waiting():
        pass


def test_the_oldest_append_of_a_stream_makes_room(stack: ExitStack) -> None:
    calls = Calls()
    for number in range(MOST_APPENDS + 2):
        stack.enter_context(begin(calls, number).appending("shop"))
    stack.enter_context(begin(calls, 100).appending("bank"))
    unwanted = [peer for peer, its in calls.by_peer().items() if its.unwanted]
    assert unwanted == ["127.0.0.1 0", "127.0.0.1 1"]


def test_appends_of_a_stream_have_a_limit_also_while_the_oldest_end(stack: ExitStack) -> None:
    calls = Calls()
    for _ in range(2 * MOST_APPENDS):
        stack.enter_context(begin(calls, 1).appending("shop"))
    with (
        pytest.raises(UnavailableError, match="too many open appends"),
        begin(calls, 1).appending("shop"),
    ):
        pass
    with begin(calls, 2).appending("bank"):
        assert calls.by_peer()["127.0.0.1 2"].appends == 1
    assert calls.by_peer()["127.0.0.1 2"].appends == 0


def test_an_answer_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    sent = [begin(calls, number) for number in range(MOST_ANSWERS_OF_HOLDER)]
    for each in sent:
        each.answer()
    begin(calls, 1, b"lake").answer()
    late = begin(calls, 2)
    waits = threading.Thread(target=late.answer)
    waits.start()
    sent[0].end()
    waits.join(20)
    assert late.answers
    monkeypatch.setattr(module, "ANSWER_WAIT", 0.01)
    with pytest.raises(UnavailableError, match="too many answers at once"):
        begin(calls, 3).answer()


def test_peers_that_left_are_forgotten() -> None:
    calls = Calls()
    begin(calls, 1).end()
    begin(calls, 2)
    begin(calls, 3).end()
    calls.forget({"127.0.0.1 3"})
    assert set(calls.by_peer()) == {"127.0.0.1 2", "127.0.0.1 3"}


@pytest.mark.parametrize(
    ("name", "place"),
    [("ipv4:10.0.0.1:7", "10.0.0.1 7"), ("ipv6:%5B::1%5D:7", "::1 7"), ("ipv6:[::1]:7", "::1 7")],
)
def test_a_peer_is_found_by_its_place(name: str, place: str) -> None:
    calls = Calls()
    calls.begin(name, b"").end()
    assert set(calls.by_peer()) == {place}
