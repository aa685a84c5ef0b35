"""Which incarnation of a slot a copy belongs to: the one on the primary now, or one of that name that was dropped before.

A consumer that starts over drops its slot and creates another of the same name, often with an initial copy of its tables.
A copy of the dropped slot would send it again what its initial copy has. Positions do not distinguish the two; the
incarnation id, a file in the slot's directory, does: it is removed with the slot.

Safety: a position that this incarnation of the slot had is right for its client, and so is each later one up to the slot's
position (`is_not_ahead`). So a copy, whichever slot it was created from, belongs to this incarnation from the lowest
position at which this one was seen. It is decoded up to there like any other.
"""

from slot_sync.resolver.observed import CopyRecord, Incarnation, LogicalSlot, SlotCopy

WHY = "the slot was dropped and created again since the copy was created"
REPAIR = (
    "wait: the copy follows as soon as the standby has replayed up to the start of the new slot"
)


def incarnation_by(remembered: CopyRecord, slot: LogicalSlot) -> Incarnation | None:
    """The slot's incarnation as known after a poll; `None`: it has no incarnation id yet."""
    if slot.incarnation_id is None or slot.confirmed_flush_lsn is None:
        return None
    known, lsn = remembered.incarnation, slot.confirmed_flush_lsn
    if known is not None and known.incarnation_id == slot.incarnation_id:
        lsn = min(
            lsn, known.lsn
        )  # after a crash, the primary may have lost a part of what its client had confirmed
    return Incarnation(slot.incarnation_id, lsn)


def is_of(copy: SlotCopy, incarnation: Incarnation | None) -> bool:
    """The copy is at a position that this incarnation has had, or past one."""
    here = copy.confirmed_flush_lsn
    return incarnation is not None and here is not None and here >= incarnation.lsn
