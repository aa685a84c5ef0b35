"""What the holder of a certificate may ask of the change log's services, and who may serve as one. Pure.

A certificate names its holder's roles and streams (`runtime.certificate_holder`). The services ask `check` before each
action, read, append and synchronization. An action that no role of the holder has, or on a stream that is not the holder's,
is refused; so is a name that is no such URI. An action that is missing in the table is nobody's. Clients ask
`not_its_service` before they use a server.

| role | its holder |
|---|---|
| `writer` | captures a source into its stream |
| `repository` | orders the log: commits, seals and trims, and has replicas synchronized; rebuilds its records from them |
| `reader` | reads entries, and holds leases |
| `lake` | publishes epochs: reads, and ends leases and skips versions |
| `monitor` | asks for the status |
| `operator` | repairs: as writer and lake; trims |
| `log-server` | serves replicas, and sends them to other log servers where the repository has ordered it |
| `proposer`, `safekeeper` | have no part in the log (`quorum.safekeeper.authorization`) |
"""

from collections.abc import Iterable
from typing import Final

from walsender_bridge.errors import PrivilegeError
from walsender_bridge.runtime.certificate_holder import ALL_STREAMS, Identity, Role

#: The calls that are no actions: a DoGet, and a DoPut by the first part of its path.
READ: Final = "read"
APPEND: Final = "append"
SYNC: Final = "sync"


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
    Role.REPOSITORY: frozenset(
        {
            "report",
            "commit",
            "create",
            "learn",
            "seal",
            "joined",
            "trim",
            "trim_point",
            "synchronize",
            "replicas",
            "commits",
        }
    ),
    Role.READER: _READER,
    Role.LAKE: _LAKE,
    Role.MONITOR: _MONITOR,
    Role.OPERATOR: _WRITER | _LAKE | {"trim_stream"},
    Role.LOG_SERVER: frozenset({SYNC}),
    Role.PROPOSER: frozenset(),
    Role.SAFEKEEPER: frozenset(),
}


def not_its_service(holder: Identity, role: Role, streams: Iterable[str] = ()) -> str:
    """Why a server that shows this certificate is not a service of this role, of these streams; empty: it is one."""
    if role not in holder.roles:
        return f"the certificate of {holder} lacks the role {role}"
    foreign = sorted(each for each in streams if each != ALL_STREAMS and not holder.has(each))
    return f"the certificate of {holder} does not name stream {foreign[0]!r:.60}" if foreign else ""


def has_all_leases(holder: Identity) -> bool:
    """Whether it may hold and end the leases of all consumers: a lease holds every stream."""
    return holder.has(ALL_STREAMS) and any(
        "drop_consumer" in ALLOWED[role] for role in holder.roles
    )


def check_role(holder: Identity, action: str) -> None:
    """Raise `PrivilegeError` unless a role of the holder has this action, on whatever streams."""
    if not any(action in ALLOWED[role] for role in holder.roles):
        able = [role for role in Role if action in ALLOWED[role]]
        raise PrivilegeError(
            f"the certificate of {holder} does not allow {action!r:.60}",
            repair=f"use a certificate with the role {' or '.join(able)}" if able else "",
        )


def check_consumer(holder: Identity, consumer: str) -> None:
    """Raise `PrivilegeError` unless the holder may hold this lease: without `has_all_leases`, only one of its own name.

    Moving another consumer's lease ahead would trim entries that the consumer still needs.
    """
    if has_all_leases(holder):
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
