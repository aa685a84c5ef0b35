"""The metadata repository on a cluster of etcd: one of several leads, and no other one can write or answer."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.etcd import EtcdCluster, needs_etcd
from tests.support.repositories import STREAM, Committer, Repositories
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.repository.core import (
    ConsumerSeen,
    Created,
    LogServerSeen,
    StreamCreated,
    TermGiven,
)
from walsender_bridge.change_log.repository.etcd_store import EtcdStore
from walsender_bridge.change_log.repository.leader_lease import Leader, try_to_lead
from walsender_bridge.errors import NotLeaderError, UnavailableError

pytestmark = needs_etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


def lead(etcd: EtcdCluster, prefix: str, lease: float = 2.0) -> Leader:
    found = try_to_lead(etcd.settings(lease, prefix), "127.0.0.1:1")
    assert isinstance(found, Leader)
    return found


def test_the_state_is_that_of_the_records_whoever_reads_it(etcd: EtcdCluster) -> None:
    settings, leader = etcd.settings(prefix="/one/"), lead(etcd, "/one/")
    store = EtcdStore(settings, leader, checkpoint_every=3)
    for record in (Created("log"), LogServerSeen("a", "grpc://a"), StreamCreated("s", ("a",))):
        assert store.append(record)
    for term in range(1, 6):
        store.append(TermGiven("s", term))
    known = store.state.to_record()
    store.close()
    leader.resign()
    other = lead(etcd, "/one/")
    assert other.fence > leader.fence
    again = EtcdStore(settings, other)
    assert again.state.to_record() == known
    again.append(ConsumerSeen("lake", 1, 5.0))
    with pytest.raises(NotLeaderError):
        store.append(TermGiven("s", 9))
    again.close()
    other.resign()


def test_a_leader_that_does_not_look_at_its_clock_cannot_write(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence holds without any clock: here the old leader takes itself for one forever."""
    settings, leader = etcd.settings(prefix="/fence/"), lead(etcd, "/fence/")
    old = EtcdStore(settings, leader, checkpoint_every=1000)
    for record in (Created("log"), StreamCreated("s", ("a",)), TermGiven("s", 1)):
        old.append(record)
    assert old.state.streams["s"].term == 1
    leader.resign()
    other = lead(etcd, "/fence/")
    new = EtcdStore(settings, other)
    monkeypatch.setattr(leader, "check", lambda: None)
    known = old.state.to_record()
    for write in (lambda: old.append(TermGiven("s", 2)), old.checkpoint):
        with pytest.raises(UnavailableError):
            write()
        new.reload()
        assert new.state.to_record() == known
    new.append(TermGiven("s", 3))
    new.close()
    old.close()
    other.resign()


def test_commits_go_on_when_the_leader_is_killed(etcd: EtcdCluster, tmp_path: Path) -> None:
    with (
        Repositories(tmp_path, etcd, "/killed/") as repositories,
        closing(Committer(repositories.address)) as committer,
    ):
        committer.commit()
        for _ in range(2):
            leader = repositories.leader()
            repositories.kill(leader)
            began = time.monotonic()
            committer.commit()
            print(f"committed {time.monotonic() - began:.1f} s after the leader was killed")
            assert repositories.leader() == repositories.other(leader)
            repositories.start(leader)
        assert committer.versions == sorted(set(committer.versions))


def test_a_leader_that_was_stopped_neither_answers_nor_writes_when_it_goes_on(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    with (
        Repositories(tmp_path, etcd, "/stopped/") as repositories,
        closing(Committer(repositories.address)) as committer,
        ThreadPoolExecutor(8) as pool,
    ):
        committer.commit()
        old = repositories.leader()
        repositories.signal(old, signal.SIGSTOP)
        try:
            committer.commit()
            new = repositories.leader()
            assert new == repositories.other(old)
            with LogClient(repositories.address, timeout=4) as log:
                term = log.writer_term(STREAM).term
            # They are there when it goes on: it has to find itself too late before it answers the first of them.
            asked = [pool.submit(ask, old) for _ in range(8)]
            time.sleep(0.2)
        finally:
            repositories.signal(old, signal.SIGCONT)
        assert {each.result() for each in asked} == {NotLeaderError}
        with LogClient(old, timeout=4) as log:
            for call in (log.status, lambda: log.writer_term(STREAM)):
                with pytest.raises(NotLeaderError):
                    call()
        assert repositories.leader() == new
        with LogClient(new, timeout=4) as log:
            assert log.writer_term(STREAM).term == term + 1


def ask(address: str) -> type:
    """The error of a question, whose answer would be of the state that the repository had."""
    with LogClient(address, timeout=20) as log:
        try:
            return type(log.status())
        except UnavailableError as error:
            return type(error)


def test_commits_go_on_without_a_member_of_etcd(tmp_path: Path) -> None:
    with (
        EtcdCluster(tmp_path) as etcd,
        Repositories(tmp_path, etcd, "/tuskline/") as repositories,
        closing(Committer(repositories.address)) as committer,
    ):
        committer.commit()
        for number in range(3):
            etcd.kill(number)
            committer.commit()
            etcd.start(number)
            wait_for(lambda: all(map(etcd.is_healthy, range(3))), 60, "etcd is whole")
        etcd.signal(0, signal.SIGSTOP)
        try:
            committer.commit()
        finally:
            etcd.signal(0, signal.SIGCONT)
        for number in range(3):
            etcd.kill(number)

        def says_why() -> bool:
            try:
                committer.log.status()
            except NotLeaderError as error:
                return "etcd does not answer" in error.what and "[log] repositories" in error.repair
            return False

        wait_for(says_why, 30, "the repositories refuse, and say why")
        for number in range(3):
            etcd.start(number)
        committer.commit(60)
        assert committer.versions == sorted(set(committer.versions))
