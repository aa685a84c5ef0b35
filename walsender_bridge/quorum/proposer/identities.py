"""Whether a safekeeper has the identity that it claims: an identity stands for one disk, with all its promises. Pure.

An identity is drawn when its disk is initialized (rule 10), so two safekeepers that claim one are copies. They would
acknowledge under one name what only one of them holds, and a proposer could then be elected by the one that lacks it.

- *Two addresses*: while a safekeeper is connected, another connection with its identity is a copy, or the same
  safekeeper at a second address; the two would close each other's connections endlessly. Once it is disconnected, it
  may have moved.
- *A disk that was rolled back*: a safekeeper that acknowledged WAL in this term had voted in it, and had adopted its
history, durably. One that reconnects without knowing the term, or without its history, has lost those promises and
everything after them: it was restored from a snapshot or a backup. The proposer that detects this marks it distrusted
(`configuration.py`), which a majority of the others persists, so no later proposer trusts it either.

A disk that was rolled back to a later moment within the term is indistinguishable from one after a crash. An acknowledged
LSN may lie inside a record, and the start scan finds the end of the last complete one; the length of that record, up to
1 GB, is unknown to the proposer once its WAL has left the queue. For the rest of this session the safekeeper counts with
the WAL that it has, and is sent the rest again; its vote in this term is not lost. A rollback while no proposer is in leader is
not detected.
"""

from collections.abc import Iterable

from walsender_bridge.quorum.proposer.effects import ClosePeer, Effect, PeerFault
from walsender_bridge.quorum.proposer.peer import SafekeeperPeer
from walsender_bridge.quorum.proposer.replication import Streaming
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.messages import NodeId, Refusal, Refused, VoteReply


def check(peer: SafekeeperPeer, peers: Iterable[SafekeeperPeer]) -> list[Effect]:
    """Disconnect this safekeeper, which has just greeted, if its identity cannot be its own; empty: it can."""
    assert peer.greeting is not None
    why = _objection(peer, peers)
    if not why:
        return []
    refused = Refused(Refusal.NOT_A_MEMBER, peer.greeting.node_id, why)
    peer.closed()  # it does not count until it greets again
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
    """Fault of a safekeeper that is no member: its vote does not count (rule 10). Empty: it is a member."""
    assert peer.greeting is not None
    if peer.identity in configuration.everyone:
        return []
    detail = f"safekeeper {peer.identity:032x} is not a member"
    return [PeerFault(peer.number, Refused(Refusal.NOT_A_MEMBER, peer.greeting.node_id, detail))]


def rolled_back(peer: SafekeeperPeer, own: NodeId, streaming: Streaming) -> bool:
    """Whether a greeting contradicts what the safekeeper has acknowledged in this term.

    One greeting proves nothing: from a second address, it may have been overtaken by the vote.
    """
    assert peer.greeting is not None
    return peer.identity in streaming.acked and peer.greeting.node_id.term < own.term


def contradicts(reply: VoteReply, identity: int, term: int, streaming: Streaming) -> bool:
    """Whether a vote does: after an acknowledgement a log has this term's history, and VCL, once reached, ends a record."""
    held = streaming.acked.get(identity)
    if held is None:
        return False
    return (
        reply.history.latest_election_epoch != term
        or reply.flush_lsn < streaming.epoch_start <= held
    )


def distrusted(peer: SafekeeperPeer) -> list[Effect]:
    """Disconnect a safekeeper whose disk was rolled back."""
    assert peer.greeting is not None
    refused = Refused(Refusal.NOT_A_MEMBER, peer.greeting.node_id, has_forgotten(peer.identity))
    peer.closed()
    return [PeerFault(peer.number, refused), ClosePeer(peer.number)]


def has_forgotten(identity: int) -> str:
    """Message for a safekeeper whose disk was rolled back, with the remedy."""
    return (
        f"the disk of safekeeper {identity:032x} was rolled back: it has lost votes and WAL that it had "
        "acknowledged; give it an empty data directory, and replace it (docs/quorum-lost.md)"
    )
