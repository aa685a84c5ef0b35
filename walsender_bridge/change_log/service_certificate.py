"""Whose certificate a service of the change log shows.

gRPC compares a server's certificate with the authority and one name, and shows it to nobody. So a client first makes a connection
of its own, which ends after the handshake, and reads the roles and streams of the certificate there: each machine's certificate is of
the same authority, and that of a machine whose certificate is for other parts names the same hosts. The name that gRPC is then to
compare (`certificate_holder.Identity.service_name`) contains what was read, so another certificate is none of this service.
"""

import contextlib
import queue
import socket
import ssl
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any, Final

from walsender_bridge.errors import (
    ConfigError,
    PrivilegeError,
    SilentError,
    UnreachableError,
    UntrustedServiceError,
)
from walsender_bridge.runtime import certificate_holder
from walsender_bridge.runtime.certificate_holder import Identity
from walsender_bridge.runtime.tls_files import TlsFiles

#: Seconds for which a port may refuse connections: a service that takes its new certificate does for a moment.
_REFUSING: Final = 1.0
_PAUSE: Final = 0.1
_RUNS: Final = "check that it runs there, and that both certificates are valid and of one authority"


def holder(address: str, tls: TlsFiles, *, within: float) -> Identity:
    """The holder of the certificate that the service at this address shows.

    `within`: seconds, for the name's resolution, all its addresses and the handshake. Raises `UntrustedServiceError` for a certificate
    that is not of this authority, host or time, has no roles, or lacks the service's name; `UnreachableError`, and `SilentError`.
    """
    began = time.monotonic()
    while True:
        try:
            return _ask(address, tls, began + within)
        except UntrustedServiceError:
            raise
        except UnreachableError:
            if time.monotonic() - began >= min(_REFUSING, within):
                raise
            time.sleep(_PAUSE)


def host_of(address: str) -> str:
    """The host of a service's address, without brackets."""
    return address.rpartition("://")[2].rpartition(":")[0].strip("[]")


def _ask(address: str, tls: TlsFiles, until: float) -> Identity:
    host, port, context = host_of(address), address.rpartition(":")[2], _context(tls)
    try:
        with (
            _connected(host, int(port), until) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            its: Mapping[str, Any] = connection.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        raise _untrusted(
            f"the certificate that it shows is not accepted: {error.verify_message.rstrip('.')}",
            address,
        ) from None
    except TimeoutError:
        raise silent(address) from None
    except (OSError, ValueError, OverflowError) as error:
        raise UnreachableError(
            f"service does not answer: {_reason(error)}", where=address, repair=_RUNS
        ) from None
    try:
        found = certificate_holder.of_certificate(its)
    except PrivilegeError as error:
        raise _untrusted(error.what, address) from None
    why = certificate_holder.lacks_service_name(found, its["subjectAltName"], [host])
    refuse(why, address)
    return found


def _connected(host: str, port: int, until: float) -> socket.socket:
    """A connection to the first address of the host that accepts one; what is left until then is its timeout."""
    addresses = _resolved(host, port, until)
    error: OSError = TimeoutError()
    for number, (family, kind, protocol, _, place) in enumerate(addresses):
        # One that drops packets is not to take the time of those behind it.
        share = _left(until) / (len(addresses) - number)
        with contextlib.ExitStack() as stack:
            try:
                plain = stack.enter_context(socket.socket(family, kind, protocol))
                plain.settimeout(share)
                plain.connect(place)
                plain.settimeout(_left(until))
            except OSError as failed:
                error = failed
            else:
                stack.pop_all()
                return plain
    raise error


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _resolved(host: str, port: int, until: float) -> list[Any]:
    """The addresses of the host. The C library has no timeout for that: its thread is abandoned."""
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    answers: queue.SimpleQueue[list[Any] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, ValueError, OverflowError) as error:
            answers.put(error)

    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=_left(until))
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return answer


#: The context of each of the files that this process has used last, while they fitted together, and their stamp.
_used: Final[dict[TlsFiles, tuple[object, ssl.SSLContext]]] = {}


def _context(files: TlsFiles) -> ssl.SSLContext:
    """Theirs, or the former one while they do not fit together. `tls_context` logs that, which an executor does not."""
    stamp, known = files.stamp(), _used.get(files)
    if known is not None and known[0] == stamp:
        return known[1]
    try:
        context = files.context()[0]
        # As gRPC: a proxy that tells protocols apart cannot lead the look to another service by that.
        context.set_alpn_protocols(["h2"])
        _used[files] = (stamp, context)
    except ConfigError:
        if known is None:
            raise
    return _used[files][1]


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"no TLS there ({error.reason or error})"
    return getattr(error, "strerror", None) or str(error)


def silent(address: str) -> SilentError:
    """The error for a service that did not answer in time."""
    return SilentError(
        "service did not answer in time", where=address, repair=f"check whether it hangs; {_RUNS}"
    )


def _untrusted(what: str, address: str, streams: Collection[str] = ()) -> UntrustedServiceError:
    host = host_of(address)
    named = any(each != certificate_holder.ALL_STREAMS for each in streams)
    also = ", and with `--stream` for each of its streams, or none for all" if named else ""
    return UntrustedServiceError(
        what,
        where=address,
        repair=f"issue the service's machine a certificate of this log's authority with `--host {host}`, and with the role"
        f" of the service{also} (docs/certificates.md)",
    )


def refuse(why: str, address: str, streams: Collection[str] = ()) -> None:
    """Raise `UntrustedServiceError` for this reason, unless it is empty. `streams`: those that the certificate has to name."""
    if why:
        raise _untrusted(why, address, streams)
