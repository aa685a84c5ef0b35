"""The status file of a proposer, for `status` and `/metrics`. LSNs are as PostgreSQL writes them, identities in hexadecimal.

It is written at each change of phase, twice a second, and more often while commit_lsn advances. `read` gives a
`SessionStatus` while the proposer has a session, otherwise a `ProposerStatus`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walsender_bridge.runtime import status_file
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.status_file import Status

#: The phase of a proposer that has stopped for good; the others are those of `core.Phase`.
ENDED: Final = "ended"


@dataclass(frozen=True, slots=True)
class ReportedSafekeeper:
    """A safekeeper, as the proposer sees it. `state`: of the connection (`peer.PeerState`).

    `shown`: `streaming`, `catching up` (its next byte is not in memory), `silent` (connected, but no message arrives),
    `joining`, `rebuild` (its WAL was released: it needs a full resync) or `away`. `begin_lsn`: the oldest WAL that it last
    reported. `catch_up_target_lsn`: the LSN down to which it catches up; None: it lacks no WAL that another one has.
    `stuck`: no donor could send the next of it. `reads_from`: the source of the WAL that is being read for it (`effects.WalSource`). `lag_bytes`: None: unknown.
    """

    address: str
    safekeeper: str | None
    state: str
    member: bool
    flush_lsn: str | None
    begin_lsn: str | None
    catch_up_target_lsn: str | None
    stuck: bool
    reads_from: str | None
    fault: str | None
    shown: str
    lag_bytes: int | None


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """The primary whose WAL it is (`messages.ServerInfo`)."""

    system_id: int
    major: int
    segment_size: int


@dataclass(frozen=True, slots=True)
class MembershipRecord:
    """The membership. `new_members`: while it changes; `unlike`: how it differs from the configured one; empty: it does not."""

    quorum: str
    generation: int
    members: tuple[str, ...]
    new_members: tuple[str, ...] | None
    distrusted: tuple[str, ...]
    settled: bool
    unlike: str


@dataclass(frozen=True, slots=True)
class ChangeRecord:
    """The last requested change of the membership (`member_changes.ChangeState`). `asked_at`: in seconds since the Unix epoch."""

    state: str
    why: str
    asked_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerStatus(Status):
    """The status of a proposer. `phase`: of `core.Phase`, or `ENDED`; `error`: why it has no session.

    `quorum`: whether a majority of each membership follows, and sent a message within `status.SILENT_SECONDS`.
    `commit_page_fault`: why the page of the commit gates cannot be written; empty: it can.
    """

    phase: str
    commit_lsn: str
    quorum: bool
    safekeepers: tuple[ReportedSafekeeper, ...]
    error: ErrorRecord | None = None
    commit_page_fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatus(ProposerStatus):
    """The status of a proposer that has a session. `proposer`: its UUID.

    `election_epoch`, `timeline`: of what it proposes. `rebuild`: safekeepers whose WAL was released. `queue_bytes`: of WAL
    in memory.
    """

    term: int
    server: ServerRecord
    membership: MembershipRecord
    change: ChangeRecord
    rebuild: tuple[str, ...]
    restart_lsn: str
    end_lsn: str
    proposer: str
    election_epoch: int
    timeline: int
    vcl: str
    queue_bytes: int
    queue_limit: int


def read(path: Path) -> ProposerStatus | None:
    """The status last written; None if there is none."""
    return status_file.read(path, SessionStatus, ProposerStatus)
