"""The repository's connections to the log servers: collects reports and sends commits.

A log server may be down, hang or return with an empty disk at any moment. Nothing is assumed about it: the commits to
send follow from its latest report, so a lost commit is simply sent again, and
commits cannot be reordered.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TypeVar

from walsender_bridge.change_log import actions
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.connection import Connection, Service
from walsender_bridge.change_log.protocol import IssuedCommit, ReplicaReport
from walsender_bridge.change_log.repository.core import StreamState
from walsender_bridge.change_log.repository.stream_faults import duplicate_ids
from walsender_bridge.errors import (
    MalformedMessageError,
    NotSupportedError,
    PrivilegeError,
    TusklineError,
    UnavailableError,
    UntrustedServiceError,
)
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.certificate_holder import Role
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.tls_files import TlsFiles

#: Seconds to wait for a log server's answer.
_ANSWER = 5.0
#: Commits per call to a replica that is far behind.
_MOST_COMMITS = 1000
#: Seconds that a log server has to start together with its bridge before a missing answer is logged as a warning.
_STARTING = 30.0
#: Seconds after which the answer to a request is overdue.
_OVERDUE = 1.0

_log = logs.logger()
_R = TypeVar("_R")
_A = TypeVar("_A")


class LogServerLink:
    """One log server. `log_server_id` is known once it has answered."""

    def __init__(self, address: str, tls: TlsFiles | None = None) -> None:
        self._connection = Connection(address, tls, role=Role.LOG_SERVER, within=_ANSWER)
        self.address = self._connection.address
        self.log_server_id = ""
        self.answers = True
        #: Why its last answer, or its certificate, was not accepted; None: it was, or it does not answer.
        self.problem: TusklineError | None = None
        #: Whether its reports have been received at least once.
        self.heard = False
        #: The streams that it reported last.
        self.reported: frozenset[str] = frozenset()
        #: Whether an answer is overdue: then no step waits for it.
        self.late = False
        #: The pending request for a report.
        self.asked: Future[list[ReplicaReport]] | None = None
        #: When it was begun, in seconds of `time.monotonic`.
        self.asked_at = 0.0
        #: When it was sent; infinite: not yet, as the log server's certificate is looked at first.
        self.sent_at = math.inf
        #: When the commits were sent that it has not answered, in the same seconds; None: it has answered all.
        self.committing_since: float | None = None
        #: By stream: why its replica refused the commits sent last, or is not used.
        self.refused: dict[str, TusklineError] = {}
        #: Newest version sent to each stream since the log server last failed to answer.
        self.sent: dict[str, int] = {}
        self._began = time.monotonic()
        #: Whether its missing answer has been logged.
        self._warned = False

    def call(self, action: actions.Action[_R, _A], request: _R, *, within: float = _ANSWER) -> _A:
        """Perform an action. Raises the log server's error, or `UnavailableError`."""
        with self._connection.use(action.streams(request)) as service:
            return actions.call(service.client, self.address, action, request, within)

    def learn(self, stream: str, log_id: str) -> None:
        """Have it host a replica that can be synchronized, unless it has one. Raises as `call`."""
        # An earlier version makes one by itself, and knows no such action, as an action or as anybody's.
        with suppress(NotSupportedError, PrivilegeError):
            self.call(m.LEARN, m.CreateRequest(stream, log_id))

    def report(self) -> list[ReplicaReport]:
        """Request the reports of its replicas."""
        with self._connection.use() as service:
            self.sent_at = time.monotonic()
            answer = actions.call(service.client, self.address, m.REPORT, actions.Empty(), _ANSWER)
        reports = self._own(service, answer.log_server, answer.reports)
        self.log_server_id, self._warned, self.problem = answer.log_server, False, None
        return reports

    def commit(
        self, commits: Mapping[str, tuple[IssuedCommit, ...]], now: float
    ) -> tuple[list[ReplicaReport], Mapping[str, ErrorRecord]]:
        """Send commits with the time of the steady clock. Returns the reports after them, and what was refused."""
        request = m.CommitRequest(commits, int(now * 1e6))
        with self._connection.use(m.COMMIT.streams(request)) as service:
            answer = actions.call(service.client, self.address, m.COMMIT, request, _ANSWER)
        return self._own(service, self.log_server_id, answer.reports), answer.refused

    def _own(
        self, service: Service, log_server_id: str, reports: Iterable[ReplicaReport]
    ) -> list[ReplicaReport]:
        """The reports of a log server, which speaks for its own replicas alone: each is one vote for a commit.

        Those of streams that its certificate does not name are left out.
        """
        found = {report.stream: report for report in reports}
        if other := next((r for r in found.values() if r.replica != log_server_id), None):
            raise MalformedMessageError(
                f"log server {log_server_id} reports a replica of log server {other.replica!r:.60}",
                where=f"stream {other.stream!r:.60}, {self.address}",
            )
        return [report for stream, report in found.items() if self._may_serve(service, stream)]

    def _may_serve(self, service: Service, stream: str) -> bool:
        """Whether the log server's certificate names the stream. If not, that is the stream's fault, and no other's."""
        try:
            service.check([stream])
        except UntrustedServiceError as error:
            self.refused[stream] = error
            return False
        if isinstance(self.refused.get(stream), UntrustedServiceError):
            del self.refused[stream]
        return True

    def owes(self, now: float) -> float | None:
        """When the request was sent whose answer is overdue; None: none is. In seconds of `time.monotonic`."""
        asked, committing_since = self.asked, self.committing_since
        pending = [] if asked is None or asked.done() else [self.sent_at]
        if committing_since is not None:
            pending.append(committing_since)
        return min((at for at in pending if now - at > _OVERDUE), default=None)

    def lost(self, error: TusklineError) -> None:
        """Note that the log server did not answer."""
        starts = not self.log_server_id and time.monotonic() - self._began < _STARTING
        if not self._warned and not starts:
            _log.warning(
                "log server does not answer",
                log_server=self.address,
                error=error.what,
                repair=error.repair,
            )
            self._warned = True
        self.answers = False
        away = isinstance(error, UnavailableError) and not isinstance(error, UntrustedServiceError)
        self.problem = None if away else error
        self.sent.clear()
        self.refused.clear()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class LogServers:
    """All log servers. Used by the ticking thread; `answering` and `call` also by other threads."""

    def __init__(self, addresses: Sequence[str], tls: TlsFiles | None = None) -> None:
        self._links = [LogServerLink(address, tls) for address in addresses]
        # One that does not answer may keep two threads: its reports, and commits.
        self._pool = ThreadPoolExecutor(2 * len(self._links), "log_server")

    def __iter__(self) -> Iterator[LogServerLink]:
        return iter(self._links)

    def answering(self) -> list[LogServerLink]:
        """The log servers that answered last time."""
        return [link for link in self._links if link.log_server_id and link.answers]

    def with_own_id(self) -> list[LogServerLink]:
        """The log servers that answered last time and whose id is unique."""
        copies = duplicate_ids(self._links)
        return [link for link in self.answering() if link not in copies]

    def ask(self, *, within: float) -> list[ReplicaReport]:
        """Return the reports that arrive in time; a request that is still pending is not sent again."""
        for link in self._links:
            if link.asked is None:
                link.asked_at, link.sent_at = time.monotonic(), math.inf
                link.asked = self._pool.submit(link.report)
        wait([link.asked for link in self._links if link.asked and not link.late], timeout=within)
        arrived: list[tuple[LogServerLink, list[ReplicaReport]]] = []
        for link in self._links:
            if link.asked is None or not link.asked.done():
                link.late = True
                continue
            link.late = False
            future, link.asked = link.asked, None
            try:
                arrived.append((link, future.result()))
            except TusklineError as error:
                link.lost(error)
            else:
                link.answers = True
                link.reported = frozenset(report.stream for report in arrived[-1][1])
        apart = self.with_own_id()
        reports: list[ReplicaReport] = []
        for link, its in arrived:
            if link in apart:
                link.heard = True
                reports += its
        return reports

    def asked_since(self) -> float | None:
        """When the oldest request for reports was begun that is still pending; None: there is none."""
        return min((link.asked_at for link in self._links if link.asked), default=None)

    def due(
        self, reports: Sequence[ReplicaReport], streams: Mapping[str, StreamState]
    ) -> list[tuple[LogServerLink, dict[str, list[IssuedCommit]]]]:
        """The commits that each log server has missed, according to its reports."""
        due = []
        for link in self._links:
            commits: dict[str, list[IssuedCommit]] = {}
            for report in reports:
                if report.replica != link.log_server_id:
                    continue
                missed = streams[report.stream].missed(report.version)
                newest = missed[-1].context.version if missed else 0
                # An empty commit becomes durable only later: until then the report does not show it.
                sent = link.sent.get(report.stream) == newest
                if missed and not (sent and all(not each.context.length for each in missed)):
                    commits[report.stream] = missed[:_MOST_COMMITS]
                    link.sent[report.stream] = newest
            if commits:
                due.append((link, commits))
        return due

    def send(
        self,
        due: Sequence[tuple[LogServerLink, Mapping[str, Sequence[IssuedCommit]]]],
        now: float,
    ) -> list[ReplicaReport]:
        """Send each log server its commits with the time of the steady clock; return the reports after them."""
        sent = [self._pool.submit(self._send, link, commits, now) for link, commits in due]
        return [report for future in sent for report in future.result()]

    @staticmethod
    def _send(
        link: LogServerLink, commits: Mapping[str, Sequence[IssuedCommit]], now: float
    ) -> list[ReplicaReport]:
        wanted = {stream: tuple(missed) for stream, missed in commits.items()}
        link.committing_since = time.monotonic()
        try:
            reports, refused = link.commit(wanted, now)
        except TusklineError as error:
            link.lost(error)
            return []
        finally:
            link.committing_since = None
        for stream in commits:
            refusal = refused.get(stream)
            if refusal is None:
                link.refused.pop(stream, None)
                continue
            if stream not in link.refused:
                _log.error("commit refused", stream=stream, reason=refusal.what)
            link.refused[stream] = refusal.error()
        return reports

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown()
        for link in self._links:
            link.close()


def reaches(addresses: Sequence[str], least: int, tls: TlsFiles | None) -> bool:
    """Whether at least so many of these log servers answer."""
    servers = LogServers(addresses, tls)
    try:
        servers.ask(within=_ANSWER)
        return len(servers.answering()) >= least
    finally:
        servers.close()
