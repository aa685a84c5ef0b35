"""The HTTP endpoint's limits: on connections, on their time, and on what a name server may delay."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.request import urlopen

import pytest

from tests.support.waiting import wait_for
from walsender_bridge.commands.bounded_http import BoundedServer


class _Handler(BaseHTTPRequestHandler):
    timeout = 10

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Nothing."""


@contextmanager
def serving(host: str = "127.0.0.1", **limits: float) -> Iterator[BoundedServer]:
    with BoundedServer((host, 0), _Handler, **limits) as server:  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def connect(server: BoundedServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=20)


def threads() -> int:
    return sum("process_request" in thread.name for thread in threading.enumerate())


def test_a_connection_that_drips_bytes_ends_at_its_deadline():
    with serving(seconds=0.3) as server, connect(server) as client:
        client.sendall(b"GET / HT")
        assert client.recv(1) == b"", "the server still waits for the rest"
        wait_for(lambda: threads() == 0, 10, "its thread ends")


def test_connections_beyond_the_limit_get_no_thread():
    with serving(connections=3) as server:
        held = [connect(server) for _ in range(3)]
        wait_for(lambda: threads() == 3, 10, "three are served")
        for _ in range(5):
            with connect(server) as refused:
                try:
                    assert refused.recv(1) == b""
                except ConnectionResetError:
                    continue
        assert threads() == 3
        held.pop().close()

        def answered() -> bool:
            try:
                with urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=20) as answer:
                    return answer.read() == b"ok"
            except OSError:
                return False

        wait_for(answered, 10, "the next one is served")
        for each in held:
            each.close()


def test_the_endpoint_listens_on_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with serving("::1") as server, urlopen(f"http://[::1]:{server.server_port}/") as answer:
        assert answer.read() == b"ok"


def test_no_name_server_is_asked_before_listening(monkeypatch):
    def asked(*_):
        pytest.fail("a silent name server would hold this up")

    monkeypatch.setattr(socket, "getfqdn", asked)
    with serving():
        pass
