"""The faults that block streams: why the repository cannot commit to a replica, for `status`.

A report that is not accepted changes nothing, so without this module a stream whose replica sends such reports would
stop silently. A fault lasts until the replica's next valid report.

A replica that knows a version that was never issued proves that the repository has lost records: it was restored from an
older copy, or its disk was. Issuing that version again would give it a second meaning for consumers that have read the
first. So no version is issued, for any stream, while such a replica is known (`diverged`), nor before one could be known:
when a repository starts, the log servers that have replicas have to report first (`unheard`). Of a stream with several, so many
have to that any `min_replicas` of them, which may have been its members, include one: members know every commit.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from walsender_bridge.change_log.protocol import ReplicaReport
from walsender_bridge.change_log.repository.core import ReportEvaluation, StreamState
from walsender_bridge.errors import ConfigError, DivergedError, TusklineError, UnavailableError
from walsender_bridge.runtime import logs

#: Seconds without an answer after which a log server is a fault: longer than its restart takes.
AWAY_SECONDS: Final = 15.0
#: The repair when the parts of a log are inconsistent.
REPAIR: Final = (
    "stop Tuskline and restore the repository ([log] data_dir, or etcd) and every [[log_server]] data_dir from one moment, or"
    " start a new log: docs/log-lost.md"
)

#: The repair when the repository is older than a replica.
_OLDER: Final = (
    "stop Tuskline and put back the newer repository ([log] data_dir, or etcd); or remove this one, and run"
    " `tuskline log rebuild`: docs/log-lost.md"
)

#: The repair when the replica is of another log, as every one is if an empty repository was started after a loss.
_FOREIGN: Final = (
    "stop Tuskline and put back that log's repository ([log] data_dir, or etcd); if it is lost, remove this one, and run"
    " `tuskline log rebuild`; give each log its own log servers: docs/log-lost.md"
)

_log = logs.logger()


class LogServer(Protocol):
    """The repository's view of a log server. `log_server_id` is empty before its first answer; `refused`: by stream.

    `heard`: the repository has received its reports since it started. `problem`: why what answers there is not accepted.
    """

    log_server_id: str
    address: str
    answers: bool
    heard: bool
    problem: TusklineError | None
    refused: dict[str, TusklineError]


_K = TypeVar("_K", bound=LogServer)


class StreamFaults:
    """See the module. One thread at a time. `clock` counts seconds."""

    def __init__(
        self, min_replicas: int = 1, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._min_replicas = min_replicas
        self._clock = clock
        #: The last evaluation of each replica's report, by log server and stream.
        self._evaluations: dict[tuple[str, str], ReportEvaluation] = {}
        #: Since when a log server that has replicas does not answer.
        self._away: dict[str, float] = {}
        #: Since when a stream is sealed.
        self._sealed: dict[str, float] = {}
        self._began = clock()
        #: Of log servers with the same id, as it was logged last.
        self._said = ""

    @property
    def diverged(self) -> bool:
        """Whether some replica knows a version that was never issued."""
        return self._ahead() is not None

    def _ahead(self) -> ReportEvaluation | None:
        return next(
            (evaluation for evaluation in self._evaluations.values() if evaluation.ahead), None
        )

    def older(self) -> DivergedError | None:
        """Why this repository may neither issue a version nor seal: a replica is ahead of it. None: none is."""
        ahead = self._ahead()
        if ahead is None:
            return None
        stream = ahead.report.stream
        waits = f"stream {stream} has diverged, and no version is issued until it is repaired"
        return DivergedError(waits, where=f"stream {stream}", repair=_OLDER)

    def refusal(
        self, streams: Mapping[str, StreamState], log_servers: Iterable[LogServer]
    ) -> TusklineError | None:
        """Why no version may be issued for any stream; None if versions may be issued."""
        if older := self.older():
            return older
        known = list(log_servers)
        if copies := duplicate_ids(known):
            return _duplicate_id_fault(copies, "the log's log servers")
        if silent := unheard(streams, known, self._min_replicas):
            if refused := next((each.problem for each in silent if each.problem), None):
                return UnavailableError(
                    f"log server is not accepted, and no version is issued before it is: {refused.what}",
                    where=refused.where,
                    repair=refused.repair,
                )
            return UnavailableError(
                "log server has not answered since the repository started, and no version is issued before it does",
                where=", ".join(log_server.address for log_server in silent),
                repair="check that `tuskline log-server run` is running there, and see its output",
            )
        return None

    def note(self, evaluations: Sequence[ReportEvaluation]) -> list[ReplicaReport]:
        """Return the reports that are accepted; for any other the reason is logged once."""
        for evaluation in evaluations:
            report = evaluation.report
            key = (report.replica, report.stream)
            known = self._evaluations.get(key)
            if (
                evaluation.reason
                and not evaluation.outside
                and (known is None or known.reason != evaluation.reason)
            ):
                _log.error("report ignored", stream=report.stream, reason=evaluation.reason)
            self._evaluations[key] = evaluation
        return [each.report for each in evaluations if not each.reason and not each.outside]

    def is_valid(self, log_server_id: str, stream: str) -> bool:
        """Whether the last report of this replica was valid."""
        evaluation = self._evaluations.get((log_server_id, stream))
        return evaluation is not None and not evaluation.reason

    def faults(
        self,
        streams: Mapping[str, StreamState],
        log_servers: Iterable[LogServer],
        addresses: Mapping[str, str],
    ) -> dict[str, TusklineError]:
        """The faults, by stream. `addresses`: of log servers by id, as recorded when they answered last."""
        known = list(log_servers)
        found = {
            name: fault
            for name, stream in streams.items()
            for replica in stream.members
            if (fault := self._fault(name, stream, replica, known, addresses))
        }
        found = {**self._sealed_faults(streams), **found}
        waits = self.refusal(streams, known)
        self._say_copies(known)
        if self.diverged or self._clock() - self._began >= AWAY_SECONDS:
            found |= {name: waits for name in streams if waits and name not in found}
        return found

    def _say_copies(self, log_servers: Sequence[LogServer]) -> None:
        """Log, once for each time that it begins, that log servers have the same id."""
        copies = duplicate_ids(log_servers)
        found = _duplicate_id_fault(copies, "the log's log servers") if copies else None
        if found is not None and found.what != self._said:
            _log.error("log servers with the same id", reason=found.what, repair=found.repair)
        self._said = "" if found is None else found.what

    def _sealed_faults(self, streams: Mapping[str, StreamState]) -> dict[str, TusklineError]:
        """Of streams that stay sealed, which takes a moment unless too few log servers can be written."""
        now = self._clock()
        self._sealed = {
            name: self._sealed.get(name, now) for name, stream in streams.items() if stream.sealed
        }
        return {
            name: UnavailableError(
                "the stream is sealed, and nothing is committed: too few of its replicas can be written",
                where=f"stream {name}",
                repair="check that the log servers are running, and see their output",
            )
            for name, since in self._sealed.items()
            if now - since >= AWAY_SECONDS
        }

    def _fault(
        self,
        stream: str,
        state: StreamState,
        replica: str,
        log_servers: list[LogServer],
        addresses: Mapping[str, str],
    ) -> TusklineError | None:
        found = [k for k in log_servers if k.log_server_id == replica and k.answers]
        if not found:
            address = addresses.get(replica, replica)
            return self._away_fault(stream, state, replica, log_servers, address)
        self._away.pop(replica, None)
        if len(found) > 1:
            return _duplicate_id_fault(found, f"stream {stream}")
        [log_server] = found
        evaluation = self._evaluations.get((replica, stream))
        if evaluation is not None and evaluation.reason:
            return DivergedError(
                f"its replica does not match the repository: {evaluation.reason}",
                where=f"stream {stream}, log server {log_server.address}",
                repair=_repair(evaluation),
            )
        return log_server.refused.get(stream)

    def _away_fault(
        self,
        stream: str,
        state: StreamState,
        replica: str,
        log_servers: list[LogServer],
        address: str,
    ) -> TusklineError | None:
        others = [
            k
            for k in log_servers
            if k.answers
            and k.log_server_id not in state.replicas
            and (k.log_server_id, stream) in self._evaluations
        ]
        if others:
            return ConfigError(
                f"the replica belongs to log server {replica}, but the log server that has it has the id {others[0].log_server_id}",
                where=f"stream {stream}, log server {others[0].address}",
                repair=f'write {{"format": 1, "log_server_id": "{replica}"}} into log-server.json of its data_dir,'
                " and restart it",
            )
        if all(k.log_server_id and k.answers for k in log_servers):
            listed = ", ".join(f"{k.log_server_id} at {k.address}" for k in log_servers)
            return DivergedError(
                f"the replica is on log server {replica}, which is not among the log servers {listed}",
                where=f"stream {stream}",
                repair=f"configure that [[log_server]] with its former data_dir; if that is lost, {REPAIR}",
            )
        if self._clock() - self._away.setdefault(replica, self._clock()) < AWAY_SECONDS:
            return None
        if problem := problem_at(address, log_servers):
            return UnavailableError(
                f"its log server is not accepted: {problem.what}",
                where=f"stream {stream}, log server {address}",
                repair=problem.repair,
            )
        return UnavailableError(
            "its log server does not answer",
            where=f"stream {stream}, log server {address}",
            repair="check that `tuskline log-server run` is running there, and see its output",
        )


def _repair(evaluation: ReportEvaluation) -> str:
    if evaluation.ahead:
        return _OLDER
    return _FOREIGN if evaluation.foreign else REPAIR


def problem_at(address: str, log_servers: Iterable[LogServer]) -> TusklineError | None:
    """Why what answers at this address is not accepted as a log server; None: it is, or nothing answers."""
    return next((each.problem for each in log_servers if each.address == address), None)


def other_at(
    log_server: str, address: str, log_servers: Iterable[LogServer]
) -> TusklineError | None:
    """The error for another log server that answers at the address of this one; None: none does."""
    for each in log_servers:
        if each.address == address and each.answers and each.log_server_id not in {"", log_server}:
            return answers_instead(each.log_server_id, f"log server {log_server} at {address}")
    return None


def answers_instead(found: str, where: str) -> ConfigError:
    """The error for a log server whose address has been taken by another one, with the id `found`."""
    return ConfigError(
        f"another log server, {found}, answers there",
        where=where,
        repair="start the log server there with its own data_dir; if that is lost, with an empty one: docs/log-lost.md",
    )


def duplicate_ids(log_servers: Iterable[_K]) -> list[_K]:
    """Log servers that answer with the same id: one is a running copy of the other, and their disks may differ."""
    named = [
        log_server for log_server in log_servers if log_server.answers and log_server.log_server_id
    ]
    names = Counter(log_server.log_server_id for log_server in named)
    return [log_server for log_server in named if names[log_server.log_server_id] > 1]


def _duplicate_id_fault(copies: Sequence[LogServer], where: str) -> TusklineError:
    """The error, which names the id of the first of them and all log servers that have it."""
    name = copies[0].log_server_id
    listed = " and ".join(
        log_server.address for log_server in copies if log_server.log_server_id == name
    )
    return ConfigError(
        f"the log servers at {listed} have the same id {name}, and no version is issued until one is stopped",
        where=where,
        repair="keep the one whose data_dir the log was written to; stop the other, which runs in a"
        " copy, and remove it from the configuration",
    )


def unheard(
    streams: Mapping[str, StreamState], log_servers: Iterable[LogServer], min_replicas: int = 1
) -> list[LogServer]:
    """The log servers that may have a replica that is ahead of the repository."""
    known = list(log_servers)
    heard = {log_server.log_server_id for log_server in known if log_server.heard}

    def suffices(stream: StreamState) -> bool:
        silent = sum(replica not in heard for replica in stream.replicas)
        return silent < max(1, min(min_replicas, len(stream.members)))

    if all(suffices(stream) for stream in streams.values()):
        return []
    return [log_server for log_server in known if not log_server.heard]
