"""What is said of a copy while the primary does not answer: what was proven last, if nothing speaks against it.

Safety: what the standby received since then came over the connection of that epoch, during which the primary held what
was proven; or over none. A later connection, another configuration, another timeline or WAL from an archive is an
objection. So is a copy that is ahead of where the slot was seen last, since no action of ours moves it there. One thing
cannot be seen: a connection that came and went between two polls, after a crash of the primary. So the verdict has an
age, and is called `proven_before`.
"""

from slot_sync.resolver.observed import CopyRecord, Record, Standby
from slot_sync.resolver.transitions import Reason, State, Transition, Wait


def objections(remembered: CopyRecord, standby: Standby, record: Record) -> list[str]:
    """What the standby shows that what was proven last may not hold any more."""
    copy = standby.slot(remembered.name)
    epoch = record.epoch
    if epoch is None or remembered.proven_in != epoch or remembered.generation != record.generation:
        return ["it was not proven in the last epoch"]
    if copy is None:
        return ["the copy is gone"]
    was = None if remembered.slot_was is None else remembered.slot_was.confirmed_flush_lsn
    # PostgreSQL moves its own copies by itself, and lets nobody read from them.
    ahead = not copy.synced and (was is None or (copy.confirmed_flush_lsn or 0) > was)
    checks = {
        "the copy is not ours": remembered.made or copy.synced,
        "the copy is temporary": copy.persistency == "persistent",
        "the copy is invalid": copy.invalidation is None,
        "its snapshot is gone": copy.snapshot_present is True,
        "its WAL is gone": copy.wal_present is True,
        "it is ahead of where the slot was seen last: somebody read from it": not ahead,
        "the standby has replayed WAL from an archive": not standby.replays_archive,
        "the standby has loaded its configuration anew": standby.conf_load_time
        == epoch.conf_load_time,
        "the standby is on another timeline": standby.timeline == epoch.timeline,
        "the standby has connected again": standby.walreceiver_start
        in {None, record.walreceiver_start},
    }
    return [objection for objection, holds in checks.items() if not holds]


def primary_is_silent(remembered: CopyRecord, standby: Standby, record: Record) -> Transition:
    """The transition of one remembered copy when the primary does not answer."""
    if remembered.proven_at is None:
        return Transition(
            remembered.name,
            remembered.state,
            State.BLOCKED,
            Reason.NEVER_PROVEN,
            "the primary does not answer, and the copy was never proven",
            repair="see that the primary can be reached",
            action=Wait(),
        )
    evidence: dict[str, object] = {
        "proven_at": remembered.proven_at,
        "age": max(0, standby.clock - remembered.proven_at),
    }
    against = objections(remembered, standby, record)
    if against:
        return Transition(
            remembered.name,
            remembered.state,
            State.SUSPECT,
            Reason.PRIMARY_UNREACHABLE,
            "the primary does not answer, and " + ", and ".join(against),
            repair="see that the primary can be reached",
            evidence=evidence,
            action=Wait(),
        )
    return Transition(
        remembered.name,
        remembered.state,
        State.READY,
        Reason.PROVEN_BEFORE,
        "the primary does not answer; it was proven before, and nothing speaks against it",
        evidence=evidence,
    )
