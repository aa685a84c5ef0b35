"""Whose certificate a service of the change log shows.

gRPC compares a server's certificate with the authority and the host, and shows it to nobody. So a client first makes a connection
of its own, which ends after the handshake, and reads the roles of the certificate there: each machine's certificate is of the
same authority, and that of a machine whose certificate is for other parts names the same hosts.
"""

import socket
import ssl
import time
from typing import Final

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
    """The holder of the certificate that the service at this address shows; `within`: seconds.

    Raises `UntrustedServiceError` for a certificate that is not of this authority, host or time, or has no roles; `UnreachableError`,
    and `SilentError`.
    """
    began = time.monotonic()
    while True:
        try:
            return _ask(address, tls, began + within - time.monotonic())
        except UntrustedServiceError:
            raise
        except UnreachableError:
            if time.monotonic() - began >= min(_REFUSING, within):
                raise
            time.sleep(_PAUSE)


def _ask(address: str, tls: TlsFiles, seconds: float) -> Identity:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    host, context = host.strip("[]"), _context(tls)
    try:
        with (
            socket.create_connection((host, int(port)), timeout=max(seconds, 0.01)) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            return certificate_holder.of_certificate(connection.getpeercert())
    except ssl.SSLCertVerificationError as error:
        raise _untrusted(
            f"the certificate that it shows is not accepted: {error.verify_message.rstrip('.')}",
            address,
        ) from None
    except TimeoutError:
        raise SilentError(
            "service did not answer in time",
            where=address,
            repair=f"check whether it hangs; {_RUNS}",
        ) from None
    except (OSError, ValueError, OverflowError) as error:
        raise UnreachableError(
            f"service does not answer: {_reason(error)}", where=address, repair=_RUNS
        ) from None
    except PrivilegeError as error:
        raise _untrusted(error.what, address) from None


#: The context of each of the files that this process has used last, while they fitted together, and their stamp.
_used: Final[dict[TlsFiles, tuple[object, ssl.SSLContext]]] = {}


def _context(files: TlsFiles) -> ssl.SSLContext:
    """Their context, or the former one while they do not fit together. `tls_context` logs that, which an executor does not."""
    stamp, known = files.stamp(), _used.get(files)
    if known is not None and known[0] == stamp:
        return known[1]
    try:
        _used[files] = (stamp, files.context()[0])
    except ConfigError:
        if known is None:
            raise
    return _used[files][1]


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"no TLS there ({error.reason or error})"
    return getattr(error, "strerror", None) or str(error)


def _untrusted(what: str, address: str) -> UntrustedServiceError:
    host = address.rpartition("://")[2].rpartition(":")[0]
    return UntrustedServiceError(
        what,
        where=address,
        repair=f"issue the service's machine a certificate of this log's authority with `--host {host}`, and with the role"
        " of the service (docs/certificates.md)",
    )


def refuse(why: str, address: str) -> None:
    """Raise `UntrustedServiceError` for this reason, unless it is empty."""
    if why:
        raise _untrusted(why, address)
