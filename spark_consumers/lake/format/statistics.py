"""Which columns of a data file have statistics. Pure.

All but floating-point numbers. The bounds that Parquet and Iceberg have for these leave NaN out, which PostgreSQL and Spark order
behind all other values. So a file whose upper bound is below a value may have a row above it: `f > 1e300` would skip that file, and `max(f)`,
which Iceberg answers from bounds alone, would be another value. A file without bounds is read.
"""

import pyarrow as pa


def with_statistics(schema: pa.Schema) -> list[str]:
    """The paths of the columns that have them, as Parquet names them."""
    leaves = (_leaf(field.name, field.type) for field in schema)
    return [path for path, kind in leaves if not pa.types.is_floating(kind)]


def _leaf(path: str, kind: pa.DataType) -> tuple[str, pa.DataType]:
    """The column, or that of its arrays' elements."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        path, kind = f"{path}.list.element", kind.value_type
    return path, kind
