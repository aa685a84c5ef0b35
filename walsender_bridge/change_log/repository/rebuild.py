"""A lost repository is rebuilt from what its replicas hold. Pure: offers of the replicas in, a plan or a refusal out.

The repository's records are gone: its disk, or etcd's. Each replica keeps, durably, the log's id, its term, its latest commit
context, a row for each commit that it has not trimmed, and its low watermark. From these `plan` decides where each stream ends
and which replicas are its members, and `rebuilt` is the state of the new store. `rebuilder.py` carries it out, in this order:

    read all replicas -> plan -> seal them -> bring further ones in sync -> fence them -> read the history -> write the store

Why it is safe, in terms of the old repository, whose last state nobody knows:

1. *What was published, or confirmed to a slot, is kept.* A version is published, and a transaction acknowledged as committed,
   when every member has applied it; replicas that become members later have it, too. So one replica that was a member
   when the records were lost is enough to know the end of the stream, and the end is the greatest one that is offered: no
   replica applies what was not recorded as committed. A replica with a lesser end lacks a commit, even if it holds
   its entries, which may be another writer's: it is synchronized, never trusted.
2. *A member has answered.* Every stream had `min_replicas` members at least, out of the log servers that it was assigned. So
   any `min_replicas` of these have to include one whose replica is read here, as when a repository starts. By default, all
   log servers have to answer, since one that is away may have the newest commit. The operator may give up fewer than
   `min_replicas` of them. Replicas that hold a stream are taken for the assigned ones, which is wrong for a log server that was
   removed from the configuration, replaced, and is configured again for the rebuild alone: that is the operator's to avoid. One that has
   no valid replica counts as away for that stream. So does one that lost what it had, and was synchronized since, as long as it does not know that it
   is a member again (`replica/synchronization.py`): its source may have been one that was left out, and what it lost the newest commit.
3. *A commit that was recorded and that no replica offers is dropped.* Its entries may be in the tails of replicas; it was not
   published, its slot was not confirmed, and the server sends them again. Its version and its global offsets are never issued
   again, because both begin anew far behind the greatest that is known (`REBUILD_GAP`).
4. *A version that was seen is never issued with another meaning*, although the replicas need not know it: an empty version
   (a barrier, FLUSH, `raise_version`) is published at once, and replicas learn it a second later, or when they are back. All
   that was committed when it was issued is kept (1), so a greater version with the same ends, or later ones, follows
   it in every reader's eyes. A repository issues at most a hundred versions a second: the gap would last for four months in
   which no replica learns any. What a lake has seen it also raises by itself when it starts.
5. *The old repository may be alive elsewhere.* Every replica is sealed with a term far beyond the known ones, and any
   `min_replicas` of the assigned ones include a sealed one, so the terms that were given out are not accepted any more. The seal
   names the stream's end: a replica to which a late commit came before refuses it, and all is read again. Then the members
   learn the *fence*, the empty commit of the first version behind the gap, and are sealed again, which makes it durable. Until
   then the old repository may see the new terms, and seal above them: that second seal is refused, and all is read again.
   From then on, a member refuses whatever seal names a version from before the gap (`Replica.seal`), also one that the old repository
   had sent before and that arrives late, which would remove entries that the new one has recorded and not published. And the
   members' reports show a version that the old repository never issued, at which that stops to commit and to seal
   (`stream_faults.py`). A stream that it created since the replicas were read is looked for after that: it is not sealed, and
   the rebuild is refused. What it could still do while it hears none of them is to force empty versions for its own clients,
   which are in the gap.
6. *A replica that was given up may come back with a commit that nobody else has* (3). It is at a version in front of the gap,
   so it is never in sync, also if its end fits; a synchronization wipes it first (`synchronization.negotiate`), and until then,
   another rebuild does not count it, except for this: it is no member since.
7. *A crash of this in the middle* leaves replicas that are sealed, some that know the fence, and some that are being synchronized.
   The next attempt begins behind that one. Replicas in front of its gap count if it cannot have been completed, or if they lack nothing but the fence: of a
   stream of which no replica knows it, when fewer than `min_replicas` are left that may; else those that end with the same commit
   as one that knows it. What alone knows the fence may be given up by the next attempt, which then finds only replicas that were
   sealed before: the term of a seal is never below the fence, and the next fence is behind the gap from both. So
   what returns is in front of the gap (6), and not ahead of the new repository. A replica whose synchronization was cut short had no
   commit that its source had not, so it stands for no lost member while that source is valid. That holds in the middle of a wipe,
   too. A damaged one counts as away, whatever its record says, which may be of an older segment, and name a synchronization that has
   ended since; and so does one that was damaged before it was synchronized (2).
8. *Consumers are not known*, until they renew their leases. A trim that the old repository sends is refused as its seals are (5). A lease of its own (`HOLD`), which has published nothing, keeps
   the log from trimming for as long as any lease can last that was held before. It also keeps the history, by which
   the versions of consumers that come back are found.

Global ranges (I4) stay disjoint and in the order of versions; they have gaps where a commit was dropped, and at the rebuild.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from walsender_bridge.change_log.protocol import (
    MAX_COUNT,
    REBUILD_GAP,
    START,
    CommitContext,
    Position,
    ReplicaStatus,
    is_from_before_a_rebuild,
)
from walsender_bridge.change_log.replica.disk import IndexRow
from walsender_bridge.change_log.repository.core import (
    Consumer,
    Repository,
    StreamCommit,
    StreamState,
)
from walsender_bridge.change_log.repository.membership import ReplicationPolicy, told
from walsender_bridge.errors import (
    ConfigError,
    CorruptError,
    DivergedError,
    InvalidReplicaError,
    UnavailableError,
    UsageError,
)
from walsender_bridge.postgres.protocol.lsn import WalPosition

#: The consumer that keeps the log from trimming until the others have renewed their leases.
HOLD: Final = "log rebuild"
#: Terms that are skipped: an old repository counts its own up from the last one, once for each writer.
TERM_GAP: Final = 1_000_000
#: Fences of attempts that were not completed, each behind the one before; terms farther beyond the newest version were made up.
ATTEMPTS: Final = 100
#: Bytes that a replica may lack to be brought in sync at once. One that lacks more is copied from its start later (6).
LITTLE: Final = 64 << 20
#: Why a replica is not valid that has commits, and knows no version behind the gap of an earlier rebuild.
MISSED: Final = "it missed an earlier rebuild"
#: Why a replica is not valid that has been synchronized since it lost what it had (2).
REPLACED: Final = (
    "what it had was lost, and it is not known to be a member since it has been synchronized"
)
_STOP_ONE: Final = "compare their files with `tuskline log verify --offline`; then stop the log server that is wrong, and name it with --without"


@dataclass(frozen=True, slots=True)
class AskedLogServer:
    """A configured log server. `log_server`: its id; empty: it does not answer. `given_up`: the operator goes on without it."""

    address: str
    log_server: str = ""
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """What a replica holds durably. `reason`: why it may not take part; empty: it may.

    `last`: its last commit that is not empty; None: it was trimmed, or there is none. `bytes_total`: up to its end. `source`: the
    log server with which it is being synchronized; empty: with none, or something was lost before (2).
    """

    log_server: str
    stream: str
    log_id: str
    reason: str
    term: int
    low_offset: int
    committed_end: int
    context: CommitContext | None
    bytes_total: int = 0
    last: IndexRow | None = None
    source: str = ""

    @property
    def version(self) -> int:
        """The highest version that it knows."""
        return self.context.version if self.context else 0


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Where a stream ends, and the log servers for it.

    `members`: those at its end. `behind`: those with a valid replica that ends before, of which `near` lack little.
    `learning`: others that answer, with an invalid replica or none. `source`: the member with the longest history.
    `context`: the latest one of that member.
    """

    stream: str
    end: int
    low_offset: int
    term: int
    members: tuple[str, ...]
    behind: tuple[str, ...]
    near: tuple[str, ...]
    learning: tuple[str, ...]
    source: str
    context: CommitContext | None

    @property
    def to_synchronize(self) -> tuple[str, ...]:
        """Replicas that may be brought in sync, those that lack the least first."""
        return (*self.behind, *self.learning)


@dataclass(frozen=True, slots=True)
class RebuildPlan:
    """The log as its replicas have it. `version`: the newest that any of them knows; `fence`: the first one of the new store.

    `least`: members that each stream needs.
    """

    log_id: str
    version: int
    fence: int
    next_global: int
    least: int
    streams: tuple[StreamPlan, ...]

    def fence_of(self, stream: StreamPlan) -> CommitContext:
        """The empty commit that a replica at the stream's end learns first."""
        return CommitContext(self.fence, stream.end, self.next_global, 0)


# -- the decision -----------------------------------------------------------------------------------


def plan(
    servers: Sequence[AskedLogServer], offers: Sequence[Offer], policy: ReplicationPolicy
) -> RebuildPlan:
    """Decide where the streams end, and which replicas are their members.

    Raises `UsageError`, `ConfigError` or `UnavailableError` for the log servers, `DivergedError` if replicas contradict each other,
    and `InvalidReplicaError` if a stream's end is not known.
    """
    _check_servers(servers, policy)
    version = max((each.version for each in offers), default=0)
    offers = _evaluated(servers, offers, policy)
    valid = [each for each in offers if not each.reason]
    if not valid:
        raise ConfigError(
            "no log server has a valid replica, so there is nothing to rebuild the repository from",
            where=", ".join(each.address for each in servers),
            repair="check [[log_server]] data_dir there; if all is lost, start a new log: docs/log-lost.md",
        )
    _check_one_log(valid)
    _check_counts(offers)
    streams = sorted({each.stream for each in offers})
    fence = _fence(version, offers)
    return RebuildPlan(
        log_id=valid[0].log_id,
        version=version,
        fence=fence,
        next_global=max(_global_end(each) for each in valid) + REBUILD_GAP,
        least=policy.min_replicas,
        streams=tuple(_stream(name, servers, offers, policy, fence) for name in streams),
    )


def _fence(version: int, offers: Sequence[Offer]) -> int:
    """The first version behind the gap, and behind that of each attempt before this one (7), whose terms were not below theirs."""
    most = version + ATTEMPTS * REBUILD_GAP
    return max([version, *(each.term for each in offers if each.term <= most)]) + REBUILD_GAP


def _evaluated(
    servers: Sequence[AskedLogServer], offers: Sequence[Offer], policy: ReplicationPolicy
) -> list[Offer]:
    """The offers, of which those are not valid whose replicas have commits and missed an earlier rebuild (6, 7)."""
    newest = max((each.version for each in offers), default=0)
    found = []
    for name in sorted({each.stream for each in offers}):
        its = [each for each in offers if each.stream == name]
        old = [each for each in its if each.context and _is_old(each, newest)]
        present = [each for each in its if each not in old and not each.reason and each.context]
        kept = [each for each in old if _has_all(each, present)]
        valid = {each.log_server for each in old if not each.reason}
        if not present and len(servers) - _read(its, valid) < policy.min_replicas:
            kept = old
        found += [
            replace(each, reason=each.reason or MISSED)
            if each in old and each not in kept
            else each
            for each in its
        ]
    return found


def _read(its: Iterable[Offer], valid: Collection[str]) -> int:
    """Replicas whose commits are known: the valid ones', and those of others that are being synchronized with one of these (7)."""
    return len(valid) + sum(bool(each.reason) and each.source in valid for each in its)


def _is_old(offer: Offer, newest: int) -> bool:
    return is_from_before_a_rebuild(offer.version, newest)


def _has_all(offer: Offer, present: Sequence[Offer]) -> bool:
    """Whether the replica ends with the last commit of those that know the fence, so that it lacks nothing but that.

    It has to be able to learn what they know (7).
    """
    end = max((each.committed_end for each in present), default=0)
    newest = [each for each in present if each.committed_end == end]
    if offer.committed_end != end or _global_end(offer) > max(map(_global_end, newest), default=0):
        return False
    return end == 1 or (offer.last is not None and offer.last in [each.last for each in newest])


def _check_servers(servers: Sequence[AskedLogServer], policy: ReplicationPolicy) -> None:
    silent = [each for each in servers if not each.log_server]
    if answering := [each.address for each in servers if each.given_up and each.log_server]:
        raise UsageError(
            "the log server answers, so it cannot be given up",
            where=", ".join(answering),
            repair="omit it from --without; or stop it first if its replicas are wrong",
        )
    if missing := [each.address for each in silent if not each.given_up]:
        raise UnavailableError(
            "log server does not answer, and may have the newest commit",
            where=", ".join(missing),
            repair="start it; if it is lost for good, name it with --without",
        )
    if len(silent) >= policy.min_replicas:
        raise UnavailableError(
            f"{len(silent)} log servers are given up, which may have been all members of a stream",
            where=", ".join(each.address for each in silent),
            repair=f"start one of them; fewer than min_replicas ({policy.min_replicas}) may be given up",
        )
    names = Counter(each.log_server for each in servers if each.log_server)
    if copies := [each.address for each in servers if names[each.log_server] > 1]:
        raise ConfigError(
            "log servers have the same id: the data_dir of one is a copy of the other's",
            where=", ".join(copies),
            repair="stop the copy, and remove it from the configuration",
        )


def _check_one_log(valid: Sequence[Offer]) -> None:
    first = valid[0]
    for other in valid:
        if other.log_id != first.log_id:
            raise DivergedError(
                f"there are replicas of two logs: {first.log_id} on log server {first.log_server}, and {other.log_id} on"
                f" log server {other.log_server}",
                where=f"stream {other.stream}",
                repair="remove the data_dir that belongs to another log, or configure the log servers of one log",
            )


def _check_counts(offers: Sequence[Offer]) -> None:
    """Raise `InvalidReplicaError` if behind the gap there would be no room for versions, terms or global offsets."""
    for each in offers:
        counts = {
            "version": each.version,
            "term": each.term,
            "global offset": 0 if each.reason else _global_end(each),
        }
        for name, value in counts.items():
            if value > MAX_COUNT // 2:
                raise InvalidReplicaError(
                    f"log server {each.log_server} offers {name} {value}, which is higher than any that a repository issues",
                    where=f"stream {each.stream}",
                    repair=_STOP_ONE,
                )


def _global_end(offer: Offer) -> int:
    ends = [1]
    if offer.context is not None:
        ends.append(offer.context.global_end)
    if offer.last is not None:
        ends.append(offer.last.context.global_end)
    return max(ends)


def _stream(
    name: str,
    servers: Sequence[AskedLogServer],
    offers: Sequence[Offer],
    policy: ReplicationPolicy,
    fence: int,
) -> StreamPlan:
    its = [each for each in offers if each.stream == name]
    valid = [each for each in its if not each.reason]
    _check_known(name, servers, its, policy)
    end = max(each.committed_end for each in valid)
    newest = [each for each in valid if each.committed_end == end]
    _check_agreement(name, valid, end)
    behind = sorted(
        (each for each in valid if each not in newest),
        key=lambda each: (-each.committed_end, each.log_server),
    )
    source = min(newest, key=lambda each: (each.low_offset, each.log_server))
    holders = {each.log_server for each in valid}
    found = StreamPlan(
        stream=name,
        end=end,
        low_offset=source.low_offset,
        term=max(fence, max(each.term for each in its) + TERM_GAP),
        members=tuple(sorted(each.log_server for each in newest)),
        behind=tuple(each.log_server for each in behind),
        near=tuple(
            each.log_server for each in behind if source.bytes_total - each.bytes_total <= LITTLE
        ),
        learning=tuple(
            each.log_server
            for each in servers
            if each.log_server and each.log_server not in holders
        ),
        source=source.log_server,
        context=source.context,
    )
    possible = len(found.members) + len(found.to_synchronize)
    if possible < policy.min_replicas:
        raise UnavailableError(
            f"{possible} log servers answer, and a stream needs {policy.min_replicas} replicas",
            where=f"stream {name}",
            repair="start another log server, with an empty data_dir if one is lost",
        )
    return found


def _check_known(
    name: str,
    servers: Sequence[AskedLogServer],
    its: Sequence[Offer],
    policy: ReplicationPolicy,
) -> None:
    """Raise `InvalidReplicaError` unless any `min_replicas` of the stream's replicas include a valid one.

    Those that missed a rebuild are no members since; all others may be.
    """
    valid = {each.log_server for each in its if not each.reason}
    read = _read(its, valid)
    away = min(len(servers), max(policy.replicas, read)) - read
    unread = len(servers) - read - sum(each.reason == MISSED for each in its)
    if valid and min(away, unread) < policy.min_replicas:
        return
    reasons = [f"log server {each.log_server}: {each.reason}" for each in its if each.reason]
    raise InvalidReplicaError(
        f"{len(valid)} valid replicas were found, and the {away} others may have been all members"
        + (f" ({'; '.join(reasons)})"[:600] if reasons else ""),
        where=f"stream {name}",
        repair="start the other log servers with their former data_dir; if they are lost, start a new log: docs/log-lost.md",
    )


def _check_agreement(name: str, valid: Sequence[Offer], end: int) -> None:
    """Raise `DivergedError` if two replicas cannot both be of one history."""
    for one in valid:
        for other in valid:
            if one is not other and (why := _contradicts(one, other, end)):
                raise DivergedError(
                    f"the replicas on log servers {one.log_server} and {other.log_server} contradict each other: {why}",
                    where=f"stream {name}",
                    repair=_STOP_ONE,
                )


def _contradicts(one: Offer, other: Offer, end: int) -> str:
    mine, theirs = one.context, other.context
    if mine and theirs and mine.version == theirs.version and mine != theirs:
        return f"version {mine.version} ends at {mine.end} and at {theirs.end}"
    longer = other.committed_end < one.committed_end == end
    if longer and one.last is not None and other.version >= one.last.context.version:
        return (
            f"version {one.last.context.version} ends at {end}, and the other one ends at {other.committed_end} in"
            f" version {other.version}"
        )
    if one.committed_end != other.committed_end or one.last is None or other.last is None:
        return ""
    if (one.last.context, one.last.position) != (other.last.context, other.last.position):
        return f"the last commits, which end at {one.committed_end}, differ"
    return ""


def check_history(stream: str, behind: Sequence[Offer], rows: Sequence[IndexRow]) -> None:
    """Raise `DivergedError` if a replica that is behind ends with a commit that the stream's history does not have."""
    known = {row.context.end: (row.context, row.position) for row in rows}
    for each in behind:
        last = each.last
        first = rows[0].context.local_offset if rows else each.committed_end
        if last is None or each.committed_end <= first:
            continue
        if known.get(each.committed_end) != (last.context, last.position):
            raise DivergedError(
                f"the replica on log server {each.log_server} ends at {each.committed_end} with a commit that the others do"
                " not have",
                where=f"stream {stream}",
                repair=_STOP_ONE,
            )


def changed(stream: str, what: str) -> UnavailableError:
    """The error if a replica is not as it was read."""
    return UnavailableError(
        what,
        where=f"stream {stream}",
        repair="stop the repository that still commits to the log servers, then try again",
    )


def check_sealed(plan: RebuildPlan, stream: StreamPlan, statuses: Iterable[ReplicaStatus]) -> None:
    """Raise unless these replicas are sealed at the stream's end, behind the fence, with the same entry at the end.

    `UnavailableError`: one of them has changed since it was read. `DivergedError`: their entries differ.
    """
    found = [*statuses]
    for status in found:
        state = status.state, status.committed_end, status.version
        if state != ("sealed", stream.end, plan.fence):
            raise changed(
                stream.stream,
                f"a replica is {status.state} at {status.committed_end} in version {status.version}, and was at {stream.end}",
            )
    if len({status.last_crc for status in found}) > 1:
        raise DivergedError(
            f"replicas that end at {stream.end} end with different entries",
            where=f"stream {stream.stream}",
            repair=_STOP_ONE,
        )


def with_told(stream: StreamPlan, sealed: Mapping[str, ReplicaStatus]) -> StreamPlan:
    """The plan with those members alone that know as well as any how far the slot was confirmed. `sealed`: their status.

    A replica that was not in sync may have every commit, and lack that. It takes it from a member first, as others take commits.
    """
    its = {each: sealed[each] for each in stream.members}
    most = max(its.values(), key=lambda each: each.confirmed_to or WalPosition(0, 0))
    members = tuple(each for each in stream.members if told(its[each]) == told(most))
    others = tuple(each for each in stream.members if each not in members)
    return replace(
        stream,
        members=members,
        behind=(*others, *stream.behind),
        near=(*others, *stream.near),
        source=stream.source if stream.source in members else members[0],
    )


def newest_context(stream: StreamPlan, offers: Iterable[Offer]) -> CommitContext | None:
    """The latest commit context of the replicas at the stream's end: an empty one that not all know, or an earlier attempt's fence.

    What knows it takes nothing from what does not (`synchronization.negotiate`), and is not to be wiped for it. So all learn it first.
    """
    its = [
        each.context
        for each in offers
        if each.stream == stream.stream and each.log_server in stream.members and each.context
    ]
    return max(its, key=lambda each: each.version, default=None)


# -- the new state ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamHistory:
    """What was read of a stream behind its seal: `rows` of the index from the low watermark to the end; the `position` there.

    `low_offset`: from where on each member has the stream. Behind the fence, no trim of the old repository changes that.
    """

    members: tuple[str, ...]
    rows: Sequence[IndexRow]
    position: Position
    low_offset: int


def rebuilt(
    plan: RebuildPlan,
    histories: Mapping[str, StreamHistory],
    addresses: Mapping[str, str],
    *,
    replicas: int,
    now: float,
    hold: float,
) -> Repository:
    """The state of the new store. `addresses`: of the log servers that answer, by id. `replicas`: for each stream.

    `now`: the wall clock's time; `hold`: seconds that nothing is trimmed. Raises `CorruptError` if a history has a hole.
    """
    state = Repository()
    state.log_id, state.version = plan.log_id, plan.fence
    state.forced_version = state.published = plan.fence
    state.next_global = plan.next_global
    state.log_servers = dict(addresses)
    taken = [row.taken_at for each in histories.values() for row in each.rows[-1:]]
    # The steady clock of the old repository was there at least.
    state.clock = max(taken, default=0) / 1e6
    state.consumers = {HOLD: Consumer(None, max(state.clock, now) + hold)} if hold else {}
    for stream in plan.streams:
        its = histories[stream.stream]
        outside = [each for each in stream.to_synchronize if each not in its.members]
        known = (*its.members, *(each for each in outside if each in stream.behind))
        state.streams[stream.stream] = StreamState(
            replicas=known[: max(replicas, len(its.members))],
            members=its.members,
            term=stream.term,
            was_sealed=True,
            trimmed=max(stream.low_offset, its.low_offset),
            history=_history(stream, its),
            latest=plan.fence_of(stream),
            applied=dict.fromkeys(its.members, plan.fence),
        )
    return state


def _history(stream: StreamPlan, its: StreamHistory) -> list[StreamCommit]:
    """The commits, behind the one in effect where they begin."""
    offset = stream.low_offset
    for row in its.rows:
        if row.context.local_offset != offset:
            raise CorruptError(
                f"the commit that begins at {offset} is missing",
                where=f"stream {stream.stream}, log server {stream.source}",
                repair="see docs/log.md, `tuskline log verify --offline`",
            )
        offset = row.context.end
    if offset != stream.end or its.position.end_offset != stream.end:
        raise CorruptError(
            f"the commits end at {offset}, and the stream at {stream.end}",
            where=f"stream {stream.stream}, log server {stream.source}",
            repair="see docs/log.md, `tuskline log verify --offline`",
        )
    return [_begin(stream, its), *(StreamCommit(row.context, row.position) for row in its.rows)]


def _begin(stream: StreamPlan, its: StreamHistory) -> StreamCommit:
    """The commit in effect at the low watermark; of one that was trimmed, only its end is known, and versions at which it was."""
    if stream.low_offset == 1:
        return StreamCommit(CommitContext(0, 1, 1, 0), START)
    if not its.rows:
        context = stream.context
        assert context is not None, "what was trimmed was committed"
        return StreamCommit(
            CommitContext(context.version, stream.end, context.global_end, 0), its.position
        )
    first = its.rows[0]
    context = CommitContext(
        first.context.version - 1, stream.low_offset, first.context.global_offset, 0
    )
    size = first.position.bytes_total - first.size
    return StreamCommit(context, replace(START, end_offset=stream.low_offset, bytes_total=size))
