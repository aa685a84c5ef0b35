"""Who holds a certificate: a name, roles, and the streams of the change log that it may name. Pure.

A certificate contains them as a URI, `tuskline:ROLE+ROLE?name=NAME&streams=STREAM,STREAM`, where `streams=*` stands for all
streams. What a role may do is each service's own table: `change_log.authorization`, `quorum.safekeeper.authorization`.

A client of the change log has gRPC compare one DNS name with the certificate of each connection: the `service_name` of the holder that
the client has accepted, at this host. So a server's certificate contains that name for each of its hosts (docs/decisions/tls.md).
"""

import hashlib
import re
from base64 import b32encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import parse_qs, quote

from walsender_bridge.errors import PrivilegeError, TusklineError, UsageError
from walsender_bridge.runtime.stream_name import check_stream

_SCHEME: Final = "tuskline:"
#: In place of names: all streams.
ALL_STREAMS: Final = "*"
#: What the second label of a service's name says of the rest: a host's name, or an address with dashes.
_OF_NAME, _OF_ADDRESS = "tuskline", "tuskline-ip"
_SERVICE_NAME: Final = re.compile(rf"[a-z2-7]{{52}}\.({_OF_NAME}|{_OF_ADDRESS})\..+")
_LABEL: Final = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
#: A service's name, which contains the host behind 62 characters, has at most 253.
_HOST: Final = re.compile(rf"(?=.{{1,191}}$){_LABEL}(\.{_LABEL})*")


class Role(StrEnum):
    """A role of a certificate's holder."""

    WRITER = "writer"
    REPOSITORY = "repository"
    READER = "reader"
    LAKE = "lake"
    MONITOR = "monitor"
    OPERATOR = "operator"
    LOG_SERVER = "log-server"
    PROPOSER = "proposer"
    SAFEKEEPER = "safekeeper"


#: The roles whose holders are servers; their certificates name hosts, and no others do.
SERVERS: Final = frozenset({Role.REPOSITORY, Role.LOG_SERVER, Role.SAFEKEEPER})
#: Those of them whose services clients recognize by their names.
OF_THE_LOG: Final = frozenset({Role.REPOSITORY, Role.LOG_SERVER})


@dataclass(frozen=True, slots=True)
class Identity:
    """The holder of a certificate. `streams`: those it may name; `ALL_STREAMS` alone: every stream."""

    name: str
    roles: frozenset[Role]
    streams: frozenset[str]

    def __str__(self) -> str:
        return f"{self.name[:64]!r} ({', '.join(sorted(self.roles))})"

    def uri(self) -> str:
        """The identity as the certificate contains it."""
        roles, streams = "+".join(sorted(self.roles)), ",".join(sorted(self.streams))
        return f"{_SCHEME}{roles}?name={quote(self.name)}&streams={streams}"

    def service_name(self, host: str) -> str:
        """The DNS name of a service of exactly this holder at this host, a name or an address.

        It says all that the URI says, as a digest since a name is short, and the host, since it is compared instead of the host.
        """
        host = host.strip("[]").rstrip(".").lower()
        try:
            address = ip_address(host).exploded.replace(".", "-").replace(":", "-")
        except ValueError:
            return f"{self.digest()}.{_OF_NAME}.{host}"
        return f"{self.digest()}.{_OF_ADDRESS}.{address}"

    def digest(self) -> str:
        """The first label of its services' names."""
        return b32encode(hashlib.sha256(self.uri().encode()).digest()).decode().rstrip("=").lower()

    def has(self, stream: str) -> bool:
        """Whether it may name this stream."""
        return stream in self.streams or ALL_STREAMS in self.streams


def identity(
    name: str, roles: Iterable[str], streams: Collection[str] = (ALL_STREAMS,)
) -> Identity:
    """The identity of these roles and streams. Raises `PrivilegeError` for an unknown role, `ConfigError` for no stream name."""
    found = set()
    for role in roles:
        try:
            found.add(Role(role))
        except ValueError:
            raise PrivilegeError(
                f"unknown role {role[:40]!r}",
                repair="use one or several of: " + ", ".join(Role),
            ) from None
    names = [each if each == ALL_STREAMS else check_stream(each) for each in streams]
    return Identity(name, frozenset(found), frozenset(names))


def of_certificate(certificate: Mapping[str, Any] | None) -> Identity:
    """The holder of a verified certificate, as `ssl` shows it. Raises `PrivilegeError`."""
    kind, name = next(iter((certificate or {}).get("subjectAltName", ())), ("", ""))
    return parse(str(name).encode(errors="replace") if kind == "URI" else b"")


def check_host(host: str) -> None:
    """Raise `UsageError` unless a certificate can name this host, a name or an address, and a service there."""
    try:
        # A zone is of one machine, and in no certificate.
        usable = "%" not in host and not ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        usable = _HOST.fullmatch(host) is not None and not is_service_name(host)
    if not usable:
        raise UsageError(
            f"invalid host {host[:80]!r}",
            repair="use the host of the service's `listen`, without its port: an address of this machine alone, without a zone,"
            " or a name of at most 191 characters, 63 between two dots",
        )


def is_service_name(name: str) -> bool:
    """Whether a DNS name is of a service, and not of a host."""
    return _SERVICE_NAME.fullmatch(name.lower()) is not None


def service_names(uri: str, hosts: Iterable[str]) -> list[str]:
    """The names of a service of the holder with this URI at these hosts; none if the URI is not one of Tuskline."""
    try:
        its = parse(uri.encode(errors="replace"))
    except PrivilegeError:
        return []
    return [its.service_name(host) for host in hosts]


def lacks_service_name(
    holder: Identity, names: Iterable[tuple[str, str]], hosts: Sequence[str]
) -> str:
    """Why clients of the change log use no service with this holder's certificate at one of the hosts; empty: they do.

    Without hosts: why they use none at any host. `names`: its alternative names, as `ssl` shows them.
    """
    found = {name.lower() for kind, name in names if kind == "DNS"}
    missing = [name for name in map(holder.service_name, hosts) if name not in found]
    its = (name for name in found if name.startswith(f"{holder.digest()}."))
    if not hosts and not any(map(is_service_name, its)):
        missing = [f"{holder.digest()}.{_OF_NAME}.HOST"]
    return f"the certificate of {holder} lacks the DNS name {missing[0]}" if missing else ""


def lacks(
    names: Sequence[tuple[str, str]],
    *needed: Collection[Role],
    host: bool,
    at: Sequence[str] = (),
) -> str:
    """What a machine's certificate lacks for its parts; empty: nothing. `names`: its alternative names (`tls_files.TlsBytes`).

    `needed`: of each part, the roles one of which it needs. `host`: whether one of them is a server. `at`: those of the hosts where its
    services of the change log listen that the certificate names. They may be reached under other names as well, which it has to
    name then.
    """
    try:
        its = of_certificate({"subjectAltName": names})
    except PrivilegeError as error:
        return error.what
    if missing := [roles for roles in needed if its.roles.isdisjoint(roles)]:
        listed = ", ".join(sorted({" or ".join(roles) for roles in missing}))
        return (
            f"the certificate of {its} lacks the role {listed}, which a part of this machine needs"
        )
    if host and all(kind == "URI" or is_service_name(name) for kind, name in names):
        return f"the certificate of {its} names no host, so nobody can verify the services of this machine"
    if any(not OF_THE_LOG.isdisjoint(roles) for roles in needed):
        return lacks_service_name(its, names, at)
    return ""


def parse(name: bytes) -> Identity:
    """The identity in the name that a server is shown of its client's certificate. Raises `PrivilegeError`."""
    try:
        text = name.decode("ascii")
        if not text.startswith(_SCHEME):
            raise ValueError
        roles, _, query = text.removeprefix(_SCHEME).partition("?")
        values = parse_qs(query, strict_parsing=True, max_num_fields=2, errors="strict")
        (holder,), (streams,) = values["name"], values["streams"]
        return identity(holder, roles.split("+"), streams.split(","))
    except (ValueError, KeyError, TusklineError):
        raise PrivilegeError(
            f"the certificate's first alternative name {name[:80]!r} names no roles of Tuskline",
            repair="issue the certificate with `tuskline certs issue`",
        ) from None
