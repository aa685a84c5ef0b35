"""A safekeeper's process against peers that behave badly: bounded memory, and the others go on."""

import random
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.wal import SMALL, Wal
from walsender_bridge.safekeeper import messages as m
from walsender_bridge.safekeeper.configuration import Configuration
from walsender_bridge.safekeeper.driver import SafekeeperDriver, Settings
from walsender_bridge.safekeeper.frames import HEADER_BYTES, decode, encode
from walsender_bridge.safekeeper.history import EpochEntry, History
from walsender_bridge.safekeeper.wire_end import WireEnd

SEGMENT = SMALL.segment_bytes
HALF = SEGMENT // 2
SERVER = m.ServerInfo(SMALL.system_id, SMALL.major, SEGMENT)
NODE = m.NodeId(1, 99)


class Peer:
    """A proposer's end of a connection, blocking."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.end = WireEnd(self.socket, "test")
        self.end.trust()

    def send(self, message: m.Message, wal: bytes = b"") -> None:
        self.end.send(message, [memoryview(wal)] if wal else None)
        while self.end.sending:
            select.select([], [self.socket], [])
            self.end.flush()

    def answer(self) -> m.Message:
        while True:
            for header, body in self.end.frames():
                return decode(header, b"" if header.carries_wal else body)
            select.select([self.socket], [], [], 20)
            self.end.receive()


@pytest.fixture
def safekeeper(tmp_path: Path) -> Iterator[SafekeeperDriver]:
    driver = SafekeeperDriver(Settings(tmp_path, "127.0.0.1", 0, tmp_path / "positions"))
    thread = threading.Thread(target=driver.run)
    thread.start()
    try:
        yield driver
    finally:
        driver.stop()
        thread.join(20)


@pytest.fixture
def wal(seed: int) -> bytes:
    """WAL from the second segment on."""
    made = Wal()
    made.fill(SEGMENT + 3 * HALF, random.Random(seed))
    return bytes(made.data)


@pytest.fixture
def peer(safekeeper: SafekeeperDriver) -> Iterator[Peer]:
    """A proposer in office, whose WAL begins at the second segment."""
    peer = Peer(safekeeper.port)
    peer.send(m.ProposerGreeting(SERVER, NODE.proposer))
    assert isinstance(peer.answer(), m.SafekeeperGreeting)
    members = Configuration(1, frozenset({safekeeper.core.control.safekeeper}))
    peer.send(m.Vote(NODE, m.Purpose.ATTACH, 1, members))
    assert isinstance(peer.answer(), m.VoteReply)
    history = History((EpochEntry(1, SEGMENT, 1),))
    peer.send(m.Elected(1, SEGMENT, SEGMENT, True, history, members.stamped(1)))
    assert peer.answer() == m.AppendAck(1, SEGMENT, 0)
    yield peer
    peer.end.close()


def append(peer: Peer, wal: bytes, number: int) -> None:
    begin = SEGMENT + number * HALF
    peer.send(m.Append(1, begin, SEGMENT, SEGMENT, HALF), wal[number * HALF : (number + 1) * HALF])
    assert peer.answer() == m.AppendAck(1, begin + HALF, SEGMENT)


def test_8_answers_that_nobody_reads_are_not_piled_up(peer, wal):
    append(peer, wal, 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asked = 400  # 200 MB
    peer.socket.setblocking(True)
    peer.socket.sendall(encode(m.Fetch(1, SEGMENT, SEGMENT + HALF)) * asked)
    time.sleep(1.0)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 64 << 10, "kilobytes"
    # What was asked for comes once it is read, to the last byte.
    peer.socket.settimeout(20)
    left = asked * (HALF + HEADER_BYTES)
    while left:
        left -= len(peer.socket.recv(min(left, 1 << 20)))
    peer.socket.setblocking(False)
    append(peer, wal, 1)


def test_22_a_fetch_of_more_than_a_piece_is_refused(peer, wal):
    for number in range(3):
        append(peer, wal, number)
    peer.send(m.Fetch(1, SEGMENT, SEGMENT + m.MAX_FETCH_BYTES + 1))
    refused = peer.answer()
    assert isinstance(refused, m.Refused)
    assert refused.reason == m.Refusal.OUT_OF_ORDER


def test_22_a_peer_that_vanishes_without_a_word_is_noticed():
    ours, theirs = socket.socket(), socket.socket()
    with ours, theirs:
        WireEnd(ours, "test")
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, tries = (
            ours.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + every * tries <= 30
        assert 0 < ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
