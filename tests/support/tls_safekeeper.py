"""A safekeeper's process whose proposers need certificates, and conversations with it."""

import select
import socket
import subprocess
import time
from pathlib import Path

from tests.support.child import start_child
from tests.support.tls import HOSTS, Authority
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.frames import decode
from walsender_bridge.quorum.protocol.tls_wire import wire
from walsender_bridge.quorum.safekeeper import control_file
from walsender_bridge.quorum.safekeeper.effects import ControlState
from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings
from walsender_bridge.runtime.folder import FolderDisk
from walsender_bridge.runtime.tls_context import TlsContext
from walsender_bridge.runtime.tls_files import TlsFiles

OURS = m.ServerInfo(system_id=7, major=16, segment_size=1 << 20)
GREETING = m.ProposerGreeting(OURS, 1)


class Conversation:
    """A connection with a certificate, or without TLS."""

    def __init__(self, port: int, tls: TlsFiles | None, host: str = "127.0.0.1") -> None:
        context = None if tls is None else TlsContext(tls)
        connected = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.end = wire(connected, "a safekeeper", context, host)
        self.end.trust()

    def say(self, *messages: m.ToSafekeeper, wal: bytes = b"") -> None:
        for message in messages:
            self.end.send(message, [memoryview(wal)] if isinstance(message, m.Append) else None)
        self.end.flush()

    def hear(self, seconds: float = 20.0) -> m.Message:
        """The next message. Raises the error with which the connection ends."""
        deadline = time.monotonic() + seconds
        self.end.flush()
        while (left := deadline - time.monotonic()) > 0:
            for header, body in self.end.frames():
                return decode(header, b"" if header.carries_wal else bytes(body))
            poll = select.poll()
            poll.register(self.end, self.end.events)
            if any(events & ~select.POLLOUT for _, events in poll.poll(left * 1000)):
                self.end.receive()
            self.end.flush()
        raise AssertionError("no answer")

    def ask(self, *messages: m.ToSafekeeper) -> m.Message:
        for message in messages:
            self.say(message)
            answer = self.hear()
        return answer

    def close(self) -> None:
        self.end.close()


class TlsSafekeeper:
    """The process; `proposer` are the files of a certificate that it takes messages from."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.authority, self.port = authority, free_port()
        self.files = authority.issue("safekeeper", hosts=HOSTS)
        self.proposer = authority.issue("proposer")
        self.folder = folder
        self.log = folder / "log"
        self.settings = SafekeeperSettings(
            folder / "data", "127.0.0.1", self.port, folder / "positions", tls=self.files
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = start_child(
            "walsender_bridge.quorum.safekeeper", self.settings, log=self.log
        )
        wait_for(self._listens, 30, f"it listens: {self.log}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        except OSError:
            return False
        return True

    def talk(self, tls: TlsFiles | None = None, host: str = "127.0.0.1") -> Conversation:
        return Conversation(self.port, tls or self.proposer, host)

    def ask(self, *messages: m.ToSafekeeper, tls: TlsFiles | None = None) -> m.Message:
        """The answer to the last of these, on a connection of their own."""
        talk = self.talk(tls)
        try:
            return talk.ask(*messages)
        finally:
            talk.close()

    def greets(self) -> m.SafekeeperGreeting:
        answer = self.ask(GREETING)
        assert isinstance(answer, m.SafekeeperGreeting)
        return answer

    def vote(self) -> None:
        """Have it vote for a proposer in term 1."""
        members = Configuration(1, frozenset({self.greets().safekeeper}))
        vote = m.Vote(m.NodeId(1, 1), m.Purpose.ATTACH, 1, members)
        assert isinstance(self.ask(GREETING, vote), m.VoteReply)

    def promised(self) -> ControlState:
        """What is on its disk."""
        place = self.settings.data_dir
        control = control_file.load(FolderDisk(place / "control"), FolderDisk(place / "wal"))
        assert control is not None
        return control

    def wal(self) -> dict[str, bytes]:
        """Its WAL's files, without the spare segments, which are zeroed in the background."""
        found = (self.settings.data_dir / "wal").rglob("*")
        files = [each for each in found if each.is_file() and not each.name.startswith("spare-")]
        return {each.name: each.read_bytes() for each in files}
