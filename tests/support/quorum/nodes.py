"""The parts of the explorer's states, each interned: a core and its surroundings.

A core is a function: `step` of equal cores with equal events yields equal cores and equal effects. So a part is interned
by everything that the core holds, and caches the outcome of every event. The real `step` runs once for each pair of a
part and an event, however many states of the cluster have both.

`freeze` turns a core into a value: all of its attributes, except those named here with the reason why they are not read
any more. A part has a number that ignores its identity, so that states which differ by a renumbering of the safekeepers
are equal.
"""

import copy
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any, Generic, TypeVar

from walsender_bridge.quorum.proposer.core import Phase, Proposer
from walsender_bridge.quorum.proposer.peer import PeerState, SafekeeperPeer
from walsender_bridge.quorum.safekeeper.core import Safekeeper
from walsender_bridge.quorum.safekeeper.effects import ControlState

#: A byte of WAL: (timeline, LSN). Two servers that forked differ in every byte behind the fork.
Cell = tuple[int, int]
T = TypeVar("T")


def freeze(value: Any, leave_out: frozenset[str] = frozenset()) -> Hashable:
    """A value that is equal for equal contents, whatever the class."""
    if value is None or isinstance(value, int | str | bytes | Enum):
        return value
    if isinstance(value, tuple | list):
        return tuple([freeze(each) for each in value])
    if isinstance(value, frozenset | set):
        return frozenset(value)
    if isinstance(value, dict):
        return tuple(sorted((key, freeze(each)) for key, each in value.items()))
    names = getattr(type(value), "__slots__", None) or sorted(vars(value))
    names = [name for name in names if name not in leave_out]
    return (type(value).__name__, *(freeze(getattr(value, name, None)) for name in names))


class Interned(Generic[T]):
    """Values by their keys, each with a number that stays."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.values: list[T] = []

    def number(self, key: Hashable, make: Callable[[int], T]) -> int:
        """The number of the value of this key, which is created if it is new."""
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.values)
            self.values.append(make(number))
        return number

    def get(self, key: Hashable, make: Callable[[int], T]) -> T:
        """The value of this key, which is created if it is new."""
        return self.values[self.number(key, make)]


class Part:
    """Base of all parts: a number, and its outcomes, by event."""

    __slots__ = ("number", "outcomes")

    def __init__(self, number: int) -> None:
        self.number = number
        self.outcomes: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Outcomes are not saved: they are computed again."""
        slots = [name for each in type(self).__mro__ for name in getattr(each, "__slots__", ())]
        return {name: getattr(self, name) for name in slots if name != "outcomes"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.outcomes = {}
        for name, value in state.items():
            setattr(self, name, value)


class SafekeeperPart(Part):
    """A safekeeper: its core, and what its disk holds. `anonymous`: its number without its identity."""

    __slots__ = ("anonymous", "control", "core", "wal")

    def __init__(
        self,
        number: int,
        anonymous: int,
        core: Safekeeper,
        wal: tuple[Cell, ...],
        control: ControlState,
    ) -> None:
        super().__init__(number)
        self.anonymous = anonymous
        self.core, self.wal, self.control = core, wal, control


class ProposerPart(Part):
    """A proposer. `inside` and `peers`: the numbers of its state apart from, and for, each safekeeper."""

    __slots__ = ("core", "inside", "peers", "stopped")

    def __init__(self, number: int, inside: int, peers: tuple[int, ...], core: Proposer) -> None:
        super().__init__(number)
        self.inside, self.peers, self.core = inside, peers, core
        self.stopped = core.phase == Phase.STOPPED


class Item:
    """A message under way, and its WAL."""

    __slots__ = ("hand", "message", "number")

    def __init__(self, number: int, message: Any, hand: tuple[Cell, ...]) -> None:
        self.number, self.message, self.hand = number, message, hand


class Link(Part):
    """The messages under way to a safekeeper on one connection, in order."""

    __slots__ = ("items",)

    def __init__(self, number: int, items: tuple[Item, ...]) -> None:
        super().__init__(number)
        self.items = items


class Parts:
    """All parts that a search has met."""

    def __init__(self) -> None:
        self.safekeepers: Interned[SafekeeperPart] = Interned()
        self.proposers: Interned[ProposerPart] = Interned()
        self.items: Interned[Item] = Interned()
        self.links: Interned[Link] = Interned()
        self.keys: Interned[None] = Interned()
        self.messages: dict[Any, Any] = {}

    def key(self, value: Hashable) -> int:
        """A number for a value."""
        return self.keys.number(value, lambda _: None)

    def safekeeper(
        self, core: Safekeeper, wal: tuple[Cell, ...], control: ControlState
    ) -> SafekeeperPart:
        """The one with these contents. `served_lsn` only prevents repeated publication to readers."""
        identity = core.control.safekeeper
        inside = freeze(core, frozenset({"control", "served_lsn"}))
        slots = [name for name in ControlState.__slots__ if name != "safekeeper"]
        held = [freeze(getattr(state, name)) for state in (core.control, control) for name in slots]
        anonymous = self.key(("safekeeper", inside, tuple(held), wal))
        return self.safekeepers.get(
            (identity, anonymous),
            lambda number: SafekeeperPart(number, anonymous, core, wal, control),
        )

    def proposer(self, core: Proposer) -> ProposerPart:
        """The one with these contents. Identities of safekeepers are their peer numbers plus one."""
        if _is_hopeless(core):
            core = copied(core)
            core.phase = Phase.STOPPED
        if core.phase == Phase.STOPPED:  # it takes no further steps
            inside, peers = self.key("stopped"), (0,) * len(core.peers)
        else:
            inside = self.key(("proposer", self._inside(core)))
            peers = tuple(
                self.key(("peer", self._peer(core, each))) for each in core.peers.values()
            )
        return self.proposers.get(
            (inside, *peers, core.node_id.proposer),
            lambda number: ProposerPart(number, inside, peers, core),
        )

    @staticmethod
    def _inside(core: Proposer) -> Hashable:
        """The state that is not about one safekeeper. The best log is read until the election is decided."""
        apart = {"peers", "membership", "leader", "same_wal", "limits", "server"}
        if core.phase == Phase.LEADING:
            apart.add("best")
        inside: tuple[Hashable, ...] = (
            freeze(core, frozenset(apart)),
            freeze(core.same_wal, frozenset({"wanted"})),
            freeze(core.membership.configuration),
        )
        if core.leader is None:
            return inside
        streaming = core.leader.streaming
        here = freeze(streaming, frozenset({"peers", "acked", "rebuild", "limits"}))
        return (*inside, here, freeze(core.leader.feedback))

    @staticmethod
    def _peer(core: Proposer, peer: SafekeeperPeer) -> Hashable:
        """The state of one safekeeper. A leader no longer reads the greeting, nor a used reply."""
        identity = peer.number + 1
        apart = {"number", "greeting", "rival"}  # the owner of its vote does not matter
        leading = core.phase == Phase.LEADING
        if leading and peer.state in {PeerState.RECOVERING, PeerState.STREAMING}:
            apart.add("reply")
        greeting = peer.greeting
        greeted = None
        if greeting is not None:
            greeted = not leading and (greeting.node_id, greeting.commit_lsn, greeting.timeline)
        known: tuple[Any, ...] = (freeze(peer, frozenset(apart)), greeted)
        known += (
            peer.rival is not None,
            core.same_wal.wanted is not None and core.same_wal.wanted.peer == peer.number,
            core.membership.persisted.get(identity),
        )
        if core.streaming is not None:
            known += (core.streaming.acked.get(identity), identity in core.streaming.rebuild)
        return known

    def item(self, message: Any, hand: tuple[Cell, ...]) -> Item:
        """A message with its WAL."""
        return self.items.get((message, hand), lambda number: Item(number, message, hand))

    def link(self, items: tuple[Item, ...]) -> Link:
        """A connection with these under way."""
        return self.links.get(
            tuple(item.number for item in items), lambda number: Link(number, items)
        )

    def message(self, message: Any) -> Any:
        """The same message, always as the same object."""
        return self.messages.setdefault(message, message)


def _is_hopeless(core: Proposer) -> bool:
    """A candidate that can no longer have a quorum in its term equals a killed one: it only waits for its end."""
    outvoted = {peer.number + 1 for peer in core.peers.values() if peer.rival}
    left = core.configuration.everyone - outvoted
    candidate = core.phase in {Phase.VOTING, Phase.COMPARING}
    return candidate and not core.configuration.has_quorum(left)


def copied(proposer: Proposer) -> Proposer:
    """A copy that may be stepped: all that a step changes in place is copied with it."""
    new = copy.copy(proposer)
    new.peers = {number: copy.copy(peer) for number, peer in proposer.peers.items()}
    new.membership = copy.copy(proposer.membership)
    new.membership.persisted = dict(proposer.membership.persisted)
    new.refusals = copy.copy(proposer.refusals)
    new.same_wal = copy.copy(proposer.same_wal)
    if proposer.leader is not None:
        leader = new.leader = copy.copy(proposer.leader)
        leader.peers = new.peers
        leader.membership = new.membership
        leader.streaming = copy.copy(proposer.leader.streaming)
        leader.streaming.peers = new.peers
        leader.streaming.acked = dict(leader.streaming.acked)
    return new
