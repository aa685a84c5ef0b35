"""A table's snapshot for readers, its small files verified first.

Invariant: the files that Iceberg's own code reads (metadata, manifest list, manifests) have the content that was
written, or there is a `CorruptError` with the file's name. Data files are verified chunk by chunk, by Hadoop, where
they are read (`checksums`).

What is read here is read in Python, so that a session without a JVM of its own (Spark Connect) reads in the same way.
"""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_consumers.lake.catalog.table_catalog import TableCatalog, TableId
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.checked import Checked
from spark_consumers.lake.format.iceberg_files import newest_metadata
from spark_consumers.lake.format.object_seals import metadata_in
from spark_consumers.lake.store.place import ObjectPlace, Place, place
from spark_consumers.spark import buckets
from spark_consumers.spark.failures import SPARK_ERRORS, line_of
from spark_consumers.spark.jars import ICEBERG
from walsender_bridge.errors import CorruptError, LakeError, NotSupportedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: How Spark says that it has no Iceberg.
_NO_ICEBERG = "DATA_SOURCE_NOT_FOUND"
#: How Iceberg says that a table's own files are not there, or are none.
_LOST = (
    "NoSuchTableException",
    "FileNotFoundException",
    "NotFoundException",
    "Metadata file for version",
    "JsonParseException",
    "Not an Avro data file",
)
#: How a JVM says that it lacks a class of the client of S3. Over Spark Connect, it is not known before.
_NO_S3 = re.compile(
    r"(ClassNotFoundException|NoClassDefFoundError): (Class )?(org[./]apache[./]hadoop[./]fs[./]s3a|software[./]amazon)"
)
#: How that client says that it has no keys, or none that are accepted.
_NO_KEYS = re.compile(
    r"Unable to load credentials|NoAwsCredentialsException|AccessDeniedException: s3|InvalidToken|ExpiredToken"
)
#: What the machine says where Java finds no other class than that of a lost file: every file is "not found" then.
_OF_THE_MACHINE = tuple(
    f"({os.strerror(number)})"
    for number in (errno.EACCES, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE)
)


def read_snapshot(
    spark: "SparkSession", path: str, snapshot: int, catalog: TableCatalog | None = None
) -> Any:
    """The Iceberg table in folder `path` at a snapshot, as a Spark DataFrame. `catalog`: what has its metadata, if not the folder.

    Raises `CorruptError` for a small file that is not what was written, `LakeError` for a table that
    cannot be opened.
    """
    with named(path):
        opened, is_there = path, False
        if catalog is None:
            is_there = check_snapshot(place(path), snapshot)
        elif (there := catalog.load(TableId.at(path))) is not None:
            opened, is_there = there.location, _check_listed(there.metadata, snapshot)
        if not is_there:
            raise LakeError(
                f"the table has lost snapshot {snapshot}",
                where=path,
                repair="let no other program expire snapshots, or pin the epochs to keep: tuskline epochs pin",
            )
        frame = spark.read.format("iceberg").option("versionAsOf", snapshot).load(opened)
        # Over Spark Connect, a table is only opened when something of it is needed.
        _ = frame.schema
        return frame


def check_snapshot(table: Place, snapshot: int) -> bool:
    """Verify the newest metadata of a table in a folder, and the manifests of a snapshot; whether that is there.

    Raises `CorruptError`.
    """
    file = newest_metadata(table)
    if file is None:
        raise CorruptError(
            "the table has no metadata", where=str(table / "metadata"), repair=checksums.REPAIR
        )
    checksums.check(file)
    try:
        record = metadata_in(file, file.read_bytes())
        _ = record["snapshots"]
    except (OSError, KeyError, TypeError) as error:
        raise CorruptError(
            f"the table's metadata cannot be read: {error}",
            where=str(file),
            repair=checksums.REPAIR,
        ) from error
    return _check_listed(record, snapshot)


def _check_listed(metadata: Mapping[str, Any], snapshot: int) -> bool:
    """Verify the manifests of a snapshot in this metadata; whether it is there. Raises `CorruptError`."""
    found = {each["snapshot-id"]: each for each in metadata.get("snapshots", ())}
    if snapshot not in found:
        return False
    there = found[snapshot]
    Checked().snapshot(place(there["manifest-list"]), there.get("summary", {}))
    return True


@contextmanager
def blamed(path: str) -> Iterator[None]:
    """Map errors of Iceberg, Hadoop and Spark for damaged or lost files of a table to `CorruptError`.

    They fail at the first invalid byte, with messages of their own: so the checksums are compared. Errors with
    another cause stay as they are.
    """
    try:
        yield
    except SPARK_ERRORS as error:
        if _NO_ICEBERG in str(error) or _NO_S3.search(str(error)) or _NO_KEYS.search(str(error)):
            raise
        for sums in _sums(place(path)):
            file = checksums.file_of(sums)
            if file is not None and file.exists():
                checksums.check(file)
        text = str(error)
        is_lost = any(word in text for word in _LOST)
        if is_lost and not any(said in text for said in _OF_THE_MACHINE):
            raise CorruptError(
                f"the table cannot be opened: {line_of(error)}",
                where=path,
                repair="restore its files from a backup, or copy it again: tuskline table resync",
            ) from error
        raise


@contextmanager
def named(path: str) -> Iterator[None]:
    """As `blamed`, and everything else as `LakeError`; a session without Iceberg as `NotSupportedError`."""
    try:
        with blamed(path):
            yield
    except SPARK_ERRORS as error:
        if _NO_ICEBERG in str(error):
            raise NotSupportedError(
                "this Spark session has no Iceberg",
                where=path,
                repair=f"start Spark, or the Spark Connect server, with spark.jars.packages={ICEBERG}",
            ) from error
        if _NO_S3.search(str(error)):
            raise buckets.without_jars() from error
        if _NO_KEYS.search(str(error)):
            raise LakeError(
                f"the object store refuses access to Spark's JVM: {line_of(error)}",
                where=path,
                repair="set valid keys in the environment of Spark's driver, or of the Spark Connect server, and start it again; or give "
                "its machine a role, whose keys are renewed",
            ) from error
        raise LakeError(
            f"the table cannot be opened: {line_of(error)}",
            where=path,
            repair="find the damaged file: tuskline lake verify",
        ) from error


def _sums(table: Place) -> list[Path]:
    return [] if isinstance(table, ObjectPlace) else sorted((table / "metadata").glob(".*.crc"))
