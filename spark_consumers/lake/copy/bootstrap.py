"""The initial copy of tables: exact at one LSN, while everything else continues.

A table is copied from a snapshot that PostgreSQL exports at an LSN. Changes of transactions whose commit
record starts before that LSN are in the copy and are skipped later; all others come from the log. For
nothing to fall in between,

- the copy starts only when the stream's slot is known to exist: the log then holds whatever commits after
  the snapshot;
- it notes where the log's committed end is *before* the snapshot is exported: all that the log has below it
  was committed before, so it is in the copy;
- the table is shown at the first epoch whose cut has passed the LSN, on the timeline of the snapshot
  (`origin`): at an earlier one it would hold what other tables do not have yet.

A copy goes into a new folder. Until a manifest names it, nothing but this process knows it; each table is
handed over when it is whole, and a large one (`chunk`) with each of its chunks, so that a crash costs only what is not.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import Any

import psycopg
import pyarrow as pa
from pyspark.sql import SparkSession

from spark_consumers.decode.masking import NOTHING, Masking, kept, misfit, opened, recorded
from spark_consumers.decode.mode_columns import VALID_FROM, VALID_FROM_LSN, of_lake, unkept
from spark_consumers.decode.types import arrow_schema, spark_schema, streamed_type, text_columns
from spark_consumers.lake.catalog.table_catalog import TableCatalog
from spark_consumers.lake.comparison.leveled import Leveled
from spark_consumers.lake.copy.chunk import (
    SNAPSHOT_SECONDS,
    KnownSamples,
    NextChunk,
    continued,
    next_chunk,
)
from spark_consumers.lake.copy.compared import CopiedInsteadError
from spark_consumers.lake.copy.initial_copy import CopyProgress, write_source
from spark_consumers.lake.copy.leveling import Leveler, LevelRequest
from spark_consumers.lake.epoch.quarantine import (
    QuarantineFile,
    QuarantineOfCopy,
    quarantines,
    with_more_quarantined,
)
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.table_format import (
    FileInfo,
    ScanFile,
    TableFormat,
    TableWrite,
)
from spark_consumers.lake.index import build as index
from spark_consumers.lake.layout.arrangement import Arrangement
from spark_consumers.lake.manifest.chain import COPIED, TableVersion
from spark_consumers.lake.manifest.table_version import Column
from spark_consumers.lake.manifest.takeover import term_of
from spark_consumers.lake.policy import CHUNK_BYTES, copies_on_write, deletes_by_position
from spark_consumers.lake.store.place import Place, carried, place
from spark_consumers.lake.tables import row_condition
from spark_consumers.lake.tables.new_folder import new_folder
from spark_consumers.lake.tables.origin import Origin, check
from spark_consumers.lake.tables.schema_change import schema_hash
from spark_consumers.lake.tables.schema_match import arrays_of, unusable
from spark_consumers.lake.tables.shape import Publication, Shape, refusal, texts_changed
from spark_consumers.lake.tables.sources import Source, mark, read_publication, shapes
from spark_consumers.snapshot.exported import (
    AwaitedTransaction,
    ExportedSnapshot,
    PublishedTable,
    reading,
)
from spark_consumers.sources.snapshot import PARTITION_BYTES, SnapshotSource
from spark_consumers.spark.failures import SPARK_ERRORS
from spark_consumers.spark.job_group import described, description
from walsender_bridge import errors
from walsender_bridge.change_log.client import StreamCut
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.errors import (
    CorruptError,
    NotSupportedError,
    TusklineError,
    UnavailableError,
    UnsupportedByCatalogError,
    UnsupportedValueError,
)
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.postgres.protocol.relation_name import split_relation
from walsender_bridge.postgres.table_layout import (
    CURRENT,
    HISTORY,
    LayoutRule,
    RowRules,
    layout_of,
    rules_of,
)
from walsender_bridge.runtime import fail_point, logs
from walsender_bridge.runtime.sql import load

#: In Spark's errors for data files of the lake that it cannot read.
_OF_FILES = ("ChecksumException", "Failed to fetch file")

log = logs.logger()


@dataclass(frozen=True)
class CopyRequest:
    """Copy these tables of a source (`schema.table`).

    `cut`: where its stream was committed to before the snapshot. `rate`: bytes a second, of what one copy writes.
    `partials`: what there is of copies that are to be continued. `chunk_bytes`: of a chunk (`copy.chunk`), whose
    `samples` all chunks of the request share. `levels`: the tables, by `stream.schema.table`, whose rows in the lake are to be brought level
    instead, where that is possible (`leveling`). `lake_names`: their names in the lake, both `stream.schema.table` (`target_names`); by
    default those at the source.
    """

    source: Source
    tables: frozenset[str]
    cut: StreamCut
    term: int
    rate: float | None = None
    partials: Mapping[str, TableVersion] = field(default_factory=dict)
    chunk_bytes: int = CHUNK_BYTES
    samples: KnownSamples = field(default_factory=KnownSamples, compare=False, repr=False)
    levels: Mapping[str, TableVersion] = field(default_factory=dict)
    lake_names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StartOver:
    """What there is of a copy cannot be continued, and does not count any more."""

    reason: str


#: What came of a table: a copy, or a chunk more of one (`TableVersion.is_partial`), an error, or None if it is no longer
#: published.
Copied = TableVersion | StartOver | TusklineError | None

#: The result for a table, by `stream.schema.table`.
Deliver = Callable[[str, Copied], None]


@dataclass(frozen=True)
class _Table:
    """A table of the request, as a snapshot has it."""

    request: CopyRequest
    snapshot: ExportedSnapshot
    published: PublishedTable
    shape: Shape
    #: As in `Publication`.
    empty: frozenset[int]
    masking: Masking = NOTHING
    rules: RowRules = field(default_factory=RowRules)
    #: Which rows are read, in SQL; empty: all.
    condition: str = ""

    @property
    def name(self) -> str:
        """`stream.schema.table`."""
        return f"{self.request.source.stream}.{self.published.full_name}"

    @property
    def kept(self) -> PublishedTable:
        """The table as the lake has it."""
        columns = of_lake(self.published.columns, self.masking.masks, self.rules.mode)
        return replace(self.published, columns=columns)


class TableCopier:
    """Copies tables into the lake at `root`, an absolute path.

    `on_unrepresentable_value`: see `quarantine.quarantines`; `deletes`: see `policy`; `layouts`: see `table_layout`; `mask_key`: by
    which columns are hashed; `catalog`: as for `leveling.Leveler`; `leveled` is called with what came of a table that was to be brought level.
    """

    def __init__(
        self,
        spark: SparkSession,
        root: Place,
        tables: TableFormat,
        on_unrepresentable_value: Mapping[str, str] | None = None,
        deletes: Mapping[str, str] | None = None,
        layouts: Sequence[LayoutRule] = (),
        mask_key: bytes = b"",
        catalog: TableCatalog | None = None,
        leveled: Callable[[str, Leveled], None] = lambda *_: None,
    ) -> None:
        self._spark = spark
        self._root = root
        self._format = tables
        self._leveled = leveled
        self._leveler = Leveler(spark, root, tables, catalog, deletes or {})
        self._on_unrepresentable_value = on_unrepresentable_value or {}
        self._deletes = deletes or {}
        self._rules = layouts
        self._mask_key = mask_key
        #: Set to end a copy between two parts of a table.
        self.stop = threading.Event()

    def copy(
        self, request: CopyRequest, deliver: Deliver, progress: Mapping[str, CopyProgress]
    ) -> None:
        """Copy all tables of the request, from as few snapshots as there may be (`chunk`); one that fails does not stop the others.

        Raises `UnavailableError` while the stream's slot does not exist yet, the errors of `origin.check` and
        those of the server.
        """
        left = deque(sorted(request.tables))
        partials = dict(request.partials)
        while left:
            self._copy_some(request, left, partials, deliver, progress)

    def _copy_some(
        self,
        request: CopyRequest,
        left: deque[str],
        partials: dict[str, TableVersion],
        deliver: Deliver,
        progress: Mapping[str, CopyProgress],
    ) -> None:
        """Copy tables of those that are `left`, and chunks of them, from one snapshot, until it is old."""
        source = request.source
        with StreamReader.of(request.cut) as reader:
            log_status = reader.status()
            if log_status.confirmed_to is None:
                raise UnavailableError(
                    "its slot does not exist yet",
                    where=source.stream,
                    repair="check that `tuskline bridge run` is running",
                )
        with ExportedSnapshot(source.dsn, waiting=self._waiting(source, progress)) as snapshot:
            opened = time.monotonic()
            origin = Origin(snapshot.system_id, snapshot.timeline, snapshot.lsn)
            check(origin, source.stream, log_status.system_id, request.cut)
            published = {table.full_name: table for table in snapshot.tables(source.publication)}
            for each in progress.values():
                each.waits_for = ""
            known = {oid for each in partials.values() for oid in Shape.load(each.shape).relations}
            found = _shapes(source, snapshot, known)
            later = read_publication(replace(source, dsn=snapshot.dsn))
            is_old = False
            while left and not is_old:
                relation = left.popleft()
                name = f"{source.stream}.{relation}"
                # A publication is what it is by now, in any snapshot: a table can leave it between the two.
                if relation not in published or relation not in found.shapes:
                    deliver(name, None)
                    continue
                made: Copied
                try:
                    shape = checked(found.shapes[relation], later.shapes.get(relation), name)
                    rules = rules_of(self._rules, name)
                    masking = self._masking(name, published[relation], rules)
                    _check_mode(name, published[relation], rules.mode)
                    condition = _condition(name, published[relation], rules)
                    table = _Table(
                        request,
                        snapshot,
                        published[relation],
                        shape,
                        found.empty,
                        masking,
                        rules,
                        condition,
                    )
                    made = self._copy(table, partials.get(name), progress[name])
                except UnsupportedByCatalogError:
                    # The next table would meet it as well.
                    raise
                except Exception as error:
                    made = error if isinstance(error, TusklineError) else _copy_error(name, error)
                    if isinstance(made, CorruptError) and name in partials:
                        made = StartOver(f"what there was of it is damaged: {made}")
                deliver(name, made)
                if isinstance(made, TableVersion) and made.is_partial:
                    partials[name] = made
                    left.appendleft(relation)
                elif isinstance(made, TableVersion):
                    mark(source)
                is_old = time.monotonic() - opened >= SNAPSHOT_SECONDS

    def _masking(self, name: str, table: PublishedTable, rules: RowRules) -> Masking:
        """How the table is masked. Raises `NotSupportedError` for masks that it cannot have."""
        masks = recorded(rules.masks, self._mask_key)
        masking = opened(masks, self._mask_key)
        reason = (
            masking if isinstance(masking, str) else misfit(table.columns, table.key or (), masks)
        )
        if isinstance(masking, str) or reason is not None:
            raise NotSupportedError(
                f"it is not copied unmasked: {reason}",
                where=name,
                repair="correct mask in the first [[lake.tables]] whose pattern matches the table, and start `lake run` again",
            )
        return masking

    def _waiting(
        self, source: Source, progress: Mapping[str, CopyProgress]
    ) -> Callable[[AwaitedTransaction | None], None]:
        """Report a transaction that these tables wait for, and end the wait when the copies are to stop."""
        named = ""

        def waiting(awaited: AwaitedTransaction | None) -> None:
            nonlocal named
            if self.stop.is_set():
                raise UnavailableError("the copy was stopped", where=source.stream)
            for each in progress.values():
                each.waits_for = f"{awaited.text} (HINT: {awaited.repair})" if awaited else ""
            if awaited is not None and awaited.repair != named:
                named = awaited.repair
                log.warning(
                    "copy waits for a transaction",
                    stream=source.stream,
                    waits_for=awaited.text,
                    repair=awaited.repair,
                )

        return waiting

    def remove(self, path: str) -> None:
        """Remove a copy that no manifest names; `path` is relative to the lake."""
        self._format.drop(str(self._root / path))

    def _copy(
        self, table: _Table, partial: TableVersion | None, progress: CopyProgress
    ) -> TableVersion | StartOver:
        """The table, or a chunk more of it than `partial` has."""
        snapshot = table.snapshot
        with reading(snapshot.dsn, snapshot.snapshot) as connection:
            begun = self._begun(table, _layout(connection, table.published))
            if partial is not None:
                again = continued(partial, begun, table.shape, table.empty)
                if isinstance(again, str):
                    return StartOver(again)
                partial = again
        self._check_wanted(table.name, progress)
        if partial is None and table.name in table.request.levels:
            made = self._level(table, table.request.levels[table.name], begun, progress)
            if made is not None:
                return made
        with reading(snapshot.dsn, snapshot.snapshot) as connection:
            chunk = next_chunk(
                connection,
                table.kept,
                partial,
                size=table.request.chunk_bytes,
                piece=part_bytes(table.request.rate),
                known=table.request.samples,
            )
        if partial is not None:
            # Its table is named by a link: only the lake's housekeeping removes it.
            return self._continued(table, partial, chunk, progress)
        try:
            folder = str(self._root / begun.path)
            in_version_2 = begun.copy_on_write or deletes_by_position(self._deletes, table.name)
            columns = arrow_schema(table.kept.columns)
            self._format.create(folder, columns, vectors=not in_version_2)
            return self._with_next(table, begun, chunk, progress)
        except Exception:
            self.remove(begun.path)
            raise

    def _check_wanted(self, name: str, progress: CopyProgress) -> None:
        if progress.is_unwanted or self.stop.is_set():
            raise UnavailableError(
                "the copy was stopped",
                where=name,
                repair="no action is needed: it restarts with the lake job",
            )

    def _level(
        self, table: _Table, before: TableVersion, now: TableVersion, progress: CopyProgress
    ) -> TableVersion | None:
        """The table as it is in the lake, brought level; None if it has to be copied."""
        began, name = time.monotonic(), table.name
        progress.levels = True
        request = LevelRequest(
            name,
            before,
            now,
            table.published,
            table.snapshot,
            table.request.source.publication,
            table.request.term,
            table.request.rate,
        )
        try:
            made, counts = self._leveler.level(
                request, progress, lambda: self._check_wanted(name, progress)
            )
        except CopiedInsteadError as reason:
            why = str(reason)
        except Exception as error:
            known = error if isinstance(error, TusklineError) else _copy_error(name, error)
            # Spark's own classes say nothing of the file that they have met.
            is_damage = any(word in str(error) for word in _OF_FILES)
            if not (isinstance(known, CorruptError | NotSupportedError) or is_damage):
                raise known from error
            why = str(known)
        else:
            seconds = round(time.monotonic() - began, 3)
            log.info(
                "table brought level",
                table=name,
                lsn=made.start_lsn,
                seconds=seconds,
                **asdict(counts),
            )
            self._leveled(name, Leveled(time.time(), made.start_lsn, seconds, counts))
            return made
        progress.begin_again()
        seconds = round(time.monotonic() - began, 3)
        self._leveled(name, Leveled(time.time(), table.snapshot.lsn, seconds, copied=why))
        log.warning("table is copied instead of being brought level", table=name, reason=why)
        return None

    def _continued(
        self,
        table: _Table,
        partial: TableVersion,
        chunk: NextChunk | None,
        progress: CopyProgress,
    ) -> TableVersion:
        """As `_with_next`; what attempts at this chunk have written, of this driver and of one that died, does not add up."""
        self._remove_attempts(table, partial)
        try:
            return self._with_next(table, partial, chunk, progress)
        except Exception:
            # A full disk may be the reason: this makes room. What cannot be removed now is with the next attempt.
            with suppress(OSError, TusklineError, *SPARK_ERRORS):
                self._remove_attempts(table, partial)
            raise

    def _remove_attempts(self, table: _Table, partial: TableVersion) -> None:
        """Remove data files that no chunk has. A commit that has them all the same is replaced by the next one (`IcebergFormat.write`)."""
        folder = str(self._root / partial.path)
        there = self._format.scan(folder, partial.snapshot_id)
        names = {PurePath(file.path).name for file in there}
        _remove_others(place(folder) / "data", table.request.term, names)

    def _begun(self, table: _Table, layout: tuple[Column, ...]) -> TableVersion:
        """What a copy of the table from this snapshot has as long as nothing was read."""
        request, snapshot, published = table.request, table.snapshot, table.kept
        key = usable_key(published)
        stream, _, relation = request.lake_names.get(table.name, table.name).partition(".")
        return TableVersion(
            path=new_folder(stream, *split_relation(relation), request.term),
            format=self._format.name,
            snapshot_id=0,
            schema_hash=schema_hash(arrow_schema(published.columns), key),
            key=key,
            text_columns=tuple(text_columns(published.columns)),
            start_lsn=snapshot.lsn,
            offset=request.cut.end_offset,
            rows=0,
            relation_id=published.oid,
            state=COPIED,
            layout=layout,
            system_id=snapshot.system_id,
            timeline=snapshot.timeline,
            shape=table.shape.dump(),
            masks=table.masking.masks,
            mode=table.rules.mode,
            row_filter=table.rules.row_filter,
            copy_on_write=copies_on_write(self._deletes, table.name),
        )

    def _with_next(
        self,
        table: _Table,
        before: TableVersion,
        chunk: NextChunk | None,
        progress: CopyProgress,
    ) -> TableVersion:
        """The table with its next chunk, or with all of its rows, read from its snapshot and written."""
        began = time.monotonic()
        name, term, snapshot = table.name, table.request.term, table.snapshot
        if snapshot.lsn < before.start_lsn:
            raise UnavailableError(
                f"its server is at {format_lsn(snapshot.lsn)}, behind the copy's {format_lsn(before.start_lsn)}",
                where=name,
                repair="point the source's DSN at the primary (target_session_attrs=read-write)",
            )
        folder = str(self._root / before.path)
        files, quarantined = self._read(table, folder, chunk, progress)
        rows = before.rows + sum(file.rows for file in files)
        # Version 0: a copy is of no range of the log.
        write = TableWrite(0, before.snapshot_id or None, "", files, count=rows)
        made = self._format.write(folder, term, write).snapshot
        chunks = before.chunks if chunk is None else (*before.chunks, (chunk.end, snapshot.lsn))
        # With the last one of several snapshots: before it, rows of other chunks have no versions.
        since = snapshot.read_at if before.mode == HISTORY else 0
        after = replace(before, snapshot_id=made, rows=rows, start_lsn=snapshot.lsn, chunks=chunks)
        after = with_more_quarantined(replace(after, history_from=since), quarantined)
        seconds = round(time.monotonic() - began, 3)
        if after.is_partial:
            log.info(
                "chunk of table copied", table=name, rows=rows, lsn=snapshot.lsn, seconds=seconds
            )
            fail_point.hit("chunk-copied")
            return after
        there = self._format.scan(folder, made)
        _remove_others(place(folder) / "data", term, {PurePath(file.path).name for file in there})
        indexed = self._indexed(name, folder, f"copy-t{term}-{made}", before.identity, there)
        log.info("table copied", table=name, rows=rows, lsn=snapshot.lsn, seconds=seconds)
        return replace(after, runs=tuple((run.name, run.weight) for run in indexed.runs))

    def _read(
        self, table: _Table, folder: str, chunk: NextChunk | None, progress: CopyProgress
    ) -> tuple[list[FileInfo], list[QuarantineFile]]:
        """Read the chunk, or the whole table, into data files."""
        name, request, snapshot = table.name, table.request, table.snapshot
        columns = arrow_schema(kept(table.published.columns, table.masking.masks))
        schema = spark_schema(columns)
        arrangement = self._arranged(name, folder, request.term)
        reading = SnapshotSource(
            {
                "dsn": snapshot.dsn,
                "snapshot": snapshot.snapshot,
                "table": table.published.full_name,
                "publication": request.source.publication,
                "partitionBytes": str(part_bytes(request.rate)),
            },
            chunk.ranges if chunk is not None else None,
            snapshot.slot,
            table.masking,
            table.condition,
        )
        apart = (
            table.rules.mode == CURRENT
            and not table.rules.row_filter
            and quarantines(self._on_unrepresentable_value, name)
        )
        prefix = f"{folder}/data/copy-t{request.term}"
        return write_source(
            self._spark,
            reading.reader_apart(schema) if apart else reading.reader(schema),
            prefix,
            self._format.schemas(folder)[1],
            beside=_begun_at(snapshot) if table.rules.mode == HISTORY else {},
            arrangement=arrangement,
            rate=request.rate,
            progress=progress,
            stop=self.stop,
            apart=QuarantineOfCopy(name, prefix, columns, snapshot.lsn) if apart else None,
            description=description("copy", self._root.name, [name], "read and write"),
        )

    def _arranged(self, name: str, folder: str, term: int) -> Arrangement:
        """Give the new table its layout. Raises `NotSupportedError`, with the table's name, for one that it cannot have."""
        try:
            return self._format.arrange(folder, term, layout_of(self._rules, name))
        except UnsupportedByCatalogError:
            raise
        except NotSupportedError as error:
            raise NotSupportedError(error.what, where=name, repair=error.repair) from None

    def _indexed(
        self, name: str, folder: str, prefix: str, key: tuple[str, ...], files: Sequence[ScanFile]
    ) -> index.Whole:
        """The row index of the copy, in files that begin with `prefix`: an earlier attempt at the last chunk may have left others."""
        context = self._spark.sparkContext
        text = description("copy", self._root.name, [name], "build row index")

        def run(function: Callable[[Any], Any], work: Sequence[Any]) -> list[Any]:
            with described(context, "tuskline copy", text):
                found: list[Any] = (
                    context.parallelize(work, len(work)).map(carried(function)).collect()
                )
            return found

        schema = self._format.schemas(folder)[1]
        scratch = f"{folder}/index/.{prefix}-part"
        whole = index.build(
            run,
            folder,
            index.Identity.of(key, schema),
            key,
            files,
            name=f"{prefix}-index",
            scratch=scratch,
        )
        for part in (place(folder) / "index").glob(f".{prefix}-part.*"):
            checksums.remove(part)
        return whole


def _begun_at(snapshot: ExportedSnapshot) -> dict[str, int]:
    """Where the versions of copied rows begin: before all commits that the snapshot does not have.

    Such a commit's record may start at the snapshot's LSN.
    """
    return {VALID_FROM: snapshot.read_at, VALID_FROM_LSN: snapshot.lsn - 1}


def _check_mode(name: str, table: PublishedTable, mode: str) -> None:
    """Raise `NotSupportedError` for a table that cannot have the mode."""
    reason = unkept([column.name for column in table.columns], table.key, mode)
    if reason is not None:
        raise NotSupportedError(
            reason,
            where=name,
            repair='set mode = "current" in the first [[lake.tables]] whose pattern matches the table, and start `lake run` again; '
            "or change the table",
        )


def _condition(name: str, table: PublishedTable, rules: RowRules) -> str:
    """The table's row filter in SQL; nothing without one. Raises `NotSupportedError` for one that it cannot have."""
    if not rules.row_filter:
        return ""
    masked = frozenset(mask.column for mask in rules.masks)
    return row_condition.opened(rules.row_filter, tuple(table.columns), masked, where=name).sql


def _shapes(source: Source, snapshot: ExportedSnapshot, known: Collection[int]) -> Publication:
    """The publication's tables, as the snapshot has them. `known`: the relations of copies that are continued."""
    with reading(snapshot.dsn, snapshot.snapshot) as connection:
        return shapes(connection, source.publication, known)


def checked(shape: Shape, later: Shape | None, where: str) -> Shape:
    """The shape. Raises `NotSupportedError` for a table whose changes would not give its rows.

    And `UnavailableError` where the snapshot's values and what an ordinary query sees `later`, before the copy reads
    them, differ in their texts: then the copy has one text, and later changes have the other.
    """
    changes = later and (texts_changed(shape, later) or texts_changed(later, shape))
    if changes:
        raise UnavailableError(changes, where=where)
    refused = refusal(shape)
    if refused is not None:
        raise NotSupportedError(refused.reason, where=where, repair=refused.repair)
    return shape


def _layout(
    connection: psycopg.Connection[tuple[Any, ...]], table: PublishedTable
) -> tuple[Column, ...]:
    """The table's columns as the stream will send them."""
    rows = connection.execute(load("lake/table_columns"), {"table": table.oid}).fetchall()
    declared = {name: kind for name, kind, _, _ in rows}
    return tuple(
        (c.name, streamed_type(declared[c.name], c.type_oid), c.typmod) for c in table.columns
    )


def part_bytes(rate: float | None) -> int:
    """Bytes of a table that one task reads: about a second's worth where the rate is limited."""
    return PARTITION_BYTES if rate is None else int(min(max(rate, 2**20), PARTITION_BYTES))


def usable_key(table: PublishedTable) -> tuple[str, ...]:
    """The columns that identify rows in the lake; none for a multiset.

    Raises `NotSupportedError` for a key that Iceberg cannot delete by, and for columns that the lake cannot keep.
    """
    schema = arrow_schema(table.columns)
    reason = unusable(schema.names, table.key or (), arrays_of(schema))
    if reason is not None:
        raise NotSupportedError(
            reason,
            where=table.full_name,
            repair="exclude the table from the publication, or add or rename a column",
        )
    if table.key is None:
        return ()
    for name in table.key:
        if pa.types.is_nested(schema.field(name).type):
            raise NotSupportedError(
                f"its key contains the array {name!r}, which cannot identify rows of the lake",
                where=table.full_name,
                repair="exclude the table from the publication, or set another replica identity",
            )
    return table.key


def _remove_others(folder: Place, term: int, wanted: Collection[str]) -> None:
    """Remove what failed attempts have left, but for files of these names; those of a newer writer are never touched."""
    for file in folder.glob("copy-t*"):
        if file.name not in wanted and term_of(file.name) <= term:
            checksums.remove(file)


def _copy_error(name: str, error: Exception) -> TusklineError:
    """The error of this table for an executor's error, which Spark wraps."""
    # An exception of the driver's own JVM follows a colon.
    text = [line.removeprefix(": ") for line in str(error).strip().splitlines()]
    # Spark wraps what an executor raised between stack traces; an exception begins a line with its class.
    named = [line for line in text if re.match(r"[\w.]+(Error|Exception): .", line)]
    line = (named or text or [type(error).__name__])[-1][:500]
    if (own := re.match(rf"{errors.__name__}\.(\w+): (.+)", line)) is None:
        return UnavailableError(line, where=name)
    kind, what = own.groups()
    if kind == CorruptError.__name__:
        return CorruptError(what, where=name)
    if kind != UnsupportedValueError.__name__:
        return UnavailableError(what, where=name)
    return UnsupportedValueError(
        what,
        where=name,
        repair=f'change the value at the source, or quarantine such rows ([lake.on_unrepresentable_value] "{name}" = "quarantine", '
        "start `lake run` again)",
    )
