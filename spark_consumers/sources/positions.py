"""Where a reader stands in the change log, and how far its next step goes.

A position is a cut at a version: for each stream the offset up to which (exclusive) everything is read.
Invariant: every position made here lies at a commit's end in every stream, at the same version in all of
them; so no transaction is split, and each version is read whole or not at all.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

from spark_consumers.sources.history import (
    HistoryMark,
    TransactionEnd,
    around,
    differs,
    was_reattached,
)
from spark_consumers.sources.tables import WantedTable
from walsender_bridge.change_log.client import (
    CutPoint,
    LogClient,
    LogStatus,
    StreamCut,
)
from walsender_bridge.change_log.replica_order import rotated
from walsender_bridge.change_log.stream_reader import StreamReader, other_log
from walsender_bridge.errors import ConfigError, DivergedError, TrimmedError, UnknownStreamError
from walsender_bridge.runtime.closing import Closing


@dataclass(frozen=True, slots=True)
class StreamOffsets:
    """A cut: `streams` maps each stream to its exclusive end offset.

    `ends`: by stream, the end of the last transaction before it, where it is known (`history`); checkpoints of earlier
    versions have none. `began`: by stream, where a query's first batch begins, if this is its end: Spark keeps the ends of
    batches only, and a first batch that comes again would begin where `earliest` or `latest` is by then.
    """

    log_id: str
    version: int
    streams: Mapping[str, int] = field(default_factory=dict)
    ends: Mapping[str, TransactionEnd] = field(default_factory=dict, compare=False)
    began: Mapping[str, int] | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The form in which Spark keeps it in a checkpoint."""
        streams = dict(sorted(self.streams.items()))
        ends = {stream: list(end) for stream, end in sorted(self.ends.items())}
        record = {"log_id": self.log_id, "version": self.version, "streams": streams, "ends": ends}
        return (
            record if self.began is None else {**record, "began": dict(sorted(self.began.items()))}
        )

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "StreamOffsets":
        """A position from a checkpoint. Raises `ConfigError`."""
        try:
            streams = _offsets(record["streams"])
            began = _offsets(record["began"]) if "began" in record else None
            ends = {
                str(s): TransactionEnd(int(end[0]), int(end[1]))
                for s, end in record.get("ends", {}).items()
            }
            return cls(str(record["log_id"]), int(record["version"]), streams, ends, began)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise ConfigError(
                f"{record!r:.200} is not a position in a change log",
                where="checkpoint",
                repair="use a checkpoint written by this source",
            ) from None


def _offsets(record: Mapping[str, Any]) -> dict[str, int]:
    return {str(name): int(offset) for name, offset in record.items()}


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Entries [first, end) of one stream, to be read from the replicas at `addresses`, tried in this order."""

    stream: str
    addresses: tuple[str, ...]
    first: int
    end: int


class LogReader(Closing):
    """What planning needs of a log: its status, and cuts of its streams. One for each driver process.

    Raises the client's errors. With `tables` only their streams are seen; `relations` then has the
    wanted tables (`schema.table`) of each stream, and is empty otherwise.
    """

    def __init__(self, address: str, tables: Iterable[WantedTable] | None = None) -> None:
        self._log = LogClient(address)
        self.relations: dict[str, tuple[str, ...]] = {}
        for table in tables or ():
            names = self.relations.get(table.stream, ())
            self.relations[table.stream] = (*names, table.relation.full_name)
        self._readers: dict[str, StreamReader] = {}
        self.address = self._log.address

    @property
    def client(self) -> LogClient:
        """The repository."""
        return self._log

    def reader(self, cut: StreamCut) -> StreamReader:
        """The reader of a stream, made once, of everything below the cut."""
        reader = self._readers.setdefault(cut.stream, StreamReader.of(cut))
        reader.follow(cut)
        return reader

    def close(self) -> None:
        """End all connections."""
        for client in (self._log, *self._readers.values()):
            client.close()

    def status(self) -> LogStatus:
        """The newest version, with the wanted streams only."""
        status = self._log.status()
        if not self.relations:
            return status
        streams = {name: cut for name, cut in status.streams.items() if name in self.relations}
        return LogStatus(status.log_id, status.version, status.forced_version, streams)

    # -- positions ----------------------------------------------------------------------------------

    def newest(self, status: LogStatus) -> StreamOffsets:
        """Everything up to the newest version."""
        ends = {name: cut.end_offset for name, cut in status.streams.items()}
        last = {
            name: TransactionEnd(cut.last_end_lsn, cut.last_commit_time)
            for name, cut in status.streams.items()
        }
        return StreamOffsets(status.log_id, status.version, ends, last)

    def oldest(self, status: LogStatus) -> StreamOffsets:
        """Before everything that is still kept, of each stream's present history."""
        first = {n: max(c.low_offset, c.history_start) for n, c in status.streams.items()}
        return StreamOffsets(status.log_id, 0, first)

    def at(self, status: LogStatus, version: int) -> StreamOffsets:
        """The cut at `version` (its end). Raises `TrimmedError` if it was trimmed."""
        if version >= status.version:
            return self.newest(status)
        ends, last = {}, {}
        for name, cut in status.streams.items():
            point = self.reader(cut).cut_before(version + 1)
            low = max(cut.low_offset, 1)
            if point is None and low > 1:
                raise trimmed(name, low, f"version {version + 1}", self.address)
            ends[name] = 1 if point is None else point.end_offset
            if point is not None:
                last[name] = _end(point)
        position = StreamOffsets(status.log_id, version, ends, last)
        self.check_kept(status, position)
        return position

    def version_at(self, status: LogStatus, commit_time: int) -> int | None:
        """The first version with a commit at that time or later (microseconds); None if there is none."""
        found = [self.reader(cut).version_at(commit_time) for cut in status.streams.values()]
        return min((point.version for point in found if point is not None), default=None)

    def check_log(self, status: LogStatus, position: StreamOffsets) -> None:
        """Raise `ConfigError` if the position is one of another log, `DivergedError` if it is of another history of it."""
        if position.log_id != status.log_id:
            raise other_log(position.log_id, status.log_id, self.address)
        for stream in sorted(set(position.streams) & set(status.streams)):
            mark = HistoryMark(position.streams[stream], position.ends.get(stream))
            cut = status.streams[stream]
            if was_reattached(mark, cut):
                raise reattached(cut, mark.offset, self.address)
            found = around(self.reader(cut), mark, cut, status.version)
            if why := differs(position.version, mark, status, stream, found):
                raise DivergedError(
                    f"the log was rolled back past the position: {why}",
                    where=self.address,
                    repair="start again from a snapshot with a new checkpoint: changes read since the point to which the "
                    "log was restored are no longer in the log",
                )

    def check_kept(self, status: LogStatus, position: StreamOffsets) -> None:
        """Raise `TrimmedError` if entries after the position have been trimmed.

        `DivergedError` if another history follows it, because the source was reattached.
        """
        for name, cut in status.streams.items():
            first = position.streams.get(name, 1)
            if was_reattached(HistoryMark(first), cut):
                raise reattached(cut, first, self.address)
            if first < cut.low_offset:
                raise trimmed(name, cut.low_offset, f"offset {first}", self.address)

    # -- steps --------------------------------------------------------------------------------------

    def step(
        self,
        status: LogStatus,
        here: StreamOffsets,
        *,
        max_bytes: int | None = None,
        max_versions: int | None = None,
        last_version: int | None = None,
    ) -> StreamOffsets:
        """How far to go from `here`: at least one version if there is one, within the limits.

        `max_bytes` are bytes of the log as it is stored. `here` itself if nothing new is there.
        """
        if last_version is not None and last_version <= here.version:
            # That cut may be trimmed by now, and nothing up to it is left to read.
            return here
        goal = (
            self.newest(status)
            if last_version is None or last_version >= status.version
            else self.at(status, last_version)
        )
        starts = {name: here.streams.get(name, 1) for name in goal.streams}
        if all(goal.streams[name] <= starts[name] for name in starts):
            return here
        if max_bytes is None and max_versions is None:
            return goal
        points: dict[str, list[CutPoint]] = {}
        known = goal.version
        for name, cut in status.streams.items():
            if goal.streams[name] <= starts[name]:
                points[name] = []
                continue
            reader = self.reader(cut)
            points[name] = reader.plan(starts[name], goal.version, max_bytes, max_versions)
            if points[name] and points[name][-1].end_offset < goal.streams[name]:
                # What follows in this stream is not known: no version beyond may be chosen.
                known = min(known, points[name][-1].version)
        bases = {name: self._bytes_before(status.streams[name], p) for name, p in points.items()}
        version = choose(points, bases, known, max_bytes, max_versions)
        if version is None or version >= goal.version:
            return goal
        ends, last = dict(starts), {n: end for n, end in here.ends.items() if n in starts}
        for name, found in points.items():
            if within := [p for p in found if p.version <= version]:
                ends[name], last[name] = within[-1].end_offset, _end(within[-1])
        return goal if ends == goal.streams else StreamOffsets(status.log_id, version, ends, last)

    def _bytes_before(self, cut: StreamCut, points: list[CutPoint]) -> int:
        if not points:
            return 0
        before = self.reader(cut).cut_before(points[0].version)
        if before is not None:
            return before.bytes_total
        # The commit before it is trimmed: the first commit is taken whatever its size.
        return 0 if cut.low_offset <= 1 else points[0].bytes_total

    def ranges(
        self, status: LogStatus, start: StreamOffsets, end: StreamOffsets, size: int
    ) -> list[OffsetRange]:
        """What lies between two positions, in ranges of about `size` bytes that end at commits.

        Each range is to be read from another replica first, so that all log servers have their part.
        """
        found: list[OffsetRange] = []
        for name, last in end.streams.items():
            first = start.streams.get(name, 1)
            if last <= first:
                continue
            cut = status.streams.get(name)
            if cut is None:
                raise UnknownStreamError(
                    f"the log has no stream {name}", where=self.address, repair="restore it"
                )
            reader = self.reader(cut)

            def page(after: int, reader: StreamReader = reader) -> list[CutPoint]:
                return reader.plan(after, end.version)

            found += [
                OffsetRange(name, rotated(cut.addresses, number), *bounds)
                for number, bounds in enumerate(split(page, first, last, size), len(found))
            ]
        return found


def _end(point: CutPoint) -> TransactionEnd:
    return TransactionEnd(point.last_end_lsn, point.last_commit_time)


def choose(
    points: Mapping[str, list[CutPoint]],
    bases: Mapping[str, int],
    known: int,
    max_bytes: int | None,
    max_versions: int | None,
) -> int | None:
    """The last version up to `known` that stays within the limits; the first one always does.

    `points` are each stream's commits in order, `bases` its bytes before the first of them. None if
    there are no commits.
    """
    merged = heapq.merge(
        *([(p.version, name, p.bytes_total) for p in found] for name, found in points.items())
    )
    totals = dict(bases)
    base, chosen = sum(bases.values()), None
    for number, (version, commits) in enumerate(groupby(merged, key=itemgetter(0)), 1):
        if version > known:
            break
        totals.update((name, bytes_total) for _, name, bytes_total in commits)
        too_many = max_versions is not None and number > max_versions
        too_big = max_bytes is not None and sum(totals.values()) - base > max_bytes
        if chosen is not None and (too_many or too_big):
            break
        chosen = version
    return chosen


def split(
    page: Callable[[int], list[CutPoint]], first: int, last: int, size: int
) -> list[tuple[int, int]]:
    """[first, last) in ranges of about `size` bytes, each of which ends at a commit.

    `page(offset)` returns the next commits after an offset, some at a time.
    """
    bounds = [first]
    begun: int | None = None
    after = first
    total = 0
    while after < last:
        commits = [point for point in page(after) if point.end_offset <= last]
        if not commits:
            break
        for point in commits:
            if begun is None:
                # What the first commit takes is not known; it is not counted.
                begun = point.bytes_total
            elif point.bytes_total - begun > size and after > bounds[-1]:
                bounds.append(after)
                begun = total
            after, total = point.end_offset, point.bytes_total
    if bounds[-1] < last:
        bounds.append(last)
    return list(pairwise(bounds))


def reattached(cut: StreamCut, offset: int, where: str) -> DivergedError:
    """The error for a position from which the log cannot continue, because the source was reattached."""
    return DivergedError(
        f"the source {cut.stream} was reattached: its stream begins another history at offset {cut.history_start}, but "
        f"offset {offset} was requested",
        where=where,
        repair="start again from a snapshot with a new checkpoint: changes between the two histories are not in the log",
    )


def trimmed(stream: str, low: int, asked: str, where: str) -> TrimmedError:
    """The error for entries that the log has trimmed."""
    return TrimmedError(
        f"stream {stream} is kept from offset {low} on, but {asked} was requested",
        where=where,
        repair="start again from a snapshot with a new checkpoint; set a consumer name for this reader, "
        "or a longer retention for the log",
    )
