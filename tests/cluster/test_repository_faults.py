"""The repository's thread outlives its own faults: it goes on from the disk, or ends the process."""

import json
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.capture_stack import ChangeLog
from tests.support.log_entries import SCHEMAS, EntryMaker
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient, StreamCut
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.change_log.repository.store import RepositoryStore
from walsender_bridge.errors import (
    DeadlineError,
    DivergedError,
    UnavailableError,
)

STREAM = "shop"


def test_a_step_that_fails_goes_on_from_what_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = EntryMaker()
    with ChangeLog(tmp_path) as log, LogClient(log.address) as client:
        wait_for(lambda: _stream(client), 30, "the stream")
        with (
            client.open_writer(STREAM) as writer,
        ):
            writer.send([make.whole()], schemas=list(SCHEMAS.values()))
            first = client.barrier({STREAM: make.end_lsn}, 30)
            repository = log.repository
            assert repository is not None
            loads = 0
            reload = repository._store.reload

            def counted() -> None:
                nonlocal loads
                loads += 1
                reload()

            monkeypatch.setattr(repository._store, "reload", counted)
            before = repository._state
            with repository._changed:
                # What no code foresees: the state in memory is not what it should be.
                before.streams[STREAM] = None  # type: ignore[assignment]
            writer.send([make.whole()])
            wait_for(lambda: loads, 30, "the thread takes the state from the disk")
            second = client.barrier({STREAM: make.end_lsn}, 30)
            assert second > first
            assert repository._state is not before
            cut = client.status().streams[STREAM]
            assert (cut.end_offset, cut.last_end_lsn) == (3, make.end_lsn)


def test_whoever_looks_while_a_record_is_kept_sees_a_whole_state(tmp_path: Path) -> None:
    """A look in between once loaded the state a second time, and counted the records wrongly ever after."""
    done = threading.Event()
    with (
        ChangeLog(tmp_path) as log,
        LogClient(log.address) as client,
        ThreadPoolExecutor(3) as others,
    ):
        repository = log.repository
        assert repository is not None

        def look() -> None:
            while not done.is_set():
                assert len(repository._state.consumers) <= 7

        looks = [others.submit(look) for _ in range(3)]
        try:
            for number in range(200):
                client.register_consumer(f"lake {number % 7}", None, 60.0)
        finally:
            done.set()
        for each in looks:
            each.result()


def test_a_clock_that_leaps_ends_no_lease_and_trims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = EntryMaker()
    real = time.time
    with ChangeLog(tmp_path) as log, LogClient(log.address) as client:
        wait_for(lambda: _stream(client), 30, "the stream")
        with (
            client.open_writer(STREAM) as writer,
        ):
            writer.send([make.whole()], schemas=list(SCHEMAS.values()))
            client.register_consumer("lake", client.barrier({STREAM: make.end_lsn}, 30), 86_400.0)
            repository = log.repository
            assert repository is not None
            until = repository._state.consumers["lake"].until
            # The machine's clock is set, or a virtual machine is resumed.
            monkeypatch.setattr(time, "time", lambda: real() + 8 * 86_400.0)
            for _ in range(3):
                writer.send([make.whole()])
                client.barrier({STREAM: make.end_lsn}, 30)
            with repository._changed:
                repository._trim_at = 0.0
            looked = repository._trim_at
            wait_for(lambda: repository._trim_at > looked, 30, "a look at what can be trimmed")
            assert repository._state.consumers["lake"].until == until
            assert repository._state.trim_limit(STREAM, repository._clock.now()) == 2
            assert client.status().streams[STREAM].low_offset == 1
            # What comes after it is counted by the steady time, too.
            client.register_consumer("other", None, 60.0)
            assert repository._state.consumers["other"].until < real() + 3600


def _roll_back(
    log: ChangeLog, client: LogClient, make: EntryMaker, folder: Path, *, log_server: bool = True
) -> int:
    """The repository starts from a copy that is older than the last entry; the LSN up to which the copy has the log.

    `log_server`: whether it runs then.
    """
    write(client, make)
    log.stop_repository()
    shutil.copytree(folder / "repository", folder / "copy")
    log.start_repository()
    copied = make.end_lsn
    write(client, make)
    log.stop_repository()
    if not log_server:
        log.kill_log_server()
    shutil.rmtree(folder / "repository")
    shutil.copytree(folder / "copy", folder / "repository")
    log.start_repository()
    return copied


def test_a_repository_of_an_older_copy_is_told_and_issues_nothing(tmp_path: Path) -> None:
    make = EntryMaker()
    with ChangeLog(tmp_path) as log, LogClient(log.address) as client:
        _roll_back(log, client, make, tmp_path)
        fault = wait_for(lambda: client.status().faults.get(STREAM), 30, "the fault")
        assert isinstance(fault, DivergedError)
        assert "was never issued" in fault.what
        version = client.status().version
        # No version is issued a second time, not even for a barrier that asks for nothing.
        with pytest.raises(DeadlineError, match="was never issued"):
            client.barrier({}, 1.0)
        with pytest.raises(DeadlineError, match="was never issued"):
            client.barrier({STREAM: make.end_lsn}, 1.0)
        assert client.status().version == version


def test_a_repository_issues_nothing_before_its_log_server_was_heard(tmp_path: Path) -> None:
    """Until then nobody can tell that it is older than the log server's replica."""
    make = EntryMaker()
    with ChangeLog(tmp_path) as log, LogClient(log.address) as client:
        committed = _roll_back(log, client, make, tmp_path, log_server=False)
        version = client.status().version
        for positions in ({}, {STREAM: committed}):
            with pytest.raises(DeadlineError):
                client.barrier(positions, 1.0)
        with pytest.raises(UnavailableError, match="has not answered since the repository started"):
            client.raise_version(version + 5)
        assert client.status().version == version
        log.start_log_server()
        fault = wait_for(lambda: client.status().faults.get(STREAM), 30, "the fault")
        assert "was never issued" in fault.what
        assert client.status().version == version


def test_a_repository_that_fits_goes_on_when_its_log_server_was_heard(tmp_path: Path) -> None:
    make = EntryMaker()
    with ChangeLog(tmp_path) as log, LogClient(log.address) as client:
        write(client, make)
        log.stop_repository()
        log.kill_log_server()
        log.start_repository()
        version = client.status().version
        with pytest.raises(DeadlineError):
            client.barrier({}, 1.0)
        log.start_log_server()
        assert client.barrier({}, 30.0) == version + 1
        # Heard once is enough: it is the same history from then on.
        log.kill_log_server()
        assert client.barrier({STREAM: make.end_lsn}, 30.0) == version + 2


def test_a_repository_whose_disk_takes_nothing_is_every_streams_fault(tmp_path: Path) -> None:
    make = EntryMaker()
    with ChangeLog(tmp_path) as log, LogClient(log.address) as client:
        wait_for(lambda: _cut(client), 30, "the stream")
        repository = log.repository
        assert repository is not None
        with (
            client.open_writer(STREAM) as writer,
        ):
            with repository._changed:
                _database(repository).execute("PRAGMA query_only = 1")
            writer.send([make.whole()], schemas=list(SCHEMAS.values()))
            fault = wait_for(lambda: client.status().faults.get(STREAM), 30, "the fault")
        assert "could not write the repository" in fault.what
        with repository._changed:
            _database(repository).execute("PRAGMA query_only = 0")
        wait_for(lambda: not client.status().faults, 30, "the fault ends")


def test_a_log_server_with_another_id_is_told_and_gets_its_own_back(tmp_path: Path) -> None:
    make = EntryMaker()
    identity = tmp_path / "log-server" / "log-server.json"
    with ChangeLog(tmp_path) as log, LogClient(log.address) as client:
        write(client, make)
        log.kill_log_server()
        its = json.loads(identity.read_text())["log_server_id"]
        identity.write_text(json.dumps({"format": 1, "log_server_id": str(uuid.uuid4())}))
        log.start_log_server()
        fault = wait_for(lambda: client.status().faults.get(STREAM), 60, "the fault")
        assert its in fault.what
        # The way out, as it is told.
        log.kill_log_server()
        repair = fault.repair
        identity.write_text(repair[repair.index("{") : repair.index("}") + 1])
        log.start_log_server()
        wait_for(lambda: _answers(log), 60, "the log server answers")
        write(client, make)
        assert client.status().faults == {}


def test_a_log_server_and_its_copy_count_for_nothing_until_one_of_them_is_stopped(
    tmp_path: Path,
) -> None:
    make = EntryMaker()
    log_server = ReplicaServer(tmp_path / "log-server", "127.0.0.1:0")
    copied: ReplicaServer | None = None
    folder = tmp_path / "repository"
    repository = RepositoryServer(folder, "127.0.0.1:0", log_servers=[log_server.address])
    repository.start()
    try:
        with LogClient(repository.address) as client:
            write(client, make)
        repository.stop()
        log_server.stop()
        shutil.copytree(tmp_path / "log-server", tmp_path / "copy")
        log_server = ReplicaServer(tmp_path / "log-server", "127.0.0.1:0")
        copied = ReplicaServer(tmp_path / "copy", "127.0.0.1:0")
        log_servers = [log_server.address, copied.address]
        repository = RepositoryServer(folder, "127.0.0.1:0", log_servers=log_servers)
        repository.start()
        with LogClient(repository.address) as client:
            fault = wait_for(lambda: client.status().faults.get(STREAM), 30, "the fault")
            assert log_server.address in fault.what
            assert copied.address in fault.what
            with pytest.raises(DeadlineError):
                client.barrier({}, 1)
            held = _records(repository)
            time.sleep(1)
            assert _records(repository) == held, "nothing is recorded of either again and again"
            copied.stop()
            copied = None
            wait_for(lambda: not client.status().faults, 30, "the fault ends")
            write(client, make)
    finally:
        repository.stop()
        log_server.stop()
        if copied is not None:
            copied.stop()


def _database(repository: RepositoryServer) -> sqlite3.Connection:
    assert isinstance(repository._store, RepositoryStore)
    return repository._store._db


def _records(repository: RepositoryServer) -> int:
    with repository._changed:
        (count,) = _database(repository).execute("SELECT count(*) FROM record").fetchone()
    return int(count)


def test_a_clock_that_leapt_and_was_set_back_does_not_stop_trimming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = EntryMaker()
    real = time.time
    log_server = ReplicaServer(tmp_path / "log-server", "127.0.0.1:0")
    repository = RepositoryServer(
        tmp_path / "repository", "127.0.0.1:0", log_servers=[log_server.address], retention=0.5
    )
    repository.start()
    try:
        with LogClient(repository.address) as client:
            write(client, make)
            monkeypatch.setattr(time, "time", lambda: real() + 400 * 86_400.0)
            write(client, make)
            monkeypatch.setattr(time, "time", real)
            write(client, make)
            wait_for(
                lambda: client.status().streams[STREAM].low_offset == 4, 30, "all of it is trimmed"
            )
    finally:
        repository.stop()
        log_server.stop()


def write(client: LogClient, make: EntryMaker, seconds: float = 60) -> None:
    """One more transaction, committed."""
    wait_for(lambda: _cut(client), 30, "the stream")
    with (
        client.open_writer(STREAM) as writer,
    ):
        writer.send([make.whole()], schemas=list(SCHEMAS.values()))
        client.barrier({STREAM: make.end_lsn}, seconds)


def _answers(log: ChangeLog) -> bool:
    try:
        return bool(log.replica_status())
    except UnavailableError:
        return False


def _cut(client: LogClient) -> StreamCut | None:
    try:
        return client.create_stream(STREAM)
    except UnavailableError:
        return None


def _stream(client: LogClient) -> str | None:
    try:
        return client.create_stream(STREAM).addresses[0]
    except UnavailableError:
        return None


def test_a_repository_that_cannot_be_read_any_more_ends(tmp_path: Path) -> None:
    """A thread that only seemed to live would commit nothing, for ever; the supervisor starts another."""
    script = """
import sys, threading
from pathlib import Path
from walsender_bridge.change_log.repository.service import RepositoryServer
server = RepositoryServer(Path(sys.argv[1]), "127.0.0.1:0", log_servers=["grpc://127.0.0.1:1"])
server.start()
def broken(): raise ValueError("record 7 is missing")
server._store._load = broken
with server._changed:
    server._store._state = None
threading.Event().wait()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "repository")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 12, ended.stderr[-2000:]
    assert "could not read the repository" in ended.stdout + ended.stderr
