"""The files with which a process proves who it is: an authority's certificate, its own certificate, and its key.

A service's address carries the paths, as a connection URI of libpq does: `grpc+tls://db-1:7400?ca=…&certificate=…&key=…`. So
whatever hands an address on (a configuration, a Spark task) hands the paths on, and no key.

The files may be replaced while processes run. Who uses them remembers their `stamp`, and loads them again when it differs;
files that do not fit together, which is what a replacement halfway through looks like, are refused by `load`. It shakes hands
with itself, in memory: what OpenSSL refuses there, every peer would refuse.

Only the standard library: executors of Spark use it.
"""

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlencode

from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime import secret_file

PLAIN: Final = "grpc://"
TLS: Final = "grpc+tls://"
#: No certificate is that long; what is, is another file.
_MOST_BYTES: Final = 1 << 20
_PEM: Final = re.compile(rb"-----BEGIN [^-]*-----[^-]*-----END")
#: X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which `ssl` has no name for.
NO_CHECK_TIME: Final = 0x200000
#: OpenSSL's codes for a certificate that is no server's, or not one of that host name or address.
_NOT_THERE: Final = frozenset({26, 62, 64})
#: Seconds before its end from which on a certificate is warned of; for one of few days, the last third of them.
_SOON: Final = 14 * 86_400.0
#: Messages of a handshake are few.
_MOST_STEPS: Final = 20


@dataclass(frozen=True, slots=True)
class TlsBytes:
    """The content of the three files, as PEM."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    #: The first and the last second of the certificate's days, since the Unix epoch.
    begins: float = 0.0
    ends: float = 0.0
    #: The certificate's alternative names, each with its kind, as `ssl` shows them.
    names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The paths. `tuskline certs issue` names the files `ca.pem`, `cert.pem` and `key.pem`."""

    ca: Path
    certificate: Path
    key: Path

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """It differs once a file has been replaced or written."""
        return tuple(stamp_of(path) for path in (self.ca, self.certificate, self.key))

    def load(self, *, server: bool = False, ended: bool = False) -> TlsBytes:
        """Read the files. `server`: whether the certificate is to be a server's, too; `ended`: its days may be over.

        Raises `ConfigError` for a file that cannot be read, a key that other accounts can read, and for a certificate that is
        not of this key and authority, not of this purpose, or not valid now.
        """
        found = self._read()
        proved = self._prove(server=server, flags=NO_CHECK_TIME if ended else 0)
        # What was proved is what was read.
        if self._read() != found:
            raise self._unfit("they were replaced while they were read")
        return replace(proved, ca=found.ca, certificate=found.certificate, key=found.key)

    def names(self, host: str) -> bool:
        """Whether the certificate is a server's, and a client accepts it of this host. Raises as `load`, whatever its days."""
        self._read()
        if not host:
            # As in `:7400`, which stands for all addresses.
            return False
        try:
            accepting = self._context(ssl.PROTOCOL_TLS_SERVER)
            asking = self._context(ssl.PROTOCOL_TLS_CLIENT)
            accepting.verify_flags |= NO_CHECK_TIME
            asking.verify_flags |= NO_CHECK_TIME
            accepting.verify_mode = ssl.CERT_REQUIRED
            _shake_hands(accepting, asking, host)
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in _NOT_THERE:
                return False
            raise self._unfit(error.verify_message) from None
        except (OSError, ValueError) as error:
            raise self._unfit(getattr(error, "reason", None) or str(error)) from None
        return True

    def context(self, *, server: bool = False) -> tuple[ssl.SSLContext, TlsBytes]:
        """TLS 1.3 between holders of this authority's certificates, and what `load` returned; `server`: for its listener.

        Raises as `load`. A session is never resumed: each connection shows its certificate.
        """
        found = self.load(server=server)
        try:
            context = self._context(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        except (OSError, ValueError) as error:
            # They have been replaced since, and only in part.
            raise self._unfit(getattr(error, "reason", None) or str(error)) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if server:
            context.num_tickets = 0
        if self._read() != replace(found, begins=0.0, ends=0.0, names=()):
            raise self._unfit("they were replaced while they were read")
        return context, found

    def _read(self) -> TlsBytes:
        secret_file.check_key(self.key)
        return TlsBytes(_content(self.ca), _content(self.certificate), _content(self.key))

    def _prove(self, *, server: bool, flags: int = 0) -> TlsBytes:
        """What the certificate says, in place of the files' content."""
        try:
            accepting = self._context(ssl.PROTOCOL_TLS_SERVER)
            accepting.verify_flags |= flags
            accepting.verify_mode = ssl.CERT_REQUIRED
            asking = self._context(ssl.PROTOCOL_TLS_CLIENT)
            asking.check_hostname = False
            asking.verify_mode = ssl.CERT_REQUIRED if server else ssl.CERT_NONE
            return _shake_hands(accepting, asking)
        except ssl.SSLCertVerificationError as error:
            raise self._unfit(error.verify_message) from None
        except (OSError, ValueError) as error:
            # ValueError: `_no_password`. An SSLError is an OSError.
            raise self._unfit(getattr(error, "reason", None) or str(error)) from None

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.load_cert_chain(self.certificate, self.key, password=_no_password)
        context.load_verify_locations(self.ca)
        return context

    def _unfit(self, reason: str) -> ConfigError:
        return ConfigError(
            f"certificate, key and authority do not fit: {reason}",
            where=f"{self.certificate}, {self.key}, {self.ca}",
            repair="issue a certificate with `tuskline certs issue` (--host for a server), and copy its three files",
        )


def drops_authority(former: TlsBytes, new: TlsBytes) -> bool:
    """Whether an authority whose certificates counted before no longer counts."""
    return not set(_PEM.findall(former.ca)) <= set(_PEM.findall(new.ca))


def ends_soon(begins: float, ends: float, now: float) -> bool:
    """Whether a certificate of these days is to be replaced now, or is over."""
    return now >= ends - min(_SOON, (ends - begins) / 3)


def stamp_of(path: Path) -> tuple[int, int, int]:
    """It differs once the file has been replaced or written."""
    try:
        its = path.stat()
    except OSError:
        return 0, 0, 0
    return its.st_mtime_ns, its.st_ino, its.st_size


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}",
            where=str(path),
            repair="name the files of a certificate in [tls]: ca, certificate and key",
        ) from None
    if len(content) > _MOST_BYTES:
        raise ConfigError("is too long for a certificate", where=str(path), repair="name another")
    return content


def _no_password() -> str:
    # Without this OpenSSL would prompt on a terminal.
    raise ValueError("the key has a passphrase")


def _shake_hands(
    accepting: ssl.SSLContext, asking: ssl.SSLContext, host: str | None = None
) -> TlsBytes:
    """Let two ends of a connection in memory complete their handshake; returns what the client's certificate says.

    `host`: which the client expects there, if it checks that. Raises `ssl.SSLError`.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = accepting.wrap_bio(to_server, to_client, server_side=True)
    ends = [asking.wrap_bio(to_client, to_server, server_hostname=host), server]
    for _ in range(_MOST_STEPS):
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)
        if not ends:
            its: Mapping[str, Any] = server.getpeercert() or {}
            return TlsBytes(
                b"",
                b"",
                b"",
                float(ssl.cert_time_to_seconds(str(its["notBefore"]))),
                float(ssl.cert_time_to_seconds(str(its["notAfter"]))),
                tuple((str(kind), str(name)) for kind, name in its.get("subjectAltName", ())),
            )
    raise ssl.SSLError("the handshake does not end")


# -- addresses --------------------------------------------------------------------------------------


def with_files(address: str, files: TlsFiles | None) -> str:
    """The address of a service, `host:port` or with its scheme, with the files of those who are to reach it."""
    place, _ = split(address)
    if files is None:
        return place
    paths = {"ca": files.ca, "certificate": files.certificate, "key": files.key}
    query = urlencode({name: str(path) for name, path in paths.items()}, safe="/")
    return f"{with_scheme(place)}?{query}"


def with_scheme(address: str) -> str:
    """The address of the service as one with TLS: never is a certificate's holder led to a service without."""
    return f"{TLS}{address.partition('://')[2]}"


def each(address: str) -> list[str]:
    """The addresses in one that names several services, `grpc://db-1:7400,db-2:7400`, each with the paths of the files."""
    place, files = split(address)
    scheme, _, hosts = place.partition("://")
    return [with_files(f"{scheme}://{host}", files) for host in hosts.split(",")]


def split(address: str) -> tuple[str, TlsFiles | None]:
    """The address without the paths, and the paths in it, if there are any. Raises `ConfigError`."""
    address = address if "://" in address else f"{PLAIN}{address}"
    place, question, query = address.partition("?")
    if not question:
        return place, None
    try:
        values = parse_qs(query, strict_parsing=True, max_num_fields=3, errors="strict")
        (ca,), (certificate,), (key,) = values["ca"], values["certificate"], values["key"]
    except (ValueError, KeyError):
        raise ConfigError(
            "invalid address",
            where=address[:300],
            repair=f"write it as {TLS}host:port?ca=FILE&certificate=FILE&key=FILE",
        ) from None
    return place, TlsFiles(Path(ca), Path(certificate), Path(key))
