"""A cluster of etcd for a test: each member a process, which may be stopped, killed and started again."""

import contextlib
import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest

from tests.support.waiting import wait_for
from walsender_bridge.change_log.repository.etcd import EtcdSettings
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.runtime.tls_files import TlsFiles

PROGRAM: Final = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(PROGRAM is None, reason="etcd is not installed (etcd-server)")


def missing() -> str:
    """What this machine lacks for these tests."""
    return "" if PROGRAM is not None else "not here: install etcd-server"


class EtcdCluster:
    """Members with their data in `folder`; everything ends with the block."""

    def __init__(self, folder: Path, members: int = 3, tls: TlsFiles | None = None) -> None:
        self._folder = folder
        self._tls = tls
        self.endpoints = [f"127.0.0.1:{free_port()}" for _ in range(members)]
        self._peers = [f"http://127.0.0.1:{free_port()}" for _ in range(members)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def settings(self, lease: float = 2.0, prefix: str = "/tuskline/") -> EtcdSettings:
        return EtcdSettings(tuple(self.endpoints), prefix, lease, self._tls)

    def start(self, number: int) -> None:
        assert PROGRAM is not None
        scheme = "http" if self._tls is None else "https"
        listen, peer = f"{scheme}://{self.endpoints[number]}", self._peers[number]
        peers = ",".join(f"m{each}={url}" for each, url in enumerate(self._peers))
        options = {
            "name": f"m{number}",
            "data-dir": str(self._folder / f"etcd-{number}"),
            "listen-client-urls": listen,
            "advertise-client-urls": listen,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": peers,
            "logger": "zap",
        }
        if self._tls is not None:
            options |= {
                "trusted-ca-file": str(self._tls.ca),
                "cert-file": str(self._tls.certificate),
                "key-file": str(self._tls.key),
                "client-cert-auth": "true",
            }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        with (self._folder / f"etcd-{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                [PROGRAM, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def kill(self, number: int) -> None:
        process = self._processes.pop(number)
        process.kill()
        process.wait()

    def signal(self, number: int, signal_: signal.Signals) -> None:
        self._processes[number].send_signal(signal_)

    def is_healthy(self, number: int = 0) -> bool:
        """Whether a member has a quorum; without TLS."""
        try:
            url = f"http://{self.endpoints[number]}/health"
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, ValueError):
            return False

    def is_whole(self) -> bool:
        """Whether all members are there."""
        numbers = range(len(self.endpoints))
        return len(self._processes) == len(numbers) and all(map(self.is_healthy, numbers))

    @contextlib.contextmanager
    def whole_afterwards(self) -> Iterator[None]:
        """Members that are killed in the block run again behind it."""
        try:
            yield
        finally:
            for number in range(len(self.endpoints)):
                if number not in self._processes:
                    self.start(number)
            wait_for(self.is_whole, 60, "etcd is whole")

    def leader(self) -> int:
        """The member that leads etcd; without TLS."""
        return next(number for number in self._processes if self._leads(number))

    def _leads(self, number: int) -> bool:
        url = f"http://{self.endpoints[number]}/v3/maintenance/status"
        with urllib.request.urlopen(url, data=b"{}", timeout=5) as answer:
            its = json.load(answer)
        return bool(its["leader"] == its["header"]["member_id"])

    def __enter__(self) -> Self:
        for number in range(len(self.endpoints)):
            self.start(number)
        if self._tls is None:
            wait_for(self.is_healthy, 60, "etcd has a quorum")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        if error is not None:
            for each in sorted(self._folder.glob("etcd-*.log")):
                lines = each.read_text(errors="replace").splitlines()
                print(f"--- {each.name}", *lines[-8:], sep="\n")
