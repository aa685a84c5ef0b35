"""What one epoch is to hold: from the lake's cut to a version of the log, as tasks for the executors.

Pure: the log's answers come in, tasks go out. A range ends at a commit of the log, so a transaction is
never in two ranges of which one is written without the other, and never split by the epoch's end.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spark_consumers.lake.epoch.packed import PackedTable
from spark_consumers.lake.epoch.stage import RangeTask
from spark_consumers.lake.manifest.chain import LIVE, Manifest, StreamPosition, TableVersion
from spark_consumers.lake.manifest.table_version import HELD, RESUMING
from spark_consumers.lake.tables.origin import Joins, joins
from spark_consumers.lake.tables.states import stream_of
from walsender_bridge.change_log.client import CutPoint, StreamCut
from walsender_bridge.change_log.replica_order import rotated

#: Bytes of the log, as stored, that one task reads.
RANGE_BYTES = 8 << 20
#: More than any backlog requires.
_DOUBLINGS = 40


@dataclass(frozen=True)
class StreamRange:
    """A stream's part of an epoch: offsets from `start` to the last of `cuts`, each a commit's end."""

    stream: str
    start: int
    cuts: tuple[CutPoint, ...]
    end: StreamPosition


@dataclass(frozen=True)
class EpochPlan:
    """An epoch: its version, the streams' new positions, and which tables it shows (name -> version)."""

    version: int
    streams: dict[str, StreamPosition]
    tables: dict[str, TableVersion]
    ranges: tuple[StreamRange, ...]
    #: Tables that this epoch shows for the first time, or again: they lag behind the lake's cut.
    fresh: frozenset[str]
    #: What is copied, and cannot be shown at this epoch yet.
    copies: dict[str, TableVersion]
    #: Of these, the copies that only wait for the lake: the log has passed their LSN.
    waiting: frozenset[str] = frozenset()


@dataclass
class Pace:
    """How much of the log one epoch may hold: `max_bytes`, and twice as much each time that a copy has waited.

    A copy is shown once the lake's cut has passed its LSN, when the log may be far ahead: with epochs of one size
    the number of epochs would grow with the backlog. With doubling it grows with its logarithm.
    """

    max_bytes: int
    _waited: int = 0

    @property
    def limit(self) -> int:
        """Bytes of each stream for the next epoch."""
        return self.max_bytes << self._waited

    def published(self, plan: EpochPlan) -> None:
        """Record that an epoch was published."""
        self._waited = min(self._waited + 1, _DOUBLINGS) if plan.waiting else 0


def choose(
    head: Manifest,
    version: int,
    cuts: Mapping[str, StreamCut],
    commits: Mapping[str, Sequence[CutPoint]],
) -> EpochPlan:
    """The epoch after `head` that ends at `version` of the log, or before if there is too much.

    `cuts`: where `version` cuts each stream. `commits`: each stream's commits after `begin`, at most as many
    as one epoch may hold: the epoch ends where the first of them ends. If tables are held, it ends where the copies
    of all of them can be shown, and what has come since then is left to the next one.
    """
    ends = [
        listed[-1].version
        for stream, listed in commits.items()
        if listed and listed[-1].end_offset < cuts[stream].end_offset
    ]
    end = min([version, *ends, *_enough(head, cuts, commits)])
    streams, ranges = {}, []
    for stream, cut in cuts.items():
        before = head.streams.get(stream)
        if before is None:
            # Nothing of this stream is in the lake: it begins where the log is now.
            streams[stream] = position_of(cut)
            continue
        within = tuple(c for c in commits.get(stream, ()) if c.version <= end)
        after = before
        if within and within[-1].end_offset == cut.end_offset:
            after = position_of(cut)
        elif within:
            last = within[-1]
            after = StreamPosition(
                cut.timeline, last.last_end_lsn, last.last_commit_time, last.end_offset
            )
        streams[stream] = after
        if within:
            ranges.append(StreamRange(stream, begin(before, cut), within, after))
    streams = {**head.streams, **streams}
    ripe = {
        name: table
        for name, table in head.copies.items()
        if _joins(table, streams[stream_of(name)])
    }
    again = {name: table for name, table in head.tables.items() if table.state == RESUMING}
    fresh = {
        name: replace(table, state=LIVE, as_of=0, reason="", resync="")
        for name, table in {**again, **ripe}.items()
    }
    copies = {name: table for name, table in head.copies.items() if name not in ripe}
    tables = {**head.tables, **fresh}
    waiting = {
        name
        for name, copy in copies.items()
        if (newest := cuts.get(stream_of(name))) and _joins(copy, position_of(newest))
    }
    return EpochPlan(
        end, streams, tables, tuple(ranges), frozenset(fresh), copies, frozenset(waiting)
    )


def _enough(
    head: Manifest, cuts: Mapping[str, StreamCut], commits: Mapping[str, Sequence[CutPoint]]
) -> list[int]:
    """The version from which on the copies of all held tables can be shown; empty if none is needed or known."""
    found: list[int] = []
    for name, table in head.tables.items():
        copy, stream = head.copies.get(name), stream_of(name)
        if table.state != HELD or (copy is not None and _joins(copy, head.streams[stream])):
            continue
        first = next(
            (
                commit.version
                for commit in commits.get(stream, ())
                if copy is not None
                and joins(copy, cuts[stream].timeline, commit.last_end_lsn) is Joins.NOW
            ),
            None,
        )
        if first is None:
            return []
        found.append(first)
    return [max(found)] if found else []


def _joins(copy: TableVersion, position: StreamPosition) -> bool:
    return joins(copy, position.timeline, position.lsn) is Joins.NOW


def begin(position: StreamPosition, cut: StreamCut) -> int:
    """The offset from which a stream is read.

    That is the lake's cut, or the log's oldest entry, if no table that follows the log needs the trimmed ones.
    """
    return max(position.offset, cut.low_offset)


def position_of(cut: StreamCut) -> StreamPosition:
    """The lake's position once it has everything up to there."""
    return StreamPosition(cut.timeline, cut.last_end_lsn, cut.last_commit_time, cut.end_offset)


def tasks(
    plan: EpochPlan,
    tables: Mapping[str, PackedTable],
    addresses: Mapping[str, Sequence[str]],
    late: Mapping[str, Sequence[CutPoint]],
    scratch: str,
    stage: str,
) -> list[RangeTask]:
    """The ranges to read, each from another replica of its stream first.

    `tables`: those that follow. `addresses`: of the replicas, by stream. `late`: for each fresh table the commits from its
    offset to where ranges begin. `stage`: what the names of new files begin with.
    """
    pieces: list[tuple[str, int, int, tuple[str, ...]]] = []
    for name in sorted(plan.fresh):
        stream = stream_of(name)
        pieces += [
            (stream, first, last, (name,))
            for first, last in _pieces(plan.tables[name].offset, late.get(name, ()))
        ]
    for part in plan.ranges:
        names = tuple(
            name
            for name, table in plan.tables.items()
            if table.state == LIVE and stream_of(name) == part.stream
        )
        if names:
            pieces += [(part.stream, a, b, names) for a, b in _pieces(part.start, part.cuts)]
    count = Counter(name for piece in pieces for name in piece[3])
    return [
        RangeTask(
            stream,
            rotated(addresses[stream], number),
            first,
            last,
            number,
            plan.version,
            scratch,
            stage,
            tuple(tables[name] for name in names),
            frozenset(name for name in names if count[name] == 1),
        )
        for number, (stream, first, last, names) in enumerate(pieces)
    ]


def _pieces(start: int, cuts: Sequence[CutPoint]) -> list[tuple[int, int]]:
    """Ranges of about `RANGE_BYTES`, each from one commit's end to another's."""
    found: list[tuple[int, int]] = []
    begin: int | None = None
    for cut in cuts:
        if begin is None or cut.bytes_total - begin > RANGE_BYTES:
            found.append((found[-1][1] if found else start, cut.end_offset))
            begin = cut.bytes_total
        else:
            found[-1] = (found[-1][0], cut.end_offset)
    return found
