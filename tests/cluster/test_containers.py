"""Attaching to a PostgreSQL that is not ours: one in a container, with its own password and settings."""

import select
import time

import psycopg
import pytest

from walsender_bridge.errors import AuthenticationError
from walsender_bridge.postgres.client.replication_connection import ReplicationConnection

pytestmark = pytest.mark.container


def test_a_committed_transaction_arrives_over_a_slot(container_dsn):
    with psycopg.connect(container_dsn, autocommit=True) as client:
        client.execute("CREATE TABLE attached (id int PRIMARY KEY, note text)")
        client.execute("CREATE PUBLICATION attached FOR TABLE attached")
        with ReplicationConnection.connect(container_dsn) as walsender:
            start = walsender.create_slot("attached")
            walsender.start_logical("attached", ["attached"], start_lsn=start)
            client.execute("INSERT INTO attached VALUES (1, 'first'), (2, 'second')")
            kinds = b""
            deadline = time.monotonic() + 30
            while b"C" not in kinds:
                assert time.monotonic() < deadline, kinds
                # XLogData: 'w', three 8-byte fields, then the pgoutput message.
                kinds += b"".join(p[25:26] for p in walsender.receive() if p[:1] == b"w")
                select.select([walsender.fileno()], [], [], 0.5)
            assert kinds == b"BRIIC"
        deadline = time.monotonic() + 30
        while client.execute("SELECT active FROM pg_replication_slots").fetchone() != (False,):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        client.execute("SELECT pg_drop_replication_slot('attached')")
        client.execute("DROP PUBLICATION attached")


def test_a_wrong_password_is_named_and_not_shown(container_dsn):
    wrong = psycopg.conninfo.make_conninfo(container_dsn, password="guess-of-mine")
    with pytest.raises(AuthenticationError) as caught:
        ReplicationConnection.connect(wrong)
    assert "guess-of-mine" not in str(caught.value)
