"""A change log whose streams have two replicas, each on a log server that a test may kill."""

import subprocess
from pathlib import Path

from tests.support.capture_stack import ChangeLog
from tests.support.child import start_child
from tests.support.waiting import wait_for
from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.change_log.repository.core import StreamCreated
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.demo.local_server import free_port


class ReplicatedLog(ChangeLog):
    """As `ChangeLog`, with a second log server. A stream has replicas on both if `create` is called before it is used."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.second_listen = f"127.0.0.1:{free_port()}"
        self.second: subprocess.Popen[bytes] | None = None

    def start_log_server(self) -> None:
        super().start_log_server()
        self.second = start_child(
            "walsender_bridge.change_log.log_server",
            ReplicaServerSettings(self.folder / "second", self.second_listen),
            log=self.folder / "second.log",
        )

    def kill_log_server(self) -> None:
        super().kill_log_server()
        self.kill_second()

    def kill_second(self) -> None:
        if self.second is not None:
            self.second.kill()
            self.second.wait()
            self.second = None

    def start_repository(self) -> None:
        self.repository = RepositoryServer(
            self.folder / "repository",
            self.listen,
            log_servers=[self.log_server_listen, self.second_listen],
            retention=self.retention,
        )
        self.repository.start()

    def create(self, stream: str) -> None:
        """Have the repository record the stream with a replica on each log server."""
        repository = self.repository
        assert repository is not None
        wait_for(lambda: len(repository._log_servers.answering()) == 2, 30, "both log servers")
        ids = tuple(each.log_server_id for each in repository._log_servers)
        with repository._changed:
            repository._met()
            repository._record(StreamCreated(stream, ids))
