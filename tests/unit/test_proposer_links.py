"""When a proposer connects to its safekeepers, and when it gives a connection up."""

import select
import socket
import time
from collections.abc import Iterator

import pytest

from walsender_bridge.proposer import links
from walsender_bridge.proposer.links import DIAL_SECONDS, MOST_DIAL_SECONDS, Links


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.fixture
def made(listener: socket.socket) -> Iterator[Links]:
    poll = select.epoll()
    links = Links([listener.getsockname()], poll)
    yield links
    links.close()
    poll.close()


def test_5_a_safekeeper_that_says_nothing_is_given_up(made, monkeypatch):
    monkeypatch.setattr(links, "SILENT_SECONDS", 1.0)
    now = time.monotonic()
    made.dial(now)
    link = made.by_peer[0]
    link.connected = True
    assert made.silent(now + 0.9, lambda _peer: True) == []
    assert made.silent(now + 5, lambda _peer: False) == [], "nothing is expected of it"
    assert made.silent(now + 5.9, lambda _peer: True) == [], "it counts from then"
    assert [peer for peer, _ in made.silent(now + 7, lambda _peer: True)] == [0]


def test_5_a_connection_that_does_not_stand_is_given_up(made):
    now = time.monotonic()
    made.dial(now)
    assert made.silent(now + 1, lambda _peer: True) == []
    assert [peer for peer, _ in made.silent(now + 6, lambda _peer: True)] == [0]


def test_15_one_that_refuses_is_tried_less_and_less_often(made):
    pauses = []
    for _ in range(8):
        before = time.monotonic()
        made.refused(0)
        made.dial(before)
        assert not made.by_peer
        pauses.append(round(made._dial_at[0] - before, 2))
    assert pauses == sorted(pauses)
    assert pauses[0] >= 2 * DIAL_SECONDS
    assert pauses[-1] == pytest.approx(MOST_DIAL_SECONDS, abs=0.1)
    made.settled(0)
    made.refused(0)
    assert made._dial_at[0] - time.monotonic() < 3 * DIAL_SECONDS
