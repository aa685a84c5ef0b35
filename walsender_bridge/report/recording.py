"""What a report is made of: observations over time, the epochs of that time, and what was killed. Pure.

A *sample* is what a report keeps of an observation. An *outage* of a process lasts from the first sample, or the kill, that shows it gone
until the first sample in which it runs again, with another pid. Its end is known as exactly as samples are frequent.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from walsender_bridge.observability import lag

if TYPE_CHECKING:
    from spark_consumers.lake.manifest.chain import Manifest
    from walsender_bridge.observability.observation import Observation

_RUNNING = "running"


@dataclass(frozen=True, slots=True)
class StageLag:
    """How far a stage of a source is behind the previous one (`observability.lag`); None: unknown."""

    source: str
    stage: str
    bytes: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Sample:
    """An observation. `at`: seconds since the Unix epoch; `pids`: of the processes that run, by name (None: it is down)."""

    at: float
    lags: tuple[StageLag, ...]
    pids: Mapping[str, int | None]
    problems: tuple[str, ...]
    degraded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EpochMark:
    """A published epoch.

    `at`: seconds since the Unix epoch; `seconds`: of the round that wrote it; `ages`: of each stream's newest transaction in it when it was
    published, in seconds.
    """

    at: float
    epoch: int
    term: int
    seconds: float
    changes: int
    ages: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Kill:
    """A process, or a server, that was killed on purpose."""

    at: float
    what: str


@dataclass(frozen=True, slots=True)
class Outage:
    """A process that was down; `end` is None if it still is."""

    process: str
    begin: float
    end: float | None


@dataclass(frozen=True, slots=True)
class Delay:
    """A commit, and the seconds until an epoch had it."""

    at: float
    seconds: float


@dataclass(frozen=True)
class Recording:
    """All of it. `every`: seconds between samples; `figures`: what else is to be said, by name."""

    title: str
    every: float
    samples: Sequence[Sample]
    epochs: Sequence[EpochMark]
    kills: Sequence[Kill] = ()
    delays: Sequence[Delay] = ()
    figures: Mapping[str, object] = field(default_factory=dict)

    @property
    def begin(self) -> float:
        """The time of the first sample; 0 if there is none."""
        return self.samples[0].at if self.samples else 0.0

    @property
    def end(self) -> float:
        """The time of the last sample; at least a second after the first."""
        return max(self.samples[-1].at, self.begin + 1.0) if self.samples else 1.0


def sample(seen: "Observation") -> Sample:
    """What a report keeps of an observation."""
    return Sample(
        at=seen.at,
        lags=tuple(
            StageLag(each.source, each.stage, each.bytes, each.seconds)
            for each in lag.of_sources(seen)
        ),
        pids={p.name: p.pid if p.state == _RUNNING else None for p in seen.processes},
        problems=tuple(seen.problems),
        degraded=tuple(seen.degraded),
    )


def epochs(newest_first: Iterable["Manifest"], since: float) -> list[EpochMark]:
    """The epochs that were published at or after `since`, oldest first, of these links. A takeover publishes none."""
    found = []
    for link in newest_first:
        if link.published_at < since:
            break
        if link.previous_epoch < link.epoch and link.tables:
            found.append(_mark(link))
    return found[::-1]


def _mark(link: "Manifest") -> EpochMark:
    ages = {
        name: max(0.0, link.published_at - position.commit_time / 1e6)
        for name, position in link.streams.items()
        if position.commit_time
    }
    return EpochMark(link.published_at, link.epoch, link.term, link.seconds, link.changes, ages)


def outages(samples: Sequence[Sample]) -> list[Outage]:
    """When each process was down, by process and time."""
    names = sorted({name for each in samples for name in each.pids})
    return [outage for name in names for outage in _outages_of(name, samples)]


def _outages_of(name: str, samples: Sequence[Sample]) -> Iterator[Outage]:
    down_since: float | None = None
    for before, after in pairwise(samples):
        was, now = before.pids.get(name), after.pids.get(name)
        if was is not None and now != was:
            # With another pid already: it ended and began between the two samples.
            down_since = before.at
        if now is not None and down_since is not None:
            yield Outage(name, down_since, after.at)
            down_since = None
    if down_since is not None:
        yield Outage(name, down_since, None)


def epoch_after(kill: Kill, marks: Sequence[EpochMark]) -> float | None:
    """Seconds from a kill to the next epoch; None: there was none."""
    return next((mark.at - kill.at for mark in marks if mark.at >= kill.at), None)


def problem_spans(samples: Sequence[Sample]) -> list[tuple[str, float, float]]:
    """Each problem, and when it was first and last seen, in the order of the first."""
    spans: dict[str, tuple[float, float]] = {}
    for each in samples:
        for problem in (*each.problems, *each.degraded):
            first, _ = spans.get(problem, (each.at, each.at))
            spans[problem] = (first, each.at)
    return [(problem, first, last) for problem, (first, last) in spans.items()]
