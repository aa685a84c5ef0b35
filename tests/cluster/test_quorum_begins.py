"""A new quorum begins with WAL that its server keeps, whatever checkpoints remove meanwhile."""

from typing import Any

import psycopg
import pytest

from tests.support.quorum_stack import QuorumStack, insert, load_server, numbers
from tests.support.servers import DEFAULT, MAJORS_IN_TURN, MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import Cause


@pytest.fixture
def server(make_server: MakeServer, request: pytest.FixtureRequest) -> LocalServer:
    """Its checkpoints remove all WAL that no slot keeps, and a slot keeps little."""
    major = getattr(request, "param", DEFAULT)
    kept: dict[str, Any] = {"wal_keep_size" if major >= 13 else "wal_keep_segments": "0"}
    if major >= 13:
        kept["max_slot_wal_keep_size"] = "1MB"
    kept["allow_system_table_mods"] = "on"  # for a lock on a view
    return load_server(
        make_server, major, small=True, fsync="off", min_wal_size="2MB", max_wal_size="2MB", **kept
    )


def remove_wal(stack: QuorumStack) -> None:
    """All WAL so far, except what a slot keeps."""
    stack.make_wal(8)
    stack.ask("CHECKPOINT")


def commits(stack: QuorumStack) -> None:
    """Commits wait for the quorum, and return."""
    stack.attach()
    insert(stack.server, 1)
    assert 1 in numbers(stack.server)


@pytest.mark.parametrize("server", MAJORS_IN_TURN, indirect=True)
def test_a_checkpoint_before_the_slot_is_reserved_leaves_a_new_quorum_its_wal(server, tmp_path):
    """The proposer waits for the lock where it looks for its slot."""
    with QuorumStack(tmp_path, server) as stack:
        stack.start(*stack.names)
        with psycopg.connect(server.dsn()) as locker:
            # LOCK would lock the tables of the view, too, which a session reads when it starts.
            locker.execute("ALTER VIEW pg_catalog.pg_replication_slots SET (security_barrier)")
            stack.start("proposer")
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            wait_for(lambda: stack.ask(waiting) == [(1,)], 30, f"it waits: {stack.logs()}")
            remove_wal(stack)
            locker.rollback()
        commits(stack)
        log = stack.log("proposer").read_text()
        assert log.count("elected") == 1, log


@pytest.mark.parametrize("server", MAJORS_IN_TURN, indirect=True)
def test_a_quorum_without_a_byte_begins_again_where_its_server_has_wal(server, tmp_path):
    """Its first proposer was elected, and ended before it had sent anything."""
    with QuorumStack(tmp_path, server) as stack:
        stack.start(*stack.names)
        _end_before_the_first_byte(stack)
        _lose_the_slot(stack)
        remove_wal(stack)
        stack.start("proposer")
        commits(stack)


def test_a_quorum_without_a_byte_that_commits_wait_for_skips_no_wal(server, tmp_path):
    """A commit that waits would return, and no safekeeper would have it."""
    with QuorumStack(tmp_path, server) as stack:
        stack.start(*stack.names)
        _end_before_the_first_byte(stack)
        stack.ask("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (tuskline_quorum)'")
        stack.ask("SELECT pg_reload_conf()")
        _lose_the_slot(stack)
        remove_wal(stack)
        stack.start("proposer")
        assert stack.processes["proposer"].wait(timeout=30) == Cause.SLOT, stack.logs()
        # Released, it begins again.
        stack.ask("ALTER SYSTEM RESET synchronous_standby_names")
        stack.ask("SELECT pg_reload_conf()")
        stack.start("proposer")
        commits(stack)


def _end_before_the_first_byte(stack: QuorumStack) -> None:
    stack.start_mortal("proposer", "proposer-SendWal")
    assert stack.processes["proposer"].wait(timeout=30) == -9, stack.logs()
    assert stack.ask("SELECT count(*) FROM pg_replication_slots WHERE restart_lsn > '0/0'") == [
        (1,)
    ]


def _lose_the_slot(stack: QuorumStack) -> None:
    """By hand before 13; a checkpoint does it where `max_slot_wal_keep_size` is small."""
    if stack.server.installation.major < 13:
        stack.ask("SELECT pg_drop_replication_slot('tuskline_safekeepers')")
        return
    remove_wal(stack)
    assert stack.ask("SELECT wal_status FROM pg_replication_slots") == [("lost",)]
