"""Several repositories of one log as processes, over a cluster of etcd, with a log server and a writer.

python -m tests.support.repositories ENDPOINTS PREFIX LEASE LISTEN DATA_DIR LOG_SERVER: one repository.
"""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.child import ROOT
from tests.support.etcd import EtcdCluster
from tests.support.log_entries import SCHEMAS, EntryMaker
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.repository.candidate import RepositoryCandidate
from walsender_bridge.change_log.repository.etcd import Etcd, EtcdSettings
from walsender_bridge.change_log.repository.leader_lease import leader_key
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import UnavailableError

STREAM = "shop"


class Repositories:
    """See the module; everything but etcd ends with the block."""

    def __init__(self, folder: Path, etcd: EtcdCluster, prefix: str, count: int = 2) -> None:
        self._folder = folder
        self.settings = etcd.settings(3.0, prefix)
        self.listens = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        self.address = "grpc://" + ",".join(self.listens)
        self._log_server = ReplicaServer(folder / "log-server", "127.0.0.1:0")
        #: Of the log server.
        self.log_server_address = self._log_server.address
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, listen: str) -> None:
        its = self.settings
        folder = self._folder / listen.rpartition(":")[2]
        arguments = [",".join(its.endpoints), its.prefix, str(its.lease), listen, str(folder)]
        with folder.with_suffix(".log").open("ab") as log:
            self._processes[listen] = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.repositories",
                    *arguments,
                    self._log_server.address,
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )

    def leader(self) -> str:
        """The address of the one that leads, as etcd has it; empty: none does."""
        with Etcd(self.settings, 1.0) as client:
            found = client.get(leader_key(self.settings), within=5.0)
        return "" if found is None else str(json.loads(found.value)["address"])

    def other(self, listen: str) -> str:
        return next(each for each in self.listens if each != listen)

    def kill(self, listen: str) -> None:
        process = self._processes.pop(listen)
        process.kill()
        process.wait()

    def is_running(self, listen: str) -> bool:
        return self._processes[listen].poll() is None

    def signal(self, listen: str, signal_: signal.Signals) -> None:
        self._processes[listen].send_signal(signal_)

    def __enter__(self) -> Self:
        for listen in self.listens:
            self.start(listen)
        wait_for(self.leader, 60, "a repository leads")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for listen in [*self._processes]:
            self.kill(listen)
        self._log_server.stop()
        if error is not None:
            for each in sorted(self._folder.glob("*.log")):
                print(f"--- {each.name}", *each.read_text().splitlines()[-20:], sep="\n")


class Committer:
    """Appends to a stream, and waits until the log has committed it."""

    def __init__(self, address: str) -> None:
        self.log = LogClient(address, timeout=4.0)
        wait_for(partial(answers, self._create), 30, "the stream is created")
        self._writer = self.log.open_writer(STREAM)
        self._maker = EntryMaker()
        self._end = 1
        self._schemas = list(SCHEMAS.values())
        self.versions: list[int] = []
        #: Every entry, in order.
        self.sent: list[bytes] = []

    def _create(self) -> None:
        self.log.create_stream(STREAM)

    def commit(self, seconds: float = 30.0) -> None:
        self.sent.append(self._maker.whole())
        self._writer.send(self.sent[-1:], schemas=self._schemas)
        self._schemas = []
        assert self._writer.next_ack(10) is not None
        self._end += 1
        wait_for(partial(answers, self._is_committed), seconds, "the entry is committed")

    def reopen(self) -> None:
        """Go on as another writer, once there is a term for it."""
        self._writer.close()
        wait_for(partial(answers, self._open), 60, "a writer")

    def _open(self) -> None:
        self._writer = self.log.open_writer(STREAM)
        assert self._writer.status.end_offset == self._end

    def _is_committed(self) -> None:
        status = self.log.status()
        assert status.streams[STREAM].end_offset <= self._end
        if status.streams[STREAM].end_offset < self._end:
            raise UnavailableError("not yet")
        self.versions.append(status.version)

    def close(self) -> None:
        self._writer.close()
        self.log.close()


def answers(call: Callable[[], object]) -> bool:
    """Whether the call succeeds; what is not there yet is no failure."""
    try:
        call()
    except UnavailableError:
        return False
    return True


def _run(
    endpoints: str, prefix: str, lease: str, listen: str, folder: str, log_server: str
) -> None:
    settings = EtcdSettings(tuple(endpoints.split(",")), prefix, float(lease))
    RepositoryCandidate(
        settings,
        listen,
        lambda store: RepositoryServer(
            Path(folder), listen, log_servers=[log_server], retention=3600.0, store=store
        ),
    ).start()
    threading.Event().wait()


if __name__ == "__main__":
    _run(*sys.argv[1:])
