"""The state of each copy on one standby, and the next action: all transitions, and why they are safe.

Safety: **A copy is READY or LAGGING only if decoding from it is complete after a promotion of the standby at the moment
of the sample.** `conditions.py` proves it for one poll, `feedback_epoch.py` what holds between polls. No other state is
safe to promote to, and the rest of this file only explains why a copy is not there yet. Besides:

- An unproven copy never has the name that a client would use: it has a temporary one until all conditions hold.
- A slot is dropped or changed only if our record names it and no process uses it, except for an unproven copy on a server
  that is not in recovery, whichever controller created it. A slot is dropped for being absent on the primary only if
  several consecutive polls have shown that this is the primary that the standby streams from.
- Each action may end in the middle, or be carried out twice by two processes: the next poll starts from what exists.
- Slots are evaluated one by one; no slot waits for what another one waits for.

The table. The first row that matches applies; `C` is the copy (under its temporary or its real name), `L` the slot.

===========================================  ============  ====================  =====================
situation                                    state         reason                action
===========================================  ============  ====================  =====================
the standby does not answer                  BLOCKED       standby_unreachable   Wait
the standby was promoted, C unproven         LEFTOVER      unproven_name         Drop
the standby was promoted, otherwise          BLOCKED       promoted              Nothing
the primary has an unproven copy             LEFTOVER      unproven_name         Drop it there
primary silent, C proven, the standby shows  READY         proven_before         Nothing
no objection
the same, longer ago than max_age            BLOCKED       proven_long_ago       Wait
primary silent, C proven, its client was     CLIENT_AHEAD  client_ahead          Wait
seen past what the standby has flushed
primary silent, otherwise                    SUSPECT       primary_unreachable   Wait
primary silent, C never proven               BLOCKED       never_proven          Wait
a server's settings do not allow it          BLOCKED       which setting         Wait
no extension, PostgreSQL's own C (17+)       SYNCED, ...   synced_only, ...      Nothing, Wait (`native.py`)
neither L nor C, but [slots] names L         MISSING       no_such_slot          Wait
physical slot has no incarnation id          BLOCKED       no_incarnation_id     Mark (a row of its own)
our C, no L, for fewer than GONE_POLLS       ORPHAN        gone                  Wait
our C, no L, for GONE_POLLS                  ORPHAN        gone                  Drop
our C, L not selected any more               ORPHAN        deselected            Drop
a temporary name that no record has          LEFTOVER      unproven_name         Nothing
a foreign slot that cannot have been made    STALE_BACKUP  from_a_backup         Nothing
in recovery, or that is L of long ago
L was here when this was the primary         LEFTOVER      old_primary           Drop
C by its incarnation id, not in our record   KEPT_         other_controller      Wait (it is ours from the
                                             ELSEWHERE                           next poll on, if we act)
another foreign slot of L's name             CONFLICT      name_taken            Nothing (Drop our own
                                                                                 temporary C)
L is lost                                    INVALID       lost_on_primary       Wait
L is not consistent yet                      BLOCKED       slot_being_created    Wait
no C, PostgreSQL will create it (17+)        MISSING       native_pending        Wait
no C, and this may be another primary        MISSING       the link's            Wait
no C, the standby is behind L                MISSING       ahead_of_standby      Wait
no C                                         MISSING       not_created            Reserve
L has no incarnation id yet                  as otherwise  as otherwise          Mark
both names, the same (a crash in a rename)   PROVING       proven                Drop the temporary one
our C, and PostgreSQL will create it (17+)   SUSPECT       gives_way             Drop
C of another kind than the real primary's L, INVALID       the condition's       Drop
invalid, its WAL gone, or ahead of L for
AHEAD_POLLS
unproven C, nothing held for it yet          RESERVING     the condition's       Wait
unproven C, a condition fails                PROVING       the condition's       Advance, SetFields, Wait
PostgreSQL's C, and its worker is off (17+)  SUSPECT       not_synchronized      Wait
C, only mapping files are in doubt           SUSPECT,      no_mappings           RestoreMappings
                                             PROVING
C, all hold, but `failover` is not L's (17+) SUSPECT,      failover_differs      SetFailover
                                             PROVING
unproven C, all conditions hold              PROVING       proven                Rename
C, a condition fails                         SUSPECT       the condition's       Advance, SetFields, Wait
C, all hold, its client was seen past what   CLIENT_AHEAD  client_ahead          Advance, SetFields, Wait
the standby has flushed
C, all hold, farther behind L than allowed   LAGGING       behind                Advance, SetFields, Wait
C, all hold                                  READY         proven                the same, or Nothing
===========================================  ============  ====================  =====================

A drop of a slot that is in use becomes Wait. PostgreSQL's own copies (`synced`, 17+) are evaluated by the same rows, and
every action on them but RestoreMappings becomes Wait, or Nothing: PostgreSQL's slot sync worker carries it out.
"""

from typing import Final

from slot_sync.resolver.feedback_epoch import (
    FeedbackEpochProblem,
    link_problem,
    physical_slot,
    setup_problem,
)
from slot_sync.resolver.foreign import unexpected, unproven
from slot_sync.resolver.native import evaluate_by_sql
from slot_sync.resolver.observed import (
    TEMPORARY_PREFIX,
    ObservedPrimary,
    ObservedStandby,
    ReadinessTerms,
    Selection,
    StandbyRecord,
)
from slot_sync.resolver.one_slot import is_wanted, transition_of
from slot_sync.resolver.silent import primary_is_silent
from slot_sync.resolver.transitions import CopyState, MarkIncarnation, Reason, Transition, Wait

_ANY = ReadinessTerms()
_STANDBY_SILENT: Final = FeedbackEpochProblem(
    Reason.STANDBY_UNREACHABLE,
    "the standby does not answer",
    "check that it runs and can be reached",
    lasting=False,
)


def resolve(
    primary: ObservedPrimary | None,
    standby: ObservedStandby | None,
    record: StandbyRecord,
    wanted: Selection,
    terms: ReadinessTerms = _ANY,
) -> list[Transition]:
    """The transition of each copy, by name, and of unexpected slots.

    Either server is `None` when it does not answer. Before an action is carried out, the result of `remember`
    (`record.py`) must have been saved.
    """
    expected = _expected(primary, record, wanted)
    unknown = sorted(wanted.names - {*expected})
    left_over = []
    if primary is not None and not primary.in_recovery:
        left_over = unproven(primary.logical_slots, record, on_primary=True)
    if standby is None:
        names = (*expected, *unknown)
        return [*left_over, *(_blocked(name, record, _STANDBY_SILENT) for name in names)]
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
        # Of the wrong server, even an empty list of slots means nothing.
        names = (*expected, *unknown) or (standby.primary_slot_name or "",)
        return [*left_over, *(_blocked(name, record, problem) for name in names)]
    failed = _no_extension(primary, standby)
    if failed is not None:
        return [
            *left_over,
            *(
                evaluate_by_sql(primary, standby, record, name, terms)
                or _blocked(name, record, failed)
                for name in expected
            ),
            *(_no_such_slot(name, record) for name in unknown),
        ]
    strangers = [
        each
        for each in unexpected(primary, standby, record, frozenset(expected))
        if each.counts or each.slot not in unknown
    ]
    reported = {each.slot for each in strangers}
    return [
        *left_over,
        *_marks(primary, standby),
        *(transition_of(primary, standby, record, wanted, name) for name in expected),
        *(_no_such_slot(name, record) for name in unknown if name not in reported),
        *strangers,
    ]


def _no_extension(
    primary: ObservedPrimary, standby: ObservedStandby
) -> FeedbackEpochProblem | None:
    """The server without the extension; `None`: both have it."""
    if not standby.has_extension:
        return FeedbackEpochProblem(
            Reason.NO_EXTENSION,
            "the standby does not have the extension tuskline, or an older version of it",
            "install its library on the standby, and on the primary, in the database of the candidate's dsn: CREATE EXTENSION"
            " tuskline or ALTER EXTENSION tuskline UPDATE",
            lasting=True,
        )
    if not primary.has_extension:
        return FeedbackEpochProblem(
            Reason.NO_EXTENSION,
            "the primary does not show its slots through the extension tuskline",
            "on the primary, in the database of [slots] dsn: CREATE EXTENSION tuskline or ALTER EXTENSION tuskline UPDATE,"
            " and GRANT tuskline_slots",
            lasting=True,
        )
    return None


def _expected(
    primary: ObservedPrimary | None, record: StandbyRecord, wanted: Selection
) -> list[str]:
    there = () if primary is None else primary.logical_slots
    names = {slot.name for slot in there if not slot.temporary and is_wanted(slot, wanted)}
    known = {
        each.name
        for each in record.copies.values()
        if each.created or each.temporary_name is not None
    }
    return sorted(name for name in names | known if not name.startswith(TEMPORARY_PREFIX))


def _no_such_slot(name: str, record: StandbyRecord) -> Transition:
    return Transition(
        name,
        record.of(name).state,
        CopyState.MISSING,
        Reason.NO_SUCH_SLOT,
        "the primary has no slot of that name",
        repair="create it there, or remove it from names in [slots]",
        action=Wait(),
    )


def _promoted(name: str, record: StandbyRecord) -> Transition:
    return Transition(
        name,
        record.of(name).state,
        CopyState.BLOCKED,
        Reason.PROMOTED,
        "the standby has been promoted, and its slots are its own now",
        repair="configure it as the primary, and the old primary as a standby once it is one",
    )


def _blocked(name: str, record: StandbyRecord, problem: FeedbackEpochProblem) -> Transition:
    return Transition(
        name,
        record.of(name).state,
        CopyState.BLOCKED,
        problem.reason,
        problem.why,
        repair=problem.repair,
        action=Wait(),
    )


def _marks(primary: ObservedPrimary, standby: ObservedStandby) -> list[Transition]:
    slot = physical_slot(primary, standby)
    if slot is None or slot.incarnation_id is not None:
        return []
    problem = link_problem(primary, standby)
    if problem is None or problem.reason is not Reason.NO_INCARNATION_ID:
        return []  # it must be known first which standby uses the slot
    return [
        Transition(
            slot.name,
            "",
            CopyState.BLOCKED,
            Reason.NO_INCARNATION_ID,
            "the physical slot has no incarnation id yet: it is new to the controller",
            action=MarkIncarnation(slot.name, f"{primary.wal_lsn:x}-{standby.clock:x}"),
            counts=False,
        )
    ]
