"""The catalog of a lake in a folder, of a disk or of a bucket: each table has a folder, and its metadata files there are numbered in sequence.

A commit creates the metadata file of the next number *exclusively* (`iceberg_files.link`): if anything was committed since
the table was loaded, the number is taken, and the commit is lost. So whoever checks a table and then commits to it has
checked the very table that it changes. Iceberg's own catalog in a folder renames files, which would replace what another
writer has committed in between.

Each table is committed by itself: an epoch is made of several by the chain of manifests.
"""

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from spark_consumers.lake.catalog.requirements import unmet
from spark_consumers.lake.catalog.table_catalog import LoadedTable, Outcome, TableCommit, TableId
from spark_consumers.lake.catalog.updates import applied, created
from spark_consumers.lake.catalog.written_metadata import WrittenMetadata, encoded, light
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.iceberg_files import (
    link,
    make_folders,
    metadata_file,
    newest_metadata,
    version_of,
)
from spark_consumers.lake.format.object_seals import metadata_in, sealed
from spark_consumers.lake.store.place import ObjectPlace, Place, place, remove_tree
from walsender_bridge.errors import CorruptError, NotSupportedError


class FolderCatalog:
    """The tables of the lake at `root`, an absolute path or a place in a bucket (`table_catalog.TableCatalog`)."""

    supports_multi_table = False
    supports_v3 = True
    supports_branches = True
    is_folder = True

    def __init__(self, root: Place) -> None:
        self._root = root
        #: What each thread has loaded last, as a commit mostly follows: the file, and the metadata in it.
        self._last = threading.local()
        self._written = WrittenMetadata()

    def folder(self, table: TableId) -> Place:
        """The table's folder."""
        return self._root.joinpath("tables", *table.namespace, table.name)

    def load(self, table: TableId) -> LoadedTable | None:
        """The table by its newest metadata; None if there is none. Raises `CorruptError`."""
        folder = self.folder(table)
        if (known := self._written.newest(folder)) is not None:
            self._last.read = known
            return LoadedTable(str(known[0]), known[1])
        while (file := newest_metadata(folder)) is not None:
            metadata = self._written.of(folder, file) or _read(file)
            if metadata is not None:
                self._last.read = file, metadata
                return LoadedTable(str(file), metadata)
            # It was removed between the two: the table has gone on.
        return None

    def create(
        self, table: TableId, schema: Mapping[str, Any], properties: Mapping[str, str]
    ) -> Outcome:
        """Create an empty table in a new folder."""
        folder = self.folder(table)
        make_folders(folder)
        metadata = created(str(uuid.uuid4()), str(folder), schema, properties, _now())
        return _outcome(link(str(folder), 1, _dump(folder, metadata)))

    def commit(self, commit: TableCommit) -> Outcome:
        """Make the updates, if nothing was committed since `commit.base` and all requirements hold. Never UNKNOWN."""
        base, folder = place(commit.base), self.folder(commit.table)
        file, metadata = getattr(self._last, "read", (None, None))
        self._last.read = None, None
        if file != base:
            metadata = self._written.of(folder, base) or _read(base)
        if metadata is None or unmet(metadata, commit.requirements) is not None:
            return Outcome.LOST
        made = _light(folder, applied(metadata, commit.updates, _now(), str(base)))
        number = version_of(base) + 1
        is_ours = link(str(folder), number, _dump(folder, made))
        if is_ours:
            self._written.keep(folder, metadata_file(folder / "metadata", number), made)
        return _outcome(is_ours)

    def commit_all(self, commits: Sequence[TableCommit]) -> Outcome:
        """One table is a commit; raises `NotSupportedError` for several."""
        if len(commits) != 1:
            raise NotSupportedError(
                f"a catalog in a folder commits one table at a time, not {len(commits)}",
                where=str(self._root),
            )
        return self.commit(commits[0])

    def drop(self, table: TableId) -> None:
        """Remove the table's folder, whatever is in it."""
        remove_tree(self.folder(table))


def _read(file: Place) -> dict[str, Any] | None:
    """The metadata in this file; None if it is not there. Raises `CorruptError` for another content than was written."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    try:
        checksums.check(file)
    except CorruptError:
        if file.exists():
            raise
        return None
    return metadata_in(file, content)


def _light(folder: Place, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metadata as it is kept for the next commit; in a bucket nothing is."""
    return metadata if isinstance(folder, ObjectPlace) else light(metadata)


def _dump(folder: Place, metadata: Mapping[str, Any]) -> bytes:
    """The content of the metadata file: in a bucket unique to this commit, since whose it is tells who has won (`store.create`)."""
    if isinstance(folder, ObjectPlace):
        return sealed(metadata).encode()
    return encoded(metadata)


def _outcome(is_ours: bool) -> Outcome:
    return Outcome.WON if is_ours else Outcome.LOST


def _now() -> int:
    return time.time_ns() // 1_000_000
