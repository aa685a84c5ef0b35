"""What an operator does with a quorum: require it, wait for it, get out when it is lost, take it all back."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.support.attached import Attached, difference, server_state
from tests.support.quorum_operator import commit, configured, hanging, names, streams, waiting
from tests.support.quorum_stack import NAME, QuorumStack, load_server
from tests.support.servers import DEFAULT, MAJORS_IN_TURN, MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import Cause
from walsender_bridge.postgres.protocol.lsn import parse_lsn

NEEDED = f"ANY 1 ({NAME})"
RELEASE = ("quorum", "release", "--yes", "--yes-i-may-lose-data")


@pytest.fixture
def primary(make_server: MakeServer, request: pytest.FixtureRequest) -> LocalServer:
    major = getattr(request, "param", DEFAULT)
    return load_server(make_server, major, client=True, max_connections="32")


@pytest.fixture
def stack(tmp_path: Path, primary: LocalServer) -> Iterator[QuorumStack]:
    with QuorumStack(tmp_path, primary) as stack:
        stack.start()
        yield stack
        print(stack.logs())


@pytest.fixture
def tuskline(tmp_path: Path, stack: QuorumStack) -> Attached:
    return configured(tmp_path, stack)


@pytest.mark.parametrize("primary", MAJORS_IN_TURN, indirect=True)
def test_28_release_frees_hanging_commits_and_is_recorded_until_the_quorum_is_required_again(
    stack, tuskline
):
    wait_for(lambda: streams(stack), 30, "the quorum is there")
    tuskline.json("init")
    assert names(stack) == NEEDED
    commit(stack, 0)
    for name in stack.names[:2]:
        stack.kill(name)
    clients = hanging(stack, 1, 2, 3)
    # Nobody is there to be asked, and one answer is not two.
    tuskline.error("quorum", "release", code=Cause.USAGE)
    tuskline.error("quorum", "release", "--yes", code=Cause.USAGE)
    assert waiting(stack) == 3
    with ExitStack() as full:
        while fits(stack.server, full):
            pass
        told = tuskline.json(*RELEASE)
    assert "3 commits waited" in told["recorded"]
    wait_for(lambda: all(client.done for client in clients), 10, "they return")
    assert not [client.warnings for client in clients if client.warnings]
    assert names(stack) == ""
    assert "released the quorum" in tuskline.json("quorum", "show")["released"]
    commit(stack, 4)
    # Without a quorum it cannot be required again: nothing would return.
    error = tuskline.error("quorum", "require", "--timeout", "1", code=Cause.TIMEOUT)
    assert "commits would hang" in error["what"]
    assert tuskline.json("quorum", "show")["released"]
    for name in stack.names[:2]:
        stack.start(name)
    # A file that no proposer minds keeps no operator from it, either.
    record = load_config(tuskline.config).quorum_id_file
    record.write_bytes(b"damaged")
    told = tuskline.json("quorum", "require")
    assert (told["changed"], told["released"]) == (True, None)
    record.unlink()
    assert names(stack) == NEEDED
    commit(stack, 5)
    for name in stack.names[:2]:
        stack.pause(name)
    (client,) = hanging(stack, 6)
    for name in stack.names[:2]:
        stack.resume(name)
    wait_for(lambda: client.done, 20, "it returns with the quorum")
    # The last resort of docs/quorum-lost.md, when no connection can be had: the file, and a signal.
    for name in stack.names[:2]:
        stack.pause(name)
    (client,) = hanging(stack, 7)
    with (stack.server.data_dir / "postgresql.auto.conf").open("a") as file:
        file.write("synchronous_standby_names = ''\n")
    os.kill(stack.server.pid, signal.SIGHUP)
    wait_for(lambda: client.done, 20, "it returns")
    for name in stack.names[:2]:
        stack.resume(name)
    assert tuskline.json("quorum", "require")["changed"] is True
    assert names(stack) == NEEDED


def fits(server: LocalServer, full: ExitStack) -> bool:
    """Whether one more ordinary client is let in."""
    try:
        dsn = server.dsn(user="client", password="client")
        full.enter_context(psycopg.connect(dsn))
    except psycopg.OperationalError:
        return False
    return True


@pytest.mark.parametrize("primary", MAJORS_IN_TURN, indirect=True)
def test_18_the_gate_hides_commits_that_had_no_quorum_when_the_server_crashed(stack, tuskline):
    wait_for(lambda: streams(stack), 30, "the quorum is there")
    tuskline.json("init")
    assert tuskline.json("wait", "--quorum")["ready"] is True
    stack.pause("safekeeper-0")
    stack.pause("safekeeper-1")
    (client,) = hanging(stack, 1)
    stack.server.kill()
    stack.server.start()
    # PostgreSQL shows it; the gate is closed, whether the proposer is back yet or not.
    assert stack.ask("SELECT number FROM load") == [(1,)]
    assert not client.done
    error = tuskline.error("wait", "--quorum", "--timeout", "1.5", code=Cause.TIMEOUT)
    assert "not ready" in error["what"]
    stack.resume("safekeeper-0")
    state = tuskline.json("wait", "--quorum", "--timeout", "30")
    assert state["ready"] is True
    assert state["quorum_lsn"] >= state["wanted_lsn"]
    stack.resume("safekeeper-1")


def test_18_a_backend_that_crashes_closes_the_gate_too(stack, tuskline):
    wait_for(lambda: streams(stack), 30, "the quorum is there")
    tuskline.json("init")
    for name in stack.names[:2]:
        stack.pause(name)
    hanging(stack, 1)
    started = stack.ask("SELECT pg_postmaster_start_time()")
    with psycopg.connect(stack.server.dsn()) as connection:
        os.kill(connection.info.backend_pid, signal.SIGKILL)
        with contextlib.suppress(psycopg.OperationalError):
            connection.execute("SELECT 1")
    # It answers for a moment still, until the postmaster has heard of it.
    word = "all server processes terminated; reinitializing"
    wait_for(lambda: word in stack.server.log_tail(100), 20, "it recovers")
    wait_for(lambda: answers(stack), 20, "it has recovered")
    # The postmaster is the same, and yet there was a recovery.
    assert stack.ask("SELECT pg_postmaster_start_time()") == started
    assert stack.ask("SELECT number FROM load") == [(1,)]
    tuskline.error("wait", "--quorum", "--timeout", "1.5", code=Cause.TIMEOUT)
    for name in stack.names[:2]:
        stack.resume(name)
    assert tuskline.json("wait", "--quorum", "--timeout", "30")["ready"] is True


def answers(stack: QuorumStack) -> bool:
    try:
        return stack.ask("SELECT 1") == [(1,)]
    except psycopg.OperationalError:
        return False


@pytest.mark.parametrize("primary", MAJORS_IN_TURN, indirect=True)
def test_what_a_quorum_needs_is_made_and_taken_back(tmp_path, primary, receive):
    receive(primary, primary.dsn(application_name="Far away"), tmp_path / "far", "--synchronous")
    with psycopg.connect(primary.dsn(), autocommit=True) as connection:
        for statement in (
            "ALTER SYSTEM SET synchronous_standby_names = '\"Far away\"'",
            "SELECT pg_reload_conf()",
        ):
            connection.execute(statement.encode())
    with QuorumStack(tmp_path, primary) as stack:
        before = server_state(primary.dsn())
        tuskline = configured(tmp_path, stack)
        # Nobody runs the proposer: commits are not made to wait for it, and that is said.
        done = tuskline.run("init")
        assert done.returncode == 0, done.stderr
        assert "do not wait for the quorum yet" in done.stderr
        assert names(stack) == '"Far away"'
        stack.start()
        wait_for(lambda: streams(stack), 30, "the quorum is there")
        # Several walsenders of the other name could answer: that is accepted, or it goes.
        error = tuskline.error("quorum", "require", code=Cause.SERVER_SETTING)
        assert "Far away beside the quorum" in error["what"]
        assert names(stack) == '"Far away"'
        assert tuskline.json("quorum", "require", "--beside-standbys")["changed"] is True
        assert names(stack) == f'FIRST 2 ({NAME}, "Far away")'
        assert tuskline.json("quorum", "require", "--beside-standbys")["changed"] is False
        stack.kill("proposer")
        for name in stack.names:
            stack.kill(name)
        # Commits hang, and detach's own do not.
        began = time.monotonic()
        taken = {row["removed"] for row in tuskline.json("detach")["removed"]}
        assert time.monotonic() - began < 20
        assert {"setting synchronous_standby_names", "physical slot tuskline_safekeepers"} <= taken
        assert difference(before, server_state(primary.dsn())) == []


@pytest.mark.parametrize("mode", ["fast", pytest.param("smart", marks=pytest.mark.long)])
@pytest.mark.parametrize("lost", [False, True], ids=["quorum", "no quorum"])
def test_20_the_primary_s_shutdown_ends_promptly_with_a_quorum_and_without(
    stack, tuskline, mode, lost
):
    wait_for(lambda: streams(stack), 30, "the quorum is there")
    tuskline.json("init")
    commit(stack, 1)
    if lost:
        for name in stack.names[:2]:
            stack.pause(name)
        if mode == "fast":
            hanging(stack, 2)
    began = time.monotonic()
    stack.server.stop(mode)
    assert time.monotonic() - began < 10
    end = controlled_end(stack.server)
    if lost:
        for name in stack.names[:2]:
            stack.resume(name)
    else:
        # The shutdown's own checkpoint has a quorum: nothing of this server is on its disk alone.
        wait_for(lambda: has_committed(stack, end), 10, "it has all, or has noticed the end")
    stack.server.start()
    wait_for(stack.is_sync, 30, f"the proposer is back: {stack.logs()}")
    commit(stack, 3)


def has_committed(stack: QuorumStack, end: int) -> bool:
    """Whether the proposer says so, or that it leads no more: it does a few times a second."""
    said = stack.status()
    return said["phase"] != "leading" or parse_lsn(said["commit_lsn"]) >= end


def controlled_end(server: LocalServer) -> int:
    """The end of the WAL of a server that was shut down: its last record is a checkpoint."""
    done = subprocess.run(
        [server.installation.tool("pg_controldata"), server.data_dir],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    found = re.search(r"Latest checkpoint location:\s*(\S+)", done.stdout)
    assert found is not None
    assert "shut down" in done.stdout
    return parse_lsn(found[1])


def test_20_a_proposer_that_is_stopped_while_commits_hang_ends_and_the_next_frees_them(
    stack, tuskline
):
    wait_for(lambda: streams(stack), 30, "the quorum is there")
    tuskline.json("init")
    for name in stack.names[:2]:
        stack.pause(name)
    (client,) = hanging(stack, 1)
    assert stack.kill("proposer", signal.SIGTERM) == 0
    assert not client.done
    for name in stack.names[:2]:
        stack.resume(name)
    time.sleep(0.5)
    assert not client.done
    stack.start("proposer")
    wait_for(lambda: client.done, 20, "it returns")
    assert not client.warnings
