"""The living rows of data files as new data files, and the row groups of data files.

In version 3 of Iceberg's format every row has an id, which says to readers that derive changes that it is the same row in
another file. A row that is only moved keeps its id and the number of its last change: the new file has both in columns of their own,
since they no longer follow from where the row is (Iceberg specification, Row Lineage).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark_consumers.fold.kept import MARKS, Deleted, with_marks
from spark_consumers.lake.epoch.removal import Rewrite, one, positions
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.arranged_files import write_arranged
from spark_consumers.lake.format.data_files import PartsWriter, as_damage, opened, whole_file
from spark_consumers.lake.format.file_names import FIELD_ID
from spark_consumers.lake.format.iceberg_schema import by_number
from spark_consumers.lake.format.table_format import FileInfo, RowIds
from spark_consumers.lake.index.build import bitmaps_in
from spark_consumers.lake.store.place import place
from walsender_bridge.errors import CorruptError

#: Iceberg's columns for what a row keeps, with the numbers that are reserved for them.
_ID, _UPDATED = "_row_id", "_last_updated_sequence_number"
_KEPT = [
    pa.field(_ID, pa.int64(), metadata={FIELD_ID: "2147483540"}),
    pa.field(_UPDATED, pa.int64(), metadata={FIELD_ID: "2147483539"}),
]


def rewritten(target: Target, rewrite: Rewrite, path: str) -> tuple[FileInfo, ...]:
    """Write the living rows of these data files, which are in one partition; `path` is that of the new file, if it is one.

    Raises `CorruptError`.
    """
    schema = target.file_schema
    marks = None if rewrite.emptied is None else schema.names[-MARKS:]
    if rewrite.row_ids:
        # No table of the lake has columns of these names (`schema_match.unusable`).
        for field in _KEPT:
            schema = schema.append(field)
    (partition,) = {file.partition for file in rewrite.files}
    arrangement = target.arrangement
    living = _living(target, rewrite, schema)
    if marks is not None and rewrite.emptied is not None:
        living = (_marked(rows, marks, rewrite.emptied) for rows in living)
    is_moved = marks is not None and bool(arrangement.fields)
    if is_moved or arrangement.sort or not arrangement.is_current(partition):
        whole = pa.concat_tables([schema.empty_table(), *living])
        columns = [one(whole, name) for name in schema.names]
        return write_arranged(path, columns, schema, arrangement)
    rows = 0
    with (
        whole_file(path) as out,
        PartsWriter(out, schema, arrangement.codec, arrangement.level) as writer,
    ):
        for part in living:
            writer.write(part)
            rows += len(part)
    return (FileInfo(path, rows, place(path).stat().st_size, partition),)


def _marked(rows: pa.Table, marks: Sequence[str], at: Deleted) -> pa.Table:
    """The rows, of which the living ones are deleted: these have changed."""
    places = [rows.schema.get_field_index(name) for name in marks]
    old = [one(rows, name) for name in marks]
    is_living = pc.is_null(old[0])
    for place_, column in zip(places, with_marks(old[0], old[1], at), strict=True):
        rows = rows.set_column(place_, rows.schema.field(place_), column)
    if _UPDATED in rows.column_names:
        # NULL: by this write.
        place_ = rows.schema.get_field_index(_UPDATED)
        column = pc.if_else(is_living, pa.scalar(None, pa.int64()), rows.column(place_))
        rows = rows.set_column(place_, rows.schema.field(place_), column)
    return rows


def _living(target: Target, rewrite: Rewrite, schema: pa.Schema) -> Iterator[pa.Table]:
    """The living rows of the files, a row group at a time."""
    removed = bitmaps_in(rewrite.removed)
    ids = rewrite.row_ids or (None,) * len(rewrite.files)
    for data, known in zip(rewrite.files, ids, strict=True):
        kept = np.ones(data.rows, np.bool_)
        kept[positions(removed[data.name])] = False
        begin = 0
        for file, group, count in row_groups(target, data.name):
            alive = np.flatnonzero(kept[begin : begin + count])
            if len(alive):
                with as_damage(data.name):
                    whole = file.read_row_group(group)
                if known is not None:
                    whole = _with_ids(whole, known, begin)
                yield by_number(whole, schema).take(pa.array(alive))
            begin += count
        if begin != data.rows:
            raise CorruptError(
                f"has {begin} rows, but {data.rows} are recorded",
                where=f"{target.folder}/{data.name}",
                repair=checksums.REPAIR,
            )


def _with_ids(rows: pa.Table, known: RowIds, begin: int) -> pa.Table:
    """The rows of a data file from position `begin` on, with the ids that they have in it."""
    by_place = pa.array(np.arange(begin, begin + len(rows)) + known.first)
    by_file = pa.repeat(pa.scalar(known.sequence, pa.int64()), len(rows))
    for field, inherited in zip(_KEPT, (by_place, by_file), strict=True):
        if field.name not in rows.column_names:
            rows = rows.append_column(field, inherited)
            continue
        at = rows.schema.get_field_index(field.name)
        rows = rows.set_column(at, field, pc.coalesce(rows.column(at), inherited))
    return rows


def row_groups(target: Target, name: str) -> Iterator[tuple[pq.ParquetFile, int, int]]:
    """The row groups of a data file: their numbers, and how many rows each has."""
    path = f"{target.folder}/{name}"
    checksums.check(place(path))
    with as_damage(path):
        file = opened(path)
    with file:
        for number in range(file.num_row_groups):
            yield file, number, file.metadata.row_group(number).num_rows
