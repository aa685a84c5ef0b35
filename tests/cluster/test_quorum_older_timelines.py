"""A quorum whose log does not reach back to the server's first timeline: who joined late, or was attached late."""

import shutil
from functools import partial
from pathlib import Path

import psycopg
import pytest

from tests.support.quorum_stack import QuorumStack, load_server
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.quorum.proposer.change_members import ProposerFiles, change, wait


def has_segment(folder: Path) -> bool:
    """Whether a receiver has a whole segment there."""
    return any(len(path.name) == 24 for path in folder.iterdir())


def onto_the_next_timeline(server: LocalServer) -> None:
    """As after a recovery from a backup: it goes on with a timeline of its own."""
    server.stop()
    (server.data_dir / "recovery.signal").touch()
    with (server.data_dir / "postgresql.auto.conf").open("a") as file:
        file.write("restore_command = '/bin/false'\n")
    owner, group = server.data_dir.owner(), server.data_dir.group()
    shutil.chown(server.data_dir / "recovery.signal", owner, group)
    server.start()


@pytest.fixture
def primary(make_server: MakeServer) -> LocalServer:
    primary = load_server(make_server, small=True, wal_level="replica")
    onto_the_next_timeline(primary)
    with psycopg.connect(primary.dsn(), autocommit=True) as connection:
        wait_for(
            lambda: connection.execute("SELECT NOT pg_is_in_recovery()").fetchone() == (True,),
            20,
            "it is promoted",
        )
        for _ in range(3):
            connection.execute("SELECT pg_logical_emit_message(true, 'a', 'b'), pg_switch_wal()")
    return primary


def test_16_a_server_that_has_left_its_first_timeline_is_served_to_readers(
    tmp_path, primary, receive
) -> None:
    whole = (primary.data_dir / "pg_wal" / "00000002.history").read_text().split("\t")[:2]
    with QuorumStack(tmp_path, primary) as quorum:
        quorum.start()
        quorum.attach()
        quorum.insert(1)

        # One of them loses its disk, and joins anew.
        quorum.kill("safekeeper-2")
        shutil.rmtree(quorum.data(2))
        quorum.start("safekeeper-2")
        files, address = ProposerFiles(quorum.status_file, quorum.members_file), quorum.address(2)
        wait_for(lambda: quorum.listens(2), 20, "it listens")
        wait(files, change(files, add=[address], remove=[address]), 30)
        wait_for(lambda: quorum.held(2) > 0, 20, "it follows")

        for number in (0, 2):
            kept = quorum.data(number) / "wal" / "00000002.history"
            assert kept.read_text().split("\t")[:2] == whole
            folder = tmp_path / f"received-{number}"
            with quorum.wal_server(number) as server:
                receive(primary, server.dsn(), folder)
                # A receiver that begins after the switch below would have no whole segment.
                wait_for(lambda: any(folder.iterdir()), 20, "it receives")  # noqa: B023
                quorum.insert(10 + number)
                quorum.ask("SELECT pg_switch_wal()")
                quorum.insert(20 + number)
                wait_for(partial(has_segment, folder), 20, "a segment is received")
