"""Hot-standby feedback of a safekeeper's readers, as a real primary sees it: it ends with them (37)."""

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import pq

from tests.support.quorum_stack import NAME, QuorumStack, load_server
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from tests.support.wal_server import WalServerProcess
from walsender_bridge.postgres.protocol.lsn import format_lsn, parse_lsn
from walsender_bridge.postgres.protocol.replication import hot_standby_feedback


@pytest.fixture
def quorum(tmp_path: Path, make_server: MakeServer) -> Iterator[QuorumStack]:
    with QuorumStack(tmp_path, load_server(make_server, fsync="off")) as stack:
        yield stack


@contextmanager
def reader(server: WalServerProcess, lsn: str, xmin: int) -> Iterator[None]:
    """A standby as far as the server can tell, with a query that began long ago, which it says again and again."""
    connection = pq.PGconn.connect(server.dsn(replication="true").encode())
    ended = threading.Event()

    def send() -> None:
        feedback = hot_standby_feedback(
            xmin=xmin,
            xmin_epoch=0,
            catalog_xmin=0,
            catalog_xmin_epoch=0,
            now_us=time.time_ns() // 1000,
        )
        with contextlib.suppress(psycopg.OperationalError):  # the server is killed
            while not ended.wait(0.5):
                connection.put_copy_data(feedback)
                connection.flush()
                # The WAL that is sent must not fill what is between the two.
                connection.consume_input()
                while connection.get_copy_data(1)[0] > 0:
                    pass

    thread = threading.Thread(target=send)
    try:
        assert connection.status == pq.ConnStatus.OK, connection.error_message
        started = connection.exec_(f"START_REPLICATION PHYSICAL {lsn} TIMELINE 1".encode())
        assert started.status == pq.ExecStatus.COPY_BOTH, connection.error_message
        thread.start()
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
        connection.finish()


def pinned(quorum: QuorumStack) -> int | None:
    """What the proposer has the primary's VACUUM keep."""
    query = "SELECT backend_xmin::text::bigint FROM pg_stat_replication WHERE application_name = %s"
    found: int | None = quorum.ask(query, NAME)[0][0]
    return found


def test_37_feedback_ends_with_its_reader_server_and_safekeeper(quorum):
    quorum.start()
    quorum.attach()
    quorum.insert(0)
    # This safekeeper may not have the newest WAL yet, and refuses to begin ahead of what it has.
    (newest,) = quorum.ask("SELECT pg_current_wal_flush_lsn()")[0]
    lsn = format_lsn(parse_lsn(newest) >> 24 << 24)
    oldest = quorum.ask("SELECT txid_snapshot_xmin(txid_current_snapshot())::text::bigint - 2")
    xmin = oldest[0][0]
    server = quorum.wal_server(0)
    with server:
        with reader(server, lsn, xmin):
            wait_for(lambda: pinned(quorum) == xmin, 60, "it holds back VACUUM")
        wait_for(lambda: pinned(quorum) is None, 60, "the reader is gone")
        with reader(server, lsn, xmin):
            wait_for(lambda: pinned(quorum) == xmin, 60, "another one")
            server.kill()
            wait_for(lambda: pinned(quorum) is None, 60, "the server of the readers is gone")
    with quorum.wal_server(0) as server, reader(server, lsn, xmin):
        wait_for(lambda: pinned(quorum) == xmin, 60, "they are back")
        quorum.kill("safekeeper-0")
        wait_for(lambda: pinned(quorum) is None, 60, "the safekeeper is gone")
