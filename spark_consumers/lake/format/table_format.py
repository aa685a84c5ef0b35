"""The interface of a table format to the pipeline; `iceberg.py` implements it.

The pipeline writes data files on the executors; a format makes them part of a table, without reading rows. A write of a
table is a set of files: rows to remove, identified by the values of some columns, and rows to add. Removals apply to rows
that were in the table before; additions come after them.

The manifest relies on three guarantees: a write is atomic, it is refused once a writer of a higher term has taken the
table over (`FencedError`), and repeating it changes nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

#: The hidden column that distinguishes equal rows of a table without a key.
ROW_ID = "_tuskline_row"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A Parquet file that was written: absolute path, number of rows, size in bytes."""

    path: str
    rows: int
    size: int


@dataclass(frozen=True, slots=True)
class ScanFile:
    """A data file of a snapshot, and the files of deletes whose identities are not in it any more."""

    path: str
    size: int
    deletes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TableWrite:
    """One table's part of an epoch.

    `base` is the snapshot that it follows (None: the table is new and empty). If `truncate`, all that is
    there goes; otherwise the rows that equal one of `deletes` in the columns of `identity`. Then `rows`
    are added. `version` is the end of the range of the log that this is, `stage` the name that the
    files carry. `compaction`: the same rows in new files, never taken over from an earlier attempt, whose
    files are removed when another attempt is published.
    """

    version: int
    base: int | None
    identity: tuple[str, ...]
    stage: str
    rows: Sequence[FileInfo] = ()
    deletes: Sequence[FileInfo] = ()
    truncate: bool = False
    compaction: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """The snapshot that a write made, and the stage of its files: an earlier one, if it was a repetition."""

    snapshot: int
    stage: str


class TableFormat(Protocol):
    """Tables by the path of their folder. Safe to use from several threads, a table at a time."""

    name: str

    def create(self, path: str, columns: pa.Schema) -> None:
        """Make an empty table in a new folder. Raises `FencedError` if another writer made it."""

    def forget(self, path: str) -> None:
        """The folder is gone: what is known of its table is of no table that may come there."""

    def schemas(self, path: str) -> tuple[pa.Schema, pa.Schema]:
        """Its columns (without a key, `ROW_ID` is the last), and its data files' schema."""

    def extend(self, path: str, term: int, columns: pa.Schema) -> None:
        """Give it those of `columns` that it lacks. Raises `FencedError`, `LakeError` for another type."""

    def take_over(self, path: str, snapshot: int, term: int, epoch: int) -> None:
        """From here on only writers of `term` may write, following `snapshot`, which is `epoch`'s."""

    def write(self, path: str, term: int, write: TableWrite) -> Written:
        """Make the write, unless it is made already. Readers of the plain table do not see it yet."""

    def show(self, path: str, term: int, snapshot: int) -> None:
        """Let readers of the plain table see `snapshot`."""

    def metadata_file(self, path: str, snapshot: int) -> Path | None:
        """The file by which other engines open the table; None if readers of the plain table see another snapshot."""

    def expire(self, path: str, term: int, kept: Collection[int]) -> int:
        """Drop all snapshots but `kept`, and the files that no snapshot needs; how many files."""

    def sweep(self, path: str, term: int, listed: frozenset[str]) -> int:
        """Remove those of the listed files (`leaks.listed`) that the table does not need; how many."""

    def terms(self, path: str) -> list[int]:
        """The terms of the writers that it is or was written by, as far as it shows them."""

    def users_refs(self, path: str) -> list[str]:
        """References to its snapshots that users made: its folder stays while there is one."""

    def scan(
        self, path: str, snapshot: int, column: str | None = None, values: Sequence[Any] = ()
    ) -> list[ScanFile]:
        """The data files of a snapshot: all, or those that may have one of `values` in `column`."""

    def small_files(self, path: str, snapshot: int) -> tuple[int, int]:
        """How many files of deletes a reader of the snapshot has to apply, and its data in bytes."""
