"""A primary with one logical slot, a standby with its copies, and all that can happen to them.

An event is a function from a world to the next one, or `None` where it cannot happen. LSNs, xids and clock readings are
small integers; identities (processes, starts, incarnation ids) are numbers that are never used twice. WAL streams at once
while the standby is connected, which is the worst case: what is removed on the primary is removed there too.
"""

from typing import NamedTuple

from tests.support.slots.decoder import (
    COMMIT,
    DATABASE,
    DDL,
    OPEN,
    REWRITE,
    RUN,
    VACUUM,
    File,
    Files,
    Position,
    Wal,
    decode,
    lacking,
    loss,
)

ALL = -1  # a restartpoint of a standby without logical slots
KEEP = -1  # a reply that carries no feedback


class Physical(NamedTuple):
    """The standby's slot on the primary. 0: no incarnation id, no xmin, inactive, never heard."""

    incarnation_id: int = 0
    xmin: int = 0
    saved_xmin: int = 0
    sender: int = 0
    reply: int = 0


class Held(NamedTuple):
    """A copy on the standby."""

    at: Position
    has_wal: bool = True
    is_valid: bool = True
    #: Which plugin it is for.
    kind: int = 0
    #: PostgreSQL's own copy, which is temporary until it is done.
    synced: bool = False
    lasting: bool = True
    #: Somebody else's, under the same name.
    foreign: bool = False
    #: Nobody has used it for longer than the standby lets a slot be idle.
    idle: bool = False
    #: It needs older WAL than checkpoints leave it.
    outgrown: bool = False
    #: Its mapping files were restored.
    mapped: bool = False


class World(NamedTuple):
    """Both servers, and what the controller remembers and is about to do (`poll.py`)."""

    wal: tuple[Wal, ...]
    end: int
    next_xid: int
    #: The long transaction: its xid and its first change.
    open: tuple[int, int] | None
    slot: Position
    saved_slot: Position
    #: Which plugin the slot is for.
    kind: int
    #: What the slot's client has.
    client: int
    physical: Physical
    primary_start: int
    connected: bool
    received: int
    #: Rows deleted before this xid are removed on the primary, and on the standby.
    removed: int
    removed_there: int
    feedback: bool
    conf: int
    #: What the standby has said and the primary not heard: (clock, xmin, 0 for none, KEEP).
    said: tuple[tuple[int, int], ...]
    unproven: Held | None
    copy: Held | None
    #: What a backup of the standby has of the copy.
    backup: Held | None
    files: Files
    clock: int
    next_id: int
    memory: tuple[object, ...] = ()
    pending: tuple[object, ...] = ()
    #: The last poll found the copy safe for good, and nothing has happened since that may change it.
    promised: bool = False
    #: The standby has connected since the last poll.
    reconnected: bool = False
    #: The standby receives nothing, though it is connected: a slow disk, a slow network.
    lagging: bool = False
    #: The farthest that a poll has shown the slot's client; what it confirmed since nobody can know.
    shown: int = 1
    #: The rewrites of which the standby has no mapping files any more.
    unmapped: frozenset[int] = frozenset()
    #: A restartpoint is in progress, and will remove the mapping files before this LSN, or ALL; 0: none is.
    removing: int = 0
    #: The row of the slot's database, on the primary and as replayed on the standby.
    row: int = 1
    row_there: int = 1
    #: The database is being moved: its new row is committed, and the record that drops its slots is not written yet.
    moving: bool = False
    #: Records of the database that the standby has on disk and not replayed: (LSN, the new row; 0: its slots are dropped).
    waiting: tuple[tuple[int, int], ...] = ()
    #: The slot's incarnation id, 0 for none, and where the slot was created.
    slot_incarnation_id: int = 0
    created: int = 1
    #: Something was done to the slot or its database since the last poll.
    unpolled: bool = False


def first_world() -> World:
    """A slot that was just created, and a standby that streams."""
    at = Position(1, 1, 3)
    return World(
        wal=(Wal(1, RUN, 3, 3),),
        end=1,
        next_xid=3,
        open=None,
        slot=at,
        saved_slot=at,
        kind=0,
        client=1,
        physical=Physical(sender=1),
        primary_start=2,
        connected=True,
        received=1,
        removed=3,
        removed_there=3,
        feedback=True,
        conf=3,
        said=(),
        unproven=None,
        copy=None,
        backup=None,
        files=frozenset(),
        clock=1,
        next_id=5,
        slot_incarnation_id=4,
    )


def _stream(world: World) -> World:
    if not world.connected or world.lagging:
        return world
    removed = max([world.removed_there, *(r.first for r in world.wal if r.kind == VACUUM)])
    kept = tuple(r for r in world.wal if r.kind not in {VACUUM, DATABASE})
    waiting = tuple((r.lsn, r.second) for r in world.wal if r.kind == DATABASE)
    return world._replace(
        received=world.end,
        removed_there=removed,
        wal=kept,
        waiting=(*world.waiting, *waiting),
    )


def replayed(world: World) -> int:
    """What the standby has replayed: nothing past a record of the database that waits."""
    return world.waiting[0][0] - 1 if world.waiting else world.received


def alter_database(world: World) -> World | None:
    """The slot's database is moved to another tablespace: its new row is committed."""
    if world.moving or world.row > world.row_there + 1:
        return None
    row = world.row + 1
    xid = world.next_xid
    moved = world._replace(row=row, moving=True, unpolled=True, next_xid=xid + 1)
    return _write(moved, DATABASE, xid, row)


def finish_database(world: World) -> World | None:
    """The old files are removed, and the record is written whose replay drops the database's slots."""
    return _write(world._replace(moving=False), DATABASE, world.next_xid) if world.moving else None


def replay_database(world: World) -> World | None:
    """The standby replays the first record of the database that waits."""
    if not world.waiting:
        return None
    (_, row), *rest = world.waiting
    world = world._replace(waiting=tuple(rest))
    return world._replace(row_there=row) if row else world._replace(copy=None, unproven=None)


def _write(world: World, kind: str, first: int = 0, second: int = 0) -> World:
    lsn = world.end + 1
    record = Wal(lsn, kind, first or lsn, second)
    return _stream(world._replace(wal=(*world.wal, record), end=lsn))


def _running(world: World) -> int:
    return world.open[0] if world.open is not None else world.next_xid


def change(world: World) -> World | None:
    """A transaction of one change."""
    return _write(world._replace(next_xid=world.next_xid + 1), COMMIT)


def alter(world: World) -> World | None:
    """A transaction that changes the catalog and then a row that this shows."""
    return _write(world._replace(next_xid=world.next_xid + 1), COMMIT, 0, 1)


def rewrite(world: World) -> World | None:
    """The catalog's rows are moved; replay writes where to."""
    return _write(world._replace(next_xid=world.next_xid + 1), REWRITE)


def _rewrites(world: World) -> frozenset[int]:
    return frozenset(r.lsn for r in world.wal if r.kind == REWRITE and r.lsn <= world.received)


def restartpoint(world: World) -> World | None:
    """The standby begins one, and looks which of its slots needs what."""
    if world.removing or not _rewrites(world) - world.unmapped:
        return None
    restarts = [held.at.restart for held in (world.copy, world.unproven) if held is not None]
    return world._replace(removing=min(restarts, default=ALL))


def remove_files(world: World) -> World | None:
    """It removes the mapping files that were not needed then."""
    if not world.removing:
        return None
    gone = {each for each in _rewrites(world) if world.removing == ALL or each < world.removing}
    return world._replace(removing=0, unmapped=world.unmapped | gone)


def forget_mappings(world: World) -> World | None:
    """Whether the copy's mapping files exist is unknown: an older version created it."""
    if world.copy is None or not world.copy.mapped:
        return None
    copy = world.copy._replace(mapped=False)
    return world._replace(copy=copy, unmapped=world.unmapped | _rewrites(world))


def begin(world: World) -> World | None:
    """The long transaction begins with a change."""
    if world.open is not None:
        return None
    xid = world.next_xid
    world = _write(world._replace(next_xid=xid + 1), OPEN, xid)
    return world._replace(open=(xid, world.end))


def hold(world: World) -> World | None:
    """A transaction takes an xid, writes nothing, and stays open."""
    if world.open is not None:
        return None
    return world._replace(open=(world.next_xid, 0), next_xid=world.next_xid + 1)


def commit(world: World) -> World | None:
    """The long transaction commits."""
    if world.open is None:
        return None
    if not world.open[1]:
        return world._replace(open=None)
    return _write(world._replace(open=None), COMMIT, world.open[1])


def ddl(world: World) -> World | None:
    """A row of a catalog is replaced."""
    xid = world.next_xid
    return _write(world._replace(next_xid=xid + 1), DDL, xid)


def run(world: World) -> World | None:
    """The primary logs which transactions run."""
    if world.wal and world.wal[-1].kind == RUN and world.wal[-1].lsn == world.end:
        return None
    return _write(world, RUN, _running(world), world.next_xid)


def vacuum(world: World) -> World | None:
    """Rows that nobody may need any more are removed."""
    held = [_running(world), world.slot.xmin]
    if world.physical.xmin:
        held.append(world.physical.xmin)
    horizon = min(held)
    if horizon <= world.removed:
        return None
    return _write(world._replace(removed=horizon), VACUUM, horizon)


def confirm(world: World) -> World | None:
    """The slot's client has all there is."""
    if world.slot.confirmed == world.end:
        return None
    files = frozenset(File(r.lsn) for r in world.wal if r.kind == RUN)
    at = decode(world.wal, world.slot, world.end, files).position
    saved = at if at[::2] != world.slot[::2] else world.saved_slot
    return world._replace(slot=at, saved_slot=saved, client=max(world.client, world.end))


def remake(world: World) -> World | None:
    """The slot on the primary is dropped, and created again under the same name."""
    if world.open is not None:
        return None
    world = _write(world, RUN, world.next_xid, world.next_xid)
    at = Position(world.end, world.end, world.next_xid)
    return world._replace(
        slot=at,
        saved_slot=at,
        client=world.end,
        slot_incarnation_id=0,
        created=world.end,
        unpolled=True,
    )


def remake_other(world: World) -> World | None:
    """The same, for another plugin."""
    made = remake(world)
    return None if made is None else made._replace(kind=1 - world.kind)


def checkpoint(world: World) -> World | None:
    """The primary saves its slots."""
    physical = world.physical._replace(saved_xmin=world.physical.xmin)
    if physical == world.physical and world.saved_slot == world.slot:
        return None
    return world._replace(physical=physical, saved_slot=world.slot)


def crash(world: World) -> World | None:
    """The primary ends and starts; what was not saved is as it was."""
    physical = world.physical._replace(xmin=world.physical.saved_xmin, sender=0, reply=0)
    return world._replace(
        physical=physical,
        slot=world.saved_slot,
        open=None,
        moving=False,
        primary_start=world.next_id,
        next_id=world.next_id + 1,
        connected=False,
        said=(),
    )


def disconnect(world: World) -> World | None:
    """The standby loses its connection, or restarts."""
    if not world.connected:
        return None
    return world._replace(
        connected=False, said=(), physical=world.physical._replace(sender=0, reply=0)
    )


def connect(world: World) -> World | None:
    """The standby streams again."""
    if world.connected:
        return None
    return _stream(
        world._replace(
            connected=True,
            physical=world.physical._replace(sender=world.next_id),
            next_id=world.next_id + 1,
        )
    )


def fall_behind(world: World) -> World | None:
    """The standby receives no WAL any more; its connection stays."""
    return None if world.lagging else world._replace(lagging=True)


def receive(world: World) -> World | None:
    """It receives again, and all that there is."""
    return _stream(world._replace(lagging=False)) if world.lagging else None


def swap(world: World) -> World | None:
    """The physical slot is dropped and created again."""
    if world.connected or world.physical == Physical():
        return None
    return world._replace(physical=Physical())


def mark(world: World) -> World | None:
    """Another controller writes the incarnation id of the physical slot."""
    if world.physical.incarnation_id:
        return None
    physical = world.physical._replace(incarnation_id=world.next_id)
    return world._replace(physical=physical, next_id=world.next_id + 1)


def _say(world: World, xmin: int) -> World | None:
    if not world.connected or len(world.said) == 2:  # two are enough for one to overtake a proof
        return None
    clock = world.clock + 1
    return world._replace(clock=clock, said=(*world.said, (clock, xmin)))


def _needed(world: World) -> int:
    return min([held.at.xmin for held in (world.unproven, world.copy) if held], default=0)


def feedback(world: World) -> World | None:
    """The standby reports the rows that it needs."""
    return _say(world, _needed(world)) if world.feedback else None


def reply(world: World) -> World | None:
    """The standby reports its position only."""
    return _say(world, KEEP)


def hear(world: World) -> World | None:
    """The primary receives the standby's next message."""
    if not world.said:
        return None
    (clock, xmin), *rest = world.said
    physical = world.physical._replace(reply=clock)
    if xmin == 0 or (xmin != KEEP and xmin > physical.xmin):
        physical = physical._replace(xmin=xmin)
    return world._replace(said=tuple(rest), physical=physical)


def _reload(world: World, *, on: bool) -> World:
    return world._replace(feedback=on, conf=world.next_id, next_id=world.next_id + 1)


def feedback_off(world: World) -> World | None:
    """hot_standby_feedback goes off; the standby reports so at once."""
    if not world.feedback:
        return None
    off = _reload(world, on=False)
    return _say(off, 0) if world.connected else off


def feedback_on(world: World) -> World | None:
    """hot_standby_feedback goes on."""
    return None if world.feedback else _reload(world, on=True)


def delete_copy(world: World) -> World | None:
    """A user drops the copy."""
    return None if world.copy is None else world._replace(copy=None)


def usurp(world: World) -> World | None:
    """A user drops the copy, and creates a slot of that name at its position."""
    if world.copy is None or world.copy.foreign or world.copy.synced:
        return None
    return world._replace(copy=world.copy._replace(foreign=True))


def succeed(world: World) -> World | None:
    """A controller with an empty record becomes active."""
    return world._replace(memory=(), pending=(), shown=0) if world.memory else None


def delete_unproven(world: World) -> World | None:
    """A user drops the copy that is being proven."""
    return None if world.unproven is None else world._replace(unproven=None)


#: How a copy is advanced: as `decode` is told.
ADVANCE = {"ours": True}


def file_at(world: World, lsn: int) -> File | None:
    """The snapshot of that position."""
    return next((each for each in world.files if each.lsn == lsn), None)


def has_own_file(world: World, held: Held) -> bool:
    """Our decoder wrote the snapshot that the copy would start with."""
    file = file_at(world, held.at.restart)
    return file is not None and file.ours


def advanced(world: World, held: Held, target: int) -> tuple[Held, Files]:
    """The copy after an advance to `target`."""
    found = decode(world.wal, held.at, target, world.files, **ADVANCE)
    moved = found.position.restart > held.at.restart
    return (
        held._replace(at=found.position, idle=False, outgrown=held.outgrown and not moved),
        found.files,
    )


def consume(world: World) -> World | None:
    """A client reads from the copy."""
    if world.copy is None or world.copy.at.confirmed >= world.received:
        return None
    found = decode(world.wal, world.copy.at, world.received, world.files)
    copy = world.copy._replace(at=found.position, idle=False)
    return world._replace(copy=copy, files=found.files)


def lose_wal(world: World) -> World | None:
    """WAL that the copy needs is removed."""
    if world.copy is None or not world.copy.has_wal:
        return None
    return world._replace(copy=world.copy._replace(has_wal=False))


def rest(world: World) -> World | None:
    """The copy is idle for long."""
    if world.copy is None or world.copy.idle:
        return None
    return world._replace(copy=world.copy._replace(idle=True))


def outgrow(world: World) -> World | None:
    """Much WAL is written while the copy cannot move."""
    if world.copy is None or world.copy.outgrown:
        return None
    return world._replace(copy=world.copy._replace(outgrown=True))


def invalidate(world: World) -> World | None:
    """The standby invalidates the copy: its own recovery removed a row of it."""
    if world.copy is None or not world.copy.is_valid:
        return None
    return world._replace(copy=world.copy._replace(is_valid=False))


def restore(world: World) -> World | None:
    """The standby is put back to a state from before, with the folder of its slots, and connects again."""
    if world.copy is None:
        return None
    copy = world.copy if world.backup is None else world.backup
    if world.backup is None and copy.at.confirmed == copy.at.restart:
        return None
    return world._replace(
        copy=copy,
        backup=None,
        received=copy.at.restart if world.backup is None else world.received,
        connected=True,
        said=(),
        physical=world.physical._replace(sender=world.next_id, reply=0),
        next_id=world.next_id + 1,
    )


def lose_file(world: World) -> World | None:
    """The snapshot of the copy is removed."""
    file = None if world.copy is None else file_at(world, world.copy.at.restart)
    return None if file is None else world._replace(files=world.files - {file})


def find_file(world: World) -> World | None:
    """Our decoder of another slot leaves a snapshot, at the last record of what runs."""
    return _with_file(world, ours=True)


def find_other_file(world: World) -> World | None:
    """Somebody's fast decoder of another slot does."""
    return _with_file(world, ours=False)


def _with_file(world: World, *, ours: bool) -> World | None:
    last = max((r.lsn for r in world.wal if r.kind == RUN and r.lsn <= world.received), default=0)
    there = file_at(world, last)
    if not last or (there is not None and (there.ours or not ours)):
        return None
    file = File(last, ours, 0 if ours else lacking(world.wal, last))
    return world._replace(files=world.files - {there} | {file})


OTHER_PLUGIN = "it is for another plugin"


def broken(world: World) -> str | None:
    """What a promotion of the standby would lose with the copy now."""
    if world.copy is None:
        return "there is no copy"
    if not world.copy.has_wal or not world.copy.is_valid or not world.copy.lasting:
        return "it cannot be used"
    if any(not row for _, row in world.waiting):
        return "a promotion replays the removal of its database's old folder, and the copy goes with it"
    if world.copy.outgrown:
        return "the checkpoint at the end of the promotion removes its WAL"
    if world.copy.idle and not world.copy.synced:
        return "the checkpoint at the end of the promotion invalidates it"
    if world.copy.foreign:
        return "it is somebody else's"
    if world.copy.kind != world.kind:
        return OTHER_PLUGIN
    if world.shown > world.received:
        return "its client has what would be lost"
    if world.copy.at.confirmed > world.received:
        return "what is written after the promotion would be taken for sent"
    at = world.copy.at
    for record in world.wal:
        if record.kind == COMMIT and world.client < record.lsn <= at.confirmed:
            return f"the commit at {record.lsn} is behind it, and the client has not got it"
    if any(r.kind == COMMIT and at.confirmed < r.lsn <= world.created for r in world.wal):
        return "the slot was created again, and its client receives its initial copy again"
    # From the promotion on nothing but its own xmin keeps it from removing more.
    removed = max(world.removed_there, at.xmin)
    return loss(world.wal, at, world.received, world.files, removed, world.unmapped)


EVENTS = {
    each.__name__: each
    for each in (
        change,
        alter,
        rewrite,
        restartpoint,
        remove_files,
        forget_mappings,
        begin,
        hold,
        commit,
        ddl,
        run,
        vacuum,
        confirm,
        remake,
        remake_other,
        rest,
        outgrow,
        invalidate,
        restore,
        checkpoint,
        crash,
        disconnect,
        connect,
        fall_behind,
        receive,
        swap,
        mark,
        feedback,
        reply,
        hear,
        feedback_off,
        feedback_on,
        delete_copy,
        delete_unproven,
        usurp,
        succeed,
        consume,
        lose_wal,
        lose_file,
        find_file,
        find_other_file,
        alter_database,
        finish_database,
        replay_database,
    )
}
#: What ends a promise: it shows at the next poll.
BREAKS = frozenset(
    each.__name__
    for each in (
        *(crash, swap, feedback_off, delete_copy, usurp, succeed, consume, remake_other),
        *(lose_wal, lose_file, find_other_file, invalidate, restore, rest, outgrow),
        forget_mappings,
        alter_database,
        remake,
    )
)
