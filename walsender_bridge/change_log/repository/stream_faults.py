"""Why streams stand still: what the repository tells `status` of replicas that it cannot commit to.

A report that cannot be placed changes nothing, so without this a stream whose replica gives such reports would
stop without a word. A fault lasts until the replica's next report is in order.

A replica that knows a version that was never issued shows that the repository lost records: it was put back from an
older copy, or its disk was. A version that is issued then would have a second meaning for those who read the
first. So none is issued, for no stream, while such a replica is known (`diverged`), and none before it could be known: when a
repository starts, every keeper that has replicas answers first (`unheard`).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import structlog

from walsender_bridge.change_log.protocol import ReplicaReport
from walsender_bridge.change_log.repository.core import ReportVerdict, StreamState
from walsender_bridge.errors import ConfigError, DivergedError, TusklineError, UnavailableError

#: Seconds for which a keeper may be away before that is a fault: longer than its restart takes.
AWAY_SECONDS: Final = 15.0
#: What is left when the records of a log do not fit together.
REPAIR: Final = (
    "stop Tuskline and put back [log] data_dir and every [[keeper]] data_dir from one moment, or begin a new log:"
    " docs/log-lost.md"
)

_log = structlog.get_logger(__name__)


class Keeper(Protocol):
    """What is known of a keeper. `keeper_id` is empty before its first answer; `refused`: by stream.

    `heard`: the repository has had its reports since it started.
    """

    keeper_id: str
    address: str
    answers: bool
    heard: bool
    refused: dict[str, TusklineError]


_K = TypeVar("_K", bound=Keeper)


class StreamFaults:
    """See the module. One thread at a time. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: The last verdict on each replica, by keeper and stream.
        self._verdicts: dict[tuple[str, str], ReportVerdict] = {}
        #: Since when a keeper that has replicas is away.
        self._away: dict[str, float] = {}
        self._began = clock()

    @property
    def diverged(self) -> bool:
        """Some replica knows a version that was never issued."""
        return self._ahead() is not None

    def _ahead(self) -> ReportVerdict | None:
        return next((verdict for verdict in self._verdicts.values() if verdict.ahead), None)

    def refusal(
        self, streams: Mapping[str, StreamState], keepers: Iterable[Keeper]
    ) -> TusklineError | None:
        """Why no version may be issued now, for no stream; None: it may."""
        if ahead := self._ahead():
            stream = ahead.report.stream
            waits = f"stream {stream} has diverged, and no version is issued until it is mended"
            return DivergedError(waits, where=f"stream {stream}", repair=REPAIR)
        known = list(keepers)
        if copies := twins(known):
            return _twin_fault(copies, "the log's keepers")
        if silent := unheard(streams, known):
            return UnavailableError(
                "the keeper has not answered since the repository started, and no version is issued before it has",
                where=", ".join(keeper.address for keeper in silent),
                repair="see that `tuskline keeper run` runs there, and what it says",
            )
        return None

    def note(self, verdicts: Sequence[ReportVerdict]) -> list[ReplicaReport]:
        """The reports that count; why another does not is logged once."""
        for verdict in verdicts:
            report = verdict.report
            key = (report.replica, report.stream)
            known = self._verdicts.get(key)
            if verdict.reason and (known is None or known.reason != verdict.reason):
                _log.error("report ignored", stream=report.stream, reason=verdict.reason)
            self._verdicts[key] = verdict
        return [verdict.report for verdict in verdicts if not verdict.reason]

    def look(
        self, streams: Mapping[str, StreamState], keepers: Iterable[Keeper]
    ) -> dict[str, TusklineError]:
        """The fault of each stream that has one."""
        known = list(keepers)
        found = {
            name: fault
            for name, stream in streams.items()
            for replica in stream.replicas
            if (fault := self._fault(name, replica, known))
        }
        waits = self.refusal(streams, known)
        if self.diverged or self._clock() - self._began >= AWAY_SECONDS:
            found |= {name: waits for name in streams if waits and name not in found}
        return found

    def _fault(self, stream: str, replica: str, keepers: list[Keeper]) -> TusklineError | None:
        found = [k for k in keepers if k.keeper_id == replica and k.answers]
        if not found:
            return self._away_fault(stream, replica, keepers)
        self._away.pop(replica, None)
        if len(found) > 1:
            return _twin_fault(found, f"stream {stream}")
        [keeper] = found
        verdict = self._verdicts.get((replica, stream))
        if verdict is not None and verdict.reason:
            return DivergedError(
                f"its replica does not fit the repository: {verdict.reason}",
                where=f"stream {stream}, keeper {keeper.address}",
                repair=REPAIR,
            )
        return keeper.refused.get(stream)

    def _away_fault(self, stream: str, replica: str, keepers: list[Keeper]) -> TusklineError | None:
        others = [k for k in keepers if k.answers and (k.keeper_id, stream) in self._verdicts]
        if others:
            return ConfigError(
                f"its replica is keeper {replica}'s, and the keeper that has it calls itself {others[0].keeper_id}",
                where=f"stream {stream}, keeper {others[0].address}",
                repair=f'write {{"format": 1, "keeper_id": "{replica}"}} into keeper.json of its data_dir,'
                " and restart it",
            )
        if all(k.keeper_id and k.answers for k in keepers):
            listed = ", ".join(f"{k.keeper_id} at {k.address}" for k in keepers)
            return DivergedError(
                f"keeper {replica} has its replica, and is none of the keepers: {listed}",
                where=f"stream {stream}",
                repair=f"give that [[keeper]] the data_dir that it had; if that is lost, {REPAIR}",
            )
        if self._clock() - self._away.setdefault(replica, self._clock()) < AWAY_SECONDS:
            return None
        return UnavailableError(
            f"its keeper {replica} does not answer",
            where=f"stream {stream}",
            repair="see that `tuskline keeper run` runs there, and what it says",
        )


def twins(keepers: Iterable[_K]) -> list[_K]:
    """Keepers that answer and have one name: a keeper, and a running copy of it. What one has on its disk, the other may not."""
    named = [keeper for keeper in keepers if keeper.answers and keeper.keeper_id]
    names = Counter(keeper.keeper_id for keeper in named)
    return [keeper for keeper in named if names[keeper.keeper_id] > 1]


def _twin_fault(copies: Sequence[Keeper], where: str) -> TusklineError:
    """Told is the name that the first of them shares, and who else has it."""
    name = copies[0].keeper_id
    listed = " and ".join(keeper.address for keeper in copies if keeper.keeper_id == name)
    return ConfigError(
        f"the keepers at {listed} both call themselves {name}, and no version is issued meanwhile",
        where=where,
        repair="keep the one that runs in the data_dir that the log was written to; stop the other, which runs in a"
        " copy of that, and take it out of the configuration",
    )


def unheard(streams: Mapping[str, StreamState], keepers: Iterable[Keeper]) -> list[Keeper]:
    """The keepers that may have a replica that is ahead of the repository, as far as it can know."""
    known = list(keepers)
    heard = {keeper.keeper_id for keeper in known if keeper.heard}
    if all(heard.issuperset(stream.replicas) for stream in streams.values()):
        return []
    return [keeper for keeper in known if not keeper.heard]
