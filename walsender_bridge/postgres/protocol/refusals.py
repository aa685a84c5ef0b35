"""What a server's refusal means: of a connection by libpq's text, of a command by its SQLSTATE. Pure."""

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

#: Parts of the text of a refused connection. libpq keeps no SQLSTATE for these; a server that answers
#: in another language ends as `ConnectionFailedError`, with its text.
_CONNECTION_TEXTS: tuple[tuple[tuple[str, ...], type[TusklineError], str], ...] = (
    (
        ("password", "SASL", "pg_hba.conf", 'role "', "authentication"),
        AuthenticationError,
        "correct the user and password (.pgpass, PGPASSWORD, service file), or allow it in pg_hba.conf",
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
)


def connection_error(text: str, where: str) -> TusklineError:
    """The error that libpq's text about a failed connection means."""
    line = one_line(text)
    if "does not exist" in line and 'database "' in line:
        return ConfigError(
            f"no such database: {line}", where=where, repair="correct dbname in the DSN"
        )
    # The more special text first: a missing REPLICATION also speaks of a "role".
    for parts, kind, repair in sorted(
        _CONNECTION_TEXTS, key=lambda row: row[1] is AuthenticationError
    ):
        if any(part in line for part in parts):
            return kind(line, where=where, repair=repair)
    return ConnectionFailedError(
        line, where=where, repair="see that the server runs and that host and port are right"
    )


def server_error(sqlstate: str, text: str, where: str) -> TusklineError:
    """The error that a server's refusal of a command means (PostgreSQL documentation, appendix A)."""
    line = one_line(text)
    match sqlstate:
        case "42501":
            return PrivilegeError(
                line,
                where=where,
                repair="tuskline doctor names what the role lacks; tuskline init --admin user=... grants it",
            )
        case "55006":
            return SlotInUseError(
                line, where=where, repair="stop the other consumer; each stream needs its own slot"
            )
        case "42704" if "publication" in line:
            return PublicationError(
                line,
                where=where,
                repair="tuskline reattach: changes from before it was made cannot be decoded, also if it is made again",
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
                repair="it is tried again; SELECT pid, mode, relation::regclass FROM pg_locks WHERE NOT granted OR mode ="
                " 'AccessExclusiveLock' names what is locked, and by whom",
            )
        case "55000" | "58P01":
            return SlotError(
                line,
                where=where,
                repair="the slot has lost WAL: see wal_status in pg_replication_slots",
            )
    return ConnectionFailedError(f"{line} (SQLSTATE {sqlstate})", where=where)


#: SQLSTATE of the warning with which a server (18 and later) leaves changes out: their publication was not there then.
_NOT_THEN = "55000"


def left_out(sqlstate: str, text: str, where: str) -> PublicationError | None:
    """The error that a warning of a walsender means: changes behind it are missing. None for any other warning."""
    return PublicationError(one_line(text), where=where) if sqlstate == _NOT_THEN else None


def one_line(text: str) -> str:
    """A server's text in one line, cut."""
    return " ".join(text.split())[:400]
