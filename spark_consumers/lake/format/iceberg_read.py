"""A table's snapshot for readers, its small files verified first.

Invariant: the files that Iceberg's own code reads (metadata, manifest list, manifests) have the content that was
written, or there is a `CorruptError` with the file's name. Data files are verified chunk by chunk, by Hadoop, where
they are read (`checksums`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.checked import Checked
from spark_consumers.lake.format.iceberg_files import local
from walsender_bridge.errors import CorruptError, LakeError

#: How Iceberg says that a table's own files are not there, or are none.
_LOST = (
    "NoSuchTableException",
    "FileNotFoundException",
    "NotFoundException",
    "Metadata file for version",
    "JsonParseException",
    "Not an Avro data file",
)


def read_snapshot(spark: SparkSession, path: str, snapshot: int) -> Any:
    """The Iceberg table in folder `path` at a snapshot, as a Spark DataFrame.

    Raises `CorruptError` for a small file that is not what was written, `LakeError` for a table that
    cannot be opened.
    """
    jvm: Any = spark._jvm  # noqa: SLF001  # PySpark has no public way to its JVM
    with named(path):
        configuration = spark._jsc.hadoopConfiguration()  # noqa: SLF001  # as above
        table = jvm.org.apache.iceberg.hadoop.HadoopTables(configuration).load(path)
        if table.snapshot(snapshot) is None:
            raise LakeError(
                f"the table has lost snapshot {snapshot}",
                where=path,
                repair="let no other program expire snapshots, or pin the epochs to keep: tuskline epochs pin",
            )
        check_snapshot(table, snapshot)
        return spark.read.format("iceberg").option("versionAsOf", snapshot).load(path)


def check_snapshot(table: Any, snapshot: int) -> None:
    """Verify the metadata of Iceberg's table object, and the manifests of a snapshot if it is there.

    Raises `CorruptError`.
    """
    with named(str(table.location())):
        checksums.check(local(table.operations().current().metadataFileLocation()))
        found = table.snapshot(snapshot)
        if found is not None:
            Checked().snapshot(local(str(found.manifestListLocation())))


@contextmanager
def blamed(path: str) -> Iterator[None]:
    """Map errors of Iceberg, Hadoop and Spark for damaged or lost files of a table to `CorruptError`.

    They fail at the first invalid byte, with messages of their own: so the checksums are compared. Errors with
    another cause stay as they are.
    """
    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        for sums in sorted((Path(path) / "metadata").glob(".*.crc")):
            file = checksums.file_of(sums)
            if file is not None and file.exists():
                checksums.check(file)
        if any(word in str(error) for word in _LOST):
            raise CorruptError(
                f"the table cannot be opened: {_line(error)}",
                where=path,
                repair="restore its files from a backup, or copy it again: tuskline table resync",
            ) from error
        raise


@contextmanager
def named(path: str) -> Iterator[None]:
    """As `blamed`, and everything else as `LakeError`."""
    try:
        with blamed(path):
            yield
    except (Py4JJavaError, PySparkException) as error:
        raise LakeError(
            f"the table cannot be opened: {_line(error)}",
            where=path,
            repair="find the damaged file: tuskline lake verify",
        ) from error


def _line(error: Exception) -> str:
    text = str(error)
    line = next((li for li in text.splitlines() if "Exception: " in li), text.partition("\n")[0])
    return line.strip(": ")[:300]
