"""Safekeepers come and go while commits go on: joint memberships around a real primary."""

import contextlib
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.quorum_stack import Load, QuorumStack, load_server, numbers, waits
from tests.support.relay import Gate
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import Cause, DeadlineError, UsageError
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.quorum.proposer.change_members import ProposerFiles, change, wait
from walsender_bridge.quorum.proposer.links import SILENT_SECONDS
from walsender_bridge.quorum.protocol.messages import Configure, Message


@pytest.fixture
def primary(make_server: MakeServer) -> LocalServer:
    return load_server(make_server, wal_level="replica")


@pytest.fixture
def quorum(
    tmp_path: Path, primary: LocalServer, request: pytest.FixtureRequest
) -> Iterator[QuorumStack]:
    with QuorumStack(tmp_path, primary, getattr(request, "param", 3)) as stack:
        stack.start()
        stack.attach()
        yield stack


@pytest.fixture
def files(quorum: QuorumStack) -> ProposerFiles:
    return ProposerFiles(quorum.status_file, quorum.members_file)


def has_history(load: Load, what: str, commits: int = 5) -> None:
    before = len(load.acknowledged)
    wait_for(lambda: len(load.acknowledged) > before + commits, 30, what)


def ends_well(quorum: QuorumStack, load: Load, members: list[int]) -> None:
    """All that was acknowledged is at the primary, and each member has the primary's WAL."""
    has_history(load, f"commits go on: {quorum.logs()}")
    acknowledged = load.stop()
    assert set(acknowledged) <= numbers(quorum.server)
    quorum.ask("SELECT pg_switch_wal()")
    lsn = parse_lsn(quorum.flush_lsn())
    addresses = {quorum.address(number) for number in members}

    def all_have_it() -> bool:
        told = {
            each["address"]: parse_lsn(each["flush_lsn"])
            for each in quorum.status()["safekeepers"]
            if each["member"] and each["flush_lsn"]
        }
        return told.keys() == addresses and min(told.values()) >= lsn

    wait_for(all_have_it, 20, "every member has it all")
    wal = quorum.server.data_dir / "pg_wal"
    for number in members:
        held = quorum.segments(number)
        assert held
        for name, content in held.items():
            if (wal / name).exists():
                assert (wal / name).read_bytes() == content, (number, name)


def test_38_a_membership_smaller_than_configured_is_refused_and_red_ever_after(tmp_path, primary):
    """A proposer that was started for one safekeeper alone has made it a quorum by itself."""
    with QuorumStack(tmp_path, primary) as quorum:
        quorum.configured = 1
        quorum.start()
        quorum.attach()
        assert len(quorum.status()["membership"]["members"]) == 1
        quorum.kill("proposer")
        quorum.configured = 3
        quorum.start("proposer")
        assert quorum.processes.pop("proposer").wait(20) == Cause.CONFIG
        error = quorum.status()["error"]
        assert "the quorum has 1 safekeeper, but 3 are configured" in error["what"]
        for name in quorum.names[1:]:
            quorum.kill(name)
        waits(quorum.server, 1)  # not with one copy, where three are believed in
        # The way out that it names.
        quorum.configured = 1
        quorum.start(*quorum.names[1:], "proposer")
        wait_for(quorum.is_sync, 30, "the quorum of one goes on")
        files = ProposerFiles(quorum.status_file, quorum.members_file)
        asked = change(files, add=[quorum.address(1), quorum.address(2)])
        wait(files, asked, 30)
        assert quorum.status()["membership"]["unlike"] == ""
        # What nobody asked for is said, for as long as it lasts.
        quorum.members_file.unlink()
        quorum.kill("proposer")
        quorum.configured = 2
        quorum.start("proposer")
        wait_for(quorum.is_sync, 30, "a quorum that is greater than configured is served")
        membership = wait_for(lambda: quorum.status().get("membership"), 10, "it says so")
        said = membership["unlike"]
        assert said.startswith("the quorum has 3 safekeepers, but 2 are configured")


def test_12_one_safekeeper_is_replaced_by_another_under_load(quorum, files):
    load = Load(quorum.server)
    has_history(load, "commits")
    new = quorum.one_more()
    asked = change(files, add=[quorum.address(new)], remove=[quorum.address(0)])
    said = wait(files, asked, 20)
    assert said.membership.generation == 3
    quorum.kill("safekeeper-0")
    has_history(load, "commits go on without the old one")
    # It is asked for again: nothing happens.
    again = change(files, add=[quorum.address(new)], remove=[quorum.address(0)])
    assert wait(files, again, 20).membership.generation == 3
    # The new one counts: without another one there is a majority.
    quorum.kill("safekeeper-1")
    has_history(load, "commits with the new one")
    quorum.start("safekeeper-1")
    ends_well(quorum, load, [1, 2, new])


def test_12_a_change_is_done_only_when_a_majority_of_the_new_members_has_it_on_disk(
    tmp_path, primary
):
    """Else the old one could be switched off, another disk be lost, and nobody be elected ever again."""
    with contextlib.ExitStack() as stack:
        quorum = stack.enter_context(QuorumStack(tmp_path, primary))
        quorum.start(*quorum.names)
        gates = [stack.enter_context(Gate(quorum.ports[n], _second_step)) for n in (1, 2)]
        quorum.ports[1:] = [gate.port for gate in gates]
        quorum.start("proposer")
        quorum.attach()
        files = ProposerFiles(quorum.status_file, quorum.members_file)
        new = quorum.one_more()
        asked = change(files, add=[quorum.address(new)], remove=[quorum.address(0)])
        wait_for(lambda: all(gate.holding for gate in gates), 20, "the second step is sent")
        with pytest.raises(DeadlineError, match="has not persisted it yet"):
            wait(files, asked, 1)
        said = quorum.status()
        assert said["membership"]["new_members"] is None
        assert said["change"]["state"] == "changing"
        for gate in gates:
            gate.open()
        assert wait(files, asked, 20).membership.settled is True
        # What it promises: the old one is gone for good, another disk is lost, and the rest elects.
        for name in ("safekeeper-0", "safekeeper-1", "proposer"):
            quorum.kill(name)
        for number in (0, 1):
            shutil.rmtree(quorum.data(number))
        quorum.start("proposer")
        load = Load(quorum.server)
        has_history(load, f"two of the new three are a quorum: {quorum.logs()}")
        load.stop()


def _second_step(message: Message) -> bool:
    return isinstance(message, Configure) and message.configuration.new_members is None


def test_12_a_lost_disk_comes_back_only_as_a_new_member(quorum, files):
    """Rule 10: S1 acknowledged with S2, lost its disk, and is not heard with S3."""
    load = Load(quorum.server)
    has_history(load, "commits")
    quorum.pause("safekeeper-2")  # S3 stays behind
    has_history(load, "commits of S1 and S2")
    at = {each["address"]: each["safekeeper"] for each in quorum.status()["safekeepers"]}
    address = quorum.address(0)
    lost = at[address]
    for name in ("safekeeper-0", "safekeeper-1", "proposer"):
        quorum.kill(name)
    quorum.resume("safekeeper-2")
    shutil.rmtree(quorum.data(0))
    quorum.start("safekeeper-0", "proposer")
    wait_for(
        lambda: "is not a member" in quorum.log("proposer").read_text(), 20, "it is refused by name"
    )
    before = len(load.acknowledged)
    # Neither its vote nor its acknowledgement counts: S3 alone is no quorum.
    assert quorum.status()["commit_lsn"] == "0/0"
    with pytest.raises(UsageError, match="or several"):
        change(files, add=[address], remove=[address])  # two are missing: which is it?
    with pytest.raises(DeadlineError, match="no quorum follows"):
        wait(files, change(files, add=[address], remove=[lost[:8]]), 2)
    assert len(load.acknowledged) == before
    # With S2, all others are there: what was asked for is done, and the load goes on.
    quorum.start("safekeeper-1")
    asked = change(files, add=[address], remove=[lost])
    said = wait(files, asked, 20)
    assert said.membership.generation == 3
    assert lost not in said.membership.members
    assert {each.member for each in said.safekeepers} == {True}
    # It has what the others have: with it, one of them is enough.
    quorum.kill("safekeeper-1")
    has_history(load, "commits with the new one")
    quorum.start("safekeeper-1")
    ends_well(quorum, load, [0, 1, 2])


def test_7_a_disk_that_was_rolled_back_is_believed_by_no_later_proposer(quorum, files):
    """Once noticed, it is written down at the others; its vote makes no majority, and `replace` puts it right."""
    address = quorum.address(0)
    quorum.kill("safekeeper-0")
    shutil.copytree(quorum.data(0), quorum.folder / "snapshot")
    quorum.start("safekeeper-0")
    quorum.kill("proposer")  # the next one has a term that the snapshot does not know
    quorum.start("proposer")
    wait_for(lambda: follows(quorum) == 3, 30, f"all follow: {quorum.logs()}")
    quorum.insert(1)
    quorum.kill("safekeeper-0")
    shutil.rmtree(quorum.data(0))
    shutil.copytree(quorum.folder / "snapshot", quorum.data(0))
    quorum.start("safekeeper-0")
    wait_for(lambda: "rolled back" in quorum.fault(0), 20, f"it is noticed: {quorum.logs()}")
    wait_for(lambda: distrusts_one(quorum), 20, "the others have it in writing")

    quorum.kill("proposer")
    quorum.kill("safekeeper-2")
    quorum.start("proposer")
    wait_for(lambda: "rolled back" in quorum.fault(0), 20, f"the next one knows: {quorum.logs()}")
    client = waits(quorum.server, 2)  # of two, one is a majority of nothing
    quorum.start("safekeeper-2")
    client.join(30)
    assert not client.is_alive()

    quorum.kill("safekeeper-0")
    shutil.rmtree(quorum.data(0))
    quorum.start("safekeeper-0")
    wait_for(lambda: quorum.listens(0), 20, "it is there, empty")
    wait_for(lambda: quorum.status().get("quorum"), 20, "a quorum follows")
    said = wait(files, change(files, add=[address], remove=[address]), 30)
    assert said.membership.distrusted == ()
    wait_for(lambda: follows(quorum) == 3, 30, "all follow again")


def distrusts_one(quorum: QuorumStack) -> bool:
    """Whether the membership says so, and is settled: the one before was settled, too."""
    membership = quorum.status().get("membership") or {"settled": False}
    return membership["settled"] and len(membership["distrusted"]) == 1


def follows(quorum: QuorumStack) -> int:
    """How many safekeepers follow the proposer."""
    told = quorum.status().get("safekeepers", ())
    return sum(each["state"] == "streaming" for each in told)


def test_12_a_donor_that_hangs_does_not_keep_commits_waiting_for_the_one_that_joins(quorum, files):
    """With one of three hung, a fourth is needed, and it lacks the WAL that the hung one would lend."""
    load = Load(quorum.server)
    has_history(load, "commits")
    new = quorum.one_more()
    wait_for(lambda: follows(quorum) == 3, 20, "all follow")
    asked = change(files, add=[quorum.address(new)])
    quorum.pause("safekeeper-0")
    began = time.monotonic()
    wait(files, asked, 60)
    has_history(load, f"commits with three of four: {quorum.logs()}")
    assert time.monotonic() - began < SILENT_SECONDS
    assert "no message received in time" not in quorum.log("proposer").read_text()
    quorum.resume("safekeeper-0")
    ends_well(quorum, load, [0, 1, 2, new])


@pytest.mark.parametrize("quorum", [1], indirect=True)
def test_12_a_quorum_grows_from_one_to_three_to_five_and_shrinks_again(quorum, files):
    load = Load(quorum.server)
    has_history(load, "commits with one")
    others = [quorum.one_more() for _ in range(4)]
    for added in (others[:2], others[2:]):
        asked = change(files, add=[quorum.address(number) for number in added])
        wait(files, asked, 20)
        has_history(load, "commits with more")
    assert len(quorum.status()["membership"]["members"]) == 5
    # The last ones are fed by those that are paused now, who would keep them waiting until their links are given up.
    wait_for(
        lambda: not any(each["reads_from"] for each in quorum.status()["safekeepers"]),
        20,
        "all have caught up",
    )
    for number in (0, others[0]):
        quorum.pause(f"safekeeper-{number}")
    has_history(load, "commits with three of five")
    # Those two go; the rest is a quorum of its own.
    asked = change(files, remove=[quorum.address(0), quorum.address(others[0])])
    said = wait(files, asked, 20)
    assert len(said.membership.members) == 3
    asked = change(files, remove=[quorum.address(others[1]), quorum.address(others[2])])
    wait(files, asked, 20)
    for number in others[1:3]:
        quorum.kill(f"safekeeper-{number}")
    # A proposer that knows the first address alone finds the membership by the file.
    quorum.kill("safekeeper-0")
    quorum.kill("proposer")
    quorum.start("proposer")
    ends_well(quorum, load, [others[3]])


@pytest.mark.parametrize(
    ("name", "place"),
    [
        # Counting by the joint membership, which nobody holds yet; then by the new one.
        ("proposer", "proposer-MembersChanged"),
        # The joining one, before its WAL begins anew and before its history is written.
        ("safekeeper-3", "safekeeper-ResetWal"),
        ("safekeeper-3", "safekeeper-PersistControl"),
        # A member, at its next write of what it promises: a membership, or how far it is.
        ("safekeeper-1", "safekeeper-PersistControl"),
    ],
)
def test_12_a_change_goes_on_whoever_is_killed_in_it(quorum, files, name, place):
    load = Load(quorum.server)
    has_history(load, "commits")
    new = quorum.one_more()
    quorum.start_mortal(name, place)
    wait_for(lambda: quorum.listens(new), 20, "the one that joins is there")
    wait_for(quorum.is_sync, 20, "the proposer leads")
    asked = change(files, add=[quorum.address(new)], remove=[quorum.address(0)])
    wait_for(lambda: quorum.processes[name].poll() is not None, 20, f"{name} dies: {quorum.logs()}")
    quorum.kill(name)
    quorum.start(name)
    wait(files, asked, 30)
    quorum.kill("safekeeper-0")
    ends_well(quorum, load, [1, 2, new])


@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.long)])
def test_12_replaced_again_and_again_with_random_kills(quorum, files, seed, kills):
    chance = random.Random(seed)
    load = Load(quorum.server)
    members = [0, 1, 2]
    for _ in range(kills):
        old = chance.choice(members)
        new = quorum.one_more()
        asked = change(files, add=[quorum.address(new)], remove=[quorum.address(old)])
        time.sleep(chance.uniform(0, 0.6))
        victim = chance.choice(["proposer", *(f"safekeeper-{n}" for n in [*members, new])])
        print(seed, old, new, victim)
        quorum.kill(victim)
        quorum.start(victim)
        wait(files, asked, 30)
        members = [*(set(members) - {old}), new]
        quorum.kill(f"safekeeper-{old}")
    ends_well(quorum, load, members)
