"""Compares a table's changes with the table as it was copied, and reports mismatches.

Runs on the executors, beside `stage`. A change that does not match is never folded: it is reported to the driver
(`SchemaMismatch`), which decides how the table continues (`schema_change`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa

from spark_consumers.decode.entries import ChangeBatch, rows_of
from spark_consumers.decode.types import arrow_schema
from spark_consumers.lake.format.table_format import ROW_ID
from spark_consumers.lake.manifest.table_version import Column
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.pgoutput import INSERT, Relation

#: Names of Iceberg's own columns: Spark reads no table that has one of them.
_RESERVED: Final = frozenset(
    {
        *("_file", "_pos", "_deleted", "_spec_id", "_partition"),
        *("_row_id", "_last_updated_sequence_number"),
    }
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Behind message `sequence` of the entry at `offset`, a table's changes have these columns.

    `there`: for each column of the table, which of these it is; None: it has none of them, and is NULL, or the value that it has among
    `defaults`. Without it, these are the table's first columns.
    """

    offset: int
    columns: tuple[Column, ...]
    sequence: int = -1
    there: tuple[int | None, ...] | None = None
    defaults: tuple[pa.Scalar | None, ...] = ()

    def key(self, names: Sequence[str], key: Sequence[str]) -> tuple[str, ...]:
        """The names here of the key of a table with these columns."""
        if self.there is None:
            return tuple(key)
        found = [self.there[names.index(name)] for name in key]
        return tuple(self.columns[at][0] for at in found if at is not None)


@dataclass(frozen=True, slots=True)
class SchemaMismatch:
    """The first change in a range of a shape that the table does not have.

    `number` is the range's, `offset` the log's. `reason`: what makes it another table whatever its columns
    are. `columns` and `key` are those that were sent.
    """

    table: str
    number: int
    offset: int
    columns: tuple[Column, ...]
    key: frozenset[str]
    reason: str = ""


def columns_of(relation: Relation) -> tuple[Column, ...]:
    """A relation's columns as a layout has them."""
    return tuple((c.name, c.type_oid, c.typmod) for c in relation.columns)


def unusable(
    names: Collection[str], key: Collection[str], arrays: Collection[str] = ()
) -> str | None:
    """Why rows of these columns cannot be kept in a table with this key; None if they can.

    `arrays`: those of the columns whose values the lake keeps as lists.
    """
    if not names:
        return "it has no published column, so its rows cannot be distinguished or counted"
    if not key and ROW_ID in names:
        return f"it has no key, and its column {ROW_ID!r} has the name of the hidden row id of earlier versions"
    for name in names:
        if name in _RESERVED:
            return f"its column {name!r} has the name of an Iceberg metadata column, so Spark could not read it"
    lake_names = names if key else (*names, ROW_ID)
    same: dict[str, str] = {}
    for name in lake_names:
        other = same.setdefault(_folded(name), name)
        if other != name:
            return f"its columns {other!r} and {name!r} differ only in case, so Spark could not read it"
    for array in arrays:
        if taken := same.get(_folded(f"{array}.element")):
            return f"its column {taken!r} has the name that Iceberg gives to the elements of its array {array!r}"
    return None


def of_layout(
    before: Sequence[str],
    sources: Mapping[str, str],
    after: Sequence[Column],
    taken: Collection[str],
    fixed: Collection[str],
) -> str | None:
    """Why a table with the columns `before` cannot get those `after` as it is; None if it can.

    `sources`: which column each was before, if any. `taken`: the names of its partition fields. `fixed`: of the columns that it is
    partitioned or sorted by.
    """
    names = {was: now for now, was in sources.items()}
    for column in before:
        if column in fixed and names.get(column) != column:
            what = f"renamed to {names[column]!r}" if column in names else "dropped"
            return f"its column {column!r}, by which it is partitioned or sorted, was {what}"
    for name, _, _ in after:
        if name in taken and sources.get(name) != name:
            how = "renamed" if name in sources else "added"
            return (
                f"its column {name!r} was {how}, which has the name of one of its partition fields"
            )
    return None


def arrays_of(columns: pa.Schema) -> list[str]:
    """The names of the columns that are lists."""
    return [field.name for field in columns if pa.types.is_list(field.type)]


def _folded(name: str) -> str:
    """What Spark compares of a column's name: it ignores case, a character at a time, as Java does."""
    upper = (c.upper() if len(c.upper()) == 1 else c for c in name)
    return "".join(c.lower()[0] for c in upper)


def by_layout(
    batch: ChangeBatch, layouts: Sequence[Layout]
) -> Iterator[tuple[Layout | None, ChangeBatch]]:
    """The changes of the batch with the layout that each has, in the order of `layouts`; None where none are known."""
    if len(layouts) < 2:
        yield (layouts[0] if layouts else None), batch
        return
    number = np.zeros(len(batch), np.int64)
    for layout in layouts[1:]:
        number += (batch.offset > layout.offset) | (
            (batch.offset == layout.offset) & (batch.sequence > layout.sequence)
        )
    for at in np.unique(number).tolist():
        here = number == at
        yield layouts[at], batch if here.all() else rows_of(batch, here)


def mismatch(
    batch: ChangeBatch,
    columns: pa.Schema,
    layout: Layout | None,
    key: tuple[str, ...],
    relation_id: int,
) -> str | None:
    """None if the batch fits; otherwise why it is another table ("": only its columns differ).

    `layout`: the one that the batch should have; without it (a table of format 1), Arrow's types are compared.
    """
    relation = batch.relation
    if batch.unmaskable:
        # It has no values: nothing else may be made of it.
        return batch.unmaskable
    if relation.oid != relation_id:
        return "the table was dropped, and another one created with its name"
    names = [column.name for column in relation.columns]
    known = key if layout is None else layout.key(columns.names, key)
    if reason := unusable(names, known, arrays_of(arrow_schema(relation.columns))):
        return reason
    identity = batch.sent.key
    if identity != set(known):
        # Inserts as well: two of them may have what the table takes for a key.
        return f"its replica identity changed from {_named(known)} to {_named(identity)}"
    if batch.unchanged is not None and batch.unchanged[batch.ops == INSERT].any():
        # An UPDATE as PostgreSQL sends it. The value was never sent, and one of an earlier row may be another.
        return (
            "an UPDATE moved a row into its row filter, without an unchanged TOAST value; with REPLICA IDENTITY FULL"
            " that value is sent"
        )
    if layout is None:
        return None if arrow_schema(relation.columns) == columns else ""
    return None if columns_of(batch.sent) == layout.columns else ""


def unexpected(batch: ChangeBatch, known: Mapping[int, Lsn]) -> set[int]:
    """The partitions with changes in this batch that are not known, or had one before the LSN that is told of them."""
    found = set()
    for offset, number, oid in batch.partitions:
        at = np.flatnonzero((batch.offset == offset) & (batch.sequence == number))
        if len(at) and (oid not in known or batch.commit_lsn[at[0]] < known[oid]):
            found.add(oid)
    return found


def conformed(batch: ChangeBatch, columns: pa.Schema, layout: Layout | None) -> ChangeBatch:
    """The batch, which has this layout, with the table's columns: their defaults, or NULL, in those that it does not have."""
    there: Sequence[int | None]
    if layout is None or layout.there is None:
        there = [at if at < len(batch.columns) else None for at in range(len(columns))]
    else:
        # Behind the source's columns there may be others.
        there = [*layout.there, *[None] * (len(columns) - len(layout.there))]
    if list(there) == list(range(len(batch.columns))) and columns.types == [
        column.type for column in batch.columns
    ]:
        return batch
    count, unchanged = len(batch), batch.unchanged
    if unchanged is not None:
        sent = np.zeros(count, np.bool_)
        unchanged = np.column_stack([sent if at is None else unchanged[:, at] for at in there])

    known = () if layout is None else layout.defaults
    defaults = [*known, *[None] * (len(columns) - len(known))]

    def absent(kind: pa.DataType, default: pa.Scalar | None) -> pa.Array:
        return pa.nulls(count, kind) if default is None else pa.repeat(default, count)

    def arrays(found: list[pa.Array]) -> list[pa.Array]:
        each = zip(there, columns.types, defaults, strict=True)
        return [absent(kind, d) if at is None else found[at].cast(kind) for at, kind, d in each]

    def texts(found: dict[int, pa.Array]) -> dict[int, pa.Array]:
        return {to: found[at] for to, at in enumerate(there) if at in found}

    return replace(
        batch,
        columns=arrays(batch.columns),
        unchanged=unchanged,
        old_columns=None if batch.old_columns is None else arrays(batch.old_columns),
        unrepresentable=texts(batch.unrepresentable),
        old_unrepresentable=texts(batch.old_unrepresentable),
    )


def _named(key: Collection[str]) -> str:
    return f"({', '.join(sorted(key))})" if key else "whole rows"
