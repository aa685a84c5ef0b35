"""Parses a DSN, and rejects one of which libpq would take part of the password for a parameter that messages show."""

from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from walsender_bridge.errors import ConfigError

_URI: Final = ("postgresql://", "postgres://")


def parameters(dsn: str) -> dict[str, Any]:
    """The parameters by libpq's names. Raises `ConfigError`, which quotes nothing of the DSN."""
    try:
        found = conninfo_to_dict(dsn)
    except psycopg.Error:
        # libpq's own text quotes the part it did not understand: that may be a password.
        raise ConfigError(
            "invalid DSN",
            repair="write a URI (postgresql://user@host/db) or key=value pairs",
        ) from None
    if _is_garbled(found, is_uri=dsn.startswith(_URI)):
        raise ConfigError(
            "the DSN reads as if a part of its password were the host, the port or the database",
            repair="in a URI write @ as %40, / as %2F and : as %3A, or leave the password to ~/.pgpass",
        )
    return found


def _is_garbled(found: dict[str, Any], *, is_uri: bool) -> bool:
    """Whether a host contains an @ (an abstract socket's name may start with one), or a port is not a number.

    For a URI, also whether the database's name contains an @: libpq ends the password at the first slash.
    """
    hosts = str(found.get("host") or "").split(",")
    ports = str(found.get("port") or "").split(",")
    return (
        any("@" in host[1:] for host in hosts)
        or any(port.strip() and not port.strip().isdecimal() for port in ports)
        or (is_uri and "@" in str(found.get("dbname") or ""))
    )
