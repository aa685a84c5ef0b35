"""What the holder of a certificate may ask of the change log's services. Pure.

A certificate names its holder's roles and streams in a URI, `tuskline:ROLE+ROLE?name=NAME&streams=STREAM,STREAM`, where
`streams=*` stands for all streams. The services ask `check` before each action, read, append and synchronization. An action
that no role of the holder has, or on a stream that is not the holder's, is refused; so is a name that is no such URI. An
action that is missing in the table is nobody's.

| role | its holder |
|---|---|
| `writer` | captures a source into its stream |
| `repository` | orders the log: commits, seals and trims, and has replicas synchronized |
| `reader` | reads entries, and holds leases |
| `lake` | publishes epochs: reads, and ends leases and skips versions |
| `monitor` | asks for the status |
| `operator` | repairs: as writer and lake; trims |
| `log-server` | serves replicas, and sends them to other log servers that lack them |
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import parse_qs, quote

from walsender_bridge.change_log.protocol import check_stream
from walsender_bridge.errors import PrivilegeError, TusklineError

_SCHEME: Final = "tuskline:"
#: In place of names: all streams.
ALL_STREAMS: Final = "*"
#: The calls that are no actions: a DoGet, and a DoPut by the first part of its path.
READ: Final = "read"
APPEND: Final = "append"
SYNC: Final = "sync"


class Role(StrEnum):
    """A role of a certificate's holder."""

    WRITER = "writer"
    REPOSITORY = "repository"
    READER = "reader"
    LAKE = "lake"
    MONITOR = "monitor"
    OPERATOR = "operator"
    LOG_SERVER = "log-server"


#: The roles whose holders are servers; their certificates name hosts, and no others do.
SERVERS: Final = frozenset({Role.REPOSITORY, Role.LOG_SERVER})

_MONITOR = frozenset({"status", "stream_status", "describe", "replicas"})
_READER = _MONITOR | {
    READ,
    "schema",
    "relations",
    "plan",
    "version_at",
    "cut_before",
    "commits",
    "barrier",
    "register_consumer",
}
_LAKE = _READER | {"drop_consumer", "raise_version"}
_WRITER = _MONITOR | {
    APPEND,
    "cut_tail",
    "transactions",
    "create_stream",
    "writer_term",
    "barrier",
}
#: The actions of each role.
ALLOWED: Final[dict[Role, frozenset[str]]] = {
    Role.WRITER: _WRITER,
    Role.REPOSITORY: frozenset({"report", "commit", "create", "seal", "trim", "synchronize"}),
    Role.READER: _READER,
    Role.LAKE: _LAKE,
    Role.MONITOR: _MONITOR,
    Role.OPERATOR: _WRITER | _LAKE | {"trim_stream"},
    Role.LOG_SERVER: frozenset({SYNC}),
}


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

    def has(self, stream: str) -> bool:
        """Whether it may name this stream."""
        return stream in self.streams or ALL_STREAMS in self.streams

    def has_all_leases(self) -> bool:
        """Whether it may hold and end the leases of all consumers."""
        return any("drop_consumer" in ALLOWED[role] for role in self.roles)


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


def check_role(holder: Identity, action: str) -> None:
    """Raise `PrivilegeError` unless a role of the holder has this action, on whatever streams."""
    if not any(action in ALLOWED[role] for role in holder.roles):
        able = [role for role in Role if action in ALLOWED[role]]
        raise PrivilegeError(
            f"the certificate of {holder} does not allow {action!r:.60}",
            repair=f"use a certificate with the role {' or '.join(able)}" if able else "",
        )


def check_consumer(holder: Identity, consumer: str) -> None:
    """Raise `PrivilegeError` unless the holder may hold this lease: a reader one of its own name alone.

    Who moves another's lease ahead has the log trimmed that the other still needs. The roles that may end leases have no limit.
    """
    if holder.has_all_leases():
        return
    if consumer != holder.name and not consumer.startswith(f"{holder.name}-"):
        raise PrivilegeError(
            f"the certificate of {holder} does not allow the lease {consumer!r:.60}",
            repair=f"name the consumer {holder.name}, or {holder.name}-...",
        )


def check(holder: Identity, action: str, streams: Iterable[str]) -> None:
    """Raise `PrivilegeError` unless the holder may perform this action on all these streams.

    `ALL_STREAMS` among them: the action concerns every stream. None: it concerns no stream.
    """
    check_role(holder, action)
    foreign = sorted(stream for stream in streams if not holder.has(stream))
    if foreign == [ALL_STREAMS]:
        raise PrivilegeError(
            f"the certificate of {holder} does not allow {action!r}, which concerns all streams",
            repair="issue a certificate for all streams: `tuskline certs issue` without --stream",
        )
    if foreign:
        raise PrivilegeError(
            f"the certificate of {holder} does not allow {action!r} on stream {foreign[0]!r:.60}",
            repair="issue a certificate that names the stream: `tuskline certs issue --stream`",
        )
