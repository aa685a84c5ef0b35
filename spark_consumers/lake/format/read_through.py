"""Reads an object of a bucket, which has no checksums beside it, and compares it with those that it has in itself."""

from spark_consumers.lake.format import avro, checksums
from spark_consumers.lake.format.data_files import as_damage, opened
from spark_consumers.lake.format.object_seals import metadata_in
from spark_consumers.lake.store.place import Place


def read_through(file: Place) -> None:
    """Raise `CorruptError` for a file of a table whose content is not what was written, as far as it tells itself.

    Vectors are read with the rows that they are of, runs of the row index when it is used.
    """
    if file.name.endswith(".parquet"):
        with as_damage(file), opened(file) as parquet:
            for number in range(parquet.num_row_groups):
                parquet.read_row_group(number)
    elif file.name.endswith(".avro"):
        avro.rows(file)
    elif file.name.endswith(".metadata.json"):
        with checksums.read_whole(file):
            content = file.read_bytes()
        metadata_in(file, content)
