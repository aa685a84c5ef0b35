"""The lake at an exact cut of a source: an epoch before it, with the log's tail up to it.

**Why it is exact.** The snapshot that a temporary slot exports has exactly the transactions whose commit record starts below its LSN. The
epoch is resolved before the snapshot is made: so what it has was committed before. Then a change is written to the
source, and the log is read as far as it: so, as the log has transactions in the order of their commits, it has all that the snapshot has. The tail
is folded without what was committed at or above the LSN. So the epoch with this tail has the same transactions as the snapshot,
whatever is written meanwhile. All of this is on one timeline, or there is no cut.

The epoch and the tail are kept by leases until the cut is closed.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spark_consumers.lake.catalog.open_catalog import for_reading
from spark_consumers.lake.flush import force_barrier
from spark_consumers.lake.live import log_lease
from spark_consumers.lake.live.log_tail import open_tail
from spark_consumers.lake.manifest import reader_leases
from spark_consumers.lake.manifest.chain import LIVE, Chain, Manifest
from spark_consumers.lake.reader import Snapshot, read
from spark_consumers.lake.store.lake_store import StoreOptions
from spark_consumers.lake.tables.noticed import known, unshown
from spark_consumers.lake.tables.sources import Source, read_publication
from spark_consumers.snapshot.exported import AwaitedTransaction, ExportedSnapshot, PublishedTable
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.errors import LakeError, SnapshotError
from walsender_bridge.postgres.protocol.lsn import Lsn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: What the name of the lease on the log begins with.
CONSUMER = "verify"


@dataclass(frozen=True)
class Cut:
    """A source and its tables in the lake at `exported.lsn`. `began`: of `time.monotonic`, when the snapshot was made.

    `left_out`: why a table cannot be read at the cut; the next epoch may have it.
    """

    exported: ExportedSnapshot
    began: float
    head: Manifest
    lake: Snapshot
    published: dict[str, PublishedTable]
    left_out: dict[str, str]

    @property
    def lsn(self) -> Lsn:
        """Where it is."""
        return self.exported.lsn


@contextmanager
def cut_of(
    spark: "SparkSession",
    chain: Chain,
    store: StoreOptions,
    log: str,
    source: Source,
    names: Collection[str],
    waiting: Callable[[AwaitedTransaction | None], None],
) -> Iterator[Cut]:
    """The source and these tables of the lake at one cut. Raises the errors of snapshots, connections, the lake and the log."""
    epoch = read(spark, str(chain.root), store=store)
    head = epoch.manifest
    lease = log_lease.lease_on(log, CONSUMER)
    with LogClient(log) as client:
        key = lease.hold(client, head.epoch)
    try:
        with ExportedSnapshot(source.dsn, waiting=waiting) as exported:
            began = time.monotonic()
            force_barrier(log, {source.stream: source.dsn})
            lake, left_out = _lake(spark, chain, log, source, head, names, exported)
            seen = read_publication(source, known(head, source.stream))
            left_out |= unshown(lake.manifest, {source.stream: seen})
            tables = exported.tables(source.publication)
            published = {f"{source.stream}.{table.full_name}": table for table in tables}
            yield Cut(exported, began, head, lake, published, left_out)
            # Until here the epoch is held by its snapshot.
            del epoch
    finally:
        lease.release(key)


def _lake(
    spark: "SparkSession",
    chain: Chain,
    log: str,
    source: Source,
    head: Manifest,
    names: Collection[str],
    exported: ExportedSnapshot,
) -> tuple[Snapshot, dict[str, str]]:
    if source.stream not in head.streams:
        raise LakeError(
            f"the lake has nothing of stream {source.stream} yet",
            where=str(chain.root),
            repair="check that `tuskline lake run` is running",
        )
    # A run names its tables as the source does.
    tables = {
        n: replace(head.tables[n], lake_name="")
        for n in names
        if n in head.tables and head.tables[n].state == LIVE
    }
    head = replace(
        head,
        tables=tables,
        views={},
        feeds={},
        copies={},
        streams={source.stream: head.streams[source.stream]},
    )
    reader = reader_leases.lease_on(chain.store)
    log_id = head.log_id or str(chain.identity()["log_id"])
    tail = open_tail(
        spark,
        chain.root,
        head,
        log_id,
        log,
        CONSUMER,
        None if reader is None else reader.reader,
        before_lsn=exported.lsn,
    )
    timeline = tail.streams[source.stream].timeline
    if timeline != exported.timeline:
        raise SnapshotError(
            f"the snapshot is of timeline {exported.timeline}, and the log of timeline {timeline}",
            where=f"stream {source.stream}",
            repair="verify again once capture follows the new primary: see `tuskline status`",
        )
    shown = {n: t for n, t in tail.tables.items() if n not in tail.left_out and t.state == LIVE}
    left_out = {
        name: tail.left_out.get(name) or table.reason or table.state
        for name, table in tail.tables.items()
        if name not in shown
    }
    manifest = replace(head, epoch=tail.version, streams=tail.streams, tables=shown)
    lake = Snapshot(spark, chain.root, manifest, catalog=for_reading(chain), tail=tail)
    return lake, left_out
