"""The commit gate: up to which LSN a transaction may be shown to consumers. Pure: `step(state, seen) -> effects`.

**What it is for.** A consumer must never hold a transaction that the server promoted after a failure lacks. A
transaction survives with a candidate once the candidate has its WAL on disk (promotion replays what is flushed), so
it may be shown once enough candidates have flushed it *whole*, and the safekeepers' quorum too, if there is one.

**Why it is safe.** All positions are ends: a transaction's is the end LSN of its finishing message, behind the last
byte of its commit record; a candidate's is what its standby reports as flushed to the walsender that has its physical
slot, so every byte *below* it is on the standby's disk; the quorum's is its `commit_lsn`, below
which a majority has every byte. Hence `end <= position` says that the whole record is there. With the start of the
record, as pgoutput's "commit LSN" names it, it would not: a standby that flushed up to just there has nothing of it.
- A position that is late is harmless, one that is early is not. So a candidate's slot counts only as it was while a
  server streamed from it. A slot that was made with its WAL reserved, or that pg_receivewal or a base backup uses, has
  a `restart_lsn` that no standby ever flushed; a slot that nobody uses keeps the position it had before.
- A flush position counts only if the walsender has sent that much, and has caught up with the server's WAL
  ("streaming"). A walsender accepts any position that it is sent, and stores it in the slot. An old primary that
  comes back as a standby without pg_rewind is accepted if its end and the fork are in one segment, is sent WAL up to
  the fork, and reports as flushed its own WAL beyond that. So the slot's `restart_lsn`, which keeps that report,
  never counts alone.
- The position of a session is one on its server's timeline. Another timeline means another session, which starts
  at 0 and polls again; until then the log keeps the last position it received. A server that was left behind on an older
  timeline shows nothing, even if standbys still follow it.
- With `quorum`, that many candidates have every transaction shown, but not always the same ones: a failover must promote
  one of these.

**Decisions.** A change of the set of counted candidates is a `Decided`, which is durable before the position
that follows from it takes effect:
- `timeline`: the server is on another timeline than the record, and is not known to be one of the candidates.
- `promoted`: it is on another timeline, its own `primary_slot_name` is that of the candidate, and no such slot exists
  there: the candidate is the server. It counts again once a standby streams from a slot of that name. The timeline is
  in the same line: with two lines, a crash between them would leave the candidate counted, and nothing could change
  that. Where all members are named (`Rule.members`), this is also decided later and without a change of timeline, by
  the proofs of `slots.itself`.
- `degraded`: if the operator permits it (`on_missing = "degrade"`), a candidate that has been away (its slot does not exist,
  is lost, or is not in use) for `degrade_after` seconds while the gate needs it. A candidate that streams slowly is not
  away: it holds the gate for as long as it takes.
- `rejoined`: it streams again, at most a WAL segment behind the position shown. From here on it holds the gate again, so
  it receives the missing WAL before anything more is shown.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from walsender_bridge.capture.gate.slots import GateSlot, away, flushed_by, itself
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn

#: Bytes of WAL by which a candidate may trail the position shown and be counted again: a segment, about a second's work.
REJOIN_BYTES: Final = 16 << 20


class Standing(StrEnum):
    """Whether the gate waits for a candidate."""

    COUNTED = "counted"
    DEGRADED = "degraded"
    PROMOTED = "promoted"


class GateDecision(StrEnum):
    """The recorded decisions of the gate."""

    DEGRADED = "degraded"
    #: The server is that candidate; the timeline may differ from that of the previous line.
    PROMOTED = "promoted"
    REJOINED = "rejoined"
    #: The server is on another timeline than before, and is not known to be one of the candidates.
    TIMELINE = "timeline"


@dataclass(frozen=True, slots=True)
class Rule:
    """The configured rule. `candidates`: physical slots; `quorum`: how many of them must have a transaction (0: all).

    `members`: the server itself is one of the candidates, and is not waited for. `degrade_after`: seconds. `safekeepers`:
    whether their quorum must have the transaction too.
    """

    candidates: tuple[str, ...] = ()
    members: bool = False
    quorum: int = 0
    on_missing: Literal["block", "degrade"] = "block"
    degrade_after: float = 60.0
    safekeepers: bool = False

    @property
    def holds(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self.candidates) or self.safekeepers


@dataclass(frozen=True, slots=True)
class ObservedServer:
    """The state of the server at `now` (monotonic seconds), and the position of its safekeepers' quorum.

    `flush_lsn`: the end of its durable WAL. `was`: the slot that it streamed from as a standby (empty: unknown).
    `quorum`: the LSN that a quorum has of this timeline; None if unknown, for the reason in `quorum_why`.
    """

    now: float
    timeline: int
    flush_lsn: Lsn
    slots: Mapping[str, GateSlot]
    was: str = ""
    quorum: Lsn | None = None
    quorum_why: str = ""


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision, to be made durable before the effects after it. `position`: the position shown so far."""

    decision: GateDecision
    candidate: str
    timeline: int
    position: Lsn
    why: str


@dataclass(frozen=True, slots=True)
class Pass:
    """Transactions that end at or below `lsn` may be shown."""

    lsn: Lsn


Effect = Decided | Pass


@dataclass(slots=True)
class GateCandidate:
    """One candidate. `flush_lsn`: its flush position, as far as it is reliable; `away`: why it does not stream, or empty.

    `streams`: it streams and has caught up; `streamed`: it has done so on this timeline.
    """

    slot: str
    standing: Standing = Standing.COUNTED
    flush_lsn: Lsn = 0
    streams: bool = False
    streamed: bool = False
    away: str = ""
    away_since: float = 0.0

    @property
    def why(self) -> str:
        """Why no more than `flush_lsn` counts."""
        catches_up = "" if self.streams else ", and is catching up"
        return (
            self.away
            or f"slot {self.slot}: its standby has {format_lsn(self.flush_lsn)}{catches_up}"
        )


@dataclass(slots=True)
class GateState:
    """The gate of one session. `timeline`: the last one recorded; `shown`: at least the position that consumers have."""

    rule: Rule
    timeline: int = 0
    shown: Lsn = 0
    standings: Mapping[str, Standing] = field(default_factory=dict)
    #: Candidates that are known to have streamed from the server on this timeline.
    streamed: Collection[str] = ()
    position: Lsn = 0
    quorum: Lsn = 0
    quorum_why: str = ""
    #: Set if the server is on an older timeline than one seen before: nothing of it is shown.
    left_behind: str = ""
    candidates: dict[str, GateCandidate] = field(init=False)

    def __post_init__(self) -> None:
        self.candidates = {slot: GateCandidate(slot) for slot in self.rule.candidates}
        for each in self.candidates.values():
            each.streamed = each.slot in self.streamed
            standing = self.standings.get(each.slot, Standing.COUNTED)
            # A degraded candidate counts again when on_missing no longer permits it to be left out.
            if standing is not Standing.DEGRADED or self.rule.on_missing == "degrade":
                each.standing = standing

    @property
    def counted(self) -> list[GateCandidate]:
        """The candidates that the gate waits for."""
        return [each for each in self.candidates.values() if each.standing is Standing.COUNTED]

    @property
    def open(self) -> bool:
        """Whether everything passes although candidates are configured, because none of them is counted."""
        return bool(self.candidates) and not self.counted and not self.rule.safekeepers

    @property
    def unproven(self) -> bool:
        """Whether one of the members is the server, but it is unknown which."""
        standings = {each.standing for each in self.candidates.values()}
        return self.rule.members and Standing.PROMOTED not in standings

    def holding(self, wanted: Lsn) -> list[str]:
        """Why transactions up to `wanted` are not shown yet: a reason for each unmet condition; empty if they may be shown."""
        if self.position >= wanted:
            return []
        words = [self.left_behind] if self.left_behind else []
        if self.rule.safekeepers and self.quorum < wanted:
            words.append(
                self.quorum_why or f"a quorum of safekeepers has {format_lsn(self.quorum)}"
            )
        words += [each.why for each in self.counted if each.flush_lsn < wanted]
        if words and self.unproven:
            words.append(
                "one of the members is the server itself, which is identified once all others stream from it"
            )
        return words or ["the server has not been polled since"]


def step(state: GateState, seen: ObservedServer) -> list[Effect]:
    """Apply the observation `seen` to `state` in place and return the effects."""
    effects: list[Effect] = []
    if seen.timeline < state.timeline:
        state.left_behind = f"the server is on timeline {seen.timeline}, but another one has continued on timeline {state.timeline}"
        return effects
    if seen.timeline > state.timeline:
        effects.append(_to_timeline(state, seen))
    if proof := _proof(state, seen):
        effects.append(_promoted(state, proof))
    for each in state.candidates.values():
        _observe(each, seen)
        if each.standing is not Standing.COUNTED and each.streams:
            behind = state.shown - each.flush_lsn
            if behind <= REJOIN_BYTES:
                each.standing = Standing.COUNTED
                lacks = f", {behind} bytes behind the position shown" if behind > 0 else ""
                why = f"its standby streams again{lacks}"
                effects.append(_decided(state, GateDecision.REJOINED, each, why))
    if state.rule.on_missing == "degrade":
        effects += _degrade(state, seen.now)
    if seen.quorum is not None:
        state.quorum = max(state.quorum, seen.quorum)
    state.quorum_why = seen.quorum_why
    position = _reached(state, seen.flush_lsn)
    if position > state.position:
        state.position = position
        state.shown = max(state.shown, position)
        effects.append(Pass(position))
    return effects


def _to_timeline(state: GateState, seen: ObservedServer) -> Decided:
    """The server is on a new timeline: determine which of the candidates it is, if any, in one decision."""
    before, state.timeline = state.timeline, seen.timeline
    for each in state.candidates.values():
        each.streamed = False
        if each.standing is Standing.PROMOTED:
            # Another candidate may be the server now: this one must become a standby again.
            each.standing = Standing.COUNTED
    after = f"after timeline {before}" if before else "the first that was seen"
    proof = _proof(state, seen)
    if not proof and before and seen.was in state.candidates and seen.was not in seen.slots:
        proof = seen.was, "it has no slot of that name, which it streamed from"
    if not proof:
        return Decided(GateDecision.TIMELINE, "", seen.timeline, state.shown, after)
    return _promoted(state, proof, f" ({after})")


def _proof(state: GateState, seen: ObservedServer) -> tuple[str, str] | None:
    """Which of the members the server is, and the proof."""
    if not state.unproven:
        return None
    streamed = [each.slot for each in state.candidates.values() if each.streamed]
    return itself(state.rule.candidates, seen.slots, seen.was, streamed)


def _promoted(state: GateState, proof: tuple[str, str], more: str = "") -> Decided:
    name, how = proof
    state.candidates[name].standing = Standing.PROMOTED
    why = f"it is the server, on timeline {state.timeline}{more}: {how}"
    return _decided(state, GateDecision.PROMOTED, state.candidates[name], why)


def _observe(each: GateCandidate, seen: ObservedServer) -> None:
    slot = seen.slots.get(each.slot)
    why = away(each.slot, slot)
    if why and not each.away:
        each.away_since = seen.now
    each.away = why
    flushed = None if slot is None or why else flushed_by(slot)
    each.streams = flushed is not None
    each.streamed = each.streamed or each.streams
    if flushed is not None:
        each.flush_lsn = flushed


def _needed(state: GateState) -> int:
    counted = len(state.counted)
    return min(state.rule.quorum or counted, counted)


def _degrade(state: GateState, now: float) -> list[Effect]:
    """Stop counting candidates that have been away too long, as long as the gate needs them."""
    effects: list[Effect] = []
    for each in state.counted:
        there = sum(not other.away for other in state.counted)
        if there >= _needed(state):
            break
        if each.away and now - each.away_since >= state.rule.degrade_after:
            each.standing = Standing.DEGRADED
            why = f"for {state.rule.degrade_after:g} s: {each.away}"
            effects.append(_decided(state, GateDecision.DEGRADED, each, why))
    return effects


def _reached(state: GateState, flush_lsn: Lsn) -> Lsn:
    """The LSN that the quorum and the required number of candidates have; at most the end of the server's durable WAL."""
    position = flush_lsn
    if state.rule.safekeepers:
        position = min(position, state.quorum)
    flushed = sorted((each.flush_lsn for each in state.counted), reverse=True)
    needed = _needed(state)
    return min(position, flushed[needed - 1]) if needed else position


def _decided(state: GateState, decision: GateDecision, each: GateCandidate, why: str) -> Decided:
    return Decided(decision, each.slot, state.timeline, state.shown, why)
