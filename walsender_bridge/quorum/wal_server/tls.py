"""TLS of the WAL server: its certificate and key, and the CA of required client certificates.

TLS 1.2 is the oldest version accepted. With `client_ca` a client must present a valid certificate of that CA, in
addition to its password.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from walsender_bridge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's certificate (followed by its chain), the key, and the clients' CA."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


def tls_context(files: TlsFiles) -> tuple[ssl.SSLContext, str]:
    """The server's TLS context, and its certificate's text for channel binding. Raises `ConfigError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    path = files.certificate
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
        certificate = files.certificate.read_text(encoding="ascii", errors="replace")
        if files.client_ca is not None:
            path = files.client_ca
            context.load_verify_locations(files.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"could not load the certificate or its key: {getattr(error, 'reason', None) or error}",
            where=str(path),
            repair="specify PEM files: the certificate, and its key without a passphrase",
        ) from None
    return context, certificate


def _no_password() -> str:
    # Without this OpenSSL would prompt on a terminal.
    raise ValueError("the key has a passphrase")
