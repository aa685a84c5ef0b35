"""The role that a DSN logs in as."""

from dataclasses import dataclass

from psycopg import pq

from walsender_bridge.postgres.client.replication_connection import pinned_conninfo


@dataclass(frozen=True, slots=True)
class LoginRole:
    """The role and password of a DSN, as resolved by libpq."""

    user: str
    password: str


def login_of(dsn: str) -> LoginRole:
    """Resolve the role through libpq, which works even if the server refuses the login, as it does before the role exists."""
    pgconn = pq.PGconn.connect(pinned_conninfo(dsn).encode())
    try:
        return LoginRole((pgconn.user or b"").decode(), (pgconn.password or b"").decode())
    finally:
        pgconn.finish()
