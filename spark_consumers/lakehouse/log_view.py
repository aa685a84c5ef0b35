"""What an epoch needs to know of the log before it is planned: commits, and names that a table had."""

from collections.abc import Iterable, Mapping, Sequence

from spark_consumers.lakehouse.manifest import Manifest, TableVersion
from spark_consumers.lakehouse.plan import Plan, begin
from spark_consumers.lakehouse.states import stream_of
from spark_consumers.tables import relation_of
from walsender_bridge.change_log.client import CutPoint, LogStatus, ReplicaClient


def new_commits(
    head: Manifest, status: LogStatus, max_bytes: int | None
) -> dict[str, Sequence[CutPoint]]:
    """Each stream's commits behind the lake's cut: as many as `max_bytes` allow, or all of them."""
    commits: dict[str, Sequence[CutPoint]] = {}
    for stream, cut in status.streams.items():
        position = head.streams.get(stream)
        if position is None or position.offset >= cut.end_offset:
            continue
        start = begin(position, cut)
        with ReplicaClient(cut.address) as replica:
            if max_bytes is None:
                commits[stream] = _all(replica, stream, start, cut.end_offset, status.version)
            else:
                commits[stream] = replica.plan(stream, start, status.version, max_bytes)
    return commits


def late_commits(head: Manifest, status: LogStatus, plan: Plan) -> dict[str, Sequence[CutPoint]]:
    """For each table that the epoch shows first, or again: what it lacks of the log before the epoch's range."""
    late: dict[str, Sequence[CutPoint]] = {}
    for name in plan.fresh:
        stream = stream_of(name)
        cut = status.streams[stream]
        until = begin(head.streams[stream], cut)
        with ReplicaClient(cut.address) as replica:
            late[name] = _all(replica, stream, plan.tables[name].offset, until, status.version)
    return late


def _all(
    replica: ReplicaClient, stream: str, start: int, until: int, version: int
) -> list[CutPoint]:
    """The commits from `start` that end at or before `until`, however many there are."""
    found: list[CutPoint] = []
    while start < until:
        page = [c for c in replica.plan(stream, start, version) if c.end_offset <= until]
        if not page:
            break
        found += page
        start = page[-1].end_offset
    return found


def aliases(
    status: LogStatus, tables: Iterable[tuple[str, TableVersion]]
) -> Mapping[str, tuple[str, ...]]:
    """For tables by name: other names under which the log has the same table, because it was renamed."""
    wanted = list(tables)
    found: dict[str, tuple[str, ...]] = {}
    for stream in {stream_of(name) for name, _ in wanted} & set(status.streams):
        with ReplicaClient(status.streams[stream].address) as replica:
            relations = [relation_of(record) for record in replica.relations(stream)]
        for name, table in wanted:
            if stream_of(name) == stream:
                found[name] = tuple(
                    r.full_name
                    for r in relations
                    if r.oid == table.relation_id and f"{stream}.{r.full_name}" != name
                )
    return found
