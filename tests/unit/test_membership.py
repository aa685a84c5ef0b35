"""When a change of the members is in force, and when it is done: rule 10."""

from types import SimpleNamespace
from typing import Any

import pytest

from walsender_bridge.errors import CorruptError, UsageError
from walsender_bridge.quorum.proposer.member_changes import (
    ChangeState,
    MemberChanges,
    MemberRequest,
)
from walsender_bridge.quorum.proposer.membership import Membership
from walsender_bridge.quorum.protocol.configuration import Configuration

OLD = Configuration(1, frozenset({1, 2, 3}), term=5)
NEW = frozenset({2, 3, 4})
#: When a change is asked for, in seconds since 1970.
NOW = 1_790_000_000.0
STREAMING: Any = SimpleNamespace(
    established=True, acked=dict.fromkeys(range(1, 5), 100), commit_lsn=100
)


def settled(configuration: Configuration, *holders: int) -> Membership:
    membership = Membership(configuration)
    for each in holders:
        membership.holds(each, configuration.generation)
    return membership


@pytest.mark.parametrize(
    ("configuration", "holders", "done"),
    [
        (OLD, (1,), False),
        (OLD, (1, 3), True),
        (OLD.joint(NEW), (1, 2), False),  # a majority of the old ones
        (OLD.joint(NEW), (2, 4), False),  # of the new ones
        (OLD.joint(NEW), (2, 3), True),
        (OLD.joint(NEW).completed(), (1, 2), False),  # one has left
        (OLD.joint(NEW).completed(), (2, 4), True),
    ],
)
def test_12_it_is_settled_when_a_majority_of_each_membership_has_it(configuration, holders, done):
    assert settled(configuration, *holders).settled is done


def test_12_it_is_said_once_and_the_next_one_is_not_settled_yet():
    membership = Membership(OLD)
    assert [membership.holds(each, 1) for each in (1, 2, 3)] == [False, True, False]
    membership.use(OLD.joint(NEW))
    assert not membership.settled
    assert not membership.holds(1, 1)  # the one before


def test_12_a_change_begins_when_the_one_before_is_settled_and_goes_on_when_its_step_is():
    membership = Membership(OLD)
    with pytest.raises(UsageError, match="holds the current one"):
        membership.begin(NEW, STREAMING)
    membership = settled(OLD, 1, 2)
    membership.use(membership.begin(NEW, STREAMING))
    assert membership.next_step(STREAMING) is None
    for each in (1, 2, 4):
        membership.holds(each, 2)
    assert membership.next_step(STREAMING) == OLD.joint(NEW).completed()


def test_12_a_request_is_done_when_it_is_settled():
    request = MemberRequest(1, NEW, (), NOW)
    completed = OLD.joint(NEW).completed()
    assert request.state(settled(OLD, 1, 2), NOW) == ChangeState.WAITING
    assert request.state(settled(OLD.joint(NEW), 2, 3), NOW) == ChangeState.CHANGING
    assert request.state(settled(completed, 2), NOW) == ChangeState.CHANGING
    assert request.state(settled(completed, 2, 3), NOW) == ChangeState.DONE


def test_a_change_that_could_not_begin_in_an_hour_is_carried_out_no_more(tmp_path) -> None:
    """Weeks later the safekeeper that was to join is started: nobody expects it to."""
    file = tmp_path / "members.json"
    MemberRequest(1, NEW, (), NOW).save(file)
    membership = settled(OLD, 1, 2)
    for later, state in ((60.0, ChangeState.WAITING), (3601.0, ChangeState.EXPIRED)):
        changes = MemberChanges(file, clock=lambda later=later: NOW + later)  # type: ignore[misc]  # bound now
        changes.poll()
        assert changes.state(membership) == state
        assert changes.next(membership, None) is None
        assert ("within an hour" in changes.why) == (state == ChangeState.EXPIRED)
    # Once begun it goes on.
    request = MemberRequest(1, NEW, (), NOW)
    assert request.state(settled(OLD.joint(NEW), 2, 3), NOW + 3601) == ChangeState.CHANGING


def test_a_request_is_carried_out_in_the_quorum_alone_in_which_it_was_asked(tmp_path) -> None:
    """Generations begin again with each quorum."""
    file = tmp_path / "members.json"
    asked = MemberRequest(1, NEW, (), NOW, quorum=77)
    asked.save(file)
    assert MemberRequest.load(file) == asked
    for quorum, state in ((77, ChangeState.WAITING), (78, ChangeState.SUPERSEDED)):
        assert asked.state(Membership(OLD, quorum), NOW) == state


def test_a_request_with_a_changed_digit_or_letter_is_not_carried_out(tmp_path) -> None:
    """Another generation or member is another membership, which nobody asked for."""
    file = tmp_path / "members.json"
    asked = MemberRequest(1, NEW, (("a", 1),), NOW, quorum=77)
    asked.save(file)
    whole = file.read_bytes()
    for at, byte in enumerate(whole):
        file.write_bytes(whole[:at] + bytes([byte ^ 1]) + whole[at + 1 :])
        with pytest.raises(CorruptError, match="invalid membership request"):
            MemberRequest.load(file)
    file.write_bytes(whole)
    assert MemberRequest.load(file) == asked
