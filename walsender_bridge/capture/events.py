"""The events and effects of capture's core: `core.step(state, event) -> effects`."""

from collections.abc import Sequence
from dataclasses import dataclass

from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition


@dataclass(frozen=True, slots=True)
class CopyDataReceived:
    """CopyData payloads from the walsender, in order. `now`, here and below: monotonic seconds."""

    now: float
    payloads: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The next messages of the spooled transaction that `CaptureState.replay` names, in order."""

    now: float
    messages: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The replica's acknowledgement of the oldest `AppendToReplica` in flight. LSNs are end LSNs. `took`: seconds, since it was sent."""

    now: float
    durable_lsn: Lsn
    committed_lsn: Lsn
    confirmed_to: WalPosition | None
    took: float = 0.0


@dataclass(frozen=True, slots=True)
class CaptureTick:
    """Time has passed; `gate` is the commit gate's position."""

    now: float
    gate: Lsn


Event = CopyDataReceived | Replayed | Acknowledged | CaptureTick


@dataclass(frozen=True, slots=True)
class AppendToReplica:
    """Send the replica one batch: schema records, then entries.

    An empty batch is a heartbeat: it asks for the committed position. `confirm_to` is the position to make durable.
    """

    entries: tuple[bytes, ...]
    schemas: tuple[bytes, ...]
    confirm_to: WalPosition | None
    gate_lsn: Lsn


@dataclass(frozen=True, slots=True)
class StandbyStatusUpdate:
    """Send a status update: `write` is durable in the log, `flush` is the position to confirm the slot to."""

    write: Lsn
    flush: Lsn


@dataclass(frozen=True, slots=True)
class SpoolAppend:
    """Append to the transaction's spool file, which the first append creates."""

    xid: int
    data: bytes


@dataclass(frozen=True, slots=True)
class SpoolCut:
    """Truncate the transaction's spool file to `length` bytes; 0 removes it."""

    xid: int
    length: int


Effect = AppendToReplica | StandbyStatusUpdate | SpoolAppend | SpoolCut
