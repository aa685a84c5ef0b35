"""How one table's data files are written: into which partitions, and in which order of rows; and what that makes of rows. Pure.

A partition is a text: the number of its spec, and its values as Iceberg's JSON by the numbers of their fields. The partition of
files without one, in a spec without fields, is the empty text.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_consumers.lake.layout.single_value import json_value
from spark_consumers.lake.layout.transforms import applied
from walsender_bridge.postgres.table_layout import SortField

#: The partition of files that have none.
NO_PARTITION = ""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a partition spec: Iceberg's number for it, its column, its transform with that one's number."""

    id: int
    column: str
    transform: str
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A table's default partition spec and sort order, by Iceberg's numbers, and how Parquet is compressed."""

    spec: int = 0
    fields: tuple[Field, ...] = ()
    order: int = 0
    sort: tuple[SortField, ...] = ()
    codec: str = "zstd"
    level: int | None = None

    def is_current(self, partition: str) -> bool:
        """Whether all rows of a file in this partition would be written into the same one again."""
        return parsed(partition)[0] == self.spec


#: Of a table without partitions and sort fields, with the lake's own options.
PLAIN = Arrangement()


def partition_text(spec: int, values: Iterable[tuple[int, Any]]) -> str:
    """The partition of these values, each with its field's number. NULL is left out."""
    there = {str(number): value for number, value in sorted(values) if value is not None}
    return f"{spec}:{json.dumps(there, separators=(',', ':'))}"


def parsed(partition: str) -> tuple[int, str]:
    """The spec's number, and the values as a JSON object."""
    if partition == NO_PARTITION:
        return 0, "{}"
    spec, _, values = partition.partition(":")
    return int(spec), values


def parts(
    columns: Sequence[pa.Array], names: Sequence[str], arrangement: Arrangement
) -> list[tuple[str, Int64s]]:
    """The partitions of these rows, each with its rows in their order. The same rows give the same parts."""
    count = len(columns[0])
    if not count:
        return []
    by_name = dict(zip(names, columns, strict=True))
    groups, values = _groups(by_name, arrangement.fields, count)
    order = np.lexsort((np.arange(count), *_sort_keys(by_name, arrangement.sort), groups))
    cuts = np.flatnonzero(np.diff(groups[order])) + 1
    return [(_text(arrangement, values, rows[0]), rows) for rows in np.split(order, cuts)]


def _groups(
    columns: dict[str, pa.Array], fields: Sequence[Field], count: int
) -> tuple[Int64s, list[pa.Array]]:
    """A number for the partition of each row, and the values that it consists of."""
    groups = np.zeros(count, np.int64)
    values = []
    for field in fields:
        found = applied(field.transform, field.number, columns[field.column])
        values.append(found)
        codes = np.asarray(found.dictionary_encode(null_encoding="encode").indices)
        codes = codes.astype(np.int64)
        # Numbered again, so that they stay small.
        _, groups = np.unique(groups * (int(codes.max()) + 1) + codes, return_inverse=True)
    return groups.astype(np.int64), values


def _text(arrangement: Arrangement, values: Sequence[pa.Array], row: int) -> str:
    if not arrangement.fields:
        return NO_PARTITION
    found = [
        (field.id, json_value(column[int(row)]))
        for field, column in zip(arrangement.fields, values, strict=True)
    ]
    return partition_text(arrangement.spec, found)


def _sort_keys(columns: dict[str, pa.Array], sort: Sequence[SortField]) -> list[Int64s]:
    """The ranks of the rows in each sort column, the last one first, as `lexsort` takes them."""
    return [_ranks(columns[field.column], field) for field in reversed(sort)]


def _ranks(column: pa.Array, field: SortField) -> Int64s:
    """A number for each row, in the order of the values; equal values have the same."""
    encoded = column.dictionary_encode(null_encoding="encode")
    words = encoded.dictionary
    ranks = np.zeros(len(words), np.int64)
    # Booleans have no order of their own there.
    plain = words.cast(pa.int8()) if pa.types.is_boolean(words.type) else words
    # NaN comes behind all other numbers, and NULL behind NaN.
    ranks[np.asarray(pc.array_sort_indices(plain, null_placement="at_end"))] = np.arange(len(words))
    if field.descending:
        ranks = -ranks
    ends = len(words) + 1
    ranks[np.asarray(pc.is_null(words))] = -ends if field.nulls_first else ends
    found: Int64s = ranks[np.asarray(encoded.indices)]
    return found
