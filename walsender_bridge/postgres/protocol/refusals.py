"""Maps a server's errors to Tuskline's: of a connection by libpq's text, of a command by its SQLSTATE. Pure."""

from collections.abc import Mapping
from typing import Final

from walsender_bridge.errors import (
    AuthenticationError,
    ConfigError,
    ConnectionFailedError,
    PrivilegeError,
    PublicationError,
    ServerSettingError,
    SlotError,
    SlotInUseError,
    TusklineError,
    UnavailableError,
)

POOLER: Final = (
    "specify the server's own host and port in the DSN, not those of a connection pooler: sessions need a replication connection, "
    "and settings and snapshots that are theirs alone"
)
#: Fragments of libpq's text for a failed connection, for which it provides no SQLSTATE; the message of a server with
#: another lc_messages becomes a `ConnectionFailedError`.
_CONNECTION_TEXTS: tuple[tuple[tuple[str, ...], type[TusklineError], str], ...] = (
    (
        (
            "too many connections",
            "too many clients",
            "canceling authentication",
            "connection slots",
        ),
        ConnectionFailedError,
        "retry when the server is less busy, or raise max_connections or the role's CONNECTION LIMIT",
    ),
    (
        ("password", "SASL", "pg_hba.conf", 'role "', "authentication"),
        AuthenticationError,
        "correct the user and password (.pgpass, PGPASSWORD, service file), or allow the connection in pg_hba.conf",
    ),
    (
        ("must be superuser or replication role", "permission denied to start WAL sender"),
        PrivilegeError,
        "ALTER ROLE ... REPLICATION",
    ),
    (
        ("max_wal_senders", "number of requested standby connections"),
        ServerSettingError,
        "raise max_wal_senders and restart the server",
    ),
    (("permission denied for database",), PrivilegeError, "GRANT CONNECT ON DATABASE ... TO ..."),
    # As PgBouncer says it; PostgreSQL knows each parameter that is sent.
    (("unsupported startup parameter",), ConfigError, POOLER),
)


def connection_error(text: str, where: str) -> TusklineError:
    """Map libpq's text for a failed connection to an error."""
    line = one_line(text)
    if "does not exist" in line and 'database "' in line:
        return ConfigError(
            f"no such database: {line}", where=where, repair="correct dbname in the DSN"
        )
    # The more specific text first: the messages about REPLICATION and connection limits also contain "role".
    for parts, kind, repair in sorted(
        _CONNECTION_TEXTS, key=lambda row: row[1] is AuthenticationError
    ):
        if any(part in line for part in parts):
            return kind(line, where=where, repair=repair)
    return ConnectionFailedError(
        line,
        where=where,
        repair="check that the server is running, and that host and port are correct",
    )


def without_settings(
    found: Mapping[str, str | None], wanted: Mapping[str, str], where: str
) -> ConfigError | None:
    """The error of a session whose settings are not those that it was started with; None: what the server reports of them is right."""
    for name, value in wanted.items():
        if (there := found.get(name)) not in {None, value}:
            return ConfigError(
                f"the session has {name} = {there}, although it was started with {value}: what answers ignores startup parameters",
                where=where,
                repair=POOLER,
            )
    return None


def server_error(sqlstate: str, text: str, where: str) -> TusklineError:
    """Map a command's SQLSTATE to an error (PostgreSQL documentation, appendix A)."""
    line = one_line(text)
    match sqlstate:
        case "42501":
            return PrivilegeError(
                line,
                where=where,
                repair="run tuskline doctor to list the missing privileges, and tuskline init --admin user=... to grant them",
            )
        case "55006":
            return SlotInUseError(
                line, where=where, repair="stop the other consumer; each stream needs its own slot"
            )
        case "42704" if "publication" in line:
            return PublicationError(
                line,
                where=where,
                repair="run tuskline reattach: changes from before the publication was created cannot be decoded, even if it is recreated",
            )
        case "42704":
            return SlotError(line, where=where, repair="see pg_replication_slots")
        case "42710":
            return SlotError(
                line,
                where=where,
                repair="another session has just created it: run this command again",
            )
        case "55000" if "wal_level" in line:
            return ServerSettingError(
                line, where=where, repair="set wal_level = logical and restart the server"
            )
        case "53400":
            return ServerSettingError(
                line, where=where, repair="raise max_replication_slots and restart the server"
            )
        case "55P03":
            return UnavailableError(
                line,
                where=where,
                repair="this is retried; SELECT pid, mode, relation::regclass FROM pg_locks WHERE NOT granted OR mode ="
                " 'AccessExclusiveLock' shows the locks and their holders",
            )
        case "55000" | "58P01":
            return SlotError(
                line,
                where=where,
                repair="the slot has lost WAL: see wal_status in pg_replication_slots",
            )
    return ConnectionFailedError(f"{line} (SQLSTATE {sqlstate})", where=where)


#: SQLSTATE of the warning with which a server (18 and later) omits changes whose publication did not exist at the time.
_NOT_THEN = "55000"


def left_out(sqlstate: str, text: str, where: str) -> PublicationError | None:
    """The error for a walsender's warning that it omits changes; None for any other warning."""
    return PublicationError(one_line(text), where=where) if sqlstate == _NOT_THEN else None


def one_line(text: str) -> str:
    """A server's text on one line, truncated."""
    return " ".join(text.split())[:400]
