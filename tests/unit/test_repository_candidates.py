"""Several repositories of one log, without etcd: what leadership allows, what followers answer, and how clients find the leader."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.tls import HOSTS, Authority
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.repository import leadership
from walsender_bridge.change_log.repository.candidate import RepositoryCandidate
from walsender_bridge.change_log.repository.core import Repository
from walsender_bridge.change_log.repository.etcd import Etcd, EtcdSettings
from walsender_bridge.change_log.repository.leader_lease import not_leading
from walsender_bridge.change_log.repository.leadership import Leadership, Written, judge
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.change_log.repository.store import RepositoryStore
from walsender_bridge.change_log.repository_messages import RegisterConsumerRequest
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import ConfigError, NotLeaderError, UnavailableError, UnreachableError
from walsender_bridge.observability import log_problems
from walsender_bridge.runtime import steady_clock


def test_a_leader_answers_until_its_lease_can_end_counted_from_the_question() -> None:
    its = Leadership(7, 10.0, leadership.valid_until(100.0, 10.0))
    assert its.may_answer(108.9)
    assert not its.may_answer(109.1), "another machine's clock may run faster"
    renewed = its.renewed(103.0, 10.0)
    assert renewed.may_answer(111.9)
    assert not renewed.may_answer(112.1)
    assert renewed.renewed(101.0, 10.0).until == renewed.until, "an answer that was overtaken"
    assert its.pause < 10.0 / 3


@pytest.mark.parametrize(
    ("leads", "stored", "expected"),
    [
        (None, None, Written.FENCED),
        (8, None, Written.FENCED),
        (8, b"own", Written.FENCED),
        (7, b"own", Written.YES),
        (7, b"other", Written.TAKEN),
        (7, None, Written.TAKEN),
    ],
)
def test_what_a_refused_write_means(
    leads: int | None, stored: bytes | None, expected: Written
) -> None:
    assert judge(7, leads, stored, b"own") is expected


def test_a_key_to_etcd_that_other_accounts_can_read_is_refused(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("repository", hosts=HOSTS)
    settings = EtcdSettings((f"127.0.0.1:{free_port()}",), tls=files)
    Etcd(settings, 1.0).close()
    files.key.chmod(0o644)
    with pytest.raises(ConfigError, match="accessible to other accounts") as caught:
        Etcd(settings, 1.0)
    assert caught.value.where == str(files.key)


@pytest.fixture
def candidate() -> Iterator[RepositoryCandidate]:
    """One whose etcd is not there."""
    settings = EtcdSettings((f"127.0.0.1:{free_port()}",), lease=2.0)

    def serve(_: object) -> RepositoryServer:
        raise AssertionError("it must not lead")

    found = RepositoryCandidate(settings, f"127.0.0.1:{free_port()}", serve)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[RepositoryServer]:
    server = RepositoryServer(
        tmp_path / "log", "127.0.0.1:0", log_servers=[f"127.0.0.1:{free_port()}"]
    )
    server.start()
    yield server
    server.stop()


def named(*addresses: str) -> str:
    return "grpc://" + ",".join(each.removeprefix("grpc://") for each in addresses)


def test_clients_find_the_leader_among_all_repositories(
    candidate: RepositoryCandidate, leader: RepositoryServer
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    for order in (
        (candidate.address, nobody, leader.address),
        (nobody, leader.address, candidate.address),
        (leader.address, candidate.address),
    ):
        with LogClient(named(*order), timeout=6) as log:
            for _ in range(2):
                assert log.status().log_id
            log.register_consumer("lake", None, 60.0)
            with pytest.raises(UnavailableError) as refused:
                log.create_stream("shop")
            # The leader's own refusal, and not that of the next one.
            assert not isinstance(refused.value, NotLeaderError | UnreachableError)


def test_the_state_of_the_log_is_asked_of_whichever_repository_listens(
    tmp_path: Path, leader: RepositoryServer
) -> None:
    nobody, here = f"127.0.0.1:{free_port()}", leader.address.removeprefix("grpc://")
    path = tmp_path / "tuskline.toml"
    path.write_text(
        f"""
        [log]
        data_dir = "log"
        listen = "{nobody}"
        store = "etcd"
        repositories = ["{nobody}", "{here}"]
        [etcd]
        endpoints = ["127.0.0.1:2379"]
        [[log_server]]
        data_dir = "log-server"
        listen = "127.0.0.1:{free_port()}"
        [[source]]
        name = "shop"
        dsn = "service=shop"
        """
    )
    settings = load_config(path)
    with LogClient(leader.address) as log:
        assert log_problems.log_status(settings).log_id == log.status().log_id
    leader.stop()
    with pytest.raises(UnavailableError, match="the log does not answer"):
        log_problems.log_status(settings)


def test_without_a_leader_the_reason_is_named(candidate: RepositoryCandidate) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    for order in ((candidate.address, nobody), (nobody, candidate.address)):
        with LogClient(named(*order), timeout=4) as log, pytest.raises(NotLeaderError) as refused:
            log.status()
        assert "this repository does not lead" in refused.value.what
        assert "[log] repositories" in refused.value.repair
    with LogClient(nobody, timeout=4) as log, pytest.raises(UnreachableError):
        log.status()


def test_an_answer_is_confirmed_after_it_was_formed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens while an answer is formed: what is sent was right at a moment after the question."""
    store = RepositoryStore(tmp_path / "repository.sqlite")
    leads = True

    def confirm() -> None:
        if not leads:
            raise not_leading()

    monkeypatch.setattr(store, "confirm", confirm)
    server = RepositoryServer(
        tmp_path / "log", "127.0.0.1:0", log_servers=[f"127.0.0.1:{free_port()}"], store=store
    )
    server.start()
    really = server.status

    def status() -> object:
        nonlocal leads
        found = really()
        leads = False
        return found

    monkeypatch.setattr(server, "status", status)
    try:
        with LogClient(server.address, timeout=5) as log:
            with pytest.raises(NotLeaderError):
                log.status()
            with pytest.raises(NotLeaderError):
                log.register_consumer("lake", None, 60.0)
    finally:
        server.stop()


@pytest.mark.parametrize("apart", [3 * 86_400.0, -3 * 86_400.0])
def test_26_a_lease_lasts_as_long_whatever_the_next_repositorys_clock_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: float
) -> None:
    """Granted on a log without any version, and renewed in time: the clocks of two machines may be days apart."""

    def left(wall: float, *, renew: bool) -> list[float]:
        monkeypatch.setattr(steady_clock, "_wall", lambda: wall)
        nobody = f"127.0.0.1:{free_port()}"
        server = RepositoryServer(tmp_path / "log", "127.0.0.1:0", log_servers=[nobody])
        server.start()
        try:
            if renew:
                server.register_consumer(RegisterConsumerRequest("lake", None, 3600.0))
            return [lease.lease_seconds for lease in server.describe().consumers]
        finally:
            server.stop()

    assert left(2e9, renew=True) == [pytest.approx(3600, abs=60)]
    for wall in (2e9 + apart, 2e9):
        assert left(wall, renew=False) == [pytest.approx(3600, abs=120)]


class AwayStore(RepositoryStore):
    """A store that cannot be reached while `away`."""

    away = False

    def _keep(self, number: int, body: str) -> None:
        self._check_there()
        super()._keep(number, body)

    def _load(self) -> Repository:
        self._check_there()
        return super()._load()

    def _check_there(self) -> None:
        if self.away:
            raise UnavailableError("the store does not answer")


def test_a_store_that_is_away_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    store = AwayStore(tmp_path / "repository.sqlite")
    nobody = f"127.0.0.1:{free_port()}"
    server = RepositoryServer(
        tmp_path / "log", "127.0.0.1:0", log_servers=[nobody], store=store, tick=0.01
    )
    server.start()
    failures: list[int] = []
    really = server._reload

    def reload() -> None:
        really()
        failures.append(1)

    monkeypatch.setattr(server, "_reload", reload)
    try:
        with LogClient(server.address, timeout=5) as log:
            known = log.status().log_id
            store.away = True
            for call in (partial(log.register_consumer, "lake", None, 60.0), log.status):
                with pytest.raises(UnavailableError, match="the store does not answer"):
                    call()
            wait_for(lambda: len(failures) > 3, 20, "steps fail")
            store.away = False
            wait_for(lambda: log.status().log_id == known, 5, "it answers again")
            log.register_consumer("lake", None, 60.0)
    finally:
        server.stop()
    assert not ended


def test_26_time_is_recorded_before_a_lease_is_even_if_no_step_has_done_so(tmp_path: Path) -> None:
    """Steps may wait for log servers."""
    nobody = f"127.0.0.1:{free_port()}"
    server = RepositoryServer(tmp_path / "log", "127.0.0.1:0", log_servers=[nobody])
    try:
        server.register_consumer(RegisterConsumerRequest("lake", None, 3600.0))
        assert server._state.clock == pytest.approx(server._clock.now(), abs=60)
    finally:
        server.stop()
