"""What happens to the proposer's core, and what it has done: the events and the ordered effects.

The driver owns sockets and bytes. `peer` is its number of a safekeeper's address; a peer's messages arrive in
order until `PeerClosed`. It keeps the WAL of `[queue_begin, end)` in memory, where each `ReleaseWal` moves
`queue_begin`. LSNs and lengths are bytes.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import MAX_ENTRIES
from walsender_bridge.quorum.protocol.messages import (
    HotStandbyFeedback,
    NodeId,
    Refusal,
    Refused,
    ToProposer,
    ToSafekeeper,
)
from walsender_bridge.quorum.protocol.value import value

# -- what it is told at the start -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """In bytes, but for ticks and epochs. Memory for WAL is at most `queue_bytes + inflight_bytes * number of safekeepers`."""

    queue_bytes: int = 48 << 20
    #: Sent to one safekeeper and not acknowledged by it.
    inflight_bytes: int = 4 << 20
    #: WAL of one message (`frames.MAX_WAL_BYTES` at most).
    append_bytes: int = 512 << 10
    #: How far a safekeeper may stay behind until its WAL is let go (rule 8).
    max_laggard_bytes: int = 16 << 30
    #: For how many ticks commits may wait for room on full disks before the safekeeper that is furthest behind is let go.
    full_ticks: int = 25
    #: Older WAL that safekeepers are brought between two ticks, so that it delays no commit (`catch_up/core.py`); 0: none.
    backfill_bytes: int = 4 << 20
    #: How much WAL below VCL must be equal at the primary and the best safekeeper.
    compare_bytes: int = 64 << 10
    #: Not bytes: how long a proposer that was outvoted waits at least before it campaigns again (`rivals.py`).
    patience_ticks: int = 8
    #: How many epochs a history keeps separate, as long as older ones are committed.
    epochs: int = MAX_ENTRIES


@dataclass(frozen=True, slots=True)
class Lineage:
    """A server's timelines. `switches`: (timeline, LSN where it was left), oldest first, without the last."""

    timeline: int
    switches: tuple[tuple[int, int], ...] = ()

    def timeline_at(self, lsn: int) -> int:
        """The timeline of the byte at `lsn`."""
        return next((t for t, left in self.switches if lsn < left), self.timeline)


@dataclass(frozen=True, slots=True)
class Primary:
    """The server that the WAL comes from, as it was when the proposer connected to it."""

    lineage: Lineage
    flush_lsn: int


# -- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A connection to this safekeeper stands. A number that is new is one more address."""

    peer: int


@value
class PeerReceived:
    """A message came (`Fetched` does not: its bytes are the driver's business)."""

    peer: int
    message: ToProposer


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The connection is gone, whoever ended it."""

    peer: int


@value
class WalReceived:
    """The primary sent [begin_lsn, end_lsn); the bytes are in the queue."""

    begin_lsn: int
    end_lsn: int


@value
class WalRead:
    """Answer to `ReadWal`: these bytes are in hand for `peer`. `begin_lsn == end_lsn`: it failed."""

    peer: int
    begin_lsn: int
    end_lsn: int


@dataclass(frozen=True, slots=True)
class WalCompared:
    """Answer to `CompareWal` of this peer up to `end_lsn`. `equal`: None when it could not be done.

    `removed`: because the primary has removed that WAL.
    """

    peer: int
    end_lsn: int
    equal: bool | None
    removed: bool = False


@dataclass(frozen=True, slots=True)
class PrimaryKeeps:
    """The primary can still send its WAL from `begin_lsn` on."""

    begin_lsn: int


@dataclass(frozen=True, slots=True)
class PrimaryAt:
    """Answer to `LocatePrimary`: its WAL is flushed up to here now."""

    flush_lsn: int


@dataclass(frozen=True, slots=True)
class MembersWanted:
    """An operator changes the membership to these identities."""

    members: frozenset[int]


@dataclass(frozen=True, slots=True)
class Tick:
    """Some time has passed: heartbeats, and another try where something failed."""


Event: TypeAlias = (
    PeerConnected
    | PeerReceived
    | PeerClosed
    | WalReceived
    | WalRead
    | WalCompared
    | PrimaryKeeps
    | PrimaryAt
    | MembersWanted
    | Tick
)


# -- effects ----------------------------------------------------------------------------------------


class WalSource(StrEnum):
    """Where WAL is read that is no longer in the queue."""

    PRIMARY = "primary"
    PEER = "peer"


class StopReason(StrEnum):
    """Why a proposer ends. It never elects itself again (rule 5).

    After OUTVOTED its process begins a new session with a UUID of its own, and the rest is for an operator.
    """

    DISPLACED = "displaced"
    OUTVOTED = "outvoted"
    FENCED = "fenced"
    OTHER_SERVER = "other server"
    OTHER_QUORUM = "the safekeepers belong to another quorum"
    AHEAD = "the safekeepers are ahead of this server"
    OTHER_HISTORY = "other timelines"
    OTHER_BYTES = "other WAL at the same position"
    REMOVED = "this server has removed WAL that the safekeepers lack"
    BROKEN = "the safekeepers contradict each other"


#: Refusals that rule the proposer out when a majority says so; others are one safekeeper's.
STOPS = {
    Refusal.FENCED_TIMELINE: StopReason.FENCED,
    Refusal.OLDER_TIMELINE: StopReason.OTHER_HISTORY,
    Refusal.OTHER_SYSTEM: StopReason.OTHER_SERVER,
    Refusal.OTHER_MAJOR: StopReason.OTHER_SERVER,
    Refusal.OTHER_SEGMENT_SIZE: StopReason.OTHER_SERVER,
    Refusal.OTHER_QUORUM: StopReason.OTHER_QUORUM,
}


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message."""

    peer: int
    message: ToSafekeeper


@value
class SendWal:
    """Send [begin_lsn, end_lsn) as one `Append`: from the queue, or what the last `WalRead` brought."""

    peer: int
    begin_lsn: int
    end_lsn: int
    commit_lsn: int
    restart_lsn: int


@dataclass(frozen=True, slots=True)
class ClosePeer:
    """Close the connection; it is made again later, like every connection that breaks."""

    peer: int


@dataclass(frozen=True, slots=True)
class PeerFault:
    """Tell the operator: this safekeeper cannot take part, and why. Its connection may stand."""

    peer: int
    refused: Refused


@dataclass(frozen=True, slots=True)
class LocatePrimary:
    """Ask the primary how far its WAL is flushed. Answer: `PrimaryAt`."""


@dataclass(frozen=True, slots=True)
class CompareWal:
    """Fetch [begin_lsn, end_lsn) from `peer` and from the primary, compare. Answer: `WalCompared`."""

    peer: int
    begin_lsn: int
    end_lsn: int


@dataclass(frozen=True, slots=True)
class StartStreaming:
    """Elected: have the primary stream from `lsn`. Until then nothing is asked of it."""

    node_id: NodeId
    lsn: int


@value
class ReadWal:
    """Read [begin_lsn, end_lsn) for `peer`, from `donor` if the source is a peer. Answer: `WalRead`."""

    peer: int
    source: WalSource
    begin_lsn: int
    end_lsn: int
    donor: int | None = None


@value
class ReadCatchUpWal:
    """Read [begin_lsn, end_lsn) from `donor` for a peer that lacks it, below the beginning of its log."""

    peer: int
    begin_lsn: int
    end_lsn: int
    donor: int


@value
class SendCatchUpWal:
    """Send what `ReadCatchUpWal` brought: WAL of a segment whose last byte is of this timeline."""

    peer: int
    begin_lsn: int
    end_lsn: int
    timeline: int


@value
class Feedback:
    """A quorum has everything below `lsn` on disk: tell the primary (write = flush = lsn, apply = 0)."""

    lsn: int


@dataclass(frozen=True, slots=True)
class PassFeedback:
    """The least of the readers' hot-standby feedback is now this."""

    feedback: HotStandbyFeedback


@value
class ReleaseWal:
    """The queue begins at `lsn`: free the memory of what is below and not being sent."""

    lsn: int


@value
class AdvanceSlot:
    """Every safekeeper that is not to be rebuilt has the WAL below `lsn`: no slot needs to hold it.

    But the start of a record that goes on at `lsn`: votes go back to it (rule 9). The driver stays below.
    """

    lsn: int


@dataclass(frozen=True, slots=True)
class MarkRebuild:
    """This member stayed too far behind: its WAL is let go, it begins anew when it comes back (rule 8)."""

    safekeeper: int


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """This membership is in force. The one before it is needed still, until it is settled."""

    configuration: Configuration


@dataclass(frozen=True, slots=True)
class MembersSettled:
    """A majority of each membership has persisted it: it outlives whoever left, and a minority's disks."""

    configuration: Configuration


@dataclass(frozen=True, slots=True)
class Stop:
    """Close every connection and end. `by`: who was in the way, if it was another proposer."""

    reason: StopReason
    detail: str
    by: NodeId | None = None


Effect: TypeAlias = (
    SendMessage
    | SendWal
    | ClosePeer
    | PeerFault
    | LocatePrimary
    | CompareWal
    | StartStreaming
    | ReadWal
    | Feedback
    | PassFeedback
    | ReleaseWal
    | AdvanceSlot
    | MarkRebuild
    | MembersChanged
    | MembersSettled
    | Stop
)
