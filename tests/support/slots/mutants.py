"""The resolver with one thing taken out of it, where that shows, and how soon."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from unittest import mock

from slot_sync.resolver import (
    client,
    conditions,
    database,
    evaluate,
    feedback_epoch,
    foreign,
    one_slot,
    record,
    silent,
)
from slot_sync.resolver.observed import (
    Confirmed,
    CopyRecord,
    FeedbackEpochKey,
    LogicalSlot,
    ObservedPrimary,
    ObservedStandby,
    Settled,
    SlotCopy,
    StandbyRecord,
)
from slot_sync.resolver.transitions import Transition
from tests.support.slots import poll, scopes, world
from tests.support.slots.world import World

_Start = Callable[[], World]

#: Each condition of READY: the start and the events by which its absence shows, and how many of these it takes.
CONDITIONS: dict[str, tuple[_Start, str, int]] = {
    "fields_agree": (scopes.ready, "remake_other do tell poll", 6),
    "is_valid": (scopes.ready, "invalidate poll", 2),
    "has_wal": (scopes.ready, "lose_wal poll", 2),
    "is_within_limit": (scopes.ready, "outgrow poll", 2),
    "is_of_this_slot": (scopes.ready, "change remake poll", 3),
    "keeps_its_database": (scopes.ready, "alter_database finish_database poll", 3),
    "is_not_idle": (scopes.ready, "rest poll", 2),
    "is_persistent": (scopes.native, "tell poll", 2),
    "is_heard": (scopes.unheard, "do poll hear move vacuum", 6),
    "is_reserved": (scopes.restored, "restore poll tell commit move vacuum", 8),
    "has_snapshot": (scopes.held, "change lose_file poll", 3),
    "is_whole": (scopes.ready, "hold ddl run find_other_file poll", 5),
    "is_replayed": (scopes.behind, "restore poll tell", 5),
    "is_not_ahead": (scopes.ready, "change consume poll", 3),
    "has_what_was_removed": (scopes.row, "recrash move vacuum tell poll", 7),
    "has_mappings": (scopes.rewritten, "do poll", 3),
    "xmin_is_decoded": (scopes.undecoded, "commit move vacuum poll", 5),
}
#: Other things: what is replaced, the start, the events, and how many it takes.
OTHERS: dict[str, tuple[_Start, str, int]] = {
    "every reply is heard": (scopes.unheard, "do poll hear move vacuum", 6),
    "the slot keeps everything": (scopes.undecoded, "commit move vacuum poll", 5),
    "no incarnation id and no walsender": (scopes.row, "reswap mark move vacuum tell poll", 6),
    "no start and no walsender": (scopes.row, "recrash move vacuum tell poll", 6),
    "no configuration": (scopes.row, "feedback_off hear move vacuum feedback_on tell poll", 7),
    "another primary is heeded": (scopes.unproven, "poll_astray poll tell do commit", 7),
    "silent, any connection": (scopes.row, "recrash move vacuum", 4),
    "silent, any configuration": (scopes.row, "feedback_off hear move vacuum", 5),
    "silent, any position": (scopes.ready, "change consume", 3),
    "silent, any snapshot": (scopes.held, "change lose_file", 3),
    "silent, any WAL": (scopes.ready, "lose_wal", 2),
    "silent, any mapping files": (scopes.ready, "alter rewrite forget_mappings", 4),
    "silent, invalid": (scopes.ready, "invalidate", 2),
    "silent, idle": (scopes.ready, "rest", 2),
    "silent, outgrown": (scopes.ready, "outgrow", 2),
    "no segment for the promotion": (scopes.ready, "outgrow poll", 2),
    "a database is settled by its row": (
        scopes.ready,
        "alter_database replay_database finish_database poll",
        4,
    ),
    "a database has no lock": (
        scopes.ready,
        "alter_database replay_database tell do poll finish_database",
        6,
    ),
    "silent, any slot of the name": (scopes.ready, "change remake poll", 4),
    "silent, any database": (scopes.ready, "alter_database finish_database poll", 4),
    "clients are anywhere": (scopes.lagging, "change confirm poll", 3),
    "silent, clients are anywhere": (scopes.lagging, "change confirm poll", 3),
    "clients go back with a crash": (scopes.lagging, "change confirm poll tell recrash", 7),
    "silent, anybody's snapshot": (scopes.ready, "hold ddl run find_other_file", 5),
    "ours by name": (scopes.ready, "usurp poll", 2),
    "taken over as proven": (scopes.taken_over, "do commit move vacuum poll", 6),
    "a fast advance": (scopes.ready, "hold ddl move do poll", 5),
    "anybody's snapshots are started with": (scopes.borrowed, "change move do tell poll", 7),
    "restored during a restartpoint": (scopes.sweeping, "do poll tell remove_files", 7),
    "no generation": (scopes.row, "move poll recrash vacuum tell poll_under_way", 7),
}


def _blind(**fields: object) -> contextlib.ExitStack:
    """Keys without these fields."""
    stack = contextlib.ExitStack()
    real = feedback_epoch.epoch_key

    def key(primary: ObservedPrimary, standby: ObservedStandby) -> FeedbackEpochKey | None:
        found = real(primary, standby)
        return None if found is None else replace(found, **fields)  # type: ignore[arg-type]

    for module in (evaluate, record):
        stack.enter_context(mock.patch.object(module, "epoch_key", key))
    return stack


def _exactly(standby: ObservedStandby, copy: SlotCopy) -> bool:
    """The limit as it is, with nothing left for what a promotion writes."""
    if standby.slot_wal_segments is None or copy.restart_lsn is None:
        return False
    return standby.flush_lsn - copy.restart_lsn > standby.slot_wal_segments * standby.segment_bytes


def _settled_at_once(lsn: int) -> contextlib.ExitStack:
    """A row of a database that is seen is settled, wherever the end of the WAL is."""
    real = database.settled_by

    def settled(
        remembered: CopyRecord, slot: LogicalSlot, there: ObservedPrimary
    ) -> Settled | None:
        found = real(remembered, slot, there)
        return None if found is None else replace(found, lsn=lsn)

    stack = contextlib.ExitStack()
    for module in (evaluate, record):
        stack.enter_context(mock.patch.object(module, "settled_by", settled))
    return stack


_primary_of = poll.primary_of


def _unlocked(seen: World) -> ObservedPrimary:
    return replace(_primary_of(seen), locked_databases=frozenset())


def _by_name(remembered: CopyRecord, here: SlotCopy) -> bool:
    return here.synced or remembered.created or remembered.renaming


def _everywhere(name: str, replacement: object) -> contextlib.ExitStack:
    """A function of this name, wherever the resolver uses it."""
    stack = contextlib.ExitStack()
    for module in (foreign, record, one_slot, silent):
        stack.enter_context(mock.patch.object(module, name, replacement))
    return stack


#: By mutant: the beginning of the objection that it omits while the primary is silent.
_OBJECTIONS = {
    "silent, any connection": "the standby has connected",
    "silent, any configuration": "the standby has reloaded",
    "silent, any position": "it is ahead",
    "silent, any snapshot": "its snapshot",
    "silent, any WAL": "its WAL",
    "silent, any mapping files": "mapping files",
    "silent, invalid": "the copy is invalid",
    "silent, idle": "it has been idle",
    "silent, anybody's snapshot": "another decoder",
    "silent, outgrown": "it needs older WAL",
    "silent, any slot of the name": "it is a copy of a dropped",
    "silent, any database": "the last change of its database",
}


def _unsaid(objection: str) -> contextlib.AbstractContextManager[object]:
    """Without this objection."""
    real = silent.objections

    def said(remembered: CopyRecord, standby: ObservedStandby, known: StandbyRecord) -> list[str]:
        return [each for each in real(remembered, standby, known) if not each.startswith(objection)]

    return mock.patch.object(silent, "objections", said)


def _anywhere(module: ModuleType) -> contextlib.AbstractContextManager[object]:
    """Where clients are is not asked in this module."""
    heedless = SimpleNamespace(**{**vars(client), "is_ahead": lambda *_: False})
    return mock.patch.object(module, "client", heedless)


def _forgetful() -> contextlib.AbstractContextManager[object]:
    """Where a client was is what the last poll showed."""
    real = client.confirmed_so_far

    def last(remembered: CopyRecord, slot: LogicalSlot | None, timeline: int) -> Confirmed | None:
        return real(replace(remembered, confirmed=None), slot, timeline)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(client, "confirmed_so_far", last))
    stack.enter_context(mock.patch.object(record, "confirmed_so_far", last))
    return stack


def _trusting() -> contextlib.AbstractContextManager[object]:
    """A copy that another controller created counts as decoded."""
    real = record._taken_over

    def proven(before: CopyRecord, standby: ObservedStandby, transition: Transition) -> CopyRecord:
        return replace(real(before, standby, transition), decoded_at=0)

    return mock.patch.object(record, "_taken_over", proven)


def _patched(name: str) -> contextlib.AbstractContextManager[object]:
    nobody: dict[str, object] = {"walsender_pid": 0, "walsender_start": 0}
    if name in _OBJECTIONS:
        return _unsaid(_OBJECTIONS[name])
    match name:
        case "no segment for the promotion":
            return mock.patch.object(ObservedStandby, "outgrown", _exactly)
        case "a database is settled by its row":
            return _settled_at_once(lsn=0)
        case "a database has no lock":
            return mock.patch.object(poll, "primary_of", _unlocked)
        case "clients are anywhere":
            return _anywhere(evaluate)
        case "silent, clients are anywhere":
            return _anywhere(silent)
        case "clients go back with a crash":
            return _forgetful()
        case "every reply is heard":
            return mock.patch.object(conditions, "heard_after", return_value=True)
        case "the slot keeps everything":
            return mock.patch.object(conditions, "is_kept", return_value=True)
        case "no incarnation id and no walsender":
            return _blind(incarnation_id="0", **nobody)
        case "no start and no walsender":
            return _blind(primary_start=0, **nobody)
        case "no configuration":
            return _blind(conf_load_time=0)
        case "another primary is heeded":
            return mock.patch.object(record, "is_linked", return_value=True)
        case "ours by name":
            return _everywhere("is_ours", _by_name)
        case "taken over as proven":
            return _trusting()
        case "a fast advance":
            return mock.patch.object(world, "ADVANCE", {"ours": True, "fast": True})
        case "anybody's snapshots are started with":
            return mock.patch.object(world, "ADVANCE", {"ours": True, "trusting": True})
        case "restored during a restartpoint":
            return mock.patch.object(poll, "WAITS", False)
        case "no generation":
            return mock.patch.object(poll, "_generation", return_value=1)
    without = tuple(each for each in conditions.CONDITIONS if each.holds.__name__ != name)
    assert len(without) == len(conditions.CONDITIONS) - 1
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(conditions, "CONDITIONS", without))
    if name == "has_mappings":  # the extension asks for them itself
        stack.enter_context(mock.patch.object(poll, "ASKS", False))
    if name == "is_replayed":  # a client is never behind its copy, so where the client is covers it
        stack.enter_context(_anywhere(evaluate))
        stack.enter_context(_anywhere(silent))
    return stack


@contextlib.contextmanager
def mutant(name: str) -> Iterator[None]:
    """The resolver is this mutant meanwhile."""
    poll.forget()
    try:
        with _patched(name):
            yield
    finally:
        poll.forget()
