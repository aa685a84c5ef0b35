"""Iceberg tables as one writer has loaded them, their own files verified before anything is built on them."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from pyspark.sql import SparkSession

from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.checked import Checked
from spark_consumers.lake.format.iceberg_commit import newest
from spark_consumers.lake.format.iceberg_read import blamed
from spark_consumers.lake.store.place import Place, place
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


class LoadedTables:
    """By the path of their folder. Raises `CorruptError` for files that are not what was written."""

    def __init__(self, spark: SparkSession) -> None:
        jvm: Any = spark._jvm  # noqa: SLF001  # PySpark has no public way to its JVM
        # Hadoop's local file system starts a `chmod` for each file it makes, and two where it writes a
        # checksum beside it: a commit has half a dozen. So it neither makes checksums here nor verifies them.
        session = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001  # as above
        configuration = jvm.org.apache.hadoop.conf.Configuration(session)
        configuration.set("fs.file.impl", "org.apache.hadoop.fs.RawLocalFileSystem")
        configuration.set("fs.file.impl.disable.cache", "true")
        self._tables = jvm.org.apache.iceberg.hadoop.HadoopTables(configuration)
        self._loaded: dict[str, Any] = {}
        #: By path: the metadata that was verified after it was loaded.
        self._metadata: dict[str, Place] = {}
        self._checked = Checked()

    def at(self, path: str, snapshot: int | None = None) -> Any:
        """The table as it was last loaded, or reloaded if `snapshot` is not in it."""
        if path not in self._loaded:
            self._loaded[path] = self._tables.load(path)
        table = self._loaded[path]
        if snapshot is not None and table.snapshot(snapshot) is None:
            table.refresh()
        self._check_metadata(path, table)
        return table

    def current(self, path: str) -> Any:
        """The table as it is now."""
        table = self.at(path)
        if newest(table).exists():
            # Cheap if no other writer has committed: it checks whether there is a next metadata file.
            table.refresh()
        else:
            # We slept until what we know was removed.
            table = self._loaded[path] = self._tables.load(path)
        self._check_metadata(path, table)
        return table

    def forget(self, path: str) -> None:
        """Have the next access reload the table."""
        self._loaded.pop(path, None)
        self._metadata.pop(path, None)
        self._checked.forget(place(path))

    def check(self, path: str, table: Any, snapshot: int) -> None:
        """Verify the manifests of a snapshot, whose bytes go into new ones."""
        found = table.snapshot(snapshot)
        if found is None:
            raise CorruptError(
                f"snapshot {snapshot} is missing",
                where=path,
                repair="restore the table from a backup, or copy it again: tuskline table resync",
            )
        self._checked.snapshot(place(str(found.manifestListLocation())))

    def check_all(self, path: str) -> None:
        """Verify the manifests of all snapshots, which say what files are needed."""
        self._checked.all_manifests(place(path))

    def _check_metadata(self, path: str, table: Any) -> None:
        """Verify what was loaded, after each time that it was."""
        file = newest(table)
        if self._metadata.get(path) != file:
            checksums.check(file)
            self._metadata[path] = file
