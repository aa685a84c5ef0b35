"""A feedback epoch: a period in which the primary has held, without a gap, the rows that one standby's copies need.

A standby reports the oldest catalog_xmin of its slots to its walsender (hot_standby_feedback), which writes it into the
standby's physical slot, where vacuum respects it. Call that value Q. The value itself does not show that it was missing
for a while: it returns to the very same number (`FeedbackEpochKey` has no value in it).

Safety. Let Q be set at one poll and at the next, with equal keys, and let one copy have existed all along. Then Q was set
in between, because each way of losing it shows:

- the physical slot is dropped: only after its walsender ended, so pid and start of the walsender change; and the
  incarnation id, a file in the slot's directory, is removed with it;
- the primary crashes or restarts, and has not saved Q: its start changes;
- feedback is switched off, or its interval set to 0, or another primary_slot_name is set: the standby reloads its
  configuration for it, and again for the way back;
- the standby had no slot for a moment, and reported so: then each copy there is a new one, which `Sighting` detects;
- another server became the primary: the timeline changes.

A key is first *seen*, and only relied on once the primary has *heard* from the standby after that. A standby's messages
reach the primary in order. A reply sent after we saw the copy (and the key) means that all earlier messages have arrived,
a "nothing needed" from a moment before included; if Q is set then, all later messages come from a standby that has the
copy. Without this a late message could clear Q after the proof. The reply is known to be later by its time, which is the
standby's own clock, or by the WAL position in it. (A standby's clock that is set back by more than a poll could deceive
this; one that is set forward cannot.)
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
    """Transaction `first` is older than `second`; both are 32-bit xids, compared modulo 2^32."""
    return (first - second) % _XID_SPAN >= _XID_SPAN // 2


@dataclass(frozen=True)
class FeedbackEpochProblem:
    """What prevents an epoch. A lasting problem needs an operator; the others pass by themselves."""

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
    """The setting that an operator must change before any copy can become ready; `None`: there is none."""
    name = standby.primary_slot_name
    slot = physical_slot(primary, standby)
    upstream = standby.upstream
    if primary.in_recovery:
        return _lasting(
            Reason.NOT_PRIMARY,
            "the server given as the primary is in recovery itself",
            "configure the server that takes writes; cascading standbys are not supported",
        )
    if primary.system_id != standby.system_id:
        return _lasting(
            Reason.OTHER_SYSTEM,
            "the standby belongs to another database system",
            "configure a standby that was created from this primary",
        )
    if isinstance(upstream, SafekeeperUpstream):
        # Its slot is on the safekeeper, not on the primary: a gap in what the primary holds for it could not be detected.
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
            "create a physical slot on the primary, and set primary_slot_name to it on the standby",
        )
    if standby.configured_slot not in {None, name}:
        return _lasting(
            Reason.OTHER_SLOT_NAME,
            f'the standby streams from the physical slot "{name}", so it is not the configured one',
            f'configure the standby of slot "{standby.configured_slot}", or correct its slot here or primary_slot_name there',
        )
    if not standby.hot_standby_feedback or standby.wal_receiver_status_interval <= 0:
        return _lasting(
            Reason.FEEDBACK_OFF,
            "the standby sends no hot standby feedback",
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
            "point primary_conninfo of the standby at the primary itself, and create that slot there",
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
            f'the physical slot "{name}" is lost, and no longer holds anything',
            "drop it, create it again, and bring the standby up to date",
        )
    return None


def link_problem(primary: ObservedPrimary, standby: ObservedStandby) -> FeedbackEpochProblem | None:
    """What prevents an epoch but passes by itself; `None`: nothing. Called after `setup_problem`."""
    slot = physical_slot(primary, standby)
    upstream = standby.upstream
    if isinstance(upstream, SafekeeperUpstream):
        upstream = None
    if standby.walreceiver_status != "streaming":
        return _passing(
            Reason.NOT_STREAMING, "the standby does not stream", "check the standby's log"
        )
    if upstream is None or upstream.postmaster_start != primary.postmaster_start:
        return _passing(
            Reason.UPSTREAM_UNKNOWN,
            "it is not known that the standby streams from this primary",
            "allow connections to the server at the standby's sender_host and sender_port",
        )
    if primary.timeline != standby.timeline:
        return _passing(
            Reason.OTHER_TIMELINE,
            f"the standby is on timeline {standby.timeline}, the primary on {primary.timeline}",
            "if this lasts, the standby has left the primary's history: rewind it, or rebuild it",
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
            "if this lasts, check that the standby streams with its primary_slot_name",
        )
    if slot.incarnation_id is None:
        return _passing(
            Reason.NO_INCARNATION_ID, f'the physical slot "{slot.name}" has no incarnation id yet'
        )
    if slot.catalog_xmin is None:
        return _passing(
            Reason.NO_CATALOG_XMIN, f'the physical slot "{slot.name}" holds no catalog_xmin'
        )
    return None


def is_linked(primary: ObservedPrimary, standby: ObservedStandby) -> bool:
    """The standby was shown to stream from this very primary, through the configured slot."""
    if setup_problem(primary, standby) is not None:
        return False
    problem = link_problem(primary, standby)
    return problem is None or problem.reason in {Reason.NO_INCARNATION_ID, Reason.NO_CATALOG_XMIN}


def epoch_key(primary: ObservedPrimary, standby: ObservedStandby) -> FeedbackEpochKey | None:
    """The epoch in which both were sampled; `None`: nothing is held."""
    slot = physical_slot(primary, standby)
    if (
        setup_problem(primary, standby) is not None
        or link_problem(primary, standby) is not None
        or not standby.in_recovery
        or slot is None
        or slot.incarnation_id is None
        or slot.active_pid is None
        or slot.backend_start is None
    ):
        return None
    return FeedbackEpochKey(
        primary.system_id,
        primary.timeline,
        primary.postmaster_start,
        slot.name,
        slot.incarnation_id,
        slot.active_pid,
        slot.backend_start,
        standby.conf_load_time,
    )


def heard_after(slot: PhysicalSlot, seen: Sighting) -> bool:
    """The primary has received a message that the standby sent after `seen`."""
    if slot.reply_time is not None and slot.reply_time > seen.clock:
        return True
    return slot.flush_lsn is not None and slot.flush_lsn > seen.flush_lsn
