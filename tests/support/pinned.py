"""Sessions of a test that write values as our own do, and name tables as a user does."""

from typing import Any

import psycopg

from walsender_bridge.postgres.client.replication_connection import pinned_conninfo


def connect_pinned(dsn: str, *, autocommit: bool = False) -> psycopg.Connection[Any]:
    """With the settings that decide how values are written; names are those of `public`."""
    connection = psycopg.connect(pinned_conninfo(dsn), autocommit=True)
    connection.execute("SET search_path = public")
    connection.autocommit = autocommit
    return connection
