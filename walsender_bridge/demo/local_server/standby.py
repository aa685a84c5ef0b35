"""A standby of a local server: a base backup that streams from a physical slot, and synchronizes logical slots."""

from collections.abc import Mapping
from pathlib import Path

import psycopg
from psycopg import sql

from walsender_bridge.demo.local_server.server import LocalServer
from walsender_bridge.errors import NotSupportedError
from walsender_bridge.runtime.sql import load

#: The first major whose standbys synchronize logical slots by themselves.
OLDEST = 17


def make_standby(
    origin: LocalServer, folder: Path, *, slot: str, settings: Mapping[str, str] | None = None
) -> LocalServer:
    """Create a standby of the running `origin` in `folder`, and its `slot` on `origin`. It is not started.

    Raises `NotSupportedError` before 17, `LocalServerError`, psycopg's errors.
    """
    if origin.installation.major < OLDEST:
        raise NotSupportedError(
            f"standbys of PostgreSQL {origin.installation.version} do not synchronize logical slots by themselves",
            repair=f"install {OLDEST} or later; for older ones, see docs/extension.md",
        )
    with psycopg.connect(origin.dsn(), autocommit=True) as connection:
        connection.execute(load("provisioning/physical_slot_create").encode(), {"slot": slot})
    standby = origin.copied(folder)
    lines = {
        "primary_conninfo": origin.dsn(),
        "primary_slot_name": slot,
        "hot_standby_feedback": "on",
        "sync_replication_slots": "on",
        "wal_receiver_status_interval": "1s",
        **(settings or {}),
    }
    text = sql.SQL("\n").join(
        sql.SQL("{} = {}").format(sql.SQL(name), sql.Literal(value))
        for name, value in lines.items()
    )
    with (standby.data_dir / "postgresql.conf").open("a") as conf:
        conf.write(f"\n{text.as_string()}\n")
    (standby.data_dir / "standby.signal").touch()
    return standby


def has_slots(standby: LocalServer, slots: list[str]) -> bool:
    """Whether clients could continue from these logical slots on the standby. Raises psycopg's errors."""
    with psycopg.connect(standby.dsn(), autocommit=True, connect_timeout=5) as connection:
        row = connection.execute(load("demo/standby_slots").encode(), {"slots": slots}).fetchone()
    return row is not None and row[0] == len(slots)
