"""Which slot of a name a copy is of: the one that the primary has now, or one that was dropped there before.

A consumer that begins anew drops its slot and makes another one of the same name, often with an initial copy of its tables.
From a copy of the slot before it would get again what that copy of the tables has. Positions do not tell the two apart, a
marker in the slot's folder does: it goes with the slot.

Safety: a position that this incarnation of the slot had is right for its client, and so is each later one up to where the
slot is (`is_not_ahead`). So a copy, whichever slot it was made from, is of this one from the least position on that this one
was seen at. It is decoded up to there like any other.
"""

from slot_sync.resolver.observed import CopyRecord, Incarnation, LogicalSlot, SlotCopy

WHY = "the slot is another one of that name than the one that the copy was made from"
REPAIR = (
    "the copy follows by itself as soon as the standby has replayed up to where the new slot begins"
)


def incarnation_by(remembered: CopyRecord, slot: LogicalSlot) -> Incarnation | None:
    """What is known of the slot's incarnation after a poll; `None`: it has no marker yet."""
    if slot.marker is None or slot.confirmed_flush_lsn is None:
        return None
    known, lsn = remembered.incarnation, slot.confirmed_flush_lsn
    if known is not None and known.marker == slot.marker:
        lsn = min(
            lsn, known.lsn
        )  # a primary that crashes may forget some of what its client has confirmed
    return Incarnation(slot.marker, lsn)


def is_of(copy: SlotCopy, incarnation: Incarnation | None) -> bool:
    """The copy is where that slot has been, or farther."""
    here = copy.confirmed_flush_lsn
    return incarnation is not None and here is not None and here >= incarnation.lsn
