"""A DSN with several hosts names one cluster: the server that takes writes is meant, and a session stays on it.

Which host libpq takes is its own affair at each connection, and may be another one a moment later, when a standby is
promoted. What one session asks and what it streams must be of one server: its connections but the first go to where
the first one went (`same_server`).
"""

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo


def primary_dsn(dsn: str) -> str:
    """`dsn`; with several hosts, the one that takes writes is meant unless it says otherwise."""
    try:
        own = conninfo_to_dict(dsn)
    except psycopg.Error:
        return dsn  # refused by name where it is used
    several = any("," in str(own.get(name) or "") for name in ("host", "hostaddr", "port"))
    if not several or own.get("target_session_attrs"):
        return dsn
    return make_conninfo(dsn, target_session_attrs="read-write")


def same_server(dsn: str, connection: psycopg.Connection[Any]) -> str:
    """`dsn` with the one host that `connection` went to, its address included: a name may have several."""
    info = connection.info
    host: dict[str, Any] = {"host": info.host, "port": info.port}
    if info.hostaddr and not info.host.startswith(("/", "@")):
        host["hostaddr"] = info.hostaddr
    elif conninfo_to_dict(dsn).get("hostaddr"):
        host["hostaddr"] = ""
    return make_conninfo(dsn, **host)
