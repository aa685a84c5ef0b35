"""The core of the metadata repository, without clock, disk or network: records in, commits out.

The state is a function of the log of records (I11): each record contains everything that its decision
needs, including the time, and applying the same records again yields the same state. A record that would not
change the state is not kept.

A version cuts every stream at once. It is issued when something can be committed or a barrier is ready,
and gives each stream, in the order of names, the next global offsets for what *all* replicas of its set
hold (I6), so global ranges follow each other without gaps (I4). A stream without new entries gets an empty
commit, which is kept only as the stream's latest context: an idle stream costs nothing (Varlog).

A report is accepted if its version is one that was issued, and its entries
start where that version ended the stream. Any other report is stale, duplicated or of another history, and is
ignored. A replica that is behind is sent the commits it missed; it takes part again once it has them.

Of the replicas that a stream is assigned, the *members* are in sync: a commit needs all of them, and no other. Members change
only while the stream is sealed, and nothing is committed meanwhile: `StreamSealed` stops its commits, then the
replicas remove what is not committed and refuse older terms, and `StreamUnsealed` names those that did, which may be fewer,
or more by those that were synchronized with them. So all members hold the same entries when a writer starts, every
member holds everything that was committed before, and an entry that was not committed never meets that of another writer.
A report counts only with the term of the last seal: an older one may contain entries that were removed since.
A stream that has never had more than one replica is not sealed for a new writer, which continues behind its uncommitted
entries.

`published` is the newest version of which every member has every commit durably, up to which readers may read.
History is kept for lagging members; for the leases of consumers (I10), a few commits of what lies behind it (`past_commits.py`).

A lease is a promise: from it on, no entry is removed that its consumer needs and that lies at `trimmed` or above. A trim
is recorded before the first replica is asked for it, and the record is refused if some lease that was recorded before
needs the entries. So whatever trim is on its way while a lease is granted, or was sent by the leader before, stays below
`trimmed`, which the cut of the stream shows as its `low_offset`, also where no replica has trimmed so far yet.

The end of a lease is a time of the log's `SteadyClock`, so the next repository, whose machine may have another time, has to
continue from a time that is recorded: a tick that comes an hour after the last recorded time is kept for its time alone, and
the first one always is. There is a tick before each lease that is granted or renewed. The clock that continues from there
(`since`) is not ahead of the one that granted the lease, so it ends no lease sooner; and it is at most an hour behind, so it
keeps none for long that has ended.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from walsender_bridge.change_log.protocol import (
    ENTRIES_AHEAD,
    MAX_COUNT,
    START,
    TERMS_SHOWN_AHEAD,
    CommitContext,
    IssuedCommit,
    Position,
    ReplicaReport,
)
from walsender_bridge.change_log.repository import past_commits
from walsender_bridge.change_log.repository.past_commits import PastCommit
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.runtime import json_model

#: The longest lease, in seconds: a lake that was stopped for a week finds all that it needs, with days to spare.
LONGEST_LEASE: Final = 10 * 86_400.0
#: The longest lease of the versions that recorded no time.
_LONGEST_WITHOUT_TIME: Final = 7 * 86_400.0
#: Seconds after which the time is recorded, whatever else happens.
TIME_KEPT_EVERY: Final = 3600.0

# -- records ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Created:
    """The log is created."""

    log_id: str


@dataclass(frozen=True, slots=True)
class StreamCreated:
    """A stream is created, with the log servers of its replicas."""

    stream: str
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TermGiven:
    """A term is issued to a writer."""

    stream: str
    term: int


@dataclass(frozen=True, slots=True)
class StreamSealed:
    """A stream is sealed at its last commit: nothing is committed until it is unsealed. `term`: of its next writer."""

    stream: str
    term: int


@dataclass(frozen=True, slots=True)
class StreamUnsealed:
    """A stream that was sealed with this term goes on with these members, which are all sealed at its last commit."""

    stream: str
    term: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicasAssigned:
    """A stream is assigned these log servers: its members, and others that are to be synchronized with them."""

    stream: str
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConsumerSeen:
    """A consumer has published `version` (None: none yet), and its lease lasts until `until`.

    Times here are those of the log's `SteadyClock`, in seconds since the Unix epoch.
    """

    name: str
    version: int | None
    until: float


@dataclass(frozen=True, slots=True)
class ConsumerDropped:
    """A consumer's lease has ended."""

    name: str


@dataclass(frozen=True, slots=True)
class TrimDecided:
    """Entries below `up_to` may be removed from now on: no lease that has not ended at `now` needs them (see the module)."""

    stream: str
    up_to: int
    now: float


@dataclass(frozen=True, slots=True)
class VersionRaised:
    """Versions up to this one are skipped: a reader has seen them in another history of this log."""

    version: int


@dataclass(frozen=True, slots=True)
class LogServerSeen:
    """A log server has answered at this address."""

    log_server: str
    address: str


@dataclass(frozen=True, slots=True)
class RepositoryTick:
    """The replicas' reports at one moment, and the waiting barriers: stream -> end LSN each.

    Without `issue` the reports only update the versions that the replicas have applied.
    """

    now: float
    reports: tuple[ReplicaReport, ...]
    barriers: tuple[dict[str, Lsn], ...] = ()
    issue: bool = True


_OfStreams = (
    StreamCreated | TermGiven | StreamSealed | StreamUnsealed | ReplicasAssigned | TrimDecided
)
_OfConsumers = ConsumerSeen | ConsumerDropped
Record = Created | LogServerSeen | _OfStreams | _OfConsumers | VersionRaised | RepositoryTick


# -- state ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """A non-empty commit, and the position of its stream after it."""

    context: CommitContext
    position: Position


@dataclass(slots=True)
class StreamState:
    """One stream. `history` starts with the newest commit that no replica needs; `past`: of those behind it, for consumers.

    `replicas`: the log servers that it is assigned; `members`: those of them whose replicas are in sync.
    """

    replicas: tuple[str, ...]
    members: tuple[str, ...]
    term: int = 0
    sealed: bool = False
    #: Whether it has ever been sealed: from then on, only a seal's term opens a writer.
    was_sealed: bool = False
    history: list[StreamCommit] = field(
        default_factory=lambda: [StreamCommit(CommitContext(0, 1, 1, 0), START)]
    )
    past: list[PastCommit] = field(default_factory=list)
    #: Below which no entry is promised to anybody: it may have been trimmed.
    trimmed: int = 1
    #: The context of the newest version, empty or not.
    latest: CommitContext = field(default_factory=lambda: CommitContext(0, 1, 1, 0))
    #: The highest version that each member has durably, as far as recorded.
    applied: dict[str, int] = field(default_factory=dict)

    @property
    def last(self) -> StreamCommit:
        """The last commit that is not empty."""
        return self.history[-1]

    @property
    def outside(self) -> tuple[str, ...]:
        """The replicas that are to be synchronized."""
        return tuple(each for each in self.replicas if each not in self.members)

    def counts(self, report: ReplicaReport) -> bool:
        """Whether a report of a member shows entries that the replica still has (see the module)."""
        newest = report.version >= self.last.context.version
        return newest and (not self.needs_seal or report.term == self.term)

    @property
    def needs_seal(self) -> bool:
        """Whether a writer gets its term by a seal."""
        return len(self.replicas) > 1 or self.was_sealed

    def at(self, version: int) -> StreamCommit | None:
        """The commit in effect at that version; None if that history has been dropped."""
        place = bisect_right(self.history, version, key=lambda c: c.context.version)
        return self.history[place - 1] if place else None

    def low_offset(self, reports: Iterable[ReplicaReport]) -> int:
        """From which offset on the stream is promised to consumers, and present. `reports`: the last ones of its members."""
        return max([self.trimmed, *(report.low_offset for report in reports)])

    def needed_from(self, version: int | None) -> PastCommit | None:
        """Behind which commit a consumer that has published `version` needs the stream; None: it needs everything.

        Further back than the history, it is an earlier one than that of the version, if need be: see `past_commits.py`.
        """
        if not version:
            return None
        exact = self.at(version)
        return past_commits.at(self.past, version) if exact is None else _past(exact)

    def forget(self, floor: int, wanted: int | None) -> None:
        """Drop what neither the replicas need, from `floor` on, nor the leases of consumers, from `wanted` on; None: no lease."""
        place = bisect_right(self.history, floor, key=lambda c: c.context.version)
        # The newest commit at or below the floor is the one in effect at the floor's version.
        gone = max(place - 1, 0)
        if wanted is None or wanted >= self.history[gone].context.version:
            self.past = []
        else:
            self.past += map(_past, self.history[:gone])
            self.past = past_commits.needed_from(self.past, wanted)
            if len(self.past) >= past_commits.MOST:
                self.past = past_commits.thinned(self.past, self.history[gone].context.version)
        del self.history[:gone]

    def missed(self, version: int) -> list[IssuedCommit]:
        """The commits to send to a replica at that version, in order."""
        place = bisect_right(self.history, version, key=lambda c: c.context.version)
        commits = [IssuedCommit(c.context, c.position.crc) for c in self.history[place:]]
        if self.latest.version > max(version, self.last.context.version):
            commits.append(IssuedCommit(self.latest))
        return commits


def _past(commit: StreamCommit) -> PastCommit:
    return PastCommit(commit.context.version, commit.context.end, commit.position.bytes_total)


@dataclass(frozen=True, slots=True)
class Consumer:
    """A consumer's lease; see `ConsumerSeen`."""

    version: int | None
    until: float


@dataclass(frozen=True, slots=True)
class ReportEvaluation:
    """Whether a report is accepted; `reason` if it is not.

    `ahead`: a replica of this log knows a version that was never issued, so records have been lost here,
    possibly including the one that created its stream. `outside`: the replica is no member, so its report does not count.
    `foreign`: the replica is of another log.
    """

    report: ReplicaReport
    reason: str = ""
    ahead: bool = False
    outside: bool = False
    foreign: bool = False


class Repository:
    """See the module."""

    def __init__(self) -> None:
        self.log_id = ""
        self.version = 0
        self.forced_version = 0
        self.published = 0
        self.next_global = 1
        self.log_servers: dict[str, str] = {}
        self.streams: dict[str, StreamState] = {}
        self.consumers: dict[str, Consumer] = {}
        #: The latest time recorded; 0 if none.
        self.clock = 0.0

    # -- applying records ---------------------------------------------------------------------------

    def apply(self, record: Record) -> bool:
        """Apply a record. Returns False if it changed nothing, and so need not be kept."""
        match record:
            case Created(log_id):
                self.log_id = log_id
            case LogServerSeen(log_server, address):
                if self.log_servers.get(log_server) == address:
                    return False
                self.log_servers[log_server] = address
            case StreamCreated(stream, replicas):
                if stream in self.streams:
                    return False
                latest = CommitContext(self.version, 1, self.next_global, 0)
                self.streams[stream] = StreamState(replicas, replicas, latest=latest)
            case TermGiven(stream, term):
                self.streams[stream].term = term
            case StreamSealed(stream, term):
                sealed = self.streams[stream]
                sealed.term, sealed.sealed, sealed.was_sealed = term, True, True
            case StreamUnsealed():
                return self._unseal(record)
            case ReplicasAssigned(stream, replicas):
                self.streams[stream].replicas = replicas
            case TrimDecided(stream, up_to, now):
                known = self.streams[stream].trimmed
                if not known < up_to <= self.trim_limit(stream, now):
                    return False
                self.streams[stream].trimmed = up_to
            case ConsumerSeen(name, version, until):
                self.consumers[name] = Consumer(version, until)
            case ConsumerDropped(name):
                return self.consumers.pop(name, None) is not None
            case VersionRaised(version):
                return self._raise(version)
            case RepositoryTick():
                return self._tick(record)
        return True

    def _unseal(self, unsealed: StreamUnsealed) -> bool:
        stream = self.streams[unsealed.stream]
        if not stream.sealed or stream.term != unsealed.term:
            return False  # it has been sealed again since
        # A replica that is sealed at the last commit has all of them.
        last = stream.last.context.version
        known = stream.applied
        stream.applied = {each: max(known.get(each, 0), last) for each in unsealed.members}
        stream.members, stream.sealed = unsealed.members, False
        self.published = self._published({})
        return True

    def _tick(self, tick: RepositoryTick) -> bool:
        found = self.evaluate(tick.reports)
        reports = [v.report for v in found if not v.reason and not v.outside]
        ready = self._committable(reports) if tick.issue else {}
        forced = tick.issue and self._forced(tick.barriers, ready)
        if ready or forced:
            self._issue(ready)
            if forced:
                self.forced_version = self.version
        applied = {(report.stream, report.replica): report.version for report in reports}
        is_due = tick.now >= self.clock + TIME_KEPT_EVERY
        if not ready and not forced and not is_due and not self._progress(applied):
            return False
        self.published = self._published(applied)
        for (stream, replica), version in applied.items():
            self.streams[stream].applied[replica] = version
        self.clock = max(self.clock, tick.now)
        self._forget(tick.now)
        return True

    def _raise(self, version: int) -> bool:
        """Issue an empty version, which every replica receives with its next commit."""
        if version <= self.version:
            return False
        self.version = version
        for stream in self.streams.values():
            end = stream.last.context.end
            stream.latest = CommitContext(version, end, self.next_global, 0)
        self.published = self._published({})
        return True

    def evaluate(self, reports: Iterable[ReplicaReport]) -> list[ReportEvaluation]:
        """Evaluate which reports are accepted, and why the others are not. Does not change the state."""
        return [
            ReportEvaluation(
                r,
                self._fault(r),
                ahead=self._is_ahead(r),
                outside=self._is_outside(r),
                foreign=r.log_id != self.log_id,
            )
            for r in reports
        ]

    def _is_outside(self, report: ReplicaReport) -> bool:
        stream = self.streams.get(report.stream)
        return stream is not None and report.replica in stream.outside

    def _is_ahead(self, report: ReplicaReport) -> bool:
        # Includes streams and replicas that this repository no longer knows.
        return report.log_id == self.log_id and report.version > self.version

    def _fault(self, report: ReplicaReport) -> str:
        stream = self.streams.get(report.stream)
        if stream is None or report.log_id != self.log_id:
            return f"stream {report.stream} of log {report.log_id} does not belong to this log"
        if report.replica not in stream.replicas:
            return f"log server {report.replica} has no replica of stream {report.stream}"
        if report.replica not in stream.members:
            # Its replica may be anything: it takes part once it has been synchronized.
            return ""
        if report.position.end_offset != report.local_offset + report.length:
            return "the position is not the end of the entries"
        if not 0 <= report.length <= ENTRIES_AHEAD:
            return f"it shows {report.length} entries that are not committed"
        if report.length and self.next_global > MAX_COUNT - len(self.streams) * ENTRIES_AHEAD:
            # Each stream of one version may take so many. No replica takes a commit beyond the last one.
            return f"the log has used up its global offsets: the next one is {self.next_global}"
        if report.term > stream.term + TERMS_SHOWN_AHEAD:
            return f"its term {report.term} is too far beyond the last one, {stream.term}"
        if report.version > self.version:
            return f"version {report.version} was never issued; the newest is {self.version}"
        if report.version < stream.applied.get(report.replica, 0):
            return f"version {report.version} is older than that of the replica's last report"
        at = stream.at(report.version)
        if at is None:
            return f"version {report.version} is older than the history"
        if report.local_offset != at.context.end:
            return (
                f"at version {report.version} the stream ends at {at.context.end}, the replica at "
                f"{report.local_offset}"
            )
        return ""

    def _committable(self, reports: Sequence[ReplicaReport]) -> dict[str, ReplicaReport]:
        """For each stream with new entries, the report of the replica that has the fewest of them."""
        ready = {}
        for name in sorted(self.streams):
            stream = self.streams[name]
            last = stream.last.context
            # The last report of a replica replaces earlier ones.
            current = {r.replica: r for r in reports if r.stream == name}
            fresh = [r for r in current.values() if stream.counts(r)]
            if stream.sealed or len(fresh) < len(stream.members):
                continue
            least = min(fresh, key=lambda r: r.local_offset + r.length)
            if least.local_offset + least.length > last.end:
                ready[name] = least
        return ready

    def _forced(
        self, barriers: Sequence[Mapping[str, Lsn]], ready: Mapping[str, ReplicaReport]
    ) -> bool:
        """Whether all positions of some barrier are committed, including this step's commits."""

        def reached(name: str, lsn: Lsn) -> bool:
            if name not in self.streams:
                return False
            last = ready[name].position if name in ready else self.streams[name].last.position
            return last.end_lsn >= lsn

        return any(all(reached(*item) for item in barrier.items()) for barrier in barriers)

    def _issue(self, ready: Mapping[str, ReplicaReport]) -> None:
        self.version += 1
        for name in sorted(self.streams):
            stream = self.streams[name]
            end = stream.last.context.end
            report = ready.get(name)
            length = report.position.end_offset - end if report else 0
            stream.latest = CommitContext(self.version, end, self.next_global, length)
            self.next_global += length
            if report is not None:
                stream.history.append(StreamCommit(stream.latest, report.position))

    def _progress(self, applied: Mapping[tuple[str, str], int]) -> bool:
        """Whether some replica has applied a non-empty commit."""
        return any(
            self.streams[stream].at(version) is not self.streams[stream].at(known)
            for (stream, replica), version in applied.items()
            if (known := self.streams[stream].applied.get(replica, 0)) != version
        )

    def _published(self, applied: Mapping[tuple[str, str], int]) -> int:
        """The newest version of which every member has every commit; it never decreases."""
        limits = [self.version]
        for name, stream in self.streams.items():
            for replica in stream.members:
                version = applied.get((name, replica), stream.applied.get(replica, 0))
                place = bisect_right(stream.history, version, key=lambda c: c.context.version)
                if place < len(stream.history):
                    limits.append(stream.history[place].context.version - 1)
        return max(self.published, min(limits))

    def _forget(self, now: float) -> None:
        """Drop history that no member and no live consumer needs, and leases that have ended."""
        self.consumers = {n: c for n, c in self.consumers.items() if c.until > now}
        wanted = min((c.version or 0 for c in self.consumers.values()), default=None)
        for stream in self.streams.values():
            applied = [stream.applied.get(replica, 0) for replica in stream.members]
            stream.forget(min([self.published, *applied]), wanted)

    # -- queries ------------------------------------------------------------------------------------

    @property
    def since(self) -> float:
        """The time from which the next steady clock continues; 0: any, since none was recorded and nothing depends on it.

        Earlier versions granted leases without recording a time: none was longer than a week.
        """
        ends = [each.until for each in self.consumers.values()]
        return self.clock or max(0.0, max(ends, default=0.0) - _LONGEST_WITHOUT_TIME)

    def next_term(
        self, name: str, shown: Iterable[ReplicaReport], synchronized: Iterable[int] = ()
    ) -> int:
        """A term above each that was given, and above those that replicas of the stream have, whoever gave them.

        `synchronized`: the terms of replicas that have just been synchronized, and have sent no report since.

        A replica that is not in sync counts, too: no seal below its term takes it back. What is too far beyond was made up by
        its log server, and does not count. Nor does a replica that is ahead: after a rebuild, the old repository must not get
        above the new one's seals (`rebuild.py`, 5).
        """
        stream = self.streams[name]
        terms = [
            report.term
            for report in shown
            if (report.stream, report.log_id) == (name, self.log_id)
            and report.replica in stream.replicas
            and not self._is_ahead(report)
        ]
        highest = stream.term + TERMS_SHOWN_AHEAD
        return 1 + max([stream.term, *(t for t in (*terms, *synchronized) if t <= highest)])

    def satisfied(self, barrier: Mapping[str, Lsn]) -> bool:
        """Whether all positions of the barrier are committed."""
        return self._forced([barrier], {})

    def trim_limit(self, stream: str, now: float) -> int:
        """The local offset up to which no live consumer needs the stream any more."""
        leases = [c.version for c in self.consumers.values() if c.until > now]
        needed = map(self.streams[stream].needed_from, [self.published, *leases])
        return min(1 if each is None else each.end for each in needed)

    # -- checkpoints --------------------------------------------------------------------------------

    def to_record(self) -> dict[str, Any]:
        """The complete state as JSON."""
        streams = {
            name: _StoredStream(
                stream.replicas,
                stream.term,
                _fields(stream.latest),
                stream.applied,
                history=(),
                members=stream.members,
                sealed=stream.sealed,
                was_sealed=stream.was_sealed,
                trimmed=stream.trimmed,
                past=tuple(map(_fields, stream.past)),
            )
            for name, stream in self.streams.items()
        }
        stored = _StoredState(
            log_id=self.log_id,
            version=self.version,
            forced_version=self.forced_version,
            published=self.published,
            next_global=self.next_global,
            clock=self.clock,
            log_servers=self.log_servers,
            streams=streams,
            consumers={n: (c.version, c.until) for n, c in self.consumers.items()},
        )
        record = json_model.plain(stored)
        # As lists already: while a replica lags, a history has very many commits, and an append waits for a checkpoint.
        for name, stream in self.streams.items():
            record["streams"][name]["history"] = [
                [[*_fields(c.context)], [*_fields(c.position)]] for c in stream.history
            ]
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Repository":
        """Restore the state from `to_record`. Raises `ValueError`, `TypeError`."""
        stored = json_model.from_plain(_StoredState, record)
        state = cls()
        state.log_id, state.clock = stored.log_id, stored.clock
        state.version, state.forced_version = stored.version, stored.forced_version
        state.published, state.next_global = stored.published, stored.next_global
        for name, stream in stored.streams.items():
            history = [StreamCommit(CommitContext(*c), Position(*p)) for c, p in stream.history]
            latest = CommitContext(*stream.latest)
            members = stream.replicas if stream.members is None else stream.members
            state.streams[name] = StreamState(
                stream.replicas,
                members,
                stream.term,
                stream.sealed,
                stream.was_sealed,
                history,
                [PastCommit(*each) for each in stream.past],
                stream.trimmed,
                latest,
                dict(stream.applied),
            )
        state.log_servers = dict(stored.log_servers)
        state.consumers = {n: Consumer(*c) for n, c in stored.consumers.items()}
        return state


@dataclass(frozen=True, slots=True)
class _StoredStream:
    """A stream of a checkpoint. Contexts and positions are arrays of their fields; a position may lack the last ones."""

    replicas: tuple[str, ...]
    term: int
    latest: tuple[int, ...]
    applied: Mapping[str, int]
    history: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    #: Missing in checkpoints of earlier versions, whose streams had one replica.
    members: tuple[str, ...] | None = None
    sealed: bool = False
    was_sealed: bool = False
    trimmed: int = 1
    past: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredState:
    """A checkpoint. `consumers`: version and end of the lease."""

    log_id: str
    version: int
    forced_version: int
    published: int
    next_global: int
    #: Missing in checkpoints of earlier versions.
    clock: float = 0.0
    log_servers: Mapping[str, str]
    streams: Mapping[str, _StoredStream]
    consumers: Mapping[str, tuple[int | None, float]]


def _fields(value: CommitContext | Position | PastCommit) -> tuple[int, ...]:
    return tuple(getattr(value, name) for name in type(value).__slots__)


_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Record)}


def record_to_json(record: Record) -> str:
    """A record as it is stored: its fields, and its `kind`."""
    values = {name: getattr(record, name) for name in type(record).__slots__}
    return json_model.encode({"kind": type(record).__name__, **values}).decode()


def record_from_json(body: str) -> Record:
    """Restore a record from `record_to_json`. Raises `ValueError`, `KeyError`."""
    values = json.loads(body)
    if not isinstance(values, dict):
        raise ValueError("the record is not an object")  # noqa: TRY004  # as any other damage
    record: Record = json_model.from_plain(_KINDS[values.pop("kind")], values, strict=True)
    return record
