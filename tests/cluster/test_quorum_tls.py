"""A quorum whose parts prove who they are: commits, a member with a stranger's certificate, certificates that are replaced."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.quorum_stack import Load, QuorumStack, load_server, numbers
from tests.support.servers import DEFAULT, MakeServer
from tests.support.tls import HOSTS, Authority, replace_files
from tests.support.waiting import wait_for
from walsender_bridge.runtime.tls_files import TlsFiles


class TlsQuorum(QuorumStack):
    """Each process has a certificate of its own."""

    def secure(self, authority: Authority) -> None:
        self.proposer = authority.issue("proposer")
        self.safekeeper = [authority.issue("safekeeper", hosts=HOSTS) for _ in self.names]
        self.options["proposer"] = {"tls": self.proposer}
        for name, files in zip(self.names, self.safekeeper, strict=True):
            self.options[name] = {"tls": files}

    def restart(self, name: str, tls: TlsFiles) -> None:
        self.kill(name)
        self.start_as(name, tls=tls)


@pytest.fixture
def quorum(tmp_path: Path, make_server: MakeServer) -> Iterator[TlsQuorum]:
    server = load_server(make_server, DEFAULT, wal_level="replica")
    with TlsQuorum(tmp_path, server) as stack:
        stack.secure(Authority(tmp_path))
        stack.start()
        stack.attach()
        yield stack


def catches_up(quorum: TlsQuorum, number: int) -> None:
    """Wait until this safekeeper has what the primary has now, and nothing is wrong with it."""
    lsn = quorum.make_wal(1)
    wait_for(
        lambda: not quorum.fault(number) and quorum.held(number) >= lsn,
        60,
        f"it follows again: {quorum.logs()}",
    )


def test_38_commits_go_on_while_strangers_are_left_out_and_certificates_replaced(quorum, tmp_path):
    load = Load(quorum.server)
    wait_for(lambda: len(load.acknowledged) > 20, 60, "commits return")

    # A safekeeper that another authority vouches for is none, and status says why.
    (tmp_path / "other").mkdir()
    quorum.restart("safekeeper-2", Authority(tmp_path / "other").issue("safekeeper", hosts=HOSTS))
    wait_for(lambda: "certificate" in quorum.fault(2), 30, f"a fault: {quorum.logs()}")
    before = len(load.acknowledged)
    wait_for(lambda: len(load.acknowledged) > before + 20, 60, "commits return")
    quorum.restart("safekeeper-2", quorum.safekeeper[2])
    catches_up(quorum, 2)

    # Another authority, in the order of the manual: its certificate everywhere, then certificates, one after another.
    (tmp_path / "next").mkdir()
    after = Authority(tmp_path / "next")
    everybody = [quorum.proposer, *quorum.safekeeper]
    both = quorum.proposer.ca.read_bytes() + (after.folder / "authority" / "ca.pem").read_bytes()
    for files in everybody:
        files.ca.write_bytes(both)
    for number, files in enumerate(quorum.safekeeper):
        replace_files(files, after.issue("safekeeper", hosts=HOSTS))
        files.ca.write_bytes(both)
        quorum.kill(f"safekeeper-{number}")
        quorum.start(f"safekeeper-{number}")
        catches_up(quorum, number)
    replace_files(quorum.proposer, after.issue("proposer"))
    for number in range(3):
        quorum.kill(f"safekeeper-{number}")
        quorum.start(f"safekeeper-{number}")
        catches_up(quorum, number)

    acknowledged = load.stop()
    assert set(acknowledged) <= numbers(quorum.server)
