"""Files that are removed or moved while they are open: nothing is acknowledged into what no restart finds, and they are named."""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.support.child import start_child
from tests.support.log_entries import SCHEMAS, EntryMaker
from tests.support.machines import Machine
from tests.support.parts_config import configuration
from tests.support.waiting import wait_for
from walsender_bridge.change_log.replica import identity
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.change_log.repository.core import Created, StreamCreated
from walsender_bridge.change_log.repository.store import RepositoryStore
from walsender_bridge.cli.doctor import of_log
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import Cause, UnavailableError
from walsender_bridge.observability.observation import Observer
from walsender_bridge.runtime.supervisor import read_states


@pytest.fixture
def replica(tmp_path: Path) -> HostedReplica:
    replica = HostedReplica(tmp_path / "s")
    replica.create("s", "log")
    return replica


@pytest.mark.parametrize("replaced", [False, True])
def test_an_entry_in_a_lost_file_is_not_acknowledged(
    replica: HostedReplica, *, replaced: bool
) -> None:
    make = EntryMaker()
    session, _ = replica.open_writer(1)
    replica.append(session, [make.whole()], [*SCHEMAS.values()], None, 2**64 - 1)
    away = replica.folder.rename(replica.folder.with_name("away"))
    if replaced:
        shutil.copytree(away, replica.folder)
    with pytest.raises(UnavailableError, match="not the one that is open"):
        replica.append(session, [make.whole()], [], None, 2**64 - 1)
    report = replica.report("k")
    assert (report is not None) == replaced
    # From what is there now, without the entry.
    assert report is None or replica.status().end_offset == 2
    replica.close()


def test_a_replica_without_files_reports_nothing_also_while_idle(replica: HostedReplica) -> None:
    away = replica.folder.with_name("away")
    assert replica.report("k") is not None
    replica.folder.rename(away)
    assert replica.report("k") is None
    away.rename(replica.folder)
    assert replica.report("k") is not None
    replica.close()


def test_a_log_server_without_its_directory_does_not_report(tmp_path: Path) -> None:
    server = ReplicaServer(tmp_path / "data", "127.0.0.1:0")
    try:
        assert server.report().log_server
        (tmp_path / "data").rename(tmp_path / "away")
        for also in (server.report, server.check_directory):
            with pytest.raises(UnavailableError, match="not the one that this log server has"):
                also()
        # Another one's directory is not its own.
        shutil.copytree(tmp_path / "away", tmp_path / "data")
        with pytest.raises(UnavailableError):
            server.report()
    finally:
        server.stop()


def test_the_process_of_a_log_server_ends_with_its_directory(tmp_path: Path) -> None:
    data_dir, log = tmp_path / "data", tmp_path / "log"
    settings = ReplicaServerSettings(data_dir, f"127.0.0.1:{free_port()}")
    process = start_child("walsender_bridge.change_log.log_server", settings, log=log)
    try:
        wait_for(lambda: "log server listening" in log.read_text(), 60, "the log server")
        shutil.rmtree(data_dir)
        assert process.wait(60) == Cause.UNAVAILABLE
    finally:
        process.kill()
        process.wait()
    assert "it was removed, moved or replaced" in log.read_text()
    assert not data_dir.exists()


def test_a_machine_names_a_lost_log_server_until_it_is_back(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    settings = load_config(config)
    (log_server,), run_dir = settings.hosted_log_servers, settings.run_dir
    data_dir, away = log_server.data_dir, tmp_path / "away"
    name = f"log server {log_server.listen}"

    def runs() -> bool:
        return read_states(run_dir, "log-server").children["replicas"].state == "running"

    def failed() -> bool:
        return read_states(run_dir, "log-server").children["replicas"].failures > 1

    command = [sys.executable, "-m", "walsender_bridge.cli.app", "log-server", "run"]
    with (
        (tmp_path / "output").open("wb") as output,
        Observer(settings) as observer,
        subprocess.Popen([*command, "-c", str(config)], stderr=output) as process,
    ):
        try:
            wait_for((data_dir / "streams").exists, 60, "the log server")
            its = identity.load(data_dir)
            assert name not in observer.observe().errors
            data_dir.rename(away)
            wait_for(failed, 60, "no log server begins anew in an empty directory")
            assert not data_dir.exists()
            (problem,) = [each for each in observer.observe().problems if name in each]
            assert "the data directory is gone" in problem
            (found,) = [each for each in of_log(settings) if each.check == name]
            assert (found.where, found.cause) == (str(data_dir), Cause.UNAVAILABLE)
            away.rename(data_dir)
            wait_for(runs, 60, "it goes on")
            assert identity.load(data_dir) == its
            assert name not in observer.observe().errors
        finally:
            process.terminate()
    assert "the data directory is gone" in (tmp_path / "output").read_text()


@pytest.mark.parametrize("unmounted", [False, True])
def test_no_killed_supervisor_begins_anew_in_an_empty_directory(
    tmp_path: Path, *, unmounted: bool
) -> None:
    section = f'[[log_server]]\nlisten = "127.0.0.1:{free_port()}"\ndata_dir = "disk"\n'
    state = '[machine]\ndata_dir = "state"\nparts = ["log-server"]\n'
    machine = Machine(tmp_path / "machine", state + section)
    disk, away = machine.folder / "disk", machine.folder / "away"
    try:
        machine.up()
        wait_for((disk / "streams").exists, 60, "the log server")
        its = identity.load(disk)
        before = read_states(machine.run_dir, "up").children["log-server"]
        disk.rename(away)
        if unmounted:
            disk.mkdir()
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)

        def has_tried_again() -> bool:
            found = read_states(machine.run_dir, "log-server")
            return found.pid not in {0, before.pid} and found.children["replicas"].failures > 1

        wait_for(has_tried_again, 60, "`up` has started it again")
        assert [*disk.iterdir()] == [] if unmounted else not disk.exists()
        if unmounted:
            disk.rmdir()
        away.rename(disk)
        wait_for(lambda: machine.runs({"log-server", "log-server/replicas"}), 60, "it goes on")
        assert identity.load(disk) == its
    finally:
        machine.close()


def test_a_repository_writes_nothing_into_a_wal_that_was_removed(tmp_path: Path) -> None:
    """Records are in SQLite's -wal alone until it is checkpointed: without it, a restart would find an older state."""
    file = tmp_path / "repository.sqlite"
    wal, away = Path(f"{file}-wal"), tmp_path / "away"
    store = RepositoryStore(file)
    store.append(Created(its := str(uuid.uuid4())))
    wal.rename(away)
    with pytest.raises(UnavailableError, match="not the one that is open") as found:
        store.append(StreamCreated("shop", ("k",)))
    assert found.value.where == str(wal)
    away.rename(wal)
    store.append(StreamCreated("shop", ("k",)))
    store.close()
    again = RepositoryStore(file)
    assert (again.state.log_id, [*again.state.streams]) == (its, ["shop"])
    again.close()


def test_a_repository_writes_nothing_into_a_file_that_was_moved(tmp_path: Path) -> None:
    folder, away = tmp_path / "log", tmp_path / "away"
    folder.mkdir()
    store = RepositoryStore(folder / "repository.sqlite")
    folder.rename(away)
    with pytest.raises(UnavailableError, match="not the one that is open") as found:
        store.append(Created(str(uuid.uuid4())))
    assert "tuskline log rebuild" in found.value.repair
    away.rename(folder)
    its = str(uuid.uuid4())
    store.append(Created(its))
    store.close()
    again = RepositoryStore(folder / "repository.sqlite")
    assert again.state.log_id == its
    again.close()
