"""Readers' slots and an archive hold WAL up to `max_slot_wal_keep_size`; what is let go of is named, until it is mended."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import pq
from psycopg.conninfo import make_conninfo

from tests.support.attached import Attached
from tests.support.quorum_stack import insert, load_server
from tests.support.quorum_up import hosting, pids, quorum, up
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from tests.support.wal_server import PASSWORD, USER, verifier
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.postgres.protocol.wal_page import segment_name

SEGMENT = 1 << 20


@pytest.fixture
def server(make_server: MakeServer) -> LocalServer:
    return load_server(make_server, small=True, fsync="off", wal_keep_size="256MB")


@pytest.fixture
def tuskline(tmp_path: Path, server: LocalServer) -> Iterator[Attached]:
    users = tmp_path / "users"
    users.touch(mode=0o600)
    users.write_text(f'"{USER}" "{verifier(PASSWORD)}"\n')
    kept: dict[str, Any] = {"keep_bytes": 0, "max_slot_wal_keep_size": SEGMENT}
    with hosting(tmp_path, server, 1, archive="archive", users=str(users), **kept) as attached:
        yield attached


def ask(tuskline: Attached, command: str) -> str:
    """A replication command to the first safekeeper; its error, or nothing."""
    host, _, port = load_config(tuskline.config).safekeepers.wal_addresses[0].rpartition(":")
    made = make_conninfo(
        host=host, port=port, user=USER, password=PASSWORD, replication="true", sslmode="disable"
    )
    connection = pq.PGconn.connect(made.encode())
    try:
        assert connection.status == pq.ConnStatus.OK, connection.get_error_message()
        return connection.exec_(command.encode()).error_message.decode()
    finally:
        connection.finish()


def test_slots_and_archive_hold_wal_up_to_their_limit_and_what_is_lost_is_named(
    tuskline, server, tmp_path
):
    up(tuskline)
    insert(server, 0)
    # What is removed before the archiver's first look is not missed: the archive begins with that look.
    wait_for(
        lambda: quorum(tuskline)["safekeepers"][0]["archive"]["archived_lsn"],
        40,
        "the archiver has looked",
    )
    archive, away = tmp_path / "archive", tmp_path / "away"
    archive.mkdir(exist_ok=True)
    archive.rename(away)
    archive.write_text("no folder: nothing can be archived")
    assert ask(tuskline, "CREATE_REPLICATION_SLOT gone PHYSICAL RESERVE_WAL") == ""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for number in range(1, 6):
            insert(server, number)
            connection.execute("SELECT pg_switch_wal()")

    def words() -> str:
        return "\n".join(quorum(tuskline)["problems"])

    # Long before WAL is lost to it.
    wait_for(lambda: "WAL is not archived: " in words(), 40, "the archive's error is named")
    wait_for(lambda: "replication slot gone is lost" in words(), 40, "the slot is lost by name")
    wait_for(lambda: "WAL is no longer kept for it" in words(), 20, "the archive's outage is named")
    wait_for(lambda: "was removed before it was archived" in words(), 20, "and what it lacks")
    insert(server, 6)
    (one,) = quorum(tuskline)["safekeepers"]
    assert one["slots"][0]["wal_status"] == "lost"
    assert one["removed_segments"] >= 3
    refused = ask(tuskline, f"START_REPLICATION SLOT gone PHYSICAL {one['begin_lsn']}")
    assert 'can no longer access replication slot "gone"' in refused
    assert 'invalidated due to "wal_removed"' in refused

    # The archive is back: it has the rest, and what it lacks is known until somebody puts it there.
    archive.unlink()
    away.rename(archive)
    wait_for(lambda: "no more WAL is kept" not in words(), 40, "it is archived again")
    (one,) = quorum(tuskline)["safekeepers"]
    assert one["archive"]["missing"]
    for begin, end in one["archive"]["missing"]:
        for lsn in range(parse_lsn(begin), parse_lsn(end), SEGMENT):
            name = segment_name(1, lsn, SEGMENT)
            assert not (archive / name).exists()
            shutil.copyfile(server.data_dir / "pg_wal" / name, archive / name)
    # It asks now and then, and when it starts.
    os.kill(pids(tuskline, "log-server")["archiver-1"], signal.SIGKILL)
    wait_for(lambda: "archived" not in words(), 40, "nothing is missing any more")
    assert ask(tuskline, "DROP_REPLICATION_SLOT gone") == ""
    wait_for(lambda: words() == "", 20, "all is well")
