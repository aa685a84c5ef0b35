"""The repository's thread outlives its own faults: it goes on from the disk, or ends the process."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.capture_stack import ChangeLog
from tests.support.log_entries import SCHEMAS, EntryMaker
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient, ReplicaClient
from walsender_bridge.errors import UnavailableError

STREAM = "shop"


def test_a_step_that_fails_goes_on_from_what_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = EntryMaker()
    with ChangeLog(tmp_path) as log, LogClient(log.address) as client:
        address = wait_for(lambda: _stream(client), 30, "the stream")
        with (
            ReplicaClient(address) as replica,
            replica.open_writer(STREAM, client.writer_term(STREAM)) as writer,
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


def test_a_clock_that_leaps_ends_no_lease_and_trims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = EntryMaker()
    real = time.time
    with ChangeLog(tmp_path) as log, LogClient(log.address) as client:
        address = wait_for(lambda: _stream(client), 30, "the stream")
        with (
            ReplicaClient(address) as replica,
            replica.open_writer(STREAM, client.writer_term(STREAM)) as writer,
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


def _stream(client: LogClient) -> str | None:
    try:
        return client.create_stream(STREAM).address
    except UnavailableError:
        return None


def test_a_repository_that_cannot_be_read_any_more_ends(tmp_path: Path) -> None:
    """A thread that only seemed to live would commit nothing, for ever; the supervisor starts another."""
    script = """
import sys, threading
from pathlib import Path
from walsender_bridge.change_log.repository_service import RepositoryServer
server = RepositoryServer(Path(sys.argv[1]), "127.0.0.1:0", keepers=["grpc://127.0.0.1:1"])
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
    assert "the repository cannot be read" in ended.stdout + ended.stderr
