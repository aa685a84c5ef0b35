"""Rows as data files in a table's arrangement: a file for each partition, its rows sorted."""

from collections.abc import Sequence

import pyarrow as pa

from spark_consumers.lake.format.data_files import numbered, widened, write_table
from spark_consumers.lake.format.table_format import FileInfo
from spark_consumers.lake.layout.arrangement import NO_PARTITION, Arrangement, Int64s, parts


def write_arranged(
    path: str, columns: list[pa.Array], schema: pa.Schema, arrangement: Arrangement
) -> tuple[FileInfo, ...]:
    """Write these rows; none, and no file, without rows.

    `path` is that of the one file of a table without partitions; the files of partitions are numbered beside it. The same
    rows give the same files. `schema` is the table's, perhaps with columns behind it: small integers are widened to it.
    """
    if not len(columns[0]):
        return ()
    columns = widened(columns, schema)
    found: Sequence[tuple[str, Int64s | None]] = [(NO_PARTITION, None)]
    if arrangement.fields or arrangement.sort:
        found = parts(columns, schema.names, arrangement)
    files = []
    for number, (partition, rows) in enumerate(found):
        table = pa.table(columns, schema=schema)
        if rows is not None:
            table = table.take(pa.array(rows))
        name = numbered(path, number) if arrangement.fields else path
        made = write_table(name, table, codec=arrangement.codec, level=arrangement.level)
        files.append(FileInfo(made.path, made.rows, made.size, partition, arrangement.order))
    return tuple(files)
