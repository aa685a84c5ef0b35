"""A table's snapshot for readers, its small files verified first.

Invariant: what Iceberg's own code is told to read (metadata, manifest list, manifests) is what was written,
or there is a `CorruptError` with the file's name. Data files are verified chunk by chunk, by Hadoop, where
they are read (`checksums`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_consumers.lakehouse import checksums
from spark_consumers.lakehouse.iceberg_files import local
from walsender_bridge.errors import LakeError


def read_snapshot(spark: SparkSession, path: str, snapshot: int) -> Any:
    """The Iceberg table in folder `path` at a snapshot, as a Spark DataFrame.

    Raises `CorruptError` for a small file that is not what was written, `LakeError` for a table that
    cannot be opened.
    """
    jvm: Any = spark._jvm  # noqa: SLF001  # PySpark has no public way to its JVM
    with named(path):
        configuration = spark._jsc.hadoopConfiguration()  # noqa: SLF001  # as above
        check_snapshot(
            jvm.org.apache.iceberg.hadoop.HadoopTables(configuration).load(path), snapshot
        )
        return spark.read.format("iceberg").option("versionAsOf", snapshot).load(path)


def check_snapshot(table: Any, snapshot: int) -> None:
    """Verify the metadata of Iceberg's table object, and the manifests of a snapshot if it is there.

    Raises `CorruptError`.
    """
    with named(str(table.location())):
        checksums.check(local(table.operations().current().metadataFileLocation()))
        found = table.snapshot(snapshot)
        if found is None:
            return
        checksums.check(local(str(found.manifestListLocation())))
        for manifest in found.allManifests(table.io()):
            checksums.check(local(str(manifest.path())))


@contextmanager
def named(path: str) -> Iterator[None]:
    """What Iceberg, Hadoop and Spark say of a table's files, as errors of ours.

    They fail at the first byte that makes no sense, and name it as they like: so the checksums are asked.
    """
    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        for sums in sorted((Path(path) / "metadata").glob(".*.crc")):
            file = checksums.file_of(sums)
            if file is not None and file.exists():
                checksums.check(file)
        text = str(error)
        line = next(
            (li for li in text.splitlines() if "Exception: " in li), text.partition("\n")[0]
        )
        raise LakeError(
            f"the table cannot be opened: {line.strip()[:300]}",
            where=path,
            repair="find the damaged file: tuskline lake verify",
        ) from error
