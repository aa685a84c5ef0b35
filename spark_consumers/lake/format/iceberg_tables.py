"""Iceberg tables as one writer has loaded them, their own files verified before anything is built on them.

A lake in a folder has its tables opened by Iceberg from the folder (`FolderTables`), one in a catalog of others from what the
catalog says of them (`CatalogTables`).
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from pyspark.sql import SparkSession

from spark_consumers.lake.catalog.control_table import NewSnapshot
from spark_consumers.lake.catalog.table_catalog import (
    LoadedTable,
    TableCatalog,
    TableCommit,
    TableId,
)
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.checked import Checked
from spark_consumers.lake.format.iceberg_commit import newest
from spark_consumers.lake.format.iceberg_files import (
    FileIdentity,
    following,
    is_newest,
    newest_metadata,
    refs_of_record,
    snapshots_in,
)
from spark_consumers.lake.format.iceberg_io import file_io, hadoop_settings
from spark_consumers.lake.format.iceberg_read import blamed
from spark_consumers.lake.format.iceberg_refs import fenced_by, is_epoch
from spark_consumers.lake.format.object_seals import MANIFESTS, check_metadata
from spark_consumers.lake.store.place import Place, is_object, place
from walsender_bridge.errors import CorruptError


class _Format(Protocol):
    def forget(self, path: str) -> None: ...


_F = TypeVar("_F", bound=_Format)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def of_table(
    method: Callable[Concatenate[_F, str, _P], _R],
) -> Callable[Concatenate[_F, str, _P], _R]:
    """What acts on the table at a path: damage raises `CorruptError`, after which the table is loaded again."""

    def run(self: _F, path: str, /, *arguments: _P.args, **options: _P.kwargs) -> _R:
        try:
            with blamed(path):
                return method(self, path, *arguments, **options)
        except CorruptError:
            self.forget(path)
            raise

    update_wrapper(run, method)
    return run


class LoadedTables(Protocol):
    """Tables by the path of their folder. Raises `CorruptError` for files that are not what was written."""

    def at(self, path: str, snapshot: int | None = None) -> Any:
        """The table as it was last loaded, or reloaded if `snapshot` is not in it."""

    def current(self, path: str) -> Any:
        """The table as it is now."""

    def transaction(self, table: Any) -> Any:
        """A transaction on a table, to build updates in; it is never committed."""

    def snapshots(self, path: str) -> list[int]:
        """The ids of the table's snapshots, as it was last loaded."""

    def forget(self, path: str) -> None:
        """Have the next access reload the table."""

    def committed(self, path: str, base: Place, metadata: Any) -> None:
        """`metadata`, as Iceberg's library has it, was just committed after the metadata file `base`: it need not be read."""

    def shown(self, path: str, base: Place, snapshot: int) -> None:
        """As `committed`, of a commit that moved `main` alone."""

    def check(self, path: str, table: Any, snapshot: int) -> None:
        """Verify the manifests of a snapshot, whose bytes go into new ones."""

    def summed(self, commit: TableCommit) -> TableCommit:
        """The commit; new snapshots in a bucket have the checksum of their manifests."""

    def check_all(self, path: str) -> None:
        """Verify the manifests of all snapshots, which say what files are needed."""

    def shows(self, path: str, snapshot: int, term: int) -> Place | None:
        """The newest metadata file of a table that shows plain readers this snapshot, and in which a takeover has nothing to mend.

        None of any other table, and where no file tells. Raises `FencedError` if a higher term has it, `CorruptError` for damage.
        """


def loaded_tables(spark: SparkSession, catalog: TableCatalog) -> LoadedTables:
    """Those of this catalog."""
    return FolderTables(spark) if catalog.is_folder else CatalogTables(spark, catalog)


class _Checking:
    """What both kinds verify."""

    def __init__(self) -> None:
        self._checked = Checked()

    def check(self, path: str, table: Any, snapshot: int) -> None:
        """See `LoadedTables`."""
        found = table.snapshot(snapshot)
        if found is None:
            raise CorruptError(
                f"snapshot {snapshot} is missing",
                where=path,
                repair="restore the table from a backup, or copy it again: tuskline table resync",
            )
        lists = place(str(found.manifestListLocation()))
        summary = {MANIFESTS: found.summary().get(MANIFESTS)} if is_object(lists) else {}
        self._checked.snapshot(lists, summary)

    def summed(self, commit: TableCommit) -> TableCommit:
        """See `LoadedTables`."""
        updates = list(map(dict, commit.updates))
        for update in updates:
            if update["action"] == "add-snapshot" and is_object(
                update["snapshot"]["manifest-list"]
            ):
                snapshot = update["snapshot"]
                sums = self._checked.sum_of(place(snapshot["manifest-list"]))
                update["snapshot"] = {**snapshot, "summary": {**snapshot["summary"], **sums}}
        return replace(commit, updates=updates)

    def check_all(self, path: str) -> None:
        """See `LoadedTables`."""
        self._checked.all_manifests(place(path))


class FolderTables(_Checking):
    """The tables of a lake in a folder (`LoadedTables`)."""

    def __init__(self, spark: SparkSession) -> None:
        super().__init__()
        jvm: Any = spark._jvm  # noqa: SLF001  # PySpark has no public way to its JVM
        self._tables = jvm.org.apache.iceberg.hadoop.HadoopTables(hadoop_settings(spark))
        self._iceberg = jvm.org.apache.iceberg
        self._loaded: dict[str, Any] = {}
        #: By path: the metadata that was verified after it was loaded.
        self._metadata: dict[str, Place] = {}
        #: By path: what the library reaches the table's files by. Those of a table that was not read make no others.
        self._operations: dict[str, Any] = {}
        #: By path: the metadata file that this writer has committed, which the loaded table was not read from.
        self._committed: dict[str, FileIdentity] = {}

    def at(self, path: str, snapshot: int | None = None) -> Any:
        """The table as it was last loaded, or reloaded if `snapshot` is not in it."""
        if path not in self._loaded:
            self._load(path)
        table = self._loaded[path]
        if snapshot is not None and table.snapshot(snapshot) is None:
            return self.current(path)
        self._check_metadata(path, table)
        return table

    def current(self, path: str) -> Any:
        """The table as it is now."""
        table = self.at(path)
        file = newest(table)
        if path in self._committed:
            if not is_newest(file) or FileIdentity.of(file) != self._committed[path]:
                self._load(path)
        elif file.exists():
            # Cheap if no other writer has committed: it checks whether there is a next metadata file.
            table.refresh()
        else:
            # We slept until what we know was removed.
            self._load(path)
        table = self._loaded[path]
        self._check_metadata(path, table)
        return table

    def _load(self, path: str) -> None:
        self._loaded[path] = self._tables.load(path)
        self._operations[path] = self._loaded[path].operations()
        self._committed.pop(path, None)
        self._metadata.pop(path, None)

    def committed(self, path: str, base: Place, metadata: Any) -> None:
        """See `LoadedTables`. To parse metadata takes as long as all else that grows with the number of its snapshots."""
        file = following(base)
        identity = None if is_object(file) else FileIdentity.of(file)
        if identity is None:
            # What is in a bucket has members that the library does not know of.
            return
        made = self._iceberg.TableMetadata.buildFrom(metadata).discardChanges()
        known = made.withMetadataLocation(str(file)).build()
        operations = self._operations[path].temp(known)
        self._loaded[path] = self._iceberg.BaseTable(operations, path)
        self._committed[path], self._metadata[path] = identity, file

    def shown(self, path: str, base: Place, snapshot: int) -> None:
        """See `LoadedTables`."""
        table = self._loaded.get(path)
        if table is None or newest(table) != base:
            return
        known = self._iceberg.TableMetadata.buildFrom(table.operations().current())
        main = self._iceberg.SnapshotRef.branchBuilder(snapshot).build()
        self.committed(path, base, known.setRef("main", main).build())

    def transaction(self, table: Any) -> Any:
        """See `LoadedTables`."""
        return _transaction(self._iceberg, table)

    def snapshots(self, path: str) -> list[int]:
        """See `LoadedTables`. From the file: each of them would be a call of the JVM."""
        return snapshots_in(newest(self._loaded[path]))

    def forget(self, path: str) -> None:
        """See `LoadedTables`."""
        self._loaded.pop(path, None)
        self._metadata.pop(path, None)
        self._committed.pop(path, None)
        self._operations.pop(path, None)
        self._checked.forget(place(path))

    def shows(self, path: str, snapshot: int, term: int) -> Place | None:
        """See `LoadedTables`. Without the JVM: a lake may have a thousand tables."""
        file = newest_metadata(place(path))
        if file is None or file.name.endswith(".gz.metadata.json"):
            return None
        try:
            content = file.read_bytes()
            if is_object(file):
                check_metadata(content, str(file))
            record = json.loads(content)
        except FileNotFoundError:
            return None  # the table has gone on
        except ValueError:
            checksums.check(file)
            return None
        checksums.check(file)
        refs = refs_of_record(record)
        fenced_by(refs, term, path)
        found = [s for s in record.get("snapshots", ()) if s["snapshot-id"] == snapshot]
        main = refs.get("main")
        if not found or main is None or main.snapshot != snapshot:
            return None
        if any(is_epoch(name, ref) for name, ref in refs.items()):
            return None
        lists = place(str(found[0]["manifest-list"]))
        self._checked.snapshot(lists, found[0].get("summary", {}))
        return file

    def _check_metadata(self, path: str, table: Any) -> None:
        """Verify what was loaded, after each time that it was."""
        file = newest(table)
        if self._metadata.get(path) != file:
            if is_object(file):
                check_metadata(file.read_bytes(), str(file))
            checksums.check(file)
            self._metadata[path] = file


class CatalogTables(_Checking):
    """The tables of a catalog that keeps their metadata, by the path of their folder in the lake (`LoadedTables`).

    Iceberg's library gets the metadata as the catalog sent it, and reads and writes files by the FileIO that came with it. It
    never speaks to the catalog: what it builds goes there as updates under requirements.
    """

    def __init__(self, spark: SparkSession, catalog: TableCatalog) -> None:
        super().__init__()
        self._catalog = catalog
        jvm: Any = spark._jvm  # noqa: SLF001  # as above
        self._iceberg = jvm.org.apache.iceberg
        self._operations = _operations(spark)
        #: By path: what the catalog said last, and the table made of it.
        self._loaded: dict[str, tuple[LoadedTable, Any]] = {}

    def at(self, path: str, snapshot: int | None = None) -> Any:
        """See `LoadedTables`."""
        if path not in self._loaded:
            return self.current(path)
        table = self._loaded[path][1]
        if snapshot is not None and table.snapshot(snapshot) is None:
            return self.current(path)
        return table

    def current(self, path: str) -> Any:
        """See `LoadedTables`."""
        there = self._catalog.load(TableId.at(path))
        if there is None:
            raise CorruptError(
                "the catalog does not have the table",
                where=path,
                repair="copy it again: tuskline table resync",
            )
        known = self._loaded.get(path)
        if known is not None and known[0].location == there.location:
            return known[1]
        table = self._made(path, there)
        self._loaded[path] = there, table
        return table

    def transaction(self, table: Any) -> Any:
        """See `LoadedTables`."""
        return _transaction(self._iceberg, table)

    def committed(self, path: str, base: Place, metadata: Any) -> None:
        """See `LoadedTables`: the catalog says what it made of it."""

    def shown(self, path: str, base: Place, snapshot: int) -> None:
        """See `LoadedTables`: as above."""

    def snapshots(self, path: str) -> list[int]:
        """See `LoadedTables`."""
        return [each["snapshot-id"] for each in self._loaded[path][0].metadata.get("snapshots", ())]

    def forget(self, path: str) -> None:
        """See `LoadedTables`."""
        self._loaded.pop(path, None)
        self._checked.forget(place(path))

    def shows(self, path: str, snapshot: int, term: int) -> None:
        """See `LoadedTables`: each table is taken at once."""

    def _made(self, path: str, there: LoadedTable) -> Any:
        return self._iceberg.BaseTable(self._operations(there), path)


def _transaction(iceberg: Any, table: Any) -> Any:
    """A transaction on a table as it is loaded. The library's own would load it again."""
    operations = table.operations()
    return iceberg.Transactions.replaceTableTransaction(
        table.name(), operations, operations.current()
    )


def empty_snapshot(spark: SparkSession, there: LoadedTable) -> NewSnapshot:
    """A snapshot without files that follows what is there: its id and time, and its manifest list, which is written."""
    jvm: Any = spark._jvm  # noqa: SLF001  # as above
    operations = _operations(spark)(there)
    transaction = jvm.org.apache.iceberg.Transactions.replaceTableTransaction(
        str(there.metadata["location"]), operations, operations.current()
    )
    transaction.newFastAppend().commit()
    made = transaction.currentMetadata().currentSnapshot()
    return NewSnapshot(
        made.snapshotId(), str(made.manifestListLocation()), int(made.timestampMillis())
    )


def _operations(spark: SparkSession) -> Callable[[LoadedTable], Any]:
    """What makes a table's operations of what its catalog said, by which Iceberg's library builds files and reads them.

    The library's only class that does that for every FileIO is that of its own REST catalog, which is not public. Its client
    is left out: of the operations made here, `refresh` and `commit` are refused.
    """
    jvm: Any = spark._jvm  # noqa: SLF001  # as above
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    kind = jvm.java.lang.Class.forName(
        "org.apache.iceberg.rest.RESTTableOperations",
        True,
        loader,
    )
    (maker,) = (each for each in kind.getDeclaredConstructors() if each.getParameterCount() == 6)
    maker.setAccessible(True)
    new_array = spark.sparkContext._gateway.new_array  # type: ignore[union-attr]  # noqa: SLF001  # as above

    def made(there: LoadedTable) -> Any:
        io = file_io(spark, str(there.metadata["location"]), there.config)
        parser = jvm.org.apache.iceberg.TableMetadataParser
        metadata = parser.fromJson(there.location, json.dumps(there.metadata))
        # Client, path, headers, FileIO, metadata, endpoints.
        arguments = new_array(jvm.java.lang.Object, 6)
        arguments[3], arguments[4] = io, metadata
        return maker.newInstance(arguments).temp(metadata)

    return made
