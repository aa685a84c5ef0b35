"""A quorum has an identity: safekeepers that lost their disks, and a second proposer, never stand in for it."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.support.attached import Attached
from tests.support.failover_stack import settings_of
from tests.support.quorum_stack import NAME, QuorumStack, insert, load_server, waits
from tests.support.quorum_up import follows, hosting, quorum, up
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import Cause, UnavailableError
from walsender_bridge.provisioning.release_record import decisions
from walsender_bridge.quorum.failover.run import FailoverRun
from walsender_bridge.quorum.proposer.handshake import greet
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream
from walsender_bridge.quorum.proposer.quorum_id_record import load_file
from walsender_bridge.quorum.safekeeper import control_file
from walsender_bridge.quorum.safekeeper.effects import ControlState
from walsender_bridge.runtime import record_file
from walsender_bridge.runtime.folder import FolderDisk
from walsender_bridge.runtime.sql import load

#: The table in which the id is recorded.
RECORD = next(
    text
    for text in load("flush/send").split(";")
    if "TABLE IF NOT EXISTS tuskline.provisioned" in text
)


@pytest.fixture
def server(make_server: MakeServer) -> LocalServer:
    return load_server(make_server, fsync="off")


@pytest.fixture
def stack(tmp_path: Path, server: LocalServer) -> Iterator[QuorumStack]:
    with QuorumStack(tmp_path, server) as stack:
        stack.start()
        yield stack
        print(stack.logs())


def term(stack: QuorumStack) -> int:
    """In which a quorum follows; 0: none does."""
    told = stack.status() if stack.status_file.exists() else {}
    return told["term"] if told.get("quorum") else 0


def ended(stack: QuorumStack) -> int:
    """The exit code of a proposer that is started now."""
    stack.start("proposer")
    return stack.processes.pop("proposer").wait(timeout=60)


def test_a_quorum_of_one_that_somebody_makes_of_a_lost_disk_is_not_ours(
    stack, server, make_server, tmp_path
):
    wait_for(lambda: term(stack), 60, "a quorum follows")
    insert(server, 1)
    stack.kill("safekeeper-2")
    shutil.rmtree(stack.data(2))
    stack.start("safekeeper-2")
    wait_for(lambda: stack.listens(2), 20, "it listens")
    beside = QuorumStack(tmp_path / "beside", server, 1)
    beside.folder.mkdir()
    beside.ports = [stack.ports[2]]
    with beside:
        # Nothing is required of the server, nor recorded in it: nothing keeps this one from a quorum of its own.
        for before in range(4):
            beside.start("proposer")
            wait_for(lambda: term(beside) > before, 60, "it is elected")  # noqa: B023
            beside.kill("proposer")
    stack.attach()
    with PrimaryStream.connect(server.dsn()) as asked:
        stranger = greet("127.0.0.1", stack.ports[2], asked.server_info())
    assert stranger is not None
    assert stranger.configuration.members == {stranger.safekeeper}
    assert stranger.node_id.term > term(stack)
    # Neither a session of the same proposer believes it, nor another proposer does.
    server.restart("immediate")
    wait_for(stack.is_sync, 60, "the proposer is back")
    insert(server, 2)
    stack.kill("proposer")
    stack.start("proposer")
    wait_for(stack.is_sync, 60, "another one leads")
    wait_for(lambda: "belongs to quorum" in stack.fault(2), 30, "it is refused by name")
    insert(server, 3)
    for number in (0, 1):
        stack.kill(f"safekeeper-{number}")
    waiting = waits(server, 4)
    # Nor is a failover elected by it alone.
    run = FailoverRun(settings_of(server.dsn(), "", stack.ports))
    with pytest.raises(UnavailableError, match="0 of 3 safekeepers answer as members"):
        run.plan()
    stack.start("safekeeper-0", "safekeeper-1")
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_second_quorum_is_not_formed_on_a_server_that_has_one(stack, server, tmp_path):
    stack.attach()
    insert(server, 1)
    beside = QuorumStack(tmp_path / "beside", server, 1)
    beside.folder.mkdir()
    with beside:
        beside.start("safekeeper-0")
        wait_for(lambda: beside.listens(0), 20, "it listens")
        assert ended(beside) == Cause.DIVERGED, beside.logs()
        assert "commits wait for a quorum, but the safekeepers here are empty" in beside.logs()
        assert beside.status()["phase"] == "ended"
    assert stack.ask("SELECT count(*) FROM pg_stat_replication WHERE application_name = %s", NAME)
    insert(server, 2)


def test_a_lock_on_the_record_that_waits_for_the_quorum_is_not_waited_for(stack, server):
    """REINDEX keeps its locks until its COMMIT returns, which only the proposer can bring about."""
    stack.attach()
    stack.ask("CREATE SCHEMA tuskline")
    stack.ask(RECORD)
    stack.kill("proposer")
    stack.start("proposer")
    wait_for(lambda: stack.ask("SELECT name FROM tuskline.provisioned"), 60, "the id is recorded")
    stack.kill("proposer")
    reindex = threading.Thread(
        target=stack.ask, args=["REINDEX TABLE tuskline.provisioned"], daemon=True
    )
    reindex.start()
    wait_for(lambda: waiting_for_quorum(stack), 30, "its COMMIT waits")
    ((pid, _),) = waiting_for_quorum(stack)

    # Where the bridge's file is lost, only the record says whose quorum it is.
    kept = stack.quorum_file.rename(stack.quorum_file.with_suffix(".kept"))
    stack.start("proposer")
    wait_for(lambda: "is locked" in str(error_of(stack)), 60, "it says so")
    assert f"process {pid} (REINDEX TABLE tuskline.provisioned)" in error_of(stack)["what"]
    assert f"SELECT pg_cancel_backend({pid})" in error_of(stack)["repair"]
    walsenders = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walsender' AND wait_event_type = 'Lock'"
    assert stack.ask(walsenders) == []
    stack.kill("proposer")

    kept.rename(stack.quorum_file)
    stack.start("proposer")
    reindex.join(60)
    assert not reindex.is_alive(), stack.logs()
    insert(server, 1)


@pytest.mark.parametrize(
    ("catalog", "said"),
    [("pg_class", "one of its catalogs is locked"), ("pg_proc", "due to lock timeout")],
)
def test_a_locked_catalog_is_named_and_tried_again(stack, server, catalog, said):
    """With the one no session starts, with the other no query does."""
    stack.attach()
    stack.kill("proposer")
    with psycopg.connect(server.dsn()) as holder:
        holder.execute(f"LOCK TABLE {catalog} IN ACCESS EXCLUSIVE MODE".encode())
        dsn = make_conninfo(server.dsn(), connect_timeout=2)
        stack.start_as("proposer", dsn=dsn)
        wait_for(lambda: said in str(error_of(stack)), 60, f"it says so: {stack.logs()}")
        assert error_of(stack)["code"] == "UNAVAILABLE"
        assert "pg_locks" in error_of(stack)["repair"]
        holder.rollback()
    wait_for(stack.is_sync, 60, "it goes on by itself")
    insert(server, 1)


def test_a_damaged_file_of_the_id_is_not_another_quorum(stack, server):
    stack.attach()
    known, file = load_file(stack.quorum_file), stack.quorum_file
    damaged = file.read_text().replace(f"{known.quorum:032x}", f"{known.quorum ^ 1 << 124:032x}")

    def flipped(content: str = damaged) -> None:
        stack.kill("proposer")
        file.write_text(content)

    # The server does not know it: nobody but the safekeepers does, and somebody has to say that they may be asked.
    flipped()
    assert ended(stack) == Cause.CORRUPT
    assert "remove the file while the safekeepers" in error_of(stack)["repair"]
    file.unlink()
    stack.start("proposer")
    wait_for(stack.is_sync, 60, "the safekeepers know the id")
    insert(server, 1)
    assert load_file(file) == known
    # The server knows it.
    stack.ask("CREATE SCHEMA tuskline")
    stack.ask(RECORD)
    stack.kill("proposer")
    stack.start("proposer")
    wait_for(lambda: stack.ask("SELECT name FROM tuskline.provisioned"), 60, "the id is recorded")
    flipped()
    stack.start("proposer")
    wait_for(stack.is_sync, 60, "it goes on by itself")
    insert(server, 2)
    wait_for(lambda: file.read_text() != damaged, 20, "the file is written again")
    assert load_file(file) == known
    assert file.with_name(f"{file.name}.corrupt-1").read_text() == damaged
    # A file of an earlier release has no checksum; what it says is a way out, too.
    without = json.loads(damaged)
    del without["crc32c"]
    flipped(json.dumps(without))
    assert ended(stack) == Cause.DIVERGED
    assert f"if {file} alone is wrong, remove it" in error_of(stack)["repair"]
    file.unlink()
    stack.start("proposer")
    wait_for(stack.is_sync, 60, "the server knows the id")
    insert(server, 3)


def test_a_bridge_that_cannot_write_the_id_down_goes_on_with_the_server_s(stack, server):
    """Its disk is full, or the file cannot be read: each session ended as soon as it was elected, and the next one began."""
    stack.attach()
    stack.ask("CREATE SCHEMA tuskline")
    stack.ask(RECORD)
    stack.kill("proposer")
    stack.start("proposer")
    wait_for(lambda: stack.ask("SELECT name FROM tuskline.provisioned"), 60, "the id is recorded")
    stack.kill("proposer")
    stack.quorum_file.unlink()
    stack.quorum_file.mkdir()
    stack.start("proposer")
    wait_for(lambda: term(stack), 60, "a quorum follows")
    elected = term(stack)
    for number in range(20):
        insert(server, number)
        time.sleep(0.2)
    assert term(stack) == elected, "nobody ends it"
    assert stack.is_sync()
    stack.quorum_file.rmdir()
    stack.kill("proposer")
    stack.start("proposer")
    wait_for(stack.quorum_file.is_file, 60, "it is written again")


def waiting_for_quorum(stack: QuorumStack) -> list[tuple[int, str]]:
    return stack.ask("SELECT pid, query FROM pg_stat_activity WHERE wait_event = 'SyncRep'")


def error_of(stack: QuorumStack) -> dict[str, str]:
    """Why no session of the proposer goes on."""
    return stack.status().get("error") or {}


def test_safekeepers_from_before_there_were_ids_are_given_one(stack, server):
    stack.attach()
    insert(server, 1)
    for name in list(stack.processes):
        stack.kill(name)
    stack.quorum_file.unlink()
    for number in range(3):
        disk = FolderDisk(stack.data(number) / "control")
        record = control_file.to_record(held(stack, number))
        del record["configuration"]["quorum"]
        record_file.replace(disk, "control", record_file.pack(control_file.MAGIC, 1, record))
    stack.start()
    wait_for(stack.is_sync, 60, "they are a quorum still")
    insert(server, 2)
    known = load_file(stack.quorum_file)
    assert known.formed
    wait_for(
        lambda: {held(stack, n).configuration.quorum for n in range(3)} == {known.quorum},
        20,
        "all have the id",
    )


def held(stack: QuorumStack, number: int) -> ControlState:
    """What a safekeeper has promised."""
    found = control_file.read(FolderDisk(stack.data(number) / "control"))
    assert found is not None
    return found[1]


@pytest.mark.timeout(600)
def test_safekeepers_that_come_back_empty_are_refused_until_they_are_given_up(
    tmp_path, server: LocalServer
):
    with hosting(tmp_path, server, 3) as tuskline:
        _emptied(tuskline, server, tmp_path)


def named(quorum_id: int, ill: list[str]) -> bool:
    """Whether the quorum that is missing is told first of all, with what to do."""
    return (
        bool(ill)
        and f"{quorum_id:032x}" in ill[0]
        and "restore the safekeepers' data directories" in ill[0]
    )


def _emptied(tuskline: Attached, server: LocalServer, tmp_path: Path) -> None:
    up(tuskline)
    insert(server, 1)
    settings = load_config(tuskline.config)
    known = load_file(settings.quorum_id_file)
    assert known.formed
    tuskline.stop_up()
    folder = settings.hosted_log_servers[0].data_dir
    away = [each for each in folder.iterdir() if each.name.startswith("safekeeper")]
    assert len(away) == 3, list(folder.iterdir())
    kept = tmp_path / "away"
    kept.mkdir()
    for each in away:
        each.rename(kept / each.name)
    # The bridge's disk is lost as well: the server knows.
    settings.quorum_id_file.unlink()
    tuskline.up()
    wait_for(lambda: named(known.quorum, quorum(tuskline)["problems"]), 60, "it says so, by name")
    assert tuskline.run("status").returncode == Cause.UNAVAILABLE
    assert f"{known.quorum:032x}" in tuskline.run("doctor").stdout
    assert tuskline.run("wait", "--quorum", "--timeout", "1").returncode == Cause.TIMEOUT
    waiting = waits(server, 2)
    given_up = ("quorum", "forget", "--yes", "--yes-i-may-lose-data")
    assert tuskline.run(*given_up).returncode == Cause.RUNNING
    tuskline.stop_up()
    assert tuskline.error(*given_up, code=Cause.USAGE)["repair"] == "tuskline quorum release"
    assert tuskline.json("quorum", "release", "--yes", "--yes-i-may-lose-data")["changed"]
    waiting.join(20)
    tuskline.json(*given_up)
    assert [each.action for each in decisions(settings.data_dir)][-2:] == ["release", "forget"]
    tuskline.up()
    wait_for(lambda: follows(tuskline), 60, "a new quorum follows")
    assert tuskline.json("quorum", "require")["changed"] is True
    insert(server, 3)
    assert load_file(settings.quorum_id_file).quorum not in {0, known.quorum}
