"""One epoch, from the log to the manifest.

In this order: the executors read and write files that nobody knows (*staging*); every table gets its
files in one commit to a branch that nobody reads (*table writes*); one link is created (*the manifest*).
Only the last is visible, and it is one file. A crash before it leaves things that no manifest names; a crash
after it leaves a whole epoch. Repeating any part is harmless, because a table write follows the snapshot
that the *manifest* names, whatever was written since.
"""

import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq
import structlog
from pyspark.sql import SparkSession

from spark_consumers.lakehouse.complete import Completed, CompleteTask, run_complete
from spark_consumers.lakehouse.files import Stage, write_data
from spark_consumers.lakehouse.manifest import Chain, Manifest, TableVersion
from spark_consumers.lakehouse.plan import Plan, choose, tasks
from spark_consumers.lakehouse.stage import (
    ComposeTask,
    Staged,
    Target,
    in_order,
    run_compose,
    run_range,
    total_changes,
)
from spark_consumers.lakehouse.table_format import (
    ROW_ID,
    FileInfo,
    ScanFile,
    TableFormat,
    TableWrite,
)
from walsender_bridge import fail_point
from walsender_bridge.change_log.client import CutPoint, LogStatus, ReplicaClient
from walsender_bridge.errors import CorruptError, TusklineError, from_wire

#: Tables that are committed at the same time.
_THREADS = 4
#: A table is rewritten without its files of deletes when there are more than this, and more for each
#: further `_COMPACT_BYTES` of data: then the rewriting stays a small part of the work. Tables differ by up
#: to as much again, so that they do not all come due in one epoch.
_COMPACT_FILES = 8
_COMPACT_BYTES = 32 << 20
#: Bytes of a table's files that one task looks at.
_SCAN_BYTES = 64 << 20
#: Up to so many values, files that have none of them are not even opened.
_NARROWED = 200

log = structlog.get_logger()

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass
class Timings:
    """Seconds that each part of a round took; of the tables, each one's own."""

    stage: float = 0.0
    complete: float = 0.0
    write: float = 0.0
    publish: float = 0.0
    tables: dict[str, float] = field(default_factory=dict)


class EpochWriter:
    """Writes epochs into one lake, for one term."""

    def __init__(
        self,
        spark: SparkSession,
        chain: Chain,
        tables: TableFormat,
        term: int,
        *,
        max_bytes: int,
    ) -> None:
        self._spark = spark
        self._chain = chain
        self._format = tables
        self._term = term
        self._max_bytes = max_bytes
        self._attempt = 0
        #: A table's schemas never change in a folder.
        self._schemas: dict[str, tuple[pa.Schema, pa.Schema]] = {}
        self._wrote_one = threading.Event()
        #: What plain readers see of each table folder, as far as this writer has shown it.
        self._shown: dict[str, int] = {}

    def write(
        self,
        head: Manifest,
        status: LogStatus,
        copied: Mapping[str, TableVersion],
        set_aside: Mapping[str, str],
    ) -> Manifest:
        """Write and publish the epoch after `head`; its manifest.

        Raises `FencedError` when a newer writer has taken over; whatever else is raised, the lake is as
        it was, and the round can be repeated.
        """
        began = time.monotonic()
        self._attempt += 1
        self._wrote_one.clear()
        stage = Stage(head.link + 1, self._term, self._attempt)
        timings = Timings()
        plan, late = self._plan(head, status, copied)
        scratch = self._chain.staging / str(stage)
        try:
            targets = {name: self._target(name, t, stage) for name, t in plan.tables.items()}
            staged = self._stage(plan, targets, status, late, scratch)
            timings.stage = time.monotonic() - began
            fail_point.hit("staged")
            tables = self._write_tables(plan, targets, stage, staged, timings)
            timings.write = time.monotonic() - began - timings.stage
            manifest = head.next(
                epoch=plan.version,
                term=self._term,
                stage=str(stage),
                streams=plan.streams,
                tables=tables,
                set_aside=dict(set_aside),
                changes=total_changes(staged.values()),
                seconds=round(time.monotonic() - began, 3),
            )
            fail_point.hit("before-manifest")
            self._chain.publish(manifest, head)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        fail_point.hit("after-manifest")
        timings.publish = time.monotonic() - began - timings.stage - timings.write
        self._tell(manifest, timings, time.monotonic() - began)
        return manifest

    def show(self, manifest: Manifest) -> None:
        """Let readers of the plain tables see what was published: all that they do not see yet.

        So a table that could not be shown is shown the next time, whether it has changed again or not.
        """

        def show(_: str, table: TableVersion) -> None:
            self._format.show(self._path(table), self._term, table.snapshot_id)
            self._shown[table.path] = table.snapshot_id

        readable = manifest.readable.items()
        unseen = [(n, t) for n, t in readable if self._shown.get(t.path) != t.snapshot_id]
        if unseen:
            self._each(unseen, show)

    def _path(self, table: TableVersion) -> str:
        return str(self._chain.root / table.path)

    def _plan(
        self, head: Manifest, status: LogStatus, copied: Mapping[str, TableVersion]
    ) -> tuple[Plan, dict[str, Sequence[CutPoint]]]:
        """What the epoch holds, and for each table that it shows first what it still lacks of the log."""
        cuts = status.streams
        commits: dict[str, Sequence[CutPoint]] = {}
        for stream, cut in cuts.items():
            position = head.streams.get(stream)
            if position is not None and position.offset < cut.end_offset:
                with ReplicaClient(cut.address) as replica:
                    commits[stream] = replica.plan(
                        stream, position.offset, status.version, self._max_bytes
                    )
        plan = choose(head, status.version, cuts, commits, copied)
        late: dict[str, Sequence[CutPoint]] = {}
        for name in plan.fresh:
            stream = name.partition(".")[0]
            until = head.streams[stream].offset
            late[name] = self._all_commits(
                stream, cuts[stream].address, plan.tables[name].offset, until, status.version
            )
        return plan, late

    def _all_commits(
        self, stream: str, address: str, start: int, until: int, version: int
    ) -> list[CutPoint]:
        found: list[CutPoint] = []
        with ReplicaClient(address) as replica:
            while start < until:
                page = [c for c in replica.plan(stream, start, version) if c.end_offset <= until]
                if not page:
                    break
                found += page
                start = page[-1].end_offset
        return found

    def _stage(
        self,
        plan: Plan,
        targets: Mapping[str, Target],
        status: LogStatus,
        late: Mapping[str, Sequence[CutPoint]],
        scratch: Path,
    ) -> dict[str, Staged]:
        """Have everything read and written; what there is, by table."""
        addresses = {stream: cut.address for stream, cut in status.streams.items()}
        work = tasks(plan, targets, addresses, late, str(scratch))
        found: dict[str, list[Staged]] = defaultdict(list)
        for part in self._run(run_range, work):
            for one in part:
                found[one.table].append(one)
        partial = [name for name, parts in found.items() if parts[0].partial is not None]
        composing = [
            ComposeTask(
                targets[name],
                tuple(p.partial for p in in_order(found[name]) if p.partial is not None),
                plan.version,
                str(scratch),
                total_changes(found[name]),
            )
            for name in partial
        ]
        for one in self._run(run_compose, composing):
            found[one.table] = [one]
        return {name: part for name, (part,) in found.items()}

    def _target(self, name: str, table: TableVersion, stage: Stage) -> Target:
        path = self._path(table)
        if path not in self._schemas:
            self._schemas[path] = self._format.schemas(path)
        columns, file_schema = self._schemas[path]
        return Target(
            name=name,
            relation=name.partition(".")[2],
            prefix=f"{path}/data/{stage}",
            columns=columns,
            file_schema=file_schema,
            key=table.key,
            start_lsn=table.start_lsn,
            relation_id=table.relation_id,
        )

    def _run(self, function: Callable[[_In], _Out], work: Sequence[_In]) -> list[_Out]:
        """Run the tasks on the executors. An error of ours is raised here as what it was there."""
        if not work:
            return []
        context = self._spark.sparkContext
        # A task of Spark costs more than most of ours: as many as run at the same time are enough.
        slices = min(len(work), context.defaultParallelism)
        results = context.parallelize(work, slices).map(_told(function)).collect()
        for kind, result in results:
            if kind == "error":
                raise from_wire(result)
        return [result for _, result in results]

    def _write_tables(
        self,
        plan: Plan,
        targets: Mapping[str, Target],
        stage: Stage,
        staged: Mapping[str, Staged],
        timings: Timings,
    ) -> dict[str, TableVersion]:
        """Complete what the tables have to complete, and make each table's write."""
        began = time.monotonic()
        scans = self._each(
            list(staged.items()), lambda name, part: self._scan(plan, targets[name], part)
        )
        completed: dict[str, list[Completed]] = defaultdict(list)
        for one in self._run(run_complete, [task for scan in scans for task in scan]):
            completed[one.table].append(one)
        timings.complete = time.monotonic() - began

        def write(name: str, part: Staged) -> TableVersion:
            began = time.monotonic()
            made = self._write_table(plan, targets[name], stage, part, completed[name])
            timings.tables[name] = round(time.monotonic() - began, 3)
            if not self._wrote_one.is_set():
                self._wrote_one.set()
                fail_point.hit("table-written")
            return made

        written = self._each(list(staged.items()), write)
        return {**plan.tables, **dict(zip(staged, written, strict=True))}

    def _scan(self, plan: Plan, target: Target, staged: Staged) -> list[CompleteTask]:
        """The tasks that look at the table's files for what it has to complete."""
        table = plan.tables[target.name]
        path, base = self._path(table), table.snapshot_id
        compact = self._wants_compaction(target, path, base, staged)
        if not (compact or staged.patches or staged.removals):
            return []
        column, values = (None, ()) if compact else _narrowed(target, staged)
        return [
            CompleteTask(
                target,
                number,
                files,
                patches=staged.patches.path if staged.patches else None,
                rows=staged.rows.path if staged.patches and staged.rows and not number else None,
                removals=staged.removals.path if staged.removals else None,
                compact=compact,
            )
            for number, files in enumerate(
                _in_groups(self._format.scan(path, base, column, values))
            )
        ]

    def _wants_compaction(self, target: Target, path: str, base: int, staged: Staged) -> bool:
        if staged.truncated or not (staged.deletes or staged.removals):
            return False
        files, size = self._format.small_files(path, base)
        share = crc32(target.name.encode()) % _COMPACT_FILES
        return files > (_COMPACT_FILES + share) * (1 + size // _COMPACT_BYTES)

    def _write_table(
        self,
        plan: Plan,
        target: Target,
        stage: Stage,
        staged: Staged,
        completed: Sequence[Completed],
    ) -> TableVersion:
        table = plan.tables[target.name]
        path, base = self._path(table), table.snapshot_id
        identity = table.key or (ROW_ID,)
        rows = [staged.rows] if staged.rows else []
        deletes = [staged.deletes] if staged.deletes else []
        if staged.patches:
            _check(target, sum(c.patched for c in completed), staged.patches.rows)
            rows = [c.rows for c in completed if c.rows]
        if staged.removals:
            gone = _removed(target, staged.removals, completed)
            schema = pa.schema([target.file_schema.field(ROW_ID)])
            file = write_data(f"{target.prefix}-removed.parquet", [gone], schema)
            deletes += [file] if file else []
        if not (rows or deletes or staged.truncated):
            return table
        compacted = [c.compacted for c in completed if c.compacted]
        if compacted:
            # First a snapshot with the same rows in new files, then the epoch's own on top of it.
            same = TableWrite(
                plan.version, base, identity, str(stage), compacted, truncate=True, compaction=True
            )
            base = self._format.write(path, self._term, same).snapshot
        write = TableWrite(
            plan.version, base, identity, str(stage), rows, deletes, staged.truncated
        )
        done = self._format.write(path, self._term, write)
        count = (0 if staged.truncated else table.rows) + staged.added
        return replace(table, snapshot_id=done.snapshot, stage=done.stage, rows=count)

    def _each(
        self, work: Iterable[tuple[str, _In]], function: Callable[[str, _In], _Out]
    ) -> list[_Out]:
        """Call the function for each, several at a time; all are waited for before an error is raised."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="table") as pool:
            futures = [pool.submit(function, name, value) for name, value in work]
        return [future.result() for future in futures]

    def _tell(self, manifest: Manifest, timings: Timings, seconds: float) -> None:
        log.info(
            "epoch published",
            epoch=manifest.epoch,
            link=manifest.link,
            changes=manifest.changes,
            rows=manifest.rows,
            seconds=round(seconds, 3),
            stage_seconds=round(timings.stage, 3),
            complete_seconds=round(timings.complete, 3),
            write_seconds=round(timings.write, 3),
            publish_seconds=round(timings.publish, 3),
            table_seconds=timings.tables,
        )


def _told(function: Callable[[_In], _Out]) -> Callable[[_In], tuple[str, Any]]:
    """`function` for an executor: our errors come back as values, for Spark would make text of them."""

    def run(task: _In) -> tuple[str, Any]:
        try:
            return "done", function(task)
        except TusklineError as error:
            return "error", error.to_wire()

    return run


def _narrowed(target: Target, staged: Staged) -> tuple[str | None, Sequence[Any]]:
    """A column and the few values of it that are looked for, if Iceberg can leave files out by them."""
    path, prefix = (staged.patches, "s") if staged.patches else (staged.removals, "c")
    names = target.key if staged.patches else tuple(target.columns.names)
    assert path is not None
    for i, name in enumerate(names):
        kind = target.file_schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind)):
            continue
        values = pq.read_table(path.path, columns=[f"{prefix}{i}"]).column(0).unique()
        if len(values) <= _NARROWED and not values.null_count:
            return name, values.to_pylist()
    return None, ()


def _in_groups(files: Sequence[ScanFile]) -> list[tuple[ScanFile, ...]]:
    """The files in groups of about `_SCAN_BYTES`."""
    groups: list[list[ScanFile]] = []
    size = 0
    for file in files:
        if not groups or size + file.size > _SCAN_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [tuple(group) for group in groups]


def _removed(target: Target, removals: FileInfo, completed: Sequence[Completed]) -> pa.Array:
    """The `ROW_ID`s of the rows that go: as many as wanted of each kind."""
    gone: list[str] = []
    counts = pq.read_table(removals.path, columns=["n"]).column(0).to_pylist()
    for number, count in enumerate(counts):
        found = [row for part in completed for row in part.gone.get(number, ())]
        _check(target, min(len(found), count), count)
        gone += sorted(found)[:count]
    return pa.array(gone, pa.string())


def _check(target: Target, found: int, wanted: int) -> None:
    if found != wanted:
        raise CorruptError(
            f"{wanted} rows should be in the table as it was, {found} are",
            where=target.name,
            repair="copy the table again: remove it from the publication and add it",
        )
