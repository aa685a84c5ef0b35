"""TLS of the WAL server: its certificate and key, and the authority whose client certificates it asks for.

TLS 1.2 is the oldest that is spoken. With `client_ca` a client has to show a certificate of that authority that is
valid now, and its password besides.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from walsender_bridge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's certificate (its chain behind it), the key, and the clients' authority."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


def tls_context(files: TlsFiles) -> tuple[ssl.SSLContext, str]:
    """The server's side of TLS, and its certificate's text for channel binding. Raises `ConfigError`."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    path = files.certificate
    try:
        made.load_cert_chain(files.certificate, files.key, password=_no_password)
        certificate = files.certificate.read_text(encoding="ascii", errors="replace")
        if files.client_ca is not None:
            path = files.client_ca
            made.load_verify_locations(files.client_ca)
            made.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the certificate or its key cannot be used: {getattr(error, 'reason', None) or error}",
            where=str(path),
            repair="give PEM files: the certificate, and its key without a passphrase",
        ) from None
    return made, certificate


def _no_password() -> str:
    # Without this OpenSSL would ask at a terminal.
    raise ValueError("the key has a passphrase")
