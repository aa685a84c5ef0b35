"""Dictionaries in data files: for columns whose values repeat, and for no others."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_consumers.decode import types
from spark_consumers.lake.format.data_files import PartsWriter, read_data, write_table

_ROWS = 40_000


def dictionaries(path: Path) -> set[str]:
    """The columns of a Parquet file that have one in its first row group."""
    group = pq.read_metadata(path).row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    return {c.path_in_schema for c in columns if c.has_dictionary_page}


def rows_of(begin: int, end: int) -> pa.Table:
    """Rows with keys, and with values that repeat, also in arrays, and with some that are NULL."""
    numbers = range(begin, end)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "kind": [f"kind {n % 50}" for n in numbers],
            "of a few": [n % 9 if n % 100 == 0 else None for n in numbers],
            "tags": [[f"tag {n % 7}", None] for n in numbers],
            "marks": [[n, n + _ROWS] for n in numbers],
            "nothing": pa.nulls(len(numbers), pa.int32()),
        }
    )


def test_columns_whose_values_repeat_have_dictionaries_and_keys_none(tmp_path: Path) -> None:
    rows = rows_of(0, _ROWS)
    write_table(f"{tmp_path}/data.parquet", rows)
    found = dictionaries(tmp_path / "data.parquet")
    assert found == {"kind", "of a few", "tags.list.element", "nothing"}
    assert read_data(tmp_path / "data.parquet").equals(rows)


def test_a_file_that_is_written_in_parts_is_as_one_that_is_written_at_once(tmp_path: Path) -> None:
    with (
        open(tmp_path / "data.parquet", "wb") as file,
        PartsWriter(file, rows_of(0, 1).schema, "zstd", None) as writer,
    ):
        for begin in range(0, _ROWS, 10_000):
            writer.write(rows_of(begin, begin + 10_000))
    assert pq.read_table(tmp_path / "data.parquet").equals(rows_of(0, _ROWS))
    assert pq.read_metadata(tmp_path / "data.parquet").num_row_groups == 4
    write_table(f"{tmp_path}/whole.parquet", rows_of(0, _ROWS))
    assert dictionaries(tmp_path / "data.parquet") == dictionaries(tmp_path / "whole.parquet")


def test_without_rows_a_file_has_its_schema(tmp_path: Path) -> None:
    schema = rows_of(0, 1).schema
    with (
        open(tmp_path / "data.parquet", "wb") as file,
        PartsWriter(file, schema, "zstd", None),
    ):
        pass
    assert pq.read_schema(tmp_path / "data.parquet").names == schema.names


@pytest.mark.parametrize("kind", sorted({*types._ARROW.values(), pa.decimal128(38, 9)}, key=str))
def test_values_of_every_type_can_have_a_dictionary(tmp_path: Path, kind: pa.DataType) -> None:
    write_table(f"{tmp_path}/data.parquet", pa.table({"value": pa.nulls(20, kind)}))
    assert pq.read_table(tmp_path / "data.parquet").column("value").null_count == 20
    leaf = kind.value_type if pa.types.is_list(kind) else kind
    # Parquet has none of booleans.
    assert len(dictionaries(tmp_path / "data.parquet")) == (not pa.types.is_boolean(leaf))
