"""What a copy needs to be READY, one condition each, in the order in which they are asked.

Write L for the slot on the primary, C for the copy, F for a confirmed_flush_lsn, X for C's catalog_xmin, P for L's,
Q for the physical slot's. `need(F)` is the oldest transaction whose catalog changes a decoder that goes on from F may
have to see undone: rows deleted by it or by later ones have to be there. It only grows with F. C can be decoded
completely if its decoder knows what was in progress (`has_snapshot`, `has_wal`), and no row was removed that was
deleted by `need(C.F)` or later.

1. L is whole, so P <= need(L.F) at each moment. So if C.F >= L.F at some poll, then P of that poll <= need(C.F) ever
   after. Let B be the newest such P, of this poll or of one before (`needed_from`): B <= need(C.F).
2. What the primary has removed up to its sample was deleted before P: it kept P for L all the time.
3. What it removes later was deleted before Q, as long as the epoch lasts, and Q <= X (`is_heard`, `is_held`).
4. X <= need(C.F) is not so from the beginning: `reserve` takes what is held *there and then*, and transactions that
   were in progress at F may be older. It is so once X <= B; or once a decoder has moved both X and restart_lsn, since a
   decoder that is consistent knows the oldest of what is in progress (`xmin_is_decoded`). It is asked of every copy:
   once the standby is promoted, X alone is what keeps it from removing rows.

With 4, a P is taken once in an epoch, at the first poll at which the copy was heard of, and is to be <= X
(`has_what_was_removed`): removals before that poll are bounded by P, later ones by Q, all by X. The copy may be behind L
ever after, as it is on a busy server at each poll.

While a transaction has been open since before the copy was made, no decoder can move X. It pins P, so X is set back to
B (`judge.py`) as long as P <= B. Q does not go back with it; but P <= X is as good as Q <= X at the sample
(`is_kept`): nothing that X stands for was removed so far, and what is removed after a promotion is bounded by X.

What a decoder knows at its restart_lsn comes from a snapshot on disk, which lists the transactions that changed the
catalog. The file is shared by all slots of the server, whichever decoder writes it first; and the server's own
fast-forward advance, its slot synchronization included, leaves transactions out of it: those that changed only
user_catalog_table tables, and before 14 subtransactions of any kind. So the existence of the file proves nothing
(`is_whole`). A copy of ours has to start from a snapshot that `advance` wrote, which reads every record and
overwrites other decoders' snapshots on its way. A snapshot that another decoder leaves ahead of the copy may be used
later, after a promotion: that is allowed only if the plugin is known not to read anything that may be missing. The
same holds for PostgreSQL's own copies, on 17 and later.

Where its own catalog changes are after a VACUUM FULL of the catalog a transaction's decoder learns from mapping files
(`has_mappings`), which replay writes, and restartpoints remove before the restart_lsn of all slots of the standby. A copy
may need older ones, from before it was made: of a transaction that L has yet to send, whose rows were moved before C was
there. `restore_mappings` writes these once more, from WAL that C keeps, after any restartpoint that did not know of C.
From then on no restartpoint removes a file from C's restart_lsn on. No file from before it is needed: the rewrite came after
the transaction's change, and that after C's restart_lsn. And the primary has logged each move that is needed: it leaves out
those of rows from before P and Q, which is the bound of 2 and 3. Neither PostgreSQL's own copies nor the fast-forward advance
restore anything: one that was made beside another copy, which is farther, lacks files as ours would.
"""

from collections.abc import Callable
from dataclasses import dataclass

from slot_sync.resolver import database, incarnation
from slot_sync.resolver.feedback_epoch import heard_after, precedes
from slot_sync.resolver.incarnation import is_of
from slot_sync.resolver.observed import (
    CopyRecord,
    FeedbackEpochKey,
    Incarnation,
    LogicalSlot,
    PhysicalSlot,
    SlotCopy,
    SlotPosition,
)
from slot_sync.resolver.transitions import CopyState, Reason

#: Plugins that are known to read no user_catalog_table while they decode.
READ_NO_USER_CATALOG = frozenset({"pgoutput", "tuskline", "test_decoding"})
#: From here on every decoder takes note of all other changes of the catalog (server_version_num).
_FIRST_WITH_INVALIDATIONS = 140000
#: Here PostgreSQL's own synchronization moves catalog_xmin past transactions that it has not decoded yet.
_HASTY_SYNCHRONIZATION = range(170000, 170005)


@dataclass(frozen=True)
class SlotView:
    """One copy, and all that its conditions look at."""

    slot: LogicalSlot
    copy: SlotCopy
    #: What is remembered of it in the epoch that is held now.
    record: CopyRecord
    #: The epoch that is held now, and its physical slot; `None`: nothing is held.
    key: FeedbackEpochKey | None
    physical: PhysicalSlot | None
    replay_lsn: int
    #: The standby's server_version_num.
    version: int
    #: `ObservedStandby.idle_share` of the copy.
    idle_share: float = 0.0
    #: `ObservedStandby.outgrown` of the copy.
    outgrown: bool = False
    #: `database.is_replayed_to` of its database.
    has_database: bool = False
    #: The slot as it is known with this poll.
    incarnation: Incarnation | None = None


@dataclass(frozen=True)
class Condition:
    """One thing that a copy needs to be READY."""

    reason: Reason
    holds: Callable[[SlotView], bool]
    why: str
    repair: str = ""
    #: What a copy is that lacks it: INVALID ones are dropped and made again; others wait or are advanced.
    state: CopyState = CopyState.SUSPECT


def fields_agree(view: SlotView) -> bool:
    """The copy is of the same kind as the slot. The name of its database may be another one until it is replayed."""
    slot, copy = view.slot, view.copy
    return (copy.plugin, copy.datoid, copy.two_phase, copy.two_phase_at) == (
        slot.plugin,
        slot.datoid,
        slot.two_phase,
        slot.two_phase_at,
    )


def is_valid(view: SlotView) -> bool:
    """The standby has not invalidated it."""
    return view.copy.invalidation is None


def has_wal(view: SlotView) -> bool:
    """WAL from its restart_lsn on is there."""
    return view.copy.wal_present is True


def is_persistent(view: SlotView) -> bool:
    """It stays after a promotion. A copy of PostgreSQL's own is temporary until it is synchronized."""
    return view.copy.persistency == "persistent"


def is_not_idle(view: SlotView) -> bool:
    """The checkpoint at the end of a promotion does not invalidate it."""
    return view.idle_share < 1


def is_within_limit(view: SlotView) -> bool:
    """The checkpoint at the end of a promotion leaves it its WAL."""
    return not view.outgrown


def keeps_its_database(view: SlotView) -> bool:
    """Nothing that is still to be replayed drops it with its database."""
    return view.has_database


def is_of_this_slot(view: SlotView) -> bool:
    """It is where the slot that the primary has now has been, and no other of that name."""
    return is_of(view.copy, view.incarnation)


def is_heard(view: SlotView) -> bool:
    """An epoch is held, and the primary has heard the standby after the copy was first seen in it."""
    if view.key is None or view.physical is None or view.record.seen is None:
        return False
    return heard_after(view.physical, view.record.seen)


def is_held(view: SlotView) -> bool:
    """Q <= X: the primary removes nothing from now on that X stands for."""
    held = view.physical.catalog_xmin if view.physical is not None else None
    xmin = view.copy.catalog_xmin
    return held is not None and xmin is not None and not precedes(xmin, held)


def is_kept(view: SlotView) -> bool:
    """P <= X: the slot itself has kept until now what X stands for."""
    there, here = view.slot.catalog_xmin, view.copy.catalog_xmin
    return there is not None and here is not None and not precedes(here, there)


def is_reserved(view: SlotView) -> bool:
    """Nothing that X stands for was removed since this epoch began: the physical slot held it, or the slot itself."""
    return is_held(view) or is_kept(view)


def has_snapshot(view: SlotView) -> bool:
    """A decoder that starts at its restart_lsn knows what was in progress there."""
    return view.copy.snapshot_present is True


def is_whole(view: SlotView) -> bool:
    """No snapshot that a decoder may start with lacks a transaction that the plugin may ask about."""
    return starts_whole(view.copy, view.version)


def starts_whole(copy: SlotCopy, version: int) -> bool:
    """`is_whole`, of a copy on a standby of that version."""
    any_will_do = version >= _FIRST_WITH_INVALIDATIONS and copy.plugin in READ_NO_USER_CATALOG
    if copy.synced:
        return any_will_do
    if copy.snapshot_present is True and copy.snapshot_complete is not True:
        return False
    return any_will_do or not copy.foreign_snapshot_after


def has_mappings(view: SlotView) -> bool:
    """No mapping file of a rewritten catalog is missing that a decoder may ask for."""
    return view.copy.mappings_complete is True


def is_replayed(view: SlotView) -> bool:
    """C.F <= what the standby has replayed."""
    confirmed = view.copy.confirmed_flush_lsn
    return confirmed is not None and confirmed <= view.replay_lsn


def is_not_ahead(view: SlotView) -> bool:
    """C.F <= L.F: it would not leave out what the slot's client has not got."""
    there, here = view.slot.confirmed_flush_lsn, view.copy.confirmed_flush_lsn
    return there is not None and here is not None and here <= there


def has_what_was_removed(view: SlotView) -> bool:
    """P <= X, for the P of this poll or of the first one in this epoch at which the copy was held."""
    there, here = view.slot.catalog_xmin, view.copy.catalog_xmin
    if there is None or here is None:
        return False
    bound = there if view.record.removed_before is None else view.record.removed_before
    return not precedes(here, bound)


def needed_from(view: SlotView) -> int | None:
    """B: nothing that was deleted before this transaction is needed from where the copy is."""
    here, slot = view.copy.confirmed_flush_lsn, view.slot
    if here is None:
        return None
    places = [view.record.passed, view.record.slot_was]
    if slot.confirmed_flush_lsn is not None and slot.catalog_xmin is not None:
        places.append(SlotPosition(slot.confirmed_flush_lsn, slot.catalog_xmin))
    newest = None
    for place in places:
        if place is None or place.confirmed_flush_lsn > here:
            continue
        if newest is None or precedes(newest, place.catalog_xmin):
            newest = place.catalog_xmin
    return newest


def xmin_is_decoded(view: SlotView) -> bool:
    """X <= need(C.F) for good."""
    copy, known = view.copy, view.record
    if copy.synced and view.version not in _HASTY_SYNCHRONIZATION:
        return True  # PostgreSQL copies all three from the slot, or decodes
    if copy.catalog_xmin is None or copy.restart_lsn is None or copy.confirmed_flush_lsn is None:
        return False
    needed = needed_from(view)
    if needed is not None and not precedes(needed, copy.catalog_xmin):
        return True
    if copy.synced:
        return False
    if known.decoded_at is not None and copy.confirmed_flush_lsn >= known.decoded_at:
        return True
    return (
        known.reserved is not None
        and copy.restart_lsn > known.reserved.restart_lsn
        and precedes(known.reserved.catalog_xmin, copy.catalog_xmin)
    )


#: All of them, the first that fails gives the verdict.
CONDITIONS: tuple[Condition, ...] = (
    Condition(
        Reason.FIELDS_DIFFER,
        fields_agree,
        "plugin, database or two_phase differ from the slot on the primary",
        state=CopyState.INVALID,
    ),
    Condition(
        Reason.INVALIDATED,
        is_valid,
        "the standby has invalidated the copy",
        "it is made again; if this repeats, look at the standby's log for the conflict",
        state=CopyState.INVALID,
    ),
    Condition(
        Reason.WAL_GONE,
        has_wal,
        "WAL that the copy needs is not on the standby any more",
        "it is made again; raise wal_keep_size on the standby if this repeats",
        state=CopyState.INVALID,
    ),
    Condition(
        Reason.NOT_PERSISTENT,
        is_persistent,
        "PostgreSQL has not finished the copy, and a promotion would lose it",
        "end transactions that have been open for long on the primary, or let the extension keep this slot",
        state=CopyState.PROVING,
    ),
    Condition(
        Reason.IDLE,
        is_not_idle,
        "it has been idle for idle_replication_slot_timeout, and the next checkpoint, or a promotion, invalidates it",
        "the controller uses it briefly; if this repeats, set idle_replication_slot_timeout = 0 on the standby",
    ),
    Condition(
        Reason.OUTGROWN,
        is_within_limit,
        "it needs older WAL than max_slot_wal_keep_size allows on the standby: the next checkpoint, or a promotion,"
        " invalidates it",
        "raise max_slot_wal_keep_size on the standby and reload, or end long-running transactions",
    ),
    Condition(
        Reason.NOT_HEARD,
        is_heard,
        "the primary has not heard from the standby since the copy was first seen, or the link last changed",
        "it takes up to wal_receiver_status_interval",
    ),
    Condition(
        Reason.RESERVED_LATER,
        is_reserved,
        "the primary does not keep all that the copy's catalog_xmin stands for",
        "it becomes right as soon as the copy has been advanced",
    ),
    Condition(
        Reason.NO_SNAPSHOT,
        has_snapshot,
        "there is no snapshot for its restart_lsn: a decoder would leave out transactions in silence",
        "let the client of the slot confirm what it has, and end transactions that were open when the copy was begun",
    ),
    Condition(
        Reason.NOT_REPLAYED,
        is_replayed,
        "the standby has not replayed up to the copy's confirmed_flush_lsn",
    ),
    Condition(
        Reason.AHEAD,
        is_not_ahead,
        "the copy is ahead of the slot: somebody read from it, or the primary crashed and forgot",
        "it is made again if the slot's client does not move on",
    ),
    Condition(
        Reason.FOREIGN_SNAPSHOT,
        is_whole,
        "the snapshot that it would start from was written by another decoder and may lack catalog changes",
        "let the client of the slot confirm what it has; the copy is then advanced to a snapshot of its own",
    ),
    Condition(
        Reason.XMIN_BEHIND,
        has_what_was_removed,
        "the primary may have removed rows that the copy needs",
        "it becomes right as soon as the copy has been advanced past them",
    ),
    Condition(
        Reason.NO_MAPPINGS,
        has_mappings,
        "mapping files of a rewritten catalog may be missing: a decoder would leave out rows of transactions with catalog"
        " changes",
        "the controller restores them from WAL; a restartpoint that is in progress on the standby has to end first",
    ),
    Condition(
        Reason.XMIN_NOT_DECODED,
        xmin_is_decoded,
        "the slot has moved on from where the copy was reserved, and the copy has to follow first",
    ),
    Condition(Reason.OTHER_INCARNATION, is_of_this_slot, incarnation.WHY, incarnation.REPAIR),
    Condition(Reason.DATABASE_PENDING, keeps_its_database, database.WHY, database.REPAIR),
)


def first_failed(view: SlotView) -> Condition | None:
    """The first condition that does not hold; `None`: the copy is safe."""
    return next((condition for condition in CONDITIONS if not condition.holds(view)), None)
