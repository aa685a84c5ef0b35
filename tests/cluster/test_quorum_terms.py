"""A stranger's votes at one of three safekeepers, in terms that leave no room: commits go on, and it is replaced."""

import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.quorum_stack import QuorumStack, load_server
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.errors import ConnectionFailedError
from walsender_bridge.quorum.proposer.change_members import ProposerFiles, change, wait
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.frames import decode
from walsender_bridge.quorum.protocol.message_socket import WireEnd
from walsender_bridge.quorum.protocol.terms import MAX_LEAP
from walsender_bridge.quorum.safekeeper import control_file
from walsender_bridge.runtime.folder import FolderDisk

GREATEST = (1 << 64) - 1


@pytest.fixture
def quorum(tmp_path: Path, make_server: MakeServer) -> Iterator[QuorumStack]:
    with QuorumStack(tmp_path, load_server(make_server)) as stack:
        stack.start()
        stack.attach()
        yield stack


def vote(quorum: QuorumStack, number: int, term: int) -> m.Message:
    """What a safekeeper answers somebody at its port who knows no more than its greeting tells.

    Raises `ConnectionFailedError` if there is no answer.
    """
    host, _, port = quorum.address(number).rpartition(":")
    found = control_file.read(FolderDisk(quorum.data(number) / "control"))
    assert found is not None
    with socket.create_connection((host, int(port))) as connected:
        end = WireEnd(connected, "stranger")
        connected.settimeout(20)
        told = ask(end, m.ProposerGreeting(found[1].server, 0))
        assert isinstance(told, m.SafekeeperGreeting)
        node_id = m.NodeId(term, 1)
        return ask(end, m.Vote(node_id, m.Purpose.ATTACH, told.timeline, told.configuration))


def ask(end: WireEnd, message: m.Message) -> m.Message:
    end.send(message)
    end.flush()
    while True:
        for header, body in end.frames():
            return decode(header, body)
        end.receive()


def test_one_vote_of_the_greatest_term_ends_no_proposer_for_long(quorum):
    quorum.insert(1)
    with pytest.raises(ConnectionFailedError, match=r"closed|reset"):
        vote(quorum, 0, GREATEST)
    refused = vote(quorum, 0, 2 * MAX_LEAP)
    assert isinstance(refused, m.Refused)
    assert "is out of reach of term" in refused.detail
    # A vote within reach costs an election, and no more.
    assert isinstance(vote(quorum, 0, 1000), m.VoteReply)
    wait_for(lambda: 1000 < (quorum.status().get("term") or 0) < 1100, 60, "it is outbid")
    quorum.insert(2)
    # One that is not, or that was given to an earlier version, costs that safekeeper.
    assert isinstance(vote(quorum, 0, MAX_LEAP), m.VoteReply)
    quorum.insert(3)
    quorum.kill("safekeeper-0")
    disk = FolderDisk(quorum.data(0) / "control")
    state = control_file.load(disk)
    assert state is not None
    assert state.node_id.term == MAX_LEAP
    control_file.save(disk, replace(state, node_id=m.NodeId(GREATEST, 1)))
    quorum.start("safekeeper-0")
    for number in (4, 5):
        wait_for(lambda: "no election of the others" in quorum.fault(0), 30, "it is named")
        quorum.insert(number)
        quorum.kill("proposer")
        quorum.start("proposer")
    wait_for(lambda: quorum.status().get("quorum"), 30, "a quorum follows")
    assert quorum.status()["term"] < 2000
    # The way out.
    quorum.kill("safekeeper-0")
    shutil.rmtree(quorum.data(0))
    quorum.start("safekeeper-0")
    wait_for(lambda: quorum.listens(0), 20, "it is there, empty")
    files = ProposerFiles(quorum.status_file, quorum.members_file)
    wait(files, change(files, add=[quorum.address(0)], remove=[quorum.address(0)]), 30)
    wait_for(lambda: quorum.held(0), 30, "it follows")
    quorum.insert(6)
