"""The status file of the controller of slot copies, and what `--json` prints of a report. Times are Unix seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.status_file import Status


@dataclass(frozen=True, slots=True)
class CandidateRecord:
    """A failover candidate. `ready`: whether it may be promoted; None: unknown. `at`: when it was probed."""

    standby: str
    where: str
    ready: bool | None
    at: float
    not_known: tuple[str, ...]
    primary_error: ErrorRecord | None
    standby_error: ErrorRecord | None


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """The copy of a slot on a candidate.

    `expected`: the slot is selected. `lag_bytes`: of WAL between the slot and its copy; `age`: seconds since the last
    proof; None: unknown, or there is none. `failure`: of the last action; `busy_seconds`: since an action was submitted.
    """

    standby: str
    slot: str
    state: str
    safe: bool
    expected: bool
    reason: str
    why: str
    repair: str
    not_known: tuple[str, ...]
    lag_bytes: int | None
    age: float | None
    action: str | None
    failure: ErrorRecord | None
    busy_seconds: float | None
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsStatus(Status):
    """All candidates. `ready`: as of a candidate. `active`: this controller is the active one; None: it was only a probe."""

    ready: bool | None
    active: bool | None
    problems: tuple[str, ...]
    not_known: tuple[str, ...]
    standbys: tuple[CandidateRecord, ...]
    slots: tuple[CopyRecord, ...]
