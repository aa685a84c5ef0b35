"""Around the one step that commits to an Iceberg table: what it is, what is made durable before, what is garbage after."""

import json
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from pyspark.sql import SparkSession

from spark_consumers.lake.catalog.table_catalog import (
    Requirement,
    TableCommit,
    TableId,
    assert_ref,
)
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.data_files import sync
from spark_consumers.lake.format.iceberg_refs import PINS, Ref, with_pins
from spark_consumers.lake.format.leaks import DATA, METADATA
from spark_consumers.lake.store.place import ObjectPlace, Place, place
from walsender_bridge.errors import LakeError
from walsender_bridge.runtime.durable import sync_folder


def sync_snapshots(table: Any, metadata: Any) -> None:
    """Make durable what the new snapshots of `metadata` are made of, before anything names them. Objects are durable."""
    folder = place(str(table.location()))
    if isinstance(folder, ObjectPlace):
        return
    known, snapshots = table.operations().current(), metadata.snapshots()
    made = False
    # The new ones are the last: a table may have thousands, and each look is a call of the JVM.
    for number in range(snapshots.size() - 1, -1, -1):
        snapshot = snapshots.get(number)
        if known.snapshot(snapshot.snapshotId()) is not None:
            break
        manifests = [
            str(manifest.path())
            for manifest in snapshot.allManifests(table.io()).toArray()
            if manifest.snapshotId() == snapshot.snapshotId()
        ]
        for file in map(place, [str(snapshot.manifestListLocation()), *manifests]):
            assert not isinstance(file, ObjectPlace)
            sync(file)
            checksums.seal(file)
        made = True
    if made:
        # The executors have synced the data files, but not the names that they have in their folder. The
        # names here are made durable with the one that makes them count (`create_exclusively`).
        sync_folder(folder / "data")


def commit_of(iceberg: Any, name: TableId, table: Any, metadata: Any, fence: str) -> TableCommit:
    """What makes `metadata` of the table as it was loaded: Iceberg's updates, and what they require.

    Besides what Iceberg itself requires, the branch `fence` must be where it was: whoever takes the table over drops it. And
    where snapshots are removed, all branches and tags: whoever moves one may need them.
    """
    base = table.operations().current()
    changes = metadata.changes()
    request = iceberg.rest.requests.UpdateTableRequest(
        iceberg.UpdateRequirements.forUpdateTable(base, changes), changes
    )
    record = json.loads(iceberg.rest.requests.UpdateTableRequestParser.toJson(request))
    updates: list[dict[str, Any]] = record["updates"]
    required: list[Requirement] = record["requirements"]
    names = [fence]
    if any(update["action"] == "remove-snapshots" for update in updates):
        names += map(str, base.refs().keySet().toArray())
    held = {each["ref"] for each in required if each["type"] == "assert-ref-snapshot-id"}
    for each in sorted(set(names) - held):
        ref = base.ref(each)
        required.append(assert_ref(each, None if ref is None else ref.snapshotId()))
    return TableCommit(name, required, updates, str(newest(table)))


def needed(spark: SparkSession, table: Any, files: frozenset[str]) -> set[str]:
    """Those of these files, which are in the table's folder, that a snapshot of the table needs.

    They are compared by their names, which no two have: the folder may have been written under another path.
    """
    jvm: Any = spark._jvm  # noqa: SLF001  # PySpark has no public way to its JVM
    lists = jvm.org.apache.iceberg.ReachableFileUtil.manifestListLocations(table)
    found = _named(files, lists)
    path = str(place(str(table.location())))
    for folder, view, column in (
        (METADATA, "all_manifests", "path"),
        (DATA, "all_files", "file_path"),
    ):
        asked = {file for file in files if PurePath(file).parent.name == folder}
        if asked - found:
            rows = spark.read.format("iceberg").load(f"{newest(table)}#{view}").select(column)
            named = {row[0] for row in rows.distinct().collect()}
            if len(named) < _least(table, view):
                raise LakeError(f"its {view} are incomplete: no file is removed", where=path)
            found |= _named(asked, named)
    return found


def _named(files: Iterable[str], locations: Iterable[Any]) -> set[str]:
    names = {PurePath(str(location)).name for location in locations}
    return {file for file in files if PurePath(file).name in names}


def _least(table: Any, view: str) -> int:
    """How many files that view of the table has at least: those of what plain readers see."""
    snapshot = table.currentSnapshot()
    if snapshot is None:
        return 0
    if view == "all_manifests":
        return len(snapshot.allManifests(table.io()))
    summary = snapshot.summary()
    return sum(int(summary.get(f"total-{kind}-files") or 0) for kind in ("data", "delete"))


def newest(table: Any) -> Place:
    """The metadata file of the table as it was last loaded."""
    return place(str(table.operations().current().metadataFileLocation()))


def refs_of(metadata: Any) -> dict[str, Ref]:
    """The table's branches and tags by name."""
    # As an array: the end of a Java iterator is an exception, which PySpark looks at for longer than a commit takes.
    names = map(str, metadata.refs().keySet().toArray())
    found = {name: ref_of(metadata, name) for name in names}
    refs = {name: ref for name, ref in found.items() if ref is not None}
    return with_pins(refs, metadata.property(PINS, None))


def ref_of(metadata: Any, name: str) -> Ref | None:
    """The branch or tag of this name; None if there is none."""
    ref = metadata.ref(name)
    if ref is None:
        return None
    snapshot = metadata.snapshot(ref.snapshotId())
    summary = snapshot.summary() if snapshot is not None else {}
    return Ref.of(ref.snapshotId(), summary, is_branch=ref.isBranch())
