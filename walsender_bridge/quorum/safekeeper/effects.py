"""The events of a safekeeper's core, and its ordered effects.

The driver performs the effects of an event strictly in order, each to its end, before it passes in the next event;
the answer of an effect goes in front of the waiting events, in order. A process that dies between two effects has
performed the ones before and none behind: every order below is chosen for that. `conn` is the driver's number of a
connection; numbers are not reused.

    effect                         its answer
    WriteWal(lsn, ...)             none, or DiskFull(flush_lsn, why)
    SyncWal(lsn)                   WalSynced(flush_lsn), or DiskFull(flush_lsn, why)
    AlignWal(flush_lsn, ...)       WalAligned(flush_lsn, commit_lsn, begin_lsn)
"""

from dataclasses import dataclass
from typing import TypeAlias

from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition
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
    """A failover's fence: `timeline` and older ones are refused until a newer one attaches, or the failover is aborted."""

    term: int
    timeline: int


@dataclass(frozen=True, slots=True)
class ControlState:
    """A safekeeper's durable state, besides its WAL. The control file holds exactly this.

    `safekeeper` is its identity (128 bits), drawn when the data directory is created. The last two LSNs are written lazily:
    after a crash they may be older than what was sent, never newer.
    """

    safekeeper: int
    server: ServerInfo = _NO_SERVER
    node_id: NodeId = _NO_VOTE
    history: History = _NO_HISTORY
    configuration: Configuration = _NO_CONFIGURATION
    fence: Fence | None = None
    commit_lsn: Lsn = 0
    restart_lsn: Lsn = 0


# -- events -----------------------------------------------------------------------------------------


@value
class MessageReceived:
    """A message arrived. For an `Append`, the driver has all of its WAL bytes."""

    conn: int
    message: ToSafekeeper


@dataclass(frozen=True, slots=True)
class Closed:
    """A connection is closed, by either end. Its unread bytes are dropped."""

    conn: int


@value
class Drained:
    """Nothing more has arrived, or the buffer is full: time to sync what was written."""


@value
class WalSynced:
    """Everything below `flush_lsn` is durable."""

    flush_lsn: Lsn


@dataclass(frozen=True, slots=True)
class DiskFull:
    """The disk is full: what was written beyond `flush_lsn` is dropped, the rest is durable."""

    flush_lsn: Lsn
    why: str


@dataclass(frozen=True, slots=True)
class WalAligned:
    """Answer to `AlignWal`: the end of the last complete record at or below each LSN; the oldest WAL held."""

    flush_lsn: Lsn
    commit_lsn: Lsn
    begin_lsn: Lsn


@dataclass(frozen=True, slots=True)
class ReadersMoved:
    """The oldest hot standby feedback of all readers is now this."""

    feedback: HotStandbyFeedback


@dataclass(frozen=True, slots=True)
class PersistDue:
    """Time to write the lazy LSNs, if they moved (every few seconds, not at each message)."""


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
    """Write the newest timeline's history file, durably: `history`, preceded by `ancestors`."""

    history: History
    ancestors: tuple[WalPosition, ...]


@value
class WriteWal:
    """Write the bytes of the current `Append` at `lsn`, on `timeline`. Not yet durable.

    The first write on a timeline can be inside a segment, which then starts with the bytes of the previous timeline, up to
    `lsn`, as a promoted server's own does.
    """

    lsn: Lsn
    length: int
    timeline: int


@value
class SyncWal:
    """Make what was written below `lsn` durable. Answer: `WalSynced`."""

    lsn: Lsn


@dataclass(frozen=True, slots=True)
class AlignWal:
    """Find the last complete record at or below each LSN (rule 9). Answer: `WalAligned`."""

    flush_lsn: Lsn
    commit_lsn: Lsn


@dataclass(frozen=True, slots=True)
class TruncateWal:
    """Zero the WAL from `lsn` to its end on every timeline, durably, so that no scan finds it again (rule 3)."""

    lsn: Lsn


@dataclass(frozen=True, slots=True)
class ResetWal:
    """Drop all WAL; the log restarts, empty, at `lsn` (the start of a segment), durably."""

    lsn: Lsn


@dataclass(frozen=True, slots=True)
class SendWal:
    """Send [begin_lsn, end_lsn) to `conn` as `Fetched` frames, each followed by its bytes."""

    conn: int
    term: int
    begin_lsn: Lsn
    end_lsn: Lsn


@dataclass(frozen=True, slots=True)
class SendHeld:
    """Send `Held` to `conn`: the WAL held, and the older WAL requested."""

    conn: int
    term: int


@value
class TakeCatchUpWal:
    """Add the bytes of the current `CatchUpWal`, below all WAL that is held, then `SendHeld`."""

    conn: int
    term: int
    begin_lsn: Lsn
    timeline: int


@value
class ServeReaders:
    """Readers may get WAL up to `lsn`. It never falls, except by the rest of an incomplete record."""

    lsn: Lsn


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message."""

    conn: int
    message: ToProposer


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection once its output is sent. Its unread input is dropped."""

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
