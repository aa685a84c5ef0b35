"""The interface of a table format to the pipeline; `iceberg.py` implements it.

The pipeline writes data files on the executors; a format makes them part of a table, without reading rows. A write of a
table is a set of files: rows to add, and deletion vectors that say which rows of earlier files are removed.

The manifest relies on three guarantees: a write is atomic, it is refused once a writer of a higher term has taken the
table over (`FencedError`), and repeating that of an epoch changes nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Protocol

import pyarrow as pa

from spark_consumers.lake.layout.arrangement import NO_PARTITION, Arrangement
from spark_consumers.lake.store.place import Place
from walsender_bridge.postgres.table_layout import TableLayout

#: The hidden column of a table without a key that an earlier version copied, in which it told equal rows apart.
ROW_ID = "_tuskline_row"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A Parquet file that was written: absolute path, number of rows, size in bytes.

    Of a data file also its `partition` (`layout.arrangement`), and the number of the sort order that its rows are in.
    """

    path: str
    rows: int
    size: int
    partition: str = NO_PARTITION
    order: int = 0


@dataclass(frozen=True, slots=True)
class Vector:
    """Where the deletion vector of a data file is, and how many of its rows are removed.

    `file` and `puffin` are paths below the table's folder, `size` is that of the whole Puffin file, `partition` the data
    file's. In version 2 of the format, which has no vectors, `puffin` is a file of positions in Parquet instead
    (`position_deletes`), and `offset` and `length` are 0.
    """

    file: str
    puffin: str
    offset: int
    length: int
    rows: int
    size: int
    partition: str = NO_PARTITION


@dataclass(frozen=True, slots=True)
class ScanFile:
    """A data file of a snapshot: absolute path, size, rows, and which of them are removed.

    By a deletion vector; in tables that an earlier version wrote, by `deletes`: files of keys that are not in it any more.
    """

    path: str
    size: int
    rows: int
    vector: Vector | None = None
    deletes: tuple[str, ...] = ()
    partition: str = NO_PARTITION

    @property
    def name(self) -> str:
        """Its path below the table's folder."""
        return name_of(self.path)


def placed(file: ScanFile, partition: str) -> ScanFile:
    """The data file in this partition, in which its vector is, too."""
    vector = file.vector and replace(file.vector, partition=partition)
    return replace(file, partition=partition, vector=vector)


@dataclass(frozen=True, slots=True)
class RowIds:
    """What the rows of a data file have that has no columns for it: ids from `first` on, last changed by `sequence`."""

    first: int
    sequence: int


def name_of(path: str) -> str:
    """The path below its table's folder of a data file, all of which are in one folder."""
    return f"data/{PurePath(path).name}"


@dataclass(frozen=True, slots=True)
class TableWrite:
    """One table's part of an epoch.

    `base` is the snapshot that it follows (None: the table is new and empty). If `truncate`, all that is there goes.
    Otherwise `vectors` say which rows of their data files are removed from now on, in place of the vectors `replaced`, and
    the data files `removed` go as a whole; so do `converted`, the files of keys of an earlier version. Then `rows` are
    added. `count`: how many rows the table has then (None: not known). `version` is the end of the range of the log that
    this is, `stage` the name that the files carry (empty: rows of a copy, which are of no range). `conversion`: the same rows
    in another form, whose files are removed when another attempt is published. Neither of these two is taken over from an
    earlier attempt.
    """

    version: int
    base: int | None
    stage: str
    rows: Sequence[FileInfo] = ()
    vectors: Sequence[Vector] = ()
    replaced: Sequence[Vector] = ()
    removed: Sequence[FileInfo] = ()
    converted: Sequence[str] = ()
    truncate: bool = False
    count: int | None = None
    conversion: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """The snapshot that a write made, and the stage of its files: an earlier one, if it was a repetition."""

    snapshot: int
    stage: str


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """What a snapshot is made of: the table's UUID, the snapshot's schema and all of the table's, in Iceberg's JSON, and its manifest list.

    `has_first_names`: columns are known to have their first names in all data files (`file_names`).
    """

    uuid: str
    schema: Mapping[str, Any]
    schemas: Sequence[Mapping[str, Any]]
    manifest_list: Place
    has_first_names: bool


class TableFormat(Protocol):
    """Tables by the path of their folder. Safe to use from several threads, a table at a time."""

    name: str

    def create(self, path: str, columns: pa.Schema, *, vectors: bool = True) -> None:
        """Make an empty table in a new folder, for engines that know deletion vectors, or also for those that do not.

        Raises `FencedError` if another writer made it.
        """

    def drop(self, path: str) -> None:
        """Remove the table with its folder, also one that has no metadata."""

    def schemas(self, path: str, snapshot: int | None = None) -> tuple[pa.Schema, pa.Schema]:
        """Its columns (of an earlier version's table without a key, `ROW_ID` is the last), and its data files' schema.

        The schema is that of `snapshot`, or the newest.
        """

    def opens(self, path: str) -> bool:
        """Whether it can be opened anew: what all tables depend on works then."""

    def version(self, path: str) -> int:
        """The version of the format that it has."""

    def arrange(self, path: str, term: int, layout: TableLayout) -> Arrangement:
        """Give it this layout, which holds for files that are written from now on; how these are written.

        Raises `FencedError`, and `NotSupportedError` for a layout that it cannot have.
        """

    def arrangement(self, path: str) -> Arrangement:
        """How its files are written now."""

    def partition_fields(self, path: str) -> frozenset[str]:
        """The names of the partition fields that it has or once had, but for columns': no column can be added under one of these."""

    def laid_out_by(self, path: str) -> frozenset[str]:
        """The names of the columns by which it is, or was, partitioned or sorted."""

    def keeps_defaults(self, path: str) -> bool:
        """Whether it can have columns with a value in rows of files that lack them."""

    def evolve(
        self,
        path: str,
        term: int,
        snapshot: int,
        columns: pa.Schema,
        sources: Mapping[str, str],
        defaults: Mapping[str, pa.Scalar],
    ) -> pa.Schema:
        """Give it these columns from its next snapshot on, and leave its data files as they are; the schema of its data files then.

        `snapshot`: the published one. `sources`: the name that a column has there; none if it is new. `defaults`: the values of new
        columns in the rows that it has, if `keeps_defaults`; NULL in others. The schema has them, if the catalog keeps them. Raises `FencedError`.
        """

    def take_over(
        self, path: str, snapshot: int, term: int, epoch: int, *, later: bool = False
    ) -> None:
        """From here on only writers of `term` may write, following `snapshot`, which is `epoch`'s.

        `later`: this may begin with the first change by a writer of `term`, if there is nothing to mend (`takeover.TakeTable`).
        """

    def write(self, path: str, term: int, write: TableWrite) -> Written:
        """Make the write, unless it is an epoch's that is made already. Readers of the plain table do not see it yet."""

    def show(self, path: str, term: int, snapshot: int) -> None:
        """Let readers of the plain table see `snapshot`."""

    def metadata_file(self, path: str, snapshot: int) -> Place | None:
        """The file by which other engines open the table; None if readers of the plain table see another snapshot."""

    def pin(self, path: str, term: int, tags: Mapping[str, int], *, take: bool = False) -> None:
        """Give the table exactly these tags of pins, by name, at these snapshots, in one step.

        If `take`, writers of lower terms change nothing in it from then on, also where no tag had to be changed.
        """

    def expire(self, path: str, term: int, kept: Collection[int]) -> int:
        """Drop all snapshots but `kept`, and the files that no snapshot needs; how many files."""

    def sweep(self, path: str, term: int, listed: frozenset[str]) -> int:
        """Remove those of the listed files (`leaks.listed`) that the table does not need; how many."""

    def terms(self, path: str) -> list[int]:
        """The terms of the writers that it is or was written by, as far as it shows them."""

    def users_refs(self, path: str) -> list[str]:
        """References to its snapshots that users made: its folder stays while there is one."""

    def scan(self, path: str, snapshot: int) -> list[ScanFile]:
        """The data files of a snapshot."""

    def data_files(self, path: str, snapshot: int) -> Collection[str]:
        """The names of the data files of a snapshot."""

    def snapshot_record(
        self, path: str, snapshot: int, known: SnapshotRecord | None = None
    ) -> SnapshotRecord:
        """What the snapshot is made of; in a folder, its manifest list and manifests are to be verified as they are read.

        `known`: that of an earlier snapshot of the table, whose schemas are not asked for again if this one has the same schema. Raises
        `CorruptError` if the snapshot is not there.
        """

    def row_ids(self, path: str, snapshot: int) -> Mapping[str, RowIds]:
        """The row ids of the data files of a snapshot, by their names; none where the format has none."""

    def equality_deletes(self, path: str, snapshot: int) -> list[str]:
        """The files of keys in a snapshot that an earlier version wrote."""
