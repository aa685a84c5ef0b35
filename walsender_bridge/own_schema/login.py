"""Whom a DSN logs in as."""

from dataclasses import dataclass

from psycopg import pq

from walsender_bridge.postgres.client.replication_connection import pinned_conninfo


@dataclass(frozen=True, slots=True)
class LoginRole:
    """Who a DSN logs in as, however libpq finds that out."""

    user: str
    password: str


def login_of(dsn: str) -> LoginRole:
    """Libpq says whom it would log in as even when the server refuses, as it does before the role exists."""
    pgconn = pq.PGconn.connect(pinned_conninfo(dsn).encode())
    try:
        return LoginRole((pgconn.user or b"").decode(), (pgconn.password or b"").decode())
    finally:
        pgconn.finish()
