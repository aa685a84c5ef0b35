"""The invariants of the change log, checked from outside, on what replicas hold: `tuskline log verify`. Pure.

A replica is described by what it states of itself, the rows of its index and its entries; from where these come, a running
log server or the files of a stopped one, makes no difference here. Rows and entries are taken one at a time, so memory does
not depend on a stream's length. The first violation of each replica is yielded; what is behind it proves nothing.

    I1   the last commit's end is the end of the commit context, or the low watermark
    I2   entries, and the commits in the index, leave no hole
    I3   every entry is unchanged and in its place, and all replicas have the same one there, under the same global offset
    I4   global ranges are disjoint, in the order of versions, and without gaps over all streams, except at a rebuild
    I5   versions grow along the index, and the context's is the greatest
    I6   no replica of the set lacks what the repository has committed
    I7   no offset belongs to two commits
    I8, I9   a sealed replica ends where the last commit does
    I13  what is on disk is one of the states that a replica recovers from
    I14  commits end where transactions do

`order` is the rule that a transaction is in the log once: end LSNs grow. I10 (trimming), I11 (the repository's log) and I12 (a
loss that has not happened) do not show in the state of one moment.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple, Protocol

from walsender_bridge.change_log.entry import EntryHeader, check, check_follows
from walsender_bridge.change_log.protocol import START, CommitContext, is_from_before_a_rebuild
from walsender_bridge.change_log.replica.disk import IndexRow, Tail, tail_at
from walsender_bridge.errors import (
    Cause,
    CorruptError,
    InvalidReplicaError,
    MalformedMessageError,
    TrimmedError,
    TusklineError,
    of_cause,
)

#: Gaps of global offsets that are remembered: each rebuild leaves one for each stream at most.
_MOST_GAPS: Final = 1000
_OFFSET: Final = re.compile(r"\boffset (\d+)\b")
_REPAIR: Final[Mapping[Cause, str]] = {
    Cause.CORRUPT: 'docs/log.md, "When a violation is found"',
    Cause.DIVERGED: 'docs/log.md, "When a violation is found"',
    Cause.UNAVAILABLE: "check that the log server runs, and run the command again",
}


class EntryRow(NamedTuple):
    """An entry as a replica holds it. `version`, `global_offset`: as it is served; None: as the index has it."""

    offset: int
    version: int | None
    global_offset: int | None
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class StatedReplica:
    """What a replica states of itself. `state`: of `ReplicaState`, or empty. `end_offset`: the next to be written."""

    stream: str
    replica: str
    state: str
    low_offset: int
    committed_end: int
    end_offset: int
    version: int
    context: CommitContext | None
    sealed_at: int | None


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that does not hold. `invariant`: empty if the replica could not be read. `offset`: local; None: no single one."""

    invariant: str
    what: str
    stream: str
    replica: str
    offset: int | None
    cause: Cause = Cause.CORRUPT

    def error(self) -> TusklineError:
        """The violation as an error."""
        place = f"stream {self.stream}, replica {self.replica}"
        if self.offset is not None:
            place += f", offset {self.offset}"
        what = f"{self.invariant}: {self.what}" if self.invariant else self.what
        return of_cause(self.cause, what, where=place, repair=_REPAIR.get(self.cause, ""))


class Violated(Exception):
    """Ends a check at its first violation."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.what)
        self.violation = violation


class Source(Protocol):
    """A replica to be verified. `name`: of the replica. Each call reads its present state."""

    stream: str
    name: str

    def stated(self) -> StatedReplica:
        """What it states of itself."""

    def rows(self, stated: StatedReplica) -> Iterator[IndexRow]:
        """The commits from its low watermark to the end of the last one, in the order of the index."""

    def entries(self, stated: StatedReplica) -> Iterator[EntryRow]:
        """The entries from its low watermark on, in order; uncommitted ones may follow."""


# -- one replica ------------------------------------------------------------------------------------


class ReplicaCheck:
    """Checks one replica: `begin`, then `entry` for each, then `end`. All raise `Violated`."""

    def __init__(self, stated: StatedReplica, rows: Iterator[IndexRow]) -> None:
        self.stated = stated
        self._rows = rows
        self._row: IndexRow | None = None
        #: Of the commits that were taken from `rows`.
        self._last: IndexRow | None = None
        self._tail: Tail | None = None
        self.next_offset = stated.low_offset

    def _fail(self, invariant: str, what: str, offset: int | None = None) -> Violated:
        stated = self.stated
        return Violated(Violation(invariant, what, stated.stream, stated.replica, offset))

    def begin(self) -> None:
        """Check what it states of itself."""
        stated, context = self.stated, self.stated.context
        low, end = stated.low_offset, stated.committed_end
        if not 1 <= low <= end:
            raise self._fail(
                "I1", f"low watermark {low} is beyond the commit context's end {end}", low
            )
        if context is not None and context.end != end:
            raise self._fail(
                "I1", f"the commit context ends at {context.end}, the commits at {end}", end
            )
        if (0 if context is None else context.version) != stated.version:
            raise self._fail("I5", f"the commit context is not of version {stated.version}", end)
        if stated.state == "sealed" and stated.sealed_at != end:
            raise self._fail(
                "I8", f"it is sealed at {stated.sealed_at}, and its commits end at {end}", end
            )
        if stated.state == "sealed" and stated.end_offset > end:
            raise self._fail(
                "I9", f"it is sealed, and has entries up to {stated.end_offset - 1}", end
            )

    def entry(self, row: EntryRow) -> IndexRow | None:
        """Check the next entry; return its commit, None if it is not committed."""
        offset = self.next_offset
        if row.offset != offset:
            raise self._fail("I2", f"entry {offset} is missing; entry {row.offset} follows", offset)
        commit = self._commit_of(row)
        header = self._unchanged(row)
        tail = self._tail = self._extended(header, row, commit)
        if commit is not None and tail.end_offset == commit.context.end:
            self._ends_as(tail, commit)
        self.next_offset += 1
        return commit

    def end(self) -> None:
        """Check that nothing is missing at the end."""
        stated, context, end = self.stated, self.stated.context, self.stated.committed_end
        if self.next_offset < end:
            what = f"entries {self.next_offset} to {end - 1} are missing: they were committed"
            raise self._fail("I2", what, self.next_offset)
        further = self._next_commit()
        if further is not None:
            what = f"the commit context ends at {end}, and version {further.context.version} at {further.context.end}"
            raise self._fail("I1", what, end)
        last = self._last
        if (stated.low_offset if last is None else last.context.end) != end:
            raise self._fail("I1", f"the commit context ends at {end}, and no commit does", end)
        if last is None or context is None:
            return
        if context.version < last.context.version:
            what = f"the commit context is of version {context.version}, and the last commit of {last.context.version}"
            raise self._fail("I5", what, end)
        if context.version == last.context.version and context != last.context:
            raise self._fail(
                "I1",
                f"the commit context of version {context.version} is not that of the index",
                end,
            )
        if context.version > last.context.version and (
            context.length or context.global_offset < last.context.global_end
        ):
            what = f"version {context.version} does not follow version {last.context.version}"
            raise self._fail("I4", what, end)

    def _next_commit(self) -> IndexRow | None:
        row = next(self._rows, None)
        if row is not None:
            self._follows(row)
            self._last = row
        return row

    def _follows(self, row: IndexRow) -> None:
        """Check a row of the index against the one before it."""
        last, context = self._last, row.context
        start = self.stated.low_offset if last is None else last.context.end
        named = f"version {context.version}, of [{context.local_offset}, {context.end})"
        if context.local_offset > start:
            what = f"the entries from {start} to {context.local_offset - 1} belong to no commit; {named}, follows"
            raise self._fail("I2", what, start)
        if context.local_offset < start:
            raise self._fail(
                "I7", f"{named}, begins before {start}, where the last commit ends", start
            )
        if context.length < 1 or row.position.end_offset != context.end:
            raise self._fail("I1", f"{named}, is at position {row.position.end_offset}", start)
        if last is None:
            return
        if context.version <= last.context.version:
            raise self._fail("I5", f"{named}, follows version {last.context.version}", start)
        if context.global_offset < last.context.global_end:
            what = f"{named}, has the global offset {context.global_offset}, below {last.context.global_end}"
            raise self._fail("I4", what, start)

    def _commit_of(self, row: EntryRow) -> IndexRow | None:
        """The commit that an entry belongs to; None: it is not committed."""
        if row.offset >= self.stated.committed_end:
            return None
        if self._row is None or row.offset >= self._row.context.end:
            self._row = self._next_commit()
        commit = self._row
        if commit is None:
            raise self._fail("I2", "the entry belongs to no commit", row.offset)
        context = commit.context
        place = context.global_offset + row.offset - context.local_offset
        for name, served, indexed in (
            ("version", row.version, context.version),
            ("global offset", row.global_offset, place),
        ):
            if served not in {None, indexed}:
                what = f"it is served with {name} {served}, and the index has {indexed}"
                raise self._fail("I3", what, row.offset)
        return commit

    def _unchanged(self, row: EntryRow) -> EntryHeader:
        try:
            header = check(row.data)
            if self._tail is not None:
                check_follows(header, self._tail.crc)
            elif row.offset == 1:
                check_follows(header, START.crc)
        except CorruptError as error:
            raise self._fail("I3", error.what, row.offset) from None
        return header

    def _extended(self, header: EntryHeader, row: EntryRow, commit: IndexRow | None) -> Tail:
        tail = self._tail
        if tail is None:
            # What was in front of a trimmed log is known by what follows only.
            before = 0 if commit is None else commit.position.bytes_total - commit.size
            start = replace(
                START, end_offset=row.offset, crc=header.previous_crc, bytes_total=before
            )
            tail = tail_at(start)
        if header.starts_transaction == tail.unfinished:
            inside = "starts inside a transaction" if tail.unfinished else "starts no transaction"
            raise self._fail("I14", f"the entry {inside}", row.offset)
        try:
            return tail.extended(header, len(row.data))
        except MalformedMessageError as error:
            raise self._fail("order", error.what, row.offset) from None

    def _ends_as(self, tail: Tail, commit: IndexRow) -> None:
        """Check the last entry of a commit against its row, which ties the chain to offset and version."""
        version, at = commit.context.version, tail.end_offset - 1
        if tail.unfinished:
            raise self._fail("I14", f"version {version} ends inside a transaction", at)
        whole, position = tail.whole, commit.position
        if whole.crc != position.crc:
            raise self._fail("I3", f"version {version} ends with another entry", at)
        if whole.bytes_total != position.bytes_total:
            what = f"version {version} ends at byte {position.bytes_total}, the entries at {whole.bytes_total}"
            raise self._fail("I3", what, at)
        known = whole.end_lsn != 0
        if known and (whole.end_lsn, whole.commit_time) != (position.end_lsn, position.commit_time):
            raise self._fail("I3", f"version {version} has the position of another transaction", at)


def check_recovery(stated: StatedReplica, reason: str) -> Violation:
    """The violation of a replica that recovers as invalid, for that reason."""
    return Violation("I13", reason, stated.stream, stated.replica, None)


def against_repository(
    stated: StatedReplica, committed_end: int, version: int, *, in_sync: bool
) -> Violation | None:
    """Check a replica against the repository.

    `committed_end`: of the stream, as the repository had it before the replica was asked. `in_sync`: whether the replica was in
    sync then; one that was left out because it did not answer stays appendable until it is sealed and synchronized.
    `version`: the newest one issued, as the repository had it afterwards.
    """
    place = (stated.stream, stated.replica)
    if in_sync and stated.state == "appendable" and stated.end_offset < committed_end:
        what = f"the repository has committed up to {committed_end}, the replica ends at {stated.end_offset}"
        return Violation("I6", what, *place, stated.end_offset, Cause.DIVERGED)
    if stated.version > version:
        what = f"it has version {stated.version}, which was never issued; the newest is {version}"
        return Violation("I5", what, *place, None, Cause.DIVERGED)
    return None


# -- all replicas of a stream -----------------------------------------------------------------------


class CheckedEntry(NamedTuple):
    """An entry of the source `number`, and its commit (None: it is not committed)."""

    offset: int
    number: int
    row: EntryRow
    commit: IndexRow | None


def verify_stream(sources: Sequence[Source]) -> Iterator[Violation | CheckedEntry]:
    """Check all replicas of a stream and compare them. Yields each entry, for the progress, and each first violation."""
    found: list[Violation] = []
    different: set[int] = set()
    checked = [_checked(number, source, found) for number, source in enumerate(sources)]
    offset = attrgetter("offset")
    for _, group in groupby(merge(*checked, key=offset), key=offset):
        first: CheckedEntry | None = None
        for each in group:
            yield each
            if each.number in different:
                continue
            if first is None:
                first = each
            elif difference := _difference(sources, first, each):
                different.add(each.number)
                yield difference
        yield from found
        found.clear()
    yield from found


def _checked(number: int, source: Source, found: list[Violation]) -> Iterator[CheckedEntry]:
    """The checked entries of a replica, by offset; its first violation is appended to `found`."""
    low, current = 0, None
    while True:
        try:
            stated = source.stated()
            current = ReplicaCheck(stated, source.rows(stated))
            current.begin()
            for row in source.entries(stated):
                yield CheckedEntry(row.offset, number, row, current.entry(row))
            current.end()
        except TrimmedError as error:
            # It was trimmed meanwhile, beyond what was read: what is left is checked.
            if current is not None and current.stated.low_offset > low:
                low = current.stated.low_offset
                continue
            found.append(_unreadable(error, source, None))
        except Violated as violated:
            found.append(violated.violation)
        except TusklineError as error:
            found.append(_unreadable(error, source, current.next_offset if current else None))
        return


def _unreadable(error: TusklineError, source: Source, at: int | None) -> Violation:
    stream, replica = source.stream, source.name
    named = _OFFSET.search(error.where)
    what = f"{error.what} ({error.where})" if error.where else error.what
    if isinstance(error, CorruptError):
        return Violation("I3", what, stream, replica, int(named[1]) if named else at)
    if isinstance(error, InvalidReplicaError):
        return Violation("I13", what, stream, replica, None, error.cause)
    return Violation("", f"could not be verified: {what}", stream, replica, at, error.cause)


def _difference(
    sources: Sequence[Source], one: CheckedEntry, other: CheckedEntry
) -> Violation | None:
    """How two replicas' entries at the same offset differ, if both are committed."""
    if one.commit is None or other.commit is None:
        return None
    places = _place(one.commit, one.offset), _place(other.commit, other.offset)
    if bytes(one.row.data) != bytes(other.row.data):
        what = f"the entry is not that of replica {sources[one.number].name}"
    elif places[0] != places[1]:
        what = (
            f"the entry has (version, global offset) {places[1]}, and {places[0]} on replica"
            f" {sources[one.number].name}"
        )
    else:
        return None
    source = sources[other.number]
    return Violation("I3", what, source.stream, source.name, other.row.offset, Cause.DIVERGED)


def _place(commit: IndexRow, offset: int) -> tuple[int, int]:
    context = commit.context
    return context.version, context.global_offset + offset - context.local_offset


# -- all streams ------------------------------------------------------------------------------------


def verify_global_ranges(
    streams: Mapping[str, tuple[StatedReplica, Iterable[IndexRow]]],
    *,
    complete: bool,
    last_versions: Mapping[str, int] | None = None,
) -> Violation | None:
    """Check the global ranges of all streams, one replica of each, up to the least of their versions.

    `complete`: these are all streams of the log. Then no gap may be above what was trimmed: above the first commit that is
    left of each trimmed stream, or above `last_versions`, its last commit that is not empty, if none is left. Gaps that a
    rebuild of the repository has left are no violation.
    """
    rows: dict[str, Iterator[IndexRow]] = {}
    trimmed = 0
    for name, (stated, its) in streams.items():
        iterator = iter(its)
        first = next(iterator, None)
        rows[name] = iterator if first is None else chain([first], iterator)
        if stated.low_offset > 1:
            last = (last_versions or {}).get(name, stated.version)
            trimmed = max(trimmed, last if first is None else first.context.version)
    newest = min((stated.version for stated, _ in streams.values()), default=0)
    following, before = 1, "the beginning"
    gaps: list[tuple[int, Violation]] = []
    overlap: Violation | None = None
    rebuilds = _Rebuilds(streams)
    for version, name, row in merge(
        *(_tagged(*each) for each in rows.items()), key=itemgetter(0, 1)
    ):
        if version > newest or len(gaps) == _MOST_GAPS:
            break
        rebuilds.passed(name, version)
        offset = row.context.global_offset
        if offset != following:
            what = f"version {version} has global offsets from {offset} on, and {following} is next after {before}"
            at = row.context.local_offset
            violation = Violation("I4", what, name, streams[name][0].replica, at)
            if offset < following:
                overlap = violation
                break
            if complete and version > trimmed:
                gaps.append((version, violation))
        following, before = row.context.global_end, f"version {version} of stream {name}"
    rebuilds.ended()
    return next((found for version, found in gaps if not rebuilds.explain(version)), overlap)


class _Rebuilds:
    """Which gaps of global offsets a rebuild of the repository has left: it may have dropped a commit of each stream.

    A stream lacks that commit, and goes on behind the gap in versions. So a gap of global offsets is explained at the versions
    that some stream has passed over with it.
    """

    def __init__(self, streams: Mapping[str, tuple[StatedReplica, Iterable[IndexRow]]]) -> None:
        self._last = dict.fromkeys(streams, 0)
        self._stated = {name: stated.version for name, (stated, _) in streams.items()}
        self._skipped: list[range] = []

    def passed(self, stream: str, version: int) -> None:
        """A stream has a commit of this version, behind the one noted before."""
        self._note(self._last[stream], version)
        self._last[stream] = version

    def ended(self) -> None:
        """No stream has a further commit."""
        for name, version in self._stated.items():
            self._note(self._last[name], version)

    def _note(self, known: int, version: int) -> None:
        if is_from_before_a_rebuild(known, version):
            self._skipped.append(range(known + 1, version + 1))

    def explain(self, version: int) -> bool:
        """Whether a rebuild explains a gap of global offsets in front of this version."""
        return any(version in each for each in self._skipped)


def _tagged(name: str, rows: Iterable[IndexRow]) -> Iterator[tuple[int, str, IndexRow]]:
    for row in rows:
        yield row.context.version, name, row
