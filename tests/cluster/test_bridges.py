"""Bridges on two machines over one server: one is active, and the other takes over when it dies or is cut off."""

import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psycopg
import pytest

from tests.support.capture_stack import Load, check_equal, server_with_tables
from tests.support.etcd import EtcdCluster, needs_etcd
from tests.support.loopbacks import Loopbacks
from tests.support.machines import namespaces_missing
from tests.support.relay import Relay
from tests.support.servers import MakeServer
from tests.support.several_bridges import SeveralBridges
from tests.support.waiting import wait_for

pytestmark = needs_etcd


@pytest.mark.timeout(300)
def test_another_bridge_takes_over_when_one_is_cut_off_or_killed_under_load(
    etcd: EtcdCluster, make_server: MakeServer, tmp_path: Path
) -> None:
    """With its machine's repository and log server: each transaction is in the log once."""
    server = server_with_tables(make_server, 15, fsync="off", wal_sender_timeout="3s")
    with (
        psycopg.connect(server.dsn(), autocommit=True) as connection,
        SeveralBridges.running(tmp_path, etcd, server.dsn()) as bridges,
        ExitStack() as load,
    ):
        bridges.active()
        load.enter_context(Load(server.dsn(), pause=0.02))
        bridges.goes_on(connection)
        wait_for(partial(is_well_while_standing_by, bridges), 60, "who stands by says so")
        first, term = bridges.settled(), bridges.term()
        bridges.signal(first, signal.SIGSTOP)
        try:
            assert bridges.active(1 - first) == 1 - first
            bridges.goes_on(connection)
        finally:
            bridges.signal(first, signal.SIGCONT)
        assert bridges.term() > term
        bridges.goes_on(connection)
        second = bridges.settled()
        bridges.machines[second].kill()
        assert bridges.active(1 - second) == 1 - second
        bridges.goes_on(connection)
        load.close()
        found = check_equal(bridges.log, server.dsn())
        assert len(found.ends) > 50


@pytest.mark.long
@pytest.mark.timeout(300)
def test_25_a_bridge_that_is_cut_off_from_etcd_alone_gives_up_its_slot(
    etcd: EtcdCluster, make_server: MakeServer, tmp_path: Path
) -> None:
    """It still reaches the server, which would never end its walsender: the slot is free because the old bridge stops."""
    server = server_with_tables(make_server, 15, fsync="off", wal_sender_timeout="0")
    ports = [int(each.rpartition(":")[2]) for each in etcd.endpoints]
    with ExitStack() as stack:
        relays = [[stack.enter_context(Relay(port)) for port in ports] for _ in range(2)]
        endpoints = [[f"127.0.0.1:{each.port}" for each in its] for its in relays]
        connection = stack.enter_context(psycopg.connect(server.dsn(), autocommit=True))
        bridges = stack.enter_context(
            SeveralBridges.running(tmp_path, etcd, server.dsn(), endpoints=endpoints)
        )
        bridges.active()
        with Load(server.dsn(), pause=0.02):
            bridges.goes_on(connection)
            first, term = bridges.settled(), bridges.term()
            for each in relays[first]:
                each.freeze()
            assert bridges.active(1 - first) == 1 - first
            bridges.goes_on(connection)
            assert bridges.term() > term
            for each in relays[first]:
                each.thaw()
            bridges.settled()
            bridges.goes_on(connection)
        found = check_equal(bridges.log, server.dsn())
        assert len(found.ends) > 50


@pytest.mark.skipif(bool(namespaces_missing()), reason="no network namespaces")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "also_etcd",
    [pytest.param(False, marks=pytest.mark.long), True],
    ids=["but not from etcd", "and from etcd"],
)
def test_25_a_bridge_that_is_cut_off_from_the_log_gives_way_to_another(
    etcd: EtcdCluster, make_server: MakeServer, tmp_path: Path, *, also_etcd: bool
) -> None:
    """Its machine reaches only its own log server and PostgreSQL. Once it reaches the others again, it stands by."""
    server = server_with_tables(make_server, 15, fsync="off", wal_sender_timeout="0")
    with ExitStack() as stack:
        loopbacks = stack.enter_context(Loopbacks(3))
        ports = [int(each.rpartition(":")[2]) for each in etcd.endpoints]
        for port in (*ports, server.port):
            loopbacks.publish(port, None)
        connection = stack.enter_context(psycopg.connect(server.dsn(), autocommit=True))
        bridges = stack.enter_context(
            SeveralBridges.running(tmp_path, etcd, server.dsn(), loopbacks=loopbacks)
        )
        bridges.active()
        with Load(server.dsn(), pause=0.02):
            bridges.goes_on(connection)
            first, term = bridges.settled(), bridges.term()
            cut = loopbacks.between(first, [1 - first, 2])
            if also_etcd:
                cut += loopbacks.links[first, None][: len(ports)]
            for each in cut:
                each.cut_off()
            assert bridges.active(1 - first, within=150) == 1 - first
            bridges.goes_on(connection)
            assert bridges.term() > term
            for each in cut:
                each.heal()
            assert bridges.settled() == 1 - first
            bridges.goes_on(connection)
        found = check_equal(bridges.log, server.dsn())
        assert len(found.ends) > 50


def is_well_while_standing_by(bridges: SeveralBridges) -> bool:
    """Whether `status` where no bridge is active says so, and misses nothing of it."""
    seen = bridges.machines[1 - bridges.settled()].json("status")
    missed = [each for each in seen["problems"] if "capture" in each or "bridge" in each]
    return bool(seen["bridge"]["state"] == "standing by" and not missed)
