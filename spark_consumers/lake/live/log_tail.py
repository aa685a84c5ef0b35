"""The log's tail behind an epoch, up to the newest version: planned here, read and folded by the executors.

Every table is read up to one version, at which no transaction is split, so a live read shows one state of all tables, as an epoch
does; and all tables' changes are read by one job, whose cost does not depend on how many tables there are. Folds of a small tail come
back to the driver, packed. Those of a large one are files in a folder of the reader (`reader_files`), divided by the tables' keys, and
are composed part by part when they are read: so what a task holds is bounded, as when an epoch is written.

A table whose changes have another shape than the table in the lake is left out, by name, until the epoch that has them.
"""

import json
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from spark_consumers.decode.masking import opened
from spark_consumers.decode.types import arrow_schema, spark_schema
from spark_consumers.lake.epoch.log_view import all_commits, apart, edges
from spark_consumers.lake.epoch.packed import PackedTable
from spark_consumers.lake.epoch.plan import EpochPlan, choose, tasks
from spark_consumers.lake.epoch.stage import RangeTask
from spark_consumers.lake.epoch.target import Target, columns_of
from spark_consumers.lake.epoch.task_rows import frame_of
from spark_consumers.lake.live.effect import effect_schema
from spark_consumers.lake.live.log_lease import lease_on
from spark_consumers.lake.live.merge import merged
from spark_consumers.lake.live.tail import (
    ERROR,
    FAULT,
    FOUND,
    PARTITIONS,
    FoldTask,
    Found,
    effect_tasks,
    fold_tasks,
)
from spark_consumers.lake.manifest import reader_files
from spark_consumers.lake.manifest.chain import LIVE, Manifest, TableVersion
from spark_consumers.lake.manifest.reader_leases import HOLD
from spark_consumers.lake.manifest.table_version import RESUMING, STALE
from spark_consumers.lake.store.place import Place, carried, remove_tree
from spark_consumers.lake.tables import noticed
from spark_consumers.lake.tables.schema_change import first_layout
from spark_consumers.lake.tables.states import stream_of
from spark_consumers.lake.tables.table_filter import filter_of
from spark_consumers.spark.requirements import has_jvm
from walsender_bridge.change_log.client import LogClient, LogStatus
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.errors import LakeError, TrimmedError, from_wire
from walsender_bridge.postgres.protocol.lsn import Lsn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Why a table with a row filter is left out.
_PATCHED: Final = "it has a row filter, and an unchanged TOAST value of an UPDATE was not sent; the next epoch has it, or it is copied again"
#: Bytes of a table's folds that are sent to all executors for a query.
_SMALL: Final = 16 << 20
#: Bytes of a table's folds that are composed by the driver, if they are here.
_OWN: Final = 1 << 20

#: Folders of live reads that are gone, and since when; a later one removes them.
_dropped: deque[tuple[Place, float]] = deque()
_removing = threading.Lock()


class LogTail:
    """The tail of the log behind an epoch, up to its newest version. See `open_tail`.

    `version` and `streams`: where it ends. `tables`: what can be shown there, but for those that are `left_out`, and why.
    """

    def __init__(
        self, spark: "SparkSession", plan: EpochPlan, targets: Mapping[str, Target]
    ) -> None:
        self._spark = spark
        self._targets = targets
        self._folds: dict[str, list[Found]] = defaultdict(list)
        self.version = plan.version
        self.streams = plan.streams
        self.tables = plan.tables
        self.left_out: dict[str, str] = {}

    def read(self, work: Sequence[RangeTask]) -> None:
        """Have the executors read these ranges. Raises the log's errors."""
        came: dict[str, set[int]] = defaultdict(set)
        for one in _folded(self._spark, fold_tasks(work)):
            if one.kind == ERROR:
                raise from_wire(json.loads(one.content))
            if one.kind == FAULT:
                self.left_out.setdefault(one.table, one.content.decode())
            elif one.kind == PARTITIONS:
                came[one.table].update(json.loads(one.content))
            else:
                self._folds[one.table].append(one)
        for name, folds in self._folds.items():
            if self._targets[name].row_filter is not None and any(one.patches for one in folds):
                # The row may not be in the table: then an epoch has the table copied.
                self.left_out.setdefault(name, _PATCHED)
        # What a poll of the source would say of them is not known here.
        self.left_out |= noticed.after_partition_changes(self.tables, came, ())[1]

    def merged(self, name: str, table: "DataFrame") -> "DataFrame":
        """The table `name`, as its epoch has it, with the tail's changes."""
        folds = self._folds.get(name)
        if not folds:
            return table
        target = self._targets[name]
        in_order = sorted(folds, key=lambda one: one.number)
        return merged(
            table,
            _effect(self._spark, target, folds),
            target.columns.names,
            target.identity,
            small=sum(one.size for one in folds) <= _SMALL,
            patches=any(one.patches for one in folds),
            truncated=any(one.truncated for one in folds),
            emptied=next((one.emptied for one in in_order if one.emptied), None),
        )


def _folded(spark: "SparkSession", work: Sequence[FoldTask]) -> list[Found]:
    """What the executors find in these ranges.

    With a JVM of its own a session runs them in the workers that it has; a data source, as over Spark Connect, is planned by two
    Python processes that Spark starts for it, which takes longer than all the rest of a small tail.
    """
    if has_jvm(spark):
        context = spark.sparkContext
        found: list[Found] = context.parallelize(work, len(work)).flatMap(carried(_found)).collect()
        return found
    return [Found.of(row.asDict()) for row in frame_of(spark, FOUND, work).collect()]


def _found(task: FoldTask) -> list[Found]:
    return task.found()


def _effect(spark: "SparkSession", target: Target, folds: Sequence[Found]) -> "DataFrame":
    """The effect of a table's folds: a few rows that are here already are composed here, and others by the executors.

    Nothing is decoded here. See `_folded` for what a data source costs.
    """
    work = effect_tasks(target, folds)
    is_here = has_jvm(spark) and len(work) == 1 and not any(one.path for one in folds)
    if not is_here or sum(one.size for one in folds) > _OWN:
        return frame_of(spark, effect_schema(target), work)
    # In one piece: Spark 4.1 takes an empty batch for the end of what it is given.
    rows = pa.Table.from_batches(work[0].run(), effect_schema(target)).combine_chunks()
    return spark.createDataFrame(rows, spark_schema(rows.schema))


def open_tail(
    spark: "SparkSession",
    root: Place,
    head: Manifest,
    log_id: str,
    log: str,
    consumer: str,
    reader: str | None,
    mask_key: bytes = b"",
    before_lsn: Lsn | None = None,
) -> LogTail:
    """The tail of the log at the address `log` behind the epoch `head`, of a lake in `root` that is of the log with this id.

    `consumer`: what the name of the reader's lease on the log begins with. `mask_key`: by which columns are hashed, if it is known
    here. `reader`: the name of its record in the lake; None: it cannot write there. `before_lsn`: the tail ends there, of
    transactions whose commit record starts below; the log has been read to it.
    Raises `LakeError` if another log answers, or one without the lake's history; `TrimmedError` if the log does
    not have all that is behind the epoch; the log's errors.
    """
    _remove_dropped()
    lease = lease_on(log, consumer)
    with LogClient(log) as client:
        _check_log(client.status(), log_id, log)
        key = lease.hold(client, head.epoch)
        try:
            # What the lease keeps is what the log has now.
            status = _checked(head, client.status(), log)
            plan = _plan(head, status)
            targets = _targets(root, plan, mask_key)
            packed = {name: PackedTable.of(target, ((), 0)) for name, target in targets.items()}
            addresses = {stream: cut.addresses for stream, cut in status.streams.items()}
            folder = None if reader is None else reader_files.new_folder(root, reader)
            scratch = "" if folder is None else str(folder)
            work = tasks(plan, packed, addresses, {}, edges(status, plan, {}), scratch, "")
            work = [replace(each, before_lsn=before_lsn) for each in work]
            found = LogTail(spark, plan, targets)
            if folder is not None:
                weakref.finalize(found, _drop, folder).atexit = False
            unread = {stream_of(name) for name in targets} - {each.stream for each in work}
            _check_readable(status, unread)
            if work:
                found.read(work)
        finally:
            # What is read again is what the folds were packed into.
            lease.release(key)
    return found


def _drop(folder: Place) -> None:
    # Nothing but an append: it may run in the middle of anything.
    _dropped.append((folder, time.monotonic()))


def _remove_dropped() -> None:
    """Remove the folders that nothing reads from any more."""
    # A thread at a time: another one would take what is younger. What is appended meanwhile comes last.
    with _removing:
        while _dropped and time.monotonic() - _dropped[0][1] >= HOLD:
            remove_tree(_dropped.popleft()[0])


def _check_log(status: LogStatus, log_id: str, log: str) -> None:
    if status.log_id != log_id:
        raise LakeError(
            f"the lake is of log {log_id}, and log {status.log_id} answers",
            where=log,
            repair="specify the log that the lake is written from ([log] in its configuration)",
        )


def _checked(head: Manifest, status: LogStatus, log: str) -> LogStatus:
    """The log's status, of the lake's streams. Raises `LakeError` unless the log has the lake's history, and `TrimmedError`."""
    if status.version < head.epoch:
        raise LakeError(
            f"the log can be read up to version {status.version}, which is before epoch {head.epoch}",
            where=log,
            repair="check that its log servers are running; read the newest epoch meanwhile: omit live",
        )
    streams = {name: cut for name, cut in status.streams.items() if name in head.streams}
    status = replace(status, streams=streams)
    for stream, why in apart(head, status, streams, thorough=True).items():
        raise LakeError(
            why,
            where=f"stream {stream}, {log}",
            repair="read the newest epoch: omit live; see `tuskline status`",
        )
    following = {stream_of(name) for name, table in head.tables.items() if table.state == LIVE}
    for stream in sorted(following):
        if stream not in streams:
            raise LakeError(
                "the log does not have a stream of the lake",
                where=f"stream {stream}, {log}",
                repair="read the newest epoch: omit live; see `tuskline status`",
            )
        if head.streams[stream].offset < streams[stream].low_offset:
            raise TrimmedError(
                f"epoch {head.epoch} ends at offset {head.streams[stream].offset}, and the log begins at"
                f" {streams[stream].low_offset}",
                where=f"stream {stream}, {log}",
                repair="try again: a newer epoch may have been published; check that `tuskline lake run` is running",
            )
    return status


def _plan(head: Manifest, status: LogStatus) -> EpochPlan:
    """The newest version as if it were the next epoch, of the tables that follow. What is being copied is not shown before an epoch."""
    tables = {name: _followed(head, table) for name, table in head.tables.items()}
    head = replace(head, tables=tables, copies={})
    commits = all_commits(head, status, status.version)
    return choose(head, status.version, status.streams, commits, is_complete=True)


def _followed(head: Manifest, table: TableVersion) -> TableVersion:
    """The table, stale if its changes cannot be read here."""
    if table.state == RESUMING:
        return replace(table, state=STALE, reason="it follows again from the next epoch on")
    if table.state == LIVE and not table.layout:
        why = "an earlier version of Tuskline has copied it, without a record of its columns"
        return replace(table, state=STALE, as_of=head.epoch, reason=why)
    return table


def _check_readable(status: LogStatus, streams: AbstractSet[str]) -> None:
    """Raise the log server's error unless this reader may read these streams, of which no entry is read: nothing else asks."""
    for stream in streams & status.streams.keys():
        with StreamReader.of(status.streams[stream]) as reader:
            reader.schemas(())


def _targets(root: Place, plan: EpochPlan, key: bytes) -> dict[str, Target]:
    """The tables that follow, as the executors need them. `key`: of masked columns."""
    following = [(name, table) for name, table in plan.tables.items() if table.state == LIVE]
    return {name: _target(root, name, t, key) for name, t in following}


def _target(root: Place, name: str, table: TableVersion, key: bytes) -> Target:
    columns = arrow_schema(columns_of(table))
    path = str(root / table.path)
    return replace(
        Target.of(name, table, f"{path}/data/", columns, columns),
        layouts=first_layout(table),
        partitions=noticed.partitions(table),
        # Of a table without any, the configuration alone says what becomes of the first one.
        quarantines=bool(table.quarantine_files),
        quarantine_files=tuple(f"{path}/{file}" for file in table.quarantine_files),
        chunks=table.chunks,
        masking=opened(table.masks, key),
        row_filter=filter_of(name, table),
    )
