"""The removal horizon of a safekeeper's old WAL. Pure."""

from collections.abc import Iterable

from walsender_bridge.postgres.protocol.lsn import Lsn


def horizon(
    *,
    restart_lsn: Lsn,
    commit_lsn: Lsn,
    flush_lsn: Lsn,
    slots: Iterable[Lsn] = (),
    archived_lsn: Lsn | None = None,
    keep_bytes: int = 0,
    max_slot_wal_keep_size: int | None = None,
    full: bool = False,
) -> Lsn:
    """The LSN below which WAL may be removed: the minimum of everything that needs it.

    `restart_lsn`: every safekeeper has the WAL below. `slots`: the oldest position of a slot. `archived_lsn`: the WAL below
    is in the archive (None: there is no archive). `keep_bytes`: the retention setting, counted back from `flush_lsn`; it is
    ignored when the disk is `full`, so that commits can continue. The last byte is kept as well: where the log ends with a
    segment, a server's WAL would otherwise have nothing to be compared with at the next election.

    Slots and the archive retain at most `max_slot_wal_keep_size` bytes (None: no limit): a reader that never comes back, or
    an archive that is down, must not fill the disk and stop commits.
    """
    held = [*slots, *([] if archived_lsn is None else [archived_lsn])]
    limit = reserved_lsn(flush_lsn, max_slot_wal_keep_size)
    kept_back = flush_lsn - (0 if full else max(keep_bytes, 1))
    return max(0, min([restart_lsn, commit_lsn, kept_back, *(max(lsn, limit) for lsn in held)]))


def reserved_lsn(flush_lsn: Lsn, max_slot_wal_keep_size: int | None) -> Lsn:
    """The oldest WAL that a slot, or the archive, can retain."""
    return 0 if max_slot_wal_keep_size is None else max(0, flush_lsn - max_slot_wal_keep_size)
