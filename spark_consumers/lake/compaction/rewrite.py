"""What a maintainer does with the files of one table: looks at them, and writes others in their place. Without Spark.

The row index says which data files a table has and which rows of them are removed, so no manifest of Iceberg is read.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from spark_consumers.lake.catalog.table_catalog import TableCatalog, TableId
from spark_consumers.lake.compaction.decide import CurrentFile, mapped, strays
from spark_consumers.lake.compaction.offer import (
    PREFIX,
    NewFile,
    Offer,
    OfferName,
    OldFile,
    columns_of,
)
from spark_consumers.lake.compaction.plan import FileState, Group
from spark_consumers.lake.epoch.complete import CompleteTask, run_complete
from spark_consumers.lake.epoch.removal import Rewrite
from spark_consumers.lake.epoch.target import Target, names_in
from spark_consumers.lake.format.data_files import write_partial
from spark_consumers.lake.format.file_names import with_first_names
from spark_consumers.lake.format.iceberg_layout import layouts_in
from spark_consumers.lake.format.iceberg_schema import arrow_schema
from spark_consumers.lake.format.snapshot_files import data_files
from spark_consumers.lake.format.table_format import FileInfo, RowIds, name_of
from spark_consumers.lake.index.build import Identity, add_files, bitmaps_table
from spark_consumers.lake.index.liveness import Liveness
from spark_consumers.lake.index.merge import merge_some
from spark_consumers.lake.index.run_format import open_runs
from spark_consumers.lake.layout.evolution import arrangement
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.store.place import Place, place
from walsender_bridge.errors import CorruptError, LakeError
from walsender_bridge.runtime import fail_point


def liveness_of(folder: str, table: TableVersion) -> Liveness:
    """The table's data files and removed rows. Raises `IndexDamagedError`."""
    with open_runs(folder, table.index_files) as runs:
        return Liveness(folder, [run.tables for run in runs])


def states(liveness: Liveness) -> list[FileState]:
    """The data files as `plan` knows them."""
    found = []
    for file in liveness.current():
        vector = liveness.vectors.get(file.name)
        removed = 0 if vector is None else vector.rows
        found.append(FileState(file.name, file.rows, file.size, removed, file.partition))
    return found


def current(liveness: Liveness) -> dict[str, CurrentFile]:
    """The data files as `decide` knows them."""
    found = {}
    for file in liveness.current():
        vector = liveness.vectors.get(file.name)
        puffin = "" if vector is None else vector.puffin
        found[file.name] = CurrentFile(puffin, partial(liveness.removed, file.name))
    return found


def prepare(
    root: Place,
    catalog: TableCatalog,
    name: str,
    table: TableVersion,
    offer: OfferName,
    groups: Sequence[Group],
) -> Offer:
    """Write the files of an offer; the record of the offer is there. `name`: the table's.

    Raises `CorruptError`, `IndexDamagedError`, `FileNotFoundError`, `LakeError`: also if the table has gone on meanwhile, and
    what it had has expired, or has another layout than the plan was made for.
    """
    folder = str(root / table.path)
    loaded = catalog.load(TableId.at(table.path))
    if loaded is None:
        raise LakeError("the table no longer exists", where=folder)
    planned = [file for group in groups for file in group.files]
    if len(compactable(loaded.metadata, planned)) != len(planned):
        raise LakeError(
            "the table's sort order or partitions have changed since the plan was made",
            where=folder,
            repair="no action is needed: the next plan is made for the new layout",
        )
    target = _target(folder, loaded.metadata, name, table, offer)
    ids = _data_files(loaded.metadata, table)
    liveness = liveness_of(folder, table)
    known = {file.name: file for file in liveness.current()}
    if strayed := strays((file.name for file in planned), known, ids):
        raise CorruptError(
            "a data file is in the table's row index, but not in its snapshot",
            where=f"{folder}/{strayed[0]}",
            repair=f"copy the table again: tuskline table resync {name}",
        )
    has_ids = any(known is not None for known in ids.values())
    old: list[OldFile] = []
    made: list[FileInfo] = []
    with tempfile.TemporaryDirectory(prefix="tuskline-maintain-") as scratch:
        for number, group in enumerate(groups):
            removed = {file.name: liveness.removed(file.name) for file in group.files}
            path = write_partial(f"{scratch}/{number}.arrow", bitmaps_table(removed))
            kept = tuple(ids[file.name] for file in group.files) if has_ids else ()
            rewrite = Rewrite(tuple(known[file.name] for file in group.files), path, kept)
            (written,) = run_complete(CompleteTask(target, number, rewrite=rewrite)).rows
            made.append(written)
            vectors = ((f, liveness.vectors.get(f.name)) for f in rewrite.files)
            known_then = [
                (f.name, f.rows, "" if vector is None else vector.puffin, removed[f.name])
                for f, vector in vectors
            ]
            old += mapped(known_then, number)
            fail_point.hit("compaction-written")
    identity = Identity.of(table.identity, target.file_schema)
    (run,) = add_files(folder, (), offer.run, identity, made, (), [file.name for file in old])
    files = tuple(NewFile(name_of(f.path), f.rows, f.size, f.partition) for f in made)
    return replace(
        intent(offer, name, table),
        old=tuple(old),
        files=files,
        run=run.name,
        weight=run.weight,
    )


def merge_runs(
    root: Place, name: str, table: TableVersion, offer: OfferName, begin: int, end: int
) -> Offer:
    """Write one run in place of some of the table's; the record of the offer is there. Raises `IndexDamagedError`, `CorruptError`."""
    run = merge_some(str(root / table.path), table.index_files, begin, end, offer.run)
    made = intent(offer, name, table)
    return replace(
        made, run=run.name, weight=run.weight, merges=tuple(table.index_files[begin:end])
    )


def files_of(folder: Place, offer: OfferName) -> tuple[list[Place], list[Place]]:
    """The data files of an offer that are there, and the drafts of those and of its run that a dead maintainer left."""
    drafts = folder.glob(f"*/.{PREFIX}{offer}[-.]*.tmp")
    return list(folder.glob(f"data/{offer.prefix}*")), list(drafts)


def intent(offer: OfferName, name: str, table: TableVersion) -> Offer:
    """The offer before its files are written."""
    columns = columns_of(table)
    return Offer(str(offer), name, table.path, offer.term, table.key, columns=columns)


def _target(
    folder: str, metadata: Mapping[str, Any], name: str, table: TableVersion, offer: OfferName
) -> Target:
    """The table as the tasks of an epoch know it, for files of this offer."""
    schema = _schema(metadata, table)
    # The offer says where each row was by where it is, so nothing may change their order.
    unsorted = replace(arrangement(layouts_in(metadata)), sort=(), order=0)
    prefix = f"{folder}/data/{offer.prefix.removesuffix('-')}"
    return replace(Target.of(name, table, prefix, schema, schema), arrangement=unsorted)


def compactable(metadata: Mapping[str, Any], files: Sequence[FileState]) -> list[FileState]:
    """Those of the files whose rows can go into one file in the order that they have.

    None of a table with a sort order, since its rows would be in another order there, and none of an earlier partition spec, since
    its rows belong in several partitions now. The writer rewrites these.
    """
    there = arrangement(layouts_in(metadata))
    return [] if there.sort else [f for f in files if there.is_current(f.partition)]


def _data_files(metadata: Mapping[str, Any], table: TableVersion) -> Mapping[str, RowIds | None]:
    """The names of the data files of the table's snapshot, with their row ids, if the format has some. Raises `LakeError`."""
    for snapshot in metadata.get("snapshots", ()):
        if snapshot["snapshot-id"] == table.snapshot_id:
            return data_files(place(snapshot["manifest-list"]))
    raise LakeError("the table's snapshot no longer exists", where=table.path)


def _schema(metadata: Mapping[str, Any], table: TableVersion) -> pa.Schema:
    """The schema of the table's data files, as its snapshot has it."""
    snapshots = {each["snapshot-id"]: each for each in metadata.get("snapshots", ())}
    current = metadata["current-schema-id"]
    number = snapshots.get(table.snapshot_id, {}).get("schema-id", current)
    (found,) = [each for each in metadata["schemas"] if each["schema-id"] == number]
    whole = with_first_names(arrow_schema(found), metadata["schemas"])
    wanted, hidden = names_in(table, whole.names)
    return pa.schema([whole.field(column) for column in [*wanted, *hidden]])
