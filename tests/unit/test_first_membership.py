"""Whose quorum it is, when some safekeepers hang: they are asked side by side, and a majority is enough."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from walsender_bridge.errors import UnavailableError
from walsender_bridge.quorum.proposer.first_membership import find_membership
from walsender_bridge.quorum.proposer.quorum_id import KnownQuorumId
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.frames import encode

INFO = m.ServerInfo(7, 16, 1 << 24)
FIVE = Configuration(3, frozenset(range(1, 6)), term=2, quorum=5)
KNOWN = KnownQuorumId(5, formed=True)
#: Long enough for one that answers on a busy machine.
SECONDS = 2.0


class Fake:
    """A safekeeper that answers a greeting, or hangs: it takes connections, and says nothing; or says these bytes."""

    def __init__(self, identity: int, configuration: Configuration | bytes | None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._taken: list[socket.socket] = []
        self.address: tuple[str, int] = self._listener.getsockname()
        answer = configuration
        if isinstance(configuration, Configuration):
            node_id = m.NodeId(configuration.term, 9)
            told = m.SafekeeperGreeting(identity, INFO, node_id, configuration, 0, 0, 0, 0)
            answer = encode(told)
        self._thread = threading.Thread(target=self._answer, args=(answer,), daemon=True)
        if answer is not None:
            self._thread.start()

    def _answer(self, greeting: bytes) -> None:
        with contextlib.suppress(OSError):
            while True:
                taken, _ = self._listener.accept()
                self._taken.append(taken)
                taken.recv(1000)
                taken.sendall(greeting)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        while self._thread.is_alive():
            # It may just be taking another connection.
            for each in self._taken:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._thread.join(0.05)
        for each in (self._listener, *self._taken):
            each.close()


@pytest.fixture
def addresses(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, int]]]:
    """Of safekeepers with these memberships; None: it hangs."""
    fakes = [Fake(number, each) for number, each in enumerate(request.param, 1)]
    yield [fake.address for fake in fakes]
    for fake in fakes:
        fake.close()


@pytest.mark.parametrize("addresses", [(None, None, FIVE, FIVE, FIVE)], indirect=True)
def test_5_a_minority_that_hangs_delays_no_election(addresses):
    began = time.monotonic()
    assert find_membership(addresses, INFO) == FIVE
    assert time.monotonic() - began < 3  # one of them alone would take 5


@pytest.mark.parametrize("addresses", [(None, None, None, FIVE, None)], indirect=True)
def test_5_a_majority_that_hangs_delays_it_by_one_timeout(addresses):
    began = time.monotonic()
    assert find_membership(addresses, INFO, seconds=SECONDS, known=KNOWN) == FIVE
    assert SECONDS <= time.monotonic() - began < 2 * SECONDS


@pytest.mark.parametrize("addresses", [(Configuration(), None, Configuration())], indirect=True)
def test_10_the_first_membership_needs_them_all(addresses):
    with pytest.raises(UnavailableError, match="needs every safekeeper") as refused:
        find_membership(addresses, INFO, seconds=SECONDS)
    assert refused.value.where == "{}:{} (no answer in 2 s)".format(*addresses[1])


BANNER = b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n" * 2


@pytest.mark.parametrize("addresses", [(BANNER, FIVE, FIVE, None, FIVE)], indirect=True)
def test_34_garbage_from_one_stops_no_majority(addresses):
    assert find_membership(addresses, INFO, seconds=SECONDS) == FIVE


@pytest.mark.parametrize("addresses", [(BANNER, Configuration())], indirect=True)
def test_34_garbage_is_named_where_all_are_needed(addresses):
    with pytest.raises(UnavailableError, match="needs every safekeeper") as refused:
        find_membership(addresses, INFO, seconds=SECONDS)
    host, port = addresses[0]
    assert (
        refused.value.where == f"{host}:{port} (unknown frame kind 0x53 in the safekeeper protocol)"
    )


def test_34_a_silent_name_server_delays_no_membership(monkeypatch):
    answered = threading.Event()
    fakes = [Fake(number, FIVE) for number in (1, 2)]
    known = socket.create_connection

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] == "silent":
            answered.wait(30)
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return known(address, timeout)

    monkeypatch.setattr(socket, "create_connection", connect)
    began = time.monotonic()
    try:
        addresses = [("silent", 1), *(fake.address for fake in fakes)]
        assert find_membership(addresses, INFO, seconds=SECONDS) == FIVE
        assert time.monotonic() - began < 5
    finally:
        answered.set()
        for fake in fakes:
            fake.close()


@pytest.mark.parametrize("addresses", [(Configuration(), FIVE)], indirect=True)
def test_12_members_are_found_at_other_addresses_too(addresses):
    assert find_membership(addresses[:1], INFO, addresses[1:], seconds=SECONDS) == FIVE
