"""A table that is published while a transaction that has written to it runs: everything after that is sent."""

import time
from collections.abc import Iterator

import pytest

from tests.support.servers import Database, majors
from tests.support.waiting import wait_for
from walsender_bridge.capture import publication
from walsender_bridge.capture import source as capture
from walsender_bridge.capture.publication import misses_running_writers
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.postgres.client.replication_connection import ReplicationConnection
from walsender_bridge.provisioning.detach import detach
from walsender_bridge.provisioning.init import init

#: Bytes of an XLogData message before what the plugin has written.
_HEADER = 25


@pytest.fixture
def source(database: Database) -> Iterator[CaptureSource]:
    """A source that is attached."""
    database.execute("CREATE TABLE old (id int PRIMARY KEY)")
    source = CaptureSource("shop", database.dsn, f"slot_{database.name}", "tuskline_shop")
    init(source)
    yield source
    detach(source)


def inserted(walsender: ReplicationConnection, found: list[bytes]) -> list[bytes]:
    """The Insert messages that have come until now."""
    found += [p[_HEADER:] for p in walsender.receive() if p[_HEADER : _HEADER + 1] == b"I"]
    return found


@pytest.mark.parametrize("pg_server", majors(), indirect=True, ids="pg{}".format)
def test_what_follows_a_transaction_that_wrote_before_the_table_was_published_is_sent(
    database: Database, source: CaptureSource
) -> None:
    found: list[bytes] = []
    with (
        ReplicationConnection.connect(source.dsn) as walsender,
        capture.connect(source) as connection,
        database.connect() as writer,
    ):
        walsender.start_logical(source.slot, [source.publication])
        database.execute("CREATE TABLE late (id int PRIMARY KEY)")
        with writer.transaction():
            writer.execute("INSERT INTO late VALUES (111)")
            began = time.monotonic()
            left = publication.follow(connection, source)
            assert time.monotonic() - began < 5, "writers wait behind it"
            assert bool(left) == misses_running_writers(connection.info.server_version)
            writer.execute("INSERT INTO late VALUES (222)")
        assert publication.follow(connection, source) == []
        database.execute("INSERT INTO late VALUES (333)")
        database.execute("INSERT INTO old VALUES (444)")
        wait_for(lambda: b"444" in b"".join(inserted(walsender, found)), 60, "all has come")
    assert any(b"333" in message for message in found)


def test_servers_that_keep_leaving_out_are_told_by_their_minor_release() -> None:
    leaving_out = [110022, 120022, 130020, 140017, 150012, 160008, 170004]
    assert [misses_running_writers(version) for version in leaving_out] == [True] * 7
    sending = [130021, 140018, 150013, 160009, 170005, 180000, 190000]
    assert [misses_running_writers(version) for version in sending] == [False] * 7
