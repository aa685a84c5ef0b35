"""The changed rows of an epoch's tables, for its views: each is found and read once, however many views need it."""

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_consumers.lake.epoch.table_changes import (
    ChangedFile,
    Moved,
    changed_files,
    changes_tasks,
)
from spark_consumers.lake.epoch.task_rows import frame_of
from spark_consumers.lake.format.table_format import ROW_ID, TableFormat
from spark_consumers.lake.store.place import Place
from spark_consumers.lake.views.expressions import can_be_quoted, quoted
from spark_consumers.lake.views.incremental import SIGN, Flat, Grouped
from spark_consumers.lake.views.plan import Tables
from spark_consumers.lake.views.translate import Translation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Rows that are few: they are sent to all executors, or are one task's.
FEW = 100_000


class EpochChanges:
    """What an epoch changes in its tables, from those of `before` to those of `after`, as these views need it.

    `moves`: the rows that it has only moved into other data files, by the table's name. Safe to use from several threads.
    """

    def __init__(
        self,
        spark: "SparkSession",
        tables: TableFormat,
        root: Place,
        before: Tables,
        after: Tables,
        moves: Mapping[str, Sequence[Moved]],
        views: Sequence[Translation],
    ) -> None:
        self._spark = spark
        self._format = tables
        self._root = root
        self._before, self._after = before, after
        self._moves = moves
        self._views = views
        self._files: dict[str, list[ChangedFile] | None] = {}
        self._frames: dict[str, DataFrame] = {}
        self._lock = threading.RLock()

    def files(self, name: str) -> list[ChangedFile] | None:
        """The data files with a table's changed rows; None if data files alone do not tell."""
        with self._lock:
            if name not in self._files:
                self._files[name] = self._found(name)
            return self._files[name]

    def _found(self, name: str) -> list[ChangedFile] | None:
        old, new = self._before[name], self._after[name]
        path = str(self._root / new.path)
        columns = [self._format.schemas(path, each.snapshot_id)[1] for each in (old, new)]
        if not columns[0].equals(columns[1], check_metadata=True):
            # A row has other values now, or its values other names, although no data file has changed.
            return None
        before, after = (self._format.scan(path, each.snapshot_id) for each in (old, new))
        if any(file.deletes for file in (*before, *after)):
            # An earlier version has removed rows by their keys.
            return None
        return changed_files(before, after, self._moves.get(name, ()))

    def frame(self, name: str) -> "DataFrame":
        """A table's changed rows with their signs (`SIGN`), in the columns that the views need."""
        with self._lock:
            if name not in self._frames:
                self._frames[name] = self._read(name).persist()
            return sent(self._frames[name], sum(file.rows for file in self.files(name) or ()))

    def _read(self, name: str) -> "DataFrame":
        table = self._after[name]
        path = str(self._root / table.path)
        stored = self._format.schemas(path, table.snapshot_id)[1]
        wanted = columns_of(name, [f.name for f in stored], self._views)
        own = [f for f in stored if f.name != ROW_ID] or list(stored)
        # Rows without a column would not be counted.
        schema = pa.schema([f for f in own if f.name in wanted] or own[:1])
        tasks = changes_tasks(path, self.files(name) or (), schema, SIGN)
        frame = frame_of(self._spark, schema.append(pa.field(SIGN, pa.int32())), tasks)
        # Spark does not know that one task's rows are together, and would shuffle them to have them so.
        return frame.coalesce(1) if len(tasks) == 1 else frame

    def close(self) -> None:
        """Forget the rows."""
        for frame in self._frames.values():
            frame.unpersist()
        self._frames.clear()


def sent(frame: "DataFrame", rows: int) -> "DataFrame":
    """The frame, which has so many rows: sent to all executors if these are few, so that what it is joined with is not shuffled."""
    from pyspark.sql.functions import broadcast

    return broadcast(frame) if rows <= FEW else frame


def columns_of(table: str, columns: Sequence[str], views: Sequence[Translation]) -> set[str]:
    """The columns of a table that these views read its changes for. Pure.

    A statement has each column by its quoted name, so one that does not occur is not read; nor is one with a name that no statement may
    have. A column that has the name of another table's is read in vain.
    """
    terms = "".join(
        made.incremental.term(number)
        for made in views
        if isinstance(made.incremental, Flat | Grouped)
        for number, name in enumerate(made.tables)
        if name == table
    )
    return {column for column in columns if can_be_quoted(column) and quoted(column) in terms}
