"""`tuskline doctor` on a server whose commits wait for a quorum: what it refuses, and that its SQL repairs it."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.cluster.test_doctor import findings
from tests.support.attached import run_script
from tests.support.quorum_operator import commit, configured, hanging, names, streams
from tests.support.quorum_stack import NAME, QuorumStack, load_server
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.config import load_config
from walsender_bridge.errors import Cause
from walsender_bridge.observability.quorum_server import QuorumServer
from walsender_bridge.runtime import shared_files

SECRET = "planted-secret-77c1"


@pytest.fixture
def stack(tmp_path: Path, make_server: MakeServer) -> Iterator[QuorumStack]:
    with QuorumStack(tmp_path, load_server(make_server, client=True)) as stack:
        stack.start()
        wait_for(lambda: streams(stack), 30, f"the quorum is there: {stack.logs()}")
        yield stack


def test_28_what_outvotes_the_proposer_or_hangs_is_refused_and_repaired_by_its_sql(tmp_path, stack):
    tuskline = configured(tmp_path, stack)
    # Ready, but commits do not wait yet.
    assert (
        "do not wait"
        in findings(tuskline.json("doctor"), "warning")["synchronous_standby_names"][0]
    )
    tuskline.json("init")
    assert tuskline.json("doctor")["errors"] == 0
    for statement in (
        f"ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 ({NAME}, other)'",
        "ALTER SYSTEM SET synchronous_commit = remote_apply",
        "ALTER ROLE client SET synchronous_commit = remote_apply",
        "SELECT pg_reload_conf()",
    ):
        stack.ask(statement)
    report = tuskline.json("doctor", "--fix-sql", code=Cause.SERVER_SETTING)
    errors = findings(report, "error")
    assert "other standbys can acknowledge instead" in errors["synchronous_standby_names"][0]
    assert len(errors["synchronous_commit"]) == 2
    error = tuskline.error("quorum", "require", code=Cause.SERVER_SETTING)
    assert "remote_apply" in error["what"]
    # What it prints puts the other one among those that have to answer; so that one is told to go.
    script = report["fix_sql"]
    assert f"FIRST 2 ({NAME}, other)" in script
    run_script(stack.server.dsn(), script.replace(f"FIRST 2 ({NAME}, other)", f"ANY 1 ({NAME})"))
    wait_for(lambda: names(stack) == f"ANY 1 ({NAME})", 10, "it was read")
    assert tuskline.json("doctor")["errors"] == 0
    commit(stack, 1)


def test_2_two_standbys_of_one_name_beside_the_quorum_are_red(tmp_path, stack, receive):
    """The server counts walsenders, not names: without the proposer two of one name answer in the quorum's place."""
    near = stack.server.dsn(application_name="near")
    receive(stack.server, near, tmp_path / "one", "--synchronous")
    tuskline = configured(tmp_path, stack)
    named(stack, "near")
    tuskline.json("init")
    assert names(stack) == "near"
    named(stack, f"ANY 2 (near, {NAME})")
    report = tuskline.json("doctor", code=Cause.SERVER_SETTING)
    assert (
        "other standbys can acknowledge instead"
        in findings(report, "error")["synchronous_standby_names"][0]
    )
    tuskline.json("quorum", "require", "--beside-standbys")
    assert names(stack) == f"FIRST 2 ({NAME}, near)"
    report = tuskline.json("doctor")
    assert "while it is attached" in findings(report, "warning")["synchronous_standby_names"][0]
    commit(stack, 1)
    receive(stack.server, near, tmp_path / "two", "--synchronous")
    wait_for(lambda: crowd(stack) == 2, 20, "the second one streams")
    report = tuskline.json("doctor", code=Cause.SERVER_SETTING)
    assert "2 walsenders are named 'near'" in findings(report, "error")["standbys"][0]
    error = tuskline.error("quorum", "require", "--beside-standbys", code=Cause.SERVER_SETTING)
    assert "2 walsenders" in error["what"]
    with psycopg.connect(stack.server.dsn(), autocommit=True) as connection:
        shown = QuorumServer(load_config(tuskline.config)).observe(connection)
    assert shown.required
    assert any("commits may return without a quorum" in each for each in shown.problems)
    # While the proposer is attached they do not answer in its place.
    for name in stack.names[:2]:
        stack.pause(name)
    (client,) = hanging(stack, 2)
    time.sleep(1)
    assert not client.done
    # No setting makes the server wait for a name that is not attached beside others.
    stack.kill("proposer")
    wait_for(lambda: client.done, 30, "it returns without a quorum")


def crowd(stack: QuorumStack) -> int:
    """How many walsenders of that name the server counts."""
    wanted = "SELECT count(*) FROM pg_stat_replication WHERE application_name = 'near' AND sync_priority > 0"
    return stack.ask(wanted)[0][0]


def named(stack: QuorumStack, value: str) -> None:
    """Set synchronous_standby_names."""
    stack.ask(f"ALTER SYSTEM SET synchronous_standby_names = '{value}'")
    stack.ask("SELECT pg_reload_conf()")
    wait_for(lambda: names(stack) == value, 10, "it was read")


def test_a_role_of_least_privilege_is_given_what_the_quorum_needs(tmp_path, stack):
    dsn = stack.server.dsn(user="tuskline_role", password=SECRET)
    tuskline = configured(tmp_path, stack, dsn)
    env = {"PGPASSWORD": str(conninfo_to_dict(stack.server.dsn())["password"])}
    made = tuskline.json("init", "--admin", "user=postgres", env=env)["created"]
    assert "membership of tuskline_role in pg_read_all_stats" in {row["created"] for row in made}
    assert names(stack) == f"ANY 1 ({NAME})"
    assert tuskline.json("doctor")["errors"] == 0
    assert tuskline.json("wait", "--quorum")["ready"] is True
    error = tuskline.error(
        "quorum", "release", "--yes", "--yes-i-may-lose-data", code=Cause.PRIVILEGE
    )
    assert "ALTER SYSTEM" in error["what"]
    assert SECRET not in str(error)
    # It was not done, so it is not recorded.
    assert tuskline.json("quorum", "show")["released"] is None
    tuskline.error("detach", code=Cause.PRIVILEGE)
    assert names(stack) == f"ANY 1 ({NAME})"
    tuskline.json("detach", "--admin", "user=postgres", env=env)
    assert names(stack) == ""


def test_a_server_that_waits_for_nobody_is_told(tmp_path, stack):
    tuskline = configured(tmp_path, stack)
    tuskline.json("init")
    assert stack.kill("proposer", 15) == 0
    stack.kill("safekeeper-0")
    hanging(stack, 1)
    report = tuskline.json("doctor", code=Cause.SERVER_SETTING)
    assert "no proposer is attached" in findings(report, "error")["proposer"][0]
    assert "does not answer" in findings(report, "warning")["safekeeper"][0]
    done = tuskline.run("down")
    assert "commits hang" in done.stderr
    stack.kill("safekeeper-1")
    report = tuskline.json("doctor", code=Cause.SERVER_SETTING)
    assert "1 of 3 safekeepers are usable" in findings(report, "error")["safekeeper"][0]


def test_19_safekeepers_of_another_server_are_named(tmp_path, stack, make_server):
    (tmp_path / "other").mkdir()
    # Servers of one major are copies of one cluster here, and have its system identifier.
    other = QuorumStack(tmp_path / "other", load_server(make_server, 18, client=True))
    other.ports = stack.ports
    tuskline = configured(tmp_path / "other", other)
    report = tuskline.json("doctor", code=Cause.DIVERGED)
    told = findings(report, "error")["safekeeper"]
    assert sum("system identifier" in what for what in told) == 3
    # The proposer refuses it by the same name, and nobody else is disturbed.
    with other:
        other.start("proposer")
        assert other.processes.pop("proposer").wait(30) == Cause.DIVERGED
        assert "other server" in other.log("proposer").read_text()
    wait_for(lambda: streams(stack), 10, "the right proposer stays")


def test_17_a_clone_on_the_same_timeline_is_refused_and_doctor_tells_it(
    tmp_path, stack, make_server
):
    stack.server.stop("fast")
    clone = make_server()
    shutil.rmtree(clone.data_dir)
    subprocess.run(["cp", "-Rp", stack.server.data_dir, clone.data_dir], check=True)
    clone.start()
    stack.server.start()
    wait_for(lambda: streams(stack), 30, "the proposer is back")
    for server, word, count in ((stack.server, "here", 100), (clone, "there", 200)):
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE TABLE {word} (number int)".encode())
            for number in range(count):
                connection.execute(f"INSERT INTO {word} VALUES (%s)".encode(), [number])
    wait_for(lambda: streams(stack), 30, "the quorum has it")
    stack.kill("proposer", 15)
    (tmp_path / "clone").mkdir()
    with QuorumStack(tmp_path / "clone", clone) as other:
        other.ports = stack.ports
        tuskline = configured(tmp_path / "clone", other)
        # LSNs, timelines, system identifier: doctor by itself has nothing against it.
        assert "safekeeper" not in findings(tuskline.json("doctor"), "error")
        other.start("proposer")
        assert other.processes.pop("proposer").wait(30) == Cause.DIVERGED
        told = load_config(tuskline.config)
        shared_files.prepare(told.run_dir)
        shutil.copy(other.status_file, told.proposer_status)
        report = tuskline.json("doctor", code=Cause.DIVERGED)
        assert "differs from the safekeepers' WAL" in findings(report, "error")["proposer"][0]
        shared_files.clear(told.run_dir, told.proposer_status.name)
    stack.start("proposer")
    wait_for(lambda: streams(stack), 30, "the right one goes on")
