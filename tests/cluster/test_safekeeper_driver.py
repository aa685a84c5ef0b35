"""A safekeeper's process against peers that behave badly: bounded memory, and the others go on."""

import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.wal import Wal
from walsender_bridge.safekeeper import messages as m
from walsender_bridge.safekeeper.configuration import Configuration
from walsender_bridge.safekeeper.driver import SafekeeperDriver, Settings
from walsender_bridge.safekeeper.frames import HEADER_BYTES, decode, encode
from walsender_bridge.safekeeper.history import EpochEntry, History
from walsender_bridge.safekeeper.wire_end import WireEnd

SEGMENT = 1 << 20
SERVER = m.ServerInfo(7, 16, SEGMENT)
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


def elected(port: int, safekeeper: int) -> Peer:
    """A proposer in office, whose WAL begins at the second segment."""
    peer = Peer(port)
    peer.send(m.ProposerGreeting(SERVER, NODE.proposer))
    assert isinstance(peer.answer(), m.SafekeeperGreeting)
    members = Configuration(1, frozenset({safekeeper}))
    peer.send(m.Vote(NODE, m.Purpose.ATTACH, 1, members))
    assert isinstance(peer.answer(), m.VoteReply)
    history = History((EpochEntry(1, SEGMENT, 1),))
    peer.send(m.Elected(1, SEGMENT, SEGMENT, True, history, members.stamped(1)))
    assert peer.answer() == m.AppendAck(1, SEGMENT, 0)
    return peer


def test_8_answers_that_nobody_reads_are_not_piled_up(safekeeper):
    peer = elected(safekeeper.port, safekeeper.core.control.safekeeper)
    wal = bytes(512 << 10)
    peer.send(m.Append(1, SEGMENT, SEGMENT, SEGMENT, len(wal)), wal)
    assert peer.answer() == m.AppendAck(1, SEGMENT + len(wal), SEGMENT)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asked = 1000  # half a gigabyte
    fetch = encode(m.Fetch(1, SEGMENT, SEGMENT + len(wal)))
    peer.socket.setblocking(True)
    peer.socket.sendall(fetch * asked)
    time.sleep(1.0)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 64 << 10, "kilobytes"
    # What was asked for comes once it is read, to the last byte.
    left = asked * (len(wal) + HEADER_BYTES)
    peer.socket.settimeout(20)
    while left:
        left -= len(peer.socket.recv(min(left, 1 << 20)))
    peer.send(m.Append(1, SEGMENT + len(wal), SEGMENT, SEGMENT, 0))
    assert isinstance(peer.answer(), m.AppendAck)


def test_22_a_fetch_of_more_than_a_piece_is_refused(safekeeper):
    peer = elected(safekeeper.port, safekeeper.core.control.safekeeper)
    for at in range(3):
        begin = SEGMENT + at * (512 << 10)
        peer.send(m.Append(1, begin, SEGMENT, SEGMENT, 512 << 10), bytes(512 << 10))
        assert isinstance(peer.answer(), m.AppendAck)
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
