"""The TCP connections of this process: those that it has accepted on a port, whoever in it serves them, and those that it has made.

A library that listens for us, as gRPC does, tells nothing of its connections and has no limits for them. But its sockets are
this process's: the kernel counts what each has received and sent, and `shut_down` ends one as if its peer had left.
"""

import contextlib
import os
import resource
import socket
import stat
import struct
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from walsender_bridge.errors import UnavailableError
from walsender_bridge.runtime import peer_account

#: Where `struct tcp_info` has `tcpi_bytes_acked`, followed by `tcpi_bytes_received`, since Linux 4.1.
_COUNTS: Final = struct.Struct("=120xQQ")
#: Seconds without a sign of the peer, seconds between probes, and probes, before the kernel ends a connection: a peer whose
#: machine or network went away says no goodbye.
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
#: Milliseconds for which what was sent, or asked, may not be taken. It is what ends a connection, as long as all probes together.
_NOT_TAKEN: Final = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)

_TCP: Final = frozenset({socket.AF_INET, socket.AF_INET6})
#: Open files that suffice for every process here.
_FILES: Final = 65_536


@dataclass(frozen=True, slots=True)
class TcpConnection:
    """`inode`: of the socket; no two open ones have the same. `peer`: as `place` makes it. `received`, `sent`: bytes."""

    inode: int
    descriptor: int
    peer: str
    received: int
    sent: int


def place(host: str, port: int | str) -> str:
    """An address and a port, an IPv4 address in IPv6's form as IPv4."""
    return f"{host.removeprefix('::ffff:')} {port}"


def accepted(port: int) -> list[TcpConnection]:
    """The connections to this port; none on a system without /proc."""
    found = []
    for descriptor in _sockets():
        # A socket that is not connected, or no longer, is none.
        with contextlib.suppress(OSError), _own(descriptor) as connection:
            if connection.family not in _TCP or connection.getsockname()[1] != port:
                continue
            host, peer_port = connection.getpeername()[:2]
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
            sent, received = _COUNTS.unpack(info) if len(info) == _COUNTS.size else (0, 0)
            peer = place(host, peer_port)
            found.append(TcpConnection(_inode(connection), descriptor, peer, received, sent))
    return found


def keep_alive(found: TcpConnection) -> None:
    """Have the kernel end the connection once the kernel of its peer has been silent for half a minute."""
    with contextlib.suppress(OSError), _own(found.descriptor) as connection:
        if _inode(connection) == found.inode:
            for option in (*_KEEPALIVE, _NOT_TAKEN):
                connection.setsockopt(*option)


def keep_made_alive(port: int, known: Collection[int]) -> set[int]:
    """Have the kernel do so for the connections to other machines that were not accepted on this port; returns their inodes.

    `known`: those for which it does already. What the library that made them has set for data that was not taken is replaced: a
    TCP_USER_TIMEOUT counts for probes as well, in place of their number, and a shorter one ends a connection after a single lost one.
    """
    found = set()
    for descriptor in _sockets():
        with contextlib.suppress(OSError), _own(descriptor) as connection:
            if connection.family not in _TCP or connection.getsockname()[1] == port:
                continue
            host = connection.getpeername()[0].partition("%")[0].removeprefix("::ffff:")
            if ip_address(host).is_loopback:
                continue
            found.add(_inode(connection))
            for option in () if _inode(connection) in known else (*_KEEPALIVE, _NOT_TAKEN):
                connection.setsockopt(*option)
    return found


def is_open(found: TcpConnection) -> bool:
    """Whether this connection is open still, so that no other one has the same two ends."""
    with contextlib.suppress(OSError), _own(found.descriptor) as connection:
        host, port = connection.getpeername()[:2]
        return _inode(connection) == found.inode and place(host, port) == found.peer
    return False


def check_account(found: TcpConnection) -> None:
    """Raise `PrivilegeError` if its peer is of another account (`peer_account`), `UnavailableError` if it has gone."""
    try:
        with _own(found.descriptor) as connection:
            if _inode(connection) == found.inode:
                peer_account.check(connection)
                return
    except OSError:
        pass
    raise UnavailableError("the connection has ended")


def shut_down(found: TcpConnection) -> None:
    """End the connection: its owner, and the peer, see it closed by the other side."""
    with contextlib.suppress(OSError), _own(found.descriptor) as connection:
        if _inode(connection) == found.inode:
            connection.shutdown(socket.SHUT_RDWR)


def raise_open_files() -> None:
    """Allow this process more open files, if its limit may be raised: connections must not use up those of its data."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files() -> int:
    """The number of files that this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _FILES if soft == resource.RLIM_INFINITY else soft


def _sockets() -> list[int]:
    """The descriptors of this process's sockets."""
    found = []
    with contextlib.suppress(OSError):
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                    found.append(int(path.name))
    return found


def _own(descriptor: int) -> socket.socket:
    """The socket by a descriptor of our own, which its owner cannot close or give to another. Raises `OSError`."""
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def _inode(connection: socket.socket) -> int:
    return os.fstat(connection.fileno()).st_ino
