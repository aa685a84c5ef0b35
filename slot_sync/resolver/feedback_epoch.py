"""An epoch: the time in which the primary has held, without a gap, the rows that the copies of one standby need.

A standby tells its walsender the oldest catalog_xmin of its slots (hot_standby_feedback), and the walsender writes
it into the standby's physical slot, where vacuum respects it. Call that value Q. From the value itself nobody can see
that it was gone for a while: it comes back to the very same number (`FeedbackEpochKey` has no value in it).

Safety. Let Q be there at one poll and at the next, with equal keys, and let one copy have been there all along. Then Q
was there in between, because each way of losing it shows:

- the physical slot is dropped: only after its walsender ended, so pid and start of the walsender change; and the
  marker, a file in the slot's folder, is gone with it;
- the primary crashes or restarts, and has not saved Q: its start changes;
- feedback is switched off, or its interval to 0, or another primary_slot_name is set: the standby loads its
  configuration anew for it, and again for the way back;
- the standby had no slot for a moment, and said so: then each copy there is a new one, which `Sighting` is for;
- another server became the primary: the timeline changes.

A key is first *seen*, and only believed once the primary has *heard* the standby speak after that. What a standby says
reaches the primary in order. A reply sent after we saw the copy (and the key) means that whatever was said before it
has arrived, a "nothing needed" from a moment before included; if Q is there then, all that follows is said by a
standby that has the copy. Without this a late message could clear Q after the proof. The reply is known to be later
by its time, which is the standby's own clock, or by the WAL position in it. (A standby's clock that is set back by more
than a poll could deceive this; one that is set forward cannot.)
"""

from dataclasses import dataclass

from slot_sync.resolver.observed import (
    FeedbackEpochKey,
    ObservedPrimary,
    ObservedStandby,
    PhysicalSlot,
    SafekeeperUpstream,
    Sighting,
)
from slot_sync.resolver.transitions import Reason

_XID_SPAN = 2**32


def precedes(first: int, second: int) -> bool:
    """Transaction `first` is older than `second`; both are 32-bit xids, whose order goes round (modulo 2^32)."""
    return (first - second) % _XID_SPAN >= _XID_SPAN // 2


@dataclass(frozen=True)
class FeedbackEpochProblem:
    """What stands in the way of an epoch. A lasting one needs somebody; the others come and go by themselves."""

    reason: Reason
    why: str
    repair: str
    lasting: bool


def _lasting(reason: Reason, why: str, repair: str) -> FeedbackEpochProblem:
    return FeedbackEpochProblem(reason, why, repair, lasting=True)


def _passing(reason: Reason, why: str, repair: str = "") -> FeedbackEpochProblem:
    return FeedbackEpochProblem(reason, why, repair, lasting=False)


def physical_slot(primary: ObservedPrimary, standby: ObservedStandby) -> PhysicalSlot | None:
    """The slot on the primary that the standby is set up to stream from."""
    return primary.physical(standby.primary_slot_name or "")


def setup_problem(
    primary: ObservedPrimary, standby: ObservedStandby
) -> FeedbackEpochProblem | None:
    """What somebody has to change before any copy can become ready; `None`: nothing."""
    name = standby.primary_slot_name
    slot = physical_slot(primary, standby)
    upstream = standby.upstream
    if primary.in_recovery:
        return _lasting(
            Reason.NOT_PRIMARY,
            "the server given as the primary is in recovery itself",
            "give the server that takes writes; a standby of a standby is not kept",
        )
    if primary.system_id != standby.system_id:
        return _lasting(
            Reason.OTHER_SYSTEM,
            "the standby belongs to another database system",
            "give a standby that was made from this primary",
        )
    if isinstance(upstream, SafekeeperUpstream):
        # Its slot is there, and not on the primary: nothing here could tell a gap in what the primary holds for it.
        return _lasting(
            Reason.BEHIND_SAFEKEEPER,
            f"the standby streams from a safekeeper, {upstream.where}, and no slot of its own on the primary holds what"
            " its copies need",
            "point primary_conninfo of the standby at the primary itself, and primary_slot_name at a physical slot there",
        )
    for server, level in (("primary", primary.wal_level), ("standby", standby.wal_level)):
        if level != "logical":
            return _lasting(
                Reason.WAL_LEVEL,
                f"wal_level is {level} on the {server}",
                f"set wal_level = logical on the {server} and restart it",
            )
    if not name:
        return _lasting(
            Reason.NO_SLOT_NAME,
            "the standby has no primary_slot_name",
            "make a physical slot on the primary, and name it in primary_slot_name on the standby",
        )
    if standby.configured_slot not in {None, name}:
        return _lasting(
            Reason.OTHER_SLOT_NAME,
            f'the standby streams from the physical slot "{name}", and is not the one that is configured',
            f'give the standby of slot "{standby.configured_slot}", or correct its slot here or primary_slot_name there',
        )
    if not standby.hot_standby_feedback or standby.wal_receiver_status_interval <= 0:
        return _lasting(
            Reason.FEEDBACK_OFF,
            "the standby does not tell the primary which rows it needs",
            "set hot_standby_feedback = on and wal_receiver_status_interval above 0 on the standby, and reload",
        )
    if upstream is not None and (upstream.in_recovery or upstream.system_id != primary.system_id):
        return _lasting(
            Reason.CASCADING,
            "the standby streams from another server than the primary",
            "point primary_conninfo of the standby at the primary itself",
        )
    if slot is None and upstream is None and standby.walreceiver_slot_name == name:
        return _lasting(
            Reason.CASCADING,
            f'the standby streams by slot "{name}", which the primary does not have: from another standby, or a safekeeper',
            "point primary_conninfo of the standby at the primary itself, and make that slot there",
        )
    if slot is None:
        return _lasting(
            Reason.NO_PHYSICAL_SLOT,
            f'the primary has no physical slot "{name}"',
            f"on the primary: SELECT pg_create_physical_replication_slot('{name}', true)",
        )
    if slot.wal_status == "lost" or slot.invalidation is not None:
        return _lasting(
            Reason.PHYSICAL_SLOT_LOST,
            f'the physical slot "{name}" is lost, and holds nothing any more',
            "drop it, make it again, and bring the standby up to date",
        )
    return None


def link_problem(primary: ObservedPrimary, standby: ObservedStandby) -> FeedbackEpochProblem | None:
    """What stands in the way of an epoch and passes by itself; `None`: nothing. Asked after `setup_problem`."""
    slot = physical_slot(primary, standby)
    upstream = standby.upstream
    if isinstance(upstream, SafekeeperUpstream):
        upstream = None
    if standby.walreceiver_status != "streaming":
        return _passing(
            Reason.NOT_STREAMING, "the standby does not stream", "look at the standby's log"
        )
    if upstream is None or upstream.postmaster_start != primary.postmaster_start:
        return _passing(
            Reason.UPSTREAM_UNKNOWN,
            "it is not known that the standby streams from this primary",
            "let the server at the standby's sender_host and sender_port be asked",
        )
    if primary.timeline != standby.timeline:
        return _passing(
            Reason.OTHER_TIMELINE,
            f"the standby is on timeline {standby.timeline}, the primary on {primary.timeline}",
            "if it stays so, the standby has left the primary's history: rewind it, or make it anew",
        )
    if (
        slot is None
        or standby.walreceiver_slot_name != slot.name
        or slot.active_pid is None
        or slot.backend_start is None
    ):
        return _passing(
            Reason.NO_WALSENDER,
            f'no walsender uses the physical slot "{standby.primary_slot_name}"',
            "if it stays so, see that the standby streams with its primary_slot_name",
        )
    if slot.marker is None:
        return _passing(Reason.NO_MARKER, f'the physical slot "{slot.name}" has no marker yet')
    if slot.catalog_xmin is None:
        return _passing(
            Reason.NO_CATALOG_XMIN, f'the physical slot "{slot.name}" holds no catalog_xmin'
        )
    return None


def is_linked(primary: ObservedPrimary, standby: ObservedStandby) -> bool:
    """It was shown that the standby streams from this very primary, through the slot that it should."""
    if setup_problem(primary, standby) is not None:
        return False
    problem = link_problem(primary, standby)
    return problem is None or problem.reason in {Reason.NO_MARKER, Reason.NO_CATALOG_XMIN}


def epoch_key(primary: ObservedPrimary, standby: ObservedStandby) -> FeedbackEpochKey | None:
    """The epoch that both were sampled in; `None`: nothing is held."""
    slot = physical_slot(primary, standby)
    if (
        setup_problem(primary, standby) is not None
        or link_problem(primary, standby) is not None
        or not standby.in_recovery
        or slot is None
        or slot.marker is None
        or slot.active_pid is None
        or slot.backend_start is None
    ):
        return None
    return FeedbackEpochKey(
        primary.system_id,
        primary.timeline,
        primary.postmaster_start,
        slot.name,
        slot.marker,
        slot.active_pid,
        slot.backend_start,
        standby.conf_load_time,
    )


def heard_after(slot: PhysicalSlot, seen: Sighting) -> bool:
    """The primary has heard the standby say something that it said after `seen`."""
    if slot.reply_time is not None and slot.reply_time > seen.clock:
        return True
    return slot.flush_lsn is not None and slot.flush_lsn > seen.flush_lsn
