"""The status of a safekeeper (`status_record`).

It costs the hot loop two clock readings for each durable write, and one file a second.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection

from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.quorum.protocol.positions import Readers
from walsender_bridge.quorum.safekeeper.archive.archived_file import Archived
from walsender_bridge.quorum.safekeeper.backfill import BackfillStorage
from walsender_bridge.quorum.safekeeper.core import Safekeeper
from walsender_bridge.quorum.safekeeper.lending import Lending
from walsender_bridge.quorum.safekeeper.status_record import (
    WRITE_SECONDS,
    ArchiveRecord,
    CatchUpRecord,
    SafekeeperStatus,
    WritesRecord,
)
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage


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

    def record(self) -> WritesRecord:
        """The durations so far."""
        reached, buckets = 0, []
        for count in self._counts:
            reached += count
            buckets.append(reached)
        return WritesRecord(round(self._seconds, 6), reached, tuple(buckets[:-1]))


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
) -> SafekeeperStatus:
    """The current status. `full`: why no WAL is accepted, if so. Raises `OSError`.

    `reserved`: the oldest WAL that slots and the archive can retain.
    """
    begin_lsn = storage.begin_lsn if storage else 0
    control = core.control
    configuration = control.configuration
    new = configuration.new_members
    entries = control.history.counted(core.flush_lsn)
    return SafekeeperStatus(
        safekeeper=f"{control.safekeeper:032x}",
        address=address,
        state="full" if full else "following" if core.owner is not None else "waiting",
        why=full,
        system_id=control.server.system_id,
        major=control.server.major,
        timeline=entries[-1].timeline if entries else 0,
        term=control.node_id.term,
        proposer=f"{control.node_id.proposer:032x}",
        election_epoch=entries[-1].election_epoch if entries else 0,
        generation=configuration.generation,
        members=_names(configuration.members),
        new_members=None if new is None else _names(new),
        fence=None if control.fence is None else control.fence.timeline,
        begin_lsn=format_lsn(begin_lsn),
        restart_lsn=format_lsn(core.restart_lsn),
        commit_lsn=format_lsn(min(core.commit_lsn, core.flush_lsn)),
        flush_lsn=format_lsn(core.flush_lsn),
        wal_bytes=storage.segments.used_bytes if storage else 0,
        wal_limit=storage.segments.limits.wal_bytes if storage else None,
        free_bytes=storage.segments.disk.free_bytes() if storage else None,
        free_limit=storage.segments.limits.free_bytes if storage else None,
        proposers=proposers,
        removed_segments=removed,
        readers=readers.count if readers else 0,
        pin_lsn=format_lsn(readers.pin_lsn) if readers and readers.pin_lsn else None,
        archive=None if archived is None else _archive(archived, begin_lsn, reserved),
        catch_up=None if backfill is None else _catch_up(backfill, begin_lsn),
        damaged=tuple(lending.damaged) if lending else (),
        writes=writes.record(),
    )


def _names(identities: Collection[int]) -> tuple[str, ...]:
    return tuple(sorted(f"{each:032x}" for each in identities))


def _catch_up(backfill: BackfillStorage, begin_lsn: int) -> CatchUpRecord | None:
    if backfill.wanted_lsn >= begin_lsn:
        return None
    return CatchUpRecord(format_lsn(backfill.wanted_lsn), backfill.why)


def _archive(archived: Archived, begin_lsn: Lsn, reserved: Lsn) -> ArchiveRecord:
    missing = list(archived.missing)
    if 0 < archived.lsn < begin_lsn:
        # Removed, and not yet checked by the archiver.
        missing.append((archived.lsn, begin_lsn))
    return ArchiveRecord(
        archived_lsn=format_lsn(archived.lsn) if archived.lsn else None,
        unreserved=(archived.lsn or begin_lsn) < reserved,
        missing=tuple((format_lsn(begin), format_lsn(end)) for begin, end in missing),
    )


#: Receives the status, and writes it.
Tell = Callable[[SafekeeperStatus], None]


def tell_nobody(status: SafekeeperStatus) -> None:
    """A `Tell` that drops the status."""
    del status
