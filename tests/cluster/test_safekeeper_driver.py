"""A safekeeper's process against peers that behave badly: bounded memory, and the others go on."""

import errno
import os
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.listeners import of_process
from tests.support.wal import SMALL, Wal
from walsender_bridge.errors import ConnectionFailedError, UnavailableError
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.frames import HEADER_BYTES, decode, encode
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.protocol.message_socket import WireEnd
from walsender_bridge.quorum.safekeeper import connection, control_file, data_dir
from walsender_bridge.quorum.safekeeper.connection import MOST_CONNECTIONS
from walsender_bridge.quorum.safekeeper.driver import SafekeeperDriver
from walsender_bridge.quorum.safekeeper.effects import ControlState, PersistDue
from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings
from walsender_bridge.runtime.folder import FolderDisk

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
    driver = SafekeeperDriver(SafekeeperSettings(tmp_path, "127.0.0.1", 0, tmp_path / "positions"))
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
    """A leader whose WAL begins at the second segment."""
    peer = Peer(safekeeper.port)
    peer.send(m.ProposerGreeting(SERVER, NODE.proposer))
    assert isinstance(peer.answer(), m.SafekeeperGreeting)
    members = Configuration(1, frozenset({safekeeper.core.control.safekeeper}))
    peer.send(m.Vote(NODE, m.Purpose.ATTACH, 1, members))
    assert isinstance(peer.answer(), m.VoteReply)
    history = History((HistoryEntry(1, SEGMENT, 1),))
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
    # The peak of this test, not of those before it in this process (proc(5), clear_refs).
    Path("/proc/self/clear_refs").write_text("5")
    before = of_process(os.getpid(), "VmHWM")
    asked = 400  # 200 MB
    peer.socket.setblocking(True)
    peer.socket.sendall(encode(m.Fetch(1, SEGMENT, SEGMENT + HALF)) * asked)
    time.sleep(1.0)
    assert of_process(os.getpid(), "VmHWM") - before < 64 << 10, "kilobytes"
    # What was asked for comes once it is read, to the last byte.
    peer.socket.settimeout(20)
    left = asked * (HALF + HEADER_BYTES)
    while left:
        left -= len(peer.socket.recv(min(left, 1 << 20)))
    peer.socket.setblocking(False)
    append(peer, wal, 1)


def test_a_damaged_segment_is_lent_to_nobody(peer, wal, tmp_path):
    for number in range(3):
        append(peer, wal, number)
    with (tmp_path / "wal" / "000000010000000000000001").open("r+b") as file:
        file.seek(300)
        file.write(b"DAMAGE")
    for begin in (SEGMENT, SEGMENT + HALF):
        peer.send(m.Fetch(1, begin, begin + 100))
        assert peer.answer() == m.Fetched(1, begin, 0)
    peer.send(m.Fetch(1, 2 * SEGMENT, 2 * SEGMENT + 100))
    assert peer.answer() == m.Fetched(1, 2 * SEGMENT, 100)


def test_an_unreadable_segment_costs_no_connection_and_no_commit(peer, wal, monkeypatch):
    """One bad sector in old WAL that another safekeeper asks for."""
    for number in range(2):
        append(peer, wal, number)
    read = FolderDisk.read

    def unreadable(self: FolderDisk, name: str, offset: int, length: int) -> bytes:
        if name == "000000010000000000000001":
            raise OSError(errno.EIO, "Input/output error")
        return read(self, name, offset, length)

    monkeypatch.setattr(FolderDisk, "read", unreadable)
    for _ in range(3):
        peer.send(m.Fetch(1, SEGMENT, SEGMENT + HALF))
        assert peer.answer() == m.Fetched(1, SEGMENT, 0)
    append(peer, wal, 2)
    peer.send(m.Fetch(1, 2 * SEGMENT, 2 * SEGMENT + 100))
    assert peer.answer() == m.Fetched(1, 2 * SEGMENT, 100)


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


def greeted(safekeeper: SafekeeperDriver) -> Peer:
    """A stranger that says who it is, and then nothing."""
    peer = Peer(safekeeper.port)
    peer.send(m.ProposerGreeting(SERVER, 0))
    assert isinstance(peer.answer(), m.SafekeeperGreeting)
    return peer


def test_silent_connections_keep_no_proposer_out(safekeeper, peer, wal):
    """However many there are: the next proposer is heard, and the leader keeps its connection."""
    append(peer, wal, 0)
    crowd = [greeted(safekeeper) for _ in range(2 * MOST_CONNECTIONS)]
    append(peer, wal, 1)
    successor = greeted(safekeeper)
    configuration = safekeeper.core.control.configuration
    successor.send(m.Vote(m.NodeId(2, 100), m.Purpose.ATTACH, 1, configuration))
    reply = successor.answer()
    assert isinstance(reply, m.VoteReply)
    crowd += [greeted(safekeeper) for _ in range(2 * MOST_CONNECTIONS)]
    history = reply.history.succeeded(reply.flush_lsn, [HistoryEntry(2, reply.flush_lsn, 1)])
    elected = m.Elected(2, reply.flush_lsn, SEGMENT, False, history, configuration.stamped(2))
    successor.send(elected)
    assert successor.answer() == m.AppendAck(2, reply.flush_lsn, SEGMENT)
    for each in (*crowd, successor):
        each.end.close()


def test_one_that_has_greeted_and_says_nothing_is_sent_away_in_time(safekeeper, peer, monkeypatch):
    monkeypatch.setattr(connection, "IDLE_SECONDS", 1.0)
    silent = greeted(safekeeper)
    with pytest.raises(ConnectionFailedError):
        silent.answer()
    peer.send(m.Append(1, SEGMENT, SEGMENT, SEGMENT, 0))
    assert peer.answer() == m.AppendAck(1, SEGMENT, SEGMENT), "its silence is the primary's"
    silent.end.close()


def test_who_waits_for_room_writes_no_promise_into_another_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator gives the full disk's path to another one, which holds another safekeeper's promises."""
    place, other = tmp_path / "safekeeper", tmp_path / "other"
    (other / "control").mkdir(parents=True)
    (other / "lock").touch()
    control_file.save(FolderDisk(other / "control"), ControlState(11))
    save = control_file.save

    def full_once(disk: FolderDisk, state: ControlState) -> None:
        monkeypatch.setattr(control_file, "save", save)
        place.rename(tmp_path / "away")
        other.rename(place)
        raise OSError(errno.ENOSPC, "No space left on device")

    with data_dir.held(place) as holding:
        settings = SafekeeperSettings(place, "127.0.0.1", 0, tmp_path / "p")
        driver = SafekeeperDriver(settings, still_held=holding.check)
        monkeypatch.setattr(control_file, "save", full_once)
        driver.core.commit_lsn = 1
        with pytest.raises(UnavailableError, match="not the one that this process has locked"):
            driver._handle(PersistDue())
        with pytest.raises(UnavailableError, match="not the one that this process has locked"):
            driver._close()
    found = control_file.read(FolderDisk(place / "control"))
    assert found is not None
    assert found[1].safekeeper == 11


def test_it_may_be_stopped_when_it_has_ended(safekeeper):
    safekeeper.stop()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            safekeeper._poll.fileno()
        except ValueError:  # closed, and the fixture stops it again
            return
        time.sleep(0.01)
    raise AssertionError("did not end")
