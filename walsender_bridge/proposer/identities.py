"""Whether a safekeeper has the identity that it claims: an identity stands for one disk, with all its promises. Pure.

An identity is drawn when its disk is initialized (rule 10), so two safekeepers that claim one are copies. They would
acknowledge under one name what only one of them holds, and a proposer could then be elected by the one that lacks it.

- *Two addresses*: while a safekeeper is connected, another connection with its identity is a copy, or the same
  safekeeper at a second address; the two would close each other's connections endlessly. Once it is disconnected, it
  may have moved.
- *A disk that was rolled back*: a safekeeper that acknowledged WAL in this term had voted in it, durably. One that
  reconnects and has never heard of the term has lost that vote, and everything after it: it was restored from a
  snapshot or a backup.

A disk that was rolled back to a moment within the current term looks the same as one after a crash in the middle of a
record, and a greeting does not distinguish the two.
"""

from collections.abc import Iterable

from walsender_bridge.proposer.effects import ClosePeer, Effect, PeerFault
from walsender_bridge.proposer.peer import Peer
from walsender_bridge.proposer.streaming import Streaming
from walsender_bridge.safekeeper.messages import NodeId, Refusal, Refused


def check(
    peer: Peer, peers: Iterable[Peer], own: NodeId, streaming: Streaming | None
) -> list[Effect]:
    """Send this safekeeper, which has just greeted, away if it cannot be who it says; empty: it can."""
    assert peer.greeting is not None
    why = _objection(peer, peers, own, streaming)
    if not why:
        return []
    refused = Refused(Refusal.NOT_A_MEMBER, peer.greeting.node_id, why)
    peer.closed()  # nobody counts it until it greets again
    return [PeerFault(peer.number, refused), ClosePeer(peer.number)]


def _objection(peer: Peer, peers: Iterable[Peer], own: NodeId, streaming: Streaming | None) -> str:
    assert peer.greeting is not None
    name = f"safekeeper {peer.identity:032x}"
    if any(other is not peer and other.identity == peer.identity for other in peers):
        return (
            f"{name} also answers at another address: either one is a copy of the other's disk, or both are the same process; "
            "give each safekeeper one address, and a copied one an empty data directory"
        )
    acknowledged = streaming is not None and peer.identity in streaming.acked
    if acknowledged and peer.greeting.node_id.term < own.term:
        return (
            f"{name} has acknowledged WAL in term {own.term}, but now knows no term later than "
            f"{peer.greeting.node_id.term}: its disk was rolled back; give it an empty data directory, and let it "
            "join as a new member"
        )
    return ""
