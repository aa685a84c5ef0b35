"""TLS of the WAL server: its certificate and key, and the CA of required client certificates.

TLS 1.2 is the oldest version accepted. With `client_ca` a client must present a valid certificate of that CA, in
addition to its password. Replaced files count from the next connection on; those that do not fit together change nothing.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime import secret_file
from walsender_bridge.runtime.tls_context import Reloaded
from walsender_bridge.runtime.tls_files import stamp_of


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's certificate (followed by its chain), the key, and the clients' CA."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """It differs once a file has been replaced or written."""
        files = (self.certificate, self.key, self.client_ca)
        return tuple(stamp_of(path) for path in files if path is not None)


@dataclass(frozen=True, slots=True)
class ReaderTls:
    """For one connection: the context, and the certificate's text for channel binding."""

    context: ssl.SSLContext
    certificate: str


class WalServerTls(Reloaded[ReaderTls]):
    """The server's TLS. Raises `ConfigError` for files that are unfit at the start."""

    def __init__(self, files: TlsFiles) -> None:
        super().__init__(files, lambda: _load(files))


def _load(files: TlsFiles) -> ReaderTls:
    secret_file.check_key(files.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    path = files.certificate
    before = files.stamp()
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
        certificate = files.certificate.read_text(encoding="ascii", errors="replace")
        if files.client_ca is not None:
            path = files.client_ca
            context.load_verify_locations(files.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        raise _unfit(path, getattr(error, "reason", None) or str(error)) from None
    if files.stamp() != before:
        # The text may be another certificate's.
        raise _unfit(path, "it was replaced while it was read")
    return ReaderTls(context, certificate)


def _unfit(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"could not load the certificate or its key: {reason}",
        where=str(path),
        repair="specify PEM files: the certificate, and its key without a passphrase",
    )


def _no_password() -> str:
    # Without this OpenSSL would prompt on a terminal.
    raise ValueError("the key has a passphrase")
