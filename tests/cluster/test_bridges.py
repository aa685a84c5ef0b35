"""Bridges on two machines over one server: one is active, and the other takes over when it dies or is cut off."""

import signal
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.support.capture_stack import Load, check_equal, make_tables
from tests.support.etcd import EtcdCluster, needs_etcd
from tests.support.servers import MakeServer
from tests.support.several_bridges import SeveralBridges

pytestmark = needs_etcd


@pytest.mark.timeout(300)
def test_another_bridge_takes_over_when_one_is_cut_off_or_killed_under_load(
    etcd: EtcdCluster, make_server: MakeServer, tmp_path: Path
) -> None:
    """With its machine's repository and log server: each transaction is in the log once."""
    server = make_server(15, fsync="off", wal_sender_timeout="3s")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
    with (
        psycopg.connect(server.dsn(), autocommit=True) as connection,
        SeveralBridges.running(tmp_path, etcd, server.dsn()) as bridges,
        ExitStack() as load,
    ):
        first = bridges.active()
        other = 1 - first
        load.enter_context(Load(server.dsn(), pause=0.02))
        bridges.goes_on(connection)
        bridges.stands_by(other)
        done = bridges.machines[other].json("status")
        assert done["bridge"]["state"] == "standing by"
        assert not [each for each in done["problems"] if "capture" in each or "bridge" in each]
        term = bridges.log.replica_status().term
        bridges.signal(first, signal.SIGSTOP)
        try:
            assert bridges.active(other) == other
            bridges.goes_on(connection)
        finally:
            bridges.signal(first, signal.SIGCONT)
        assert bridges.log.replica_status().term > term
        bridges.stands_by(first)
        bridges.goes_on(connection)
        bridges.machines[other].kill()
        assert bridges.active(first) == first
        bridges.goes_on(connection)
        load.close()
        found = check_equal(bridges.log, server.dsn())
        assert len(found.ends) > 50
