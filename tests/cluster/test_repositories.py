"""Several repositories over a cluster of etcd: one leads, another takes over, and an old leader neither answers nor writes."""

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
from walsender_bridge.errors import NotLeaderError, UnavailableError

pytestmark = needs_etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


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
        leading = etcd.leader()
        etcd.kill(leading)
        committer.commit()
        etcd.start(leading)
        wait_for(lambda: all(map(etcd.is_healthy, range(3))), 60, "etcd is whole")
        leading = etcd.leader()
        etcd.signal(leading, signal.SIGSTOP)
        try:
            committer.commit()
        finally:
            etcd.signal(leading, signal.SIGCONT)
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
