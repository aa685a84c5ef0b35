"""Why a stream ended is told by whoever reads it, also where something is to be sent first."""

import select
import time

import psycopg
import pytest

from tests.support.servers import Database, drop_slot
from tests.support.waiting import wait_for
from walsender_bridge.errors import PublicationError
from walsender_bridge.postgres.client.replication_connection import ReplicationConnection
from walsender_bridge.postgres.protocol.replication import status_update


def test_a_report_between_the_last_change_and_the_servers_error_hides_no_error(
    database: Database,
) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY)", "CREATE PUBLICATION sent FOR TABLE orders"
    )
    slot = database.name
    with ReplicationConnection.connect(database.dsn) as walsender:
        walsender.create_slot(slot)
        database.execute(
            "INSERT INTO orders VALUES (1)",
            "ALTER PUBLICATION sent RENAME TO other",
            "INSERT INTO orders VALUES (2)",
            "ALTER PUBLICATION other RENAME TO sent",
        )
        walsender.start_logical(slot, ["sent"])
        wait_for(lambda: not _active(database, slot), 60, "the server has ended the stream")
        deadline = time.monotonic() + 60
        # What came with the answer to START_REPLICATION is in libpq's buffer already, of which the socket shows nothing.
        while not walsender.receive() and time.monotonic() < deadline:
            select.select([walsender], [], [], 0.1)
        walsender.send(status_update(write=1, flush=1, apply=1, now_us=0))
        assert walsender.flush()
        with pytest.raises(PublicationError, match='publication "sent" does not exist'):
            _all_of(walsender)
    drop_slot(database, slot)


def _all_of(walsender: ReplicationConnection) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        walsender.receive()


def _active(database: Database, slot: str) -> bool:
    with psycopg.connect(database.dsn) as connection:
        query = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
        row = connection.execute(query, [slot]).fetchone()
        assert row is not None
        return bool(row[0])
