"""Which columns of a data file get a dictionary. Pure.

In a row group as small as ours the dictionary of a column of all but unique values, such as a key, holds nearly every value, and
stays below the size at which Parquet's writers give it up. The file is then larger than without, by the indexes, and Iceberg's
reader takes about twice the CPU, since it looks up each value. So the first rows show whether values repeat.
"""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

#: Rows that are looked at.
_SAMPLE = 8192
#: How often a value has to come in these, on average.
_REPEATED = 2


def with_dictionary(rows: pa.Table) -> list[str]:
    """The paths of the columns that get one, as Parquet names them, judged by the first of these rows."""
    return [
        path
        for name in rows.column_names
        for path, values in _leaves(name, rows.column(name).slice(0, _SAMPLE))
        if _repeats(values)
    ]


def _leaves(path: str, values: pa.ChunkedArray) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """The values of a column, or those in its arrays."""
    while pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        path, values = f"{path}.list.element", pc.list_flatten(values)
    if not pa.types.is_nested(values.type):
        yield path, values


def _repeats(values: pa.ChunkedArray) -> bool:
    there = len(values) - values.null_count
    distinct: int = pc.count_distinct(values, mode="only_valid").as_py()
    is_repeated: bool = distinct * _REPEATED <= there
    return is_repeated
