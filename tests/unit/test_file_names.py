"""The names of columns in data files: those with which they were created."""

import pyarrow as pa
import pyarrow.parquet as pq

from spark_consumers.lake.delta_log.schema import refusal
from spark_consumers.lake.format.data_files import read_data, write_table
from spark_consumers.lake.format.file_names import first_names, has_others, with_first_names
from spark_consumers.lake.format.iceberg_schema import arrow_schema, by_number


def schema(number, *fields):
    """Iceberg's JSON, from (id, name)."""
    described = [{"id": i, "name": name, "type": "int"} for i, name in fields]
    return {"type": "struct", "schema-id": number, "fields": described}


FIRST = schema(0, (1, "a"), (2, "b"))
RENAMED = schema(1, (1, "a"), (2, "c"))
#: The name that is free again is another column's now, and a dotted name begins with another column's.
AGAIN = schema(2, (2, "c"), (3, "b"), (4, "B-3"), (1, "a"), (5, "a.x"))
ALL = [FIRST, RENAMED, AGAIN]


def test_14_a_column_keeps_the_name_that_it_was_created_with():
    assert first_names([FIRST]) == {1: "a", 2: "b"}
    assert first_names([RENAMED, FIRST]) == {1: "a", 2: "b"}
    # Spark and Parquet's readers may ignore case.
    assert first_names(ALL) == {1: "a", 2: "b", 3: "b-3", 4: "B-3-4", 5: "a.x"}


def test_14_no_two_columns_have_one_name_in_data_files():
    before = schema(0, (1, "a"), (2, "A-3"))
    again = schema(1, (2, "A-3"), (3, "a"), (4, "a-3"))
    found = {1: "a", 2: "A-3", 3: "a-3-3", 4: "a-3-4"}
    assert first_names([before, again]) == found


def test_14_a_data_file_has_these_names_and_is_read_by_the_table_s(tmp_path):
    now = with_first_names(arrow_schema(AGAIN), ALL)
    rows = pa.table([pa.array([n], pa.int32()) for n in (20, 30, 40, 10, 50)], schema=now)
    write_table(str(tmp_path / "f.parquet"), rows)
    file = pq.read_table(tmp_path / "f.parquet")
    assert file.column_names == ["b", "b-3", "B-3-4", "a", "a.x"]
    assert by_number(file, now).to_pylist() == rows.to_pylist()
    found = read_data(tmp_path / "f.parquet")
    assert found.to_pylist() == rows.to_pylist()
    assert found.schema.equals(now, check_metadata=True)
    assert read_data(tmp_path / "f.parquet", ["a", "c", "b"]).to_pylist() == [
        {"a": 10, "c": 20, "b": 30}
    ]


def test_14_a_column_renamed_by_an_earlier_version_is_refused_to_delta_by_name():
    assert not has_others([FIRST])
    assert has_others([FIRST, RENAMED])
    assert not refusal(RENAMED, [FIRST, RENAMED], has_first_names=True)
    assert not refusal(FIRST, [FIRST], has_first_names=False)
    assert "has renamed a column" in refusal(RENAMED, [FIRST, RENAMED], has_first_names=False)
