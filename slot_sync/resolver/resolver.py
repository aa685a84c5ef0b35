"""The state of each copy on one standby, and what is to be done next: all transitions, and why they are safe.

Safety: **READY and LAGGING are answered only for a copy from which decoding can go on, complete, if the standby is
promoted at the moment of the sample.** `conditions.py` proves it for one poll, `epoch.py` what holds between polls.
Nothing else is safe to promote to, and the rest of this file only says why a copy is not there yet. Besides:

- An unproven copy never has the name that a client would use: it has a temporary one until all conditions hold.
- Nothing is dropped or changed that our record does not name, or that somebody uses. Nothing is dropped because the
  primary lacks it unless it was shown, several polls in a row, that this is the primary the standby streams from.
- Each action may end in the middle, or be taken twice by two processes: the next poll starts from what is there.
- Slots are judged one by one; what one waits for is never waited for by another.

The table. The first row that fits is taken; `C` is the copy (under its temporary or its real name), `L` the slot.

===========================================  ============  ====================  =====================
what there is                                state         reason                action
===========================================  ============  ====================  =====================
the standby does not answer                  BLOCKED       standby_unreachable   Wait
the standby was promoted, C unproven         LEFTOVER      unproven_name         Drop
the standby was promoted, else               BLOCKED       promoted              Nothing
the primary has an unproven copy             LEFTOVER      unproven_name         Drop it there
primary silent, C proven, the standby still  READY         proven_before         Nothing
shows nothing that speaks against it
the same, longer ago than max_age            BLOCKED       proven_long_ago       Wait
primary silent, C proven, its client was     CLIENT_AHEAD  client_ahead          Wait
seen past what the standby has flushed
primary silent, else                         SUSPECT       primary_unreachable   Wait
primary silent, C never proven               BLOCKED       never_proven          Wait
the servers are not set up for it            BLOCKED       which setting         Wait
no extension, PostgreSQL's own C (17+)       SYNCED, ...   synced_only, ...      Nothing, Wait (`native.py`)
neither L nor C, but [slots] names L         MISSING       no_such_slot          Wait
physical slot has no marker                  BLOCKED       no_marker             Mark (a row of its own)
our C, no L, for fewer than GONE_POLLS       ORPHAN        gone                  Wait
our C, no L, for GONE_POLLS                  ORPHAN        gone                  Drop
our C, L not wanted any more                 ORPHAN        deselected            Drop
a temporary name that no record knows        LEFTOVER      unproven_name         Nothing
a foreign slot that nobody can have made     STALE_BACKUP  from_a_backup         Nothing
in recovery, or that is L of long ago
L was here when this was the primary         LEFTOVER      old_primary           Drop
C by a marker that our record does not name  KEPT_         other_controller      Wait (it is ours from the
                                             ELSEWHERE                           next poll on, if we act)
another foreign slot of L's name             CONFLICT      name_taken            Nothing (Drop our own
                                                                                 temporary C)
L is lost                                    INVALID       lost_on_primary       Wait
L is not consistent yet                      BLOCKED       slot_being_made       Wait
no C, PostgreSQL will make it (17+)          MISSING       native_pending        Wait
no C, and this may be another primary        MISSING       what of the link      Wait
no C, the standby is behind L                MISSING       ahead_of_standby      Wait
no C                                         MISSING       not_made              Reserve
both names, the same (a crash in a rename)   PROVING       proven                Drop the temporary one
our C, and PostgreSQL will make it (17+)     SUSPECT       gives_way             Drop
C of another kind than the real primary's L, INVALID       the condition's       Drop
invalid, its WAL gone, or ahead of L for
AHEAD_POLLS
unproven C, nothing held for it yet          RESERVING     the condition's       Wait
unproven C, a condition fails                PROVING       the condition's       Advance, SetFields, Wait
C, all hold, but `failover` is not L's (17+) SUSPECT,      failover_differs      SetFailover
                                             PROVING
unproven C, all conditions hold              PROVING       proven                Rename
C, a condition fails                         SUSPECT       the condition's       Advance, SetFields, Wait
C, all hold, its client was seen past what   CLIENT_AHEAD  client_ahead          Advance, SetFields, Wait
the standby has flushed
C, all hold, farther behind L than allowed   LAGGING       behind                Advance, SetFields, Wait
C, all hold                                  READY         proven                the same, or Nothing
===========================================  ============  ====================  =====================

A drop of a slot that is in use becomes Wait. PostgreSQL's own copies (`synced`, 17+) are judged by the same rows, and
every action on them becomes Wait, or Nothing: that is for its own worker.
"""

from dataclasses import replace
from fnmatch import fnmatchcase

from slot_sync.resolver.epoch import (
    Problem,
    is_linked,
    link_problem,
    physical_slot,
    setup_problem,
)
from slot_sync.resolver.foreign import (
    elsewhere,
    foreign_slot,
    is_ours,
    kept_elsewhere,
    temporary_prefix,
    unexpected,
    unproven,
)
from slot_sync.resolver.judge import drop, judge
from slot_sync.resolver.native import judge_by_sql
from slot_sync.resolver.observed import (
    TEMPORARY_PREFIX,
    Copy,
    CopyRecord,
    LogicalSlot,
    Primary,
    Record,
    Selection,
    Standby,
    Terms,
)
from slot_sync.resolver.silent import primary_is_silent
from slot_sync.resolver.transitions import (
    Action,
    Mark,
    Nothing,
    Reason,
    Reserve,
    State,
    Transition,
    Wait,
)

_ANY = Terms()
#: Polls in a row that have to show the primary without a slot before its copy is dropped.
GONE_POLLS = 3


def is_wanted(slot: LogicalSlot, wanted: Selection) -> bool:
    """The selection names the slot, or names nothing at all."""
    if wanted == Selection():
        return True
    return (
        slot.name in wanted.names
        or slot.plugin in wanted.plugins
        or slot.database in wanted.databases
        or any(fnmatchcase(slot.name, pattern) for pattern in wanted.patterns)
    )


def resolve(
    primary: Primary | None,
    standby: Standby | None,
    record: Record,
    wanted: Selection,
    terms: Terms = _ANY,
) -> list[Transition]:
    """What each copy is found in and what is to be done, by name; slots that nobody expected are told too.

    Either server is `None` when it does not answer. Before an action is carried out, `remember` (`record.py`) has to
    have been written down.
    """
    expected = _expected(primary, record, wanted)
    unknown = sorted(wanted.names - {*expected})
    left_over = []
    if primary is not None and not primary.in_recovery:
        left_over = unproven(primary.logical_slots, record, on_primary=True)
    if standby is None:
        names = (*expected, *unknown)
        return [*left_over, *(_standby_is_silent(name, record) for name in names)]
    if not standby.in_recovery:
        return [
            *unproven(standby.slots, record),
            *(_promoted(name, record) for name in expected),
        ]
    if primary is None:
        names = tuple(sorted(record.copies.keys() | wanted.names))
        return [primary_is_silent(record.of(name), standby, record, terms) for name in names]
    problem = setup_problem(primary, standby)
    if problem is not None:
        # With the wrong server even "none" says nothing of the slots that there are.
        names = (*expected, *unknown) or (standby.primary_slot_name or "",)
        return [*left_over, *(_blocked(name, record, problem) for name in names)]
    lacking = _no_extension(primary, standby)
    if lacking is not None:
        return [
            *left_over,
            *(
                judge_by_sql(primary, standby, record, name, terms)
                or _blocked(name, record, lacking)
                for name in expected
            ),
            *(_no_such_slot(name, record) for name in unknown),
        ]
    strangers = [
        each
        for each in unexpected(primary, standby, record, frozenset(expected))
        if each.counts or each.slot not in unknown
    ]
    told = {each.slot for each in strangers}
    return [
        *left_over,
        *_marks(primary, standby),
        *(_one(primary, standby, record, wanted, name) for name in expected),
        *(_no_such_slot(name, record) for name in unknown if name not in told),
        *strangers,
    ]


def _no_extension(primary: Primary, standby: Standby) -> Problem | None:
    """On which server the extension is not; `None`: it is on both."""
    if not standby.has_extension:
        return Problem(
            Reason.NO_EXTENSION,
            "the standby does not have the extension tuskline",
            "install its library on the standby, and CREATE EXTENSION tuskline on the primary",
            lasting=True,
        )
    if not primary.has_extension:
        return Problem(
            Reason.NO_EXTENSION,
            "the primary does not show its slots through the extension tuskline",
            "on the primary, in the database of [slots] dsn: CREATE EXTENSION tuskline, and GRANT tuskline_slots",
            lasting=True,
        )
    return None


def _expected(primary: Primary | None, record: Record, wanted: Selection) -> list[str]:
    there = () if primary is None else primary.logical_slots
    names = {slot.name for slot in there if not slot.temporary and is_wanted(slot, wanted)}
    known = {
        each.name for each in record.copies.values() if each.made or each.temporary_name is not None
    }
    return sorted(name for name in names | known if not name.startswith(TEMPORARY_PREFIX))


def _no_such_slot(name: str, record: Record) -> Transition:
    return Transition(
        name,
        record.of(name).state,
        State.MISSING,
        Reason.NO_SUCH_SLOT,
        "the primary has no slot of that name",
        repair="create it there, or remove it from names in [slots]",
        action=Wait(),
    )


def _standby_is_silent(name: str, record: Record) -> Transition:
    return Transition(
        name,
        record.of(name).state,
        State.BLOCKED,
        Reason.STANDBY_UNREACHABLE,
        "the standby does not answer",
        repair="see that it runs and that it can be reached",
        action=Wait(),
    )


def _promoted(name: str, record: Record) -> Transition:
    return Transition(
        name,
        record.of(name).state,
        State.BLOCKED,
        Reason.PROMOTED,
        "the standby has been promoted, and its slots are its own now",
        repair="give it as the primary, and the old one as a standby once it is one",
    )


def _blocked(name: str, record: Record, problem: Problem) -> Transition:
    return Transition(
        name,
        record.of(name).state,
        State.BLOCKED,
        problem.reason,
        problem.why,
        repair=problem.repair,
        action=Wait(),
    )


def _marks(primary: Primary, standby: Standby) -> list[Transition]:
    slot = physical_slot(primary, standby)
    if slot is None or slot.marker is not None:
        return []
    problem = link_problem(primary, standby)
    if problem is None or problem.reason is not Reason.NO_MARKER:
        return []  # whose slot it is has to be known first
    return [
        Transition(
            slot.name,
            "",
            State.BLOCKED,
            Reason.NO_MARKER,
            "the physical slot has no marker yet: it is new to us",
            action=Mark(slot.name, f"{primary.wal_lsn:x}-{standby.clock:x}"),
            counts=False,
        )
    ]


def _one(
    primary: Primary, standby: Standby, record: Record, wanted: Selection, name: str
) -> Transition:
    """The transition of one expected name, both servers being set up for it."""
    slot = primary.logical(name)
    remembered = record.of(name)
    here = standby.slot(name)
    unproven_copy = standby.slot(remembered.temporary_name or "")
    if slot is None or not is_wanted(slot, wanted):
        linked = is_linked(primary, standby)
        found = _orphan(slot, remembered, here, unproven_copy, linked=linked)
        return replace(found, counts=name in wanted.names)
    if here is not None and not is_ours(remembered, here):
        return foreign_slot(
            slot, here, unproven_copy, remembered, standby, linked=is_linked(primary, standby)
        )
    if slot.wal_status == "lost" or slot.invalidation is not None:
        return Transition(
            name,
            remembered.state,
            State.INVALID,
            Reason.LOST_ON_PRIMARY,
            "the slot is lost on the primary, and its client cannot go on from it",
            repair="drop it there, make it again, and let its client begin anew",
            evidence={"wal_status": slot.wal_status, "invalidation": slot.invalidation},
            action=Wait(),
        )
    if slot.restart_lsn is None or slot.confirmed_flush_lsn is None or slot.catalog_xmin is None:
        return Transition(
            name,
            remembered.state,
            State.BLOCKED,
            Reason.SLOT_BEING_MADE,
            "the slot is still being made on the primary",
            repair="end transactions that have been open there for long",
            action=Wait(),
        )
    if here is not None and unproven_copy is not None:
        return Transition(
            name,
            remembered.state,
            State.PROVING,
            Reason.RENAME_CUT,
            "a rename did not come to its end: the slot is there under both names",
            action=drop(unproven_copy),
        )
    copy = here or unproven_copy
    if copy is not None and slot.failover and standby.native_sync and not copy.synced:
        return _gives_way(copy, remembered, linked=is_linked(primary, standby))
    if copy is None:
        theirs = kept_elsewhere(name, remembered, standby)
        if theirs is not None:
            return elsewhere(name, remembered, theirs)
        link = None if is_linked(primary, standby) else link_problem(primary, standby)
        return _missing(slot, remembered, standby, link)
    return judge(slot, copy, primary, standby, record)


def _gives_way(copy: Copy, remembered: CopyRecord, *, linked: bool) -> Transition:
    """PostgreSQL makes its own copy, and stops at a slot of that name for all others, too."""
    return Transition(
        remembered.name,
        remembered.state,
        State.SUSPECT,
        Reason.GIVES_WAY,
        "PostgreSQL synchronizes this slot itself (failover), so this copy has to be dropped",
        repair="wait until PostgreSQL has made its own copy; if it does not, look at the standby's log",
        action=drop(copy) if linked else Wait(),
    )


def _orphan(
    slot: LogicalSlot | None,
    remembered: CopyRecord,
    here: Copy | None,
    unproven_copy: Copy | None,
    *,
    linked: bool,
) -> Transition:
    ours = here if here is not None and is_ours(remembered, here) else None
    copy = unproven_copy or ours
    polls = remembered.polls_gone + 1
    due = linked and (slot is not None or polls >= GONE_POLLS)
    action: Action = Nothing()
    if copy is not None:
        action = drop(copy) if due and not copy.synced else Wait()
    if slot is not None:
        return Transition(
            remembered.name,
            remembered.state,
            State.ORPHAN,
            Reason.DESELECTED,
            "the slot is not among those to keep any more",
            action=action,
            counts=False,
        )
    return Transition(
        remembered.name,
        remembered.state,
        State.ORPHAN,
        Reason.GONE,
        "the primary has no such slot any more",
        evidence={"polls_gone": polls, "linked": linked},
        action=action,
        counts=False,
    )


def _missing(
    slot: LogicalSlot, remembered: CopyRecord, standby: Standby, link: Problem | None
) -> Transition:
    """Of a slot without a copy; `link`: why it is not known that the standby streams from this very primary."""

    def missing(reason: Reason, why: str, repair: str, action: Action) -> Transition:
        return Transition(
            slot.name,
            remembered.state,
            State.MISSING,
            reason,
            why,
            repair=repair,
            evidence={
                "confirmed_flush_lsn": slot.confirmed_flush_lsn,
                "replay_lsn": standby.replay_lsn,
            },
            action=action,
        )

    if slot.failover and standby.native_sync:
        return missing(
            Reason.NATIVE_PENDING,
            "PostgreSQL has not made its copy yet",
            "see that primary_conninfo names a database, and look at the standby's log",
            Wait(),
        )
    if link is not None:
        return missing(link.reason, link.why, link.repair, Wait())
    assert slot.restart_lsn is not None
    assert slot.confirmed_flush_lsn is not None
    if slot.confirmed_flush_lsn > standby.replay_lsn:
        return missing(
            Reason.AHEAD_OF_STANDBY,
            "the slot is ahead of what the standby has replayed",
            "wait; recovery_min_apply_delay makes this last",
            Wait(),
        )
    return missing(
        Reason.NOT_MADE,
        "the standby has no copy",
        "",
        Reserve(
            temporary_name(slot.name, standby.clock),
            slot.database,
            slot.plugin,
            slot.restart_lsn,
            slot.confirmed_flush_lsn,
            slot.two_phase,
            slot.two_phase_at,
        ),
    )


def temporary_name(name: str, clock: int) -> str:
    """A name for an unproven copy that no other copy ever had: at most 63 letters, and the slot's for a reader."""
    return f"{temporary_prefix(name)}{clock:x}"
