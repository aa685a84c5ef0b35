"""Iceberg tables: what the pipeline writes becomes snapshots, each commit a compare-and-set.

Rows are removed by *deletion vectors* (`puffin`): which positions of a data file are removed. Every engine that reads
version 3 of the format reads them, at the cost of one small file. Which positions these are is found by the row index
(`spark_consumers.lake.index`), so the cost of an epoch depends on its changes, not on the size of the table.

**Fencing.** Each writer's term has a branch in every table, created at the takeover from the snapshot that the manifest
names; all older branches are dropped then. A write goes to the writer's branch, and is refused if that no longer exists.
Check and commit are atomic, because Iceberg's libraries only build the updates, and the lake's catalog makes them
(`catalog.table_catalog`) if the writer's branch is where it was seen. If it is not, the writer reloads the table.

`main` shows the plain reader of the table the last *published* snapshot. The tag of a pin keeps a snapshot from being
expired by others. An epoch has no tag: the writer's own retention keeps what a link or a pin needs.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import SparkSession

from spark_consumers.lake.catalog.control_table import NewSnapshot
from spark_consumers.lake.catalog.table_catalog import (
    LoadedTable,
    Outcome,
    TableCatalog,
    TableCommit,
    TableId,
    moved_main,
)
from spark_consumers.lake.format import checksums, leaks
from spark_consumers.lake.format.data_files import Stage
from spark_consumers.lake.format.file_names import has_others, with_first_names
from spark_consumers.lake.format.iceberg_commit import (
    commit_of,
    needed,
    newest,
    refs_of,
    sync_snapshots,
)
from spark_consumers.lake.format.iceberg_files import (
    following,
    is_newest,
    make_folders,
    prepared,
    refs_in,
    refs_of_record,
)
from spark_consumers.lake.format.iceberg_layout import Partitions, changed, layouts_of
from spark_consumers.lake.format.iceberg_read import blamed
from spark_consumers.lake.format.iceberg_refs import (
    NO_TAG,
    PINS,
    TAG,
    VERSION,
    Ref,
    branch_of,
    fenced,
    fenced_by,
    is_epoch,
    of_users,
    pin_changes,
    term_of,
    unpublished,
)
from spark_consumers.lake.format.iceberg_schema import (
    arrow_schema,
    decoded,
    encoded,
    evolved,
    iceberg_schema,
)
from spark_consumers.lake.format.iceberg_tables import empty_snapshot, loaded_tables, of_table
from spark_consumers.lake.format.initial_default import json_of
from spark_consumers.lake.format.position_deletes import is_of_positions
from spark_consumers.lake.format.snapshot_files import (
    data_files,
    equality_deletes,
    files_of,
    row_ids,
)
from spark_consumers.lake.format.table_format import (
    ROW_ID,
    FileInfo,
    RowIds,
    ScanFile,
    SnapshotRecord,
    TableWrite,
    Vector,
    Written,
    placed,
)
from spark_consumers.lake.layout.arrangement import NO_PARTITION, Arrangement
from spark_consumers.lake.layout.evolution import arrangement, changes
from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.store.place import Place, is_object, place, remove_tree
from spark_consumers.spark.session import is_alive
from walsender_bridge.errors import (
    CorruptError,
    FencedError,
    UnavailableError,
)
from walsender_bridge.postgres.table_layout import TableLayout
from walsender_bridge.runtime import logs

#: The table property that has PostgreSQL's columns as Arrow types, which are finer than Iceberg's.
_COLUMNS = "tuskline.columns"
#: The table property that says that columns have their first names in all data files (`file_names`), since earlier versions of Tuskline did
#: not give them these.
_FILE_NAMES, _FIRST = "tuskline.file-names", "first"
#: Of Iceberg's format: the first with deletion vectors, and the one before.
_VERSION, _VERSION_WITHOUT_VECTORS = 3, 2
_PROPERTIES = {
    "format-version": str(_VERSION),
    "write.parquet.compression-codec": "zstd",
    # What expires is said by the manifests, never by age alone.
    "history.expire.max-snapshot-age-ms": str(2**62),
}
#: Of tables whose metadata a catalog writes: it removes what is far behind. In a folder the commit does.
_METADATA_PROPERTIES = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}


log = logs.logger()


class _Untaken(NamedTuple):
    """What a takeover has found of a table: the published snapshot and its epoch."""

    snapshot: int
    epoch: int


class IcebergFormat:
    """Iceberg tables in folders, through the Iceberg library in the session's JVM.

    Damaged files of a table raise `CorruptError`, with the file's path, before anything is built on them.

    `lake` is the lake's UUID; every snapshot's summary has it, with the table's name and the version. `catalog` makes what
    is built here part of the tables.
    """

    name = "iceberg"

    def __init__(self, spark: SparkSession, lake: str, catalog: TableCatalog) -> None:
        self._spark = spark
        self._lake = lake
        self._catalog = catalog
        jvm: Any = spark._jvm  # noqa: SLF001  # PySpark has no public way to its JVM
        self._jvm = jvm
        self._new_array = spark.sparkContext._gateway.new_array  # type: ignore[union-attr]  # noqa: SLF001
        self._iceberg = jvm.org.apache.iceberg
        self._tables = loaded_tables(spark, catalog)
        #: By path: tables that the takeover has left to be taken before they are changed.
        self._untaken: dict[str, _Untaken] = {}
        #: By path: a snapshot that plain readers see, and the metadata file that was the newest then.
        self._shown: dict[str, tuple[int, Place]] = {}

    def create(self, path: str, columns: pa.Schema, *, vectors: bool = True) -> None:
        """Make an empty table in a new folder; without `vectors` in a version of the format that engines have known longer.

        Raises `FencedError` if another writer made it.
        """
        properties = {**_PROPERTIES, _COLUMNS: encoded(columns), _FILE_NAMES: _FIRST}
        if not vectors:
            properties["format-version"] = str(_VERSION_WITHOUT_VECTORS)
        if not self._catalog.is_folder:
            make_folders(place(path))
            properties |= _METADATA_PROPERTIES
        outcome = self._catalog.create(TableId.at(path), iceberg_schema(columns), properties)
        if not _is_won(outcome, path):
            raise FencedError("another writer has created this table", where=path)

    def drop(self, path: str) -> None:
        """Remove the table with its folder."""
        self._catalog.drop(TableId.at(path))
        remove_tree(place(path))
        self.forget(path)

    def forget(self, path: str) -> None:
        """Load the table again before it is used: it is gone, or it is damaged."""
        self._shown.pop(path, None)
        self._tables.forget(path)

    @of_table
    def schemas(self, path: str, snapshot: int | None = None) -> tuple[pa.Schema, pa.Schema]:
        """All its columns now, and the data files' schema with Iceberg's field numbers: that of a snapshot, or without one the newest."""
        table = self._tables.current(path)
        columns = decoded(table.properties().get(_COLUMNS))
        return columns, self._schema_at(table.operations().current(), snapshot)

    def _schema_at(self, metadata: Any, snapshot: int | None) -> pa.Schema:
        return with_first_names(
            arrow_schema(self._schema_json(metadata, snapshot)), self._history(metadata)
        )

    def _history(self, metadata: Any) -> list[dict[str, Any]]:
        """All schemas that the table has had, in Iceberg's JSON."""
        parser = self._iceberg.SchemaParser
        return [json.loads(parser.toJson(each)) for each in metadata.schemas()]

    def _schema_json(self, metadata: Any, snapshot: int | None) -> dict[str, Any]:
        """The schema of a snapshot, or the table's own, in Iceberg's JSON."""
        found = None if snapshot is None else metadata.snapshot(snapshot)
        number = None if found is None else found.schemaId()
        schema = metadata.schema() if number is None else metadata.schemasById().get(number)
        record: dict[str, Any] = json.loads(self._iceberg.SchemaParser.toJson(schema))
        return record

    def opens(self, path: str) -> bool:
        """Whether the library opens the table anew, in a session that lives."""
        self.forget(path)
        try:
            self.schemas(path)
        except Exception as error:
            log.warning("table not opened", path=path, error=str(error)[:500])
            return False
        return is_alive(self._spark)

    @of_table
    def version(self, path: str) -> int:
        """The version of the format that it has."""
        return int(self._tables.current(path).operations().current().formatVersion())

    @of_table
    def arrange(self, path: str, term: int, layout: TableLayout) -> Arrangement:
        """Give it this layout, which holds for files that are written from now on; how these are written.

        A table that has it is not changed, nor taken over for that. Raises `FencedError`, and `NotSupportedError` for a layout
        that it cannot have.
        """

        def change(table: Any) -> Any:
            base = table.operations().current()
            if base.ref(branch_of(term)) is None and refs_of(base):
                raise fenced(path, term)
            wanted = changes(layouts_of(self._iceberg, base), layout, _PROPERTIES, path)
            return changed(self._jvm, base, wanted) if wanted else None

        there = layouts_of(self._iceberg, self._tables.current(path).operations().current())
        if not changes(there, layout, _PROPERTIES, path):
            return arrangement(there)
        self._commit(path, term, change)
        return self.arrangement(path)

    @of_table
    def arrangement(self, path: str) -> Arrangement:
        """How its files are written now."""
        metadata = self._tables.current(path).operations().current()
        return arrangement(layouts_of(self._iceberg, metadata))

    @of_table
    def partition_fields(self, path: str) -> frozenset[str]:
        """The names of the partition fields of all its specs, but for columns': no column that is added can have one of these."""
        there = layouts_of(self._iceberg, self._tables.current(path).operations().current())
        names = {field["name"] for spec in there.specs for field in spec["fields"]}
        return frozenset(names - {*there.columns.names})

    @of_table
    def laid_out_by(self, path: str) -> frozenset[str]:
        """The names of the columns that its partition specs and its sort orders are made of."""
        metadata = self._tables.current(path).operations().current()
        there = layouts_of(self._iceberg, metadata)
        orders = [
            json.loads(self._iceberg.SortOrderParser.toJson(o)) for o in metadata.sortOrders()
        ]
        fields = [field for each in (*there.specs, *orders) for field in each["fields"]]
        numbers = {field["source-id"] for field in fields}
        return frozenset(name for name, number in there.ids.items() if number in numbers)

    def keeps_defaults(self, path: str) -> bool:
        """Whether it is in a version of the format that has initial defaults."""
        return self.version(path) >= _VERSION

    @of_table
    def evolve(
        self,
        path: str,
        term: int,
        snapshot: int,
        columns: pa.Schema,
        sources: Mapping[str, str],
        defaults: Mapping[str, pa.Scalar],
    ) -> pa.Schema:
        """Give the table these columns from its next snapshot on; the schema of its data files then.

        `snapshot`: the one that is published. `sources`: the name that a column has there, where it has one; others are new.
        `defaults`: the values of new columns in rows that are there; the schema has those that the catalog keeps.
        Snapshots that are there keep their schema, and data files are left as they are. Raises `FencedError`.
        """
        made: list[pa.Schema] = []

        def change(table: Any) -> Any:
            base = table.operations().current()
            if base.ref(branch_of(term)) is None:
                raise fenced(path, term)
            before = self._schema_json(base, snapshot)
            newest = self._schema_json(base, None)
            there = decoded(table.properties().get(_COLUMNS))
            last = base.lastColumnId()
            values = {name: json_of(value) for name, value in defaults.items()}
            wanted, last = evolved(before, newest, columns, sources, last, there.names, values)
            known = columns
            if there.names[-1] == ROW_ID:
                known = columns.append(there.field(ROW_ID))
            own = [field for field in wanted["fields"] if field["name"] in known.names]
            history = self._history(base)
            made.append(with_first_names(arrow_schema({"fields": own}), [*history, wanted]))
            properties = self._jvm.java.util.HashMap()
            if not has_others(history):
                properties.put(_FILE_NAMES, _FIRST)
            properties.put(_COLUMNS, encoded(known))
            if wanted["fields"] == newest["fields"]:
                if table.properties().get(_COLUMNS) == encoded(known):
                    return None
                builder = self._iceberg.TableMetadata.buildFrom(base)
                return builder.setProperties(properties).build()
            schema = self._iceberg.SchemaParser.fromJson(json.dumps(wanted))
            builder = self._iceberg.TableMetadata.buildFrom(base)
            return builder.setCurrentSchema(schema, last).setProperties(properties).build()

        self._commit(path, term, change)
        if defaults:
            # A catalog of others may have left out what it does not know.
            there = self._schema_at(self._tables.current(path).operations().current(), None)
            return pa.schema([there.field(name) for name in made[-1].names])
        return made[-1]

    @of_table
    def take_over(
        self, path: str, snapshot: int, term: int, epoch: int, *, later: bool = False
    ) -> None:
        """Drop the branches of lower terms and what they wrote after `epoch`; make this term's branch.

        `later`: with the first change by this term, if plain readers see the snapshot. Raises `FencedError` if a higher term has
        the table, `CorruptError` if the snapshot is not there or damaged.
        """
        file = self._tables.shows(path, snapshot, term) if later else None
        if file is not None:
            self._untaken[path] = _Untaken(snapshot, epoch)
            self._shown[path] = snapshot, file
            return
        self._take(path, snapshot, term, epoch)
        self._untaken.pop(path, None)

    def _take_now(self, path: str, term: int) -> None:
        """Take the table, if the takeover has left that for later."""
        untaken = self._untaken.get(path)
        if untaken is not None:
            self._take(path, untaken.snapshot, term, untaken.epoch)
            del self._untaken[path]

    def _take(self, path: str, snapshot: int, term: int, epoch: int) -> None:

        def change(table: Any) -> Any:
            base = table.operations().current()
            self._tables.check(path, table, snapshot)
            builder = self._iceberg.TableMetadata.buildFrom(base)
            refs = refs_of(base)
            for name in (*fenced_by(refs, term, path), *unpublished(refs, epoch)):
                builder.removeRef(name)
            # Where a catalog shows epochs in one commit of all tables, it moves `main`.
            own = ("main",) if self._catalog.is_folder else ()
            for name in (branch_of(term), *own):
                builder.setRef(name, self._iceberg.SnapshotRef.branchBuilder(snapshot).build())
            return builder.build()

        steps = takeover.commit(change, path, clean=True)
        takeover.carry_out(steps, partial(self._do, path, term))

    @of_table
    def write(self, path: str, term: int, write: TableWrite) -> Written:
        """Commit the write to this term's branch. The same write of an epoch again is a no-op.

        Raises `FencedError` when the term's branch is gone.
        """
        branch = branch_of(term)
        made: list[Written] = []

        def change(table: Any) -> Any:
            base = table.operations().current()
            head = base.ref(branch)
            if head is None:
                if write.base is not None or refs_of(base):
                    raise fenced(path, term)
            elif self._is_done(base.snapshot(head.snapshotId()), path, write):
                summary = base.snapshot(head.snapshotId()).summary()
                made.append(Written(head.snapshotId(), summary.get("tuskline.stage")))
                return None
            if write.base is not None:
                self._tables.check(path, table, write.base)
            transaction = self._tables.transaction(table)
            if head is not None and head.snapshotId() != write.base:
                # What an attempt at another range has left on our branch was never published.
                transaction.manageSnapshots().replaceBranch(branch, write.base).commit()
            self._snapshot(table, transaction, branch, path, write)
            metadata = transaction.currentMetadata()
            snapshot = metadata.ref(branch).snapshotId()
            self._check_count(path, metadata.snapshot(snapshot), write.count)
            made.append(Written(snapshot, write.stage))
            return metadata

        self._commit(path, term, change)
        return made[-1]

    def _identity(self, path: str) -> str:
        return f"{self._lake}:{'/'.join(PurePath(path).parts[-3:])}"

    def _is_done(self, snapshot: Any, path: str, write: TableWrite) -> bool:
        """Whether this snapshot already is that write: the same table, base, end version and link.

        Once another link has taken that number, the files of an attempt at it are orphaned. A copy's chunk is of no range of
        the log: what another attempt at it has read are the rows of an earlier snapshot.
        """
        if write.conversion or not write.stage:
            return False
        summary = snapshot.summary()
        done, wanted = Stage.of(summary.get("tuskline.stage") or ""), Stage.of(write.stage)
        if done and wanted and done.link != wanted.link:
            return False
        return bool(
            summary.get("tuskline.table") == self._identity(path)
            and summary.get(VERSION) == str(write.version)
            and summary.get("tuskline.base") == str(write.base)
            and snapshot.parentId() == write.base
        )

    def _snapshot(
        self, table: Any, transaction: Any, branch: str, path: str, write: TableWrite
    ) -> None:
        parts = Partitions(self._iceberg, table)
        has_vectors = any(not is_of_positions(vector) for vector in write.vectors)
        if has_vectors and table.operations().current().formatVersion() < _VERSION:
            transaction.updateProperties().set("format-version", str(_VERSION)).commit()
        if write.truncate:
            update = transaction.newOverwrite()
            update.overwriteByRowFilter(self._iceberg.expressions.Expressions.alwaysTrue())
            for file in write.rows:
                update.addFile(self._data_file(parts, table, file))
        elif not any((write.removed, write.vectors, write.replaced, write.converted)):
            # Readers of a stream take nothing else, and Iceberg calls a change without files an overwrite.
            update = transaction.newAppend()
            for file in write.rows:
                update.appendFile(self._data_file(parts, table, file))
        else:
            update = transaction.newRowDelta()
            if write.base is not None:
                # Otherwise vectors that were added at any time count as other writers'.
                update.validateFromSnapshot(write.base)
            for file in write.rows:
                update.addRows(self._data_file(parts, table, file))
            for file in write.removed:
                update.removeRows(self._named(parts, file))
            for vector in write.vectors:
                update.addDeletes(self._vector(parts, table, path, vector))
            for vector in write.replaced:
                update.removeDeletes(self._vector(parts, table, path, vector))
            for name in write.converted:
                update.removeDeletes(self._keys(name))
        update.set("tuskline.table", self._identity(path))
        update.set(VERSION, str(write.version))
        update.set(TAG, NO_TAG)
        update.set("tuskline.stage", write.stage)
        update.set("tuskline.base", str(write.base))
        update.toBranch(branch)
        update.commit()

    def _check_count(self, path: str, snapshot: Any, count: int | None) -> None:
        """Compare the rows of a snapshot, by Iceberg's own sums, with those that the table must have then.

        A vector that was added beside another one of its data file, or of a row that it removes twice, is found here: no
        reader would be able to read the table.
        """
        summary = snapshot.summary()
        sums = {
            name: int(summary.get(f"total-{name}") or 0)
            for name in ("records", "position-deletes", "equality-deletes")
        }
        found = sums["records"] - sums["position-deletes"]
        if count is not None and not sums["equality-deletes"] and found != count:
            raise CorruptError(
                f"expected {count} rows after the epoch, but its files would have {found}",
                where=path,
                repair="copy the table again: tuskline table resync",
            )

    def _data_file(self, parts: Partitions, table: Any, file: FileInfo) -> Any:
        builder = self._iceberg.DataFiles.builder(parts.spec(file.partition))
        described = self._described(parts.placed(builder, file.partition), table, file)
        return described.withSortOrderId(file.order).build()

    def _named(self, parts: Partitions, file: FileInfo) -> Any:
        """A data file that is there already."""
        builder = self._iceberg.DataFiles.builder(parts.spec(file.partition))
        return (
            parts.placed(builder, file.partition)
            .withPath(file.path)
            .withFormat("parquet")
            .withFileSizeInBytes(file.size)
            .withRecordCount(file.rows)
            .build()
        )

    def _vector(self, parts: Partitions, table: Any, path: str, vector: Vector) -> Any:
        file = f"{path}/{vector.puffin}"
        builder = self._iceberg.FileMetadata.deleteFileBuilder(parts.spec(vector.partition))
        described = (
            parts.placed(builder.ofPositionDeletes(), vector.partition)
            .withPath(file)
            .withFileSizeInBytes(vector.size)
            .withReferencedDataFile(f"{path}/{vector.file}")
        )
        if is_of_positions(vector):
            # The bounds of its column of paths show which data file it is of, too.
            metrics = self._jvm.org.apache.iceberg.parquet.ParquetUtil.fileMetrics(
                table.io().newInputFile(file), self._iceberg.MetricsConfig.forPositionDelete()
            )
            return described.withFormat("parquet").withMetrics(metrics).build()
        return (
            described.withFormat("puffin")
            .withContentOffset(vector.offset)
            .withContentSizeInBytes(vector.length)
            .withRecordCount(vector.rows)
            .build()
        )

    def _keys(self, file: str) -> Any:
        """A file of keys of an earlier version, which is there already: it is known by its path."""
        numbers = self._new_array(self._jvm.int, 1)
        numbers[0] = 1
        # That version knew no partitions.
        unpartitioned = self._iceberg.PartitionSpec.unpartitioned()
        builder = self._iceberg.FileMetadata.deleteFileBuilder(unpartitioned)
        return (
            builder.ofEqualityDeletes(numbers)
            .withPath(file)
            .withFormat("parquet")
            .withFileSizeInBytes(1)
            .withRecordCount(1)
            .build()
        )

    def _described(self, builder: Any, table: Any, file: FileInfo) -> Any:
        # The bounds of each column come from the file's own footer, read by Iceberg's own code.
        metrics = self._jvm.org.apache.iceberg.parquet.ParquetUtil.fileMetrics(
            table.io().newInputFile(file.path), self._iceberg.MetricsConfig.forTable(table)
        )
        return (
            builder.withPath(file.path)
            .withFormat("parquet")
            .withFileSizeInBytes(file.size)
            .withMetrics(metrics)
        )

    @of_table
    def show(self, path: str, term: int, snapshot: int) -> None:
        """Move `main` to a published snapshot. Raises `FencedError`.

        Iceberg's library has no part in it: it would read the metadata once more, which has every retained snapshot.
        """
        self._take_now(path, term)
        shown = ""

        def change(there: LoadedTable) -> TableCommit | None:
            nonlocal shown
            shown = there.location
            return moved_main(TableId.at(path), there, branch_of(term), snapshot)

        def do(effect: takeover.Effect) -> Any:
            nonlocal shown
            match effect:
                case takeover.ReadTable():
                    return self._there(path, term)
                case takeover.LinkTable(base, commit):
                    shown = str(following(place(base.location)))
                    is_won = _is_won(self._catalog.commit(commit), path)
                    if is_won:
                        self._tables.shown(path, place(base.location), snapshot)
                    return is_won
            raise AssertionError(f"{effect} is of another commit")

        takeover.carry_out(takeover.commit(change, path), do)
        if self._catalog.is_folder:
            self._shown[path] = snapshot, place(shown)

    def _there(self, path: str, term: int) -> LoadedTable:
        """The table as the catalog has it; it is this term's. Raises `FencedError`."""
        there = self._catalog.load(TableId.at(path))
        if there is None:
            raise CorruptError(
                "the table has no metadata",
                where=path,
                repair="restore it from a backup, or copy the table again: tuskline table resync",
            )
        if branch_of(term) not in there.metadata.get("refs", {}):
            raise fenced(path, term)
        return there

    @of_table
    def metadata_file(self, path: str, snapshot: int) -> Place | None:
        """The newest metadata file; None if its `main` is another snapshot."""
        shown, file = self._shown.get(path, (None, None))
        if file is not None and shown == snapshot and is_newest(file):
            return file
        table = self._tables.current(path)
        main = table.operations().current().ref("main")
        return newest(table) if main is not None and main.snapshotId() == snapshot else None

    @of_table
    def pin(self, path: str, term: int, tags: Mapping[str, int], *, take: bool = False) -> None:
        """Give the table exactly these tags of pins; if `take`, it is this term's then. Raises `FencedError`, `CorruptError`, and `LakeError` for a user's tag."""

        def change(table: Any) -> Any:
            base = table.operations().current()
            changes = pin_changes(refs_of(base), tags, term, path, take=take)
            if changes is None:
                return None
            builder = self._iceberg.TableMetadata.buildFrom(base)
            for name in changes.remove:
                builder.removeRef(name)
            for name, snapshot in changes.tags.items():
                self._tables.check(path, table, snapshot)
                builder.setRef(name, self._iceberg.SnapshotRef.tagBuilder(snapshot).build())
            shown = base.ref("main")
            if changes.needs_branch and shown is not None:
                branch = self._iceberg.SnapshotRef.branchBuilder(shown.snapshotId()).build()
                builder.setRef(branch_of(term), branch)
            properties = self._jvm.java.util.HashMap()
            properties.put(PINS, json.dumps(dict(sorted(tags.items()))))
            return builder.setProperties(properties).build()

        self._commit(path, term, change)

    def expire(self, path: str, term: int, kept: Collection[int]) -> int:
        """Drop snapshots that are not `kept`, not the head of a branch and not tagged by a user or a pin.

        A table that is damaged keeps all that it has: what its files say cannot be trusted. Raises `FencedError`.
        """
        doomed: list[Any] = []

        def change(table: Any) -> Any:
            base = table.operations().current()
            refs = refs_of(base)
            # A table that has left, or could not be opened at the takeover, has no branch of ours.
            fenced_by(refs, term, path)
            tags = {name for name, ref in refs.items() if is_epoch(name, ref)}
            wanted = set(kept) | {ref.snapshot for name, ref in refs.items() if name not in tags}
            gone = [one for one in self._tables.snapshots(path) if one not in wanted]
            if not gone and not tags:
                return None
            self._tables.check_all(path)
            transaction = self._tables.transaction(table)
            refs_update = transaction.manageSnapshots()
            for name in tags:
                refs_update.removeTag(name)
            refs_update.commit()
            if not gone:
                return transaction.currentMetadata()
            update = transaction.expireSnapshots()
            for snapshot in gone:
                update.expireSnapshotId(snapshot)
            # The callback collects the files and does not remove them: the metadata without them is not committed yet.
            found = self._jvm.java.util.stream.Stream.builder()
            update.deleteWith(found).cleanExpiredFiles(True).commit()
            doomed[:] = list(found.build().toArray())
            return transaction.currentMetadata()

        try:
            with blamed(path):
                self._commit(path, term, change)
        except CorruptError as error:
            log.warning("snapshots do not expire: the table is damaged", error=str(error))
            self._tables.forget(path)
            return 0
        files = [place(str(file)) for file in doomed]
        others = [str(file) for file in files if not checksums.remove_of(place(path), file)]
        if others:
            log.warning(
                "files outside the table's folder are kept",
                path=path,
                files=others[:10],
                count=len(others),
            )
        return len(files) - len(others)

    @of_table
    def sweep(self, path: str, term: int, listed: frozenset[str]) -> int:
        """Remove those of the listed files (`leaks.listed`) that no snapshot needs; how many. Raises `FencedError`.

        None of a table that the takeover did not take, since it has left or is damaged.
        """
        self._take_now(path, term)
        refs = refs_of(self._tables.current(path).operations().current())
        fenced_by(refs, term, path)
        if branch_of(term) not in refs:
            return 0

        def is_ours(table: Any) -> bool:
            return table.operations().current().ref(branch_of(term)) is not None

        return takeover.carry_out(leaks.sweep(listed, is_ours, path), partial(self._do, path, term))

    def terms(self, path: str) -> list[int]:
        """The terms of the writers that have a branch in the table; [] for a folder without a table."""
        found = [term_of(name, ref) for name, ref in self._refs(path).items()]
        return [term for term in found if term is not None]

    def users_refs(self, path: str) -> list[str]:
        """Branches and tags that are not ours; [] for a folder without a table."""
        return of_users(self._refs(path))

    def _refs(self, path: str) -> Mapping[str, Ref]:
        """The branches and tags of the table; none for a folder without a table."""
        if self._catalog.is_folder:
            return refs_in(path)
        there = self._catalog.load(TableId.at(path))
        return refs_of_record(there.metadata) if there is not None else {}

    @of_table
    def scan(self, path: str, snapshot: int) -> list[ScanFile]:
        """The data files of a snapshot. Raises `NotSupportedError` for deletes that only others can have written."""
        table = self._tables.at(path, snapshot)
        self._tables.check(path, table, snapshot)
        files = files_of(place(str(table.snapshot(snapshot).manifestListLocation())))
        partitions = Partitions(self._iceberg, table).names(snapshot)
        return [placed(file, partitions.get(file.path, NO_PARTITION)) for file in files]

    @of_table
    def data_files(self, path: str, snapshot: int) -> frozenset[str]:
        """The names of the data files of a snapshot."""
        table = self._tables.at(path, snapshot)
        self._tables.check(path, table, snapshot)
        found = data_files(place(str(table.snapshot(snapshot).manifestListLocation())))
        return frozenset(found)

    @of_table
    def snapshot_record(
        self, path: str, snapshot: int, known: SnapshotRecord | None = None
    ) -> SnapshotRecord:
        """See `TableFormat`. Each call of the JVM counts: a lake may have a hundred tables that change in an epoch."""
        table = self._tables.at(path, snapshot)
        found = table.snapshot(snapshot)
        manifest_list = None if found is None else place(str(found.manifestListLocation()))
        if manifest_list is None or is_object(manifest_list):
            # This raises if there is no such snapshot.
            self._tables.check(path, table, snapshot)
        assert manifest_list is not None
        if known is not None and known.schema["schema-id"] == found.schemaId():
            return replace(known, manifest_list=manifest_list)
        metadata = table.operations().current()
        return SnapshotRecord(
            str(metadata.uuid()),
            self._schema_json(metadata, snapshot),
            self._history(metadata),
            manifest_list,
            has_first_names=metadata.properties().get(_FILE_NAMES) == _FIRST,
        )

    @of_table
    def row_ids(self, path: str, snapshot: int) -> dict[str, RowIds]:
        """The row ids of the data files of a snapshot, by their names; none where the format has none."""
        table = self._tables.at(path, snapshot)
        if table.operations().current().formatVersion() < _VERSION:
            return {}
        self._tables.check(path, table, snapshot)
        return row_ids(place(str(table.snapshot(snapshot).manifestListLocation())))

    @of_table
    def equality_deletes(self, path: str, snapshot: int) -> list[str]:
        """The files of keys in a snapshot that an earlier version wrote."""
        table = self._tables.at(path, snapshot)
        return equality_deletes(place(str(table.snapshot(snapshot).manifestListLocation())))

    def empty_snapshot(self, there: LoadedTable) -> NewSnapshot:
        """What the next snapshot of the control table is to be, its manifest list written where the table is."""
        return empty_snapshot(self._spark, there)

    def _commit(self, path: str, term: int, change: Callable[[Any], Any]) -> None:
        """Commit what `change` makes of the table (`takeover.commit`), which is this term's."""
        self._take_now(path, term)
        takeover.carry_out(takeover.commit(change, path), partial(self._do, path, term))

    def _do(self, path: str, term: int, effect: takeover.Effect) -> Any:
        """Carry out an effect on one table, of a writer of that term; its answer."""
        match effect:
            case takeover.ListPrepared():
                return prepared(newest(self._tables.current(path)))
            case takeover.ReadTable():
                return self._tables.current(path)
            case takeover.LinkTable(table, metadata):
                sync_snapshots(table, metadata)
                commit = commit_of(
                    self._iceberg, TableId.at(path), table, metadata, branch_of(term)
                )
                is_won = _is_won(self._catalog.commit(self._tables.summed(commit)), path)
                if is_won:
                    self._tables.committed(path, newest(table), metadata)
                return is_won
            case takeover.ReadNamed(files):
                return needed(self._spark, self._tables.current(path), files)
            case takeover.RemovePrepared(file):
                return checksums.remove_of(place(path), place(file))
        raise AssertionError(f"{effect} is of the lake")


def _is_won(outcome: Outcome, path: str) -> bool:
    """Raises `UnavailableError` if it is not known: a repetition takes what it finds."""
    if outcome is Outcome.UNKNOWN:
        raise UnavailableError(
            "it is not known whether the catalog made the commit",
            where=path,
            repair="check the catalog; the round is retried automatically",
        )
    return outcome is Outcome.WON
