"""The connections that this process has accepted, and their end."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from walsender_bridge.runtime import tcp_connections


@contextlib.contextmanager
def accepted(host: str, family: int) -> Iterator[tuple[int, socket.socket, socket.socket]]:
    any_address = ("" if host == "127.0.0.1" and family == socket.AF_INET6 else host, 0)
    both = family == socket.AF_INET6
    with socket.create_server(any_address, family=family, dualstack_ipv6=both) as server:
        port = server.getsockname()[1]
        with socket.create_connection((host, port)) as client:
            own = server.accept()[0]
            with own:
                yield port, client, own


@pytest.mark.parametrize(
    ("host", "family"),
    [
        ("127.0.0.1", socket.AF_INET),
        ("::1", socket.AF_INET6),
        # As gRPC listens for IPv4.
        ("127.0.0.1", socket.AF_INET6),
    ],
)
def test_a_connection_is_found_counted_and_ended(host: str, family: int) -> None:
    if family == socket.AF_INET6 and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with accepted(host, family) as (port, client, own):
        client.sendall(bytes(1000))
        own.sendall(bytes(300))
        client.recv(300, socket.MSG_WAITALL)
        own.recv(1000, socket.MSG_WAITALL)
        (found,) = tcp_connections.accepted(port)
        assert found.peer == f"{host} {client.getsockname()[1]}"
        assert found.received == 1000
        assert 0 <= found.sent <= 301
        tcp_connections.keep_alive(found)
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000
        tcp_connections.shut_down(found)
        assert client.recv(1) == own.recv(1) == b""


def test_a_descriptor_that_is_anothers_by_now_is_left_alone() -> None:
    with accepted("127.0.0.1", socket.AF_INET) as (port, _, own):
        (found,) = tcp_connections.accepted(port)
        with accepted("127.0.0.1", socket.AF_INET) as (_, other_client, other):
            os.dup2(other.fileno(), own.fileno())
            tcp_connections.shut_down(found)
            tcp_connections.keep_alive(found)
            assert not other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            other.sendall(b"x")
            assert other_client.recv(1) == b"x"


def test_the_limit_of_open_files_is_raised() -> None:
    code = (
        "import resource; from walsender_bridge.runtime import tcp_connections as t;"
        "t.raise_open_files(); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], t.open_files())"
    )
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4096)
    done = subprocess.run(
        [sys.executable, "-c", f"import resource; resource.setrlimit(7, (256, {hard})); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(hard)] * 2
