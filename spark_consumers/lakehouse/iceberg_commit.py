"""Around the one step that commits to an Iceberg table: what is made durable before, what is garbage after."""

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from spark_consumers.lakehouse import checksums
from spark_consumers.lakehouse.files import sync
from spark_consumers.lakehouse.iceberg_files import local
from walsender_bridge.durable import sync_folder


def sync_snapshots(table: Any, metadata: Any) -> None:
    """Make durable what the new snapshots of `metadata` are made of, before anything names them."""
    known, snapshots = table.operations().current(), metadata.snapshots()
    made = False
    # The new ones are the last: a table may have thousands, and each look is a call of the JVM.
    for place in range(snapshots.size() - 1, -1, -1):
        snapshot = snapshots.get(place)
        if known.snapshot(snapshot.snapshotId()) is not None:
            break
        manifests = [
            str(manifest.path())
            for manifest in snapshot.allManifests(table.io())
            if manifest.snapshotId() == snapshot.snapshotId()
        ]
        for file in map(local, [str(snapshot.manifestListLocation()), *manifests]):
            sync(file)
            checksums.seal(file)
        made = True
    if made:
        # The executors have synced the data files, but not the names that they have in their folder. The
        # names here are made durable with the one that makes them count (`create_exclusively`).
        sync_folder(local(str(table.location())) / "data")


def needed(spark: SparkSession, table: Any, files: frozenset[str]) -> set[str]:
    """Those of these metadata files that a snapshot of the table needs."""
    jvm: Any = spark._jvm  # noqa: SLF001  # PySpark has no public way to its JVM
    lists = jvm.org.apache.iceberg.ReachableFileUtil.manifestListLocations(table)
    found = {str(local(str(location))) for location in lists} & files
    if files != found:
        path = str(local(str(table.location())))
        manifests = spark.read.format("iceberg").load(f"{path}#all_manifests").select("path")
        found |= {str(local(row.path)) for row in manifests.distinct().collect()} & files
    return found


def newest(table: Any) -> Path:
    """The metadata file of the table as it was last looked at."""
    return local(str(table.operations().current().metadataFileLocation()))
