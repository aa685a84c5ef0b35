"""The status file of a safekeeper, for `status`, `top` and `/metrics`; and that of its archiver.

LSNs are as PostgreSQL writes them, identities in hexadecimal.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walsender_bridge.runtime import status_file
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.status_file import Status

#: Upper bounds of the histogram of durable writes, in seconds; one more bucket counts longer ones.
WRITE_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """The archive, as the safekeeper knows it. `archived_lsn`: None: unknown.

    `unreserved`: it lags further than WAL is kept for it. `missing`: WAL that was removed and is not in it, [begin, end).
    """

    archived_lsn: str | None
    unreserved: bool
    missing: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CatchUpRecord:
    """Older WAL that is missing. `wanted_lsn`: from where on it should hold WAL; `why`: the reason of the last rejection."""

    wanted_lsn: str
    why: str


@dataclass(frozen=True, slots=True)
class WritesRecord:
    """The durable writes of this process: seconds in total, their number, and how many took at most `WRITE_SECONDS[i]`."""

    seconds: float
    count: int
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SafekeeperStatus(Status):
    """The status of a running safekeeper, written once a second. `safekeeper`: its identity.

    `state`: `waiting` for a proposer, `following` one, or `full`: the disk, and `why`. `term` and `proposer`: of its vote.
    `election_epoch`: the last one adopted. `generation`, `members`, `new_members`: of its membership. `fence`: the fenced
    timeline, or None. `wal_bytes`: of its segments; `wal_limit`: None: none. `free_bytes`: of its file system;
    `free_limit`: the least to be kept free. `proposers`: connections. `pin_lsn`: the oldest WAL that a slot keeps, or that a
    reader was refused, or None. `archive`: None: none. `catch_up`: None: no WAL is missing. `damaged`: segments that
    are not sent to other safekeepers.
    """

    safekeeper: str
    address: str
    state: str
    why: str
    system_id: int
    major: int
    timeline: int
    term: int
    proposer: str
    election_epoch: int
    generation: int
    members: tuple[str, ...]
    new_members: tuple[str, ...] | None
    fence: int | None
    begin_lsn: str
    restart_lsn: str
    commit_lsn: str
    flush_lsn: str
    wal_bytes: int
    wal_limit: int | None
    free_bytes: int | None
    free_limit: int | None
    proposers: int
    removed_segments: int
    readers: int
    pin_lsn: str | None
    archive: ArchiveRecord | None
    catch_up: CatchUpRecord | None
    damaged: tuple[str, ...]
    writes: WritesRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSafekeeper(Status):
    """The last status of a safekeeper that has ended with an error. `state`: `ended`."""

    error: ErrorRecord
    state: str = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiverStatus(Status):
    """The status of the process that uploads WAL. `error`: of its last attempt; None: it succeeded."""

    error: ErrorRecord | None


def read(path: Path) -> SafekeeperStatus | EndedSafekeeper | None:
    """The status last written; None if there is none."""
    return status_file.read(path, SafekeeperStatus, EndedSafekeeper)
