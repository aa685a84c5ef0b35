"""When an active bridge is cut off from the log, and when one that stands by could work."""

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.machine_files import machine
from tests.support.waiting import wait_for
from walsender_bridge.capture.status_record import CaptureStatus
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.repository.log_server_link import reaches
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.cli.bridge_reach import LogReach
from walsender_bridge.config import Config, load_config
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import (
    ConnectionFailedError,
    NotLeaderError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.runtime import status_file
from walsender_bridge.runtime.error_record import ErrorRecord

LOG = UnavailableError("1 of 3 replicas can be written, and 2 are needed")
SERVER = ConnectionFailedError("connection refused")


def configured(folder: Path, more: str = "") -> Config:
    path = folder / "tuskline.toml"
    path.write_text(machine("bridge") + '[[source]]\nname = "bank"\ndsn = "dbname=bank"\n' + more)
    return load_config(path)


class Captures:
    """Two captures, whose status files are written by the test, on the test's clock."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.settings = configured(folder)
        self.reach = LogReach(self.settings, 10.0, lambda: self.now)

    def say(self, number: int, state: str, error: TusklineError | None = None) -> None:
        source = self.settings.source[number]
        record = None if error is None else ErrorRecord.of(error)
        path = self.settings.capture_status(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        status_file.write(path, CaptureStatus(source=source.name, state=state, error=record))

    def after(self, seconds: float) -> bool:
        self.now += seconds
        return self.reach.is_cut_off()


@pytest.fixture
def captures(tmp_path: Path) -> Captures:
    return Captures(tmp_path)


@pytest.mark.parametrize("error", [LOG, NotLeaderError("this repository does not lead")])
def test_25_captures_without_the_log_are_cut_off_after_a_while(
    captures: Captures, error: TusklineError
) -> None:
    assert not captures.after(0)
    for number in (0, 1):
        captures.say(number, "waiting", error)
    assert not captures.after(1)
    assert not captures.after(9)
    for number in (0, 1):
        captures.say(number, "connecting")
    assert captures.after(1), "an attempt is no success"
    captures.reach.begin()
    assert not captures.after(1), "it was active for less"


@pytest.mark.parametrize(
    "first", [("streaming", None), ("waiting", SERVER)], ids=["streams", "lacks its server"]
)
def test_25_a_bridge_is_not_cut_off_from_the_log_while_a_capture_has_it(
    captures: Captures, first: tuple[str, TusklineError | None]
) -> None:
    captures.say(0, *first)
    captures.say(1, "waiting", LOG)
    assert not captures.after(1)
    assert not captures.after(20)
    captures.say(0, "waiting", LOG)
    assert not captures.after(1), "only since now"
    assert captures.after(10)


def test_25_who_reaches_the_log_servers_and_the_repository_could_work(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [ReplicaServer(tmp_path / name, "127.0.0.1:0") for name in "ab"]
        stack.callback(servers[0].stop)
        second = stack.enter_context(ExitStack())
        second.callback(servers[1].stop)
        listens = [each.address.removeprefix("grpc://") for each in servers]
        log = RepositoryServer(
            tmp_path / "log",
            f"127.0.0.1:{free_port()}",
            log_servers=listens,
            replication=ReplicationPolicy(2, 2, 3.0),
            tick=0.02,
        )
        log.start()
        stack.callback(log.stop)
        address = log.address.removeprefix("grpc://")
        reach = LogReach(configured(tmp_path, f'[log]\nlisten = "{address}"\n'), 10.0)
        assert not reach.reaches(), "its streams are not there"
        with LogClient(log.address) as client:
            for name in ("shop", "bank"):
                client.create_stream(name)
        assert reach.reaches()
        assert reaches(listens, 2, None)
        assert not log.is_cut_off()
        second.close()
        assert not reach.reaches()
        assert not reaches(listens, 2, None)
        assert reaches(listens, 1, None)
        wait_for(log.is_cut_off, 30, "too few log servers answer")
        # As if this process had been suspended for a minute.
        log._reached_at = log._looked_at = time.monotonic() - 60
        assert not log.is_cut_off(), "nobody could answer it meanwhile"
        wait_for(log.is_cut_off, 30, "nobody has answered since")
