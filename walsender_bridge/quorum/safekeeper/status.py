"""The status of a safekeeper, written once a second, for `status`, `top` and `/metrics`.

Keys: `safekeeper` (its identity), `address`, `state` (`waiting` for a proposer, `following` one, `full`: the disk,
and `why`), `system_id`, `major`, `timeline`, `term` and `proposer` of its vote, `election_epoch` (the last one adopted),
`generation`, `members`, `new_members` of its membership, `fence` (the fenced timeline, or null); the LSNs `begin_lsn`,
`restart_lsn`, `commit_lsn`, `flush_lsn` as PostgreSQL writes them; bytes `wal_bytes` of its segments, `wal_limit`
(null: none), `free_bytes` of its file system and `free_limit`, the least to be kept free; counts `proposers`
(connections), `readers`, `removed_segments`; `pin_lsn` (the oldest WAL that a slot keeps, or that a reader was refused,
or null); `archive` (null: none) with `archived_lsn` (null: unknown), `unreserved`: whether it lags further than WAL is
kept for it, and `missing`: WAL that was removed and is not in it, [begin, end); `catch_up` (null: no WAL is missing) with
`wanted_lsn`, the LSN from which it should hold WAL, and `why`: the reason of the last rejection; `damaged`: segments that
are not sent to other safekeepers; `writes`: the durable writes of this process as `seconds` in total, `count`, and
`buckets`: how many took at most `WRITE_SECONDS[i]`.

It costs the hot loop two clock readings for each durable write, and one file a second.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final

from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.quorum.protocol.positions import Readers
from walsender_bridge.quorum.safekeeper.archive.archived_file import Archived
from walsender_bridge.quorum.safekeeper.backfill import BackfillStorage
from walsender_bridge.quorum.safekeeper.core import Safekeeper
from walsender_bridge.quorum.safekeeper.lending import Lending
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage

#: Upper bounds of the histogram of durable writes, in seconds; one more bucket counts longer ones.
WRITE_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)


class WriteTimes:
    """The durations of durable writes."""

    __slots__ = ("_counts", "_seconds")

    def __init__(self) -> None:
        self._counts = [0] * (len(WRITE_SECONDS) + 1)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one durable write."""
        self._counts[bisect_left(WRITE_SECONDS, seconds)] += 1
        self._seconds += seconds

    def record(self) -> dict[str, Any]:
        """See `writes` in the module."""
        reached, buckets = 0, []
        for count in self._counts:
            reached += count
            buckets.append(reached)
        return {"seconds": round(self._seconds, 6), "count": reached, "buckets": buckets[:-1]}


def record(
    core: Safekeeper,
    storage: WalStorage | None,
    backfill: BackfillStorage | None,
    lending: Lending | None,
    writes: WriteTimes,
    *,
    address: str,
    proposers: int,
    removed: int,
    readers: Readers | None,
    archived: Archived | None,
    reserved: Lsn,
    full: str,
) -> dict[str, Any]:
    """The current status. `full`: why no WAL is accepted, if so. Raises `OSError`.

    `reserved`: the oldest WAL that slots and the archive can retain.
    """
    begin_lsn = storage.begin_lsn if storage else 0
    control = core.control
    configuration = control.configuration
    new = configuration.new_members
    entries = control.history.counted(core.flush_lsn)
    return {
        "safekeeper": f"{control.safekeeper:032x}",
        "address": address,
        "state": "full" if full else "following" if core.owner is not None else "waiting",
        "why": full,
        "system_id": control.server.system_id,
        "major": control.server.major,
        "timeline": entries[-1].timeline if entries else 0,
        "term": control.node_id.term,
        "proposer": f"{control.node_id.proposer:032x}",
        "election_epoch": entries[-1].election_epoch if entries else 0,
        "generation": configuration.generation,
        "members": sorted(f"{member:032x}" for member in configuration.members),
        "new_members": None if new is None else sorted(f"{member:032x}" for member in new),
        "fence": None if control.fence is None else control.fence.timeline,
        "begin_lsn": format_lsn(begin_lsn),
        "restart_lsn": format_lsn(core.restart_lsn),
        "commit_lsn": format_lsn(min(core.commit_lsn, core.flush_lsn)),
        "flush_lsn": format_lsn(core.flush_lsn),
        "wal_bytes": storage.segments.used_bytes if storage else 0,
        "wal_limit": storage.segments.limits.wal_bytes if storage else None,
        "free_bytes": storage.segments.disk.free_bytes() if storage else None,
        "free_limit": storage.segments.limits.free_bytes if storage else None,
        "proposers": proposers,
        "removed_segments": removed,
        "readers": readers.count if readers else 0,
        "pin_lsn": format_lsn(readers.pin_lsn) if readers and readers.pin_lsn else None,
        "archive": None if archived is None else _archive(archived, begin_lsn, reserved),
        "catch_up": None if backfill is None else _catch_up(backfill, begin_lsn),
        "damaged": lending.damaged if lending else [],
        "writes": writes.record(),
    }


def _catch_up(backfill: BackfillStorage, begin_lsn: Lsn) -> dict[str, Any] | None:
    if backfill.wanted_lsn >= begin_lsn:
        return None
    return {"wanted_lsn": format_lsn(backfill.wanted_lsn), "why": backfill.why}


def _archive(archived: Archived, begin_lsn: Lsn, reserved: Lsn) -> dict[str, Any]:
    missing = list(archived.missing)
    if 0 < archived.lsn < begin_lsn:
        # Removed, and not yet checked by the archiver.
        missing.append((archived.lsn, begin_lsn))
    return {
        "archived_lsn": format_lsn(archived.lsn) if archived.lsn else None,
        "unreserved": (archived.lsn or begin_lsn) < reserved,
        "missing": [[format_lsn(begin), format_lsn(end)] for begin, end in missing],
    }


#: Receives the status, and writes it.
Tell = Callable[[dict[str, Any]], None]


def tell_nobody(record: dict[str, Any]) -> None:
    """A `Tell` that drops the status."""
    del record
