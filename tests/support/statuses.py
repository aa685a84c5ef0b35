"""Status records for tests: one of each kind, whole; a test replaces what it is about."""

import os
import time
from dataclasses import replace
from typing import Any

from slot_sync.status_record import CandidateRecord, CopyRecord, SlotsStatus
from walsender_bridge.capture.status_record import CandidateStatus, CaptureStatus, GateStatus
from walsender_bridge.quorum.proposer.status_record import (
    ChangeRecord,
    MembershipRecord,
    ReportedSafekeeper,
    ServerRecord,
    SessionStatus,
)
from walsender_bridge.quorum.safekeeper.status_record import (
    WRITE_SECONDS,
    SafekeeperStatus,
    WritesRecord,
)
from walsender_bridge.runtime.status_file import Status

_CANDIDATE = CandidateStatus("a", "counted", 100, "")
_GATE = GateStatus(
    open=False,
    position_lsn=100,
    holding=(),
    stuck_since=None,
    quorum_lsn=None,
    candidates=(_CANDIDATE,),
)
_CAPTURE = CaptureStatus(source="shop", slot="tuskline_shop", state="streaming", behind=True)
_REPORTED = ReportedSafekeeper(
    address="127.0.0.1:1",
    safekeeper=None,
    state="streaming",
    member=True,
    flush_lsn=None,
    begin_lsn=None,
    catch_up_target_lsn=None,
    stuck=False,
    reads_from=None,
    fault=None,
    shown="streaming",
    lag_bytes=None,
)
_MEMBERSHIP = MembershipRecord(
    quorum=f"{0:032x}",
    generation=1,
    members=(),
    new_members=None,
    distrusted=(),
    settled=True,
    unlike="",
)
_SESSION = SessionStatus(
    phase="leading",
    commit_lsn="0/2000",
    quorum=True,
    safekeepers=(),
    term=1,
    server=ServerRecord(1, 16, 1 << 24),
    membership=_MEMBERSHIP,
    change=ChangeRecord("none", "", None),
    rebuild=(),
    restart_lsn="0/1000",
    end_lsn="0/2100",
    proposer=f"{1:032x}",
    election_epoch=1,
    timeline=1,
    vcl="0/1000",
    queue_bytes=0x100,
    queue_limit=1 << 20,
)
_SAFEKEEPER = SafekeeperStatus(
    safekeeper=f"{1:032x}",
    address="127.0.0.1:1",
    state="following",
    why="",
    system_id=1,
    major=16,
    timeline=1,
    term=1,
    proposer=f"{1:032x}",
    election_epoch=1,
    generation=1,
    members=(),
    new_members=None,
    fence=None,
    begin_lsn="0/0",
    restart_lsn="0/1000",
    commit_lsn="0/2000",
    flush_lsn="0/2000",
    wal_bytes=1 << 24,
    wal_limit=None,
    free_bytes=1 << 30,
    free_limit=1 << 26,
    proposers=1,
    removed_segments=0,
    readers=0,
    pin_lsn=None,
    archive=None,
    catch_up=None,
    damaged=(),
    writes=WritesRecord(0.0, 0, (0,) * len(WRITE_SECONDS)),
)
_COPY = CopyRecord(
    standby="near",
    slot="app",
    state="READY",
    safe=True,
    expected=True,
    reason="proven",
    why="because",
    repair="",
    not_known=(),
    lag_bytes=4096,
    age=1.26,
    action=None,
    failure=None,
    busy_seconds=None,
    evidence={},
)
_SLOTS = SlotsStatus(
    ready=True, active=True, problems=(), not_known=(), standbys=(), slots=(_COPY,)
)


def _fresh(status: Any, changes: dict[str, Any]) -> Any:
    """The status of this process now, with these changes."""
    assert isinstance(status, Status)
    return replace(status, **{"pid": os.getpid(), "updated_at": time.time(), **changes})


def gate(**changes: Any) -> GateStatus:
    """Of one candidate `a`, for which it waits. `candidate`: the changes of that one."""
    candidate = replace(_CANDIDATE, **changes.pop("candidate", {}))
    return replace(_GATE, **{"candidates": (candidate,), **changes})


def capture(**changes: Any) -> CaptureStatus:
    """It streams from the slot of the source `shop`."""
    found: CaptureStatus = _fresh(_CAPTURE, changes)
    return found


def reported(**changes: Any) -> ReportedSafekeeper:
    """A member that streams, as the proposer sees it."""
    return replace(_REPORTED, **changes)


def membership(**changes: Any) -> MembershipRecord:
    """A settled one of no members."""
    return replace(_MEMBERSHIP, **changes)


def session(**changes: Any) -> SessionStatus:
    """A proposer that leads a quorum."""
    found: SessionStatus = _fresh(_SESSION, changes)
    return found


def safekeeper(**changes: Any) -> SafekeeperStatus:
    """It follows a proposer, and has all WAL."""
    found: SafekeeperStatus = _fresh(_SAFEKEEPER, changes)
    return found


def slot_copy(**changes: Any) -> CopyRecord:
    """The proven copy of the slot `app` on the candidate `near`."""
    return replace(_COPY, **changes)


def slots(**changes: Any) -> SlotsStatus:
    """An active controller with one candidate and a proven copy."""
    now = time.time()
    near = CandidateRecord("near", "db", True, now, (), None, None)
    found: SlotsStatus = _fresh(_SLOTS, {"standbys": (near,), **changes})
    return found
