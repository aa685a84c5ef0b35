"""Bounds that Parquet and Iceberg have for a column, which leave NaN out, are none for floating-point numbers."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spark_consumers.lake.format.data_files import write_table

ROWS = pa.table(
    {
        "id": pa.array([1, 2], pa.int64()),
        "a.b": pa.array([1.0, float("nan")]),
        "f": pa.array([1.0, None], pa.float32()),
        "tags": pa.array([["x"], None], pa.list_(pa.string())),
        "many": pa.array([[1.0], [float("nan")]], pa.list_(pa.float64())),
    }
)


def test_floating_point_numbers_have_no_bounds_and_other_columns_do(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    write_table(str(path), ROWS)
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    there = {c.path_in_schema: c.statistics is not None for c in columns}
    assert there == {
        "id": True,
        "a.b": False,
        "f": False,
        "tags.list.element": True,
        "many.list.element": False,
    }
