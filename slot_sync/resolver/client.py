"""Whether the client of a slot has confirmed WAL that a standby does not have.

A logical walsender sends what the primary has on its own disk, and waits for no standby, not even a synchronous one.
A client may therefore hold transactions that a promotion loses. Its copy would be complete, but the client's data wrong:
it has rows that no server has, and resumes from its own position, so the promoted server skips as much of the WAL that it
writes.

The greatest confirmed_flush_lsn that a poll has shown is compared with the standby's flush position; a promotion replays
up to there. The greatest, not the last: a primary that crashes loses what it had not saved, but its client does not. It
belongs to one timeline, since positions of another history are not comparable.

A poll does not show what a client confirms after it. A verdict holds for the moment at which the primary was sampled;
only a gate in the primary bounds later confirmations: synchronized_standby_slots (17+), or the output plugin
tuskline with tuskline.wait_for_slots.
"""

from slot_sync.resolver.observed import Confirmed, CopyRecord, LogicalSlot
from walsender_bridge.postgres.protocol.lsn import Lsn

WHY = "its client has confirmed WAL that the standby does not have on disk"
REPAIR = (
    "wait until the standby has received it; to rule it out, name the standby's slot in synchronized_standby_slots"
    " (17 and later), or use the output plugin tuskline: docs/extension.md"
)


def confirmed_so_far(
    remembered: CopyRecord, slot: LogicalSlot | None, timeline: int
) -> Confirmed | None:
    """The greatest position that the slot's client is known to have confirmed on this timeline; None for a dropped slot."""
    if slot is None:
        return None
    before, now = remembered.confirmed, slot.confirmed_flush_lsn
    if before is not None and before.timeline == timeline and before.lsn >= (now or 0):
        return before
    return None if now is None else Confirmed(timeline, now)


def is_ahead(confirmed: Confirmed | None, flush_lsn: Lsn) -> bool:
    """The client has confirmed WAL that a promotion of a standby with this flush position would lose."""
    return confirmed is not None and confirmed.lsn > flush_lsn
