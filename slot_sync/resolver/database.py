"""The database of a slot on both servers: whether the standby has replayed all changes of it.

A promotion replays all that the standby has flushed, and replay of a removed database directory drops every logical slot
of that database (`dbase_redo`). DROP DATABASE fails on the primary until its slots are dropped. ALTER DATABASE SET
TABLESPACE does not: the slot stays there, and its copies are dropped.

Safety: no such record that concerns a copy is still to be replayed. Each ALTER DATABASE gives the row in pg_database
another xmin (freezing and in-place updates preserve it), so a row that is equal on both servers is one that the standby
has replayed. SET TABLESPACE writes its record after it has committed the row and removed the old files, and holds its lock on
the database until then. So at the first poll that shows a row without that lock, the record is before the end of the
primary's WAL, which is read later (`Settled.lsn`), and the standby has to have replayed up to there.
"""

from slot_sync.resolver.observed import (
    CopyRecord,
    LogicalSlot,
    ObservedPrimary,
    ObservedStandby,
    Settled,
)

WHY = "the standby has yet to replay an ALTER, DROP or CREATE DATABASE of the slot's database, which may drop the copy"
REPAIR = "wait; if it lasts, check what delays replay on the standby: a pause, recovery_min_apply_delay, a conflicting query"


def settled_by(
    remembered: CopyRecord, slot: LogicalSlot, primary: ObservedPrimary
) -> Settled | None:
    """The state of the slot's database as known after a poll of the primary; `None`: it is being changed."""
    xmin = primary.databases.get(slot.datoid)
    if xmin is None or slot.datoid in primary.locked_databases:
        return None
    known = remembered.settled
    if known is not None and (known.datoid, known.xmin) == (slot.datoid, xmin):
        return known
    return Settled(slot.datoid, xmin, primary.wal_lsn)


def is_replayed_to(settled: Settled | None, standby: ObservedStandby) -> bool:
    """The standby has replayed all changes of the database."""
    return (
        settled is not None
        and standby.databases.get(settled.datoid) == settled.xmin
        and standby.replay_lsn >= settled.lsn
    )


def is_same_row(slot: LogicalSlot, primary: ObservedPrimary, standby: ObservedStandby) -> bool:
    """The standby has the slot's database with the same pg_database row as the primary."""
    xmin = primary.databases.get(slot.datoid)
    return xmin is not None and standby.databases.get(slot.datoid) == xmin
