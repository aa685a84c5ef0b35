"""What a proposer knows of one safekeeper's connection."""

from dataclasses import dataclass
from enum import StrEnum

from walsender_bridge.quorum.proposer.effects import WalSource
from walsender_bridge.quorum.protocol.messages import (
    HotStandbyFeedback,
    NodeId,
    SafekeeperGreeting,
    VoteReply,
)


class PeerState(StrEnum):
    """In this order; a connection that breaks starts again at AWAY."""

    AWAY = "away"
    CONNECTED = "connected"
    GREETED = "greeted"
    VOTING = "voting"
    VOTED = "voted"
    RECOVERING = "recovering"
    STREAMING = "streaming"


@dataclass(slots=True)
class SafekeeperPeer:
    """One connection. `sent_lsn`: all below is sent or durable; `flush_lsn`: acknowledged in this term."""

    number: int
    state: PeerState = PeerState.AWAY
    greeting: SafekeeperGreeting | None = None
    reply: VoteReply | None = None
    sent_lsn: int = 0
    flush_lsn: int = 0
    #: The end of what `ReadWal` was asked for, while no answer has come.
    reading: int | None = None
    #: Where it is read, and where it could not be read from this position.
    source: WalSource | None = None
    donor: int | None = None
    failed: frozenset[WalSource] = frozenset()
    #: The oldest WAL that it holds, and the segments of it that it could not lend.
    begin_lsn: int = 0
    unlent: frozenset[int] = frozenset()
    #: The generation of the configuration that it was sent with Elected.
    generation: int = 0
    feedback: HotStandbyFeedback | None = None
    #: It has been asked again, as its greeting contradicted what it had acknowledged.
    doubted: bool = False
    #: The proposer that has its vote in a term that is not below ours. Another connection does not change it.
    rival: NodeId | None = None

    @property
    def identity(self) -> int:
        """The safekeeper's identity; 0 before its greeting."""
        return self.greeting.safekeeper if self.greeting else 0

    def closed(self) -> None:
        """Nothing that was on the way arrives any more."""
        self.state = PeerState.AWAY
        self.greeting = self.reply = self.reading = self.feedback = None
        self.failed = frozenset()
        self.unlent = frozenset()
        self.doubted = False
