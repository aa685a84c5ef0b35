"""Keeps streams replicated: seals a stream to give it a writer or other members, and has replicas synchronized.

The decisions are `membership.py`'s, the state is the repository's; here are the calls to the log servers. The order makes
them safe: `StreamSealed` is durable before the first replica is sealed, so nothing is committed meanwhile;
`StreamUnsealed` names replicas that are sealed at the last commit; and a term is given out after it. If
anything fails in between, the stream stays sealed until its next writer, or the next decision, seals it again.

A stream is sealed by one thread at a time. No call to a log server holds the repository's lock.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final, TypeVar

from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.protocol import (
    MAX_COUNT,
    IssuedCommit,
    ReplicaStatus,
    is_from_before_a_rebuild,
)
from walsender_bridge.change_log.repository.core import (
    Record,
    ReplicasAssigned,
    Repository,
    StreamSealed,
    StreamUnsealed,
)
from walsender_bridge.change_log.repository.log_server_link import LogServerLink, LogServers
from walsender_bridge.change_log.repository.membership import (
    Assign,
    LeaveOut,
    LogServerView,
    Membership,
    ReplicationPolicy,
    SealAgain,
    TakeBack,
    told,
)
from walsender_bridge.errors import (
    DivergedError,
    FencedError,
    InvalidReplicaError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.runtime import logs

#: Seconds between two decisions.
_PERIOD: Final = 0.5
#: Seconds that a member has to apply the commits that it lacks when it is sealed.
_SEALING: Final = 10.0
#: Seconds that a synchronization may take; what was copied by then is kept.
_SYNCHRONIZING: Final = 3600.0
#: Replicas that are synchronized at a time.
_COPIES: Final = 4
#: Attempts that leave half of the time to others.
_THROTTLED: Final = 5
#: The same while the stream is sealed, for what came in the meantime.
_REST: Final = 10.0
#: Bytes that may be lacking when the stream is sealed to take a replica back: less than a second of them.
_LITTLE: Final = 32 << 20
#: Commits in one call.
_MOST_COMMITS: Final = 1000

_T = TypeVar("_T")

_log = logs.logger()


class Replication:
    """See the module. `state`, `record`: the repository's, to be used while `lock` is held; `now`: its steady time (microseconds)."""

    def __init__(
        self,
        policy: ReplicationPolicy,
        log_servers: LogServers,
        lock: threading.Condition,
        state: Callable[[], Repository],
        record: Callable[[Record], bool],
        now: Callable[[], int],
        reports: Callable[[], Collection[tuple[str, str]]],
        next_term: Callable[[str, Sequence[int]], int],
    ) -> None:
        self.policy = policy
        self._log_servers = log_servers
        self._lock = lock
        self._state = state
        self._record = record
        self._now = now
        #: The streams and log servers whose last report was valid.
        self._reports = reports
        #: A term for a seal of a stream, above every one that is known; it raises what forbids a seal.
        self._next_term = next_term
        self._membership = Membership(policy)
        self._sealing: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        #: By stream: a term that no writer has got yet.
        self._unused: dict[str, int] = {}
        #: By stream and log server: why it could not be sealed, as logged last.
        self._told: dict[tuple[str, str], str] = {}
        #: By stream and log server: why its replica could not be taken back the last time; for `describe`.
        self.failures: dict[tuple[str, str], TusklineError] = {}
        #: By stream and log server: as what it became a member (`Replica.joined`), until the log server has heard of it.
        self._joined: dict[tuple[str, str], str] = {}
        #: What is being carried out: streams, or streams and replicas.
        self._running: set[object] = set()
        self._copies = threading.Semaphore(_COPIES)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replication", daemon=True)

    def start(self) -> None:
        """Begin to decide."""
        self._thread.start()

    def stop(self) -> None:
        """Stop. A synchronization that is being carried out goes on between the log servers."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    # -- writers ------------------------------------------------------------------------------------

    def writer_term(self, name: str, failed: Sequence[str]) -> tuple[int, tuple[str, ...]]:
        """A term for a new writer, and the members for it. `failed`: addresses at which the previous one failed.

        Raises `UnavailableError` if fewer than `min_replicas` can be sealed.
        """
        with self._sealing[name]:
            with self._lock:
                stream = self._state().streams[name]
                known = self._state().log_servers
                without = [each for each in stream.members if known.get(each) in failed]
                if (
                    self._unused.pop(name, None) == stream.term
                    and not stream.sealed
                    and not without
                ):
                    return stream.term, stream.members
            return self._seal(name, without)

    def _seal(
        self,
        name: str,
        without: Collection[str] = (),
        joining: Collection[str] = (),
        synchronized: Sequence[int] = (),
    ) -> tuple[int, tuple[str, ...]]:
        """Seal the stream, and unseal it with those members that could be sealed, and with `joining`; its lock is held.

        `synchronized`: see `Repository.next_term`.
        """
        with self._lock:
            stream = self._state().streams[name]
            term = self._next_term(name, synchronized)
            self._record(StreamSealed(name, term))
            end, members, least = stream.last.context.end, stream.members, self.policy.least(stream)
        sealed = self._seal_all(name, [each for each in members if each not in without], end, term)
        if not sealed or len(sealed) + len(joining) < least:
            sealed |= self._seal_all(name, [each for each in members if each in without], end, term)
        self._check_equal(name, sealed)
        # Each of them has every commit, so even one suffices to bring others in sync, which then count.
        for each in joining:
            if sealed and each not in sealed:
                self._join(name, each, sealed, end, term)
        if len(sealed) < least:
            raise UnavailableError(
                f"{len(sealed)} of {len(members)} replicas can be written, and {least} are needed",
                where=f"stream {name}",
                repair="check that the log servers are running, and see their output",
            )
        with self._lock:
            stream = self._state().streams[name]
            together = tuple(each for each in stream.replicas if each in sealed)
            if not self._record(StreamUnsealed(name, term, together)):
                raise UnavailableError("the stream was sealed again", where=f"stream {name}")
        # Once it is recorded: a leader that has been deposed never gets here.
        for each in together:
            if replaced_by := sealed[each].replaced_by:
                self._joined[name, each] = replaced_by
                self._begin_to_confirm(name, each)
        self._tell(name, members, together)
        return term, together

    def _join(
        self, name: str, replica: str, sealed: dict[str, ReplicaStatus], end: int, term: int
    ) -> None:
        """Add a replica to those that are sealed; if that fails, the stream goes on without it."""
        most = max(sealed.values(), key=lambda each: each.confirmed_to or WalPosition(0, 0))
        sources = [each for each in sealed if told(sealed[each]) == told(most)]
        try:
            status = self._synchronize(
                name, replica, sources, end, term, _REST, throttled=False, like=most
            )
            if (status.state, status.committed_end) != ("sealed", end):
                raise UnavailableError(
                    f"the replica is {status.state} at {status.committed_end}, not sealed at {end}",
                    where=f"stream {name}, log server {replica}",
                )
            self._check_equal(name, {**sealed, replica: status})
        except TusklineError as error:
            self._not_taken_back(name, replica, error)
        else:
            sealed[replica] = status

    def _not_taken_back(self, name: str, replica: str, error: TusklineError) -> None:
        # The first attempt may only have come before its recovery had ended.
        report = _log.warning if (name, replica) in self.failures else _log.info
        self.failures[name, replica] = error
        self._membership.failed(time.monotonic(), name, replica)
        report(
            "could not take a replica back",
            stream=name,
            log_server=replica,
            error=error.what,
            where=error.where,
        )

    def _begin_to_confirm(self, name: str, replica: str) -> None:
        self._begin(("joined", name, replica), partial(self._confirm_join, name, replica))

    def _confirm_join(self, name: str, replica: str) -> None:
        """Tell a replica that it is a member again. Without an answer, it is told again; or when the stream is sealed next."""
        replaced_by = self._joined.get((name, replica), "")
        try:
            self._link(replica).call(m.JOINED, m.JoinedRequest(name, replaced_by))
        except UnavailableError:
            return
        except TusklineError as error:
            # It has been damaged since, or is being synchronized.
            _log.info("not a member now", stream=name, log_server=replica, error=error.what)
        if self._joined.get((name, replica)) == replaced_by:
            del self._joined[name, replica]

    def _tell(self, name: str, before: Sequence[str], after: Sequence[str]) -> None:
        now = time.monotonic()
        for each in before:
            if each not in after:
                self._membership.failed(now, name, each)
                _log.warning("replica left out", stream=name, log_server=each, left=len(after))
        for each in after:
            self.failures.pop((name, each), None)
            if each not in before:
                self._membership.taken_back(now, name, each)
                _log.info("replica in sync", stream=name, log_server=each, replicas=len(after))

    def _seal_all(
        self, name: str, replicas: Iterable[str], end: int, term: int
    ) -> dict[str, ReplicaStatus]:
        """Those that are sealed at `end` now."""
        found = {}
        pending = [
            (each, _begun(partial(self._seal_member, name, each, end, term))) for each in replicas
        ]
        for each, future in pending:
            try:
                found[each] = future.result()
            except TusklineError as error:
                # Once for each cause: capture tries again every few seconds.
                if self._told.get((name, each)) != error.what:
                    _log.warning("could not seal", stream=name, log_server=each, error=error.what)
                self._told[name, each] = error.what
            else:
                self._told.pop((name, each), None)
        return found

    def _seal_member(self, name: str, replica: str, end: int, term: int) -> ReplicaStatus:
        """Seal a member, and send it the commits that it lacks."""
        link, deadline = self._link(replica), time.monotonic() + _SEALING
        while True:
            status = self._seal_at(link, name, end, term)
            if status.state == "sealed":
                return status
            if time.monotonic() > deadline:
                raise UnavailableError("commits are missing", where=link.address)
            missed = self._missed(name, replica, status.version)
            answer = link.call(m.COMMIT, m.CommitRequest({name: missed}, self._now()))
            if refused := answer.refused.get(name):
                raise refused.error()

    def _seal_at(self, link: LogServerLink, name: str, end: int, term: int) -> ReplicaStatus:
        with self._lock:
            newest = self._state().version
        return link.call(m.SEAL, m.SealRequest(name, end, term, newest))

    def _missed(self, name: str, replica: str, version: int) -> tuple[IssuedCommit, ...]:
        """The commits that a member lacks.

        Raises `InvalidReplicaError` if it had reported some of them: it was put back to an older state, and its tail may be
        that of an earlier writer, which a seal has removed since.
        """
        with self._lock:
            stream = self._state().streams[name]
            if version < (reported := stream.applied.get(replica, 0)):
                raise InvalidReplicaError(
                    f"the replica was put back to version {version} after it had reported version {reported}",
                    where=f"stream {name}, log server {replica}",
                )
            return tuple(stream.missed(version)[:_MOST_COMMITS])

    def _link(self, log_server_id: str) -> LogServerLink:
        for link in self._log_servers.with_own_id():
            if link.log_server_id == log_server_id:
                return link
        raise UnavailableError("log server does not answer", where=f"log server {log_server_id}")

    @staticmethod
    def _check_equal(name: str, sealed: dict[str, ReplicaStatus]) -> None:
        """Replicas that are sealed at the same commit end with the same entry."""
        if len({status.last_crc for status in sealed.values()}) > 1:
            raise _different(name, " and ".join(sorted(sealed)))

    # -- replicas that are not in sync --------------------------------------------------------------

    def _take_back(self, name: str, replica: str) -> None:
        """Synchronize a replica while the stream goes on, then the rest while it is sealed."""
        fenced = False
        synchronized: tuple[int, ...] = ()
        for attempt in count():
            with self._lock:
                stream = self._state().streams[name]
                term, last = stream.term, stream.last
                others = [each for each in stream.members if each != replica]
            # A copy that leaves room for others may be slower than the stream.
            throttled = attempt < _THROTTLED
            try:
                status = self._synchronize(
                    name,
                    replica,
                    others,
                    last.context.end,
                    term,
                    _SYNCHRONIZING,
                    throttled=throttled,
                )
            except FencedError:
                if fenced:
                    raise
                fenced = True
                # A writer that was not sent there has opened it: only a later seal gets past that one's term.
                with self._sealing[name]:
                    self._unused[name], _ = self._seal(
                        name, without=(replica,), synchronized=synchronized
                    )
                continue
            # It may have a term that it showed nobody, as it was not valid.
            synchronized = (status.term,)
            with self._lock:
                ahead = self._state().streams[name].last.position.bytes_total
            if ahead - status.bytes_total <= _LITTLE:
                break
        with self._sealing[name]:
            term, _ = self._seal(
                name, without=(replica,), joining=(replica,), synchronized=synchronized
            )
            self._unused[name] = term

    def _synchronize(
        self,
        name: str,
        replica: str,
        members: Sequence[str],
        end: int,
        term: int,
        within: float,
        *,
        throttled: bool,
        like: ReplicaStatus | None = None,
    ) -> ReplicaStatus:
        """Have a member send a replica what it lacks, unless that is nothing; the replica's status then.

        `like`: of a member; the slot may have been confirmed to what that one was told, so that may not be lacking either.
        """
        link = self._link(replica)
        try:
            if status := self._in_sync(link, name, end, term, like):
                return status
        except FencedError:
            raise
        except TusklineError:
            pass  # a replica that is not known there, or not valid, cannot be sealed: it takes everything
        with self._lock:
            reports = self._reports()
        sources = [
            each
            for each in self._log_servers.with_own_id()
            if each.log_server_id in members and (name, each.log_server_id) in reports
        ]
        if not sources:
            raise UnavailableError("no log server in sync answers", where=f"stream {name}")
        source = sources[0]
        with self._lock:
            log_id = self._state().log_id
        link.learn(name, log_id)
        request = m.SynchronizeRequest(name, link.address, throttled)
        call = _begun(lambda: source.call(m.SYNCHRONIZE, request, within=within))
        while True:
            with suppress(TimeoutError):
                return call.result(timeout=1.0)
            # The call may take its whole time to end if one of the two has gone: it need not be the one that is called.
            there = self._log_servers.with_own_id()
            for each in (source, link):
                if self._stopping.is_set() or each not in there:
                    raise UnavailableError("log server does not answer", where=each.address)

    def _in_sync(
        self, link: LogServerLink, name: str, end: int, term: int, like: ReplicaStatus | None
    ) -> ReplicaStatus | None:
        """The status of a replica that is sealed where the stream ends; None: it can be synchronized now.

        The last commit of a replica from before a rebuild may be one that was dropped then, also if its end fits, or lies
        beyond: it takes everything. Raises `TusklineError` if it cannot be sealed.
        """
        with self._lock:
            newest = self._state().version
        with suppress(InvalidReplicaError):
            status = self._seal_at(link, name, end, term)
            if not is_from_before_a_rebuild(status.version, newest):
                if status.state != "sealed":
                    return None
                if like is None or told(status) == told(like):
                    return status
        self._seal_at(link, name, MAX_COUNT, term)
        return None

    # -- decisions ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD):
            try:
                self._decide()
            except UnavailableError:
                continue  # the store's: the repository's own step says so
            except Exception as error:
                _log.exception("replication step failed", error=str(error))

    def _decide(self) -> None:
        now = time.monotonic()
        with self._lock:
            state, reports = self._state(), self._reports()
            views = [
                LogServerView(
                    link.log_server_id,
                    link.address,
                    frozenset(stream for stream, at in reports if at == link.log_server_id),
                    link.owes(now),
                )
                for link in self._log_servers.with_own_id()
            ]
            configured = [link.address for link in self._log_servers]
            decisions = self._membership.step(
                now, state.streams, state.log_servers, views, configured
            )
            for decision in decisions:
                if isinstance(decision, Assign):
                    self._record(ReplicasAssigned(decision.stream, decision.replicas))
                    _log.info(
                        "replicas assigned", stream=decision.stream, replicas=decision.replicas
                    )
        for name, replica in [*self._joined]:
            self._begin_to_confirm(name, replica)
        for decision in decisions:
            match decision:
                case LeaveOut(stream, failed):
                    self._begin(stream, partial(self._leave_out, stream, failed))
                case SealAgain(stream):
                    self._begin(stream, partial(self._seal_again, stream))
                case TakeBack(stream, replica):
                    key = (stream, replica)
                    self._begin(key, partial(self._try_to_take_back, stream, replica))

    def _begin(self, key: object, work: Callable[[], None]) -> None:
        """Carry out a decision, unless that is being done."""
        if key in self._running:
            return
        self._running.add(key)

        def do() -> None:
            try:
                work()
            except Exception as error:
                _log.exception("replication failed", error=str(error))
            finally:
                self._running.discard(key)

        _begun(do)

    def _seal_again(self, name: str) -> None:
        with self._sealing[name]:
            with self._lock:
                if not self._state().streams[name].sealed:
                    return
            self._try_to_seal(name, ())

    def _leave_out(self, name: str, failed: Sequence[str]) -> None:
        with self._sealing[name]:
            with self._lock:
                members, reports = self._state().streams[name].members, self._reports()
            now = time.monotonic()
            owing = {each.log_server_id for each in self._log_servers if each.owes(now) is not None}
            # Somebody else may have left them out meanwhile, or they may have answered.
            failed = [
                each
                for each in failed
                if each in members and (each in owing or (name, each) not in reports)
            ]
            if failed:
                self._try_to_seal(name, failed)

    def _try_to_seal(self, name: str, failed: Sequence[str]) -> None:
        try:
            term, _ = self._seal(name, failed)
        except TusklineError as error:
            if self._told.get((name, "")) != error.what:
                _log.warning("stream stays sealed", stream=name, error=error.what)
            self._told[name, ""] = error.what
        else:
            self._unused[name] = term

    def _try_to_take_back(self, name: str, replica: str) -> None:
        try:
            with self._copies:
                self._take_back(name, replica)
        except TusklineError as error:
            self._not_taken_back(name, replica, error)


def _begun(work: Callable[[], _T]) -> "Future[_T]":
    """Begin to do something in a thread of its own, which does not keep the process from ending."""
    future: Future[_T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=do, name="replication", daemon=True).start()
    return future


def _different(name: str, which: str) -> DivergedError:
    return DivergedError(
        f"replicas that have the same commits end with different entries: {which}",
        where=f"stream {name}",
        repair="compare the replicas with `tuskline log verify`; stop the log server that is wrong, and remove its data_dir",
    )
