"""The proposer's state of one safekeeper's connection."""

from dataclasses import dataclass
from enum import StrEnum

from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.proposer.effects import WalSource
from walsender_bridge.quorum.protocol.messages import (
    HotStandbyFeedback,
    NodeId,
    SafekeeperGreeting,
    VoteReply,
)


class PeerState(StrEnum):
    """In this order; a connection that breaks goes back to AWAY."""

    AWAY = "away"
    CONNECTED = "connected"
    GREETED = "greeted"
    VOTING = "voting"
    VOTED = "voted"
    RECOVERING = "recovering"
    STREAMING = "streaming"


@dataclass(slots=True)
class SafekeeperPeer:
    """One connection. `sent_lsn`: all WAL below is sent or durable; `flush_lsn`: acknowledged in this term."""

    number: int
    state: PeerState = PeerState.AWAY
    greeting: SafekeeperGreeting | None = None
    reply: VoteReply | None = None
    sent_lsn: Lsn = 0
    flush_lsn: Lsn = 0
    #: The end of the range of a pending `ReadWal`.
    reading: Lsn | None = None
    #: The source of that range, and the sources that failed at this position.
    source: WalSource | None = None
    donor: int | None = None
    failed: frozenset[WalSource] = frozenset()
    #: The oldest WAL that it holds, and the segments of it that it could not send to others.
    begin_lsn: Lsn = 0
    unlent: frozenset[int] = frozenset()
    #: The generation of the configuration sent to it with Elected.
    generation: int = 0
    feedback: HotStandbyFeedback | None = None
    #: It was greeted again, as its greeting contradicted what it had acknowledged.
    doubted: bool = False
    #: The proposer that has its vote in a term not below ours. A reconnection does not change it.
    rival: NodeId | None = None

    @property
    def identity(self) -> int:
        """The safekeeper's identity; 0 before its greeting."""
        return self.greeting.safekeeper if self.greeting else 0

    def closed(self) -> None:
        """The connection broke: messages under way are lost."""
        self.state = PeerState.AWAY
        self.greeting = self.reply = self.reading = self.feedback = None
        self.failed = frozenset()
        self.unlent = frozenset()
        self.doubted = False
