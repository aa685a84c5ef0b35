"""All states of a small cluster of the real cores, and the steps between them.

The abstraction, and what it omits:

- Safekeepers are the real `Safekeeper`; what is written is synced at once. Power can fail between any two
  effects of a message (a break); torn writes are left to the simulator.
- A proposer is the real `Proposer` on a server whose WAL is one-byte records, so every LSN ends one; its
  queue is endless, comparing WAL and reading it succeed at once.
- A connection carries what the proposer sent, in order, delivered in any order across connections. What a
  safekeeper answers arrives at once, or is lost with its connection. (An answer is read by one proposer alone,
  which shares it only by messages that may be delayed; so two proposers cannot observe that it came early.) A
  connection may break at any time, losing all of it; a new one begins with both greetings.
- Each of the proposers is started once, on a server of its own timeline that forks from the first one's;
  which proposer starts when is explored, how far its server had come is given by `starts`. One that is
  killed is one that takes no further steps. Two of equal servers start in the order of their numbers.
- Safekeepers are interchangeable: states that differ by a renumbering are one.

Checked in every state: election safety, log safety, committed WAL is in every later leader's log, and is all that readers
are served, a term never comes back after a rejection, and all assertions of the cores.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.support.quorum.claims import BASE, Claims, Past
from tests.support.quorum.nodes import (
    Cell,
    Item,
    Link,
    Parts,
    ProposerPart,
    SafekeeperPart,
    copied,
)
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.quorum.proposer import effects as pe
from walsender_bridge.quorum.proposer import invariants as proposer_invariants
from walsender_bridge.quorum.proposer.core import Proposer
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.safekeeper import effects as se
from walsender_bridge.quorum.safekeeper import invariants as safekeeper_invariants
from walsender_bridge.quorum.safekeeper.core import Safekeeper

INFO = m.ServerInfo(7, 16, 8)
Key = tuple[int, int]


@dataclass(frozen=True)
class Scope:
    """The limits of an exploration. `starts`: for each proposer (timeline, its switch point, its server's position)."""

    starts: tuple[tuple[int, int, int], ...]
    safekeepers: int = 3
    breaks: int = 0
    append_bytes: int = 8
    limit: int = 200_000
    #: What the safekeepers hold at the start: (election epoch, start, timeline) entries and the end of the log.
    logs: tuple[tuple[tuple[tuple[int, int, int], ...], int], ...] = ()


class State:
    """A state; a step changes a clone. `links`: one for each proposer and safekeeper, None: no connection."""

    __slots__ = ("breaks", "links", "past", "proposers", "safekeepers", "streamed")

    def __init__(
        self,
        safekeepers: list[SafekeeperPart],
        proposers: list[ProposerPart | None],
        streamed: list[int],
        links: list[Link | None],
        past: Past,
        breaks: int = 0,
    ) -> None:
        self.safekeepers, self.proposers, self.streamed = safekeepers, proposers, streamed
        self.links, self.past, self.breaks = links, past, breaks

    def clone(self) -> "State":
        """A copy that may be changed."""
        lists = list(self.safekeepers), list(self.proposers), list(self.streamed), list(self.links)
        return State(*lists, self.past, self.breaks)


class Cluster:
    """See the module. The steps change the state that they are given."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.parts = Parts()
        self.claims = Claims()
        self.width = scope.safekeepers
        self.empty = self.parts.link(())
        self.everyone = range(self.width)
        self.configuration = Configuration(1, frozenset(each + 1 for each in self.everyone))
        self.servers = [
            tuple((1 if at < fork else timeline, at) for at in range(BASE, end))
            for timeline, fork, end in scope.starts
        ]

    def first(self) -> State:
        """The state in which nothing has happened."""
        safekeepers = []
        logs = self.scope.logs or (((), BASE),) * self.width
        for identity, (entries, end) in enumerate(logs, 1):
            history = History(tuple(HistoryEntry(*entry) for entry in entries))
            term = history.latest_election_epoch
            control = se.ControlState(
                identity,
                INFO if entries else m.ServerInfo(),
                m.NodeId(term, 900 + term) if term else m.NodeId(),
                history,
                self.configuration if entries else Configuration(),
            )
            held = tuple((history.timeline_at(at), at) for at in range(BASE, end) if entries)
            safekeepers.append(self.parts.safekeeper(Safekeeper(control, end), held, control))
        count = len(self.scope.starts)
        links: list[Link | None] = [None] * (count * self.width)
        return State(safekeepers, [None] * count, [0] * count, links, self.claims.past())

    # -- what can happen ----------------------------------------------------------------------------

    def actions(self, state: State) -> Iterator[tuple[str, Callable[[State], None]]]:
        """Every step from here: its name, and what does it."""
        starts = self.scope.starts
        breaks = state.breaks < self.scope.breaks
        for number, proposer in enumerate(state.proposers):
            if proposer is None:
                equal_start = number and starts[number] == starts[number - 1]
                if not equal_start or state.proposers[number - 1] is not None:
                    yield f"start P{number}", partial(self.start, number=number)
                continue
            for peer in self.everyone:
                key = number, peer
                link = state.links[number * self.width + peer]
                if link is None:
                    # A safekeeper with another vote would only be queried for that proposer's election: to stop is to do nothing.
                    if not proposer.stopped and not proposer.core.peers[peer].rival:
                        yield f"P{number} -> S{peer}: dial", partial(self.dial, key=key)
                    continue
                if link.items:
                    what = f"P{number} -> S{peer}: {type(link.items[0].message).__name__}"
                    yield what, partial(self.deliver, key=key)
                    if breaks:
                        item = link.items[0]
                        for done in range(self.effects(state.safekeepers[peer], number, item)):
                            cut = partial(self.power_cut, key=key, done=done)
                            yield f"{what}, power cut after {done} effects", cut
                        lost = partial(self.deliver, key=key, lose=True)
                        yield f"{what}, its answer is lost", lost
                if breaks:
                    yield f"P{number} -> S{peer}: breaks", partial(self.break_off, key=key)
            if state.streamed[number] and state.streamed[number] < starts[number][2]:
                yield f"server {number} sends", partial(self.stream, number=number)

    def start(self, state: State, number: int) -> None:
        timeline, fork, end = self.scope.starts[number]
        switches = (WalPosition(1, fork),) if timeline > 1 else ()
        primary = pe.Primary(pe.Lineage(timeline, switches), end)
        core = Proposer(
            100 + number,
            INFO,
            primary,
            self.configuration,
            self.width,
            primary_begin=0,
            limits=pe.Limits(append_bytes=self.scope.append_bytes),
        )
        state.proposers[number] = self.parts.proposer(core)
        for peer in self.everyone:
            self.dial(state, (number, peer))

    def dial(self, state: State, key: Key) -> None:
        state.links[key[0] * self.width + key[1]] = self.empty
        self._propose(state, key[0], pe.PeerConnected(key[1]))
        self.deliver(state, key)

    def break_off(self, state: State, key: Key) -> None:
        state.breaks += 1
        self.hang_up(state, key)

    def hang_up(self, state: State, key: Key) -> None:
        number, peer = key
        if state.links[number * self.width + peer] is not None:
            state.links[number * self.width + peer] = None
            part = state.safekeepers[peer]
            after = part.outcomes.get(number)
            if after is None:
                after = part.outcomes[number] = self._stepped(part, se.Closed(number))[0]
            state.safekeepers[peer] = after
            self._propose(state, number, pe.PeerClosed(peer))

    def stream(self, state: State, number: int) -> None:
        at = state.streamed[number]
        state.streamed[number] = at + 1
        self._propose(state, number, pe.WalReceived(at, at + 1))

    def deliver(self, state: State, key: Key, *, lose: bool = False) -> None:
        number, peer = key
        at = number * self.width + peer
        link = state.links[at]
        assert link is not None
        item = link.items[0]
        state.links[at] = self._tail(link)
        part = state.safekeepers[peer]
        outcome = part.outcomes.get((number, item.number))
        if outcome is None:
            outcome = part.outcomes[number, item.number] = self._received(part, number, item)
        state.safekeepers[peer], answers, closed, served, vote = outcome
        for lsn in served:
            self.claims.served(state.past, outcome[0], lsn)
        if vote is not None:
            self.claims.voted(state.past, vote)
        if lose:
            state.breaks += 1
            self.hang_up(state, key)
            return
        for conn, answer in answers:
            if state.links[conn * self.width + peer] is not None:
                self._propose(state, conn, (peer, answer))
        for conn in closed:
            self.hang_up(state, (conn, peer))

    # -- a safekeeper -------------------------------------------------------------------------------

    def _stepped(
        self, part: SafekeeperPart, event: se.Event
    ) -> tuple[SafekeeperPart, list[se.Effect]]:
        core = copied_safekeeper(part.core)
        effects = core.step(event)
        safekeeper_invariants.check_invariants(core, safekeeper_invariants.checked(part.core))
        return self.parts.safekeeper(core, part.wal, part.control), effects

    def _received(self, part: SafekeeperPart, number: int, item: Item) -> tuple[Any, ...]:
        """Its new state, its answers, the connections that it closes, the WAL that it serves, a new vote."""
        core, wal, control = copied_safekeeper(part.core), part.wal, part.control
        sent: list[tuple[int, Any]] = []
        closed: list[int] = []
        served: list[int] = []
        events: deque[se.Event] = deque([se.MessageReceived(number, item.message)])
        if isinstance(item.message, m.Append):
            events.append(se.Drained())
        while events:
            answers: list[se.Event] = []
            before = safekeeper_invariants.checked(core)
            effects = core.step(events.popleft())
            safekeeper_invariants.check_invariants(core, before)
            for effect in effects:
                wal, control = self._performed(effect, item.hand, wal, control)
                if isinstance(effect, se.SendMessage):
                    self.claims.answered(effect.message)
                    sent.append((effect.conn, self.parts.message(effect.message)))
                elif isinstance(effect, se.SyncWal):
                    answers.append(se.WalSynced(effect.lsn))
                elif isinstance(effect, se.AlignWal):
                    answers.append(se.WalAligned(effect.flush_lsn, effect.commit_lsn, BASE))
                elif isinstance(effect, se.ServeReaders):
                    served.append(effect.lsn)
                elif isinstance(effect, se.Close):
                    closed.append(effect.conn)
            events.extendleft(reversed(answers))
        vote = control.node_id if control.node_id != part.control.node_id else None
        after = self.parts.safekeeper(core, wal, control)
        return after, tuple(sent), tuple(closed), tuple(served), vote

    def _performed(
        self,
        effect: se.Effect,
        hand: tuple[Cell, ...],
        wal: tuple[Cell, ...],
        control: se.ControlState,
    ) -> tuple[tuple[Cell, ...], se.ControlState]:
        if isinstance(effect, se.WriteWal):
            at = effect.lsn - BASE
            return wal[:at] + hand + wal[at + effect.length :], control
        if isinstance(effect, se.TruncateWal):
            return self.truncated(wal, effect.lsn), control
        if isinstance(effect, se.ResetWal):
            return (), control
        if isinstance(effect, se.PersistControl):
            return wal, effect.state
        return wal, control

    def truncated(self, wal: tuple[Cell, ...], lsn: int) -> tuple[Cell, ...]:
        """Zero the WAL, so that the next start finds nothing there."""
        return wal[: lsn - BASE]

    def effects(self, part: SafekeeperPart, number: int, item: Item) -> int:
        """The number of immediate effects of a message: power can fail before each."""
        at = "effects", number, item.number
        count: int | None = part.outcomes.get(at)
        if count is None:
            core = copied_safekeeper(part.core)
            count = part.outcomes[at] = len(core.step(se.MessageReceived(number, item.message)))
        return count

    def power_cut(self, state: State, key: Key, done: int) -> None:
        """The safekeeper dies after `done` effects, and starts from what its disk holds."""
        state.breaks += 1
        number, peer = key
        part, link = state.safekeepers[peer], state.links[number * self.width + peer]
        assert link is not None
        wal, control = part.wal, part.control
        core = copied_safekeeper(part.core)
        for effect in core.step(se.MessageReceived(number, link.items[0].message))[:done]:
            wal, control = self._performed(effect, link.items[0].hand, wal, control)
        started = Safekeeper(control, BASE + len(wal))
        state.safekeepers[peer] = self.parts.safekeeper(started, wal, control)
        for other in range(len(state.proposers)):
            self.hang_up(state, (other, peer))

    # -- a proposer ---------------------------------------------------------------------------------

    def _propose(self, state: State, number: int, event: Any) -> None:
        """An event, or a message as (peer, message), and all its consequences."""
        events = deque([event])
        while events:
            part = state.proposers[number]
            assert part is not None
            event = events.popleft()
            is_message = isinstance(event, tuple)
            at = (event[0], id(event[1])) if is_message else event  # a message is one object
            outcome = part.outcomes.get(at)
            if outcome is None:
                core = copied(part.core)
                stepped = core.step(pe.PeerReceived(*event) if is_message else event)
                before = proposer_invariants.checked(part.core)
                proposer_invariants.check_invariants(core, before)
                outcome = self.parts.proposer(core), tuple(stepped)
                part.outcomes[at] = outcome
            state.proposers[number], effects = outcome
            for effect in effects:
                peer = getattr(effect, "peer", -1)
                if isinstance(effect, pe.SendMessage):
                    self._send(state, (number, peer), effect, effect.message)
                elif isinstance(effect, pe.SendWal):
                    self._send(state, (number, peer), effect, None)
                elif isinstance(effect, pe.CompareWal):
                    own = self.servers[number][effect.begin_lsn - BASE : effect.end_lsn - BASE]
                    held = state.safekeepers[peer].wal
                    equal = own == held[effect.begin_lsn - BASE : effect.end_lsn - BASE]
                    events.append(pe.WalCompared(peer, effect.end_lsn, equal))
                elif isinstance(effect, pe.LocatePrimary):
                    events.append(pe.PrimaryAt(self.scope.starts[number][2]))
                elif isinstance(effect, pe.ReadWal):
                    events.append(pe.WalRead(peer, effect.begin_lsn, effect.end_lsn))
                elif isinstance(effect, pe.StartStreaming):
                    state.streamed[number] = effect.lsn
                    core = self.core(state, number)
                    state.past = self.claims.took_lead(state.past, core, self.servers[number])
                elif isinstance(effect, pe.Feedback):
                    term, cells = self.core(state, number).node_id.term, self.servers[number]
                    state.past = self.claims.committed(state.past, term, cells[: effect.lsn - BASE])
                elif isinstance(effect, pe.ClosePeer):
                    self.hang_up(state, (number, peer))
                elif isinstance(effect, pe.Stop):
                    self._stopped(state, number, effect)

    def core(self, state: State, number: int) -> Proposer:
        """A proposer that was started, as it is."""
        part = state.proposers[number]
        assert part is not None
        return part.core

    def _stopped(self, state: State, number: int, stop: pe.Stop) -> None:
        if stop.reason == pe.StopReason.DISPLACED:
            state.past = self.claims.refused(state.past, self.core(state, number).node_id)
        for peer in self.everyone:
            self.hang_up(state, (number, peer))

    def _send(self, state: State, key: Key, effect: Any, message: Any) -> None:
        at = key[0] * self.width + key[1]
        link, part = state.links[at], state.proposers[key[0]]
        assert part is not None
        if link is None:
            return  # an earlier effect closed it
        item = part.outcomes.get(id(effect))
        if item is None:
            hand: tuple[Cell, ...] = ()
            if message is None:
                begin, end = effect.begin_lsn, effect.end_lsn
                commit, restart = effect.commit_lsn, effect.restart_lsn
                message = m.Append(part.core.node_id.term, begin, commit, restart, end - begin)
                hand = self.servers[key[0]][begin - BASE : end - BASE]
            # The outcome of the previous part holds the effect, so its id is unique.
            item = part.outcomes[id(effect)] = self.parts.item(message, hand)
        after = link.outcomes.get(item.number)
        if after is None:
            after = link.outcomes[item.number] = self.parts.link((*link.items, item))
        state.links[at] = after

    def _tail(self, link: Link) -> Link:
        after: Link | None = link.outcomes.get("tail")
        if after is None:
            after = link.outcomes["tail"] = self.parts.link(link.items[1:])
        return after

    def check(self, state: State) -> None:
        """Any two logs agree."""
        parts = state.safekeepers
        for one in range(self.width):
            for two in range(one, self.width):
                self.claims.agree(parts[one], parts[two])


def copied_safekeeper(core: Safekeeper) -> Safekeeper:
    """A copy that may be stepped: every attribute is replaced as a whole, never changed."""
    new = object.__new__(Safekeeper)
    for name in Safekeeper.__slots__:
        setattr(new, name, getattr(core, name))
    return new
