"""Terms that are far apart: one vote of one safekeeper neither ends a proposer nor uses up what the others need."""

from dataclasses import replace

import pytest

from walsender_bridge.errors import MalformedMessageError
from walsender_bridge.quorum.proposer.core import Phase, Proposer
from walsender_bridge.quorum.proposer.effects import (
    ClosePeer,
    Lineage,
    PeerConnected,
    PeerFault,
    PeerReceived,
    Primary,
    SendMessage,
    Stop,
    StopReason,
    Tick,
)
from walsender_bridge.quorum.proposer.election import next_term
from walsender_bridge.quorum.protocol import frames
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.protocol.terms import MAX_LEAP, MAX_REACH, MAX_TERM
from walsender_bridge.quorum.safekeeper import control_file, votes
from walsender_bridge.quorum.safekeeper.effects import ControlState

INFO = m.ServerInfo(7, 16, 1 << 24)
MEMBERS = Configuration(1, frozenset({1, 2, 3}), term=5)
GREATEST = (1 << 64) - 1
WAL = History((HistoryEntry(5, 0, 1),))


def held(safekeeper: int, term: int) -> m.SafekeeperGreeting:
    return m.SafekeeperGreeting(safekeeper, INFO, m.NodeId(term, 9), MEMBERS, 0, 0, 0)


def greetings(*terms: int) -> list[m.SafekeeperGreeting]:
    return [held(number, term) for number, term in enumerate(terms, 1)]


def vote(term: int, configuration: Configuration = MEMBERS) -> m.Vote:
    return m.Vote(m.NodeId(term, 22), m.Purpose.ATTACH, 1, configuration)


# -- a safekeeper -----------------------------------------------------------------------------------


def control(term: int) -> ControlState:
    return ControlState(1, INFO, m.NodeId(term, 9), WAL, MEMBERS)


def test_a_safekeeper_gives_no_vote_far_above_its_last_one():
    assert votes.to_vote(control(9), vote(9 + MAX_LEAP), 0) is None
    refused = votes.to_vote(control(9), vote(10 + MAX_LEAP), 0)
    assert refused is not None
    assert refused[0] == m.Refusal.OUT_OF_ORDER
    assert f"term {10 + MAX_LEAP} is out of reach of term 9" in refused[1]


def test_a_safekeeper_that_was_away_follows_who_was_elected_meanwhile():
    """As does a new one, which has no term."""
    later = replace(MEMBERS, term=40 * MAX_LEAP)
    for term in (0, 9):
        assert votes.to_vote(control(term), vote(1 + 40 * MAX_LEAP, later), 0) is None


@pytest.mark.parametrize(
    "message",
    [
        vote(GREATEST),
        m.Resume(m.NodeId(MAX_TERM + 1, 22)),
        m.Elected(GREATEST, 0, 0, False, WAL, MEMBERS),
        m.Append(GREATEST, 0, 0, 0, 0),
        m.Configure(5, replace(MEMBERS, term=GREATEST)),
        m.Configure(5, replace(MEMBERS, generation=GREATEST)),
    ],
)
def test_terms_beyond_the_greatest_are_no_message_to_a_safekeeper(message):
    data = frames.encode(message)
    with pytest.raises(MalformedMessageError, match=r"term|generation"):
        frames.decode(frames.decode_header(data), data[frames.HEADER_BYTES :])


def test_what_a_safekeeper_voted_for_before_there_was_a_greatest_is_read_and_told():
    state = control(GREATEST)
    assert control_file.from_record(control_file.to_record(state)) == state
    data = frames.encode(held(1, GREATEST))
    message = frames.decode(frames.decode_header(data), data[frames.HEADER_BYTES :])
    assert message == held(1, GREATEST)


# -- an election ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "heard", "expected"),
    [
        ((5, 5, 5), 0, 6),
        ((5, 7, 5), 0, 8),
        ((5, 5), 8, 9),
        ((0, 5, 0), 0, 6),
        # As far as the others follow, it is outbid; further on, it is left out.
        ((5, 4 + MAX_REACH, 5), 0, 5 + MAX_REACH),
        ((5, 5 + MAX_REACH, 5), 0, 6),
        ((5, GREATEST, 5), 0, 6),
        ((5, GREATEST, 5), GREATEST, 6),
        ((5, MAX_TERM, 5), MAX_TERM, 6),
        ((GREATEST, 7, 5), 0, 8),
        # It may not stand for the one that is away.
        ((5, GREATEST), 0, 0),
        ((5, MAX_LEAP), 0, 0),
        # The proposer before this one died when the first had voted above it: what they all take is found again.
        ((5, GREATEST, 5 + MAX_REACH), 0, 6 + MAX_REACH),
        ((5, MAX_LEAP + 4, 6 + MAX_REACH), 0, 7 + MAX_REACH),
        # A majority has gone there: so does the proposer.
        ((5, 9 * MAX_LEAP, 9 * MAX_LEAP), 0, 1 + 9 * MAX_LEAP),
        ((GREATEST, GREATEST, 5), 0, 0),
    ],
)
def test_the_next_term_is_above_all_that_a_quorum_follows(terms, heard, expected):
    assert next_term(greetings(*terms), MEMBERS, heard) == expected


def test_members_that_are_new_follow_as_far_as_one_was_elected():
    elected = replace(MEMBERS, term=7 * MAX_LEAP)
    assert next_term(greetings(7 * MAX_LEAP, 0), elected) == 1 + 7 * MAX_LEAP
    first = replace(MEMBERS, term=0)
    assert next_term(greetings(MAX_TERM - 1, 0, 0), first) == 1
    assert next_term(greetings(MAX_TERM - 1, 0), first) == 0


# -- a proposer -------------------------------------------------------------------------------------


def proposer(*terms: int) -> Proposer:
    """One whose safekeepers have voted in these terms."""
    core = Proposer(22, INFO, Primary(Lineage(1), 0x3000000), MEMBERS, 3)
    for peer, term in enumerate(terms):
        core.step(PeerConnected(peer))
        core.step(PeerReceived(peer, held(peer + 1, term)))
    return core


def elect(core: Proposer, *peers: int) -> None:
    for peer in peers:
        reply = m.VoteReply(core.node_id, 0, 0, 0, 0, History(), MEMBERS)
        core.step(PeerReceived(peer, reply))
    assert core.phase == Phase.LEADING


@pytest.mark.parametrize("term", [GREATEST, MAX_TERM, 8 * MAX_REACH])
def test_a_vote_out_of_reach_is_that_safekeepers_fault_and_ends_nobody(term):
    core = proposer(5, 5, term)
    elect(core, 0, 1)
    refused = m.Refused(m.Refusal.OLDER_TERM, m.NodeId(term, 9), "it voted")
    fault, close = core.step(PeerReceived(2, refused))
    assert isinstance(fault, PeerFault)
    assert f"voted in term {term}, which no election of the others reaches" in fault.refused.detail
    assert close == ClosePeer(2)
    core.peers[2].closed()
    core.step(PeerConnected(2))
    told = core.step(PeerReceived(2, held(3, term)))
    assert [type(each) for each in told] == [PeerFault], "it is not asked again"
    for _ in range(10 * core.limits.patience_ticks):
        assert not any(isinstance(each, Stop) for each in core.step(Tick()))
    assert core.heard_term == 6


def test_it_is_named_while_a_quorum_waits_for_the_one_that_is_away():
    core = proposer(5, GREATEST)
    assert core.phase == Phase.GREETING
    told = core.step(PeerReceived(0, held(1, 5)))
    assert [each.peer for each in told if isinstance(each, PeerFault)] == [1]
    core.step(PeerConnected(2))
    asked = core.step(PeerReceived(2, held(3, 5)))
    assert core.node_id.term == 6
    assert {e.peer for e in asked if isinstance(e, SendMessage)} >= {0, 2}


def test_a_majority_that_has_gone_there_is_followed():
    core = proposer(5, 5)
    elect(core, 0, 1)
    far = 3 * MAX_LEAP
    core.step(PeerConnected(2))
    core.step(PeerReceived(2, held(3, far)))
    core.peers[1].closed()
    core.step(PeerConnected(1))
    core.step(PeerReceived(1, held(2, far)))
    done = []
    for _ in range(3 * core.limits.patience_ticks):
        done += core.step(Tick())
    assert [e.reason for e in done if isinstance(e, Stop)] == [StopReason.OUTVOTED]
    assert core.heard_term == far
