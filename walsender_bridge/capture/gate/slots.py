"""Evaluates physical slots: whether a candidate's standby streams, its flush position, and which member is the server.

Pure. `core.py` explains why a slot counts only while a server streams from it, and only up to the position sent to it.

**Which of the members the server is.** HA managers name slots by member: each node's slot exists on all other nodes,
and the current primary has none for itself, or one that is not in use. Where the operator has listed all members, the
server is one of them, by either of two proofs; nothing else leaves a member out:
- its `primary_slot_name`, which it keeps from its time as a standby, names the member's slot, and that slot is not in
  use;
- all other members stream from this server. A server does not stream from itself, so the remaining one is the server.

A member that has streamed from this server on this timeline is not the server, regardless of anything else.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn


@dataclass(frozen=True, slots=True)
class Sender:
    """The walsender that uses a slot. `state`: from `pg_stat_replication`; None: this role may not see it.

    `flush_lsn` None: its client has not reported a position yet. `replays`: whether the client replays WAL, as a server does.
    """

    state: str | None
    sent_lsn: Lsn | None = None
    flush_lsn: Lsn | None = None
    replays: bool = False


@dataclass(frozen=True, slots=True)
class GateSlot:
    """A slot of that name on the server. `restart_lsn` None: it has never been used. `sender` None: it is not in use."""

    restart_lsn: Lsn | None
    sender: Sender | None = None
    physical: bool = True
    lost: bool = False


def flushed_by(slot: GateSlot) -> Lsn | None:
    """The flush position of the slot's standby, which streams (see `away`); None while it catches up."""
    if slot.sender is None or slot.sender.state != "streaming":
        return None
    return min(slot.restart_lsn or 0, slot.sender.flush_lsn or 0)


def away(name: str, slot: GateSlot | None) -> str:
    """Why no standby that could be promoted streams from the slot; empty if one does."""
    if slot is None:
        return (
            f"slot {name} does not exist on the server (a standby that streams from a safekeeper or from another standby has "
            "no slot here, and cannot be a candidate)"
        )
    if not slot.physical:
        return f"slot {name} is a logical slot: name the physical slot of the candidate's standby"
    if slot.lost:
        return f"slot {name} has lost its WAL: its standby must be rebuilt"
    if slot.sender is None:
        never = slot.restart_lsn is None
        used = "has never been used" if never else "is not in use"
        return f"slot {name} {used}: its standby is down, or streams without it (from a safekeeper, or another standby)"
    return _unreliable(name, slot, slot.sender)


def _unreliable(name: str, slot: GateSlot, sender: Sender) -> str:
    """Why the position reported to the slot's walsender is unreliable; empty if it is reliable."""
    if sender.state is None:
        return f"slot {name} is in use, but the source's role lacks pg_read_all_stats and cannot see its walsender"
    if slot.restart_lsn is None or sender.flush_lsn is None:
        return f"slot {name} is in use, but its standby has not reported a position yet"
    if not sender.replays:
        return f"slot {name} is in use by a client that does not replay WAL: pg_receivewal, or a base backup in progress"
    if sender.flush_lsn > (sender.sent_lsn or 0):
        return (
            f"slot {name}: its standby has WAL up to {format_lsn(sender.flush_lsn)} that was not sent to it: unless it has "
            "only just connected, this WAL belongs to another timeline, and the standby needs pg_rewind or has to be rebuilt"
        )
    return ""


def itself(
    members: Collection[str],
    slots: Mapping[str, GateSlot],
    was: str,
    streamed: Collection[str] = (),
) -> tuple[str, str] | None:
    """Which of all members the server is, and the proof; None if unknown.

    `was`: the server's `primary_slot_name`. `streamed`: members that have streamed from it on this timeline.
    """
    unused = [
        name
        for name in members
        if name not in streamed and (name not in slots or not slots[name].sender)
    ]
    if was in unused:
        return was, "its primary_slot_name is the member's slot"
    others = [name for name in members if name not in unused]
    if len(unused) == 1 and others and all(follows(name, slots.get(name)) for name in others):
        return unused[0], "all other members stream from it"
    return None


def follows(name: str, slot: GateSlot | None) -> bool:
    """Whether the slot's standby streams from it, has caught up, and is reliable."""
    return slot is not None and not away(name, slot) and flushed_by(slot) is not None
