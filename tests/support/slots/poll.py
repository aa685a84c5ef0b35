"""The controller in the model: what it sees, the real resolver's answer, and the actions, each of which may be cut off."""

from dataclasses import replace
from functools import cache
from typing import Any

from slot_sync.resolver.observed import (
    Confirmed,
    CopyRecord,
    FeedbackEpochKey,
    Incarnation,
    LogicalSlot,
    ObservedPrimary,
    ObservedStandby,
    PhysicalSlot,
    Reserved,
    Selection,
    Settled,
    Sighting,
    SlotCopy,
    SlotPosition,
    StandbyRecord,
    Upstream,
)
from slot_sync.resolver.one_slot import temporary_name
from slot_sync.resolver.record import check_invariants, remember, under_way
from slot_sync.resolver.resolver import resolve
from slot_sync.resolver.transitions import (
    Action,
    Advance,
    Drop,
    MarkIncarnation,
    Rename,
    Reserve,
    RestoreMappings,
    SetFields,
    Transition,
)
from tests.support.slots.decoder import File, Position
from tests.support.slots.world import (
    Held,
    Physical,
    World,
    advanced,
    file_at,
    has_own_file,
    replayed,
)

NAME, PHYSICAL = "kept", "standby"
UNPROVEN = temporary_name(NAME, 0)
SYSTEM, TIMELINE = 7, 1
DATABASE = 5
#: Where `memory_of` has the row of the slot's database.
_SETTLED = 12
IDLE_TIMEOUT = 1000
_UNSEEN = Position(0, 0, 0)
PLUGINS = ("pgoutput", "test_decoding")


def primary_of(world: World) -> ObservedPrimary:
    slot, physical = world.slot, world.physical
    return ObservedPrimary(
        system_id=SYSTEM,
        timeline=TIMELINE,
        in_recovery=False,
        postmaster_start=world.primary_start,
        version=130000,
        wal_level="logical",
        wal_lsn=world.end,
        databases={DATABASE: world.row},
        locked_databases=frozenset({DATABASE} if world.moving else ()),
        logical_slots=(
            LogicalSlot(
                NAME,
                PLUGINS[world.kind],
                "shop",
                slot.restart,
                slot.confirmed,
                slot.xmin,
                datoid=DATABASE,
                incarnation_id=str(world.slot_incarnation_id)
                if world.slot_incarnation_id
                else None,
            ),
        ),
        physical_slots=(
            PhysicalSlot(
                PHYSICAL,
                restart_lsn=world.received,
                xmin=None,
                catalog_xmin=physical.xmin or None,
                incarnation_id=str(physical.incarnation_id) if physical.incarnation_id else None,
                active_pid=physical.sender or None,
                backend_start=physical.sender or None,
                reply_time=physical.reply or None,
            ),
        ),
    )


def _copy(world: World, name: str, held: Held) -> SlotCopy:
    at = held.at
    return SlotCopy(
        name=name,
        plugin=PLUGINS[held.kind],
        database="shop",
        datoid=DATABASE,
        persistency="persistent" if held.lasting else "temporary",
        synced=held.synced,
        invalidation=None if held.is_valid else "rows_removed",
        restart_lsn=at.restart,
        confirmed_flush_lsn=at.confirmed,
        catalog_xmin=at.xmin,
        effective_catalog_xmin=at.xmin,
        snapshot_present=file_at(world, at.restart) is not None,
        snapshot_complete=has_own_file(world, held),
        foreign_snapshot_after=any(not each.ours and each.lsn > at.restart for each in world.files),
        wal_present=held.has_wal,
        mappings_complete=held.mapped,
        incarnation_id=None if held.foreign or held.synced else UNPROVEN,
        inactive_since=world.clock - (IDLE_TIMEOUT if held.idle else 0),
    )


def standby_of(world: World) -> ObservedStandby:
    slots = [
        _copy(world, name, held)
        for name, held in ((UNPROVEN, world.unproven), (NAME, world.copy))
        if held is not None
    ]
    there = world.connected
    return ObservedStandby(
        system_id=SYSTEM,
        timeline=TIMELINE,
        in_recovery=True,
        postmaster_start=1,
        version=170005 if any(slot.synced for slot in slots) else 130000,
        wal_level="logical",
        conf_load_time=world.conf,
        clock=world.clock,
        hot_standby_feedback=world.feedback,
        wal_receiver_status_interval=10,
        primary_slot_name=PHYSICAL,
        walreceiver_status="streaming" if there else None,
        walreceiver_slot_name=PHYSICAL if there else None,
        walreceiver_start=world.physical.sender or None,
        upstream=Upstream(SYSTEM, in_recovery=False, postmaster_start=world.primary_start)
        if there
        else None,
        replay_lsn=replayed(world),
        databases={DATABASE: world.row_there},
        flush_lsn=world.received,
        slot_wal_segments=_allowed(world),
        segment_bytes=1,
        idle_timeout=IDLE_TIMEOUT,
        native_sync=any(slot.synced for slot in slots),
        slots=tuple(slots),
    )


def _allowed(world: World) -> int | None:
    """What checkpoints leave to slots: too little for a copy that has outgrown it."""
    if world.copy is None or not world.copy.outgrown:
        return None
    return world.received - world.copy.at.restart


def _generation(*, current: bool) -> int:
    return 1 if current else 0


def record_of(memory: tuple[Any, ...]) -> StandbyRecord:
    """What the controller remembers, out of what a world keeps of it: plain tuples, which are fast to compare."""
    if not memory:
        return StandbyRecord()
    epoch, current, made, unproven, renaming, *more = memory
    (
        seen,
        removed,
        reserved,
        decoded,
        was,
        passed,
        client,
        settled,
        made_as,
        ahead,
        proven,
        state,
    ) = more
    key, sender = None, None
    if epoch is not None:
        start, incarnation_id, sender, conf = epoch
        key = FeedbackEpochKey(
            SYSTEM, TIMELINE, start, PHYSICAL, str(incarnation_id), sender, sender, conf
        )
    copy = CopyRecord(
        NAME,
        created=bool(made),
        incarnation_id=UNPROVEN,
        temporary_name=UNPROVEN if unproven else None,
        renaming=bool(renaming),
        generation=_generation(current=bool(current)),
        seen=Sighting(*seen) if seen else None,
        removed_before=removed,
        reserved=Reserved(*reserved) if reserved else None,
        decoded_at=decoded,
        slot_was=SlotPosition(*was) if was else None,
        passed=SlotPosition(*passed) if passed else None,
        confirmed=Confirmed(TIMELINE, client) if client else None,
        settled=Settled(DATABASE, *settled) if settled else None,
        incarnation=Incarnation(str(made_as[0]), made_as[1]) if made_as else None,
        polls_ahead=ahead,
        proven_in=key if proven else None,
        proven_at=0 if proven else None,
        state=str(state),
    )
    return StandbyRecord(key, sender, generation=1, copies={NAME: copy})


def _pair(place: SlotPosition | None) -> tuple[int, int] | None:
    return None if place is None else (place.confirmed_flush_lsn, place.catalog_xmin)


def memory_of(record: StandbyRecord) -> tuple[object, ...]:
    key, copy = record.epoch, record.of(NAME)
    epoch = (
        None
        if key is None
        else (key.primary_start, int(key.incarnation_id), key.walsender_pid, key.conf_load_time)
    )
    seen, reserved = copy.seen, copy.reserved
    return (
        epoch,
        copy.generation == record.generation,
        copy.created,
        copy.temporary_name is not None,
        copy.renaming,
        (seen.clock, seen.flush_lsn) if seen else None,
        copy.removed_before,
        (reserved.restart_lsn, reserved.catalog_xmin) if reserved else None,
        copy.decoded_at,
        _pair(copy.slot_was),
        _pair(copy.passed),
        copy.confirmed.lsn if copy.confirmed is not None else None,
        (copy.settled.xmin, copy.settled.lsn) if copy.settled is not None else None,
        (int(copy.incarnation.incarnation_id), copy.incarnation.lsn)
        if copy.incarnation is not None
        else None,
        copy.polls_ahead,
        copy.proven_in is not None and copy.proven_in == key,
        "RESERVING" if copy.state in {"", "MISSING", "RESERVING"} else "",
    )


def _plan(action: Action) -> tuple[object, ...]:
    match action:
        case Reserve(restart_lsn=restart, confirmed_flush_lsn=confirmed, plugin=plugin):
            return ("reserve", restart, confirmed, PLUGINS.index(plugin))
        case Advance(name=name, to_lsn=to):
            return ("advance", name, to)
        case SetFields(name, _, restart, confirmed, xmin):
            return ("set", name, Position(restart, confirmed, xmin))
        case RestoreMappings(name=name):
            return ("map", name)
        case Rename():
            return ("rename",)
        case MarkIncarnation():
            return ("mark",)
        case Drop(name=name):
            return ("drop", name)
    return ()


def astray(primary: ObservedPrimary, standby: ObservedStandby, xmin: int) -> ObservedPrimary:
    """Another server of another history, with a slot of the name, where the copy is; it needs nothing older than `xmin`."""
    held = standby.slot(NAME) or standby.slot(UNPROVEN)
    if held is None:
        return replace(primary, timeline=TIMELINE + 1)
    (slot,) = primary.logical_slots
    other = replace(
        slot,
        restart_lsn=held.restart_lsn,
        confirmed_flush_lsn=held.confirmed_flush_lsn,
        catalog_xmin=xmin,
    )
    return replace(primary, timeline=TIMELINE + 1, logical_slots=(other,))


@cache
def _decided(
    seen: World, other_xmin: int = 0
) -> tuple[tuple[object, ...], tuple[object, ...], bool, Transition]:
    record = record_of(seen.memory)
    primary, standby = primary_of(seen), standby_of(seen)
    if other_xmin:
        primary = astray(primary, standby, other_xmin)
    transitions = resolve(primary, standby, record, Selection())
    # The name of an unproven copy never changes in the model: the resolver's own, always new, would be many states.
    written = remember(record, primary, standby, transitions)
    check_invariants(transitions, record, written, in_recovery=standby.in_recovery)
    mine = written.of(NAME)
    if mine.temporary_name is not None:
        written = replace(written, copies={NAME: replace(mine, temporary_name=UNPROVEN)})
    verdict = next(each for each in transitions if each.slot == NAME)
    marks = any(
        isinstance(each.action, MarkIncarnation) and each.slot == PHYSICAL for each in transitions
    )
    return memory_of(written), _plan(verdict.action), marks, verdict


def forget() -> None:
    """Decide again with the pending inputs: the resolver has changed."""
    _decided.cache_clear()
    _said_alone.cache_clear()


@cache
def _said_alone(seen: World) -> bool:
    said = resolve(None, standby_of(seen), record_of(seen.memory), Selection())
    return any(each.safe for each in said)


def silent(world: World) -> bool:
    """Whether the copy is called ready when the primary does not answer."""
    return bool(world.memory) and _said_alone(_standby_alone(world))


def poll_under_way(world: World) -> World | None:
    """A poll while the action of the last one is under way: what is remembered of the copy stays as it was."""
    if not world.pending:
        return None
    before = record_of(world.memory).of(NAME)
    after, _ = poll(world)
    found = record_of(after.memory)
    kept = under_way(before, found.of(NAME))
    found = replace(found, generation=2 if _changed(world, after) else 1, copies={NAME: kept})
    return after._replace(memory=memory_of(found), pending=world.pending)


def _changed(before: World, after: World) -> bool:
    epochs = [each.memory[:1] for each in (before, after)]
    return epochs[0] != epochs[1] or epochs[1] == (None,)


def _shows(file: File, starts: list[int]) -> bool:
    return file.lsn in starts or (not file.ours and file.lsn > min(starts, default=file.lsn))


def _is_settled(world: World) -> bool:
    """The resolver ignores the end of the WAL, since it knows this row of the slot's database."""
    settled = world.memory[_SETTLED] if world.memory else None
    return isinstance(settled, tuple) and settled[0] == world.row


def _seen(world: World) -> World:
    """Without what no controller can see."""
    starts = [held.at.restart for held in (world.copy, world.unproven) if held is not None]
    return world._replace(
        wal=(),
        end=0 if _is_settled(world) else world.end,
        open=None,
        saved_slot=world.slot,
        client=0,
        physical=world.physical._replace(saved_xmin=0),
        removed=0,
        removed_there=0,
        said=(),
        files=frozenset(each._replace(lacks=0) for each in world.files if _shows(each, starts)),
        next_xid=0,
        next_id=0,
        pending=(),
        promised=False,
        reconnected=False,
        lagging=False,
        shown=0,
        unmapped=frozenset(),
        removing=0,
        waiting=world.waiting[:1],
        created=0,
        unpolled=False,
    )


def _standby_alone(world: World) -> World:
    """Without what the standby does not show: many worlds are one then."""
    return _seen(world)._replace(
        end=0,
        slot=_UNSEEN,
        saved_slot=_UNSEEN,
        kind=0,
        physical=Physical(sender=world.physical.sender),
        row=0,
        moving=False,
        slot_incarnation_id=0,
    )


def poll_astray(world: World) -> World | None:
    """A poll that finds another primary: one that came back alone, say."""
    after, verdict = poll(world, other_xmin=world.next_xid)
    assert not verdict.safe
    return after._replace(promised=False)


def poll(world: World, other_xmin: int = 0) -> tuple[World, Transition]:
    """Read both servers, resolve, and record; the actions wait for `act`.

    `other_xmin`: what a primary of another history says that the slot needs, which is looked at instead; 0: nobody.
    """
    memory, pending, marks, verdict = _decided(_seen(world), other_xmin)
    world = world._replace(memory=memory, pending=pending, clock=world.clock + 1)
    if not other_xmin:
        shown = max(world.shown, world.slot.confirmed)
        world = world._replace(shown=shown, unpolled=False)
    if marks:
        world = world._replace(
            physical=world.physical._replace(incarnation_id=world.next_id),
            next_id=world.next_id + 1,
        )
    return world, verdict


def act(world: World) -> World | None:
    """The action of the last poll is carried out, as the extension does it, or refused."""
    if not world.pending:
        return None
    what, *rest = world.pending
    world = world._replace(pending=())
    match what, rest:
        case "reserve", [int(restart), int(confirmed), int(kind)]:
            if world.unproven is not None or confirmed > replayed(world):
                return world
            known = [held.at.xmin for held in (world.copy,) if held is not None]
            seen = max(
                [3, *(r.second for r in world.wal if r.kind == "run" and r.lsn <= world.received)]
            )
            xmin = min([world.next_xid if world.connected else seen, *known])
            return world._replace(unproven=Held(Position(restart, confirmed, xmin), kind=kind))
        case "advance", [str(name), int(to)]:
            return _moved(world, name, to)
        case "set", [str(name), Position() as at]:
            return _set(world, name, at)
        case "map", [str(name)]:
            return _mapped(world, name)
        case "mark", []:
            if world.slot_incarnation_id:
                return world
            return world._replace(slot_incarnation_id=world.next_id, next_id=world.next_id + 1)
        case "rename", []:
            cut = act_cut(world._replace(pending=("rename",)))
            return world if cut is None else cut._replace(unproven=None)
        case "drop", [str(name)]:
            return _with(world, name, None)
    raise AssertionError(what)


def act_cut(world: World) -> World | None:
    """A rename ends in the middle: the slot is there under both names."""
    if world.pending != ("rename",):
        return None
    held = world.unproven
    if world.copy is not None or held is None or not has_own_file(world, held):
        return None
    if ASKS and not held.mapped:
        return None
    return world._replace(copy=held, pending=())


def _called(world: World, name: str) -> Held | None:
    return world.copy if name == NAME else world.unproven


def _with(world: World, name: str, held: Held | None) -> World:
    return world._replace(copy=held) if name == NAME else world._replace(unproven=held)


def _is_usable(held: Held) -> bool:
    return held.has_wal and held.is_valid and not held.synced


def _moved(world: World, name: str, to: int) -> World:
    held = _called(world, name)
    if held is None or not held.at.confirmed <= to <= replayed(world) or not _is_usable(held):
        return world
    moved, files = advanced(world, held, to)
    return _with(world, name, moved)._replace(files=files)


#: Mapping files are not restored while a restartpoint is in progress, and a rename asks for them.
WAITS = ASKS = True


def _mapped(world: World, name: str) -> World:
    held = _called(world, name)
    if held is None or not held.has_wal or (WAITS and world.removing):
        return world
    restored = frozenset(each for each in world.unmapped if each < held.at.restart)
    return _with(world, name, held._replace(mapped=True))._replace(unmapped=restored)


def _set(world: World, name: str, at: Position) -> World:
    held = _called(world, name)
    if held is None or not has_own_file(world, held._replace(at=at)) or not _is_usable(held):
        return world
    if at.confirmed > replayed(world):
        return world
    stands_back = at[:2] == held.at[:2]  # with an older xmin: it may always hold more
    if not stands_back and any(new < old for new, old in zip(at, held.at, strict=True)):
        return world
    return _with(world, name, held._replace(at=at))
