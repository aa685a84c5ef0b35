"""Every order of events of a small cluster of the real cores, by breadth first.

The abstraction, and what it leaves out:

- Safekeepers are the real `Safekeeper`; what is written is synced at once. Power can fail between any two
  effects of `Elected`, the only ones that take WAL away; tearing is the simulator's.
- A proposer is the real `Proposer` on a server whose WAL is one-byte records, so every LSN ends one; its
  queue is endless, comparing WAL and reading it succeed at once.
- A connection carries what the proposer sent, in order, delivered in any order across connections. What a
  safekeeper answers arrives at once, or is lost with its connection (a late answer would say the same). A
  connection may break at any time, losing all of it; a new one begins with both greetings.
- Each of the proposers is started once, on a server of its own timeline that forks from the first one's;
  which proposer starts when is explored, how far its server had come is given by `starts`.
- Safekeepers are interchangeable: states that differ by a renumbering are one.

Checked in every state: election safety, log safety, what was committed is in every later leader's log, and
whatever the cores assert. `Scope` bounds everything, so the search ends; `complete` says that it did.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from walsender_bridge.proposer import effects as pe
from walsender_bridge.proposer.core import Proposer
from walsender_bridge.safekeeper import effects as se
from walsender_bridge.safekeeper import messages as m
from walsender_bridge.safekeeper.configuration import Configuration
from walsender_bridge.safekeeper.core import Safekeeper
from walsender_bridge.safekeeper.history import EpochEntry, History

BASE = 8
INFO = m.ServerInfo(7, 16, 8)
#: A byte of WAL: (timeline, LSN). Two servers that forked differ in every byte behind the fork.
Cell = tuple[int, int]


@dataclass(frozen=True)
class Scope:
    """How far to go. `starts`: for each proposer (timeline, where it forked, how far its server is)."""

    starts: tuple[tuple[int, int, int], ...]
    safekeepers: int = 3
    breaks: int = 0
    append_bytes: int = 8
    limit: int = 200_000
    #: What the safekeepers hold at the start: (epoch, start, timeline) entries and the end of the log.
    logs: tuple[tuple[tuple[tuple[int, int, int], ...], int], ...] = ()


class ViolationError(AssertionError):
    """An invariant does not hold; the message has the way there."""


@dataclass
class State:
    """A mutable state that `clone` copies; everything that decides what can happen is in `key`."""

    safekeepers: list[Safekeeper]
    wal: list[tuple[Cell, ...]]
    proposers: list[Proposer | None]
    streamed: list[int]
    #: (proposer, safekeeper) -> (message, WAL, hash of both) on the way; no entry: no connection.
    links: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)
    #: What each safekeeper's control file holds.
    controls: list[se.ControlState] = field(default_factory=list)
    breaks: int = 0
    #: term -> who was in office; and what each term's proposer said is committed.
    offices: tuple[tuple[int, int], ...] = ()
    commits: tuple[tuple[int, tuple[Cell, ...]], ...] = ()

    def clone(self, number: int, peers: Iterable[int]) -> "State":
        """A copy in which this proposer and these safekeepers may be changed."""
        new = copy.copy(self)
        new.safekeepers, new.wal = list(self.safekeepers), list(self.wal)
        new.controls = list(self.controls)
        for peer in peers:
            new.safekeepers[peer] = copy.copy(self.safekeepers[peer])
        new.proposers = list(self.proposers)
        new.proposers[number] = _clone(self.proposers[number])
        new.streamed = list(self.streamed)
        new.links = dict(self.links)
        return new


def _clone(proposer: Proposer | None) -> Proposer | None:
    if proposer is None:
        return None
    new = copy.copy(proposer)
    new.peers = {number: copy.copy(peer) for number, peer in proposer.peers.items()}
    new.membership = copy.copy(proposer.membership)
    new.membership.persisted = dict(proposer.membership.persisted)
    if proposer.office is not None:
        office = new.office = copy.copy(proposer.office)
        office.peers = new.peers
        office.membership = new.membership
        office.streaming = copy.copy(proposer.office.streaming)
        office.streaming.peers = new.peers
        office.streaming.acked = dict(office.streaming.acked)
    return new


class Explorer:
    """See the module. `states` counts the distinct ones that were reached."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.states = 0
        self.complete = False
        self.servers = [
            tuple((1 if at < fork else timeline, at) for at in range(BASE, end))
            for timeline, fork, end in scope.starts
        ]

    def run(self) -> None:
        """Raises `ViolationError` at the first violation; the shortest way there is in it."""
        first = self._first()
        seen = {self._key(first)}
        queue: deque[tuple[State, tuple[str, ...]]] = deque([(first, ())])
        while queue:
            state, way = queue.popleft()
            for name, following in self._steps(state, way):
                key = self._key(following)
                if key in seen:
                    continue
                seen.add(key)
                self.states = len(seen)
                if self.states >= self.scope.limit:
                    return
                queue.append((following, (*way, name)))
        self.complete = True

    def _first(self) -> State:
        members = frozenset(range(1, self.scope.safekeepers + 1))
        self.configuration = Configuration(1, members)
        safekeepers, wal = [], []
        logs = self.scope.logs or (((), BASE),) * self.scope.safekeepers
        for identity, (entries, end) in zip(sorted(members), logs, strict=True):
            history = History(tuple(EpochEntry(*entry) for entry in entries))
            term = history.latest_epoch
            control = se.ControlState(
                identity,
                INFO if entries else m.ServerInfo(),
                m.NodeId(term, 900 + term) if term else m.NodeId(),
                history,
                self.configuration if entries else Configuration(),
            )
            safekeepers.append(Safekeeper(control, end))
            wal.append(
                tuple((history.timeline_at(at), at) for at in range(BASE, end)) if entries else ()
            )
        count = len(self.scope.starts)
        controls = [each.control for each in safekeepers]
        return State(safekeepers, wal, [None] * count, [0] * count, controls=controls)

    # -- what can happen ----------------------------------------------------------------------------

    def _steps(self, state: State, way: tuple[str, ...]) -> Iterator[tuple[str, State]]:
        everyone = range(self.scope.safekeepers)
        for name, number, act in self._actions(state):
            following = state.clone(number, everyone)
            try:
                act(following)
                self._check(following)
            except Exception as error:
                steps = "\n  ".join((*way, name))
                raise ViolationError(f"{error!r} after\n  {steps}") from error
            yield name, following

    def _actions(self, state: State) -> Iterator[tuple[str, int, Callable[[State], None]]]:
        for number, proposer in enumerate(state.proposers):
            if proposer is None:
                yield f"start P{number}", number, partial(self._start, number=number)
                continue
            for peer in range(self.scope.safekeepers):
                key = number, peer
                name = f"P{number} -> S{peer}"
                if key not in state.links:
                    if proposer.phase != "stopped":
                        yield f"{name}: dial", number, partial(self._dial, key=key)
                    continue
                breaks = state.breaks < self.scope.breaks
                if state.links[key]:
                    what = type(state.links[key][0][0]).__name__
                    yield f"{name}: {what}", number, partial(self._deliver, key=key)
                    if breaks and what == "Elected":
                        for done in range(3):
                            cut = partial(self._power_cut, key=key, done=done)
                            yield f"{name}: {what}, power cut after {done} effects", number, cut
                    if breaks:
                        lost = partial(self._deliver, key=key, lose=True)
                        yield f"{name}: {what}, its answer is lost", number, lost
                if breaks:
                    yield f"{name}: breaks", number, partial(self._break, key=key)
            if state.streamed[number] and state.streamed[number] < self.scope.starts[number][2]:
                yield f"server {number} sends", number, partial(self._stream, number=number)

    def _start(self, state: State, number: int) -> None:
        timeline, fork, end = self.scope.starts[number]
        switches = ((1, fork),) if timeline > 1 else ()
        primary = pe.Primary(pe.Lineage(timeline, switches), end)
        state.proposers[number] = Proposer(
            100 + number,
            INFO,
            primary,
            self.configuration,
            self.scope.safekeepers,
            primary_begin=0,
            limits=pe.Limits(append_bytes=self.scope.append_bytes),
        )
        for peer in range(self.scope.safekeepers):
            self._dial(state, (number, peer))

    def _dial(self, state: State, key: tuple[int, int]) -> None:
        state.links[key] = ()
        self._propose(state, key[0], pe.PeerConnected(key[1]))
        self._deliver(state, key)

    def _break(self, state: State, key: tuple[int, int]) -> None:
        state.breaks += 1
        self._hang_up(state, key)

    def _hang_up(self, state: State, key: tuple[int, int]) -> None:
        if key in state.links:
            del state.links[key]
            state.safekeepers[key[1]].step(se.Closed(key[0]))
            self._propose(state, key[0], pe.PeerClosed(key[1]))

    def _stream(self, state: State, number: int) -> None:
        at = state.streamed[number]
        state.streamed[number] = at + 1
        self._propose(state, number, pe.WalReceived(at, at + 1))

    def _deliver(self, state: State, key: tuple[int, int], *, lose: bool = False) -> None:
        (message, hand, _), state.links[key] = state.links[key][0], state.links[key][1:]
        answers, closed = self._safekeeper(state, key, message, hand)
        if lose:
            state.breaks += 1
            self._hang_up(state, key)
            return
        for conn, answer in answers:
            if (conn, key[1]) in state.links:
                if conn != key[0]:
                    state.proposers[conn] = _clone(state.proposers[conn])
                self._propose(state, conn, pe.PeerReceived(key[1], answer))
        for conn in closed:
            if (conn, key[1]) in state.links:
                if conn != key[0]:
                    state.proposers[conn] = _clone(state.proposers[conn])
                self._hang_up(state, (conn, key[1]))

    def _safekeeper(
        self, state: State, key: tuple[int, int], message: Any, hand: tuple[Cell, ...]
    ) -> tuple[list[tuple[int, Any]], list[int]]:
        """What it answers, and which connections it closes."""
        number, peer = key
        core = state.safekeepers[peer]
        sent: list[tuple[int, Any]] = []
        closed: list[int] = []
        events: deque[se.Event] = deque([se.Received(number, message)])
        if isinstance(message, m.Append):
            events.append(se.Drained())
        while events:
            answers: list[se.Event] = []
            for effect in core.step(events.popleft()):
                if isinstance(effect, se.Send):
                    sent.append((effect.conn, effect.message))
                elif isinstance(effect, se.WriteWal):
                    held = state.wal[peer]
                    at = effect.lsn - BASE
                    state.wal[peer] = held[:at] + hand + held[at + effect.length :]
                elif isinstance(effect, se.SyncWal):
                    answers.append(se.WalSynced(effect.lsn))
                elif isinstance(effect, se.AlignWal):
                    answers.append(se.WalAligned(effect.flush_lsn, effect.commit_lsn, BASE))
                elif isinstance(effect, se.TruncateWal):
                    self.truncate(state, peer, effect.lsn)
                elif isinstance(effect, se.PersistControl):
                    state.controls[peer] = effect.state
                elif isinstance(effect, se.ResetWal):
                    state.wal[peer] = ()
                elif isinstance(effect, se.Close):
                    closed.append(effect.conn)
            events.extendleft(reversed(answers))
        return sent, closed

    def _power_cut(self, state: State, key: tuple[int, int], done: int) -> None:
        """The safekeeper dies before the effect behind `done`, and starts from what its disk holds."""
        state.breaks += 1
        message, peer = state.links[key][0][0], key[1]
        effects = state.safekeepers[peer].step(se.Received(key[0], message))
        for effect in effects[:done]:
            if isinstance(effect, se.PersistControl):
                state.controls[peer] = effect.state
            elif isinstance(effect, se.TruncateWal):
                self.truncate(state, peer, effect.lsn)
            elif isinstance(effect, se.ResetWal):
                state.wal[peer] = ()
        found = BASE + len(state.wal[peer])
        state.safekeepers[peer] = Safekeeper(state.controls[peer], found)
        for number in range(len(state.proposers)):
            if (number, peer) in state.links:
                state.proposers[number] = _clone(state.proposers[number])
                self._hang_up(state, (number, peer))

    def truncate(self, state: State, peer: int, lsn: int) -> None:
        """Zero the WAL: the next start finds nothing there."""
        state.wal[peer] = state.wal[peer][: lsn - BASE]

    def _propose(self, state: State, number: int, event: pe.Event) -> None:
        proposer = state.proposers[number]
        assert proposer is not None
        events = deque([event])
        while events:
            for effect in proposer.step(events.popleft()):
                key = number, getattr(effect, "peer", -1)
                if isinstance(effect, pe.SendMessage):
                    self._send(state, key, effect.message, ())
                elif isinstance(effect, pe.SendWal):
                    self._send_wal(state, proposer, key, effect)
                elif isinstance(effect, pe.CompareWal):
                    own = self.servers[number][effect.begin_lsn - BASE : effect.end_lsn - BASE]
                    held = state.wal[effect.peer][effect.begin_lsn - BASE : effect.end_lsn - BASE]
                    events.append(pe.WalCompared(effect.peer, effect.end_lsn, own == held))
                elif isinstance(effect, pe.LocatePrimary):
                    events.append(pe.PrimaryAt(self.scope.starts[number][2]))
                elif isinstance(effect, pe.ReadWal):
                    events.append(pe.WalRead(effect.peer, effect.begin_lsn, effect.end_lsn))
                elif isinstance(effect, pe.StartStreaming):
                    state.streamed[number] = effect.lsn
                    self._took_office(state, proposer)
                elif isinstance(effect, pe.Feedback):
                    self._committed(state, number, proposer, effect.lsn)
                elif isinstance(effect, pe.ClosePeer):
                    self._hang_up(state, key)
                elif isinstance(effect, pe.Stop):
                    for peer in range(self.scope.safekeepers):
                        self._hang_up(state, (number, peer))

    def _send_wal(
        self, state: State, proposer: Proposer, key: tuple[int, int], effect: pe.SendWal
    ) -> None:
        begin, end = effect.begin_lsn, effect.end_lsn
        append = m.Append(
            proposer.node_id.term, begin, effect.commit_lsn, effect.restart_lsn, end - begin
        )
        self._send(state, key, append, self.servers[key[0]][begin - BASE : end - BASE])

    @staticmethod
    def _send(state: State, key: tuple[int, int], message: Any, hand: tuple[Cell, ...]) -> None:
        state.links[key] += ((message, hand, hash((message, hand))),)

    # -- invariants ---------------------------------------------------------------------------------

    def _took_office(self, state: State, proposer: Proposer) -> None:
        term, identity = proposer.node_id.term, proposer.node_id.proposer
        for other, who in state.offices:
            assert other != term or who == identity, "election safety"
        state.offices += ((term, identity),)
        own = self.servers[identity - 100]
        for committed_in, cells in state.commits:
            if committed_in < term:
                assert proposer.vcl >= BASE + len(cells), "committed never lost: it ends before"
                assert own[: len(cells)] == cells, "committed never lost: other bytes"

    def _committed(self, state: State, number: int, proposer: Proposer, lsn: int) -> None:
        cells = self.servers[number][: lsn - BASE]
        for _, known in state.commits:
            shorter = min(len(known), len(cells))
            assert known[:shorter] == cells[:shorter], "committed never lost: two versions"
        state.commits = (
            *(each for each in state.commits if each[0] != proposer.node_id.term),
            (proposer.node_id.term, cells),
        )

    def _check(self, state: State) -> None:
        """Log safety: in the same epoch the same bytes."""
        marked: dict[tuple[int, int], Cell] = {}
        for core, cells in zip(state.safekeepers, state.wal, strict=True):
            entries = core.control.history.counted(core.flush_lsn)
            for at in range(
                max(BASE, entries[0].start_lsn) if entries else core.flush_lsn, core.flush_lsn
            ):
                assert at - BASE < len(cells), "log safety: a hole"
                epoch = max(entry.epoch for entry in entries if entry.start_lsn <= at)
                cell = cells[at - BASE]
                assert marked.setdefault((epoch, at), cell) == cell, (
                    f"log safety: epoch {epoch} at {at}"
                )

    # -- one state ----------------------------------------------------------------------------------

    def _key(self, state: State) -> int:
        """Equal for states that differ by the safekeepers' numbers: all that is said of one is in its part."""
        parts = sorted(hash(self._part(state, peer)) for peer in range(self.scope.safekeepers))
        proposers = tuple(_proposer_key(each) for each in state.proposers)
        whole = (tuple(parts), proposers, tuple(state.streamed), state.breaks, state.commits)
        return hash((whole, state.offices))

    @staticmethod
    def _link_key(state: State, key: tuple[int, int]) -> tuple[int, ...] | None:
        link = state.links.get(key)
        return None if link is None else tuple(code for _, _, code in link)

    def _part(self, state: State, peer: int) -> tuple[Any, ...]:
        core = state.safekeepers[peer]
        control = core.control
        return (
            (control.node_id, control.history.entries, control.configuration.version),
            (core.flush_lsn, core.commit_lsn, core.owner, core.aligned, frozenset(core.greeted)),
            state.wal[peer],
            tuple(self._link_key(state, (number, peer)) for number in range(len(state.proposers))),
            tuple(_peer_key(each, peer) for each in state.proposers),
        )


def _proposer_key(proposer: Proposer | None) -> tuple[Any, ...] | None:
    if proposer is None:
        return None
    streaming = proposer.streaming
    inside = (streaming.commit_lsn, streaming.end, streaming.established) if streaming else None
    return (proposer.phase, proposer.node_id, proposer.vcl, inside)


def _peer_key(proposer: Proposer | None, number: int) -> tuple[Any, ...] | None:
    if proposer is None:
        return None
    peer = proposer.peers[number]
    greeting, reply = peer.greeting, peer.reply
    acked = proposer.streaming.acked.get(peer.identity) if proposer.streaming else None
    return (
        (peer.state, peer.sent_lsn, peer.flush_lsn, acked),
        (greeting.node_id, greeting.commit_lsn) if greeting else None,
        (reply.flush_lsn, reply.commit_lsn, reply.history.entries) if reply else None,
    )
