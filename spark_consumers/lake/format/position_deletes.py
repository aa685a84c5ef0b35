"""Position deletes of version 2 of Iceberg's format: for each data file one Parquet file with the positions of its removed rows.

They say what deletion vectors say, to engines that do not know these, at the cost of larger files. As a vector does, a
data file's next file of positions takes the place of the one before.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.data_files import Stage, read_data, write_table
from spark_consumers.lake.format.file_names import FIELD_ID
from spark_consumers.lake.format.puffin import read_vector
from spark_consumers.lake.format.table_format import Vector
from spark_consumers.lake.store.place import Place, place
from walsender_bridge.errors import CorruptError

#: How the names of these files end.
SUFFIX = ".positions.parquet"
#: The numbers that Iceberg reserves for the two columns.
FILE_FIELD, _POSITION_FIELD = 2147483546, 2147483545
_SCHEMA = pa.schema(
    [
        pa.field("file_path", pa.string(), nullable=False, metadata={FIELD_ID: str(FILE_FIELD)}),
        pa.field("pos", pa.int64(), nullable=False, metadata={FIELD_ID: str(_POSITION_FIELD)}),
    ]
)
#: Files that are written at the same time.
_THREADS = 8


def write_positions(folder: str, prefix: str, removed: Mapping[str, BitMap64]) -> list[Vector]:
    """Write the positions of these data files (paths below the table's `folder`); each file's name begins with `prefix`."""

    def write(numbered: tuple[int, tuple[str, BitMap64]]) -> Vector:
        number, (file, bitmap) = numbered
        name = f"data/{prefix}-{number}{SUFFIX}"
        positions = np.frombuffer(bitmap.to_array(), np.uint64).astype(np.int64)
        paths = pa.repeat(f"{folder}/{file}", len(positions))
        table = pa.table([paths, pa.array(positions)], schema=_SCHEMA)
        made = write_table(f"{folder}/{name}", table)
        return Vector(file, name, 0, 0, made.rows, made.size)

    # Each waits for the disk more than it computes.
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="positions") as pool:
        return list(pool.map(write, enumerate(removed.items())))


def is_of_positions(vector: Vector) -> bool:
    """Whether it is a file of positions, and no deletion vector."""
    return vector.puffin.endswith(SUFFIX)


def is_ours(name: str) -> bool:
    """Whether a file of this name is of Tuskline's: of one data file alone."""
    return name.endswith(SUFFIX) and Stage.of(name) is not None


def read_removed(folder: str | Place, vector: Vector) -> BitMap64:
    """The positions that are removed from a data file, by a vector or by a file of positions. Raises `CorruptError`."""
    if not is_of_positions(vector):
        return read_vector(folder, vector)
    path = place(folder) / vector.puffin
    try:
        table = read_data(path)
    except FileNotFoundError:
        raise _damaged("the file is missing", path) from None
    if table.num_rows != vector.rows:
        what = f"has {table.num_rows} positions, but its manifest records {vector.rows}"
        raise _damaged(what, path)
    return BitMap64(np.asarray(table.column("pos")).astype(np.uint64))


def _damaged(what: str, where: Place) -> CorruptError:
    return CorruptError(what, where=str(where), repair=checksums.REPAIR)
