"""Failover without loss, on real servers: what a quorum has acknowledged is on the server that is promoted."""

import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.failover_stack import FailoverStack
from tests.support.quorum_stack import Load
from tests.support.servers import MAJORS_IN_TURN, MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.local_server import LocalServer
from walsender_bridge.proposer.failover import Step

ALL = [step for step in Step if step not in {Step.RECEIVE, Step.REPLAY}]


@pytest.fixture
def primary(make_server: MakeServer, request: pytest.FixtureRequest) -> LocalServer:
    server = make_server(major=getattr(request, "param", 16), wal_level="replica")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE load (number int PRIMARY KEY)")
    return server


@pytest.fixture
def stack(tmp_path: Path, primary: LocalServer) -> Iterator[FailoverStack]:
    with FailoverStack(tmp_path, primary) as stack:
        stack.start()
        stack.standby()
        stack.attach()
        stack.serve()
        yield stack


def insert(server: LocalServer, number: int, *, timeout_ms: int = 20_000) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"SET statement_timeout = {timeout_ms}".encode())
        connection.execute("INSERT INTO load VALUES (%s)", [number])


def waits(server: LocalServer, number: int) -> threading.Thread:
    """A commit that has not returned after a second; the thread that it returns in."""

    def commit() -> None:
        try:
            insert(server, number)
        except psycopg.Error:
            return

    thread = threading.Thread(target=commit, daemon=True)
    thread.start()
    thread.join(1.0)
    assert thread.is_alive(), "the commit returned without a quorum"
    return thread


def numbers(server: LocalServer) -> set[int]:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        return {number for (number,) in connection.execute("SELECT number FROM load")}


@pytest.mark.parametrize("primary", MAJORS_IN_TURN, indirect=True)
def test_16_a_standby_promoted_at_vcl_has_every_acknowledged_commit(stack, primary):
    (standby,) = stack.standbys
    loads = [Load(primary, 1_000_000 * n) for n in range(4)]
    wait_for(lambda: min(len(load.acknowledged) for load in loads) > 20, 30, "commits return")
    primary.kill()
    acknowledged = set().union(*(load.stop() for load in loads))
    stack.kill("proposer")
    steps = stack.fail_over(standby)
    assert set(ALL) <= set(steps), steps
    assert acknowledged <= numbers(standby)
    waiting = waits(
        standby, -1
    )  # nothing returns on it without the quorum, from its first moment on
    stack.switch_to(standby)
    waiting.join(20)
    insert(standby, -2)
    assert {-1, -2} <= numbers(standby)
    assert stack.fail_over(standby) == [Step.DONE]
