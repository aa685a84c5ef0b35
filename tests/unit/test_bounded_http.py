"""The HTTP endpoint's limits: on connections, on their time, and on what a name server may delay."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from urllib.request import urlopen

import pytest

from tests.support.http_service import served
from tests.support.waiting import wait_for
from walsender_bridge.observability.bounded_http import BoundedHandler, BoundedServer


class _Handler(BoundedHandler):
    timeout = 10

    def do_GET(self) -> None:  # noqa: N802  # the base class's name
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Nothing."""


class _Server(BoundedServer):
    """Knows its own threads: this process may have other servers, with connections that stay."""

    def __init__(self, *args: Any, **limits: Any) -> None:
        self._started: list[threading.Thread] = []
        super().__init__(*args, **limits)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._started.append(threading.current_thread())
        super().process_request_thread(request, client_address)

    def threads(self) -> int:
        return sum(thread.is_alive() for thread in self._started)


@contextmanager
def serving(
    handler: type[BoundedHandler] = _Handler, host: str = "127.0.0.1", **limits: float
) -> Iterator[_Server]:
    with _Server((host, 0), handler, **limits) as server:
        try:
            with served(server):
                yield server
        finally:
            wait_for(lambda: server.threads() == 0, 20, "the connections' threads end")


def connect(server: BoundedServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=20)


def test_a_connection_that_drips_bytes_ends_at_its_deadline():
    with serving(seconds=0.3) as server, connect(server) as client:
        client.sendall(b"GET / HT")
        assert client.recv(1) == b"", "the server still waits for the rest"
        wait_for(lambda: server.threads() == 0, 10, "its thread ends")


def answered(server: BoundedServer) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=20) as answer:
            return answer.read() == b"ok"
    except OSError:
        return False


def test_clients_that_are_slow_to_ask_keep_nobody_out():
    with serving(connections=3) as server, ExitStack() as held:
        slow = [held.enter_context(connect(server)) for _ in range(9)]
        for each in slow:
            with suppress(OSError):
                each.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        for _ in range(5):
            assert answered(server)
        # One that has given its place back is there for another moment.
        wait_for(lambda: server.threads() <= 3, 5, "no more threads than connections")
        # The oldest have made room.
        with suppress(ConnectionResetError):
            assert slow[0].recv(1) == b""


def test_one_that_has_asked_is_answered_whoever_comes():
    go_on = threading.Event()

    class Slow(_Handler):
        def do_GET(self) -> None:  # noqa: N802  # the base class's name
            assert go_on.wait(20)
            super().do_GET()

    with serving(Slow, connections=2) as server, ExitStack() as held:
        asked = [held.enter_context(connect(server)) for _ in range(2)]
        for each in asked:
            each.sendall(b"GET / HTTP/1.0\r\n\r\n")
        wait_for(lambda: server.threads() == 2 and not server.waiting, 10, "both have asked")
        assert not answered(server)
        assert server.threads() == 2
        go_on.set()
        for each in asked:
            assert b"200" in each.recv(100)
        wait_for(lambda: answered(server), 10, "the next one is served")


def test_the_endpoint_listens_on_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with serving(host="::1") as server, urlopen(f"http://[::1]:{server.server_port}/") as answer:
        assert answer.read() == b"ok"


def test_no_name_server_is_asked_before_listening(monkeypatch):
    def asked(*_):
        pytest.fail("a silent name server would hold this up")

    monkeypatch.setattr(socket, "getfqdn", asked)
    with serving():
        pass
