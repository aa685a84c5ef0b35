"""Issues the certificates with which the machines of one log recognize each other: an authority in a folder.

The folder contains the authority's certificate `ca.pem` and its key `ca.key`; each issued folder contains what one machine
needs: that certificate, its own, and its key. All keys are EC P-256, without a passphrase, in files of mode 0600 in a folder of
mode 0700. A folder appears complete or not at all, and is never overwritten.

What the holder may do is a URI (`change_log.authorization`), which is the first alternative name: a Flight server is shown
that name and no other (docs/decisions/tls.md). Only a certificate with hosts may be a server's; for each of them it contains the DNS
name by which clients recognize a service of this holder there (`certificate_holder.Identity.service_name`). An issued certificate
cannot issue others.
"""

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from walsender_bridge.errors import ConfigError, UnavailableError, UsageError
from walsender_bridge.runtime import certificate_holder, disk_full
from walsender_bridge.runtime.durable import replace_file, sync_folder
from walsender_bridge.runtime.private_folder import is_ours

CA_CERTIFICATE: Final = "ca.pem"
CA_KEY: Final = "ca.key"
CERTIFICATE: Final = "cert.pem"
KEY: Final = "key.pem"
#: Days that an authority is valid, and a certificate unless asked otherwise.
CA_DAYS: Final = 3650
DAYS: Final = 365
#: Clocks of machines differ: a new certificate is valid on one whose clock is this far behind.
_SKEW: Final = timedelta(minutes=10)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate's files: the folder, and until when it is valid."""

    folder: Path
    valid_until: datetime
    serial_number: str


def init_authority(folder: Path, *, days: int = CA_DAYS) -> Issued:
    """Create an authority in a new or empty folder. Raises `ConfigError` if there is something, and errors of `disk_full`."""
    key = ec.generate_private_key(ec.SECP256R1())
    # The name is unique, so that a certificate of a former authority is refused for what it is.
    name = _name(f"tuskline authority {x509.random_serial_number() >> 96:016x}")
    certificate = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _create_folder(folder, {CA_CERTIFICATE: _pem(certificate), CA_KEY: _key_pem(key)})
    return _issued(folder, certificate)


def issue(
    authority: Path,
    out: Path,
    *,
    name: str,
    uri: str,
    hosts: Sequence[str] = (),
    days: int = DAYS,
) -> Issued:
    """Issue a certificate into the new or empty folder `out`.

    `name`: of its holder, for logs. `uri`: what the holder may do. `hosts`: the names and addresses under which clients
    reach it, if it is a server. Raises `UsageError` for an invalid name or host, `ConfigError` for an authority that cannot
    be used, or an `out` that is not empty, and errors of `disk_full`.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"invalid name {name[:80]!r}",
            repair="use up to 63 lower-case letters, digits, '.', '_' and '-'",
        )
    alternatives = [
        x509.UniformResourceIdentifier(uri),
        *map(_host, hosts),
        *map(x509.DNSName, certificate_holder.service_names(uri, hosts)),
    ]
    ca_key, ca = _load(authority)
    if datetime.now(UTC) + timedelta(days=days) > ca.not_valid_after_utc:
        raise ConfigError(
            f"a certificate of {days} days outlives its authority, which expires on {ca.not_valid_after_utc:%Y-%m-%d}",
            where=str(authority),
            repair="choose fewer --days, or create another authority and issue all certificates again",
        )
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH] + [ExtendedKeyUsageOID.SERVER_AUTH] * bool(hosts)
    certificate = (
        _builder(_name(name), ca.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    files = {CA_CERTIFICATE: _pem(ca), CERTIFICATE: _pem(certificate), KEY: _key_pem(key)}
    _create_folder(out, files)
    return _issued(out, certificate)


# -- certificates -----------------------------------------------------------------------------------


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    """The alternative name of a server: an address, or a DNS name. Raises `UsageError`."""
    certificate_holder.check_host(host)
    try:
        return x509.IPAddress(ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _issued(folder: Path, certificate: x509.Certificate) -> Issued:
    return Issued(folder, certificate.not_valid_after_utc, f"{certificate.serial_number:x}")


# -- files ------------------------------------------------------------------------------------------


def _load(authority: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """The authority's key and certificate. Raises `ConfigError`."""
    key_file = authority / CA_KEY
    try:
        certificate = x509.load_pem_x509_certificate((authority / CA_CERTIFICATE).read_bytes())
        with key_file.open("rb") as file:
            its = os.fstat(file.fileno())
            key: Any = serialization.load_pem_private_key(file.read(), password=None)
        its_own = (
            isinstance(key, ec.EllipticCurvePrivateKey)
            and key.public_key() == certificate.public_key()
        )
    except OSError as error:
        raise ConfigError(
            f"the folder is no authority: {error.strerror}",
            where=str(error.filename or authority),
            repair="create one with `tuskline certs init`",
        ) from None
    except UnsupportedAlgorithm:
        raise ConfigError(
            f"{CA_CERTIFICATE} or {CA_KEY} is of an algorithm that is not supported",
            where=str(authority),
            repair="create an authority with `tuskline certs init`",
        ) from None
    except (ValueError, TypeError):
        # The parser's text could contain bytes of the key.
        raise ConfigError(
            f"{CA_CERTIFICATE} or {CA_KEY} is not readable as PEM without a passphrase",
            where=str(authority),
            repair="restore the folder from a backup",
        ) from None
    if not is_ours(its, stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"the authority's key is accessible to other accounts (mode {stat.S_IMODE(its.st_mode):04o})",
            where=str(key_file),
            repair="create another authority, as its key may be known; or run chmod 600 if it cannot be",
        )
    if not its_own:
        raise ConfigError(
            f"{CA_KEY} is not the key of {CA_CERTIFICATE}",
            where=str(authority),
            repair="restore the folder from a backup",
        )
    return key, certificate


def _create_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Create the folder with these files, all durable, or nothing. Raises `ConfigError` if it exists and is not empty."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise disk_full.of(error, folder) from None
    try:
        for name, content in files.items():
            replace_file(draft / name, content, mode=0o600)
        _give_name(draft, folder)
    except OSError as error:
        raise disk_full.of(error, folder) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    try:
        sync_folder(folder.parent)
    except OSError as error:
        raise UnavailableError(
            f"the folder was created, but may not outlast a power failure: {error.strerror or error}",
            where=str(folder),
            repair="see whether the disk works; remove the folder, and run the command again",
        ) from None


def _give_name(draft: Path, folder: Path) -> None:
    """Rename the draft, which replaces an empty folder only. Raises `ConfigError` if there is something, and `OSError`."""
    try:
        draft.rename(folder)
    except (FileExistsError, NotADirectoryError):
        raise _taken(folder) from None
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise _taken(folder) from None
        raise


def _taken(folder: Path) -> ConfigError:
    return ConfigError(
        "it exists and is not an empty folder",
        where=str(folder),
        repair="name a new folder; keys are never overwritten",
    )
