"""The writer of one replica, whose call the log server ends while it is in use."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.log_entries import append_to
from walsender_bridge.change_log import append_writer
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.client import ReplicaClient
from walsender_bridge.change_log.connection import connect
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import FencedError


class SlowCall:
    """The sending side of an append, whose calls take a while; notes calls that overlap."""

    def __init__(self, writer: Any, overlaps: list[str]) -> None:
        self.writer = writer
        self.overlaps = overlaps
        self.busy = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if not self.busy.acquire(blocking=False):
                self.overlaps.append(name)
                self.busy.acquire()
            try:
                time.sleep(0.1)
                return getattr(self.writer, name)(*arguments)
            finally:
                self.busy.release()

        return call


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[ReplicaClient]:
    server = ReplicaServer(tmp_path, f"127.0.0.1:{free_port()}")
    with ReplicaClient(server.address, timeout=10) as client:
        client._call(m.CREATE, m.CreateRequest("shop", "a log"))
        yield client
    server.stop()


@pytest.fixture
def overlaps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    class SlowClient:
        def __init__(self, client: Any) -> None:
            self.client = client

        def do_put(self, *arguments: Any) -> tuple[SlowCall, Any]:
            writer, reader = self.client.do_put(*arguments)
            return SlowCall(writer, found), reader

    @contextlib.contextmanager
    def slow(*arguments: Any, **options: Any) -> Iterator[SlowClient]:
        with connect(*arguments, **options) as client:
            yield SlowClient(client)

    monkeypatch.setattr(append_writer, "connect", slow)
    return found


@pytest.mark.parametrize("wait", [0.0, 0.05, 0.15, 0.25])
def test_one_thread_sends_and_closes(
    replica: ReplicaClient, overlaps: list[str], wait: float
) -> None:
    """gRPC ends the process with SIGABRT if a call is closed by one thread while another one sends."""
    with append_to(replica, "shop", 1) as writer:
        append_to(replica, "shop", 2).close()
        writer.send([])
        time.sleep(wait)
    with pytest.raises(FencedError):
        writer.send([])
    assert overlaps == []
