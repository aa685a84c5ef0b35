"""Why streams stand still: what the repository tells `status` of replicas that it cannot commit to.

A report that cannot be placed changes nothing, so without this a stream whose replica gives such reports would
stop without a word. A fault lasts until the replica's next report is in order.

A replica that knows a version that was never issued shows that the repository lost records: it was put back from an
older copy, or its disk was. A version that is issued then would have a second meaning for those who read the
first. So none is issued, for no stream, while such a replica is known (`diverged`), and none before it could be known: when a
repository starts, every log server that has replicas answers first (`unheard`).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import structlog

from walsender_bridge.change_log.protocol import ReplicaReport
from walsender_bridge.change_log.repository.core import ReportEvaluation, StreamState
from walsender_bridge.errors import ConfigError, DivergedError, TusklineError, UnavailableError

#: Seconds for which a log server may be away before that is a fault: longer than its restart takes.
AWAY_SECONDS: Final = 15.0
#: What is left when the records of a log do not fit together.
REPAIR: Final = (
    "stop Tuskline and put back [log] data_dir and every [[log_server]] data_dir from one moment, or begin a new log:"
    " docs/log-lost.md"
)

_log = structlog.get_logger(__name__)


class LogServer(Protocol):
    """What is known of a log server. `log_server_id` is empty before its first answer; `refused`: by stream.

    `heard`: the repository has had its reports since it started.
    """

    log_server_id: str
    address: str
    answers: bool
    heard: bool
    refused: dict[str, TusklineError]


_K = TypeVar("_K", bound=LogServer)


class StreamFaults:
    """See the module. One thread at a time. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: The last evaluation on each replica, by log server and stream.
        self._evaluations: dict[tuple[str, str], ReportEvaluation] = {}
        #: Since when a log server that has replicas is away.
        self._away: dict[str, float] = {}
        self._began = clock()

    @property
    def diverged(self) -> bool:
        """Some replica knows a version that was never issued."""
        return self._ahead() is not None

    def _ahead(self) -> ReportEvaluation | None:
        return next(
            (evaluation for evaluation in self._evaluations.values() if evaluation.ahead), None
        )

    def refusal(
        self, streams: Mapping[str, StreamState], log_servers: Iterable[LogServer]
    ) -> TusklineError | None:
        """Why no version may be issued now, for no stream; None: it may."""
        if ahead := self._ahead():
            stream = ahead.report.stream
            waits = f"stream {stream} has diverged, and no version is issued until it is mended"
            return DivergedError(waits, where=f"stream {stream}", repair=REPAIR)
        known = list(log_servers)
        if copies := duplicate_ids(known):
            return _duplicate_id_fault(copies, "the log's log servers")
        if silent := unheard(streams, known):
            return UnavailableError(
                "the log server has not answered since the repository started, and no version is issued before it has",
                where=", ".join(log_server.address for log_server in silent),
                repair="see that `tuskline log-server run` runs there, and what it says",
            )
        return None

    def note(self, evaluations: Sequence[ReportEvaluation]) -> list[ReplicaReport]:
        """The reports that count; why another does not is logged once."""
        for evaluation in evaluations:
            report = evaluation.report
            key = (report.replica, report.stream)
            known = self._evaluations.get(key)
            if evaluation.reason and (known is None or known.reason != evaluation.reason):
                _log.error("report ignored", stream=report.stream, reason=evaluation.reason)
            self._evaluations[key] = evaluation
        return [evaluation.report for evaluation in evaluations if not evaluation.reason]

    def faults(
        self, streams: Mapping[str, StreamState], log_servers: Iterable[LogServer]
    ) -> dict[str, TusklineError]:
        """The fault of each stream that has one."""
        known = list(log_servers)
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

    def _fault(
        self, stream: str, replica: str, log_servers: list[LogServer]
    ) -> TusklineError | None:
        found = [k for k in log_servers if k.log_server_id == replica and k.answers]
        if not found:
            return self._away_fault(stream, replica, log_servers)
        self._away.pop(replica, None)
        if len(found) > 1:
            return _duplicate_id_fault(found, f"stream {stream}")
        [log_server] = found
        evaluation = self._evaluations.get((replica, stream))
        if evaluation is not None and evaluation.reason:
            return DivergedError(
                f"its replica does not fit the repository: {evaluation.reason}",
                where=f"stream {stream}, log server {log_server.address}",
                repair=REPAIR,
            )
        return log_server.refused.get(stream)

    def _away_fault(
        self, stream: str, replica: str, log_servers: list[LogServer]
    ) -> TusklineError | None:
        others = [
            k for k in log_servers if k.answers and (k.log_server_id, stream) in self._evaluations
        ]
        if others:
            return ConfigError(
                f"its replica is log server {replica}'s, and the log server that has it calls itself {others[0].log_server_id}",
                where=f"stream {stream}, log server {others[0].address}",
                repair=f'write {{"format": 1, "log_server_id": "{replica}"}} into log-server.json of its data_dir,'
                " and restart it",
            )
        if all(k.log_server_id and k.answers for k in log_servers):
            listed = ", ".join(f"{k.log_server_id} at {k.address}" for k in log_servers)
            return DivergedError(
                f"log server {replica} has its replica, and is none of the log servers: {listed}",
                where=f"stream {stream}",
                repair=f"give that [[log_server]] the data_dir that it had; if that is lost, {REPAIR}",
            )
        if self._clock() - self._away.setdefault(replica, self._clock()) < AWAY_SECONDS:
            return None
        return UnavailableError(
            f"its log server {replica} does not answer",
            where=f"stream {stream}",
            repair="see that `tuskline log-server run` runs there, and what it says",
        )


def duplicate_ids(log_servers: Iterable[_K]) -> list[_K]:
    """Log servers that answer and have one name: a log server, and a running copy of it. What one has on its disk, the other may not."""
    named = [
        log_server for log_server in log_servers if log_server.answers and log_server.log_server_id
    ]
    names = Counter(log_server.log_server_id for log_server in named)
    return [log_server for log_server in named if names[log_server.log_server_id] > 1]


def _duplicate_id_fault(copies: Sequence[LogServer], where: str) -> TusklineError:
    """Told is the name that the first of them shares, and who else has it."""
    name = copies[0].log_server_id
    listed = " and ".join(
        log_server.address for log_server in copies if log_server.log_server_id == name
    )
    return ConfigError(
        f"the log servers at {listed} both call themselves {name}, and no version is issued meanwhile",
        where=where,
        repair="keep the one that runs in the data_dir that the log was written to; stop the other, which runs in a"
        " copy of that, and take it out of the configuration",
    )


def unheard(
    streams: Mapping[str, StreamState], log_servers: Iterable[LogServer]
) -> list[LogServer]:
    """The log servers that may have a replica that is ahead of the repository, as far as it can know."""
    known = list(log_servers)
    heard = {log_server.log_server_id for log_server in known if log_server.heard}
    if all(heard.issuperset(stream.replicas) for stream in streams.values()):
        return []
    return [log_server for log_server in known if not log_server.heard]
