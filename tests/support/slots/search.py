"""All sequences of events up to a length, by breadth first; worlds that differ in names only are one."""

from collections.abc import Callable, Iterable
from typing import Any

from tests.support.slots.decoder import COMMIT, DATABASE, REWRITE, RUN, VACUUM, File, Position, Wal
from tests.support.slots.poll import (
    NAME,
    act,
    act_cut,
    poll,
    poll_astray,
    poll_under_way,
    record_of,
    silent,
)
from tests.support.slots.world import BREAKS, EVENTS, OTHER_PLUGIN, Held, World, broken, first_world

Number = Callable[[int], int]
Path = tuple[Any, ...]


#: What often follows each other, as one event: so eight of them are a long story.
TOGETHER = {
    "row": ("change", "ddl"),
    "move": ("run", "confirm"),
    "tell": ("feedback", "hear"),
    "do": ("poll", "act"),
    "reconnect": ("disconnect", "connect"),
    "recrash": ("crash", "connect"),
    "sweep": ("restartpoint", "remove_files"),
    "reswap": ("disconnect", "swap", "connect"),
}


_POLLS = {"poll_under_way": poll_under_way, "poll_astray": poll_astray}
_SINGLE = {**EVENTS, **_POLLS, "act": act, "act_cut": act_cut}


class LossError(AssertionError):
    """A copy was called safe, and decoding from it would lose something."""


def step(world: World, event: str) -> World | None:
    """The world after an event; `None` if it cannot happen. What was said of the copy is checked against what is so."""
    if event in TOGETHER:
        after: World | None = world
        for each in TOGETHER[event]:
            after = None if after is None else step(after, each)
        return after
    if event == "poll":
        return _without_primary(_polled(world))
    after = _SINGLE[event](world)
    if after is None:
        return None
    if event in _POLLS:
        after = after._replace(reconnected=False)
    elif after.connected and after.physical.sender != world.physical.sender:
        after = after._replace(reconnected=True)
    _without_primary(after, event)
    if not after.promised:
        return after
    if event in BREAKS:
        return after._replace(promised=False)
    lost = broken(after)
    if lost is not None:
        raise LossError(f"the copy was safe, {event} broke it: {lost}\n{after}")
    return after


def _without_primary(world: World, event: str = "poll") -> World:
    """What is said if the primary does not answer any more is checked, too.

    Two things nobody can see then: a connection that came and went, and what was done to the slot and its database on the
    primary since the last poll.
    """
    if (world.reconnected and not world.connected) or world.unpolled:
        return world
    # `silent` asks the resolver, and takes longer.
    lost = broken(world)
    if lost is not None and lost != OTHER_PLUGIN and silent(world):
        raise LossError(f"{event}; the primary is silent, and it is ready, but {lost}\n{world}")
    return world


def _polled(world: World) -> World:
    after, verdict = poll(world._replace(reconnected=False))
    if not verdict.safe:
        return after._replace(promised=False)
    lost = broken(world._replace(shown=after.shown))
    if lost is not None:
        raise LossError(f"{verdict.after} ({verdict.reason}), but {lost}\n{world}")
    # While the slot on the primary is what keeps the rows, the verdict is of that moment only.
    assert world.copy is not None
    held = 0 < world.physical.xmin <= world.copy.at.xmin
    decoded = record_of(after.memory).of(NAME).decoded_at is not None
    return after._replace(promised=held and decoded)


def follow(events: Iterable[str], world: World | None = None) -> World:
    """The world after these events, each of which has to be possible."""
    world = first_world() if world is None else world
    for number, event in enumerate(events):
        after = step(world, event)
        assert after is not None, f"event {number}, {event}, cannot happen in {world}"
        world = after
    return world


def _mapped(world: World, lsn: Number, xid: Number, clock: Number, ident: Number) -> World:
    def record(r: Wal) -> Wal:
        match r.kind:
            case _ if r.kind == RUN:
                return Wal(lsn(r.lsn), RUN, xid(r.first), xid(r.second))
            case _ if r.kind == DATABASE:
                return Wal(lsn(r.lsn), DATABASE, xid(r.first), r.second)
            case _ if r.kind == COMMIT:
                return Wal(lsn(r.lsn), COMMIT, lsn(r.first), r.second)
            case _ if r.kind == REWRITE:
                return Wal(lsn(r.lsn), REWRITE, lsn(r.first))
        return Wal(lsn(r.lsn), r.kind, xid(r.first))

    def file(of: File) -> File:
        return File(lsn(of.lsn), of.ours, xid(of.lacks) if of.lacks else 0)

    def position(at: Position) -> Position:
        return Position(lsn(at.restart), lsn(at.confirmed), xid(at.xmin))

    def held(copy: Held | None) -> Held | None:
        return None if copy is None else copy._replace(at=position(copy.at))

    def memory(kept: Path) -> Path:
        if not kept:
            return kept
        epoch, current, made, unproven, renaming, seen, removed, reserved, *more = kept
        decoded, was, passed, client, settled, made_as, *rest = more
        return (
            None if epoch is None else tuple(ident(each) for each in epoch),
            current,
            made,
            unproven,
            renaming,
            None if seen is None else (clock(seen[0]), lsn(seen[1])),
            None if removed is None else xid(removed),
            None if reserved is None else (lsn(reserved[0]), xid(reserved[1])),
            None if decoded is None else lsn(decoded),
            None if was is None else (lsn(was[0]), xid(was[1])),
            None if passed is None else (lsn(passed[0]), xid(passed[1])),
            None if client is None else lsn(client),
            None if settled is None else (settled[0], lsn(settled[1])),
            None if made_as is None else (ident(made_as[0]), lsn(made_as[1])),
            *rest,
        )

    def pending(plan: Path) -> Path:
        match plan:
            case ("reserve", restart, confirmed, kind):
                return ("reserve", lsn(restart), lsn(confirmed), kind)
            case ("advance", name, to):
                return ("advance", name, lsn(to))
            case ("set", name, at):
                return ("set", name, position(at))
        return plan

    physical = world.physical
    return World(
        wal=tuple(map(record, world.wal)),
        end=lsn(world.end),
        next_xid=xid(world.next_xid),
        open=None
        if world.open is None
        else (xid(world.open[0]), lsn(world.open[1]) if world.open[1] else 0),
        slot=position(world.slot),
        saved_slot=position(world.saved_slot),
        kind=world.kind,
        client=lsn(world.client),
        physical=physical._replace(
            incarnation_id=ident(physical.incarnation_id) if physical.incarnation_id else 0,
            xmin=xid(physical.xmin) if physical.xmin else 0,
            saved_xmin=xid(physical.saved_xmin) if physical.saved_xmin else 0,
            sender=ident(physical.sender) if physical.sender else 0,
            reply=clock(physical.reply) if physical.reply else 0,
        ),
        primary_start=ident(world.primary_start),
        connected=world.connected,
        received=lsn(world.received),
        removed=xid(world.removed),
        removed_there=xid(world.removed_there),
        feedback=world.feedback,
        conf=ident(world.conf),
        said=tuple((clock(when), xid(what) if what > 0 else what) for when, what in world.said),
        unproven=held(world.unproven),
        copy=held(world.copy),
        backup=held(world.backup),
        files=frozenset(map(file, world.files)),
        clock=clock(world.clock),
        next_id=world.next_id,
        memory=memory(world.memory),
        pending=pending(world.pending),
        promised=world.promised,
        reconnected=world.reconnected,
        lagging=world.lagging,
        shown=lsn(world.shown),
        unmapped=frozenset(map(lsn, world.unmapped)),
        removing=lsn(world.removing) if world.removing > 0 else world.removing,
        row=world.row,
        row_there=world.row_there,
        moving=world.moving,
        waiting=tuple((lsn(at), row) for at, row in world.waiting),
        slot_incarnation_id=ident(world.slot_incarnation_id) if world.slot_incarnation_id else 0,
        created=lsn(world.created),
        unpolled=world.unpolled,
    )


def _trimmed(world: World) -> World:
    """Without WAL that no decoder reads any more, and snapshots that none starts from."""
    needed = [world.slot.restart, world.saved_slot.restart]
    copies = (world.copy, world.unproven, world.backup)
    needed += [held.at.restart for held in copies if held is not None]
    if world.pending[:1] == ("reserve",):
        needed.append(int(str(world.pending[1])))
    first = min(needed)
    return world._replace(
        wal=tuple(r for r in world.wal if r.lsn >= first or r.kind in {VACUUM, DATABASE}),
        files=frozenset(each for each in world.files if each.lsn >= first),
        unmapped=frozenset(each for each in world.unmapped if each >= first),
    )


def canonical(world: World) -> World:
    """The same world with the smallest numbers that have the same order."""
    world = _trimmed(world)
    lsns: set[int] = set()
    xids: set[int] = set()
    clocks: set[int] = set()
    idents: dict[int, int] = {}

    def collect(into: set[int]) -> Number:
        def seen(value: int) -> int:
            into.add(value)
            return value

        return seen

    def known(value: int) -> int:
        return idents.setdefault(value, len(idents) + 1) if value else 0

    named = _mapped(world, collect(lsns), collect(xids), collect(clocks), known)
    if _are_ranks(lsns, 1) and _are_ranks(xids, 3) and _are_ranks(clocks, 1):
        return named._replace(next_id=len(idents) + 1)
    lsn = {value: rank for rank, value in enumerate(sorted(lsns), 1)}
    xid = {value: rank for rank, value in enumerate(sorted(xids), 3)}
    clock = {value: rank for rank, value in enumerate(sorted(clocks), 1)}
    return _mapped(
        named, lsn.__getitem__, xid.__getitem__, clock.__getitem__, lambda value: value
    )._replace(next_id=len(idents) + 1)


def _are_ranks(values: set[int], first: int) -> bool:
    return not values or (min(values) == first and max(values) == first + len(values) - 1)


def _is_new(world: World, known: set[int]) -> bool:
    key = hash(world)
    if key in known:
        return False
    known.add(key)
    return True


class Search:
    """Worlds that events lead to from some first ones, level by level."""

    def __init__(self, starts: Iterable[World], events: Iterable[str]) -> None:
        self.events = tuple(events)
        self.frontier: list[tuple[World, Path]] = []
        self.seen: set[int] = set()
        #: Worlds as events leave them: most events commute, and finding the smallest numbers is what takes long.
        self._left: set[int] = set()
        self.depth = 0
        for world in starts:
            self._found(canonical(world), ())

    def _found(self, world: World, path: Path) -> None:
        if _is_new(world, self.seen):
            self.frontier.append((world, path))

    def run(self, length: int) -> None:
        """All sequences of `length` events. The last one is a poll: nothing else can be wrong."""
        while self.depth < length - 1 and self.frontier:
            level, self.frontier = self.frontier, []
            for world, path in level:
                for event in self.events:
                    after = self._step(world, event, path)
                    if after is not None and _is_new(after, self._left):
                        self._found(canonical(after), (path, event))
            self.depth += 1
        for world, path in self.frontier:
            self._step(world, "poll", path)

    def _step(self, world: World, event: str, path: Path) -> World | None:
        try:
            return step(world, event)
        except LossError as error:
            raise LossError(f"{error}\n{' '.join((*flat(path), event))}") from None


def flat(path: Path) -> list[str]:
    """The events of a path, the first one first."""
    events = []
    while path:
        path, event = path
        events.append(event)
    return events[::-1]
