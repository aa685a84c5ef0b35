"""Whether a safekeeper has the identity that it claims: an identity stands for one disk, with all its promises. Pure.

An identity is drawn when its disk is initialized (rule 10), so two safekeepers that claim one are copies. They would
acknowledge under one name what only one of them holds, and a proposer could then be elected by the one that lacks it.

- *Two addresses*: while a safekeeper is connected, another connection with its identity is a copy, or the same
  safekeeper at a second address; the two would close each other's connections endlessly. Once it is disconnected, it
  may have moved.
- *A disk that was rolled back*: a safekeeper that acknowledged WAL in this term had voted in it, and had taken over its
  history, durably. One that reconnects and has never heard of the term, or has none of its history, has lost those
  promises and everything after them: it was restored from a snapshot or a backup. The proposer that knows it makes it
  distrusted (`configuration.py`), which a majority of the others persists, so no later proposer believes it either.

A disk that was rolled back to a later moment within the term is not told from one after a crash. An acknowledged LSN may
lie inside a record, and the start scan finds the end of the last complete one; how long that record is, up to 1 GB, the
proposer does not know once its WAL has left the queue. In this session the safekeeper counts from then on for no more
than it has, and is sent the rest again; its vote in this term is not lost. A rollback while no proposer is in leader is
not detected.
"""

from collections.abc import Iterable

from walsender_bridge.quorum.proposer.effects import ClosePeer, Effect, PeerFault
from walsender_bridge.quorum.proposer.peer import SafekeeperPeer
from walsender_bridge.quorum.proposer.replication import Streaming
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.messages import NodeId, Refusal, Refused, VoteReply


def check(peer: SafekeeperPeer, peers: Iterable[SafekeeperPeer]) -> list[Effect]:
    """Send this safekeeper, which has just greeted, away if it cannot be who it says; empty: it can."""
    assert peer.greeting is not None
    why = _objection(peer, peers)
    if not why:
        return []
    refused = Refused(Refusal.NOT_A_MEMBER, peer.greeting.node_id, why)
    peer.closed()  # nobody counts it until it greets again
    return [PeerFault(peer.number, refused), ClosePeer(peer.number)]


def _objection(peer: SafekeeperPeer, peers: Iterable[SafekeeperPeer]) -> str:
    name = f"safekeeper {peer.identity:032x}"
    if any(other is not peer and other.identity == peer.identity for other in peers):
        return (
            f"{name} also answers at another address: either one is a copy of the other's disk, or both are the same process; "
            "give each safekeeper one address, and a copied one an empty data directory"
        )
    return ""


def stranger(peer: SafekeeperPeer, configuration: Configuration) -> list[Effect]:
    """What is wrong with a safekeeper that is no member: its vote counts for nothing (rule 10). Empty: it is one."""
    assert peer.greeting is not None
    if peer.identity in configuration.everyone:
        return []
    detail = f"safekeeper {peer.identity:032x} is not a member"
    return [PeerFault(peer.number, Refused(Refusal.NOT_A_MEMBER, peer.greeting.node_id, detail))]


def rolled_back(peer: SafekeeperPeer, own: NodeId, streaming: Streaming) -> bool:
    """Whether a greeting contradicts what the safekeeper has acknowledged in this term.

    One greeting proves nothing: on the way to us, at a second address, it may have been overtaken by the vote.
    """
    assert peer.greeting is not None
    return peer.identity in streaming.acked and peer.greeting.node_id.term < own.term


def contradicts(reply: VoteReply, identity: int, term: int, streaming: Streaming) -> bool:
    """Whether a vote does: who has acknowledged has this term's history, and VCL, once reached, ends a record."""
    held = streaming.acked.get(identity)
    if held is None:
        return False
    return (
        reply.history.latest_election_epoch != term
        or reply.flush_lsn < streaming.epoch_start <= held
    )


def distrusted(peer: SafekeeperPeer) -> list[Effect]:
    """Send a safekeeper away whose disk was rolled back."""
    assert peer.greeting is not None
    refused = Refused(Refusal.NOT_A_MEMBER, peer.greeting.node_id, has_forgotten(peer.identity))
    peer.closed()
    return [PeerFault(peer.number, refused), ClosePeer(peer.number)]


def has_forgotten(identity: int) -> str:
    """What is wrong with a safekeeper whose disk was rolled back, and the way out."""
    return (
        f"the disk of safekeeper {identity:032x} was rolled back: it has forgotten votes and WAL that it had "
        "acknowledged; give it an empty data directory, and replace it (docs/quorum-lost.md)"
    )
