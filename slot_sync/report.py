"""The state of the copies on each candidate, as values: `tuskline slots` prints it, and the controller publishes it.

A candidate is ready when the copy of each selected slot is safe: a promotion at that moment would lose nothing that the
slot stands for. Readiness is unknown when the candidate did not answer. With the primary down the verdict is the last one
that rested on it, and `age` is its age.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from slot_sync.apply import does_something
from slot_sync.resolver.observed import ObservedPrimary, ObservedStandby, StandbyRecord
from slot_sync.resolver.transitions import CopyState, Transition
from slot_sync.status_record import CandidateRecord, CopyRecord, SlotsStatus
from walsender_bridge.errors import TusklineError
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.runtime.error_record import ErrorRecord


@dataclass(frozen=True)
class SlotRound:
    """One probe of a candidate, and its result. `at`: Unix seconds.

    `failures`: by slot, the error of the last action on it. `busy`: by slot, the seconds since its action was submitted.
    """

    candidate: str
    where: str
    at: float
    transitions: tuple[Transition, ...]
    record: StandbyRecord
    primary: ObservedPrimary | None
    standby: ObservedStandby | None
    primary_error: TusklineError | None = None
    standby_error: TusklineError | None = None
    failures: Mapping[str, TusklineError] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)

    @property
    def expected(self) -> tuple[Transition, ...]:
        """The transitions of the selected slots."""
        return tuple(each for each in self.transitions if each.counts)

    @property
    def ready(self) -> bool | None:
        """Whether the candidate may be promoted; None: unknown."""
        if self.standby is None:
            return None
        if self.primary is None and not self.expected:
            return None
        if any(not each.safe and not each.undecided for each in self.expected):
            return False
        return None if any(each.undecided for each in self.expected) else True

    @property
    def problems(self) -> list[str]:
        """The problems, one line each."""
        words = []
        for server, error in (("primary", self.primary_error), ("standby", self.standby_error)):
            if error is not None:
                place = f" ({error.where})" if error.where else ""
                words.append(f"{self.candidate}: the {server} does not answer: {error.what}{place}")
        for each in self.transitions:
            failure = self.failures.get(each.slot)
            if failure is not None:
                repair = f"; {failure.repair}" if failure.repair else ""
                words.append(
                    f"{self.candidate}: slot {each.slot}: {failure.what.rstrip('.')}{repair}"
                )
            if not each.safe and each.repair:
                words.append(f"{self.candidate}: slot {each.slot}: {each.why}; {each.repair}")
        return words

    @property
    def not_known(self) -> list[str]:
        """What the verdict does not cover, one line each, without repetition."""
        words = {word: None for each in self.expected for word in each.not_known}
        return [f"{self.candidate}: not known: {word}" for word in words]

    def status(self) -> CandidateRecord:
        """The status of the candidate."""
        return CandidateRecord(
            standby=self.candidate,
            where=self.where,
            ready=self.ready,
            at=self.at,
            not_known=tuple(self.not_known),
            primary_error=_error(self.primary_error),
            standby_error=_error(self.standby_error),
        )

    def copies(self) -> list[CopyRecord]:
        """The status of each copy."""
        return [self._copy(each) for each in self.transitions]

    def _copy(self, each: Transition) -> CopyRecord:
        remembered = self.record.of(each.slot)
        return CopyRecord(
            standby=self.candidate,
            slot=each.slot,
            state=each.after,
            safe=each.safe,
            expected=each.counts,
            reason=each.reason,
            why=each.why,
            repair=each.repair,
            not_known=tuple(each.not_known),
            lag_bytes=self._lag(each.slot),
            age=self._age(
                remembered.synced_at if each.after is CopyState.SYNCED else remembered.proven_at
            ),
            action=type(each.action).__name__ if does_something(each.action) else None,
            failure=_error(self.failures.get(each.slot)),
            busy_seconds=round(self.busy[each.slot], 3) if each.slot in self.busy else None,
            evidence={name: _shown(name, value) for name, value in each.evidence.items()},
        )

    def _age(self, proven_at: int | None) -> float | None:
        """Seconds since the last proof, by the standby's clock; None: there is none, or this is not known."""
        if proven_at is None or self.standby is None:
            return None
        return round(max(0, self.standby.clock - proven_at) / 1e6, 3)

    def _lag(self, name: str) -> int | None:
        """Bytes of WAL between the slot and its copy; None: not known."""
        slot = None if self.primary is None else self.primary.logical(name)
        copy = None if self.standby is None else self.standby.slot(name)
        if slot is None or copy is None:
            return None
        if slot.confirmed_flush_lsn is None or copy.confirmed_flush_lsn is None:
            return None
        return max(0, slot.confirmed_flush_lsn - copy.confirmed_flush_lsn)


def _error(error: TusklineError | None) -> ErrorRecord | None:
    return None if error is None else ErrorRecord.of(error)


def _shown(name: str, value: object) -> object:
    """A value of the evidence, with LSNs as PostgreSQL writes them. A pair is the slot's value and its copy's."""
    if isinstance(value, tuple):
        return [_shown(name, each) for each in value]
    return format_lsn(value) if name.endswith("_lsn") and isinstance(value, int) else value


@dataclass(frozen=True)
class SlotReport:
    """All candidates. `active`: this controller is the active one; None: it was only a probe."""

    rounds: Mapping[str, SlotRound]
    active: bool | None = None

    def __getitem__(self, candidate: str) -> SlotRound:
        return self.rounds[candidate]

    @property
    def ready(self) -> bool | None:
        """Whether all candidates are ready; None: none is known not to be, but one is unknown."""
        found = {each.ready for each in self.rounds.values()}
        return False if False in found else None if None in found or not found else True

    def status(self) -> SlotsStatus:
        """The report as the controller publishes it."""
        rounds = self.rounds.values()
        return SlotsStatus(
            ready=self.ready,
            active=self.active,
            problems=tuple(word for each in rounds for word in each.problems),
            not_known=tuple(word for each in rounds for word in each.not_known),
            standbys=tuple(each.status() for each in rounds),
            slots=tuple(copy for each in rounds for copy in each.copies()),
        )
