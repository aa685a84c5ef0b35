"""When a change of the members is in force, and when it is done: rule 10."""

from types import SimpleNamespace
from typing import Any

import pytest

from walsender_bridge.errors import UsageError
from walsender_bridge.proposer.member_changes import ChangeState, MemberRequest
from walsender_bridge.proposer.membership import Membership
from walsender_bridge.safekeeper.configuration import Configuration

OLD = Configuration(1, frozenset({1, 2, 3}), term=5)
NEW = frozenset({2, 3, 4})
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
    with pytest.raises(UsageError, match="holds the one in force"):
        membership.begin(NEW, STREAMING)
    membership = settled(OLD, 1, 2)
    membership.use(membership.begin(NEW, STREAMING))
    assert membership.next_step(STREAMING) is None
    for each in (1, 2, 4):
        membership.holds(each, 2)
    assert membership.next_step(STREAMING) == OLD.joint(NEW).completed()


def test_12_a_request_is_done_when_it_is_settled():
    request = MemberRequest(1, NEW, ())
    completed = OLD.joint(NEW).completed()
    assert request.state(settled(OLD, 1, 2)) == ChangeState.WAITING
    assert request.state(settled(OLD.joint(NEW), 2, 3)) == ChangeState.CHANGING
    assert request.state(settled(completed, 2)) == ChangeState.CHANGING
    assert request.state(settled(completed, 2, 3)) == ChangeState.DONE
