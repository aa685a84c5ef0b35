"""Resolves a DSN with several hosts to the server that accepts writes, and keeps a session on that server.

libpq chooses a host at each connection, possibly a different one after a standby is
promoted. The queries and the stream of a session must be of one server: all its connections but the first go to the
server of the first (`same_server`).
"""

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from walsender_bridge.errors import ConfigError
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.client.dsn import parameters
from walsender_bridge.postgres.client.replication_connection import describe, pinned_conninfo
from walsender_bridge.postgres.protocol.refusals import connection_error


def primary_dsn(dsn: str) -> str:
    """`dsn`; with several hosts, restricted to the one that accepts writes unless it sets target_session_attrs."""
    try:
        own = parameters(dsn)
    except ConfigError:
        return dsn  # rejected with a message where it is used
    if not _several(own) or own.get("target_session_attrs"):
        return dsn
    return make_conninfo(dsn, target_session_attrs="read-write")


def _several(own: Mapping[str, Any]) -> bool:
    return any("," in str(own.get(name) or "") for name in ("host", "hostaddr", "port"))


def one_server(dsn: str) -> str:
    """`dsn` with one host: the one that libpq chooses now, if there are several. Raises connection errors."""
    if not _several(conninfo_to_dict(pinned_conninfo(dsn))):
        return dsn
    try:
        with BoundedConnection.open(dsn) as connection:
            return same_server(dsn, connection)
    except psycopg.Error as error:
        raise connection_error(str(error), describe(dsn)) from None


def for_reading(dsn: str) -> str:
    """`dsn` for a session that its own options make read-only, because of which libpq would reject its server."""
    if conninfo_to_dict(dsn).get("target_session_attrs") != "read-write":
        return dsn
    return make_conninfo(dsn, target_session_attrs="primary")


def at_address(dsn: str, host: str, port: int | str) -> str:
    """`dsn` with this address as its only host, whatever the role of that server."""
    return pinned_conninfo(dsn, host=host, hostaddr="", port=str(port), target_session_attrs="any")


def same_server(dsn: str, connection: psycopg.Connection[Any]) -> str:
    """`dsn` with the host of `connection` only, including its address, since a name may have several."""
    info = connection.info
    host: dict[str, Any] = {"host": info.host, "port": info.port}
    if info.hostaddr and not info.host.startswith(("/", "@")):
        host["hostaddr"] = info.hostaddr
    elif conninfo_to_dict(dsn).get("hostaddr"):
        host["hostaddr"] = ""
    return make_conninfo(dsn, **host)
