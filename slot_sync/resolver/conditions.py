"""The conditions for READY, in the order in which they are evaluated.

Write L for the slot on the primary, C for the copy, F for a confirmed_flush_lsn, X for C's catalog_xmin, P for L's,
Q for the physical slot's. `need(F)` is the oldest transaction whose catalog changes a decoder that continues from F may
have to see undone: rows deleted by it or by later ones must exist. It only grows with F. C can be decoded completely if
its decoder knows which transactions were in progress (`has_snapshot`, `has_wal`), and no row was removed that was
deleted by `need(C.F)` or later.

1. L is valid, so P <= need(L.F) at each moment. So if C.F >= L.F at some poll, then P of that poll <= need(C.F) ever
   after. Let B be the newest such P, of this poll or of one before (`needed_from`): B <= need(C.F).
2. The rows that the primary has removed up to its sample were deleted before P: it kept P for L all the time.
3. Those that it removes later were deleted before Q, as long as the epoch lasts, and Q <= X (`is_heard`, `is_held`).
4. X <= need(C.F) does not hold from the beginning: `reserve` takes the value that is held *at that moment*, and
   transactions in progress at F may be older. It holds once X <= B; or once a decoder has moved both X and restart_lsn,
   since a consistent decoder knows the oldest transaction in progress (`xmin_is_decoded`). Every copy must meet it: once
   the standby is promoted, X alone keeps it from removing rows.

With 4, a P is taken once in an epoch, at the first poll at which the primary had heard of the copy, and must be <= X
(`has_what_was_removed`): removals before that poll are bounded by P, later ones by Q, all by X. The copy may stay behind L
from then on, as it does on a busy server at each poll.

While a transaction has been open since before the copy was created, no decoder can move X. It pins P, so X is set back to
B (`evaluate.py`) as long as P <= B. Q does not go back with it; but P <= X serves as well as Q <= X at the sample
(`is_kept`): nothing that X stands for was removed so far, and removals after a promotion are bounded by X.

A decoder starts at its restart_lsn from a snapshot on disk, which lists the transactions that changed the catalog. All
slots of the server share the file, whichever decoder writes it first; and the server's own fast-forward advance, its
slot synchronization included, omits transactions from it: those that changed only user_catalog_table tables, and before
14 subtransactions of any kind. So the existence of the file proves nothing (`is_whole`). A copy of ours must start from
a snapshot that `advance` wrote, which reads every record and overwrites other decoders' snapshots on its way. A snapshot
that another decoder leaves ahead of the copy may be used later, after a promotion: that is allowed only if the plugin is
known not to read anything that may be missing. The same holds for PostgreSQL's own copies, on 17 and later.

After a VACUUM FULL of a catalog, a transaction's decoder finds its own catalog changes by mapping files (`has_mappings`),
which replay writes, and which restartpoints remove before the restart_lsn of all slots of the standby. A copy may need
older ones, from before it was created: of a transaction that L has yet to send, whose rows were moved before C existed.
`restore_mappings` writes these again, from WAL that C keeps, after any restartpoint that did not know of C. From then on
no restartpoint removes a file from C's restart_lsn on. No file from before it is needed: the rewrite came after the
transaction's change, and that after C's restart_lsn. And the primary has logged each move that is needed: it omits those
of rows from before P and Q, which is the bound of 2 and 3. Neither PostgreSQL's own copies nor the fast-forward advance
restore anything: one that was created beside another copy, which is farther, lacks files as ours would.
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
from walsender_bridge.postgres.protocol.lsn import Lsn

#: Plugins known not to read any user_catalog_table while they decode.
READ_NO_USER_CATALOG = frozenset({"pgoutput", "tuskline", "test_decoding"})
#: From this version on every decoder records all other catalog changes (server_version_num).
_FIRST_WITH_INVALIDATIONS = 140000
#: Versions whose own slot synchronization moves catalog_xmin past transactions that it has not decoded yet.
_HASTY_SYNCHRONIZATION = range(170000, 170005)


@dataclass(frozen=True)
class SlotView:
    """One copy, with all input of its conditions."""

    slot: LogicalSlot
    copy: SlotCopy
    #: Its record, as far as it is of the current epoch.
    record: CopyRecord
    #: The current epoch, and its physical slot; `None`: nothing is held.
    key: FeedbackEpochKey | None
    physical: PhysicalSlot | None
    replay_lsn: Lsn
    #: The standby's server_version_num.
    version: int
    #: `ObservedStandby.idle_share` of the copy.
    idle_share: float = 0.0
    #: `ObservedStandby.outgrown` of the copy.
    outgrown: bool = False
    #: `database.is_replayed_to` of its database.
    has_database: bool = False
    #: The slot's incarnation as of this poll.
    incarnation: Incarnation | None = None


@dataclass(frozen=True)
class Condition:
    """One condition that a copy must meet to be READY."""

    reason: Reason
    holds: Callable[[SlotView], bool]
    why: str
    repair: str = ""
    #: The state of a copy that fails it: INVALID ones are dropped and created again; others wait or are advanced.
    state: CopyState = CopyState.SUSPECT


def fields_agree(view: SlotView) -> bool:
    """The copy is of the same kind as the slot. The name of its database may differ until a rename is replayed."""
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
    """WAL from its restart_lsn on exists."""
    return view.copy.wal_present is True


def is_persistent(view: SlotView) -> bool:
    """It survives a promotion. A copy of PostgreSQL's own is temporary until it is synchronized."""
    return view.copy.persistency == "persistent"


def is_not_idle(view: SlotView) -> bool:
    """The checkpoint at the end of a promotion does not invalidate it."""
    return view.idle_share < 1


def is_within_limit(view: SlotView) -> bool:
    """The checkpoint at the end of a promotion retains its WAL."""
    return not view.outgrown


def keeps_its_database(view: SlotView) -> bool:
    """No record that is still to be replayed drops it with its database."""
    return view.has_database


def is_of_this_slot(view: SlotView) -> bool:
    """It belongs to the slot that the primary has now, not to a dropped one of that name."""
    return is_of(view.copy, view.incarnation)


def is_heard(view: SlotView) -> bool:
    """There is an epoch, and the primary has heard from the standby after the copy was first seen in it."""
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
    """Nothing that X stands for was removed since this epoch began: the physical slot or the slot itself held it."""
    return is_held(view) or is_kept(view)


def has_snapshot(view: SlotView) -> bool:
    """A decoder that starts at its restart_lsn knows which transactions were in progress there."""
    return view.copy.snapshot_present is True


def is_whole(view: SlotView) -> bool:
    """No snapshot that a decoder may start from lacks a transaction that the plugin may need."""
    return starts_whole(view.copy, view.version)


def starts_whole(copy: SlotCopy, version: int) -> bool:
    """`is_whole` for a copy on a standby of that version."""
    any_will_do = version >= _FIRST_WITH_INVALIDATIONS and copy.plugin in READ_NO_USER_CATALOG
    if copy.synced:
        return any_will_do
    if copy.snapshot_present is True and copy.snapshot_complete is not True:
        return False
    return any_will_do or not copy.foreign_snapshot_after


def has_mappings(view: SlotView) -> bool:
    """No mapping file of a rewritten catalog that a decoder may need is missing."""
    return view.copy.mappings_complete is True


def is_replayed(view: SlotView) -> bool:
    """C.F <= the standby's replay position."""
    confirmed = view.copy.confirmed_flush_lsn
    return confirmed is not None and confirmed <= view.replay_lsn


def is_not_ahead(view: SlotView) -> bool:
    """C.F <= L.F: it would not skip changes that the slot's client has not received."""
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
    """B: from the copy's position on, no row that was deleted before this transaction is needed."""
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


#: All conditions; the first that fails gives the verdict.
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
        "it is created again; if this repeats, check the standby's log for the conflict",
        state=CopyState.INVALID,
    ),
    Condition(
        Reason.WAL_GONE,
        has_wal,
        "WAL that the copy needs is no longer on the standby",
        "it is created again; raise wal_keep_size on the standby if this repeats",
        state=CopyState.INVALID,
    ),
    Condition(
        Reason.NOT_PERSISTENT,
        is_persistent,
        "PostgreSQL has not finished the copy, and a promotion would lose it",
        "end long-running transactions on the primary, or let the extension copy this slot",
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
        "wait: advancing the copy corrects this",
    ),
    Condition(
        Reason.NO_SNAPSHOT,
        has_snapshot,
        "there is no snapshot for its restart_lsn: a decoder would silently skip transactions",
        "let the slot's client confirm what it has received, and end transactions open since before the copy was created",
    ),
    Condition(
        Reason.NOT_REPLAYED,
        is_replayed,
        "the standby has not replayed up to the copy's confirmed_flush_lsn",
    ),
    Condition(
        Reason.AHEAD,
        is_not_ahead,
        "the copy is ahead of the slot: a client read from it, or the primary lost the slot's position in a crash",
        "it is created again if the slot's client does not advance",
    ),
    Condition(
        Reason.FOREIGN_SNAPSHOT,
        is_whole,
        "the snapshot that it would start from was written by another decoder and may lack catalog changes",
        "let the slot's client confirm what it has received; the copy is then advanced to a snapshot of its own",
    ),
    Condition(
        Reason.XMIN_BEHIND,
        has_what_was_removed,
        "the primary may have removed rows that the copy needs",
        "wait: advancing the copy past them corrects this",
    ),
    Condition(
        Reason.NO_MAPPINGS,
        has_mappings,
        "mapping files of a rewritten catalog may be missing: a decoder would skip rows of transactions with catalog changes",
        "the controller restores them from WAL; a restartpoint in progress on the standby must end first",
    ),
    Condition(
        Reason.XMIN_NOT_DECODED,
        xmin_is_decoded,
        "the slot has advanced since the copy was reserved, and the copy must follow first",
    ),
    Condition(Reason.OTHER_INCARNATION, is_of_this_slot, incarnation.WHY, incarnation.REPAIR),
    Condition(Reason.DATABASE_PENDING, keeps_its_database, database.WHY, database.REPAIR),
)


def first_failed(view: SlotView) -> Condition | None:
    """The first condition that does not hold; `None`: the copy is safe."""
    return next((condition for condition in CONDITIONS if not condition.holds(view)), None)
