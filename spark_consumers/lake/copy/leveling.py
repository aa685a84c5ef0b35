"""Brings a table level with its source without a copy: compares both by chunks, and writes the rows that differ.

The table stopped (`states`), since changes of it are in no log: its source's slot was lost, or the source was restored. Its rows are still
there, and few have changed. At the snapshot from which it would be copied,

1. the source and Spark compute the sums of each chunk (`comparison`), of the table's last snapshot in the lake;
2. of chunks that differ, the digests of the rows are compared;
3. the rows that the lake lacks are read from the source, at the same snapshot, and those that it has too many are found by the row
   index: one write of the same Iceberg table, to the writer's branch, which no reader uses;
4. the chunks that differed are compared once more, with what was written.

What comes of it is a copy like any other to all that follows (`TableVersion` in `Manifest.copies`): it has the rows of the source at the
snapshot's LSN, and is shown by the first epoch whose cut has passed that. Only its folder is that of the table which it replaces, so readers
of earlier epochs, and those of the table as it stopped, have their snapshots of it as ever.

A driver that dies in between leaves files and a snapshot that no link names, which the next takeover removes; then the table is
compared again, at another snapshot.
"""

import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from spark_consumers.decode.types import arrow_schema, spark_schema
from spark_consumers.lake.catalog.table_catalog import TableCatalog
from spark_consumers.lake.comparison.lake import Division, rows_with
from spark_consumers.lake.comparison.level import misfit
from spark_consumers.lake.comparison.leveled import Counts
from spark_consumers.lake.comparison.source import DigestedPart, Load, Part, SourceRows
from spark_consumers.lake.copy.compared import Compared, CopiedInsteadError, Found
from spark_consumers.lake.copy.differing_rows import (
    ReadTask,
    Removals,
    RemoveTask,
    run_read,
)
from spark_consumers.lake.copy.initial_copy import CopyProgress
from spark_consumers.lake.epoch.arranged import by_position
from spark_consumers.lake.epoch.complete import run_complete, run_index
from spark_consumers.lake.epoch.draft import Draft
from spark_consumers.lake.epoch.removal import run_removal
from spark_consumers.lake.epoch.stage import Staged
from spark_consumers.lake.epoch.target import Target, columns_of
from spark_consumers.lake.epoch.view_sink import sink
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.iceberg_read import read_snapshot
from spark_consumers.lake.format.table_format import FileInfo, TableFormat, TableWrite
from spark_consumers.lake.index import build as index
from spark_consumers.lake.index.run_format import Run
from spark_consumers.lake.manifest.chain import TableVersion
from spark_consumers.lake.policy import copies_on_write
from spark_consumers.lake.store.lake_store import STATE
from spark_consumers.lake.store.place import Place, carried, place, remove_tree
from spark_consumers.snapshot.exported import ExportedSnapshot, PublishedTable
from spark_consumers.sources.snapshot import SnapshotSource
from spark_consumers.spark.job_group import described, description
from spark_consumers.spark.slots import slots
from walsender_bridge.errors import CorruptError, TusklineError, UnavailableError
from walsender_bridge.runtime import fail_point, logs

#: Seconds for which a table may be compared at one snapshot; one for which that is too short is copied.
_SECONDS: Final = 6 * 3600.0
#: Digests up to which the server chooses the rows; of more it sends the whole part, and the executors choose.
_CHOSEN_THERE: Final = 1000
#: Small files that a table may have before it is written: as many as it has.
_SMALL_FILES: Final = 1 << 30

log = logs.logger()

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class LevelRequest:
    """Bring the table `before`, of this `name`, level with `published` at this snapshot.

    `now`: what a copy of it from there has as long as nothing was read. `publication`: by which it is read. `term`: of the writer. `rate`: see
    `Load`.
    """

    name: str
    before: TableVersion
    now: TableVersion
    published: PublishedTable
    exported: ExportedSnapshot
    publication: str
    term: int
    rate: float | None = None


@dataclass(frozen=True)
class Leveler:
    """Brings tables of the lake at `root` level. `catalog`: by which their snapshots are read; `deletes`: see `policy`."""

    spark: SparkSession
    root: Place
    tables: TableFormat
    catalog: TableCatalog | None
    deletes: Mapping[str, str]

    def level(
        self, request: LevelRequest, progress: CopyProgress, check: Callable[[], None]
    ) -> tuple[TableVersion, Counts]:
        """The table at the snapshot's LSN, as a copy that is not shown yet, and what it took. `check` raises once it is not wanted any more.

        Raises `CopiedInsteadError` for a table that has to be copied, `CorruptError` for one that is damaged, and the errors of connections,
        snapshots and the catalog.
        """
        work = _Leveling(self, request, progress, check)
        try:
            return work.run(), work.counts
        except Exception:
            work.remove_written()
            raise
        finally:
            remove_tree(place(work.scratch))


class _Leveling:
    """One table."""

    def __init__(
        self,
        leveler: Leveler,
        request: LevelRequest,
        progress: CopyProgress,
        check: Callable[[], None],
    ) -> None:
        self._spark = leveler.spark
        self._root = leveler.root
        self._format = leveler.tables
        self._catalog = leveler.catalog
        self._request = request
        self._progress = progress
        self._check = check
        self._before = request.before
        self._deletes = leveler.deletes
        self._path = str(self._root / request.before.path)
        #: What the names of all new files begin with. A copy's: it has the term, and no link.
        self._stage = f"copy-t{request.term}-{uuid.uuid4().hex[:12]}"
        self.scratch = str(self._root / STATE / "staging" / self._stage)
        self.counts = Counts()
        #: Whether a snapshot may have the new files, which go with it then.
        self._is_committed = False

    def remove_written(self) -> None:
        """Remove the new files, if no snapshot has them: as far as that fails, the next takeover does it."""
        if self._is_committed:
            return
        with suppress(OSError, TusklineError):
            for folder in ("data", "index"):
                for file in (place(self._path) / folder).glob(f"{self._stage}*"):
                    checksums.remove(file)

    def run(self) -> TableVersion:
        """See `Leveler.level`."""
        target = self._target()
        exported = self._request.exported
        load = Load(1.0, _SECONDS, self._request.rate)
        with SourceRows(exported, time.monotonic(), load, self._check) as rows:
            compared = Compared(
                rows,
                self._request.published,
                self._before,
                self._progress,
                self._check,
                self._described,
                self.counts,
            )
            frame = self._frame(self._before.snapshot_id)
            found = compared.run(frame)
            whole = found.whole
            self.counts.added, self.counts.removed = whole.wanted.total(), whole.gone.total()
            self._progress.changed = whole.rows
            if not whole.rows:
                before = self._before
                return self._made(
                    before.snapshot_id,
                    before.rows,
                    before.runs,
                    copied_on_write=before.copy_on_write,
                )
            fail_point.hit("level-compared")
            staged = self._staged(compared, found, frame, target)
        made = self._written(target, staged)
        compared.check_level(found, self._frame(made.snapshot_id))
        return made

    def _made(
        self,
        snapshot: int,
        rows: int,
        runs: tuple[tuple[str, int], ...] | None,
        *,
        copied_on_write: bool,
    ) -> TableVersion:
        """The table with these rows, as a copy: of its snapshot on the source, and in the folder that it had."""
        before, now = self._before, self._request.now
        return replace(
            now,
            path=before.path,
            snapshot_id=snapshot,
            schema_hash=before.schema_hash,
            key=before.key,
            text_columns=before.text_columns,
            rows=rows,
            runs=runs,
            copy_on_write=copied_on_write,
        )

    def _target(self) -> Target:
        """The table as tasks need it. Raises `CopiedInsteadError`."""
        before = self._before
        if reason := misfit(before, self._request.now):
            raise CopiedInsteadError(reason)
        stored = self._format.schemas(self._path, before.snapshot_id)[1]
        names = [name for name, *_ in before.layout]
        newest = self._format.schemas(self._path)[1]
        if {*stored.names} != {*names} or not stored.equals(newest, check_metadata=True):
            raise CopiedInsteadError("its files have other columns than its source")
        if self._format.equality_deletes(self._path, before.snapshot_id):
            raise CopiedInsteadError("an earlier version wrote it")
        name = self._request.name
        target = Target.of(
            name,
            before,
            f"{self._path}/data/{self._stage}",
            arrow_schema(columns_of(before)),
            pa.schema([stored.field(each) for each in names]),
        )
        return replace(
            target,
            copy_on_write=copies_on_write(self._deletes, name),
            by_position=by_position(self._format, self._deletes, name, self._path),
            arrangement=self._format.arrangement(self._path),
        )

    def _frame(self, snapshot: int) -> DataFrame:
        """The lake's rows, with the columns in the source's order."""
        frame: DataFrame = read_snapshot(self._spark, self._path, snapshot, self._catalog)
        names = [name.replace("`", "``") for name, *_ in self._before.layout]
        return frame.select(*(f"`{name}`" for name in names))

    # -- the rows that differ ---------------------------------------------------------------------------

    def _staged(self, compared: Compared, found: Found, frame: DataFrame, target: Target) -> Staged:
        """What the table's write adds and removes, written where no reader looks."""
        whole = found.whole
        files = self._added(compared, found, target)
        removals = self._removals(found, frame, target)
        if (gone := sum(each.rows for each in removals)) != whole.gone.total():
            raise CorruptError(
                f"expected {whole.gone.total()} rows to remove, found {gone}", where=target.name
            )
        gone_files = tuple(each.file for each in removals)
        return Staged(
            target.name,
            0,
            whole.rows,
            rows=files,
            deletes=gone_files if target.key else (),
            removals=() if target.key else gone_files,
            added=whole.wanted.total() - whole.gone.total(),
        )

    def _added(self, compared: Compared, found: Found, target: Target) -> tuple[FileInfo, ...]:
        """The source's rows that the lake lacks, as data files."""
        wanted = [(number, each.wanted) for number, each in found.levels.items() if each.wanted]
        if not wanted:
            return ()
        published, exported = self._request.published, self._request.exported
        parts: list[Part | DigestedPart] = []
        for number, digests in wanted:
            its = compared.parts(found.chunks, [number])
            encoding = compared.rows.encoding
            parts += [_with_digests(published, part, digests, encoding) for part in its]
        source = SnapshotSource(
            {
                "dsn": exported.dsn,
                "snapshot": exported.snapshot,
                "table": published.full_name,
                "publication": self._request.publication,
            },
            parts,
            exported.slot,
        )
        reader = source.reader(spark_schema(arrow_schema(published.columns)))
        pieces = tuple(reader.partitions())
        digests = found.whole.wanted
        division = Division.of(self._before, found.chunks, ())
        # Of a table without a key, equal rows may be in several pieces: one task counts them.
        count = 1 if not target.key else min(len(pieces), slots(self._spark.sparkContext))
        tasks = [
            ReadTask(reader, pieces[number::count], digests, division, target, number)
            for number in range(count)
        ]
        files = [file for made in self._on_executors(run_read, tasks, "read rows") for file in made]
        if lacking := digests.total() - sum(file.rows for file in files):
            raise UnavailableError(
                f"{lacking} rows could not be read again at the same snapshot", where=target.name
            )
        return tuple(files)

    def _removals(self, found: Found, frame: DataFrame, target: Target) -> list[Removals]:
        """What finds the rows that go, by the row index."""
        gone = found.whole.gone
        if not gone:
            return []
        division = Division.of(self._before, found.chunks, sorted(found.sums))
        task = RemoveTask(target, gone, self.scratch)
        with self._described("find rows"):
            chosen = rows_with(frame, division, frozenset(gone))
            made = sink(
                chosen.repartition(1), task, f"{self.scratch}/{target.scratch_name}-gone.pickle"
            )
        return [each for each in made if each is not None]

    # -- the write --------------------------------------------------------------------------------------

    def _written(self, target: Target, staged: Staged) -> TableVersion:
        """Remove and add these rows, in one commit to the writer's branch."""
        before = self._before
        draft = Draft(target, staged, before.snapshot_id, _runs(before) or self._index(target))
        self._run_draft(draft)
        if draft.damage:
            log.warning("row index is built again", table=target.name, reason=draft.damage)
            draft.begin_again(replace(target, prefix=f"{target.prefix}-again"))
            draft.runs = self._index(draft.target)
            self._run_draft(draft)
        if draft.damage:
            raise CorruptError(draft.damage, where=target.name)
        count = before.rows + staged.added
        removed = draft.removed
        write = TableWrite(
            0,
            draft.base,
            "",
            rows=draft.rows,
            vectors=removed.vectors,
            replaced=removed.replaced,
            removed=[
                FileInfo(f"{self._path}/{f.name}", f.rows, f.size, f.partition)
                for f in removed.gone
            ],
            count=count,
        )
        fail_point.hit("level-staged")
        self._check()
        self._is_committed = True
        made = self._format.write(self._path, self._request.term, write).snapshot
        fail_point.hit("level-written")
        assert draft.runs is not None
        runs = tuple((run.name, run.weight) for run in draft.runs)
        return self._made(made, count, runs, copied_on_write=target.copy_on_write)

    def _run_draft(self, draft: Draft) -> None:
        (removed,) = self._on_executors(
            run_removal, [draft.removal(self.scratch, _SMALL_FILES)], "find removed rows"
        )
        draft.found(removed)
        if draft.removed.rewrites:
            draft.row_ids = self._format.row_ids(self._path, draft.base)
        for done in self._on_executors(run_complete, list(draft.completing()), "complete rows"):
            draft.completed(done)
        if (task := draft.indexing()) is not None:
            (indexed,) = self._on_executors(run_index, [task], "update row index")
            draft.indexed(indexed)

    def _index(self, target: Target) -> tuple[Run, ...]:
        """The row index of the table as it was, from its files."""
        files = self._format.scan(self._path, self._before.snapshot_id)
        whole = index.build(
            lambda function, work: self._on_executors(function, work, "build row index"),
            self._path,
            index.Identity.of(target.key, target.file_schema),
            target.key,
            files,
            name=f"{target.stage}-built",
            scratch=f"{self.scratch}/{target.scratch_name}-{target.stage}",
            by_position=target.by_position,
        )
        return whole.runs

    # -- Spark ------------------------------------------------------------------------------------------

    def _described(self, what: str) -> Any:
        text = description("level", self._root.name, [self._request.name], what)
        return described(self._spark.sparkContext, "tuskline level", text)

    def _on_executors(
        self, function: Callable[[_In], _Out], work: Sequence[_In], what: str
    ) -> list[_Out]:
        if not work:
            return []
        with self._described(what):
            found: list[_Out] = (
                self._spark.sparkContext.parallelize(work, len(work))
                .map(carried(function))
                .collect()
            )
        return found


def _with_digests(
    published: PublishedTable, part: Part, wanted: Collection[bytes], encoding: str
) -> Part | DigestedPart:
    """The part, of which the server sends the rows with these digests, unless there are too many of them."""
    if len(wanted) > _CHOSEN_THERE:
        return part
    return DigestedPart.of(published, part, wanted, encoding)


def _runs(table: TableVersion) -> tuple[Run, ...] | None:
    return None if table.runs is None else tuple(Run(*run) for run in table.runs)
