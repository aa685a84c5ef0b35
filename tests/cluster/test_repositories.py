"""Several repositories over a cluster of etcd: one leads, another takes over, and an old leader neither answers nor writes."""

import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.etcd import EtcdCluster, needs_etcd
from tests.support.repositories import STREAM, Committer, Repositories
from tests.support.tls import HOSTS, SERVER, Authority
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.operator_client import OperatorLog
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.repository import empty_store
from walsender_bridge.change_log.repository.etcd import Etcd
from walsender_bridge.change_log.repository.leader_lease import leader_key
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.change_log.repository.part import RepositoryPart
from walsender_bridge.change_log.repository.rebuilder import Rebuilder
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.cli.app import app
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import (
    ConfigError,
    NotLeaderError,
    PrivilegeError,
    RunningError,
    UnavailableError,
    UnreachableError,
)

pytestmark = needs_etcd


def test_commits_go_on_when_the_leader_is_killed(etcd: EtcdCluster, tmp_path: Path) -> None:
    with (
        Repositories(tmp_path, etcd, "/killed/") as repositories,
        closing(Committer(repositories.address)) as committer,
    ):
        committer.commit()
        leader = repositories.leader()
        repositories.kill(leader)
        began = time.monotonic()
        committer.commit()
        print(f"committed {time.monotonic() - began:.1f} s after the leader was killed")
        other = repositories.other(leader)
        wait_for(lambda: repositories.leader() == other, 30, "the other one leads")
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
        # Unreachable: for the moment in which it stops to serve, and listens as one that does not lead.
        assert {each.result() for each in asked} <= {NotLeaderError, UnreachableError}
        wait_for(lambda: ask(old) is NotLeaderError, 30, "it knows that it does not lead")
        write = partial(LogClient.writer_term, stream=STREAM)
        wait_for(lambda: ask(old, write) is NotLeaderError, 30, "it refuses to write, too")
        assert repositories.leader() == new
        with LogClient(new, timeout=4) as log:
            assert log.writer_term(STREAM).term == term + 1


def ask(address: str, call: Callable[[LogClient], object] = LogClient.status) -> type:
    """The error of a call, whose answer would be of the state that the repository had."""
    with LogClient(address, timeout=20) as log:
        try:
            return type(call(log))
        except UnavailableError as error:
            return type(error)


class Load:
    """Commits one entry behind the other until it is stopped, whatever etcd and the repositories do meanwhile."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(self._run)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._committer.commit(120)

    def goes_on(self) -> None:
        """Until two more are committed, of which the second was sent after now."""
        enough = len(self._committer.versions) + 2
        wait_for(lambda: self._count() >= enough, 120, "commits go on")

    def _count(self) -> int:
        if self._done.done():
            self._done.result()
        return len(self._committer.versions)

    def stop(self) -> None:
        self._stopping.set()
        self._done.result()
        self._pool.shutdown()


@pytest.mark.timeout(300)
def test_25_members_of_etcd_restart_under_load_and_without_a_majority_commits_wait(
    etcd: EtcdCluster, tmp_path: Path
) -> None:
    with (
        Repositories(tmp_path, etcd, "/members/") as repositories,
        closing(Committer(repositories.address)) as committer,
        LogClient(repositories.address, timeout=4) as log,
        etcd.whole_afterwards(),
    ):
        load = Load(committer)
        load.goes_on()
        leading = etcd.leader()
        etcd.kill(leading)
        load.goes_on()
        etcd.start(leading)
        wait_for(etcd.is_whole, 60, "etcd is whole")
        leading = etcd.leader()
        etcd.signal(leading, signal.SIGSTOP)
        try:
            load.goes_on()
        finally:
            etcd.signal(leading, signal.SIGCONT)
        for number in range(3):
            etcd.kill(number)

        def says_why() -> bool:
            try:
                log.status()
            except NotLeaderError as error:
                return "etcd does not answer" in error.what
            return False

        wait_for(says_why, 30, "the repositories refuse, and say why")
        for number in range(3):
            etcd.start(number)
        load.goes_on()
        assert all(map(repositories.is_running, repositories.listens)), "none of them ended"
        wait_for(etcd.is_whole, 60, "etcd is whole")
        leading, leader = etcd.leader(), repositories.leader()
        etcd.kill(leading)
        repositories.kill(leader)
        load.goes_on()
        load.stop()
        assert committer.versions == sorted(set(committer.versions))
        check_equal(committer)


def check_equal(committer: Committer) -> None:
    """The log has what was committed, once, in the order of versions, under its own global offsets."""
    cut = committer.log.status().streams[STREAM]
    with StreamReader.of(cut) as reader:
        found = [*reader.read(1, cut.end_offset)]
    assert [bytes(each.data) for each in found] == committer.sent
    assert [each.offset for each in found] == [*range(1, len(found) + 1)]
    for before, after in pairwise(found):
        assert (before.version, before.global_offset) < (after.version, after.global_offset)


def test_31_the_records_of_an_etcd_that_lost_its_data_are_rebuilt(tmp_path: Path) -> None:
    with (
        EtcdCluster(tmp_path, members=1) as etcd,
        Repositories(tmp_path, etcd, "/lost/") as repositories,
        closing(Committer(repositories.address)) as committer,
    ):
        for _ in range(3):
            committer.commit()
        log_id = committer.log.status().log_id
        for listen in repositories.listens:
            repositories.kill(listen)
        file, settings = tmp_path / "none", repositories.settings
        with pytest.raises(RunningError):
            empty_store.check(file, settings)
        with Etcd(settings, 1.0) as client:
            wait_for(lambda: client.get(leader_key(settings), within=5.0) is None, 30, "none leads")
        with pytest.raises(ConfigError, match="there is a repository already"):
            empty_store.check(file, settings)
        etcd.kill(0)
        shutil.rmtree(tmp_path / "etcd-0")
        etcd.start(0)
        wait_for(etcd.is_healthy, 60, "etcd is there, and empty")
        addresses = [repositories.log_server_address.removeprefix("grpc://")]
        with (
            closing(Rebuilder(addresses, ReplicationPolicy())) as rebuilder,
            empty_store.opened(file, settings) as store,
        ):
            plan = rebuilder.look()
            store.begin_with(rebuilder.rebuild(plan, hold=3600.0))
        for listen in repositories.listens:
            repositories.start(listen)
        wait_for(repositories.leader, 60, "a repository leads")
        committer.reopen()
        committer.commit()
        assert committer.log.status().log_id == log_id
        assert committer.versions == sorted(set(committer.versions))
        assert committer.versions[-1] > plan.fence > committer.versions[-2]
        check_equal(committer)


def test_a_configured_repository_on_etcd_with_certificates(tmp_path: Path) -> None:
    """The part of `bridge run`, as configured: mutual TLS with etcd, and with its own clients."""
    authority = Authority(tmp_path)
    files = authority.issue(*SERVER, "operator", hosts=HOSTS)
    listen, log_server_listen = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with EtcdCluster(tmp_path, members=1, tls=files) as etcd:
        config = tmp_path / "tuskline.toml"
        tls = f'ca = "{files.ca}"\ncertificate = "{files.certificate}"\nkey = "{files.key}"\n'
        config.write_text(
            f'[log]\ndata_dir = "log"\nlisten = "{listen}"\nstore = "etcd"\n'
            f'repositories = ["127.0.0.1:{free_port()}", "{listen}"]\n'
            f'[etcd]\nendpoints = ["{etcd.endpoints[0]}"]\nlease = 2\n{tls}'
            f'[[log_server]]\nlisten = "{log_server_listen}"\ndata_dir = "log-server"\n'
            f'[[source]]\nname = "shop"\ndsn = "dbname=shop"\n[tls]\n{tls}'
        )
        settings = load_config(config)
        log_server = ReplicaServer(tmp_path / "log-server", log_server_listen, tls=files)
        part = RepositoryPart(settings)
        part.start()
        try:
            committer = Committer(settings.log_address)
            committer.commit()
            with OperatorLog(settings.log_address) as log:
                assert log.describe().log_id == log.status().log_id
            committer.close()
            stranger = authority.issue("monitor")
            with (
                LogClient(listen, timeout=5, tls=stranger) as log,
                pytest.raises(PrivilegeError),
            ):
                log.register_consumer("lake", None, 60.0)
        finally:
            part.stop()
            log_server.stop()
        assert not (tmp_path / "log" / "repository.sqlite").exists()
        result = CliRunner().invoke(
            app, ["log", "backup", str(tmp_path / "copy"), "-c", str(config)]
        )
        assert isinstance(result.exception, ConfigError)
