"""Without TLS, services on loopback answer their own account and root, and no other account of the machine."""

import contextlib
import os
import select
import socket
import struct
from collections.abc import Iterator

import pytest

from tests.support.other_account import NOBODY, needs_root, through_nobody
from walsender_bridge.change_log.append_writer import AppendWriter
from walsender_bridge.change_log.client import ReplicaClient
from walsender_bridge.errors import PrivilegeError, UnavailableError
from walsender_bridge.quorum.proposer.handshake import ask
from walsender_bridge.quorum.proposer.links import Links
from walsender_bridge.quorum.protocol.messages import ServerInfo
from walsender_bridge.runtime import peer_account

SERVER = ServerInfo(7, 16, 1 << 20)

FAMILIES = {
    "127.0.0.1": socket.AF_INET,
    "::1": socket.AF_INET6,
    "::ffff:127.0.0.1": socket.AF_INET6,
}


@contextlib.contextmanager
def connected(host: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client's socket and the one that was accepted, each of the family of its address."""
    with socket.socket(FAMILIES[host]) as listener:
        if FAMILIES[host] == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        listener.listen()
        # An IPv4 client of a socket for both families, too.
        client = socket.create_connection((host.removeprefix("::ffff:"), listener.getsockname()[1]))
        with client, listener.accept()[0] as accepted:
            yield client, accepted


@pytest.fixture(params=["the kernel", "tables"])
def source(request, monkeypatch):
    """Where the account is looked up."""
    if request.param == "tables":
        monkeypatch.setattr(peer_account, "_NETLINK_SOCK_DIAG", 31)  # no such protocol


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("host", FAMILIES)
def test_the_account_of_both_ends_is_known(host):
    with connected(host) as ends:
        for end in ends:
            assert peer_account.of_peer(end) == os.geteuid()
            peer_account.check(end)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_socket_that_was_closed_is_nobodys_and_not_roots(how):
    with connected("127.0.0.1") as (client, accepted):
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(b"a request")
        client.close()
        assert peer_account.of_peer(accepted) is None
        with pytest.raises(UnavailableError):
            peer_account.check(accepted)


@pytest.mark.usefixtures("source")
def test_one_that_listens_on_the_port_of_a_gone_client_is_not_taken_for_it():
    with connected("127.0.0.1") as (client, accepted):
        own = peer_account._end(accepted.getsockname())
        other = peer_account._end(client.getsockname())
        with socket.create_server(("127.0.0.1", 0)) as listening:
            place = peer_account._end(listening.getsockname())
            assert peer_account._ask_kernel(place, own) is None
        assert peer_account._ask_kernel(other, own) == os.geteuid()


@needs_root
def test_a_client_does_not_talk_to_what_another_account_has_put_in_a_services_place(monkeypatch):
    """Its rows and WAL would go there, and come from there."""
    with (
        socket.create_server(("127.0.0.1", 0)) as root,
        through_nobody(root.getsockname()[1]) as port,
    ):
        own = root.getsockname()[1]
        assert peer_account.foreign_listener("127.0.0.1", port) == ""
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
        for host in ("127.0.0.1", "localhost"):
            assert f"account {NOBODY} listens" in peer_account.foreign_listener(host, port)
            assert peer_account.foreign_listener(host, own) == "", "root's"
        assert peer_account.foreign_listener("192.0.2.1", port) == ""
        for connect in (
            lambda: ReplicaClient(f"grpc://127.0.0.1:{port}"),
            lambda: AppendWriter(f"127.0.0.1:{port}", "shop", 1, 5.0),
            lambda: ask("127.0.0.1", port, SERVER),
        ):
            with pytest.raises(PrivilegeError, match="and there is no"):
                connect()
        with select.epoll() as poll:
            links = Links([("127.0.0.1", port), ("127.0.0.1", own)], poll)
            ((peer, why),) = links.dial(0.0)
            assert (peer, [*links.by_peer]) == (0, [1])
            assert "listens" in why
            links.close()


@needs_root
@pytest.mark.usefixtures("source")
def test_another_account_is_known_and_refused():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        through_nobody(listener.getsockname()[1]) as port,
        socket.create_connection(("127.0.0.1", port)),
        listener.accept()[0] as accepted,
    ):
        assert peer_account.of_peer(accepted) == NOBODY
        with pytest.raises(PrivilegeError, match=f"not account {NOBODY}") as caught:
            peer_account.check(accepted)
        assert "[tls]" in caught.value.repair
