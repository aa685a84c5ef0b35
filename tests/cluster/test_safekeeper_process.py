"""One safekeeper as a process: whom it refuses on its proposers' port, and what it refuses to start with."""

import contextlib
import select
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.child import run_child, start_child
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import Cause
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.frames import decode
from walsender_bridge.quorum.protocol.message_socket import WireEnd
from walsender_bridge.quorum.safekeeper import control_file, hosting
from walsender_bridge.quorum.safekeeper.connection import GREETING_SECONDS
from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings
from walsender_bridge.runtime import record_file
from walsender_bridge.runtime.folder import FolderDisk

SAFEKEEPER = "walsender_bridge.quorum.safekeeper"
OURS = m.ServerInfo(system_id=7, major=16, segment_size=1 << 20)


class OneSafekeeper:
    """A process over a folder, and conversations with it."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.log = folder / "log"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._settings = SafekeeperSettings(self.data, "127.0.0.1", self.port, folder / "positions")

    def start(self) -> None:
        self.process = start_child(SAFEKEEPER, self._settings, log=self.log)
        wait_for(self.listens, 20, "it listens")

    def fails(self) -> tuple[int, str]:
        """Start it, which it refuses: exit code, and what it says."""
        done = run_child(SAFEKEEPER, self._settings, seconds=30)
        return done.returncode, done.stdout + done.stderr

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def listens(self) -> bool:
        try:
            self.connect().close()
        except OSError:
            return False
        return True

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def ask(self, *messages: m.ToSafekeeper) -> m.Message:
        """Say these on a new connection; the answer to the last one."""
        end = WireEnd(self.connect(), "a test")
        try:
            answer: m.Message | None = None
            for message in messages:
                end.send(message)
                end.flush()
                answer = next_message(end)
            assert answer is not None
            return answer
        finally:
            end.close()


def next_message(end: WireEnd) -> m.Message:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    while poll.poll(20_000):
        end.receive()
        for header, body in end.frames():
            return decode(header, body)
    raise AssertionError("no answer")


@pytest.fixture
def safekeeper(tmp_path: Path) -> Iterator[OneSafekeeper]:
    one = OneSafekeeper(tmp_path)
    one.start()
    yield one
    one.kill()


def voted(safekeeper: OneSafekeeper) -> int:
    """Have it vote for a proposer of our server; its identity."""
    greeting = safekeeper.ask(m.ProposerGreeting(OURS, 1))
    assert isinstance(greeting, m.SafekeeperGreeting)
    members = Configuration(1, frozenset({greeting.safekeeper}))
    vote = m.Vote(m.NodeId(1, 1), m.Purpose.ATTACH, 1, members)
    assert isinstance(safekeeper.ask(m.ProposerGreeting(OURS, 1), vote), m.VoteReply)
    return greeting.safekeeper


@pytest.mark.parametrize(
    ("other", "reason", "named"),
    [
        (m.ServerInfo(8, 16, 1 << 20), m.Refusal.OTHER_SYSTEM, "8, but its WAL here is of 7"),
        (m.ServerInfo(7, 17, 1 << 20), m.Refusal.OTHER_MAJOR, "17, but its WAL here is of 16"),
        (m.ServerInfo(7, 16, 1 << 24), m.Refusal.OTHER_SEGMENT_SIZE, "16777216, but its WAL"),
    ],
)
def test_19_another_server_is_refused_by_name(safekeeper, other, reason, named):
    voted(safekeeper)
    refused = safekeeper.ask(m.ProposerGreeting(other, 2))
    assert isinstance(refused, m.Refused)
    assert refused.reason == reason
    assert named in refused.detail
    # The one that it knows is not affected.
    assert isinstance(safekeeper.ask(m.ProposerGreeting(OURS, 1)), m.SafekeeperGreeting)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        b"\xff" * 200,
        struct.pack(">BBHIQQQQ", ord("A"), 1, 0, 2 << 30, 1, 0, 0, 0),  # 2 GiB of WAL
        struct.pack(">BBHIQQQQ", ord("G"), 1, 0, 2 << 30, 1, 0, 0, 0),
        struct.pack(">BBHIQQQQ", ord("G"), 9, 0, 20, 1, 0, 0, 0),  # of another version
    ],
)
def test_22_garbage_is_dropped_at_once_and_others_are_served(safekeeper, sent):
    identity = voted(safekeeper)
    stranger = safekeeper.connect()
    stranger.sendall(sent)
    assert not stranger.recv(4096)
    stranger.close()
    greeting = safekeeper.ask(m.ProposerGreeting(OURS, 1))
    assert isinstance(greeting, m.SafekeeperGreeting)
    assert greeting.safekeeper == identity


def test_22_half_a_message_and_a_slow_loris_are_dropped_in_time(safekeeper):
    strangers = [safekeeper.connect() for _ in range(20)]
    for each in strangers:
        each.sendall(struct.pack(">BBHIQQQQ", ord("G"), 1, 0, 36, 0, 0, 0, 0)[:17])
    began = time.monotonic()
    slow = strangers[0]
    while time.monotonic() < began + GREETING_SECONDS - 2:
        assert isinstance(safekeeper.ask(m.ProposerGreeting(OURS, 1)), m.SafekeeperGreeting)
        slow.sendall(b"\0")  # it stays alive, byte by byte
        time.sleep(1)
    for each in strangers:
        each.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert not each.recv(1)
        each.close()
    assert time.monotonic() < began + GREETING_SECONDS + 5


def control(safekeeper: OneSafekeeper) -> Path:
    return safekeeper.data / "control" / control_file.NAME


def test_25_a_corrupt_control_file_is_refused_by_name_and_kept(safekeeper):
    voted(safekeeper)
    safekeeper.kill()
    data = bytearray(control(safekeeper).read_bytes())
    data[len(data) // 2] ^= 1
    control(safekeeper).write_bytes(data)
    code, said = safekeeper.fails()
    assert code == Cause.CORRUPT
    assert "control file is damaged" in said
    # It is kept, and nothing begins anew the next time, either.
    assert data in [path.read_bytes() for path in control(safekeeper).parent.iterdir()]
    assert safekeeper.fails()[0] == Cause.CORRUPT


def test_25_a_control_file_of_a_newer_version_is_refused_by_name(safekeeper):
    voted(safekeeper)
    safekeeper.kill()
    newer = record_file.pack(control_file.MAGIC, control_file.FORMAT + 1, {"unknown": 1})
    control(safekeeper).write_bytes(newer)
    code, said = safekeeper.fails()
    assert code == Cause.NOT_SUPPORTED
    assert f"format {control_file.FORMAT + 1}" in said
    assert control(safekeeper).read_bytes() == newer


def test_25_a_missing_control_file_beside_wal_is_refused_by_name(safekeeper):
    voted(safekeeper)
    safekeeper.kill()
    control(safekeeper).unlink()
    (safekeeper.data / "wal" / "0000000100000000000000AA").write_bytes(bytes(1 << 20))
    code, said = safekeeper.fails()
    assert code == Cause.CORRUPT
    assert "the control file is missing" in said


def test_a_vote_outlives_the_process(safekeeper):
    identity = voted(safekeeper)
    safekeeper.kill()
    safekeeper.start()
    greeting = safekeeper.ask(m.ProposerGreeting(OURS, 1))
    assert isinstance(greeting, m.SafekeeperGreeting)
    assert (greeting.safekeeper, greeting.node_id) == (identity, m.NodeId(1, 1))
    state = control_file.load(FolderDisk(safekeeper.data / "control"))
    assert state is not None
    assert state.node_id == m.NodeId(1, 1)


def test_an_address_that_is_taken_for_now_ends_no_safekeeper_for_good(safekeeper):
    """Any program's connection can have the port for a moment; three safekeepers end at an address that comes late."""
    safekeeper.kill()
    with socket.create_server(("127.0.0.1", safekeeper.port)):
        code, told = safekeeper.fails()
    assert "cannot listen" in told
    assert code not in hosting.FINAL
    safekeeper.start()


def test_nothing_is_written_into_a_directory_that_another_one_has_taken_the_place_of(
    safekeeper, tmp_path
):
    """A disk that is mounted late: the safekeeper had made a new directory below it, and went on in the one on it."""
    safekeeper.kill()
    place, mounted = safekeeper.data, tmp_path / "mounted"
    place.rename(mounted)
    before = contents(mounted)
    safekeeper.start()
    place.rename(tmp_path / "below")
    mounted.rename(place)
    assert safekeeper.process is not None
    assert safekeeper.process.wait(20) == Cause.UNAVAILABLE
    assert "the directory is not the one that this process has locked" in safekeeper.log.read_text()
    assert contents(place) == before
    # Its supervisor starts it again, as the safekeeper whose directory is there.
    safekeeper.start()
    found = control_file.read(FolderDisk(place / "control"))
    greeting = safekeeper.ask(m.ProposerGreeting(OURS, 1))
    assert found is not None
    assert isinstance(greeting, m.SafekeeperGreeting)
    assert greeting.safekeeper == found[1].safekeeper


def contents(folder: Path) -> dict[Path, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in files}
