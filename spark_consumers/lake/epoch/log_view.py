"""What an epoch needs to know of the log before it is planned: commits, and names that a table had."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from spark_consumers.lake.epoch.plan import EpochPlan, begin, position_of
from spark_consumers.lake.epoch.rolled_back import mark_of, mark_of_copy, why_apart
from spark_consumers.lake.manifest.chain import Manifest, TableVersion
from spark_consumers.lake.tables.states import stream_of
from spark_consumers.sources.history import around, differs
from spark_consumers.sources.tables import relation_of
from walsender_bridge.change_log.client import CutPoint, LogStatus, StreamCut
from walsender_bridge.change_log.stream_reader import StreamReader


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


def new_commits(
    head: Manifest, status: LogStatus, max_bytes: int | None
) -> dict[str, Sequence[CutPoint]]:
    """Each stream's commits after the lake's cut: as many as `max_bytes` allow, or all of them."""
    commits: dict[str, Sequence[CutPoint]] = {}
    for stream, cut in status.streams.items():
        position = head.streams.get(stream)
        if position is None or position.offset >= cut.end_offset:
            continue
        start = begin(position, cut)
        with StreamReader.of(cut) as reader:
            if max_bytes is None:
                commits[stream] = _all(reader, start, cut.end_offset, status.version)
            else:
                commits[stream] = reader.plan(start, status.version, max_bytes)
    return commits


def late_commits(
    head: Manifest, status: LogStatus, plan: EpochPlan
) -> dict[str, Sequence[CutPoint]]:
    """For each table that the epoch shows first, or again: what it lacks of the log before the epoch's range."""
    late: dict[str, Sequence[CutPoint]] = {}
    for name in plan.fresh:
        stream = stream_of(name)
        cut = status.streams[stream]
        until = begin(head.streams[stream], cut)
        with StreamReader.of(cut) as reader:
            late[name] = _all(reader, plan.tables[name].offset, until, status.version)
    return late


def version_behind(offset: int, cut: StreamCut, version: int) -> int:
    """The version that a lease has to name so that the log keeps the stream from this offset on. `version`: where the log is."""
    with StreamReader.of(cut) as reader:
        commits = reader.plan(offset, version, max_versions=1)
    return commits[0].version - 1 if commits else version


def _all(reader: StreamReader, start: int, until: int, version: int) -> list[CutPoint]:
    """The commits from `start` that end at or before `until`, however many there are."""
    found: list[CutPoint] = []
    while start < until:
        page = [c for c in reader.plan(start, version) if c.end_offset <= until]
        if not page:
            break
        found += page
        start = page[-1].end_offset
    return found


def aliases(
    status: LogStatus, tables: Iterable[tuple[str, TableVersion]]
) -> Mapping[str, tuple[str, ...]]:
    """For tables by name: other names under which the log has the same table, because it was renamed."""
    by_stream: dict[str, list[tuple[str, TableVersion]]] = defaultdict(list)
    for name, table in tables:
        by_stream[stream_of(name)].append((name, table))
    found: dict[str, tuple[str, ...]] = {}
    for stream in by_stream.keys() & set(status.streams):
        with StreamReader.of(status.streams[stream]) as reader:
            names = _names_by_oid(reader.relations())
        for name, table in by_stream[stream]:
            own = name.partition(".")[2]
            known = names.get(table.relation_id, ())
            found[name] = tuple(other for other in known if other != own)
    return found


def _names_by_oid(records: Iterable[bytes]) -> Mapping[int, Sequence[str]]:
    names: dict[int, list[str]] = defaultdict(list)
    for record in records:
        oid, name = _named(bytes(record))
        names[oid].append(name)
    return names


@lru_cache(maxsize=100_000)
def _named(record: bytes) -> tuple[int, str]:
    """OID and name in a schema record: the log has them all, and an epoch few new ones."""
    relation = relation_of(record)
    return relation.oid, relation.full_name
