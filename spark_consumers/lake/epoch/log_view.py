"""What an epoch needs to know of the log before it is planned: its commits."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from spark_consumers.decode.entries import last_begun
from spark_consumers.decode.frames import Transaction
from spark_consumers.lake.epoch.plan import (
    Edge,
    EpochPlan,
    begin,
    choose,
    first_version,
    needed,
    oversized,
    position_of,
    thinned,
)
from spark_consumers.lake.epoch.rolled_back import mark_of, mark_of_copy, why_apart
from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.tables.states import stream_of
from spark_consumers.sources.history import around, differs
from walsender_bridge.change_log.client import CutPoint, LogStatus, StreamCut
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.postgres.protocol.lsn import Lsn


def apart(
    head: Manifest, status: LogStatus, streams: Collection[str], *, thorough: bool
) -> dict[str, str]:
    """Those of the streams of which the log does not have the lake's history any more, and why.

    `thorough`: the commits around each cut are compared, not only the end of the log.
    """
    found = {}
    for stream in sorted(set(head.streams) & set(streams)):
        mark, cut = mark_of(head.streams[stream]), status.streams.get(stream)
        commits = None
        if thorough and cut is not None:
            with StreamReader.of(cut) as reader:
                commits = around(reader, mark, cut, status.version)
        if why := why_apart(head, status, stream, commits):
            found[stream] = why
    return found


def without_lost(head: Manifest, status: LogStatus) -> tuple[Manifest, set[str]]:
    """The head without the copies from a history that the log has lost, and their streams."""
    lost = set()
    for name, copy in head.copies.items():
        stream, marked = stream_of(name), mark_of_copy(copy)
        cut = status.streams.get(stream)
        if marked is None or cut is None:
            continue
        with StreamReader.of(cut) as reader:
            commits = around(reader, marked[1], cut, status.version)
        if differs(*marked, status, stream, commits):
            lost.add(name)
    copies = {name: copy for name, copy in head.copies.items() if name not in lost}
    return replace(head, copies=copies), {stream_of(name) for name in lost}


def first_link(lake: str, status: LogStatus, steady_at: float) -> Manifest:
    """The first link of a new lake: it begins where the log is now."""
    return Manifest(
        lake=lake,
        link=1,
        epoch=status.version,
        previous_epoch=0,
        term=1,
        published_at=time.time(),
        steady_at=steady_at,
        streams={stream: position_of(cut) for stream, cut in status.streams.items()},
    )


def next_epoch(
    head: Manifest, status: LogStatus, max_bytes: int, *, everything: bool
) -> tuple[EpochPlan, dict[str, Sequence[CutPoint]]]:
    """What the next epoch holds, and what each table that it first shows still lacks of the log.

    `max_bytes`: of each stream. `everything`: as far as it takes to show all held tables, whatever that costs.
    """
    lsns = needed(head, status.streams) if everything else {}
    if lsns:
        version = version_with(head, status, lsns)
        commits = all_commits(head, status, version)
        plan = choose(head, version, status.streams, commits, is_complete=True)
    else:
        plan = choose(head, status.version, status.streams, new_commits(head, status, max_bytes))
    return plan, late_commits(head, status, plan)


def new_commits(head: Manifest, status: LogStatus, max_bytes: int) -> dict[str, Sequence[CutPoint]]:
    """Each stream's commits after the lake's cut, as many as `max_bytes` allow."""
    return {
        stream: reader.plan(start, status.version, max_bytes)
        for stream, start, reader in _unread(head, status)
    }


def all_commits(head: Manifest, status: LogStatus, version: int) -> dict[str, Sequence[CutPoint]]:
    """Each stream's commits after the lake's cut up to a version, `thinned`."""
    return {
        stream: thinned(_commits(reader, start, status.streams[stream].end_offset, version))
        for stream, start, reader in _unread(head, status)
    }


def _unread(head: Manifest, status: LogStatus) -> Iterator[tuple[str, int, StreamReader]]:
    """The streams that have more than the lake: from where on, and a reader."""
    for stream, cut in status.streams.items():
        position = head.streams.get(stream)
        if position is not None and position.offset < cut.end_offset:
            with StreamReader.of(cut) as reader:
                yield stream, begin(position, cut), reader


def version_with(head: Manifest, status: LogStatus, lsns: Mapping[str, Lsn]) -> int:
    """The first version at which each of these streams has been read up to its LSN; the newest is one."""
    found = [head.epoch + 1]
    for stream, lsn in lsns.items():
        with StreamReader.of(status.streams[stream]) as reader:

            def cut_at(version: int, reader: StreamReader = reader) -> CutPoint | None:
                return reader.cut_before(version + 1)

            found.append(first_version(cut_at, head.epoch, status.version, lsn))
    return max(found)


def late_commits(
    head: Manifest, status: LogStatus, plan: EpochPlan
) -> dict[str, Sequence[CutPoint]]:
    """For each table that the epoch shows first, or again: what it lacks of the log before the epoch's range, `thinned`."""
    late: dict[str, Sequence[CutPoint]] = {}
    for name in plan.fresh:
        stream = stream_of(name)
        cut = status.streams[stream]
        until = begin(head.streams[stream], cut)
        with StreamReader.of(cut) as reader:
            late[name] = thinned(_commits(reader, plan.tables[name].offset, until, status.version))
    return late


def version_before(cut: StreamCut, offset: int, newest: int) -> int:
    """The newest version, up to `newest`, of which the stream has nothing behind this offset, where a transaction ends.

    A consumer that has published it needs the stream from the offset on. Raises `TrimmedError`.
    """
    with StreamReader.of(cut) as reader:
        behind = reader.plan(offset, newest, max_versions=1)
    # Versions are of all streams: this one has no commit between its commit before the offset and the first one behind it.
    return behind[0].version - 1 if behind else newest


def _commits(reader: StreamReader, start: int, until: int, version: int) -> Iterator[CutPoint]:
    """The commits from `start` that end at or before `until`, however many there are; some thousand at a time."""
    while start < until:
        page = [c for c in reader.plan(start, version) if c.end_offset <= until]
        if not page:
            return
        yield from page
        start = page[-1].end_offset


def edges(
    status: LogStatus, plan: EpochPlan, late: Mapping[str, Sequence[CutPoint]]
) -> dict[str, dict[int, list[Edge]]]:
    """Where ranges may begin in the commits that are too large for one task (`Edges`), by stream.

    A log server reads each of these commits for that, and sends only the entries in which a transaction begins that they do not end.
    """
    found: dict[str, dict[int, list[Edge]]] = defaultdict(dict)
    for stream, first, end in sorted(oversized(plan, late)):
        with StreamReader.of(status.streams[stream]) as reader:
            found[stream][first] = list(_inside(reader, first, end))
    return found


def _inside(reader: StreamReader, first: int, end: int) -> Iterator[Edge]:
    begun: Transaction | None = None
    offset = first
    while True:
        batch = reader.read_batch(offset, end, ())
        if batch.entries:
            begun = last_begun(batch.entries[-1])
        offset = batch.next_offset
        if offset >= end:
            return
        yield Edge(offset, begun)
