"""What one epoch is to hold: from the lake's cut to a version of the log, as tasks for the executors.

Pure: the log's answers come in, tasks go out. An epoch ends at a commit of the log, so a transaction is never split by its
end. Within the epoch, what one task reads is bounded: many small commits together, or a part of a large one (`Edge`).
What the driver holds of an epoch is bounded by that, too: some numbers for each range (`thinned`), not for each commit.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from spark_consumers.decode.frames import Transaction
from spark_consumers.lake.epoch.packed import PackedTable
from spark_consumers.lake.epoch.stage import RangeTask
from spark_consumers.lake.manifest.chain import LIVE, Manifest, StreamPosition, TableVersion
from spark_consumers.lake.manifest.table_version import HELD, RESUMING
from spark_consumers.lake.tables.disclosed import succeeding
from spark_consumers.lake.tables.origin import Joins, joins
from spark_consumers.lake.tables.states import stream_of
from walsender_bridge.change_log.client import CutPoint, StreamCut
from walsender_bridge.change_log.protocol import READ_BATCH_BYTES
from walsender_bridge.change_log.replica_order import rotated
from walsender_bridge.postgres.protocol.lsn import Lsn

#: Bytes of the log, as stored, that one task reads.
RANGE_BYTES: Final = 8 << 20
#: Ranges whose changes of a table one task composes: more than an epoch of the configuration's default size has.
COMPOSED_RANGES: Final = 40
#: Entries of a commit that one task reads in any case: capture ends an entry at 1 MiB, unless a row is longer.
_FEW_ENTRIES: Final = 8
#: How often `Pace` doubles: to 16 times the size. Fixed costs of an epoch are far below that, and a task's size does not change.
_DOUBLINGS: Final = 4


@dataclass(frozen=True, slots=True)
class Edge:
    """A place inside a commit where a range may begin: the offset of an entry.

    `begun`: the last transaction that began before it, in an entry that it does not end in; it may go on here. None: there is none
    in this commit.
    """

    offset: int
    begun: Transaction | None


#: Of a stream: where ranges may begin in its commits that are too large for one task, by the offset at which these begin. There
#: are `READ_BATCH_BYTES` between two of them, or one entry.
Edges = Mapping[int, Sequence[Edge]]


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

    A copy is shown once the lake's cut has passed its LSN, when the log may be far ahead: larger epochs spend less time on
    what each epoch costs. They double four times at most: an epoch is bounded, whatever the backlog is.
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


def needed(head: Manifest, cuts: Mapping[str, StreamCut]) -> dict[str, Lsn]:
    """How far each stream has to be read until the copies of all held tables can be shown; empty if that is now, or unknown."""
    found: dict[str, Lsn] = {}
    for name, table in head.tables.items():
        copy, stream = head.copies.get(name), stream_of(name)
        if table.state != HELD or (copy is not None and _joins(copy, head.streams[stream])):
            continue
        if copy is None or stream not in cuts or not _joins(copy, position_of(cuts[stream])):
            return {}
        found[stream] = max(found.get(stream, 0), copy.start_lsn)
    return found


def first_version(
    cut_at: Callable[[int], CutPoint | None], known: int, newest: int, lsn: Lsn
) -> int:
    """The first version at which a stream has been read up to `lsn`; the newest has.

    `cut_at`: the last commit up to a version. `known`: a version that has not. Asks as often as their distance has binary digits.
    """
    while newest - known > 1:
        middle = (known + newest) // 2
        cut = cut_at(middle)
        if cut is not None and cut.last_end_lsn >= lsn:
            newest = middle
        else:
            known = middle
    return newest


def thinned(commits: Iterable[CutPoint]) -> list[CutPoint]:
    """Those of the commits that ranges may end at, and the last one; between two there are `RANGE_BYTES`, or one commit."""
    kept: list[CutPoint] = []
    last: CutPoint | None = None
    begun = 0
    for commit in commits:
        if last is None:
            # What the first commit takes is not known; it is not counted.
            begun = commit.bytes_total
        elif commit.bytes_total - begun > RANGE_BYTES:
            kept.append(last)
            begun = last.bytes_total
        last = commit
    return kept if last is None else [*kept, last]


def choose(
    head: Manifest,
    version: int,
    cuts: Mapping[str, StreamCut],
    commits: Mapping[str, Sequence[CutPoint]],
    *,
    is_complete: bool = False,
) -> EpochPlan:
    """The epoch after `head` that ends at `version` of the log, or before if there is too much.

    `cuts`: where the newest version cuts each stream. `commits`: each stream's commits after `begin`, at most as many
    as one epoch may hold: the epoch ends where the first of them ends. `is_complete`: they are all up to `version`, maybe `thinned`.
    """
    ends = [
        listed[-1].version
        for stream, listed in commits.items()
        if not is_complete and listed and listed[-1].end_offset < cuts[stream].end_offset
    ]
    end = min([version, *ends])
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
        name: replace(
            succeeding(head.tables.get(name), table), state=LIVE, as_of=0, reason="", resync=""
        )
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


@dataclass(frozen=True, slots=True)
class _Piece:
    """Offsets that one task reads: [first, last). `begun`: see `Edge`, if it begins inside a commit."""

    first: int
    last: int
    begun: Transaction | None = None


def tasks(
    plan: EpochPlan,
    tables: Mapping[str, PackedTable],
    addresses: Mapping[str, Sequence[str]],
    late: Mapping[str, Sequence[CutPoint]],
    edges: Mapping[str, Edges],
    scratch: str,
    stage: str,
) -> list[RangeTask]:
    """The ranges to read, each from another replica of its stream first.

    `tables`: those that follow. `addresses`: of the replicas, by stream. `late`: for each fresh table the commits from its
    offset to where ranges begin. `edges`: by stream, of the commits that are `oversized`. `stage`: what the names of new files
    begin with.
    """
    following = _following(plan)
    ranges = {
        part.stream: _pieces(part.start, part.cuts, edges.get(part.stream, {}))
        for part in plan.ranges
        if part.stream in following
    }
    behind = {
        name: _pieces(plan.tables[name].offset, late.get(name, ()), edges.get(stream_of(name), {}))
        for name in sorted(plan.fresh)
    }
    # Tables are the same object in all tasks of a stream, and are sent to an executor once.
    work: list[tuple[str, Sequence[_Piece], tuple[PackedTable, ...], frozenset[str]]] = []
    parts = {stream: _parts_of(stream, ranges, behind) for stream in following}
    for name, pieces in behind.items():
        alone = len(pieces) == 1 and not ranges.get(stream_of(name))
        work.append((stream_of(name), pieces, (tables[name],), frozenset({name} if alone else ())))
    for stream, pieces in ranges.items():
        names = following[stream]
        whole = frozenset(n for n in names if not behind.get(n)) if len(pieces) == 1 else ()
        work.append((stream, pieces, tuple(tables[n] for n in names), frozenset(whole)))
    numbered = enumerate(
        (stream, piece, its, whole) for stream, pieces, its, whole in work for piece in pieces
    )
    return [
        RangeTask(
            stream,
            rotated(addresses[stream], number),
            piece.first,
            piece.last,
            number,
            scratch,
            stage,
            its,
            whole,
            piece.begun,
            parts[stream],
        )
        for number, (stream, piece, its, whole) in numbered
    ]


def _parts_of(
    stream: str, ranges: Mapping[str, Sequence[_Piece]], behind: Mapping[str, Sequence[_Piece]]
) -> int:
    """In how many parts each table of a stream is composed: its ranges have as many times what one task takes."""
    late = max(
        (len(found) for name, found in behind.items() if stream_of(name) == stream), default=0
    )
    return max(1, -(-(late + len(ranges.get(stream, ()))) // COMPOSED_RANGES))


def _following(plan: EpochPlan) -> dict[str, list[str]]:
    """The tables that follow, by stream."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, table in plan.tables.items():
        if table.state == LIVE:
            found[stream_of(name)].append(name)
    return found


def oversized(plan: EpochPlan, late: Mapping[str, Sequence[CutPoint]]) -> set[tuple[str, int, int]]:
    """The commits that may be too large for one task: stream, and offsets [first, end)."""
    following = _following(plan)
    parts = [(part.stream, part.start, part.cuts) for part in plan.ranges]
    parts += [(stream_of(n), plan.tables[n].offset, tuple(late.get(n, ()))) for n in plan.fresh]
    return {
        (stream, *commit)
        for stream, start, cuts in parts
        if stream in following
        for commit in _large(start, cuts)
    }


def _large(start: int, cuts: Sequence[CutPoint]) -> Iterator[tuple[int, int]]:
    first, total = start, None
    for cut in cuts:
        # What the first commit takes is not known.
        is_large = total is None or cut.bytes_total - total > RANGE_BYTES
        if is_large and cut.end_offset - first > _FEW_ENTRIES:
            yield first, cut.end_offset
        first, total = cut.end_offset, cut.bytes_total


def _pieces(start: int, cuts: Sequence[CutPoint], edges: Edges) -> list[_Piece]:
    """Ranges of about `RANGE_BYTES`, each from one commit's end to another's, and of large commits each from edge to edge."""
    found: list[_Piece] = []
    first, begin = start, None
    for cut in cuts:
        if inside := _parts(first, cut.end_offset, edges.get(first, ())):
            found += inside
            begin = None
        elif begin is None or cut.bytes_total - begin > RANGE_BYTES:
            found.append(_Piece(first, cut.end_offset))
            begin = cut.bytes_total
        else:
            found[-1] = replace(found[-1], last=cut.end_offset)
        first = cut.end_offset
    return found


def _parts(first: int, end: int, edges: Sequence[Edge]) -> list[_Piece]:
    """A commit in parts of about `RANGE_BYTES`; none if it is one part."""
    step = max(1, RANGE_BYTES // READ_BATCH_BYTES)
    begins = [Edge(first, None), *edges[step - 1 :: step]]
    ends = [*(edge.offset for edge in begins[1:]), end]
    parts = [_Piece(b.offset, last, b.begun) for b, last in zip(begins, ends, strict=True)]
    return parts if len(parts) > 1 else []
