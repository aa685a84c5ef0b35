"""The status file of a capture process, with its commit gate. Positions are integers, times seconds since the Unix epoch."""

from dataclasses import dataclass

from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.status_file import Status


@dataclass(frozen=True, slots=True)
class CandidateStatus:
    """A failover candidate. `standing`: see `core.Standing`; `away`: why no standby streams from its slot, empty: one does."""

    slot: str
    standing: str
    flush_lsn: int
    away: str


@dataclass(frozen=True, slots=True)
class GateStatus:
    """A commit gate.

    `open`: no candidate is left to wait for. `position_lsn`: what ends at or below may be shown. `holding`: why more waits
    than that, in words. `stuck_since`: when it began to wait without anything passing, in seconds since the Unix epoch;
    None: nothing waits. `quorum_lsn`: of the safekeepers; None: without any, or unknown.
    """

    open: bool
    position_lsn: int
    holding: tuple[str, ...]
    stuck_since: float | None
    quorum_lsn: int | None
    candidates: tuple[CandidateStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPosition(Status):
    """What the next process keeps of a capture's status, for when neither the log nor capture runs. LSNs: 0 if unknown.

    It is read by itself, so that another field that a version does not know costs nobody the position. `system_id`: of the
    cluster that the log was written from; None: unknown. `behind`: the slot may have been confirmed to more than
    `confirmed_lsn` since.
    """

    source: str
    slot: str = ""
    system_id: int | None = None
    behind: bool = True
    timeline: int = 0
    committed_lsn: int = 0
    confirmed_lsn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStatus(KeptPosition):
    """The status of a capture. LSNs are end LSNs, 0 if unknown, except `server_lsn`: the durable end of the server's WAL.

    `state`: `connecting`, `streaming`, `waiting` or `stopped`; `error`: why it does not stream. `lag_bytes`:
    `server_lsn` - `confirmed_lsn`. `transactions` and `messages`: of this session. `spooled_bytes`: of transactions in
    progress, on disk. `silent_seconds`: since the server sent anything, while it has WAL that it has not sent; 0: it
    sends, or has nothing to send. `gate`: None: there is none.
    """

    state: str
    error: ErrorRecord | None = None
    gate: GateStatus | None = None
    server_lsn: int = 0
    received_lsn: int = 0
    logged_lsn: int = 0
    silent_seconds: float = 0.0
    lag_bytes: int = 0
    transactions: int = 0
    messages: int = 0
    in_flight_bytes: int = 0
    spooled_bytes: int = 0
