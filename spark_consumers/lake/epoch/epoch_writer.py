"""One epoch, from the log to the manifest.

In this order: the executors read the log and write files that no manifest names (*staging*); every table gets its
files in one commit to a branch that no reader uses (*table writes*); one link is created (*the manifest*).
Only the link is visible, and it is one file. A crash before it leaves files that no manifest names; a crash
after it leaves a whole epoch. Repeating any part is harmless, because a table write follows the snapshot
that the *manifest* names, regardless of later writes.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar
from zlib import crc32

import pyarrow as pa
from pyspark.sql import SparkSession

from spark_consumers.decode.masking import opened
from spark_consumers.decode.types import arrow_schema, text_columns
from spark_consumers.lake.epoch.arranged import arranged, by_position
from spark_consumers.lake.epoch.complete import run_complete, run_index
from spark_consumers.lake.epoch.draft import Draft
from spark_consumers.lake.epoch.feed_rows import FeedTarget
from spark_consumers.lake.epoch.feed_writer import FeedWriter
from spark_consumers.lake.epoch.log_view import edges, next_epoch
from spark_consumers.lake.epoch.packed import PackedTable, TaskTables
from spark_consumers.lake.epoch.plan import COMPOSED_RANGES, EpochPlan, Pace, tasks
from spark_consumers.lake.epoch.progress import EpochProgress
from spark_consumers.lake.epoch.quarantine import quarantines, with_quarantined
from spark_consumers.lake.epoch.removal import (
    Located,
    Removed,
    StageTask,
    check_found,
    run_removal,
    run_stage,
)
from spark_consumers.lake.epoch.stage import (
    ComposeTask,
    Fed,
    RangeTask,
    Recorded,
    Staged,
    composing_of,
    in_order,
    joined,
    total_changes,
)
from spark_consumers.lake.epoch.table_changes import Moved
from spark_consumers.lake.epoch.target import Target, columns_of, names_in
from spark_consumers.lake.epoch.view_attempts import ViewAttempts
from spark_consumers.lake.epoch.view_writer import ViewWriter
from spark_consumers.lake.format.data_files import Stage
from spark_consumers.lake.format.iceberg_schema import file_type
from spark_consumers.lake.format.initial_default import of_field
from spark_consumers.lake.format.table_format import ROW_ID, FileInfo, TableFormat, TableWrite
from spark_consumers.lake.index import build as index
from spark_consumers.lake.index.run_format import Run
from spark_consumers.lake.layout.arrangement import Arrangement
from spark_consumers.lake.manifest.chain import LIVE, Chain, Manifest, TableVersion
from spark_consumers.lake.manifest.view_version import ViewVersion
from spark_consumers.lake.policy import copies_on_write, to_copy_on_write
from spark_consumers.lake.store.place import Place, carried, remove_tree
from spark_consumers.lake.tables import fault as table_fault
from spark_consumers.lake.tables import noticed
from spark_consumers.lake.tables.doubt import each_table, passing
from spark_consumers.lake.tables.fault import TableFault, TableFaultsError
from spark_consumers.lake.tables.recorded import TableRecord
from spark_consumers.lake.tables.schema_change import Evolution, first_layout, schema_hash
from spark_consumers.lake.tables.schema_match import SchemaMismatch, of_layout
from spark_consumers.lake.tables.shape import Shape, with_columns_of
from spark_consumers.lake.tables.states import stream_of
from spark_consumers.lake.tables.table_filter import filter_of
from spark_consumers.lake.views.definition import ViewDefinition
from spark_consumers.spark.job_group import described, description
from spark_consumers.spark.slots import in_partitions, slots
from walsender_bridge.change_log.client import CutPoint, LogStatus
from walsender_bridge.errors import CorruptError
from walsender_bridge.postgres.protocol.pgoutput import Column
from walsender_bridge.postgres.table_layout import CURRENT, LayoutRule, feed_of
from walsender_bridge.runtime import fail_point, logs
from walsender_bridge.runtime.steady_clock import SteadyClock

#: Small data files of a table become one when there are more than this. Tables differ by up to as much again, so that
#: they do not all come due in one epoch.
_COMPACT_FILES = 8
#: How many times as many there may be while a maintainer makes them one (`spark_consumers.lake.compaction`).
_WHILE_MAINTAINED = 8
#: Tasks of ours that one of Spark's has, at most, where there are more than run at once: so many are lost with an executor.
#: A range takes a second or so, most others some milliseconds.
_RANGES_EACH, _OTHERS_EACH = 8, 64
#: How often the index of a table is built before the table's trouble is taken for damage of its files.
_BUILDS = 2

log = logs.logger()

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass
class Timings:
    """Seconds that each part of a round took; of the tables, each one's own."""

    stage: float = 0.0
    complete: float = 0.0
    write: float = 0.0
    views: float = 0.0
    publish: float = 0.0
    tables: dict[str, float] = field(default_factory=dict)


class ShapeChangedError(Exception):
    """Changes of these tables have another shape than the lake has them in; nothing was written.

    `records`: the schema changes in the range that were recorded, of those tables that have others than were known, or mismatches.
    `tables`: as the epoch would have shown them, but for their columns.
    """

    def __init__(
        self,
        mismatches: Sequence[SchemaMismatch],
        records: Mapping[str, Sequence[TableRecord]],
        tables: Mapping[str, TableVersion],
    ) -> None:
        super().__init__(", ".join(sorted({*records, *(one.table for one in mismatches)})))
        self.mismatches = mismatches
        self.records = records
        self.tables = tables

    def under(self, names: Mapping[str, str]) -> "ShapeChangedError":
        """The same of tables that have other names."""
        return ShapeChangedError(
            [replace(one, table=names.get(one.table, one.table)) for one in self.mismatches],
            {names.get(name, name): found for name, found in self.records.items()},
            {names.get(name, name): table for name, table in self.tables.items()},
        )


class EpochWriter:
    """Writes epochs into one lake, for the term that began with link `head`.

    `unchanged` is called before an epoch is published: it raises if what was read may be of another log (`adopt`).
    """

    def __init__(
        self,
        spark: SparkSession,
        chain: Chain,
        tables: TableFormat,
        head: Manifest,
        *,
        clock: SteadyClock,
        max_bytes: int,
        unchanged: Callable[[LogStatus], None],
        on_unrepresentable_value: Mapping[str, str] | None = None,
        deletes: Mapping[str, str] | None = None,
        layouts: Sequence[LayoutRule] = (),
        views: Sequence[ViewDefinition],
        attempts: ViewAttempts,
        mask_key: bytes = b"",
    ) -> None:
        self._spark = spark
        self._chain = chain
        self._format = tables
        self._term = head.term
        self._clock = clock
        self._pace = Pace(max_bytes)
        self._unchanged = unchanged
        self._on_unrepresentable_value = on_unrepresentable_value or {}
        self._deletes = deletes or {}
        self._rules = layouts
        self._views = ViewWriter(
            *(spark, chain, tables, head.term, views),
            attempts=attempts,
            deletes=self._deletes,
            layouts=layouts,
        )
        self._feeds = FeedWriter(chain, tables, head.term, layouts, self._deletes)
        self._mask_key = mask_key
        self._attempt = 0
        #: What the epoch under way does; other threads may ask.
        self.progress = EpochProgress(spark.sparkContext)
        #: Whether data files are rewritten beside the epochs: these leave it to the maintainer, unless it lags far behind.
        self.is_maintained = False
        #: By the table's path and schema hash.
        self._schemas: dict[tuple[str, str], tuple[pa.Schema, pa.Schema, Arrangement, bool]] = {}
        #: Tables as the executors get them, each with what it depends on.
        self._packed: dict[str, tuple[tuple[object, ...], PackedTable]] = {}
        self._wrote_one = threading.Event()
        #: The row index of what was written, by path and snapshot, for as long as its epoch may be repeated.
        self._indexes: dict[tuple[str, int], tuple[tuple[str, int], ...]] = {}

    def write(
        self,
        head: Manifest,
        status: LogStatus,
        evolutions: Mapping[str, Evolution],
        polled: Collection[str],
        *,
        everything: bool,
    ) -> Manifest:
        """Write and publish the epoch after `head`; its manifest.

        `evolutions`: for tables (by path) whose columns change on the way, how. `polled`: the streams whose
        sources were polled since `status` was read. `everything`: as far as it takes to show all held tables, whatever that costs.
        Raises `ShapeChangedError` for tables whose changes have another shape, `TableFaultsError` for tables whose changes
        cannot be applied, `FencedError` when a newer writer has taken over; with any error the lake is unchanged, and the
        round can be repeated.
        """
        began = time.monotonic()
        self._wrote_one.clear()
        stage = self.next_stage(head)
        timings = Timings()
        plan, late = next_epoch(head, status, self._pace.limit, everything=everything)
        scratch = self._chain.staging / str(stage)
        self.progress.begin(plan.version)
        try:
            followed = plan.tables
            evolutions = _within(plan, evolutions)
            plan = self._evolved(plan, evolutions)
            forced = to_copy_on_write(self._deletes, plan.tables) | {
                # Readers get a table's columns by its snapshot.
                name
                for name, table in plan.tables.items()
                if table.schema_hash != followed[name].schema_hash
                or (table.path in evolutions and table.shape != followed[name].shape)
            }
            columns = {
                name: self._target(name, table).columns
                for name, table in plan.tables.items()
                if table.state == LIVE and feed_of(self._rules, name)
            }
            feeds = self._feeds.plan(head, plan, followed, evolutions, columns)
            packed = self._pack(plan, evolutions, feeds)
            targets = TaskTables(list(packed.values()), str(stage))
            work = self._range_tasks(plan, packed, status, late, stage)
            if len(work) > COMPOSED_RANGES:
                # It takes a while, and Spark's UI says how far it is.
                log.info("large epoch begun", epoch=plan.version, ranges=len(work))
            try:
                plan, staged, removed, fed = self._stage(
                    plan, work, targets, scratch, polled, evolutions, forced
                )
            except ShapeChangedError as changed:
                raise ShapeChangedError(changed.mismatches, changed.records, followed) from None
            timings.stage = time.monotonic() - began
            fail_point.hit("staged")
            try:
                tables, moves = self._write_tables(
                    plan, targets, stage, staged, removed, forced, timings
                )
            except ShapeChangedError as changed:
                raise ShapeChangedError(changed.mismatches, changed.records, followed) from None
            timings.write = time.monotonic() - began - timings.stage
            views = self._write_views(head, plan, tables, moves, stage, timings)
            timings.views = time.monotonic() - began - timings.stage - timings.write
            written_feeds = self._feeds.write(head, plan, fed, stage)
            fail_point.hit("feeds-written")
            manifest = head.next(
                self._clock.now(),
                epoch=plan.version,
                term=self._term,
                stage=str(stage),
                streams=plan.streams,
                tables=tables,
                views=views,
                feeds=written_feeds,
                copies=plan.copies,
                changes=total_changes(staged.values()),
                seconds=round(time.monotonic() - began, 3),
            )
            self.progress.step("publish")
            fail_point.hit("before-manifest")
            self._unchanged(status)
            self._chain.publish(manifest, head)
            self._pace.published(plan)
            self._indexes.clear()
        finally:
            self.progress.end()
            remove_tree(scratch)
        fail_point.hit("after-manifest")
        timings.publish = time.monotonic() - began - timings.stage - timings.write - timings.views
        self._log_epoch(manifest, timings, time.monotonic() - began)
        return manifest

    def next_stage(self, head: Manifest) -> Stage:
        """The stage of one more attempt at the link after `head`."""
        self._attempt += 1
        return Stage(head.link + 1, self._term, self._attempt)

    def _small_files(self, target: Target) -> int:
        """How many small data files a table may have before an epoch makes them one."""
        count = _COMPACT_FILES + crc32(target.name.encode()) % _COMPACT_FILES
        return count * _WHILE_MAINTAINED if target.is_maintained else count

    def _path(self, table: TableVersion) -> str:
        return str(self._chain.root / table.path)

    def _pack(
        self,
        plan: EpochPlan,
        evolutions: Mapping[str, Evolution],
        feeds: Mapping[str, FeedTarget],
    ) -> dict[str, PackedTable]:
        """The tables that follow, packed for the executors. Those that are as at the last epoch still are."""
        following = [(n, t) for n, t in plan.tables.items() if t.state == LIVE]

        def facts(name: str, table: TableVersion) -> tuple[object, ...]:
            return table, evolutions.get(table.path), self.is_maintained, feeds.get(name)

        def pack(name: str, table: TableVersion) -> PackedTable:
            evolution = evolutions.get(table.path)
            target = replace(
                self._target(name, table),
                layouts=first_layout(table) if evolution is None else evolution.layouts,
                feed=feeds.get(name),
            )
            return PackedTable.of(target, (_runs(table), self._small_files(target)))

        before = self._packed
        changed = [(n, t) for n, t in following if n not in before or before[n][0] != facts(n, t)]
        made = dict(zip((n for n, _ in changed), self._each_of(plan, changed, pack), strict=True))
        self._packed = {
            name: (facts(name, table), made[name]) if name in made else before[name]
            for name, table in following
        }
        return {name: packed for name, (_, packed) in self._packed.items()}

    def _range_tasks(
        self,
        plan: EpochPlan,
        packed: Mapping[str, PackedTable],
        status: LogStatus,
        late: Mapping[str, Sequence[CutPoint]],
        stage: Stage,
    ) -> list[RangeTask]:
        addresses = {stream: cut.addresses for stream, cut in status.streams.items()}
        scratch = self._chain.staging / str(stage)
        inside = edges(status, plan, late)
        return tasks(plan, packed, addresses, late, inside, str(scratch), str(stage))

    def _stage(
        self,
        plan: EpochPlan,
        work: Sequence[RangeTask],
        targets: TaskTables,
        scratch: Place,
        polled: Collection[str],
        evolutions: Mapping[str, Evolution],
        forced: Collection[str],
    ) -> tuple[
        EpochPlan,
        dict[str, Staged],
        dict[str, list[Removed | Located]],
        dict[str, list[Fed]],
    ]:
        """Read and write everything: the plan with the partitions that came; by table the staged files, what they remove, and what its feed gets."""
        found: dict[str, list[Staged]] = defaultdict(list)
        removed: dict[str, list[Removed | Located]] = defaultdict(list)
        mismatches: list[SchemaMismatch] = []
        records: dict[str, dict[tuple[int, int], TableRecord]] = defaultdict(dict)
        faults: list[TableFault] = []
        fed: dict[str, list[Fed]] = defaultdict(list)

        def stage(work: Sequence[RangeTask | ComposeTask]) -> Iterator[Staged]:
            tasks_ = [
                StageTask(
                    task, targets.index(task.target.name) if isinstance(task, ComposeTask) else None
                )
                for task in work
            ]
            names = {name for task in tasks_ for name in task.names}
            most = _RANGES_EACH if any(isinstance(t, RangeTask) for t in work) else _OTHERS_EACH
            made = self._run(run_stage, tasks_, plan, "fold and write", names, most)
            for one, gone in chain.from_iterable(made):
                if isinstance(one, SchemaMismatch):
                    mismatches.append(one)
                elif isinstance(one, Recorded):
                    records[one.table][one.record.place] = one.record
                elif isinstance(one, TableFault):
                    faults.append(one)
                elif isinstance(one, Fed):
                    fed[one.table].append(one)
                else:
                    if gone is not None:
                        removed[one.table].append(gone)
                    yield one

        for one in stage(work):
            found[one.table].append(one)
        if faults:
            raise TableFaultsError(faults, plan.tables)
        came = {n: frozenset[int]().union(*(p.partitions for p in ps)) for n, ps in found.items()}
        tables, reasons = noticed.after_partition_changes(plan.tables, came, polled)
        mismatches += [
            SchemaMismatch(name, 0, 0, (), frozenset(), reason) for name, reason in reasons.items()
        ]
        at_odds = {
            name: [found_there[place] for place in sorted(found_there)]
            for name, found_there in records.items()
            if found_there.keys() != _places(evolutions, plan.tables[name])
            or any(one.table == name for one in mismatches)
        }
        if mismatches or at_odds:
            raise ShapeChangedError(mismatches, at_odds, plan.tables)
        partial = {n: in_order(ps) for n, ps in found.items() if ps[0].partial is not None}
        composing = [
            task
            for name, parts in partial.items()
            for task in composing_of(targets[name], parts, str(scratch))
        ]
        composing += [
            # Rows to convert again, or to keep, in a table that has no changes.
            ComposeTask(targets[name], (), str(scratch), 0)
            for name, table in plan.tables.items()
            if table.quarantine_files and table.state == LIVE and name not in found
            if table.retry_quarantined or name in forced
        ]
        found |= {name: [] for name in partial}
        for one in stage(composing):
            found[one.table].append(one)
        if faults:
            raise TableFaultsError(faults, plan.tables)
        staged = dict(zip(found, self._each_of(plan, list(found.items()), _joined), strict=True))
        staged |= {name: Staged(name, 0, 0) for name in forced if name not in staged}
        return replace(plan, tables=tables), staged, removed, fed

    def _evolved(self, plan: EpochPlan, evolutions: Mapping[str, Evolution]) -> EpochPlan:
        """The plan with the columns that these tables get; their Iceberg tables get them here.

        Raises `ShapeChangedError` for a table that cannot have them.
        """

        def evolve(name: str, table: TableVersion) -> TableVersion | SchemaMismatch:
            path, evolution = self._path(table), evolutions[table.path]
            newest = evolution.layouts[-1].columns
            sources = {
                column[0]: table.layout[at][0]
                for column, at in zip(newest, evolution.sources, strict=True)
                if at is not None
            }
            made = _with_columns(table, evolution, sources)
            same = {name: name for name, _, _ in table.layout}
            if sources == same and made.layout == table.layout:
                return made
            taken, fixed = self._format.partition_fields(path), self._format.laid_out_by(path)
            if reason := of_layout([c[0] for c in table.layout], sources, newest, taken, fixed):
                return SchemaMismatch(name, 0, 0, (), frozenset(), reason)
            given = zip((column[0] for column in newest), evolution.defaults, strict=False)
            defaults = {column: value for column, value in given if value is not None}
            if defaults and not self._format.keeps_defaults(path):
                reason = f"its column {next(iter(defaults))!r} was added with a default, and the table is not in version 3 of Iceberg's format"
                return SchemaMismatch(name, 0, 0, (), frozenset(), reason)
            columns = arrow_schema(columns_of(made))
            beside = {name: name for name in columns.names[len(newest) :]}
            known = {**sources, **beside}
            files = self._format.evolve(
                *(path, self._term, table.snapshot_id, columns, known, defaults)
            )
            if lost := [n for n in defaults if of_field(files.field(n)) is None]:
                reason = f"its column {lost[0]!r} was added with a default, which the catalog does not keep"
                return SchemaMismatch(name, 0, 0, (), frozenset(), reason)
            arrangement = arranged(self._format, name, path, self._term, self._rules)
            position = by_position(self._format, self._deletes, name, path)
            self._schemas[path, made.schema_hash] = columns, files, arrangement, position
            return made

        due = [(n, t) for n, t in plan.tables.items() if t.path in evolutions and t.state == LIVE]
        for _, table in due:
            # What an attempt at another range has made of the table.
            path = self._path(table)
            self._schemas = {of: it for of, it in self._schemas.items() if of[0] != path}
        made = dict(zip((n for n, _ in due), self._each_of(plan, due, evolve), strict=True))
        mismatches = [one for one in made.values() if isinstance(one, SchemaMismatch)]
        if mismatches:
            raise ShapeChangedError(mismatches, {}, plan.tables)
        evolved = {n: one for n, one in made.items() if isinstance(one, TableVersion)}
        return replace(plan, tables={**plan.tables, **evolved})

    def _target(self, name: str, table: TableVersion) -> Target:
        """As a task needs it, but for the stage."""
        path = self._path(table)
        if (path, table.schema_hash) not in self._schemas:
            columns, files = self._format.schemas(path, table.snapshot_id)
            if not {column.name for column in columns_of(table)} <= {*files.names}:
                # A column came with changes that had no effect, so no snapshot has it.
                columns, files = self._format.schemas(path)
            wanted, hidden = names_in(table, files.names)
            known = arrow_schema(columns_of(table))
            if [file_type(f.type) for f in known] == [files.field(n).type for n in known.names]:
                # Also of an attempt that was not published, the table's own are.
                columns = known if table.layout else columns
            columns = pa.schema([columns.field(column) for column in wanted])
            files = pa.schema([files.field(column) for column in [*wanted, *hidden]])
            arrangement = arranged(self._format, name, path, self._term, self._rules)
            position = by_position(self._format, self._deletes, name, path)
            self._schemas[path, table.schema_hash] = columns, files, arrangement, position
        columns, file_schema, arrangement, position = self._schemas[path, table.schema_hash]
        return replace(
            Target.of(name, table, f"{path}/data/", columns, file_schema),
            partitions=noticed.partitions(table),
            # Beside the table there is no place for a row that is kept, or that may not meet a row filter.
            quarantines=table.mode == CURRENT
            and not table.row_filter
            and quarantines(self._on_unrepresentable_value, name),
            quarantine_files=tuple(f"{path}/{file}" for file in table.quarantine_files),
            retry_quarantined=table.retry_quarantined,
            copy_on_write=copies_on_write(self._deletes, name),
            by_position=position,
            arrangement=arrangement,
            is_maintained=self.is_maintained and not arrangement.sort,
            chunks=table.chunks,
            masking=opened(table.masks, self._mask_key),
            row_filter=filter_of(name, table),
        )

    def _run(
        self,
        function: Callable[[_In], _Out],
        work: Sequence[_In],
        plan: EpochPlan,
        what: str,
        tables: Collection[str],
        most: int = _OTHERS_EACH,
    ) -> list[_Out]:
        """Run the tasks on the executors; Spark's UI says `what` they do for these tables. `most`: of the tasks that one of Spark's has.

        An error of Tuskline is raised here as the same class.
        """
        if not work:
            return []
        context = self._spark.sparkContext
        partitions = in_partitions(len(work), slots(context), most)
        epoch = f"epoch {plan.version}"
        text = description(epoch, self._chain.root.name, tables, what)
        group = f"tuskline {epoch}"
        self.progress.step(what, group=group)
        with described(context, group, text):
            done = (
                context.parallelize(work, partitions)
                .map(carried(table_fault.as_values(function)))
                .collect()
            )
        return table_fault.results(done, plan.tables)

    def _write_tables(
        self,
        plan: EpochPlan,
        targets: TaskTables | Mapping[str, Target],
        stage: Stage,
        staged: Mapping[str, Staged],
        removed: Mapping[str, Sequence[Removed | Located]],
        forced: Collection[str],
        timings: Timings,
    ) -> tuple[dict[str, TableVersion], dict[str, list[Moved]]]:
        """Complete what the tables have to complete, and make each table's write.

        All tables, and of those that are written the rows that are only moved.
        """
        began = time.monotonic()
        scratch = str(self._chain.staging / str(stage))
        drafts = {
            name: Draft(
                targets[name], part, plan.tables[name].snapshot_id, _runs(plan.tables[name])
            )
            for name, part in staged.items()
            if part.changes_table or name in forced
        }
        for name, its in removed.items():
            if name not in drafts:
                continue
            drafts[name].locate([gone for gone in its if isinstance(gone, Located)])
            for whole in (gone for gone in its if isinstance(gone, Removed)):
                drafts[name].found(whole)
        todo = list(drafts)
        for again in range(_BUILDS):
            self._build_indexes(plan, drafts, todo, stage, scratch)
            todo = self._complete(plan, drafts, todo, scratch)
            lacking = {name: draft.removed.lacks for name, draft in drafts.items()}
            mismatches = [
                SchemaMismatch(name, 0, 0, (), frozenset(), reason)
                for name, reason in lacking.items()
                if reason
            ]
            if mismatches:
                raise ShapeChangedError(mismatches, {}, plan.tables)
            if not todo:
                break
            for name in todo:
                draft = drafts[name]
                log.warning("row index is built again", table=name, reason=draft.damage)
                prefix = f"{self._path(plan.tables[name])}/data/{stage}-again{again + 1}"
                draft.begin_again(replace(draft.target, prefix=prefix))
        if todo:
            raise TableFaultsError(
                [TableFault(n, CorruptError(drafts[n].damage, where=n)) for n in todo], plan.tables
            )
        timings.complete = time.monotonic() - began

        def write(name: str, part: Staged) -> TableVersion:
            began = time.monotonic()
            made = self._write_table(plan, stage, part, drafts.get(name), targets[name])
            timings.tables[name] = round(time.monotonic() - began, 3)
            self.progress.done()
            if not self._wrote_one.is_set():
                self._wrote_one.set()
                fail_point.hit("table-written")
            return made

        self.progress.step("write tables", tables=len(staged))
        written = self._each_of(plan, list(staged.items()), write)
        tables = {**plan.tables, **dict(zip(staged, written, strict=True))}
        # From here on all changes come after each of their snapshots.
        shown = {name: replace(tables[name], chunks=()) for name in plan.fresh}
        return {**tables, **shown}, {name: draft.moves for name, draft in drafts.items()}

    def _write_views(
        self,
        head: Manifest,
        plan: EpochPlan,
        tables: Mapping[str, TableVersion],
        moves: Mapping[str, Sequence[Moved]],
        stage: Stage,
        timings: Timings,
    ) -> dict[str, ViewVersion]:
        """Keep the views of these tables, which are written and not published."""
        self.progress.step("keep views")
        scratch = str(self._chain.staging / str(stage))
        found = self._views.stage(head, tables, moves, plan.version, stage, scratch)
        fail_point.hit("views-staged")
        if not found.staged:
            return found.views
        changed = replace(plan, tables=found.tables, fresh=frozenset())
        own = Timings()
        written, _ = self._write_tables(changed, found.targets, stage, found.staged, {}, (), own)
        timings.tables |= own.tables
        return found.written(written)

    def _complete(
        self, plan: EpochPlan, drafts: Mapping[str, Draft], names: Sequence[str], scratch: str
    ) -> list[str]:
        """Find what these tables remove, complete their rows, add them to their indexes; those whose index is damaged."""
        unknown = [
            drafts[n].removal(scratch, self._small_files(drafts[n].target))
            for n in names
            if not drafts[n].is_found
        ]
        finding = [task.target.name for task in unknown]
        for one in self._run(run_removal, unknown, plan, "find removed rows", finding):
            drafts[one.table].found(one)
        self._with_row_ids(plan, {n: drafts[n] for n in names if drafts[n].removed.rewrites})
        work = [task for name in names for task in drafts[name].completing()]
        completing = {task.target.name for task in work}
        for done in self._run(run_complete, work, plan, "complete rows", completing):
            drafts[done.table].completed(done)
        last = [task for name in names if (task := drafts[name].indexing()) is not None]
        indexing = [task.target.name for task in last]
        for indexed in self._run(run_index, last, plan, "update row index", indexing):
            drafts[indexed.table].indexed(indexed)
        return [name for name in names if drafts[name].damage]

    def _with_row_ids(self, plan: EpochPlan, drafts: Mapping[str, Draft]) -> None:
        """Give these drafts the ids of the rows that are rewritten."""

        def ask(name: str, draft: Draft) -> None:
            draft.row_ids = self._format.row_ids(self._path(plan.tables[name]), draft.base)

        self._each_of(plan, list(drafts.items()), ask)

    def _build_indexes(
        self,
        plan: EpochPlan,
        drafts: Mapping[str, Draft],
        names: Sequence[str],
        stage: Stage,
        scratch: str,
    ) -> None:
        """Build the indexes of those of these tables that have none, from their data files."""

        def build(name: str, draft: Draft) -> None:
            table = plan.tables[name]
            path, target = self._path(table), draft.target
            files = self._format.scan(path, draft.base)
            whole = index.build(
                lambda function, work: self._run(function, work, plan, "build row index", [name]),
                path,
                index.Identity.of(target.identity, target.file_schema),
                target.identity or (ROW_ID,),
                files,
                name=f"{target.stage}-built",
                scratch=f"{scratch}/{target.scratch_name}-{target.stage}",
                by_position=target.by_position,
            )
            log.info("row index built", table=name, rows=whole.rows, files=len(files))
            check_found(target, whole.rows, table.rows)
            keys = self._format.equality_deletes(path, draft.base)
            if keys:
                # First a snapshot with the same rows and vectors in place of an earlier version's files of keys, then the
                # epoch's own on top of it.
                gone = [
                    FileInfo(f.path, f.rows, f.size, f.partition)
                    for f in files
                    if f.name in whole.gone
                ]
                same = TableWrite(
                    plan.version,
                    draft.base,
                    str(stage),
                    vectors=whole.vectors,
                    removed=gone,
                    converted=keys,
                    count=table.rows,
                    conversion=True,
                )
                draft.base = self._format.write(path, self._term, same).snapshot
            draft.runs = whole.runs

        work = [(n, drafts[n]) for n in names if drafts[n].runs is None]
        self._each_of(plan, work, build)

    def _write_table(
        self,
        plan: EpochPlan,
        stage: Stage,
        staged: Staged,
        draft: Draft | None,
        target: Target,
    ) -> TableVersion:
        completed = draft.done if draft is not None else []
        table = with_quarantined(
            plan.tables[target.name], [*staged.quarantined, *(c.quarantined for c in completed)]
        )
        if draft is None:
            return table
        path = self._path(table)
        removed = draft.removed
        count = (0 if staged.truncated else table.rows) + staged.added + removed.absent
        count -= sum(each.dropped for each in completed)
        write = TableWrite(
            plan.version,
            draft.base,
            str(stage),
            rows=draft.rows,
            vectors=removed.vectors,
            replaced=removed.replaced,
            removed=[
                FileInfo(f"{path}/{f.name}", f.rows, f.size, f.partition) for f in removed.gone
            ],
            truncate=staged.truncated,
            count=count,
        )
        done = self._format.write(path, self._term, write)
        if done.stage == write.stage:
            made = tuple((run.name, run.weight) for run in draft.runs or ())
            self._indexes[path, done.snapshot] = made
        # An earlier attempt of ours has made this write, of its own files, and the index is that attempt's, too. If it did not
        # learn that the write was made, there is none that is known: it is built again.
        runs = self._indexes.get((path, done.snapshot))
        return replace(
            table,
            snapshot_id=done.snapshot,
            stage=done.stage,
            rows=count,
            runs=runs,
            copy_on_write=target.copy_on_write,
        )

    def _each_of(
        self,
        plan: EpochPlan,
        work: Sequence[tuple[str, _In]],
        function: Callable[[str, _In], _Out],
    ) -> list[_Out]:
        """As `each`; raises `TableFaultsError` for tables of the plan."""

        def others(but: Collection[str], most: int) -> int:
            live = (n for n, t in plan.tables.items() if t.state == LIVE and n not in but)
            return passing(self._format, (self._path(plan.tables[n]) for n in live), most)

        return table_fault.results(each_table(work, function, others), plan.tables)

    def _log_epoch(self, manifest: Manifest, timings: Timings, seconds: float) -> None:
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
            view_seconds=round(timings.views, 3),
            publish_seconds=round(timings.publish, 3),
            table_seconds=timings.tables,
        )


def _within(plan: EpochPlan, evolutions: Mapping[str, Evolution]) -> dict[str, Evolution]:
    """Those of these that are in the plan's ranges: they were found in a range that may have been longer."""
    found = {}
    for name, table in plan.tables.items():
        evolution = evolutions.get(table.path)
        if evolution is not None and all(
            offset < plan.streams[stream_of(name)].offset for offset, _ in evolution.places
        ):
            found[table.path] = evolution
    return found


def _places(evolutions: Mapping[str, Evolution], table: TableVersion) -> frozenset[tuple[int, int]]:
    """The places of the records that the table follows."""
    evolution = evolutions.get(table.path)
    return frozenset() if evolution is None else evolution.places


def _with_columns(
    table: TableVersion, evolution: Evolution, sources: Mapping[str, str]
) -> TableVersion:
    """The table with its new columns. `sources`: see `TableFormat.evolve`."""
    newest = evolution.layouts[-1].columns
    shape = table.shape
    if evolution.shape is not None:
        shape = with_columns_of(Shape.load(shape), evolution.shape).dump()
    added = [Column(*column, is_key=False) for column in newest if column[0] not in sources]
    names = {before: now for now, before in sources.items()}
    as_text = [names[name] for name in table.text_columns if name in names]
    return replace(
        table,
        layout=newest,
        key=evolution.key,
        text_columns=(*as_text, *text_columns(added)),
        schema_hash=schema_hash(_arrow(newest), evolution.key),
        shape=shape,
        runs=None if evolution.reindexes else table.runs,
    )


def _arrow(columns: Iterable[tuple[str, int, int]]) -> pa.Schema:
    return arrow_schema(Column(*column, is_key=False) for column in columns)


def _joined(name: str, parts: Sequence[Staged]) -> Staged:
    del name
    return joined(parts)


def _runs(table: TableVersion) -> tuple[Run, ...] | None:
    return None if table.runs is None else tuple(Run(*run) for run in table.runs)
