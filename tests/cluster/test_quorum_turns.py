"""Where WAL turns a page, and who leads: switches and checkpoints, ends at a boundary, new proposers."""

import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.quorum_stack import NAME, Load, QuorumStack, load_server, numbers
from tests.support.relay import Relay
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from tests.support.wal_server import Receivers
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.postgres.protocol.wal_page import PAGE_BYTES

SEGMENT = 16 << 20


@pytest.fixture
def stack(tmp_path: Path, make_server: MakeServer) -> Iterator[QuorumStack]:
    server = load_server(make_server, wal_level="replica", autovacuum="off", bgwriter_delay="10s")
    with QuorumStack(tmp_path, server) as stack:
        yield stack


def everywhere(stack: QuorumStack, lsn: int) -> bool:
    """Whether every safekeeper has this much on disk."""
    told = [each["flush_lsn"] for each in stack.status().get("safekeepers", [])]
    return len(told) == len(stack.ports) and all(each and parse_lsn(each) >= lsn for each in told)


def restart(stack: QuorumStack) -> None:
    """Every safekeeper and the proposer, killed and started again."""
    for name in (*stack.names, "proposer"):
        stack.kill(name)
    stack.start()
    wait_for(stack.is_sync, 30, f"they are back: {stack.logs()}")


def test_3_frequent_checkpoints_and_switched_segments_under_load(stack) -> None:
    stack.start()
    stack.attach()
    load = Load(stack.server)
    for turn in range(10):
        stack.ask("CHECKPOINT")
        stack.ask("SELECT pg_switch_wal()")
        if turn == 4:
            stack.kill("safekeeper-1")
            stack.start("safekeeper-1")
        most = 3 * (turn + 1)
        wait_for(lambda: len(load.acknowledged) >= most, 20, "commits go on")  # noqa: B023
    acknowledged = load.stop()
    assert set(acknowledged) <= numbers(stack.server)
    stack.ask("SELECT pg_switch_wal()")
    end = parse_lsn(stack.flush_lsn())
    wait_for(lambda: everywhere(stack, end), 30, "all have it")
    restart(stack)
    first, *others = [stack.segments(number) for number in range(3)]
    both = set(first).intersection(*others)
    assert len(both) >= 5
    assert all(first[name] == other[name] for name in both for other in others)


def at_page_end(stack: QuorumStack) -> int:
    """Fill WAL until it ends exactly with a page, which the server then makes durable by itself; that LSN."""

    def position(connection: psycopg.Connection) -> int:
        row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        assert row
        return parse_lsn(row[0])

    def fill(connection: psycopg.Connection, length: int) -> None:
        connection.execute("SELECT pg_logical_emit_message(false, '', repeat('x', %s))", [length])

    with psycopg.connect(stack.server.dsn(), autocommit=True) as connection:
        connection.execute("SET synchronous_commit = local")
        for _ in range(20):
            before = position(connection)
            fill(connection, 400)
            overhead = position(connection) - before - 400
            left = PAGE_BYTES - position(connection) % PAGE_BYTES
            if not left - overhead > 300:
                fill(connection, left)
                continue
            fill(connection, left - overhead)
            # What is inserted next comes behind the next page's header.
            if position(connection) % PAGE_BYTES < 64:
                return position(connection) // PAGE_BYTES * PAGE_BYTES
    raise AssertionError("no record ended with its page")


def ends_at_boundary(stack: QuorumStack, boundary: str) -> bool:
    """Have the WAL end there; whether that is where every safekeeper's ends."""
    if boundary == "page":
        end = at_page_end(stack)
    else:
        stack.ask("SELECT pg_switch_wal()")
        end = -(-parse_lsn(stack.flush_lsn()) // SEGMENT) * SEGMENT
    wait_for(lambda: everywhere(stack, end), 30, "it ends there")
    return {parse_lsn(each["flush_lsn"]) for each in stack.status()["safekeepers"]} == {end}


@pytest.mark.parametrize("boundary", ["page", "segment"])
def test_11_a_restart_exactly_at_a_boundary(stack, boundary: str) -> None:
    stack.start()
    stack.attach()
    stack.ask("INSERT INTO load VALUES (1)")
    # Every 20 seconds the background writer adds a record: then another boundary is taken.
    assert any(ends_at_boundary(stack, boundary) for _ in range(3)), "something else was written"
    restart(stack)
    stack.ask("INSERT INTO load VALUES (2)")
    stack.server.kill()
    stack.server.start()
    wait_for(stack.is_sync, 30, "the primary is back")
    stack.ask("INSERT INTO load VALUES (3)")
    assert numbers(stack.server) == {1, 2, 3}


def test_26_a_greater_node_id_displaces_and_readers_stay(stack, tmp_path) -> None:
    stack.start()
    stack.attach()
    receivers = Receivers()
    try:
        with stack.wal_server(0) as server:
            folder = tmp_path / "received"
            received = receivers(stack.server, server.dsn(), folder, "--synchronous", "--no-loop")
            stack.ask("INSERT INTO load VALUES (1)")
            wait_for(lambda: server.log.count(" streaming ") == 1, 20, "it streams")
            first, term = stack.processes.pop("proposer"), stack.status()["term"]
            stack.start("proposer")
            assert first.wait(timeout=30) == 11, stack.logs()
            wait_for(stack.is_sync, 30, "the second leads")
            stack.ask("INSERT INTO load VALUES (2)")
            # Not one that a safekeeper has: it may be older than where the receiver has begun.
            ((name,),) = stack.ask("SELECT pg_walfile_name(pg_current_wal_lsn())")
            stack.ask("SELECT pg_switch_wal()")
            stack.ask("INSERT INTO load VALUES (3)")
            wait_for((received.folder / name).exists, 30, f"it has {name}")
            assert server.log.count(" streaming ") == 1, "it was connected all the while"
            wait_for(lambda: stack.status()["term"] > term, 10, "a greater term")
    finally:
        receivers.end()


def test_35_the_walsender_of_a_partitioned_proposer_holds_up_no_commit(stack) -> None:
    stack.start(*stack.names)
    with Relay(stack.server.port) as relay:
        stack.start_as("proposer", dsn=stack.server.dsn(port=relay.port))
        stack.attach()
        stack.ask("INSERT INTO load VALUES (1)")
        relay.freeze()
        stack.kill("proposer")
        stack.start("proposer")
        began = time.monotonic()
        stack.insert(2, timeout_ms=30_000)  # wal_sender_timeout is 60 s
        assert time.monotonic() - began < 20
        senders = "SELECT count(*) FROM pg_stat_replication WHERE application_name = %s"
        assert stack.ask(senders, NAME) == [(2,)], "the older walsender has not noticed"


def test_26_a_short_disconnection_resumes_without_a_vote(stack) -> None:
    stack.start(*stack.names)
    with Relay(stack.ports[0]) as relay:
        stack.ports[0] = relay.port
        stack.start("proposer")
        stack.attach()
        # Nothing commits without the connection that is cut.
        stack.kill("safekeeper-2")
        term = stack.status()["term"]
        for number in range(5):
            made = relay.connections
            relay.cut()
            wait_for(lambda: relay.connections > made, 20, "it has connected again")  # noqa: B023
            stack.ask(f"INSERT INTO load VALUES ({number})")
        assert stack.status()["term"] == term
        assert stack.log("proposer").read_text().count(" elected ") == 1
        assert numbers(stack.server) == set(range(5))
