"""Three servers, one of them the primary, and an operator who edits the list of the commit gate: a model.

Each server's slot has its own name, as HA managers do it. After every event another session of capture begins with what
the record says, and looks a few times. The gate and its record are the real ones, without the record's file.

What must hold: no invariant fails. While all servers are listed as members, what passes is on every standby; and while
all of them follow, it passes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from walsender_bridge.capture.gate.core import (
    Decided,
    GateState,
    ObservedServer,
    Rule,
    Standing,
    step,
)
from walsender_bridge.capture.gate.invariants import check_invariants, checked
from walsender_bridge.capture.gate.record import GateRecord
from walsender_bridge.capture.gate.slots import GateSlot, Sender

SERVERS = "abc"
MEMBERS = Rule(("a", "b", "c"), members=True)
#: What the operator may write down; the first is right.
LISTS = (
    MEMBERS,
    Rule(("b", "c"), members=True),
    Rule(("a", "b"), members=True),
    Rule(("a", "b")),
    Rule(("b", "c")),
)
END = 900
_FOLLOWS = GateSlot(END, Sender("streaming", END, END, True))
_DOWN = GateSlot(500)


class Recorded(NamedTuple):
    """What is in the gate's record."""

    timeline: int = 0
    standings: tuple[tuple[str, Standing], ...] = ()
    streamed: frozenset[str] = frozenset()


class World(NamedTuple):
    """`down`: standbys that do not follow. `was`: the primary's `primary_slot_name`."""

    primary: str = "a"
    timeline: int = 1
    down: frozenset[str] = frozenset()
    was: str = ""
    rule: Rule = LISTS[0]
    recorded: Recorded = Recorded()


def _after(world: World) -> Iterator[World]:
    """What may happen next."""
    for rule in LISTS:
        yield world._replace(rule=rule)
    for name in SERVERS:
        if name == world.primary:
            continue
        yield world._replace(down=world.down ^ {name})
        if name not in world.down and world.timeline < 3:
            down = world.down | {world.primary}
            for was in ("", name):
                yield world._replace(primary=name, timeline=world.timeline + 1, down=down, was=was)


def _session(world: World) -> World:
    """Another session of capture. Raises `InvariantError`, `AssertionError`."""
    record = GateRecord(Path("/nonexistent"))
    record.timeline, record.streamed = world.recorded.timeline, set(world.recorded.streamed)
    record.standings = dict(world.recorded.standings)
    state = GateState(
        world.rule, record.timeline, standings=dict(record.standings), streamed=set(record.streamed)
    )
    slots = {n: _DOWN if n in world.down else _FOLLOWS for n in SERVERS if n != world.primary}
    for now in (0.0, 1.0, 2.0):
        seen = ObservedServer(now, world.timeline, END, slots, world.was)
        before = checked(state)
        effects = step(state, seen)
        check_invariants(state, before, seen)
        for each in effects:
            if isinstance(each, Decided):
                record._take(each.decision, each.candidate, each.timeline)
    if world.rule == MEMBERS:
        assert (state.position == END) is not bool(world.down), (world, state)
    standings = tuple(sorted(record.standings.items()))
    return world._replace(recorded=Recorded(record.timeline, standings, frozenset(record.streamed)))


def explore() -> int:
    """All sequences of events; how many worlds there are."""
    level = [_session(World())]
    seen = {*level}
    while level:
        found = []
        for world in level:
            for event in _after(world):
                after = _session(event)
                if after not in seen:
                    seen.add(after)
                    found.append(after)
        level = found
    return len(seen)
