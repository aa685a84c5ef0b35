"""The verdict on a copy while the primary does not answer: the last proof, unless the standby shows an objection.

Safety: the standby received all WAL since then over the connection of that epoch, during which the primary held what was
proven; or it received none. A later connection, another configuration, another timeline or WAL from an archive is an
objection. So is a copy that is ahead of the slot's last known position, since no action of ours moves it there. One case
is not visible: a connection that came and went between two polls, after a crash of the primary. So the verdict has an
age, and is called `proven_before`. Changes on the primary after the last poll are not known either: slots that were
created there, and what their clients have confirmed. The verdict names them in `not_known`, and is valid for a limited
time only (`ReadinessTerms.max_age`), after which it is unknown.
"""

from dataclasses import replace

from slot_sync.resolver import client
from slot_sync.resolver.conditions import starts_whole
from slot_sync.resolver.database import is_replayed_to
from slot_sync.resolver.foreign import elsewhere, is_ours, kept_elsewhere
from slot_sync.resolver.incarnation import is_of
from slot_sync.resolver.native import SWITCHED_OFF, synced_before
from slot_sync.resolver.observed import CopyRecord, ObservedStandby, ReadinessTerms, StandbyRecord
from slot_sync.resolver.transitions import CopyState, Nothing, Reason, Transition, Wait

#: Changes on the primary that happened after the last probe.
SLOTS_UNKNOWN = (
    "slots that were created on the primary, and databases that were moved, since it last answered"
)
CONFIRMED_UNKNOWN = (
    "what clients have confirmed since the primary last answered, unless a gate holds them back"
)


def objections(
    remembered: CopyRecord, standby: ObservedStandby, record: StandbyRecord
) -> list[str]:
    """The reasons, as the standby shows them, for which the last proof may no longer hold."""
    copy = standby.slot(remembered.name)
    epoch = record.epoch
    if epoch is None or remembered.proven_in != epoch or remembered.generation != record.generation:
        return ["it was not proven in the last epoch"]
    if copy is None:
        return ["the copy is gone"]
    was = None if remembered.slot_was is None else remembered.slot_was.confirmed_flush_lsn
    client_was = remembered.confirmed
    # PostgreSQL moves its own copies itself, and does not let clients read from them.
    ahead = not copy.synced and (was is None or (copy.confirmed_flush_lsn or 0) > was)
    checks = {
        "the copy is not ours": is_ours(remembered, copy),
        "the copy is temporary": copy.persistency == "persistent",
        "the copy is invalid": copy.invalidation is None,
        "its snapshot is gone": copy.snapshot_present is True,
        "another decoder has written a snapshot": starts_whole(copy, standby.version),
        "its WAL is gone": copy.wal_present is True,
        "mapping files that it needs may be missing": copy.mappings_complete is True,
        SWITCHED_OFF: standby.native_sync or not copy.synced,
        "it needs older WAL than max_slot_wal_keep_size allows on the standby": not standby.outgrown(
            copy
        ),
        "it has been idle for idle_replication_slot_timeout: a promotion would invalidate it": standby.idle_share(
            copy
        )
        < 1,
        "the last change of its database is not replayed": is_replayed_to(
            remembered.settled, standby
        ),
        "it is a copy of a dropped slot of that name": is_of(copy, remembered.incarnation),
        "the position of its client is not known": client_was is not None
        and client_was.timeline == epoch.timeline,
        "it is ahead of the slot's last known position: a client read from it": not ahead,
        "the standby has replayed WAL from an archive": not standby.replays_archive,
        "the standby has reloaded its configuration": standby.conf_load_time
        == epoch.conf_load_time,
        "the standby is on another timeline": standby.timeline == epoch.timeline,
        "the standby has connected again": standby.walreceiver_start
        in {None, record.walreceiver_start},
    }
    return [objection for objection, holds in checks.items() if not holds]


def primary_is_silent(
    remembered: CopyRecord, standby: ObservedStandby, record: StandbyRecord, terms: ReadinessTerms
) -> Transition:
    """The transition of one remembered copy when the primary does not answer."""

    def found(
        after: CopyState,
        reason: Reason,
        why: str,
        repair: str = "check that the primary can be reached",
    ) -> Transition:
        return Transition(
            remembered.name,
            remembered.state,
            after,
            reason,
            why,
            repair="" if after is CopyState.READY else repair,
            evidence=evidence,
            action=Nothing() if after is CopyState.READY else Wait(),
            not_known=not_known,
        )

    if remembered.synced_at is not None and not standby.has_extension:
        found_by_sql = synced_before(remembered, standby, terms)
        unknown = (*found_by_sql.not_known, SLOTS_UNKNOWN, CONFIRMED_UNKNOWN)
        return replace(found_by_sql, not_known=unknown)
    evidence: dict[str, object] = {}
    not_known: tuple[str, ...] = (SLOTS_UNKNOWN,)
    theirs = kept_elsewhere(remembered.name, remembered, standby)
    if theirs is not None:
        return replace(elsewhere(remembered.name, remembered, theirs), not_known=not_known)
    proven_at = remembered.proven_at
    if proven_at is None:
        return found(
            CopyState.BLOCKED,
            Reason.NEVER_PROVEN,
            "the primary does not answer, and the copy was never proven",
        )
    age = standby.clock - proven_at
    confirmed = remembered.confirmed
    evidence = {
        "proven_at": proven_at,
        "age": max(0, age),
        "client_lsn": None if confirmed is None else confirmed.lsn,
        "flush_lsn": standby.flush_lsn,
    }
    not_known = (SLOTS_UNKNOWN, CONFIRMED_UNKNOWN)
    against = objections(remembered, standby, record)
    if against:
        return found(
            CopyState.SUSPECT,
            Reason.PRIMARY_UNREACHABLE,
            "the primary does not answer, and " + ", and ".join(against),
        )
    if client.is_ahead(confirmed, standby.flush_lsn):
        return found(
            CopyState.CLIENT_AHEAD,
            Reason.CLIENT_AHEAD,
            f"the primary does not answer, and {client.WHY}",
            "start the primary again; after a promotion its client would have rows that no server has",
        )
    # With a clock that went back the age is not known.
    if terms.max_age is not None and not 0 <= age <= terms.max_age:
        return found(
            CopyState.BLOCKED,
            Reason.PROVEN_LONG_AGO,
            f"the primary does not answer, and it was proven {_seconds(age)} ago, which is more than"
            f" {_seconds(terms.max_age)}",
            "check that the primary can be reached, or accept older proofs: max_age in [slots], or --max-age",
        )
    return found(
        CopyState.READY,
        Reason.PROVEN_BEFORE,
        f"the primary does not answer; it was proven {_seconds(age)} ago, and the standby shows no objection",
    )


def _seconds(microseconds: int) -> str:
    return f"{microseconds / 1e6:.0f} s"
