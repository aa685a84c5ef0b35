"""The ids of rows that are moved to another data file."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64

from spark_consumers.lake.epoch.removal import Rewrite
from spark_consumers.lake.epoch.rewritten import rewritten
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.data_files import Stage, write_partial
from spark_consumers.lake.format.table_format import RowIds
from spark_consumers.lake.index.build import bitmaps_table
from spark_consumers.lake.index.run_format import DataFile
from spark_consumers.lake.layout.arrangement import PLAIN, Arrangement
from walsender_bridge.postgres.table_layout import SortField

COLUMNS = pa.schema([("k", pa.int32())])
SORTED = Arrangement(order=1, sort=(SortField("k", descending=True),))


@pytest.mark.parametrize("arrangement", [PLAIN, SORTED], ids=["as they come", "sorted"])
def test_moved_rows_keep_their_ids_and_the_numbers_of_their_changes(tmp_path, arrangement):
    prefix = f"{tmp_path}/data/{Stage(2, 1, 1)}"
    target = Target(
        *("shop.public.t", "public.t", prefix, COLUMNS, COLUMNS, ("k",), 0, 1),
        arrangement=arrangement,
    )
    (tmp_path / "data").mkdir()
    plain = pa.table({"k": pa.array(range(5), pa.int32())})
    # It was written again before, when one of its rows had no id yet.
    moved = {"k": pa.array([7, 8, 9], pa.int32()), "_row_id": [3, None, 1]}
    moved["_last_updated_sequence_number"] = [2, None, 4]
    files = []
    for name, table in (("a", plain), ("b", pa.table(moved)), ("c", plain.slice(3))):
        pq.write_table(table, tmp_path / "data" / name, row_group_size=2)
        files.append(DataFile(f"data/{name}", len(table), 1))
    removed = {"data/a": BitMap64([0, 3]), "data/b": BitMap64([2]), "data/c": BitMap64()}
    places = write_partial(f"{tmp_path}/removed.arrow", bitmaps_table(removed))
    ids = (RowIds(100, 5), RowIds(200, 6), None)
    (made,) = rewritten(target, Rewrite(tuple(files), places, ids), f"{prefix}.parquet")
    rows = pq.read_table(made.path)
    found = sorted(zip(*(column.to_pylist() for column in rows.columns), strict=True), key=repr)
    wanted = [(1, 101, 5), (2, 102, 5), (4, 104, 5), (7, 3, 2), (8, 201, 6), (3, None, None)]
    assert found == sorted([*wanted, (4, None, None)], key=repr)
    numbers = {f.name: int(f.metadata[b"PARQUET:field_id"]) for f in rows.schema if f.metadata}
    assert numbers["_row_id"] == 2147483540
    assert numbers["_last_updated_sequence_number"] == 2147483539
    if arrangement.sort:
        assert rows["k"].to_pylist() == [8, 7, 4, 4, 3, 2, 1]
