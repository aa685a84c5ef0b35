"""When a proposer connects to its safekeepers, and when it gives a connection up."""

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.waiting import wait_for
from walsender_bridge.quorum.proposer import links
from walsender_bridge.quorum.proposer.effects import CompareWal, ReadWal, WalSource
from walsender_bridge.quorum.proposer.links import DIAL_SECONDS, MOST_DIAL_SECONDS, Links
from walsender_bridge.quorum.proposer.name_resolution import Found, Names


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


def test_12_a_donor_that_says_nothing_is_given_up_at_once(made):
    now = time.monotonic()
    made.dial(now)
    link = made.by_peer[0]
    link.connected = True
    link.since = now
    link.fetches.append(ReadWal(1, WalSource.PEER, 0, 100, 0))
    assert made.silent(now + 1.9, lambda _peer: True) == []
    assert [peer for peer, _ in made.silent(now + 2.1, lambda _peer: True)] == [0]
    # It acknowledges, and is slow: it is no reason to give up a voter.
    link.since = now + 60
    assert made.silent(now + 61, lambda _peer: True) == []


def test_12_a_voter_that_hangs_during_the_comparison_is_given_up(made):
    """It has nothing else to say, and what it was asked for was waited for without end."""
    now = time.monotonic()
    made.dial(now)
    link = made.by_peer[0]
    link.connected = True
    link.fetches.append(CompareWal(0, 0, 100))
    link.since = now
    assert made.silent(now + links.COMPARED_SECONDS - 1, lambda _peer: False) == []
    given_up = made.silent(now + links.COMPARED_SECONDS + 1, lambda _peer: False)
    assert [peer for peer, _ in given_up] == [0]


def test_5_a_connection_that_does_not_stand_is_given_up(made):
    now = time.monotonic()
    made.dial(now)
    assert made.silent(now + 1, lambda _peer: True) == []
    assert [peer for peer, _ in made.silent(now + 6, lambda _peer: True)] == [0]


def test_15_one_that_refuses_is_tried_less_and_less_often(made, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(links, "time", SimpleNamespace(monotonic=lambda: now))
    pauses = []
    for _ in range(8):
        made.refused(0)
        made.dial(now)
        assert not made.by_peer
        pauses.append(made._dial_at[0] - now)
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(2 * DIAL_SECONDS)
    assert pauses[-1] == pytest.approx(MOST_DIAL_SECONDS)
    made.settled(0)
    made.refused(0)
    assert made._dial_at[0] - now == pytest.approx(2 * DIAL_SECONDS)


@pytest.fixture
def named(listener: socket.socket) -> Iterator[tuple[Links, threading.Event]]:
    """A safekeeper behind a name that is not found until the event, and one behind a number."""
    port = listener.getsockname()[1]
    answered = threading.Event()

    def lookup(host: str, port: int) -> list[Any]:
        assert answered.wait(30)
        if host == "nowhere":
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, ("127.0.0.1", port))]

    poll = select.epoll()
    links = Links([("silent", port), ("127.0.0.1", port), ("nowhere", port)], poll, Names(lookup))
    yield links, answered
    answered.set()
    links.close()
    poll.close()


def test_34_a_silent_name_server_delays_nobody_and_is_said(named):
    links, answered = named
    now = time.monotonic()
    assert links.dial(now) == []
    assert time.monotonic() - now < 10, "a look-up would have taken 30 s"
    assert set(links.by_peer) == {1}
    (first, why), (third, _) = links.dial(now + 3)
    assert (first, third) == (0, 2)
    assert why == "could not resolve host name silent: the name server does not answer"
    answered.set()
    wanted = [(2, "could not resolve host name nowhere: [Errno -2] Name or service not known")]
    # The two answers come in any order.
    wait_for(lambda: links.dial(now + 3) == wanted and 0 in links.by_peer, 10, "both are known")
    # Known once, it stays known while nobody answers.
    answered.clear()
    links.drop(0)
    links.dial(now + 60)
    assert 0 in links.by_peer


def test_34_all_addresses_of_a_name_are_tried(listener):
    port = listener.getsockname()[1]
    found: Found = [(socket.AF_INET, (f"127.0.0.{last}", port)) for last in (2, 3, 1)]
    poll = select.epoll()
    links = Links([("several", port)], poll, Names(lambda _host, _port: found))
    listener.settimeout(0)
    now = time.monotonic()

    def reached() -> bool:
        nonlocal now
        now += 2 * DIAL_SECONDS
        links.dial(now)
        if 0 in links.by_peer:
            links.drop(0)
        with suppress(BlockingIOError):
            listener.accept()[0].close()
            return True
        return False

    wait_for(reached, 10, "the one where somebody listens")
    links.close()
    poll.close()


def test_34_a_numeric_address_of_either_family_is_not_looked_up():
    def never(host: str, port: int) -> list[Any]:
        raise AssertionError(host)

    names = Names(never)
    assert names.find("::1", 7410, 0.0)[0][0] == socket.AF_INET6
    assert names.find("127.0.0.1", 7410, 0.0) == [(socket.AF_INET, ("127.0.0.1", 7410))]
