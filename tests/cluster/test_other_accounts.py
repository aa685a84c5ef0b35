"""Another account of the machine at each port of services without TLS: refused, and nothing is read, changed or lost."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.support.http_service import served
from tests.support.log_entries import SCHEMAS, EntryMaker, append_to
from tests.support.other_account import needs_root, through_nobody
from tests.support.tls_safekeeper import GREETING, Conversation
from walsender_bridge.change_log.client import LogClient, ReplicaClient
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.errors import (
    ConfigError,
    ConnectionFailedError,
    PrivilegeError,
    UnavailableError,
)
from walsender_bridge.observability import metrics
from walsender_bridge.observability.observation import Observation
from walsender_bridge.observability.scrape_token import ScrapeToken
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.safekeeper.driver import SafekeeperDriver
from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings

pytestmark = needs_root


class PlainLog:
    """A log server and a repository on loopback without TLS, with one entry in the stream `shop`."""

    def __init__(self, folder: Path) -> None:
        self.log_server = ReplicaServer(folder / "log-server", "127.0.0.1:0")
        self.repository = RepositoryServer(
            folder / "log", "127.0.0.1:0", log_servers=[self.log_server.address], tick=0.02
        )
        self.repository.start()
        maker = EntryMaker()
        with self.log() as log:
            log.create_stream("shop")
            with log.open_writer("shop") as writer:
                writer.send([maker.whole()], schemas=list(SCHEMAS.values()))
                assert writer.next_ack(10) is not None
            log.barrier({"shop": maker.end_lsn}, 10)

    def log(self) -> LogClient:
        return LogClient(self.repository.address, timeout=10)

    def everything(self) -> object:
        with self.log() as log, ReplicaClient(self.log_server.address) as replica:
            entries = [bytes(each.data) for each in replica.read("shop", 1, 2)]
            return log.status(), replica.stream_status("shop"), entries

    def stop(self) -> None:
        self.repository.stop()
        self.log_server.stop()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[PlainLog]:
    found = PlainLog(tmp_path)
    yield found
    found.stop()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_37_another_account_gets_no_answer_of_the_log(log: PlainLog) -> None:
    before = log.everything()
    with (
        through_nobody(port_of(log.repository.address)) as repository,
        through_nobody(port_of(log.log_server.address)) as log_server,
        LogClient(f"grpc://127.0.0.1:{repository}", timeout=10) as client,
        ReplicaClient(f"grpc://127.0.0.1:{log_server}", timeout=10) as replica,
    ):
        for call in (
            client.status,
            lambda: client.create_stream("mine"),
            lambda: client.writer_term("shop"),
            lambda: replica.stream_status("shop"),
            lambda: [*replica.read("shop", 1, 2)],
            lambda: append_to(replica, "shop", 1 << 30),
        ):
            # Its connection is ended a moment after the first answer; a call that this meets has no other.
            with pytest.raises((PrivilegeError, UnavailableError)) as caught:
                call()
            if isinstance(caught.value, UnavailableError):
                with pytest.raises(PrivilegeError):
                    call()
    assert log.everything() == before


def test_38_a_crowd_of_another_account_takes_no_connection_from_others(log: PlainLog) -> None:
    """Its connections are ended, and none is counted among those of which the oldest would make room."""
    port = port_of(log.log_server.address)
    with (
        ReplicaClient(log.log_server.address, timeout=10) as idle,
        through_nobody(port) as nobody,
        contextlib.ExitStack() as crowd,
    ):
        idle.stream_status("shop")
        strangers = [
            crowd.enter_context(socket.create_connection(("127.0.0.1", nobody))) for _ in range(50)
        ]
        for each in strangers:
            each.settimeout(20)
            with contextlib.suppress(ConnectionError):
                while each.recv(4096):
                    pass
        idle.stream_status("shop")


def test_37_another_account_takes_no_part_in_an_election(tmp_path: Path) -> None:
    driver = SafekeeperDriver(SafekeeperSettings(tmp_path, "127.0.0.1", 0, tmp_path / "positions"))
    running = threading.Thread(target=driver.run)
    running.start()
    vote = m.Vote(m.NodeId(1 << 40, 2), m.Purpose.ATTACH, 1, Configuration(1, frozenset({1})))
    try:
        before = driver.core.control
        with through_nobody(driver.port) as nobody:
            for message in (GREETING, vote):
                talk = Conversation(nobody, None)
                with contextlib.closing(talk), pytest.raises(ConnectionFailedError):
                    talk.ask(message)
        assert driver.core.control == before
        with contextlib.closing(Conversation(driver.port, None)) as own:
            assert isinstance(own.ask(GREETING), m.SafekeeperGreeting)
    finally:
        driver.stop()
        running.join()


# -- metrics ----------------------------------------------------------------------------------------


class Observations:
    def latest(self) -> Observation:
        return Observation(time.time(), None, [], [], None, None)


def get(port: int, path: str, token: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Authorization": token} if token else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_37_metrics_are_read_by_another_account_with_a_token_alone(tmp_path: Path) -> None:
    token, other = "0123456789abcdef-first", "0123456789abcdef-second"
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(f"{token}\n")
    observations = cast("metrics.SharedObservations", Observations())
    with (
        metrics.Endpoint(("127.0.0.1", 0), observations, token=ScrapeToken(file)) as server,
        served(server),
        through_nobody(server.server_port) as nobody,
    ):
        assert get(server.server_port, "/metrics")[0] == 200
        for path in ("/metrics", "/readyz", "/healthz"):
            code, body = get(nobody, path)
            assert code == 403
            assert "own account" in json.loads(body)["error"]
            for wrong in (
                other,
                f"Bearer {other}",
                f"Bearer {token[:-1]}",
                f"Basic {token}",
                "Bearer",
            ):
                code, body = get(nobody, path, wrong)
                assert code == 403
                assert token not in body
        assert get(nobody, "/metrics", f"Bearer {token}")[0] == 200
        # Replaced while it runs; one that others may read counts no longer.
        file.write_text(other)
        assert get(nobody, "/metrics", f"Bearer {token}")[0] == 403
        assert get(nobody, "/metrics", f"bearer {other}")[0] == 200
        file.chmod(0o644)
        assert get(nobody, "/metrics", f"Bearer {other}")[0] == 403


@pytest.mark.parametrize(
    ("mode", "content", "said"),
    [
        (0o644, "0" * 32, "mode 0644"),
        (0o600, "short", "16 or more"),
        (0o620, "0" * 32, "mode 0620"),
    ],
)
def test_a_token_that_others_know_is_refused(
    tmp_path: Path, mode: int, content: str, said: str
) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=said) as caught:
        ScrapeToken(file)
    assert content not in str(caught.value)
    assert caught.value.where == str(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        ScrapeToken(tmp_path / "none")
