"""The row filter of a table, as its manifest has it. Apart from `row_filter`, since executors evaluate a condition, and read no SQL."""

from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.tables.row_filter import RowFilter
from walsender_bridge.postgres.protocol.pgoutput import Column


def filter_of(name: str, table: TableVersion) -> RowFilter | None:
    """The row filter of a table in the lake. Raises `NotSupportedError`, with the table's name, if this version cannot have it."""
    if not table.row_filter:
        return None
    # A reader of a lake without row filters needs nothing that reads SQL.
    from spark_consumers.lake.tables.row_condition import opened

    columns = tuple(Column(*column, is_key=False) for column in table.layout)
    masked = frozenset(mask.column for mask in table.masks)
    return opened(table.row_filter, columns, masked, where=name)
