"""Compares a table's changes with the table as it was copied, and reports mismatches.

Runs on the executors, beside `stage`. A change that does not match is never folded: it is reported to the driver
(`SchemaMismatch`), which decides how the table continues (`schema_change`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa

from spark_consumers.decode.entries import ChangeBatch
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
    """From `offset` on, a table's changes have these columns."""

    offset: int
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class SchemaMismatch:
    """The first change in a range of a shape that the table does not have.

    `number` is the range's, `offset` the log's. `reason`: what makes it another table whatever its columns
    are. `columns` and `key` (`key_of`) are those that were sent.
    """

    table: str
    number: int
    offset: int
    columns: tuple[Column, ...]
    key: frozenset[str]
    reason: str = ""


def key_of(relation: Relation) -> frozenset[str]:
    """The columns by which the updates and deletes of a relation name a row; none where they carry all of it.

    With REPLICA IDENTITY FULL every column is flagged, whatever the primary key is: the stream tells neither
    the key nor that it changed, so nothing may depend on one. Such a table is a multiset.
    """
    if relation.replica_identity == "f":
        return frozenset()
    return frozenset(column.name for column in relation.columns if column.is_key)


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


def of_partition_field(added: Collection[str], fields: Collection[str]) -> str | None:
    """Why these columns cannot be added to a table with partition fields of these names; None if they can."""
    taken = next((name for name in added if name in fields), None)
    if taken is None:
        return None
    return f"its column {taken!r} was added, which has the name of one of its partition fields"


def arrays_of(columns: pa.Schema) -> list[str]:
    """The names of the columns that are lists."""
    return [field.name for field in columns if pa.types.is_list(field.type)]


def _folded(name: str) -> str:
    """What Spark compares of a column's name: it ignores case, a character at a time, as Java does."""
    upper = (c.upper() if len(c.upper()) == 1 else c for c in name)
    return "".join(c.lower()[0] for c in upper)


def mismatch(
    batch: ChangeBatch,
    columns: pa.Schema,
    layouts: tuple[Layout, ...],
    key: tuple[str, ...],
    relation_id: int,
) -> str | None:
    """None if the batch fits; otherwise why it is another table ("": only its columns differ).

    `layouts` in the order of their offsets; without any (a table of format 1), Arrow's types are compared.
    """
    relation = batch.relation
    if relation.oid != relation_id:
        return "the table was dropped, and another one created with its name"
    names = [column.name for column in relation.columns]
    if reason := unusable(names, key, arrays_of(arrow_schema(relation.columns))):
        return reason
    identity = key_of(relation)
    if identity != set(key):
        # Inserts as well: two of them may have what the table takes for a key.
        return f"its replica identity changed from {_named(key)} to {_named(identity)}"
    if batch.unchanged is not None and batch.unchanged[batch.ops == INSERT].any():
        # An UPDATE as PostgreSQL sends it. The value was never sent, and one of an earlier row may be another.
        return (
            "an UPDATE moved a row into its row filter, without an unchanged TOAST value; with REPLICA IDENTITY FULL"
            " that value is sent"
        )
    if not layouts:
        return None if arrow_schema(relation.columns) == columns else ""
    # One entry has one shape of a table, so a batch lies on one side of each layout's offset.
    here = [layout for layout in layouts if layout.offset <= int(batch.offset[0])][-1]
    return None if columns_of(relation) == here.columns else ""


def unexpected(batch: ChangeBatch, known: Mapping[int, Lsn]) -> set[int]:
    """The partitions with changes in this batch that are not known, or had one before the LSN that is told of them."""
    found = set()
    for offset, number, oid in batch.partitions:
        at = np.flatnonzero((batch.offset == offset) & (batch.sequence == number))
        if len(at) and (oid not in known or batch.commit_lsn[at[0]] < known[oid]):
            found.add(oid)
    return found


def padded(batch: ChangeBatch, columns: pa.Schema) -> ChangeBatch:
    """The batch with NULL in the columns at the end that the table got later."""
    missing = columns.types[len(batch.columns) :]
    if not missing:
        return batch
    count = len(batch)
    nulls = [pa.nulls(count, kind) for kind in missing]
    unchanged = batch.unchanged
    if unchanged is not None:
        unchanged = np.column_stack([unchanged, np.zeros((count, len(missing)), np.bool_)])
    return replace(
        batch,
        columns=[*batch.columns, *nulls],
        unchanged=unchanged,
        old_columns=None if batch.old_columns is None else [*batch.old_columns, *nulls],
    )


def _named(key: Collection[str]) -> str:
    return f"({', '.join(sorted(key))})" if key else "whole rows"
