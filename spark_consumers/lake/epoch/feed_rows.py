"""The rows of a change feed, and its data files, on the executors: each range writes those of its changes, and holds few of them.

A feed's rows have an order of their own (`ABOUT`), so the ranges of an epoch write files independently, and nothing composes them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_consumers.decode.entries import ChangeBatch
from spark_consumers.decode.spans import Bools, Int64s, of_numbers, of_texts
from spark_consumers.lake.format.arranged_files import write_arranged
from spark_consumers.lake.format.table_format import FileInfo
from spark_consumers.lake.layout.arrangement import PLAIN, Arrangement
from spark_consumers.lake.manifest.table_version import StreamPosition
from walsender_bridge.postgres.protocol.pgoutput import DELETE, INSERT, TRUNCATE, UPDATE

#: What is said of each change, before the table's columns: as `format("tuskline")` says it with `mode=table`.
ABOUT: Final = pa.schema(
    [
        ("_op", pa.string()),
        ("_commit_lsn", pa.int64()),
        ("_xid", pa.int64()),
        ("_commit_time", pa.timestamp("us", "UTC")),
        ("_version", pa.int64()),
        ("_offset", pa.int64()),
        ("_sequence", pa.int64()),
        ("_unchanged", pa.list_(pa.string())),
        ("_unrepresentable", pa.string()),
    ]
)
_OPS: Final = ("insert", "update", "delete", "truncate", "update_before")
_BEFORE: Final = 4
BEGIN: Final = "begin"
#: Bytes of rows of which one data file is made.
_HELD: Final = 32 << 20


@dataclass(frozen=True)
class FeedTarget:
    """The feed of a table as a task needs it.

    `prefix`: the path that its data files begin with. `columns`: of its rows, `ABOUT` and the table's; `file_schema`: of its
    data files. `after`: changes before this offset are in the feed already. `arrangement`: how its data files are written.
    """

    prefix: str
    columns: pa.Schema
    file_schema: pa.Schema
    after: int = 0
    arrangement: Arrangement = PLAIN


@dataclass
class FeedFiles:
    """The changes of one table in the range `number`, as data files of its feed."""

    target: FeedTarget
    number: int
    key: Sequence[int]
    _held: list[list[pa.Array]] = field(default_factory=list)
    _bytes: int = 0
    _parts: int = 0
    _files: list[FileInfo] = field(default_factory=list)

    def add(self, batch: ChangeBatch) -> None:
        """Take more changes, which come after those that are there; they have the table's columns."""
        rows = feed_rows(batch, self.target, self.key)
        if len(rows[0]):
            self._held.append(rows)
            self._bytes += sum(column.nbytes for column in rows)
        if self._bytes >= _HELD:
            self._write()

    def close(self) -> tuple[FileInfo, ...]:
        """All files."""
        self._write()
        return tuple(self._files)

    def _write(self) -> None:
        if not self._held:
            return
        columns = [pa.concat_arrays(list(same)) for same in zip(*self._held, strict=True)]
        path = f"{self.target.prefix}-{self.number}-{self._parts}.parquet"
        self._files += write_arranged(
            path, columns, self.target.file_schema, self.target.arrangement
        )
        self._held, self._bytes = [], 0
        self._parts += 1


def feed_rows(batch: ChangeBatch, target: FeedTarget, key: Sequence[int]) -> list[pa.Array]:
    """The columns of the feed's rows for these changes, in their order.

    One for each change, with the new row (of a DELETE, what was sent of the old one); before that of an UPDATE one with the old row, where
    that was sent: of a key that has changed, its columns, and with REPLICA IDENTITY FULL all. `key`: where the key is among the columns.
    Columns of the batch behind the feed's are the lake's own (`decode.mode_columns`), and left out.
    """
    names = target.columns.names[len(ABOUT) :]
    batch = _first(batch, len(names))
    new = np.flatnonzero(batch.offset >= target.after)
    has_before = (batch.ops == UPDATE) & (batch.old_kind != 0)
    rows = np.repeat(new, 1 + has_before[new])
    is_before = has_before[rows] & np.append(rows[1:] == rows[:-1], [False])
    is_old = is_before | (batch.ops[rows] == DELETE)
    return [
        *_about(batch, rows, is_before),
        _unchanged(batch, rows, is_before, names, key),
        _unrepresentable(batch, rows, is_old, names),
        *_values(batch, rows, is_old, key),
    ]


def _first(batch: ChangeBatch, count: int) -> ChangeBatch:
    """The batch with so many columns."""
    if len(batch.columns) == count:
        return batch
    return replace(
        batch,
        columns=batch.columns[:count],
        unchanged=None if batch.unchanged is None else batch.unchanged[:, :count],
        old_columns=None if batch.old_columns is None else batch.old_columns[:count],
    )


def _about(batch: ChangeBatch, rows: Int64s, is_before: Bools) -> list[pa.Array]:
    numbers = np.zeros(256, np.int32)
    numbers[[INSERT, UPDATE, DELETE, TRUNCATE]] = range(4)
    what = np.where(is_before, _BEFORE, numbers[batch.ops[rows]])
    return [
        of_texts(_OPS).take(of_numbers(what)),
        of_numbers(batch.commit_lsn[rows].astype(np.int64)),
        of_numbers(batch.xid[rows].astype(np.int64)),
        of_numbers(batch.commit_time[rows]).view(ABOUT.field("_commit_time").type),
        of_numbers(batch.version[rows].astype(np.int64)),
        of_numbers(batch.offset[rows].astype(np.int64)),
        of_numbers(batch.sequence[rows].astype(np.int64)),
    ]


def _filled(batch: ChangeBatch, key: Sequence[int]) -> Bools:
    """Where an unchanged value of the key is in the old tuple: rows by columns."""
    assert batch.unchanged is not None
    found = np.zeros_like(batch.unchanged)
    for column in key:
        found[:, column] = batch.unchanged[:, column] & (batch.old_kind != 0)
    return found


def _unchanged(
    batch: ChangeBatch, rows: Int64s, is_before: Bools, names: Sequence[str], key: Sequence[int]
) -> pa.Array:
    """The names of the columns whose values an UPDATE has left alone, and that were not sent."""
    marks = np.zeros((len(rows), len(names)), np.bool_)
    if batch.unchanged is not None:
        marks = (batch.unchanged & ~_filled(batch, key))[rows] & ~is_before[:, None]
    _, places = np.nonzero(marks)
    ends = np.concatenate([[0], np.cumsum(marks.sum(axis=1))]).astype(np.int32)
    kind = ABOUT.field("_unchanged").type
    texts = of_texts(list(names)).take(of_numbers(places))
    return pa.ListArray.from_arrays(of_numbers(ends), texts, type=kind)


def _unrepresentable(
    batch: ChangeBatch, rows: Int64s, is_old: Bools, names: Sequence[str]
) -> pa.Array:
    """PostgreSQL's texts of the values that the lake cannot hold, as a JSON object by column; NULL in the other rows."""
    found: dict[int, dict[str, str]] = {}
    for texts, side in ((batch.unrepresentable, ~is_old), (batch.old_unrepresentable, is_old)):
        for column, values in texts.items():
            there = pc.is_valid(values).to_numpy(zero_copy_only=False)
            for at in np.flatnonzero(there[rows] & side).tolist():
                text = values[int(rows[at])].as_py()
                found.setdefault(at, {})[names[column]] = text
    if not found:
        return pa.nulls(len(rows), pa.string())
    return pa.array(
        [json.dumps(found[at]) if at in found else None for at in range(len(rows))], pa.string()
    )


def _values(batch: ChangeBatch, rows: Int64s, is_old: Bools, key: Sequence[int]) -> list[pa.Array]:
    columns = batch.columns
    if batch.old_columns is None:
        return [column.take(of_numbers(rows)) for column in columns]
    if batch.unchanged is not None:
        filled = _filled(batch, key)
        columns = [
            pc.if_else(pa.array(filled[:, i]), old, column) if filled[:, i].any() else column
            for i, (column, old) in enumerate(zip(columns, batch.old_columns, strict=True))
        ]
    places = of_numbers(rows + len(batch) * is_old)
    return [
        pa.concat_arrays([column, old]).take(places)
        for column, old in zip(columns, batch.old_columns, strict=True)
    ]


def begin_row(position: StreamPosition, version: int, columns: pa.Schema) -> Sequence[pa.Array]:
    """The columns of the row `begin` behind all changes of the epoch `version`, which ends at this position."""
    about: Mapping[str, object] = {
        "_op": BEGIN,
        "_commit_lsn": position.lsn,
        "_commit_time": position.commit_time,
        "_version": version,
        "_offset": position.offset,
        "_sequence": -1,
        "_unchanged": [],
    }
    return [pa.array([about.get(column.name)], column.type) for column in columns]
