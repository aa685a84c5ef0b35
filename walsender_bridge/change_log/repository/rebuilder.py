"""Builds a lost repository again: reads the log servers, seals and fences their replicas, and returns the new state.

What is decided, and why it is safe: `rebuild.py`.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.actions import Empty
from walsender_bridge.change_log.log_server_messages import ReplicaDescription
from walsender_bridge.change_log.protocol import (
    MAX_COUNT,
    CommitContext,
    IssuedCommit,
    ReplicaReport,
    ReplicaStatus,
)
from walsender_bridge.change_log.replica import commit_rows
from walsender_bridge.change_log.replica.disk import IndexRow
from walsender_bridge.change_log.repository import rebuild
from walsender_bridge.change_log.repository.core import Repository
from walsender_bridge.change_log.repository.log_server_link import LogServerLink
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.change_log.repository.rebuild import (
    AskedLogServer,
    Offer,
    RebuildPlan,
    StreamHistory,
    StreamPlan,
)
from walsender_bridge.errors import (
    FencedError,
    InvalidReplicaError,
    RunningError,
    TrimmedError,
    TusklineError,
    UnavailableError,
    UsageError,
)
from walsender_bridge.runtime import listening
from walsender_bridge.runtime.listening import Reach
from walsender_bridge.runtime.tls_files import TlsFiles

#: Seconds for an answer, and for a synchronization.
_ANSWER: Final = 10.0
_SYNCHRONIZING: Final = 3600.0
#: Seconds for which a port refuses connections until no repository has it, and between two attempts.
_REFUSING: Final = 1.0
_PAUSE: Final = 0.2
#: Rows of one answer.
_PAGE: Final = 2000


class Rebuilder:
    """See the module. `addresses`: of all configured log servers; `given_up`: of those that are lost. `say`: progress."""

    def __init__(
        self,
        addresses: Sequence[str],
        policy: ReplicationPolicy,
        *,
        given_up: Collection[str] = (),
        tls: TlsFiles | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        if unknown := sorted({*given_up} - {*addresses}):
            raise UsageError(
                "no log server is configured under this address",
                where=", ".join(unknown),
                repair=f"name one of: {', '.join(addresses)}",
            )
        self._policy = policy
        self._given_up = given_up
        self._say = say
        self._links = {each: LogServerLink(each, tls) for each in addresses}
        self.servers: list[AskedLogServer] = []
        self.offers: list[Offer] = []

    def close(self) -> None:
        """Close the connections."""
        for link in self._links.values():
            link.close()

    # -- reading ------------------------------------------------------------------------------------

    def look(self) -> RebuildPlan:
        """Read all replicas, and decide. Changes nothing. Raises the refusals of `rebuild.plan`."""
        with ThreadPoolExecutor(len(self._links), "log_server") as pool:
            found = [*pool.map(self._ask, self._links)]
        self.servers = [server for server, _ in found]
        self.offers = [offer for _, offers in found for offer in offers]
        return rebuild.plan(self.servers, self.offers, self._policy)

    def _ask(self, address: str) -> tuple[AskedLogServer, list[Offer]]:
        link, given_up = self._links[address], address in self._given_up
        try:
            answer = self._replicas_of(link)
            link.log_server_id = answer.log_server
            offers = [self._offer(link, each) for each in answer.replicas]
        except UnavailableError as error:
            self._say(f"log server {address}: {error.what}")
            return AskedLogServer(address, given_up=given_up), []
        return AskedLogServer(address, link.log_server_id, given_up), offers

    @staticmethod
    def _replicas_of(link: LogServerLink) -> m.ReplicasAnswer:
        """Its answer, to a second question if need be: a connection that has just ended says nothing of a log server."""
        try:
            return link.call(m.REPLICAS, Empty(), within=_ANSWER)
        except UnavailableError:
            return link.call(m.REPLICAS, Empty(), within=_ANSWER)

    @staticmethod
    def _offer(link: LogServerLink, found: ReplicaDescription) -> Offer:
        status, reason, source = found.status, found.reason, found.syncing_from
        if found.replaced_by:
            reason, source = reason or rebuild.REPLACED, ""
        if status is None:
            reason, its = reason or "it cannot be read", link.log_server_id
            return Offer(its, found.stream, "", reason, 0, 1, 1, None, source=source)
        last = None
        if not reason and status.low_offset < status.committed_end:
            request = m.CommitsRequest(found.stream, status.committed_end - 1, 1)
            with contextlib.suppress(TrimmedError):
                rows = link.call(m.COMMITS, request, within=_ANSWER).commits
                last = commit_rows.of_values(rows[0]) if rows else None
        return Offer(
            log_server=link.log_server_id,
            stream=found.stream,
            log_id=status.log_id,
            reason=reason,
            term=status.term,
            low_offset=status.low_offset,
            committed_end=status.committed_end,
            context=found.context,
            bytes_total=status.bytes_total,
            last=last,
            source=source,
        )

    def _link(self, log_server: str) -> LogServerLink:
        return next(each for each in self._links.values() if each.log_server_id == log_server)

    # -- sealing, synchronizing, fencing ------------------------------------------------------------

    def rebuild(self, plan: RebuildPlan, *, hold: float) -> Repository:
        """Seal the replicas, bring further ones in sync, fence them, and return the state of the new store.

        Raises `UnavailableError` if a replica has changed since `look`, too few can be brought in sync, or there is another
        stream; and the errors of the log servers.
        """
        histories = {each.stream: self._stream(plan, each) for each in plan.streams}
        self._check_streams(plan)
        return rebuild.rebuilt(
            plan,
            histories,
            {
                each.log_server_id: each.address
                for each in self._links.values()
                if each.log_server_id
            },
            replicas=self._policy.replicas,
            now=time.time(),
            hold=hold,
        )

    def _stream(self, plan: RebuildPlan, stream: StreamPlan) -> StreamHistory:
        rows = [*self._rows(stream)]
        behind = [
            each
            for each in self.offers
            if each.stream == stream.stream and each.log_server in stream.behind
        ]
        rebuild.check_history(stream.stream, behind, rows)
        sealed = {
            each: self._seal(plan, stream, each) for each in (*stream.members, *stream.behind)
        }
        known = rebuild.with_told(stream, sealed)
        context = rebuild.newest_context(stream, self.offers)
        if known != stream and context is not None:
            for each in stream.members:
                self._learn(plan, stream, each, context)
        for each in {*stream.members} - {*known.members}:
            # It has all commits, and would not take part in a synchronization otherwise.
            self._seal(plan, replace(stream, end=MAX_COUNT), each)
        members = self._members(plan, known)
        statuses = [self._fence(plan, stream, each) for each in members]
        rebuild.check_sealed(plan, stream, statuses)
        low_offset = max(each.low_offset for each in statuses)
        return StreamHistory(members, rows, self._report(known).position, low_offset)

    def _check_streams(self, plan: RebuildPlan) -> None:
        """Raise `UnavailableError` if there is a stream that `look` did not find: it is not sealed, and may have commits.

        Behind the fence, an old repository that hears of it commits to no stream, whenever it was created.
        """
        known = {each.stream for each in plan.streams}
        for link in (each for each in self._links.values() if each.log_server_id):
            found = link.call(m.REPLICAS, Empty(), within=_ANSWER).replicas
            if new := sorted({each.stream for each in found} - known):
                raise UnavailableError(
                    "a stream was created while the repository was rebuilt",
                    where=f"stream {new[0]}, {link.address}",
                    repair="stop the repository that created it, then try again",
                )

    def _rows(self, stream: StreamPlan) -> Iterator[IndexRow]:
        """The commits that the source has, which do not change up to the stream's end."""
        after = stream.low_offset
        while after < stream.end:
            request = m.CommitsRequest(stream.stream, after, _PAGE)
            answer = self._link(stream.source).call(m.COMMITS, request, within=_ANSWER)
            rows = [commit_rows.of_values(each) for each in answer.commits]
            if not rows or rows[-1].context.end <= after:
                return
            yield from (row for row in rows if row.context.end <= stream.end)
            after = rows[-1].context.end

    def _seal(self, plan: RebuildPlan, stream: StreamPlan, log_server: str) -> ReplicaStatus:
        request = m.SealRequest(stream.stream, stream.end, stream.term, plan.fence)
        try:
            return self._link(log_server).call(m.SEAL, request, within=_ANSWER)
        except (FencedError, InvalidReplicaError) as error:
            # It has a newer term, or has committed more, than when it was read.
            raise rebuild.changed(stream.stream, error.what) from error

    def _members(self, plan: RebuildPlan, stream: StreamPlan) -> tuple[str, ...]:
        """The members, with those that lack little, and as many more as each stream needs."""
        members = [*stream.members]
        for each in stream.to_synchronize:
            if each in stream.near or len(members) < plan.least:
                self._say(f"stream {stream.stream}: synchronizing log server {each}")
                try:
                    if each in stream.learning:
                        self._seal_old(plan, stream, each)
                    self._synchronize(stream, each, plan.log_id)
                except TusklineError as error:
                    self._say(f"stream {stream.stream}: log server {each}: {error.what}")
                else:
                    members.append(each)
        if len(members) < plan.least:
            raise UnavailableError(
                f"{len(members)} replicas are in sync, and a stream needs {plan.least}",
                where=f"stream {stream.stream}",
                repair="see the output of the log servers, then try again",
            )
        return tuple(members)

    def _seal_old(self, plan: RebuildPlan, stream: StreamPlan, log_server: str) -> None:
        """Seal a replica that missed an earlier rebuild, if it is one: it would not take part in a synchronization otherwise."""
        with contextlib.suppress(TusklineError):
            self._seal(plan, replace(stream, end=MAX_COUNT), log_server)

    def _synchronize(self, stream: StreamPlan, log_server: str, log_id: str) -> None:
        self._link(log_server).learn(stream.stream, log_id)
        request = m.SynchronizeRequest(
            stream.stream, self._link(log_server).address, throttled=False
        )
        self._link(stream.source).call(m.SYNCHRONIZE, request, within=_SYNCHRONIZING)

    def _fence(self, plan: RebuildPlan, stream: StreamPlan, log_server: str) -> ReplicaStatus:
        """Have a member learn the fence."""
        return self._learn(plan, stream, log_server, plan.fence_of(stream))

    def _learn(
        self, plan: RebuildPlan, stream: StreamPlan, log_server: str, context: CommitContext
    ) -> ReplicaStatus:
        """Have a member that is sealed learn an empty version; the second seal makes it durable."""
        commits = {stream.stream: (IssuedCommit(context),)}
        link = self._link(log_server)
        answer = link.call(m.COMMIT, m.CommitRequest(commits, 0), within=_ANSWER)
        if refused := answer.refused.get(stream.stream):
            raise refused.error()
        return self._seal(plan, stream, log_server)

    def _report(self, stream: StreamPlan) -> ReplicaReport:
        answer = self._link(stream.source).call(m.REPORT, Empty(), within=_ANSWER)
        return next(each for each in answer.reports if each.stream == stream.stream)


# -- the old repository ---------------------------------------------------------------------------


def refuse_running(
    listens: Sequence[str], stopped: Collection[str] = (), log_servers: Collection[str] = ()
) -> None:
    """Raise `RunningError` if a repository of this log may be running at one of these addresses, `host:port`.

    `stopped`: those that are known to be stopped although their machines do not say so. Raises `UnavailableError` for another
    one whose machine does not answer: it may be cut off from this machine alone, and its repository may run. The same holds for
    another machine that refuses connections, since a firewall does that, too, unless one of `log_servers` accepts them there.
    """
    if unknown := sorted({*stopped} - {*listens}):
        raise UsageError(
            "no repository is configured under this address",
            where=", ".join(unknown),
            repair=f"name one of: {', '.join(listens)}",
        )
    found = {listen: _reach(listen) for listen in listens}
    for listen, reach in found.items():
        if reach is Reach.ACCEPTED:
            raise RunningError(
                "a program listens here: a repository of this log may run",
                where=listen,
                repair="stop it, and all others of this log (`tuskline down`), before you rebuild one",
            )
    asked = {each: reach for each, reach in found.items() if each not in stopped}
    silent = [each for each, reach in asked.items() if reach is Reach.SILENT]
    rejected = [
        each
        for each, reach in asked.items()
        if reach is Reach.REFUSED and not _is_stopped(each, log_servers)
    ]
    for left, what in (
        (silent, "its machine does not answer"),
        (rejected, "its machine, or a firewall, refuses connections"),
    ):
        if left:
            options = " ".join(f"--stopped {each}" for each in (*silent, *rejected))
            raise UnavailableError(
                f"{what}, so it is not known whether a repository runs there",
                where=", ".join(left),
                repair=f"check the network; if the machine is switched off, or its repository is stopped, add {options}",
            )


def _is_stopped(listen: str, log_servers: Collection[str]) -> bool:
    """Whether a refused connection says that nothing listens: to this machine, or to one that accepts others."""
    host = listen.rpartition(":")[0]
    if listening.is_own(host):
        return True
    there = [each for each in log_servers if each.rpartition(":")[0] == host]
    return any(listening.reach(each, seconds=_ANSWER / 2) is Reach.ACCEPTED for each in there)


def _reach(listen: str) -> Reach:
    """What listens there. A repository that takes a new certificate refuses connections for a moment."""
    deadline = time.monotonic() + _REFUSING
    while True:
        found = listening.reach(listen, seconds=_ANSWER / 2)
        if found is not Reach.REFUSED or time.monotonic() >= deadline:
            return found
        time.sleep(_PAUSE)
