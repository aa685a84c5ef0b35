"""Two servers that take turns as the primary, and the commit gate that looks at the slot between them: a model.

WAL is a tuple of timelines: the byte at a position is known by the timeline it was written on. What PostgreSQL does is
kept: a standby asks for its own timeline from the beginning of a segment; a primary whose history has that timeline
sends it up to where the next one begins, unless the fork lies before the segment; a standby reports as flushed all that
it has, at once and whatever it was sent; the walsender writes that into the slot; who is at the fork follows, and who is
past it stays. The gate is the real one (`capture.gate.core.step`) and looks after every event.

What must hold: when something passes while the gate waits for a candidate, the standby has it, byte for byte.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from walsender_bridge.capture.gate.core import (
    Decided,
    GateDecision,
    GateState,
    ObservedServer,
    Rule,
    Standing,
    step,
)
from walsender_bridge.capture.gate.invariants import check_invariants, checked
from walsender_bridge.capture.gate.slots import GateSlot, Sender

#: The bytes of a segment, and how much WAL there may be.
SEGMENT = 3
LONGEST = 5

NAME = "c"


class PassedError(AssertionError):
    """Something passed that the standby, which the gate waited for, lacks."""


class Link(NamedTuple):
    """The standby's connection. `upto`: where the primary's history leaves the timeline that is sent."""

    sent: int
    upto: int | None
    flush: int | None = None
    streaming: bool = False


class Node(NamedTuple):
    """A server. `was`: the slot that it streamed from as a standby."""

    wal: tuple[int, ...]
    timeline: int
    runs: bool = True
    was: str = ""


class Known(NamedTuple):
    """What the gate remembers: of the record, and of its session."""

    timeline: int = 0
    standing: Standing = Standing.COUNTED
    held: int = 0
    position: int = 0


class World(NamedTuple):
    """`forks`: of each timeline after the first one, its parent and where it begins. `slot`: on the primary, or None."""

    nodes: tuple[Node, Node] = (Node((), 1), Node((), 1))
    primary: int = 0
    forks: tuple[tuple[int, int], ...] = ()
    link: Link | None = None
    slot: int | None = 0
    gate: Known = Known()

    @property
    def first(self) -> Node:
        """The primary."""
        return self.nodes[self.primary]

    @property
    def other(self) -> Node:
        """Who is not."""
        return self.nodes[1 - self.primary]

    def with_other(self, other: Node) -> "World":
        """The world with another standby."""
        nodes = (self.first, other) if self.primary == 0 else (other, self.first)
        return self._replace(nodes=nodes)

    def left_at(self, timeline: int) -> int | None:
        """Where the primary's history leaves a timeline; None: it is the primary's own. Raises `KeyError`."""
        at, child = None, self.first.timeline
        while child != timeline:
            if child == 1:
                raise KeyError(timeline)
            child, at = self.forks[child - 2]
        return at


def write(world: World) -> World | None:
    """The primary writes a byte."""
    first = world.first
    if len(first.wal) == LONGEST:
        return None
    first = first._replace(wal=(*first.wal, first.timeline))
    nodes = (first, world.other) if world.primary == 0 else (world.other, first)
    return world._replace(nodes=nodes)


def connect(world: World) -> World | None:
    """The standby asks for its timeline, from the beginning of its segment."""
    other = world.other
    if not other.runs or world.link is not None:
        return None
    start = len(other.wal) // SEGMENT * SEGMENT
    try:
        upto = world.left_at(other.timeline)
    except KeyError:
        return None
    if start > (len(world.first.wal) if upto is None else upto):
        return None
    return world._replace(link=Link(start, upto), slot=world.slot or 0)


def send(world: World) -> World | None:
    """All that there is is sent, and flushed."""
    link = world.link
    if link is None:
        return None
    end = len(world.first.wal) if link.upto is None else link.upto
    if link.streaming and link.sent == end:
        return None
    other = world.other
    wal = other.wal + world.first.wal[len(other.wal) : end]
    return world.with_other(other._replace(wal=wal))._replace(
        link=link._replace(sent=end, streaming=True)
    )


def reply(world: World) -> World | None:
    """The standby says what it has; the slot is where it says."""
    flush = len(world.other.wal)
    if world.link is None or world.link.flush == flush:
        return None
    return world._replace(link=world.link._replace(flush=flush), slot=flush)


def disconnect(world: World) -> World | None:
    """The connection ends. A standby that is at the end of its timeline follows the next."""
    if world.link is None:
        return None
    other = world.other
    if world.link.upto is not None and len(other.wal) == world.link.upto:
        other = other._replace(timeline=world.first.timeline)
    return world.with_other(other)._replace(link=None)


def promote(world: World) -> World | None:
    """The primary is lost, and its standby takes over, which has no slot of its own name."""
    other = world.other
    if not other.runs or len(world.forks) == 2:
        return None
    forks = (*world.forks, (other.timeline, len(other.wal)))
    dead = world.first._replace(runs=False)
    new = other._replace(timeline=len(forks) + 1, was=NAME)
    nodes = (dead, new) if world.primary == 0 else (new, dead)
    gate = world.gate._replace(held=0, position=0)  # another session
    return World(nodes, 1 - world.primary, forks, None, None, gate)


def come_back(world: World) -> World | None:
    """The old primary comes back as a standby, as it is."""
    return None if world.other.runs else world.with_other(world.other._replace(runs=True))


def rewind(world: World) -> World | None:
    """What the standby has and the primary lacks is taken from it."""
    other, first = world.other, world.first
    if not other.runs or world.link is not None or other.timeline == first.timeline:
        return None
    common = 0
    while common < min(len(other.wal), len(first.wal)) and other.wal[common] == first.wal[common]:
        common += 1
    return world.with_other(Node(other.wal[:common], first.timeline, True, other.was))


def restart_capture(world: World) -> World:
    """Another session of capture on the same server."""
    return world._replace(gate=world.gate._replace(held=0, position=0))


EVENTS: dict[str, Callable[[World], World | None]] = {
    each.__name__: each
    for each in (
        *(write, connect, send, reply, disconnect),
        *(promote, come_back, rewind, restart_capture),
    )
}


def look(world: World) -> World:
    """The gate looks. Raises `PassedError`."""
    first, known = world.first, world.gate
    state = GateState(Rule((NAME,)), timeline=known.timeline, standings={NAME: known.standing})
    state.position = state.shown = known.position
    state.candidates[NAME].flush_lsn = known.held
    slots = {} if world.slot is None else {NAME: GateSlot(world.slot, _sender(world))}
    seen = ObservedServer(0.0, first.timeline, len(first.wal), slots, first.was)
    before = checked(state)
    effects = step(state, seen)
    check_invariants(state, before, seen)
    for effect in effects:
        if isinstance(effect, Decided):
            assert effect.decision is not GateDecision.DEGRADED
        elif state.counted and world.other.wal[: effect.lsn] != first.wal[: effect.lsn]:
            raise PassedError(f"{effect.lsn} passed in {world}")
    candidate = state.candidates[NAME]
    after = Known(state.timeline, candidate.standing, candidate.flush_lsn, state.position)
    return world._replace(gate=after)


def _sender(world: World) -> Sender | None:
    link = world.link
    if link is None:
        return None
    return Sender("streaming" if link.streaming else "catchup", link.sent, link.flush, True)


def explore(length: int) -> Iterator[int]:
    """All sequences of events, by breadth first; how many worlds each length adds. Raises `PassedError`."""
    seen = {look(World())}
    level = [*seen]
    for _ in range(length):
        found: list[World] = []
        for world in level:
            for event in EVENTS.values():
                after = event(world)
                if after is not None and (after := look(after)) not in seen:
                    seen.add(after)
                    found.append(after)
        level = found
        yield len(found)
