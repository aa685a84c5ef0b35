"""Votes that went to another proposer, and what they mean for this one: only an election displaces. Pure.

A *rival* is a proposer that has a safekeeper's vote in a term that is not below ours. It may be dead: a vote
request that was under way when its process ended reaches a safekeeper after that safekeeper has greeted us.

**A vote alone does not displace a proposer.** Whether the rival was elected is in every greeting: an elected proposer
stamps its term on the configuration, and distributes it with Elected. A proposer that ended before this one began
cannot have been elected in a term of ours or above: its quorum had voted before we were greeted, every two quorums
share a safekeeper, and our term is above each with which a quorum greeted us. So `has_leader` proves a rival that ran
concurrently; then this process stops for good, and of any two running proposers one is left.

**Without that proof the proposer waits, and then campaigns again**: the session ends, and a new one has a term above
the rival's. It must, even if it leads with a quorum: the voter in question can never follow this term. The wait lets a
running rival be elected first; it is derived from the proposer's UUID and doubles with each consecutive campaign, so
two proposers that keep outvoting each other soon leave one of them enough time for an election. Safety does not
depend on this: terms decide.

**A vote that no election reaches is that safekeeper's fault** (`protocol/terms.py`), as long as the others are a quorum:
the others would refuse a campaign above it, and waiting for it would never end.
"""

from collections.abc import Collection, Container

from walsender_bridge.quorum.proposer.effects import PeerFault
from walsender_bridge.quorum.proposer.peer import SafekeeperPeer
from walsender_bridge.quorum.protocol import terms
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.messages import NodeId, Refusal, Refused, SafekeeperGreeting


def outvotes(voted: NodeId, own: NodeId) -> bool:
    """Whether a safekeeper that voted for `voted` can never follow `own`."""
    return voted.term >= own.term and voted != own


def out_of_reach(voted: NodeId, own: int) -> bool:
    """Whether no proposer that needs the safekeepers in term `own` campaigns above this vote."""
    return not terms.follows(voted.term + 1, own, own, terms.MAX_REACH)


def outvoted(
    peer: SafekeeperPeer,
    voted: NodeId,
    own: NodeId,
    configuration: Configuration,
    peers: Collection[SafekeeperPeer],
) -> list[PeerFault]:
    """A safekeeper's vote is known: one for another proposer is lost to this term. Sets its `rival`."""
    before = peer.rival
    peer.rival = voted if outvotes(voted, own) else None
    if peer.rival and out_of_reach(voted, own.term):
        gone = {
            p.identity for p in peers if p.greeting and out_of_reach(p.greeting.node_id, own.term)
        }
        if configuration.has_quorum(configuration.trusted - gone - {peer.identity}):
            peer.rival = None
            return [_fault(peer, voted)]
    if peer.rival is None or before == peer.rival:
        return []
    refused = Refused(Refusal.OLDER_TERM, voted, f"the vote went to {voted}")
    return [PeerFault(peer.number, refused)]


def left_out(peers: Collection[SafekeeperPeer], far: Container[int]) -> list[PeerFault]:
    """The safekeepers with these identities have voted out of reach."""
    return [_fault(p, p.greeting.node_id) for p in peers if p.greeting and p.identity in far]


def _fault(peer: SafekeeperPeer, voted: NodeId) -> PeerFault:
    why = (
        f"voted in term {voted.term}, which no election of the others reaches: replace it with one that has an empty data "
        "directory (docs/quorum-lost.md)"
    )
    return PeerFault(peer.number, Refused(Refusal.OLDER_TERM, voted, why))


def has_leader(greeting: SafekeeperGreeting, own: NodeId, *, leads: bool) -> bool:
    """Whether the greeting proves that another proposer was elected in a term of ours or above.

    `leads`: our own term was elected, so a configuration stamped with it is ours.
    """
    elected = greeting.configuration.term
    return elected > own.term or (elected == own.term and not leads)


def patience(ticks: int, identity: int) -> int:
    """Ticks until an outvoted proposer campaigns again: from `ticks` to twice as many."""
    return ticks + identity % (ticks + 1)
