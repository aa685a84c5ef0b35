"""Checks whether a service can listen on an address before gRPC is started, which prints its own messages on failure.

Also checks whether a service is listening on an address, before gRPC is imported.
"""

import errno
import socket
import time
from enum import Enum, auto
from ipaddress import ip_address

from walsender_bridge.errors import ConfigError


def check(address: str, *, seconds: float = 0.0, bind_only: bool = False) -> None:
    """Listen on `host:port` for a moment (port 0: any). Raises `ConfigError` if that fails for `seconds`.

    `bind_only`: do not listen, so that no client connects to what is no service.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            _listen(address, bind_only=bind_only)
        except ConfigError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
        else:
            return


def check_strangers(address: str, *, tls: bool, resolve: bool = True) -> None:
    """Raise `ConfigError` for an address that other machines reach, unless its service has TLS.

    `resolve`: look names up; otherwise only numeric addresses are refused.
    """
    if tls or not reaches_strangers(address, resolve=resolve):
        return
    raise ConfigError(
        "other machines could reach this address, and there is no [tls]",
        where=address,
        repair="listen on 127.0.0.1, or add [tls] with ca, certificate and key (`tuskline certs`)",
    )


def reaches_strangers(address: str, *, resolve: bool = True) -> bool:
    """Whether other machines can connect to an address; `resolve` as above. Raises `ConfigError` for an unknown host."""
    host = address.rpartition(":")[0].strip("[]")
    flags = socket.AI_PASSIVE | (0 if resolve else socket.AI_NUMERICHOST)
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, ValueError) as error:
        if resolve:
            raise refused(address, error) from None
        return False
    return not all(ip_address(str(place[0]).partition("%")[0]).is_loopback for *_, place in found)


def is_loopback(host: str) -> bool:
    """Whether a numeric host, or `localhost`, is this machine's own. Other names are not looked up."""
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether a numeric host stands for all addresses of this machine, or none is given."""
    try:
        return not host or ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return False


def is_own(host: str) -> bool:
    """Whether all addresses of a host are this machine's own. A host that is not known is not."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, place in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
    except (OSError, ValueError):
        return False
    return True


class Reach(Enum):
    """What a connection to an address met."""

    #: Its machine runs, and no service listens there, or a firewall rejects connections.
    REFUSED = auto()
    #: A program listens there, or the kernel does for one that hangs.
    ACCEPTED = auto()
    #: Neither, in time: the machine is off, or the network is down. What runs there is not known.
    SILENT = auto()


def reach(address: str, *, seconds: float) -> Reach:
    """Try to connect to `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        place = host.strip("[]"), int(port)
        with socket.create_connection(place, timeout=seconds, all_errors=True):
            return Reach.ACCEPTED
    except* ConnectionRefusedError:
        found = Reach.REFUSED
    except* (OSError, ValueError, OverflowError):
        # Of a name with several addresses, each has to refuse.
        found = Reach.SILENT
    return found


def is_refused(address: str, *, seconds: float) -> bool:
    """Whether connections to `host:port` are refused, so no service is listening. The client reports other failures."""
    return reach(address, seconds=seconds) is Reach.REFUSED


def _listen(address: str, *, bind_only: bool) -> None:
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError, OverflowError) as error:
        raise refused(address, error) from None
    failed = []
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place)
                if not bind_only:
                    probe.listen()
            except OSError as error:
                failed.append(error)
            else:
                # One of a name's addresses is sufficient for a service.
                return
    raise refused(address, failed[0])


def refused(address: str, error: Exception) -> ConfigError:
    """The error for an address on which a service cannot listen."""
    if isinstance(error, ConfigError):
        return error
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ConfigError(f"cannot listen: {reason[:300]}", where=address, repair=_repair(error))


def _repair(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, socket.gaierror):
        return "correct the host of `listen`, or its entry in DNS or /etc/hosts"
    if number == errno.EADDRNOTAVAIL:
        return "correct the host of `listen`: this machine has no such address (`ip address` lists those that it has)"
    if number in {errno.EACCES, errno.EPERM}:
        return "choose a port above 1023 for `listen`, or let this account use lower ones"
    return "stop the program that listens there, or choose another `listen`"
