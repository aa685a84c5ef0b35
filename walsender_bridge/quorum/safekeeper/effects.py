"""What happens to a safekeeper's core, and what it has done: the events and the ordered effects.

The driver performs the effects of an event strictly in order, each to its end, before it hands in the next
event; effects that have an answer put it in front of the events that wait, in their order. A process that
dies between any two effects has performed the ones before and none behind: every order below is chosen for
that. `conn` is the driver's number of a connection; numbers are not used twice.

    effect                         its answer
    WriteWal(lsn, ...)             none, or NoRoom(flush_lsn, why)
    SyncWal(lsn)                   WalSynced(flush_lsn), or NoRoom(flush_lsn, why)
    AlignWal(flush_lsn, ...)       WalAligned(flush_lsn, commit_lsn, begin_lsn)
"""

from dataclasses import dataclass
from typing import TypeAlias

from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History
from walsender_bridge.quorum.protocol.messages import (
    HotStandbyFeedback,
    NodeId,
    ServerInfo,
    ToProposer,
    ToSafekeeper,
)
from walsender_bridge.quorum.protocol.value import value

# -- the control state ------------------------------------------------------------------------------

_NO_SERVER = ServerInfo()
_NO_VOTE = NodeId()
_NO_HISTORY = History()
_NO_CONFIGURATION = Configuration()


@dataclass(frozen=True, slots=True)
class Fence:
    """A failover's: `timeline` and older ones are refused until a newer one attaches, or it is aborted."""

    term: int
    timeline: int


@dataclass(frozen=True, slots=True)
class ControlState:
    """What a safekeeper knows for sure after a crash, beside its WAL. The control file holds exactly this.

    `safekeeper` is its identity (128 bits), drawn when the data directory is made. The last two LSNs are
    written lazily: after a crash they may be older than what was told, never newer.
    """

    safekeeper: int
    server: ServerInfo = _NO_SERVER
    node_id: NodeId = _NO_VOTE
    history: History = _NO_HISTORY
    configuration: Configuration = _NO_CONFIGURATION
    fence: Fence | None = None
    commit_lsn: int = 0
    restart_lsn: int = 0


# -- events -----------------------------------------------------------------------------------------


@value
class MessageReceived:
    """A message came. For an `Append`, all of its WAL bytes are in the driver's hands."""

    conn: int
    message: ToSafekeeper


@dataclass(frozen=True, slots=True)
class Closed:
    """A connection is gone, whoever ended it. Its unread bytes are dropped."""

    conn: int


@value
class Drained:
    """Nothing more has arrived, or the buffer is full: time to make what was written durable."""


@value
class WalSynced:
    """Everything below `flush_lsn` is durable."""

    flush_lsn: int


@dataclass(frozen=True, slots=True)
class DiskFull:
    """The disk takes no more WAL: what was written beyond `flush_lsn` is dropped, the rest is durable."""

    flush_lsn: int
    why: str


@dataclass(frozen=True, slots=True)
class WalAligned:
    """Answer to `AlignWal`: where the last complete record at or below each LSN ends; the oldest WAL held."""

    flush_lsn: int
    commit_lsn: int
    begin_lsn: int


@dataclass(frozen=True, slots=True)
class ReadersMoved:
    """The readers' hot-standby feedback, all taken together, is now this."""

    feedback: HotStandbyFeedback


@dataclass(frozen=True, slots=True)
class PersistDue:
    """It is time to write down the lazy LSNs, if they moved (seconds, not at each message)."""


Event: TypeAlias = (
    MessageReceived
    | Closed
    | Drained
    | WalSynced
    | DiskFull
    | WalAligned
    | ReadersMoved
    | PersistDue
)


# -- effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PersistControl:
    """Replace the control file by this, durably."""

    state: ControlState


@dataclass(frozen=True, slots=True)
class KeepTimelines:
    """Write down, durably, what led to the newest timeline of `history`: `ancestors`, further back than it reaches."""

    history: History
    ancestors: tuple[tuple[int, int], ...]


@value
class WriteWal:
    """Write the bytes of the `Append` in hand at `lsn`, on `timeline`. Not yet durable.

    The first write on a timeline can be inside a segment: that segment starts with the bytes of the timeline
    before, up to `lsn`, as a promoted server's own does.
    """

    lsn: int
    length: int
    timeline: int


@value
class SyncWal:
    """Make what was written below `lsn` durable. Answer: `WalSynced`."""

    lsn: int


@dataclass(frozen=True, slots=True)
class AlignWal:
    """Find the last complete record at or below each LSN (rule 9). Answer: `WalAligned`."""

    flush_lsn: int
    commit_lsn: int


@dataclass(frozen=True, slots=True)
class TruncateWal:
    """Zero the WAL from `lsn` to its end on every timeline, durably: no scan may find it again (rule 3)."""

    lsn: int


@dataclass(frozen=True, slots=True)
class ResetWal:
    """Drop all WAL; it begins anew, empty, at `lsn` (the start of a segment), durably."""

    lsn: int


@dataclass(frozen=True, slots=True)
class SendWal:
    """Send [begin_lsn, end_lsn) as `Fetched` frames, and the bytes behind each, to `conn`."""

    conn: int
    term: int
    begin_lsn: int
    end_lsn: int


@dataclass(frozen=True, slots=True)
class SendHeld:
    """Send `Held` to `conn`: what WAL is here, and what older WAL is wanted."""

    conn: int
    term: int


@value
class TakeCatchUpWal:
    """Take the bytes of the `Older` in hand, below all WAL that is held, then `SendHeld`."""

    conn: int
    term: int
    begin_lsn: int
    timeline: int


@value
class ServeReaders:
    """Readers may have WAL up to `lsn`. It never goes back, but for the rest of an incomplete record."""

    lsn: int


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message."""

    conn: int
    message: ToProposer


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection once what was sent to it is out. What it sent and is not read yet is dropped."""

    conn: int


Effect: TypeAlias = (
    PersistControl
    | KeepTimelines
    | WriteWal
    | SyncWal
    | AlignWal
    | TruncateWal
    | ResetWal
    | SendWal
    | SendHeld
    | TakeCatchUpWal
    | ServeReaders
    | SendMessage
    | Close
)
