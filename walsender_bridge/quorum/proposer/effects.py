"""The events of the proposer's core, and its ordered effects.

The driver owns sockets and bytes. `peer` is its number of a safekeeper's address; a peer's messages arrive in order
until `PeerClosed`. The driver keeps the WAL of `[queue_begin, end)` in memory; each `ReleaseWal` advances
`queue_begin`. LSNs and lengths are bytes.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition
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

# -- initial values ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """In bytes, except ticks and epochs. WAL takes at most `queue_bytes + inflight_bytes * safekeepers` of memory."""

    queue_bytes: int = 48 << 20
    #: Sent to one safekeeper and not acknowledged by it.
    inflight_bytes: int = 4 << 20
    #: WAL of one message (`frames.MAX_WAL_BYTES` at most).
    append_bytes: int = 512 << 10
    #: How far a safekeeper may lag before its WAL is released (rule 8).
    max_laggard_bytes: int = 16 << 30
    #: Ticks that commits may wait on full disks before the WAL of the safekeeper furthest behind is released.
    full_ticks: int = 25
    #: WAL sent for catch-up between two ticks, so that it delays no commit (`catch_up/core.py`); 0: none.
    backfill_bytes: int = 4 << 20
    #: How much WAL below VCL must be equal at the primary and the best safekeeper.
    compare_bytes: int = 64 << 10
    #: Ticks: the least time that an outvoted proposer waits before it campaigns again (`rivals.py`).
    patience_ticks: int = 8
    #: Election epochs that a history keeps apart, as long as older ones are committed.
    epochs: int = MAX_ENTRIES


@dataclass(frozen=True, slots=True)
class Lineage:
    """A server's timelines. `switches`: those before it, each with its switch point, oldest first."""

    timeline: int
    switches: tuple[WalPosition, ...] = ()

    def timeline_at(self, lsn: Lsn) -> int:
        """The timeline of the byte at `lsn`."""
        return next((each.timeline for each in self.switches if lsn < each.lsn), self.timeline)


@dataclass(frozen=True, slots=True)
class Primary:
    """The source server, as of the proposer's connection to it."""

    lineage: Lineage
    flush_lsn: Lsn


# -- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A connection to this safekeeper is established. A new number is one more address."""

    peer: int


@value
class PeerReceived:
    """A message arrived (except `Fetched`, whose bytes the driver handles)."""

    peer: int
    message: ToProposer


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The connection is closed, by either end."""

    peer: int


@value
class WalReceived:
    """The primary sent [begin_lsn, end_lsn); the bytes are in the queue."""

    begin_lsn: Lsn
    end_lsn: Lsn


@value
class WalRead:
    """Answer to `ReadWal`: these bytes were read for `peer`. `begin_lsn == end_lsn`: it failed."""

    peer: int
    begin_lsn: Lsn
    end_lsn: Lsn


@dataclass(frozen=True, slots=True)
class WalCompared:
    """Answer to `CompareWal` of this peer up to `end_lsn`. `equal`: None when the comparison failed.

    `removed`: it failed because the primary has removed that WAL.
    """

    peer: int
    end_lsn: Lsn
    equal: bool | None
    removed: bool = False


@dataclass(frozen=True, slots=True)
class PrimaryKeeps:
    """The primary can still send its WAL from `begin_lsn` on."""

    begin_lsn: Lsn


@dataclass(frozen=True, slots=True)
class PrimaryAt:
    """Answer to `LocatePrimary`: the primary's current flush position."""

    flush_lsn: Lsn


@dataclass(frozen=True, slots=True)
class MembersWanted:
    """An operator requests a membership of these identities."""

    members: frozenset[int]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: send heartbeats, and retry what failed."""


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
    """The source of WAL that is no longer in the queue."""

    PRIMARY = "primary"
    PEER = "peer"


class StopReason(StrEnum):
    """Why a proposer ends. It never campaigns again (rule 5).

    After OUTVOTED its process starts a new session with another UUID; every other reason needs an operator.
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


#: Refusals that rule the proposer out if a majority gives them; any other is that safekeeper's fault.
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
    """Send [begin_lsn, end_lsn) as one `Append`: from the queue, or from the last `WalRead`."""

    peer: int
    begin_lsn: Lsn
    end_lsn: Lsn
    commit_lsn: Lsn
    restart_lsn: Lsn


@dataclass(frozen=True, slots=True)
class ClosePeer:
    """Close the connection; it is reopened later, like every connection that breaks."""

    peer: int


@dataclass(frozen=True, slots=True)
class PeerFault:
    """Report to the operator why this safekeeper cannot take part. Its connection may stay open."""

    peer: int
    refused: Refused


@dataclass(frozen=True, slots=True)
class LocatePrimary:
    """Request the primary's flush position. Answer: `PrimaryAt`."""


@dataclass(frozen=True, slots=True)
class CompareWal:
    """Fetch [begin_lsn, end_lsn) from `peer` and from the primary, and compare. Answer: `WalCompared`."""

    peer: int
    begin_lsn: Lsn
    end_lsn: Lsn


@dataclass(frozen=True, slots=True)
class StartStreaming:
    """The proposer is elected: start streaming from the primary at `lsn`. Before, it requests no WAL."""

    node_id: NodeId
    lsn: Lsn


@value
class ReadWal:
    """Read [begin_lsn, end_lsn) for `peer`, from `donor` if the source is a peer. Answer: `WalRead`."""

    peer: int
    source: WalSource
    begin_lsn: Lsn
    end_lsn: Lsn
    donor: int | None = None


@value
class ReadCatchUpWal:
    """Read [begin_lsn, end_lsn) from `donor` for the catch-up of a peer, below the beginning of its log."""

    peer: int
    begin_lsn: Lsn
    end_lsn: Lsn
    donor: int


@value
class SendCatchUpWal:
    """Send what `ReadCatchUpWal` read: WAL of a segment whose last byte is on this timeline."""

    peer: int
    begin_lsn: Lsn
    end_lsn: Lsn
    timeline: int


@value
class Feedback:
    """A quorum has everything below `lsn` on disk: report it to the primary (write = flush = lsn, apply = 0)."""

    lsn: Lsn


@dataclass(frozen=True, slots=True)
class PassFeedback:
    """Send the primary this hot standby feedback, the oldest of all readers'."""

    feedback: HotStandbyFeedback


@value
class ReleaseWal:
    """The queue begins at `lsn`: free the WAL below that is not being sent."""

    lsn: Lsn


@value
class AdvanceSlot:
    """Every safekeeper that needs no full resync has the WAL below `lsn`: no slot needs to keep it.

    Except the start of a record that continues at `lsn`, to which votes go back (rule 9): the driver stays below it.
    """

    lsn: Lsn


@dataclass(frozen=True, slots=True)
class MarkRebuild:
    """This member lags too far behind: its WAL is released, and it does a full resync when it comes back (rule 8)."""

    safekeeper: int


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """This membership is in force. The previous one is still needed until it is settled."""

    configuration: Configuration


@dataclass(frozen=True, slots=True)
class MembersSettled:
    """A majority of each membership has persisted it: it survives the members that left, and the loss of a minority."""

    configuration: Configuration


@dataclass(frozen=True, slots=True)
class Stop:
    """Close every connection and end. `by`: the other proposer, if one is the reason."""

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
