"""What goes into capture's core, and what comes out of it: `core.step(state, event) -> effects`."""

from collections.abc import Sequence
from dataclasses import dataclass


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
    """The replica's answer to the oldest `AppendToReplica` without one: LSNs are end LSNs."""

    now: float
    durable_lsn: int
    committed_lsn: int
    confirmed_to: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class CaptureTick:
    """Time has passed; `gate` is the commit gate's position."""

    now: float
    gate: int


Event = CopyDataReceived | Replayed | Acknowledged | CaptureTick


@dataclass(frozen=True, slots=True)
class AppendToReplica:
    """Hand these to the replica: schema records first, then entries, as one batch.

    With neither it asks how far the log is committed. `confirm_to` is (timeline, LSN) to make durable.
    """

    entries: tuple[bytes, ...]
    schemas: tuple[bytes, ...]
    confirm_to: tuple[int, int] | None
    gate_lsn: int


@dataclass(frozen=True, slots=True)
class StandbyStatusUpdate:
    """Tell the server: `write` is durable in the log, `flush` is what the slot is confirmed to."""

    write: int
    flush: int


@dataclass(frozen=True, slots=True)
class SpoolAppend:
    """Write this behind what the transaction's spool file holds; the first makes the file."""

    xid: int
    data: bytes


@dataclass(frozen=True, slots=True)
class SpoolCut:
    """Keep the first `length` bytes of the transaction's spool file; 0: remove it."""

    xid: int
    length: int


Effect = AppendToReplica | StandbyStatusUpdate | SpoolAppend | SpoolCut
