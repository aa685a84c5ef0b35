"""What the executors do for a live read: read a range of the log and fold it, and compose the folds of a table.

As in the staging of an epoch (`epoch.stage`), of which this is the first half: no data file is written.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import pyarrow as pa

from spark_consumers.fold.keyed import Fold
from spark_consumers.fold.serial import fold_to_table
from spark_consumers.lake.epoch import divided
from spark_consumers.lake.epoch.divided import Share
from spark_consumers.lake.epoch.packed import TaskTables
from spark_consumers.lake.epoch.stage import (
    PendingTable,
    RangeTask,
    caught,
    composed_tables,
    read_range,
)
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.data_files import read_partial
from spark_consumers.lake.live.effect import effect, has_patches
from spark_consumers.lake.tables.fault import TableFault
from spark_consumers.lake.tables.schema_match import SchemaMismatch
from walsender_bridge.errors import NotSupportedError, TrimmedError, TusklineError

#: What a row of `FOUND` is: a table's fold; why a table has none; the OIDs of partitions that are not known; an error.
FOLD: Final = "fold"
FAULT: Final = "fault"
PARTITIONS: Final = "partitions"
ERROR: Final = "error"
#: See `Found`.
FOUND: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("table", pa.string()),
        ("number", pa.int64()),
        ("parts", pa.int64()),
        ("truncated", pa.bool_()),
        ("patches", pa.bool_()),
        ("size", pa.int64()),
        ("path", pa.string()),
        ("linked", pa.string()),
        ("emptied", pa.list_(pa.int64())),
        ("content", pa.binary()),
    ]
)
#: Why a table is left out whose columns have changed since the epoch.
_CHANGED: Final = "its columns have changed; the next epoch has them"
#: Bytes of folds that are sent to the driver, to be sent to executors with queries: of one range, and of all together.
_SENT_BYTES: Final = 8 << 20
_ALL_SENT_BYTES: Final = 64 << 20
#: Rows that are given to Spark's JVM at once, and their bytes: it holds them in one piece.
_BATCH_ROWS: Final = 64 << 10
_BATCH_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """What a range has of one table.

    `number`: the range's. A fold of `size` bytes is the `content`, or in a file, `path`, in so many `parts`; `linked`: a file of keys
    (`epoch.divided`).
    `truncated` and `patches`: whether it has a TRUNCATE, and rows with values that were never sent. `emptied`: as in `Fold`, or nothing.
    """

    kind: str
    table: str
    number: int
    parts: int = 1
    truncated: bool = False
    patches: bool = False
    size: int = 0
    path: str = ""
    linked: str = ""
    emptied: tuple[int, ...] = ()
    content: bytes = b""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """It, from a row of Spark's."""
        exact = {"content": bytes(row["content"]), "emptied": tuple(row["emptied"])}
        return cls(**{**row, **exact})

    def row(self) -> pa.RecordBatch:
        """It, as a row."""
        values = (getattr(self, name) for name in FOUND.names)
        arrays = [pa.array([value], kind) for value, kind in zip(values, FOUND.types, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=FOUND)

    def fold_table(self, target: Target, share: Share | None) -> pa.Table:
        """The fold of this table, or one share of it."""
        if not self.path:
            return pa.ipc.open_stream(self.content).read_all()
        try:
            return divided.read(self.path, target, share) if share else read_partial(self.path)
        except FileNotFoundError:
            raise TrimmedError(
                "a file of this live read was removed",
                where=self.path,
                repair="read live again, and let nothing but Tuskline remove files of the lake",
            ) from None


@dataclass(frozen=True)
class FoldTask:
    """Read a range and fold it. `task.scratch`: a folder for folds of more than `sent` bytes; empty: there is none."""

    task: RangeTask
    sent: int

    def found(self) -> list[Found]:
        """What the range has of each table, or the error that there was."""
        try:
            return [*self._found()]
        except TusklineError as error:
            content = json.dumps(error.to_wire()).encode()
            return [Found(ERROR, "", self.task.number, content=content)]

    def run(self) -> Iterator[pa.RecordBatch]:
        """The same as rows of `FOUND`."""
        return (each.row() for each in self.found())

    def _found(self) -> Iterator[Found]:
        number = self.task.number
        read = read_range(self.task, TaskTables(self.task.tables, self.task.stage))
        sent = 0
        for table in read.whole:
            with caught(table.target, read.faults):
                found = self._folded(table, sent)
                sent += len(found.content)
                yield found
                if table.partitions:
                    oids = json.dumps(sorted(table.partitions)).encode()
                    yield Found(PARTITIONS, table.target.name, number, content=oids)
        for one in read.recorded:
            yield Found(FAULT, one.table, number, content=_CHANGED.encode())
        for why in read.found:
            yield Found(FAULT, why.table, number, content=_reason(why).encode())

    def _folded(self, table: PendingTable, sent: int) -> Found:
        target, folded, parts = table.target, table.fold(), self.task.parts
        content = fold_to_table(folded)
        size = content.nbytes
        found = Found(
            FOLD,
            target.name,
            self.task.number,
            parts,
            folded.truncated,
            has_patches(folded),
            size,
            emptied=(isinstance(folded, Fold) and folded.emptied) or (),
        )
        if parts == 1 and sent + size <= self.sent:
            return replace(found, content=_packed(content))
        if not self.task.scratch:
            raise NotSupportedError(
                "the log has too much behind the newest epoch for a live read that cannot write to the lake's folder",
                where=target.name,
                repair="read the newest epoch: omit live; or let the reader write to the lake's folder",
            )
        path = f"{self.task.scratch}/{self.task.number}-{target.scratch_name}"
        path, linked = divided.write(path, target, folded, parts)
        return replace(found, path=path, linked=linked or "")


def fold_tasks(work: Sequence[RangeTask]) -> list[FoldTask]:
    """The tasks that read these ranges: the driver holds what all of them send."""
    sent = min(_SENT_BYTES, _ALL_SENT_BYTES // max(1, len(work)))
    return [FoldTask(task, sent) for task in work]


def _reason(why: SchemaMismatch | TableFault) -> str:
    """Why a table's changes cannot be shown before the epoch that has them."""
    if isinstance(why, TableFault):
        return f"{why.error.what}; {why.error.repair}" if why.error.repair else why.error.what
    return why.reason or _CHANGED


def _packed(content: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, content.schema) as writer:
        writer.write_table(content)
    return bytes(sink.getvalue())


@dataclass(frozen=True)
class EffectTask:
    """Compose a table's folds, in the order of their ranges; or one share of each."""

    target: Target
    found: tuple[Found, ...]
    share: Share | None = None

    def run(self) -> Iterable[pa.RecordBatch]:
        """Rows of `effect.effect_schema`."""
        tables = (one.fold_table(self.target, self.share) for one in self.found)
        whole = composed_tables(self.target, tables)
        return in_batches(effect(self.target, whole, self.share))


def in_batches(rows: pa.Table) -> list[pa.RecordBatch]:
    """The rows in batches of some megabytes, if they are about equally long."""
    fitting = len(rows) * _BATCH_BYTES // max(1, rows.nbytes)
    found: list[pa.RecordBatch] = rows.to_batches(max(1, min(_BATCH_ROWS, fitting)))
    return found


def effect_tasks(target: Target, found: Iterable[Found]) -> list[EffectTask]:
    """The tasks that compose these folds: one for each share."""
    folds = tuple(sorted(found, key=lambda one: one.number))
    linked = [one.linked for one in folds if one.linked]
    return [EffectTask(target, folds, share) for share in divided.shares(folds[0].parts, linked)]
