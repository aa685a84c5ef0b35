"""Which replicas of a stream go on, which are synchronized, and which log servers are assigned to it. Pure.

Only a stream with several replicas is changed here, or one that is to have several. `membership` decides, from what
the log servers report, what `replication.py` carries out:

- A member that has sent no valid report for `silence` seconds is left out, if `min_replicas` others report: the stream is
  sealed, and goes on without it. Which members go on is settled by the seal itself, not by this decision.
- If too few others report, a member that answers and has lost its replica is synchronized, and stays one.
- A stream that stays sealed, since whoever sealed it has gone, is sealed again and goes on.
- A replica outside the set, whose log server answers, is synchronized and taken back. If that fails, it is tried again later
  and later, so that a disk that is full or damaged does not seal the stream every few seconds.
- A log server that does not answer stays assigned: it may come back. It is replaced only if its address now belongs to
  another one, since its disk was replaced, or to none, since it was removed from the configuration.
- What was not observed counts for nobody: while this process was suspended, no silence grew, and no stream stayed sealed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from walsender_bridge.change_log.protocol import ReplicaStatus
from walsender_bridge.change_log.repository.core import StreamState
from walsender_bridge.postgres.protocol.lsn import WalPosition

#: Seconds before a replica that could not be taken back is tried again: at first, and at most.
FIRST_RETRY: Final = 1.0
LONGEST_RETRY: Final = 60.0
#: Seconds that a stream may stay sealed before it is sealed again.
SEALED_SECONDS: Final = 20.0
#: Of the seconds between two steps, as many count at most: the process was suspended in the others.
OBSERVED_SECONDS: Final = 1.5
#: Seconds as a member after which a replica counts as reliable again.
RELIABLE: Final = 120.0


@dataclass(frozen=True, slots=True)
class ReplicationPolicy:
    """`replicas`: wanted for each stream. `min_replicas`: it does not go on with fewer. `silence` in seconds."""

    replicas: int = 1
    min_replicas: int = 1
    silence: float = 10.0

    def least(self, stream: StreamState) -> int:
        """How many members this stream needs; one that never had so many needs those that it has."""
        return max(1, min(self.min_replicas, len(stream.members)))


@dataclass(frozen=True, slots=True)
class LogServerView:
    """A log server that answers, with an id of its own. `reports`: the streams of which it sent a valid report last.

    `owes`: when the request was sent whose answer is overdue, in monotonic seconds; None: none is.
    """

    log_server_id: str
    address: str
    reports: frozenset[str]
    owes: float | None = None


@dataclass(frozen=True, slots=True)
class Assign:
    """Assign the stream these log servers."""

    stream: str
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Seal the stream, and go on without these members."""

    stream: str
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Synchronize this replica and make it a member."""

    stream: str
    replica: str


@dataclass(frozen=True, slots=True)
class SealAgain:
    """Seal the stream again, which is sealed and on which nobody works, and unseal it."""

    stream: str


Decision = Assign | LeaveOut | TakeBack | SealAgain


def told(status: ReplicaStatus) -> tuple[WalPosition | None, int | None]:
    """What a writer has told a replica beside entries: what it confirms to the slot, and of which cluster.

    A replica that takes part again has to know it as well as the members do: each may be the only one that is left for the
    next writer.
    """
    return status.confirmed_to, status.system_id


@dataclass(slots=True)
class _Retry:
    """When a replica may be taken back. `pause`: the last one; `since`: when it was made a member."""

    at: float = 0.0
    pause: float = 0.0
    since: float | None = None


@dataclass(slots=True)
class Membership:
    """See the module. `step` is to be called every second or so; `failed` and `taken_back` when a decision has been carried out."""

    policy: ReplicationPolicy
    _silent: dict[tuple[str, str], float] = field(default_factory=dict)
    #: Since when a stream is sealed, and with which term.
    _sealed: dict[str, tuple[float, int]] = field(default_factory=dict)
    _retries: dict[tuple[str, str], _Retry] = field(default_factory=dict)
    #: The last step, and since when requests that are overdue count.
    _stepped: float | None = None
    _observed_since: float = 0.0

    def step(
        self,
        now: float,
        streams: Mapping[str, StreamState],
        addresses: Mapping[str, str],
        answering: Sequence[LogServerView],
        configured: Sequence[str],
    ) -> list[Decision]:
        """`addresses`: of all known log servers by id; `configured`: the addresses in use. `now` in monotonic seconds."""
        self._skip_suspension(now)
        views = {view.log_server_id: view for view in answering}
        decisions: list[Decision] = []
        for name, stream in sorted(streams.items()):
            assigned = self._assigned(stream, addresses, views, configured, streams)
            if assigned != stream.replicas:
                decisions.append(Assign(name, assigned))
                continue
            if self._stays_sealed(now, name, stream):
                decisions.append(SealAgain(name))
                continue
            if len(stream.replicas) == 1:
                continue
            if failed := self._failed(now, name, stream, views):
                decisions.append(LeaveOut(name, failed))
                continue
            lacking = [*stream.outside, *self._lost(now, name, stream, views)]
            decisions += [
                TakeBack(name, each)
                for each in lacking
                if each in views and now >= self._retry(name, each).at
            ]
        return decisions

    def _skip_suspension(self, now: float) -> None:
        """Move what has been counted so far past the time in which there was no step."""
        last, self._stepped = self._stepped, now
        if last is None or (suspended := now - last - OBSERVED_SECONDS) <= 0:
            return
        self._observed_since = now - OBSERVED_SECONDS
        self._silent = {key: since + suspended for key, since in self._silent.items()}
        self._sealed = {name: (at + suspended, term) for name, (at, term) in self._sealed.items()}

    def _retry(self, stream: str, replica: str) -> _Retry:
        return self._retries.setdefault((stream, replica), _Retry())

    def failed(self, now: float, stream: str, replica: str) -> None:
        """A replica could not be taken back, or has been left out: it is tried again after a pause that doubles."""
        self._silent.pop((stream, replica), None)
        retry = self._retry(stream, replica)
        if retry.since is not None and now - retry.since >= RELIABLE:
            retry.pause = 0.0
        retry.since = None
        retry.pause = min(max(2 * retry.pause, FIRST_RETRY), LONGEST_RETRY)
        retry.at = now + retry.pause

    def taken_back(self, now: float, stream: str, replica: str) -> None:
        """A replica is a member again."""
        self._silent.pop((stream, replica), None)
        self._retry(stream, replica).since = now

    def _stays_sealed(self, now: float, name: str, stream: StreamState) -> bool:
        if not stream.sealed:
            self._sealed.pop(name, None)
            return False
        since, term = self._sealed.get(name, (now, stream.term))
        if term != stream.term:
            since = now
        self._sealed[name] = since, stream.term
        return now - since >= SEALED_SECONDS

    def _lost(
        self, now: float, name: str, stream: StreamState, views: Mapping[str, LogServerView]
    ) -> list[str]:
        """Members that answer, and have sent no valid report for `silence` seconds; another one reports."""
        quiet = [
            each
            for each in stream.members
            if now - self._silent.get((name, each), now) >= self.policy.silence
        ]
        if len(quiet) == len(stream.members):
            return []
        return [each for each in quiet if each in views and views[each].owes is None]

    def _failed(
        self, now: float, name: str, stream: StreamState, views: Mapping[str, LogServerView]
    ) -> tuple[str, ...]:
        reporting = []
        silent = []
        for member in stream.members:
            key, view = (name, member), views.get(member)
            if view is not None and name in view.reports:
                if view.owes is None:
                    self._silent.pop(key, None)
                    reporting.append(member)
                    continue
                # It counts as one that answers until the request has failed, and is silent since that was sent.
                if key not in self._silent:
                    # A single look says nothing more: this process may have been suspended itself.
                    self._silent[key] = now
                    continue
                self._silent[key] = max(view.owes, self._observed_since)
            if now - self._silent.setdefault(key, now) >= self.policy.silence:
                silent.append(member)
        return tuple(silent) if silent and len(reporting) >= self.policy.least(stream) else ()

    def _assigned(
        self,
        stream: StreamState,
        addresses: Mapping[str, str],
        views: Mapping[str, LogServerView],
        configured: Sequence[str],
        streams: Mapping[str, StreamState],
    ) -> tuple[str, ...]:
        """The log servers for a stream: those it has, without those that are gone, and others up to the number wanted."""
        present = {view.address for view in views.values()}

        def gone(replica: str) -> bool:
            address = addresses.get(replica, "")
            return replica not in views and (address in present or address not in configured)

        kept = [r for r in stream.replicas if r in stream.members or not gone(r)]
        wanted = min(self.policy.replicas, len(configured))
        if len(kept) >= wanted:
            return tuple(kept)

        def load(log_server: str) -> int:
            return sum(log_server in each.replicas for each in streams.values())

        others = sorted((each for each in views if each not in kept), key=lambda k: (load(k), k))
        return (*kept, *others[: wanted - len(kept)])
