"""A quorum has an identity: whose memberships are believed, and when a new one may be formed."""

from dataclasses import replace

import pytest

from walsender_bridge.errors import ConnectionFailedError, DivergedError, UnavailableError
from walsender_bridge.quorum.proposer.membership import Membership
from walsender_bridge.quorum.proposer.quorum_id import Answer, KnownQuorumId, first, in_force
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.safekeeper import votes
from walsender_bridge.quorum.safekeeper.effects import ControlState

INFO = m.ServerInfo(7, 16, 1 << 24)
OWN, OTHER = 0xA, 0xB
THREE = Configuration(1, frozenset({1, 2, 3}), term=5, quorum=OWN)
#: What somebody made of a safekeeper that had lost its disk; it has been elected more often.
STRANGER = Configuration(1, frozenset({9}), term=8, quorum=OTHER)
LEGACY = replace(THREE, quorum=0)
EMPTY = Configuration()
RECORDED = KnownQuorumId(OWN, formed=True)
ADDRESSES = [("a", 1), ("b", 1), ("c", 1)]


def held(**by_identity: Configuration) -> list[m.SafekeeperGreeting]:
    """Greetings of safekeepers `s1`, `s2`, ..., which hold these memberships."""
    return [
        m.SafekeeperGreeting(int(name[1:]), INFO, m.NodeId(each.term, 1), each, 0, 0, 0)
        for name, each in by_identity.items()
    ]


def answers(*given: Answer) -> dict[int, Answer]:
    return dict(enumerate(given))


def test_a_greater_term_of_another_quorum_says_nothing_of_ours():
    assert in_force(held(s9=STRANGER, s1=THREE), 3, RECORDED) == THREE
    assert not in_force(held(s9=STRANGER), 3, RECORDED)
    newer = replace(THREE, term=6)
    assert in_force(held(s9=STRANGER, s1=THREE, s2=newer), 3, RECORDED) == newer


def test_without_a_record_a_majority_of_the_addresses_has_to_agree():
    assert not in_force(held(s9=STRANGER), 3, KnownQuorumId())
    assert not in_force(held(s9=STRANGER, s1=THREE), 3, KnownQuorumId())
    assert in_force(held(s9=STRANGER, s1=THREE, s2=THREE), 3, KnownQuorumId()) == THREE
    assert in_force(held(s9=STRANGER), 1, KnownQuorumId()) == STRANGER


def test_memberships_from_before_ids_are_taken_from_a_majority_of_their_members():
    stranger = replace(STRANGER, quorum=0)
    assert in_force(held(s9=stranger, s1=LEGACY, s2=LEGACY), 3, KnownQuorumId()) == LEGACY
    assert not in_force(held(s9=stranger, s1=LEGACY), 3, KnownQuorumId())
    # Some have been given the id that was drawn, and the proposer died.
    assert in_force(held(s1=THREE, s2=LEGACY, s3=LEGACY), 3, KnownQuorumId(OWN)) == THREE
    # Once it is given, nobody without one is believed.
    assert not in_force(held(s1=LEGACY, s2=LEGACY, s3=LEGACY), 3, RECORDED)


def test_a_first_membership_that_was_begun_goes_on():
    begun = replace(THREE, term=0)
    assert in_force(held(s1=begun, s2=EMPTY, s3=EMPTY), 3, KnownQuorumId(OWN)) == begun
    # Whoever began it has lost its record, and never led.
    found = held(s1=begun, s2=EMPTY, s3=EMPTY)
    assert not in_force(found, 3, KnownQuorumId())
    assert first(answers(*found), ADDRESSES, KnownQuorumId()).members == {1, 2, 3}


@pytest.mark.parametrize(
    ("known", "configurations", "why"),
    [
        (RECORDED, (EMPTY, EMPTY, EMPTY), "no safekeeper here belongs to quorum 0{31}a"),
        (RECORDED, (EMPTY, STRANGER, STRANGER), "no safekeeper here belongs to quorum 0{31}a"),
        (KnownQuorumId(required=True), (EMPTY, EMPTY, EMPTY), "commits wait for a quorum"),
        (
            KnownQuorumId(),
            (EMPTY, THREE, STRANGER),
            "no majority of the safekeepers here belongs to one quorum",
        ),
    ],
)
def test_no_new_quorum_takes_the_place_of_one_that_there_was(known, configurations, why):
    found = held(**{f"s{n}": each for n, each in enumerate(configurations, 1)})
    with pytest.raises(DivergedError, match=why) as refused:
        first(answers(*found), ADDRESSES, known)
    assert "a:1 (empty)" in refused.value.where
    assert "restore the safekeepers' data directories" in refused.value.repair
    # The ones that are still away may be those of the quorum.
    away = ConnectionFailedError("no answer")
    with pytest.raises(UnavailableError, match=why) as waits:
        first(answers(*found[:2], away), ADDRESSES, known)
    assert "c:1 (no answer)" in waits.value.where


@pytest.mark.parametrize("known", [RECORDED, KnownQuorumId(required=True)])
def test_safekeepers_that_do_not_answer_are_not_said_to_be_lost(known):
    closed = [ConnectionFailedError(f"the other end has closed it ({n})") for n in range(3)]
    with pytest.raises(UnavailableError) as waits:
        first(answers(*closed), ADDRESSES, known)
    assert waits.value.what == "no safekeeper answers"
    assert "c:1 (the other end has closed it (2))" in waits.value.where
    assert "data directories" not in waits.value.repair


@pytest.mark.parametrize(
    "known", [KnownQuorumId(), KnownQuorumId(OWN), KnownQuorumId(OWN, required=True)]
)
def test_a_first_quorum_is_formed_where_there_was_none(known):
    found = answers(*held(s1=EMPTY, s2=EMPTY, s3=EMPTY))
    assert first(found, ADDRESSES, known) == Configuration(1, THREE.members, quorum=known.quorum)


def test_a_proposer_learns_from_its_own_quorum_only():
    membership = Membership(replace(THREE, term=4))
    membership.learn(STRANGER, 9)
    membership.learn(replace(STRANGER, quorum=0), 9)
    assert membership.configuration.term == 4
    membership.learn(THREE, 2)
    assert membership.configuration == THREE
    assert membership.foreign(STRANGER)
    assert not membership.foreign(EMPTY)


def test_a_membership_without_an_id_is_learned_from_its_members_and_given_one():
    membership = Membership(LEGACY, OWN)
    membership.learn(replace(STRANGER, quorum=0), 9)
    assert membership.configuration == LEGACY
    newer = replace(LEGACY, term=7)
    membership.learn(newer, 2)
    assert membership.configuration == newer
    assert membership.proposed == replace(newer, quorum=OWN)
    assert membership.configuration.stamped(8, OWN) == replace(newer, term=8, quorum=OWN)


def vote(configuration: Configuration, term: int = 20) -> m.Vote:
    return m.Vote(m.NodeId(term, 1), m.Purpose.ATTACH, 1, configuration)


def test_a_safekeeper_refuses_a_proposer_of_another_quorum_whatever_its_term():
    control = ControlState(1, INFO, m.NodeId(5, 1), configuration=THREE)
    for quorum, reason in ((OTHER, m.Refusal.OTHER_QUORUM), (OWN, None), (0, None)):
        refused = votes.to_greeting(control, m.ProposerGreeting(INFO, 1, quorum))
        assert (refused and refused[0]) == reason
    asked = vote(Configuration(1, frozenset({1}), term=19, quorum=OTHER))
    refused = votes.to_vote(control, asked, 0)
    assert refused is not None
    assert refused[0] == m.Refusal.OTHER_QUORUM
    # Nor one that knows no id: from now on it has to.
    assert votes.to_vote(control, vote(LEGACY), 0) is not None
    assert votes.to_vote(control, vote(THREE), 0) is None


def test_a_safekeeper_is_bound_by_the_first_proposer_that_is_elected():
    begun = replace(THREE, term=0)
    control = ControlState(1, INFO, m.NodeId(5, 1), configuration=begun)
    rival = replace(begun, quorum=OTHER)
    assert votes.to_vote(control, vote(rival), 0) is None
    assert votes.membership(control, vote(rival)) == rival
    bound = replace(control, configuration=THREE)
    assert votes.to_vote(bound, vote(rival), 0) is not None
    # From before ids: it keeps what it has until somebody is elected by a quorum of it.
    older = replace(control, configuration=LEGACY)
    assert votes.to_vote(older, vote(replace(LEGACY, quorum=OWN)), 0) is None
    assert votes.membership(older, vote(replace(LEGACY, quorum=OWN))) == LEGACY
