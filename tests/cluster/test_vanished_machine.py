"""A machine that vanishes without a word, in a network namespace whose cable is pulled: calls to it end, and others go on."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.child import ROOT
from tests.support.log_entries import SCHEMAS, EntryMaker
from tests.support.machines import namespaces, namespaces_missing
from tests.support.tls import HOSTS, SERVER, Authority
from tests.support.waiting import wait_for
from walsender_bridge.change_log import connection_watch, protocol
from walsender_bridge.change_log.append_writer import AppendWriter
from walsender_bridge.change_log.client import LogClient, ReplicaClient, StreamWriter
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import UnavailableError, UnknownStreamError
from walsender_bridge.runtime import json_model, tcp_connections

if reason := namespaces_missing():
    pytest.skip(reason, allow_module_level=True)


class Network:
    """Two log servers and a repository here, a third log server elsewhere, and a certificate for everything."""

    def __init__(self, folder: Path, address: str, inside: list[str]) -> None:
        authority = Authority(folder)
        self.tls = authority.issue(*SERVER, "operator", hosts=(*HOSTS, address))
        self._name = inside[3]
        self.listen = f"{address}:{free_port()}"
        self.far = subprocess.Popen(
            [*inside, sys.executable, "-m", "walsender_bridge.change_log.log_server", "test"],
            stdin=subprocess.PIPE,
            cwd=ROOT,
        )
        assert self.far.stdin is not None
        settings = ReplicaServerSettings(folder / "far", self.listen, tls=self.tls)
        with self.far.stdin as stdin:
            stdin.write(json_model.encode(settings))
        self.near = [
            ReplicaServer(folder / f"near-{number}", "127.0.0.1:0", tls=self.tls)
            for number in range(2)
        ]
        wait_for(self._answers, 30, "the far log server")
        self.repository = RepositoryServer(
            folder / "repository",
            "127.0.0.1:0",
            log_servers=[self.listen, *(each.address.partition("://")[2] for each in self.near)],
            tick=0.02,
            replication=ReplicationPolicy(3, 2, 3.0),
            tls=self.tls,
        )
        self.repository.start()
        self.log = LogClient(self.repository.address, tls=self.tls)
        self.maker = EntryMaker()
        self.failed: set[str] = set()

    def _answers(self) -> bool:
        with ReplicaClient(f"grpc+tls://{self.listen}", tls=self.tls) as far:
            try:
                far.stream_status("none")
            except UnavailableError:
                return False
            except UnknownStreamError:
                return True
        raise AssertionError("it has no streams")

    def pull(self) -> None:
        """Nothing reaches the far machine any more, and nothing comes from there."""
        subprocess.run(["ip", "-n", self._name, "link", "set", "eth0", "down"], check=True)

    def open_writer(self) -> StreamWriter:
        """As capture does it: until it succeeds."""

        def opened() -> StreamWriter | None:
            with contextlib.suppress(UnavailableError):
                return self.log.open_writer("shop", self.failed)
            return None

        writer = wait_for(opened, 60, "a writer")
        self.maker.follow(writer.status)
        return writer

    def write(self, writer: StreamWriter) -> None:
        writer.send([self.maker.whole()], schemas=list(SCHEMAS.values()))
        assert writer.next_ack(30) is not None, "acknowledged"

    def close(self) -> None:
        self.log.close()
        self.repository.stop()
        for each in self.near:
            each.stop()
        self.far.kill()
        self.far.wait()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with namespaces(1) as (_, [(address, inside)]):
        found = Network(tmp_path, address, inside)
        try:
            yield found
        finally:
            found.close()


def appending() -> set[threading.Thread]:
    """The threads that wait for a log server in an append."""
    return {each for each in threading.enumerate() if each.name in {"appends to shop", "acks"}}


def _let_grpc_wait(monkeypatch: pytest.MonkeyPatch, milliseconds: int) -> None:
    """For data that is not taken, on connections that are made from now on."""
    options = dict(protocol.REMOTE_CHANNEL_OPTIONS)
    assert options.get("grpc.keepalive_timeout_ms", 0) <= 20_000
    options["grpc.keepalive_timeout_ms"] = milliseconds
    monkeypatch.setattr(protocol, "REMOTE_CHANNEL_OPTIONS", [*options.items()])


def test_39_a_call_that_only_waits_for_a_machine_that_vanished_ends(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC asks a service no more often than every five minutes; the kernel asks that of its machine, and not only once."""
    quick = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 3}
    options = [(socket.IPPROTO_TCP, option, value) for option, value in quick.items()]
    on = (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    monkeypatch.setattr(tcp_connections, "_KEEPALIVE", (on, *options))
    monkeypatch.setattr(tcp_connections, "_NOT_TAKEN", (*tcp_connections._NOT_TAKEN[:2], 9000))
    _let_grpc_wait(monkeypatch, 1000)
    monkeypatch.setattr(connection_watch, "_MADE_SECONDS", 0.0)
    network.log.create_stream("shop")
    term = network.log.writer_term("shop").term
    with AppendWriter(f"grpc+tls://{network.listen}", "shop", term, 30, tls=network.tls) as writer:
        assert writer.next_ack(3) is None, "nothing is sent, in either direction"
        network.pull()
        began = time.monotonic()
        assert writer.next_ack(5) is None, "a probe or two that are lost end no connection"
        with pytest.raises(UnavailableError):
            assert writer.next_ack(60) is not None, "it waits still"
        assert time.monotonic() - began < 50


def test_39_an_append_to_a_machine_that_vanished_ends_and_the_writer_goes_on(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    _let_grpc_wait(monkeypatch, 3000)
    # The writer is in the process of a service here.
    monkeypatch.setattr(tcp_connections, "_NOT_TAKEN", (*tcp_connections._NOT_TAKEN[:2], 3000))
    network.log.create_stream("shop")
    first = network.open_writer()
    network.write(first)
    assert len(network.repository._state.streams["shop"].members) == 3
    waiting = appending()
    network.pull()
    began = time.monotonic()
    # As capture does it: a writer that fails is closed, and another one opened.
    with contextlib.suppress(UnavailableError):
        network.write(first)
    first.close()
    with network.open_writer() as writer:
        network.write(writer)
        assert time.monotonic() - began < 20
        assert network.listen not in writer.address
        network.write(writer)
        wait_for(lambda: not waiting & appending(), 30, "the end of the calls to the machine")
