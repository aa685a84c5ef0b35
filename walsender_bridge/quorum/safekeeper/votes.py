"""Which proposers a safekeeper votes for, and which it accepts at all. Pure.

A safekeeper belongs to one quorum for the life of its data directory. It refuses proposers of another one, whatever their
term, at their greeting and again at their vote request: so a majority that was formed elsewhere can neither displace its
proposer nor give it another membership. A safekeeper that belongs to none yet (a new directory, a membership from before
quorums had ids, or a first one of a proposer that was never elected) accepts any proposer, and is bound by `Elected`.
"""

from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol import terms
from walsender_bridge.quorum.protocol.configuration import Configuration, newest
from walsender_bridge.quorum.safekeeper.effects import ControlState

Objection = tuple[m.Refusal, str]


def outranks(candidate: m.NodeId, leader: m.NodeId) -> bool:
    """Whether a vote may go from the leader to this candidate: a strictly greater term (rule 2)."""
    return candidate.term > leader.term


def to_greeting(control: ControlState, greeting: m.ProposerGreeting) -> Objection | None:
    """Why this proposer is not accepted: its server, or its quorum, is another one."""
    mine, theirs = control.server, greeting.server
    if mine.system_id:
        for reason, ours, claimed in (
            (m.Refusal.OTHER_SYSTEM, mine.system_id, theirs.system_id),
            (m.Refusal.OTHER_MAJOR, mine.major, theirs.major),
            (m.Refusal.OTHER_SEGMENT_SIZE, mine.segment_size, theirs.segment_size),
        ):
            if ours != claimed:
                return reason, f"{claimed}, but its WAL here is of {ours}"
    # A proposer that only queries, or does not know its quorum yet, sends none; it evaluates what it learns here.
    return to_quorum(control, greeting.quorum) if greeting.quorum else None


def to_quorum(control: ControlState, quorum: int) -> Objection | None:
    """Why a proposer of this quorum is refused here."""
    own = control.configuration
    if not own.is_foreign(quorum):
        return None
    return m.Refusal.OTHER_QUORUM, other_quorum(own.quorum, quorum)


def other_quorum(safekeepers: int, proposers: int) -> str:
    """The message for both sides."""
    return (
        f"safekeeper belongs to quorum {safekeepers:032x}, not to {proposers:032x}: give it an empty data directory, or correct"
        " its address"
    )


def membership(control: ControlState, vote: m.Vote) -> Configuration:
    """The membership after this vote: a new data directory learns its first one from it."""
    held = control.configuration
    forsaken = held.quorum not in {0, vote.configuration.quorum}
    return vote.configuration if forsaken or not held else held


def to_vote(control: ControlState, vote: m.Vote, flush_lsn: Lsn) -> Objection | None:
    """Why this vote is not given. `flush_lsn`: the end of the log."""
    if not outranks(vote.node_id, control.node_id):
        return m.Refusal.OLDER_TERM, f"the vote went to {control.node_id}"
    if foreign := to_quorum(control, vote.configuration.quorum):
        return foreign
    term, own = vote.node_id.term, control.node_id.term
    if not terms.follows(term, own, vote.configuration.term):
        return m.Refusal.OUT_OF_ORDER, f"term {term} is out of reach of term {own}, its last vote"
    configuration = newest((membership(control, vote), vote.configuration))
    if control.safekeeper not in configuration.everyone:
        return m.Refusal.NOT_A_MEMBER, f"safekeeper {control.safekeeper:032x} is not a member"
    if vote.purpose == m.Purpose.ABORT:
        return None
    if (
        control.fence is not None
        and vote.timeline <= control.fence.timeline
        and vote.purpose == m.Purpose.ATTACH
    ):
        return (
            m.Refusal.FENCED_TIMELINE,
            f"a failover fenced timeline {control.fence.timeline} in term {control.fence.term}",
        )
    counted = control.history.counted(flush_lsn)
    if counted and vote.timeline < counted[-1].timeline:
        return (
            m.Refusal.OLDER_TIMELINE,
            f"timeline {vote.timeline} was left for {counted[-1].timeline}",
        )
    return None
