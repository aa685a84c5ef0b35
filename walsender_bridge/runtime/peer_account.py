"""The account at the other end of a TCP connection within this machine.

A service without TLS listens on loopback, where every account of the machine can connect to it. It answers its own account and
root (`is_trusted`). The kernel knows which account made the socket at the other end; the peer says nothing about it.

A socket that its process has closed belongs to nobody: for a while the kernel still shows it, as if it were root's, and then
its port is free for another account. So it counts only with its inode, and while the connection, whose addresses it is found
by, is open at this end: until then nobody else can have these addresses.

A service that does not run leaves its port to whoever takes it. So clients look first whose socket listens there
(`foreign_listener`); those of root trust every account, as an administrator's commands are answered by a service's own.

The kernel is asked for this one socket (sock_diag(7), as `ss` does), which takes the same time however many there are. Where it
has no such service, /proc/net/tcp is searched.
"""

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walsender_bridge.errors import PrivilegeError, UnavailableError
from walsender_bridge.runtime.listening import is_loopback

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLMSG_ERROR: Final = 2
_NLM_F_REQUEST: Final = 1
#: The state of a socket that listens, in /proc/net/tcp.
_LISTEN: Final = "0A"
_EVERY_STATE: Final = 0xFFFF_FFFF
#: `struct nlmsghdr`; `struct inet_diag_req_v2` up to its socket id; the id's ports and addresses, and its interface and cookie.
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBxI")
_ENDS: Final = struct.Struct("!HH16s16s")
_ANY_COOKIE: Final = struct.pack("=III", 0, 0xFFFF_FFFF, 0xFFFF_FFFF)
#: In `struct inet_diag_msg`: where the socket id begins, and its length; `idiag_uid` and `idiag_inode`.
_ID_AT: Final = 4
_OWNER: Final = struct.Struct("=II")
_OWNER_AT: Final = 64
#: Seconds for the kernel's answer.
_SECONDS: Final = 1.0

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a connection."""

    host: _Address
    port: int


def is_trusted(account: int) -> bool:
    """Whether a service without TLS answers this account: its own, and root."""
    return account in {0, os.geteuid()}


def check(connection: socket.socket) -> None:
    """Raise `PrivilegeError` unless the account at the other end is trusted; `UnavailableError` if it has gone."""
    account = of_peer(connection)
    if account is None:
        raise UnavailableError("the client's end of the connection has gone")
    if not is_trusted(account):
        raise PrivilegeError(
            f"without [tls] this service answers its own account ({os.geteuid()}) and root, not account {account}",
            repair="run the client as that account, or add [tls] and give the client a certificate (docs/certificates.md)",
        )


def of_peer(connection: socket.socket) -> int | None:
    """The account of the peer's socket; None: it is closed, or not of this machine."""
    try:
        own, peer = _end(connection.getsockname()), _end(connection.getpeername())
        account = _ask_kernel(peer, own)
        # If the connection is open now, it was meanwhile.
        connection.getpeername()
    except OSError:
        return None
    return account


def foreign_listener(host: str, port: int) -> str:
    """Why a client is not to talk to what listens on a loopback address; empty: it may, or nothing listens there."""
    if os.geteuid() == 0 or not is_loopback(host):
        return ""
    for account, local in _listening(port):
        if not is_trusted(account) and (local.is_loopback or local.is_unspecified):
            return f"account {account} listens on port {port}, not this account ({os.geteuid()}), and there is no [tls]"
    return ""


def check_listener(address: str) -> None:
    """Raise `PrivilegeError` if a client is not to talk to what listens on `host:port`, with or without a scheme."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdigit() and (why := foreign_listener(host.strip("[]"), int(port))):
        raise PrivilegeError(
            why,
            where=address,
            repair="stop that program, which received nothing; or add [tls] on both sides (docs/certificates.md)",
        )


def _listening(port: int) -> Iterator[tuple[int, _Address]]:
    """The accounts and addresses of the sockets that listen on this port."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            local, _, number = fields[1].partition(":")
            if fields[3] == _LISTEN and int(number, 16) == port:
                words = [int(local[at : at + 8], 16) for at in range(0, len(local), 8)]
                packed = struct.pack(f"={len(words)}I", *words)
                yield int(fields[7]), _host(ipaddress.ip_address(packed))


def _host(found: _Address) -> _Address:
    """An IPv4 address in IPv6's form as IPv4."""
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def _end(name: tuple[str, int] | tuple[str, int, int, int]) -> _End:
    return _End(_host(ipaddress.ip_address(name[0].partition("%")[0])), name[1])


def _ask_kernel(local: _End, remote: _End) -> int | None:
    """The account of the socket with these two ends. Raises `OSError`."""
    try:
        return _by_netlink(local, remote)
    except OSError as error:
        if error.errno == errno.ENOENT and _has_netlink(remote, local):
            return None
    return in_tables(local, remote)


def _has_netlink(own: _End, peer: _End) -> bool:
    """Whether the kernel knows this process's own end, which exists: then it also knows which others do not."""
    try:
        _by_netlink(own, peer)
    except OSError:
        return False
    return True


def _by_netlink(local: _End, remote: _End) -> int | None:
    """As `_ask_kernel`. Raises `OSError` with ENOENT if there is no such socket, or no service that knows TCP."""
    family = socket.AF_INET if local.host.version == 4 else socket.AF_INET6
    ends = _ends(local, remote)
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _EVERY_STATE) + ends + _ANY_COOKIE
    head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_SECONDS)
        kernel.send(head + body)
        answer = kernel.recv(4096)
    _, kind, *_ = _HEADER.unpack_from(answer)
    found = answer[_HEADER.size :]
    if kind == _NLMSG_ERROR:
        number = -struct.unpack_from("=i", found)[0]
        raise OSError(number, os.strerror(number))
    if found[_ID_AT : _ID_AT + _ENDS.size] not in {ends, _ends(local, remote, mapped=True)}:
        # In place of a connection that is not there, a socket that listens on its port.
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    account, inode = _OWNER.unpack_from(found, _OWNER_AT)
    return account if inode else None


def _ends(local: _End, remote: _End, *, mapped: bool = False) -> bytes:
    """Both ends as sock_diag has them; `mapped`: those of an IPv4 connection as a socket for both families shows them."""
    hosts = [end.host.packed for end in (local, remote)]
    if mapped:
        hosts = [host.rjust(6, b"\xff").rjust(16, b"\0") for host in hosts]
    return _ENDS.pack(local.port, remote.port, *(host.ljust(16, b"\0") for host in hosts))


def in_tables(local: _End, remote: _End) -> int | None:
    """As `_ask_kernel`, from /proc/net/tcp and tcp6. Raises `OSError`."""
    # An IPv4 socket is in the first; one for both families is in the second, even if its connection is IPv4's.
    tables = {"tcp": "", "tcp6": "::ffff:"} if local.host.version == 4 else {"tcp6": ""}
    for table, prefix in tables.items():
        wanted = [_in_table(prefix, local), _in_table(prefix, remote)]
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1:3] == wanted:
                return int(fields[7]) if int(fields[9]) else None
    return None


def _in_table(prefix: str, end: _End) -> str:
    packed = ipaddress.ip_address(f"{prefix}{end.host}").packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{end.port:04X}"
